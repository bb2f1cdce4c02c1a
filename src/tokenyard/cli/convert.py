"""`tokenyard convert`: a copy of a plain checkpoint with its experts quantized."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenyard.cli.options import JSON_FLAG, option
from tokenyard.cli.output import Output, console, say
from tokenyard.cli.tables import show_table
from tokenyard.units import size

if TYPE_CHECKING:
    from tokenyard.checkpoints import Conversion


def convert(
    path: Path = typer.Argument(..., help="A checkpoint with plain weights: its folder, or its file."),
    weights: str = option(
        ..., "The format of the experts' matrices: mxint4, mxfp4, nvfp4, mxfp8, fp8_block128."
    ),
    out: Path = option(..., "The folder to write; it must not be there yet, or be empty."),
    largest_file: int = option(5_000_000_000, "The most bytes that a file of weights may have.", min=1),
    as_json: bool = JSON_FLAG,
) -> None:
    """Quantize the routed experts of a checkpoint; everything else is copied. Other libraries read the result, too."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tokenyard.checkpoints import convert as convert_checkpoint
    from tokenyard.checkpoints import open_checkpoint

    checkpoint = open_checkpoint(path)
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), disable=as_json)
    task = bar.add_task("reading", total=checkpoint.nbytes)

    def progress(what: str, done: int, total: int) -> None:
        bar.start()  # not before, so that errors come without a progress bar
        bar.update(task, description=what, completed=done, total=total)

    try:
        written = convert_checkpoint(checkpoint, weights, out, largest_file=largest_file, progress=progress)
    finally:
        bar.stop()
    seconds = time.monotonic() - started
    document = {"path": str(path), **as_fields(written), "seconds": round(seconds, 3)}
    Output(as_json).deliver(document, lambda: _show(written, seconds))


def as_fields(written: Conversion) -> dict[str, Any]:
    """A conversion as plain values, for JSON."""
    return {
        "out": str(written.folder),
        "weights": written.weights,
        "files": list(written.files),
        "bytes": {"before": written.bytes_before, "after": written.bytes_after},
        "layers": [
            {
                "name": layer.name,
                "num_experts": layer.num_experts,
                "layout": layer.layout,
                "bytes": {"before": layer.bytes_before, "after": layer.bytes_after},
                "relative_error": layer.relative_error,
            }
            for layer in written.layers
        ],
    }


def _show(written: Conversion, seconds: float) -> None:
    from tokenyard.units import count

    show_table(
        ("layer", "layout", "before", "after", "relative error"),
        [
            (
                layer.name,
                layer.layout,
                size(layer.bytes_before),
                size(layer.bytes_after),
                f"{100 * layer.relative_error:.2f}%",
            )
            for layer in written.layers
        ],
        title=f"{written.folder}: experts in {written.weights}, {count(len(written.files), 'file')} of weights",
    )
    say(
        f"{size(written.bytes_before)} became {size(written.bytes_after)}, in {seconds:.1f} s. The error is that of "
        "the weights, |quantized - plain| / |plain|; `tokenyard eval` measures what it costs in answers."
    )
