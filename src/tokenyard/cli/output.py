"""What commands print: tables and messages for people, one JSON document for programs, errors for both."""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from tokenyard.errors import InputError, RankError, TokenyardError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# The exit code of an error that the caller can fix, as for a wrong option.
EXIT_ERROR = 2

# The base class of what a wrong option raises. No module of typer that all versions have exports it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Seconds that other ranks of torchrun wait for rank 0 to report an error. torchrun ends them when rank 0 has ended.
_RANK_0_FIRST = 5.0

# Whether this run of a command has printed its document. There is one: an error that comes later goes to stderr.
_document_printed: ContextVar[bool] = ContextVar("document_printed", default=False)

# Columns of the output where it is not a terminal, but a log or a file.
_WIDTH_ELSEWHERE = 140


def console(*, stderr: bool = False) -> Console:
    """A console on the current streams. Where the output is no terminal, it is wide enough for tables."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not has_a_width(made):
        made.width = max(made.width, _WIDTH_ELSEWHERE)
    return made


def progress_bar(**options: Any) -> Progress:
    """A progress bar on stderr with a description, steps done of all steps, and the time elapsed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console(stderr=True), **options)


def has_a_width(console: Console) -> bool:
    """Whether lines must fit the width of the console: in a terminal, or if COLUMNS is set."""
    return console.is_terminal or "COLUMNS" in os.environ


def say(text: str | Text, *, style: str = "", on: Console | None = None) -> None:
    """Print sentences for people, on stdout or on the console that is given.

    In a terminal a line ends between two words, and what follows is indented as its first line is. In a log or a file
    nothing is broken.
    """
    from rich.text import Text

    out = console() if on is None else on
    said = Text(text) if isinstance(text, str) else text
    if has_a_width(out):
        said = Text("\n").join(
            part for line in said.split("\n", allow_blank=True) for part in _wrapped(line, out)
        )
    out.print(said, style=style, soft_wrap=True)


def _wrapped(line: Text, out: Console) -> Iterator[Text]:
    from rich.text import Text

    indent = len(line.plain) - len(line.plain.lstrip(" "))
    for part in line[indent:].wrap(out, max(1, out.width - indent)):
        part.rstrip()
        yield Text(" " * indent) + part


def print_json(document: Any) -> None:
    """Print the one document of a `--json` run."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    _document_printed.set(True)


def check_out(path: Path | None) -> None:
    """Raise unless a document can be written to this file, if one is given. Called before anything is measured."""
    if path is None:
        return
    try:
        new = not (path.exists() or path.is_symlink())
        path.open("a").close()  # keeps the content of a file that exists
        if new:
            path.unlink()
    except OSError as error:
        raise _not_written(path, error) from error


def save_json(document: Any, path: Path) -> None:
    """Write a document to a file. As this may raise, callers print results that took long before they save them."""
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error) from error


@dataclass(frozen=True)
class Output:
    """Where the results of a command go. Making one raises if the file cannot be written, before anything is run."""

    as_json: bool
    out: Path | None = None

    def __post_init__(self) -> None:
        check_out(self.out)

    def deliver(self, document: Any, show: Callable[[], None]) -> None:
        """Print a document, for programs or for people; then save it, where that is asked for."""
        if self.as_json:
            print_json(document)
        else:
            show()
        if self.out is not None:
            save_json(document, self.out)


def _not_written(path: Path, error: OSError) -> TokenyardError:
    return InputError(
        f"{path} cannot be written ({error.strerror or error})",
        expected="a file in a folder that exists",
        fix="choose another file",
    )


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wrap a command: an error of this package becomes a message and exit code 2, not a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except TokenyardError as error:
            _report(error, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(EXIT_ERROR) from None

    return wrapped


class _ReadableHelp:
    """The texts of `--help`, for classes of typer: flags without a type, paragraphs as wide as the terminal."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        super().__init__(*args, help=help and _without_line_breaks(help), **options)  # type: ignore[call-arg]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # typer's
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""  # else `<bool>`, as if the flag took a value
        return params


def _without_line_breaks(docstring: str) -> str:
    """A docstring with each paragraph in one line."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class Command(_ReadableHelp, TyperCommand):
    """One command."""


class CommandGroup(_ReadableHelp, TyperGroup):
    """Several commands."""


class Commands(CommandGroup):
    """All commands. They also report wrong options as a JSON document, if `--json` is among the arguments."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        _document_printed.set(False)
        as_json = "--json" in args  # parsing takes arguments out of the list
        with _usage_reported(as_json):
            made: Any = super().make_context(info_name, args, parent, **extra)
        made.meta["as_json"] = as_json
        return made

    def invoke(self, ctx: Any) -> Any:
        with _usage_reported(ctx.meta["as_json"]):
            return super().invoke(ctx)


@contextmanager
def _usage_reported(as_json: bool) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if not as_json:
            raise  # typer draws a box on stderr
        _report(_as_ours(error), as_json=True)
        raise typer.Exit(EXIT_ERROR) from None


def _as_ours(error: Any) -> TokenyardError:
    """A wrong option as an error of this package."""
    command = "tokenyard" if error.ctx is None else error.ctx.command_path
    return InputError(
        error.format_message().strip().removesuffix("."),
        expected=f"the commands, options and values of `{command}`",
        fix=f"`{command} --help` lists them",
    )


def _report(error: TokenyardError, *, as_json: bool) -> None:
    """Report an error: as the one document of a `--json` run, else on stderr. Of torchrun's ranks, rank 0 reports it.

    The others wait: if one ended first, torchrun would kill rank 0 before it has reported. If they are not killed
    while they wait, rank 0 does not know of the error, and they report it on stderr.
    """
    leads = "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0"
    if not leads:
        time.sleep(_RANK_0_FIRST)
    if as_json and leads and not _document_printed.get():
        print_json({"error": error_fields(error)})
    else:
        _print_error(error)


def error_fields(error: TokenyardError) -> dict[str, Any]:
    """An error as plain values."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        **{name: getattr(error, name) for name in ("found", "expected", "fix", "layer", "rank")},
        "alternatives": [
            {name: None if value is None else str(value) for name, value in alternative.changes.items()}
            for alternative in error.alternatives
        ],
    }


def _print_error(error: TokenyardError) -> None:
    import traceback

    cause, out = error.__cause__, console(stderr=True)
    if isinstance(error, RankError) and cause is not None and not isinstance(cause, TokenyardError):
        # The traceback of the cause shows where it was raised.
        trace = "".join(traceback.format_exception(cause)).rstrip()
        out.print(trace, style="red", markup=False, soft_wrap=True)
    lines = [f"error: {error.headline}", f"  expected: {error.expected}"]
    if error.alternatives:
        lines += ["  one of these works:", *(f"    {alternative}" for alternative in error.alternatives)]
    else:
        lines.append(f"  fix: {error.fix}")
    say("\n".join(lines), style="red", on=out)
