"""What all benchmarks do with their figures: measure step by step, save, print and draw; and `tokenyard bench show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenyard.cli.machine import provenance
from tokenyard.cli.options import option
from tokenyard.cli.output import Output, console, reported, save_json, say
from tokenyard.cli.tables import show_table
from tokenyard.errors import InputError
from tokenyard_lab.cli.options import PLOT_FILE

if TYPE_CHECKING:
    from tokenyard_lab.bench.records import Document
    from tokenyard_lab.bench.runs import Run

# The exit code where figures are missing because they failed.
EXIT_FAILED = 1


def run_benchmark(run: Run, output: Output, plot: Path | None) -> None:
    """Measure step by step, with progress on stderr; then print, save and draw the figures."""
    from tokenyard_lab.bench.records import figure

    document, steps = run.document, run.steps
    document.provenance = provenance()
    errors, found = console(stderr=True), iter(run.figures)
    for number, step in enumerate(steps, start=1):
        message = f"{document.benchmark}: measuring {step} ({number} of {len(steps)})"
        if not errors.is_terminal:
            say(message, on=errors)
        with errors.status(message):
            records = next(found)
        document.results += records
        for record in records:
            took = record.note if record.ours is None else f"{figure(record.ours.median)} {document.unit}"
            say(f"  {record}: {took}", on=errors)
        if output.out is not None:  # after every step, so that figures survive if the machine goes away
            save_json(document.as_dict(), output.out)
    run.finish()
    output.deliver(document.as_dict(), lambda: print_document(document))
    if plot is not None:
        _draw(document, plot)
    if document.failed():
        raise typer.Exit(EXIT_FAILED)


def _draw(document: Document, path: Path) -> None:
    from tokenyard_lab.plots import draw_figures

    draw_figures(document, path)


def print_document(document: Document) -> None:
    """Print the figures of a benchmark as a table."""
    cells = document.table()
    rows = zip(*cells.values(), strict=True)
    figures = [name for name, found in cells.items() if all(cell[:1].isdigit() for cell in found if cell)]
    show_table(list(cells), rows, right=figures, less_needed=document.less_needed, title=document.title)
    say("\n".join(document.summary()))


@reported
def show(
    file: Path = typer.Argument(..., help="A file that a benchmark or `tokenyard balance` wrote (--out)."),
    markdown: bool = option(False, "Print a table in Markdown.", "--markdown"),
    plot: Path | None = PLOT_FILE,
) -> None:
    """Show figures that a benchmark has saved, or draw what `tokenyard balance` has saved."""
    from tokenyard_lab.bench.records import Document
    from tokenyard_lab.markdown import markdown_table
    from tokenyard_lab.plots import check_picture, draw_balance

    found = _read(file)
    check_picture(plot)
    if isinstance(found, dict) and found.get("command") == "balance":
        if plot is None or markdown:
            raise InputError(
                f"{file}: a forecast of `tokenyard balance`",
                expected="a file to draw it into",
                fix="pass --plot, without --markdown",
            )
        draw_balance(found, plot)
        return
    document = Document.from_dict(found, str(file))
    if plot is not None:
        _draw(document, plot)
    if markdown:
        cells = document.table()
        typer.echo(markdown_table(tuple(cells), zip(*cells.values(), strict=True)))
    else:
        print_document(document)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error})",
            expected="a JSON document",
            fix="pass a file that --out wrote",
        ) from error
