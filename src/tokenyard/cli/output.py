"""What commands print: tables and messages for people, one JSON document for programs, errors for both."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tokenyard.errors import TokenyardError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# The exit code of an error that the caller can mend, as for a wrong option.
EXIT_ERROR = 2

# `reported` looks for this parameter: a command that has it is called `as_json`.
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
]


def console(*, stderr: bool = False) -> Console:
    """A console on the streams of this moment. Wide enough for tables where the output is no terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=max(made.width, 140))


def print_json(document: Any) -> None:
    """The one document of a `--json` run."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def save_json(document: Any, path: Path) -> None:
    """Write a document to a file."""
    from tokenyard.errors import InputError

    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error})",
            expected="a file in a folder that exists",
            fix="choose another --out",
        ) from error


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A command whose errors of ours are a message and exit code 2, not a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        from tokenyard.errors import TokenyardError

        try:
            return command(*args, **kwargs)
        except TokenyardError as error:
            if kwargs.get("as_json"):
                print_json({"error": error_fields(error)})
            else:
                _print_error(error)
            raise typer.Exit(EXIT_ERROR) from None

    return wrapped


def error_fields(error: TokenyardError) -> dict[str, Any]:
    """An error as plain values."""
    from tokenyard.errors import PlanError

    plain: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "found": error.found,
        "expected": error.expected,
        "fix": error.fix,
        "layer": error.layer,
        "rank": error.rank,
    }
    if isinstance(error, PlanError):
        plain["alternatives"] = [
            {name: None if value is None else str(value) for name, value in alternative.changes.items()}
            for alternative in error.alternatives
        ]
    return plain


def _print_error(error: TokenyardError) -> None:
    from tokenyard.errors import PlanError

    alternatives = error.alternatives if isinstance(error, PlanError) else ()
    where = [f"layer {error.layer!r}"] if error.layer is not None else []
    where += [f"rank {error.rank}"] if error.rank is not None else []
    lines = [": ".join(["error", *([", ".join(where)] if where else []), error.found])]
    lines.append(f"  expected: {error.expected}")
    if alternatives:
        lines += ["  one of these works:", *(f"    {alternative}" for alternative in alternatives)]
    else:
        lines.append(f"  fix: {error.fix}")
    console(stderr=True).print("\n".join(lines), style="red", markup=False, soft_wrap=True)
