"""`tokenyard bench`: measurements, each beside its floor, kept with their provenance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenyard.cli.output import JsonFlag, console, print_json, reported, save_json

app = typer.Typer(help="Measure, beside the floor.", no_args_is_help=True)

OutFile = Annotated[
    Path | None, typer.Option("--out", help="Save the figures, with date, hardware, versions and commit.")
]
Tokens = Annotated[list[int], typer.Option("--tokens", min=1, help="Tokens; may be given several times.")]


@app.command()
@reported
def encode(
    tokens: Tokens = [512],  # noqa: B006
    hidden_size: Annotated[int, typer.Option(min=1, help="The width of a row.")] = 7168,
    seconds: Annotated[float, typer.Option(min=0.0, max=600.0, help="About as long, for each format.")] = 1.0,
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast one thread encodes rows, per format."""
    from tokenyard.bench.encode import measure_encode

    def measure(num_tokens: int) -> list[dict[str, Any]]:
        rows = measure_encode(num_tokens, hidden_size, seconds)
        return [{"num_tokens": num_tokens, "hidden_size": hidden_size, **row} for row in rows]

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "rows": lambda row: f"{row['num_tokens']} × {row['hidden_size']}",
        "format": lambda row: str(row["format"]),
        "ours, MB/s of bf16": lambda row: f"{row['MB_per_s']:.0f}",
        "quartiles": lambda row: f"{row['MB_per_s_low']:.0f} to {row['MB_per_s_high']:.0f}",
        "floor (copy), MB/s": lambda row: f"{row['floor_MB_per_s']:.0f}",
        "floor / ours": lambda row: f"{row['ratio']:.1f} ×",
    }
    _run("encode", tokens, measure, columns, out, as_json)


@app.command()
@reported
def experts(
    tokens: Tokens = [512],  # noqa: B006
    hidden_size: Annotated[int, typer.Option(min=1)] = 2048,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 1024,
    num_experts: Annotated[int, typer.Option(min=1)] = 64,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: OutFile = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast experts compute, beside Transformers' and the floor."""
    from tokenyard.bench.experts import measure_experts
    from tokenyard.errors import InputError

    if top_k > num_experts:
        raise InputError(
            f"--top-k {top_k} of --num-experts {num_experts}",
            expected=f"a top-k from 1 to {num_experts}",
            fix="choose fewer experts per token, or more experts",
        )
    _check_device(device)

    def measure(num_tokens: int) -> list[dict[str, Any]]:
        row = measure_experts(
            num_tokens,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            rounds=rounds,
            device=device,
        )
        return [row]

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "tokens": lambda row: str(row["num_tokens"]),
        "shape": lambda row: (
            f"H {row['hidden_size']}, I {row['intermediate_size']}, E {row['num_experts']}, K {row['top_k']}"
        ),
        "ours, ms": lambda row: f"{row['ours_ms']:.2f}",
        "Transformers, ms": lambda row: f"{row['transformers_ms']:.2f}",
        "floor, ms": lambda row: f"{row['floor_ms']:.2f}",
        "Transformers / ours": lambda row: (
            f"{row['ratio']:.2f} × ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        ),
        "ours / floor": lambda row: f"{row['over_floor']:.2f} ×",
    }
    _run("experts", tokens, measure, columns, out, as_json)


@app.command()
@reported
def dispatch(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="How many ranks, each a process.")] = 4,
    tokens: Tokens = [512],  # noqa: B006
    hidden_size: Annotated[int, typer.Option(min=1)] = 2048,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    num_experts: Annotated[int, typer.Option(min=1)] = 64,
    wire: Annotated[
        list[str], typer.Option(help="The format on the way out; may be given several times.")
    ] = ["bf16", "mxfp8"],  # noqa: B006
    combine_wire: Annotated[str, typer.Option(help="The format on the way back.")] = "bf16",
    exchange: Annotated[
        list[str] | None, typer.Option(help="Only this exchange; may be given several times.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Round trips of each.")] = 30,
    out: OutFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this file (needs matplotlib).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast rows travel out and back, beside bare gloo and the floor."""
    from tokenyard.bench.dispatch import measure_dispatch
    from tokenyard.bench.picture import check_picture, draw_dispatch
    from tokenyard.forkserver import start_forkserver

    if plot is not None:
        check_picture(plot)
    start_forkserver()  # it loads torch while this process prepares

    def measure(num_tokens: int) -> list[dict[str, Any]]:
        return [
            row
            for name in wire
            for row in measure_dispatch(
                ranks,
                num_tokens,
                hidden_size,
                top_k,
                num_experts,
                name,
                exchange,
                rounds,
                combine_wire=combine_wire,
            )
        ]

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "tokens": lambda row: str(row["num_tokens"]),
        "wire": lambda row: row["wire"],
        "exchange": lambda row: row["exchange"],
        "ours": lambda row: f"{row['ms']:.1f}",
        "out + back": lambda row: f"{row['dispatch_ms']:.1f} + {row['combine_ms']:.1f}",
        "bare gloo": lambda row: f"{row['gloo_ms']:.1f}",
        "floor": lambda row: f"{row['floor_ms']:.1f}",
        "gloo / ours": lambda row: _with_spread(row, "gloo_ratio"),
        "ours / floor": lambda row: _with_spread(row, "floor_ratio"),
        "encode": lambda row: f"{row['encode_ms']:.1f}",
        "KB a token": lambda row: (
            f"{row['dispatch_bytes_per_token'] / 1e3:.1f} + {row['combine_bytes_per_token'] / 1e3:.1f}"
        ),
    }
    title = (
        f"{ranks} processes, H {hidden_size}, K {top_k}, E {num_experts}, {combine_wire} back: "
        "ms and ratios, medians (quartiles)"
    )
    document = _run("dispatch", tokens, measure, columns, out, as_json, title)
    if plot is not None:
        draw_dispatch(document, plot)


def _with_spread(row: dict[str, Any], name: str) -> str:
    median, low, high = (
        f"{row[key]:.2f}" if row[key] < 10 else f"{row[key]:.1f}"
        for key in (name, f"{name}_low", f"{name}_high")
    )
    return f"{median} ({low}–{high})"


def _check_device(device: str) -> None:
    import torch

    from tokenyard.errors import InputError

    known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if device not in known:
        raise InputError(
            f"--device {device}", expected=" or ".join(known), fix="`tokenyard doctor` says what is here"
        )


def _run(
    name: str,
    tokens: list[int],
    measure: Callable[[int], list[dict[str, Any]]],
    columns: dict[str, Callable[[dict[str, Any]], str]],
    out: Path | None,
    as_json: bool,
    what: str = "",
) -> dict[str, Any]:
    """Measure for each number of tokens, with a sign of life on stderr; then print, and save if asked."""
    from rich.table import Table

    from tokenyard.cli.machine import provenance

    document: dict[str, Any] = {"benchmark": name, **provenance(), "results": []}
    if out is not None:
        save_json(document, out)  # a file that cannot be written is found out before the time is spent
    errors = console(stderr=True)
    for number, count in enumerate(tokens, start=1):
        message = f"{name}: measuring {count} tokens ({number} of {len(tokens)})"
        if not errors.is_terminal:
            errors.print(message)
        with errors.status(message):
            document["results"] += measure(count)
    if out is not None:
        save_json(document, out)
    if as_json:
        print_json(document)
        return document
    title = ", ".join([name, *([what] if what else []), document["hardware"]["cpu"]])
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in document["results"]:
        table.add_row(*(cell(row) for cell in columns.values()))
    console().print(table)
    return document
