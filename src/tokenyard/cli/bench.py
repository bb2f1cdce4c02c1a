"""`tokenyard bench`: measurements, each beside its floor, kept with their provenance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenyard.cli.bench_cuda import show
from tokenyard.cli.bench_cuts import cuts
from tokenyard.cli.bench_layer import layer
from tokenyard.cli.bench_transformers import transformers
from tokenyard.cli.output import JsonFlag, console, print_json, reported, save_json
from tokenyard.cli.tables import print_table

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
    from tokenyard.lab.bench.encode import measure_encode

    def measure(num_tokens: int) -> list[dict[str, Any]]:
        rows = measure_encode(num_tokens, hidden_size, seconds)
        return [{"num_tokens": num_tokens, "hidden_size": hidden_size, **row} for row in rows]

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "rows": lambda row: f"{row['num_tokens']} × {row['hidden_size']}",
        "format": lambda row: str(row["format"]),
        "ours, MB/s of bf16": lambda row: f"{row['MB_per_s']:.0f}",
        "quartiles": lambda row: f"{row['MB_per_s_low']:.0f} to {row['MB_per_s_high']:.0f}",
        "ceiling (copy), MB/s": lambda row: f"{row['ceiling_MB_per_s']:.0f}",
        "ceiling / ours": lambda row: f"{row['ratio']:.1f} ×",
    }
    _run("encode", tokens, measure, columns, out, as_json)


@app.command()
@reported
def experts(
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=1, help="Tokens; may be given several times.", show_default="512"),
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, show_default="2048")] = None,
    intermediate_size: Annotated[int | None, typer.Option(min=1, show_default="1024")] = None,
    num_experts: Annotated[int | None, typer.Option(min=1, show_default="64")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, show_default="8")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each.", show_default="7; cuda: 15")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="The format of the weights, bf16 or quantized; may be given several times.",
            show_default="bf16; cuda: all of the cells",
        ),
    ] = None,
    cells: Annotated[
        str | None,
        typer.Option(help="With --device cuda: A, B and C (several with commas).", show_default="all"),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu: grouped experts. cuda: fused experts, on the shapes of --cells.")
    ] = "cpu",
    out: OutFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="With --device cuda: draw the figures into this file (needs matplotlib)."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast experts compute, beside a peer and the floor.

    On a CPU the peer of bf16 weights is Transformers; that of quantized ones decodes them first and calls F.grouped_mm.
    On a GPU it is F.grouped_mm or its fp8 sister, and the best that was measured before.
    """
    shape_options = {
        "--tokens": tokens,
        "--hidden-size": hidden_size,
        "--intermediate-size": intermediate_size,
        "--num-experts": num_experts,
        "--top-k": top_k,
    }
    if device == "cuda":
        from tokenyard.cli.bench_experts_cuda import cases_of, experts_on_gpu
        from tokenyard.lab.bench.expert_figures import grid
        from tokenyard.lab.bench.experts_cuda import ROUNDS

        _check_cell_options(shape_options, rounds)
        experts_on_gpu(
            grid(cases_of(cells), weights or ()),
            rounds=rounds or ROUNDS,
            out=out,
            plot=plot,
            as_json=as_json,
        )
        return
    _check_is_cpu(device, {"--cells": cells, "--plot": plot})
    _experts_on_cpu(
        tokens or [512],
        hidden_size or 2048,
        intermediate_size or 1024,
        num_experts or 64,
        top_k or 8,
        rounds or 7,
        weights or ["bf16"],
        out,
        as_json,
    )


def _check_cell_options(options: dict[str, Any], rounds: int | None) -> None:
    from tokenyard.errors import InputError

    if given := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"{given[0]} with --device cuda",
            expected="the shapes of the cells, which are those that figures are known for",
            fix="choose them with --cells and --weights",
        )
    if rounds == 1:
        raise InputError("rounds is 1", expected="at least 2, to have a spread", fix="pass --rounds 2")


def _check_is_cpu(device: str, options: dict[str, Any]) -> None:
    from tokenyard.errors import InputError

    if device != "cpu":
        raise InputError(
            f"--device {device}", expected="cpu or cuda", fix="`tokenyard doctor` says what is here"
        )
    if given := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"{given[0]} without --device cuda",
            expected=f"{given[0]} for the cells of the GPU",
            fix="add --device cuda, or leave it out",
        )


def _experts_on_cpu(
    tokens: list[int],
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    rounds: int,
    weights: list[str],
    out: Path | None,
    as_json: bool,
) -> None:
    from tokenyard.errors import InputError
    from tokenyard.formats import weight_format
    from tokenyard.lab.bench.experts import measure_experts
    from tokenyard.lab.bench.quantized_experts import measure_quantized_experts

    if top_k > num_experts:
        raise InputError(
            f"--top-k {top_k} of --num-experts {num_experts}",
            expected=f"a top-k from 1 to {num_experts}",
            fix="choose fewer experts per token, or more experts",
        )
    for name in weights:
        if name != "bf16" and not weight_format(name).quantized:
            raise InputError(
                f"--weights {name} on --device cpu",
                expected="bf16, or a quantized format",
                fix="measure bf16",
            )

    def measure(num_tokens: int) -> list[dict[str, Any]]:
        shape: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_experts": num_experts,
            "top_k": top_k,
            "rounds": rounds,
        }
        return [
            measure_experts(num_tokens, device="cpu", **shape)
            if name == "bf16"
            else measure_quantized_experts(num_tokens, weights=name, **shape)
            for name in weights
        ]

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "tokens": lambda row: str(row["num_tokens"]),
        "shape": lambda row: (
            f"H {row['hidden_size']}, I {row['intermediate_size']}, E {row['num_experts']}, K {row['top_k']}"
        ),
        "weights": lambda row: str(row.get("weights", "bf16")),
        "ours, ms": lambda row: f"{row['ours_ms']:.2f}",
        "peer, ms": lambda row: f"{row.get('decoded_first_ms', row.get('transformers_ms')):.2f}",
        "floor, ms": lambda row: f"{row['floor_ms']:.2f}",
        "peer / ours": lambda row: (
            f"{row['ratio']:.2f} × ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        ),
        "ours / floor": lambda row: f"{row['over_floor']:.2f} ×",
    }
    _run("experts", tokens, measure, columns, out, as_json)


@app.command()
@reported
def dispatch(
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=64,
            help="How many ranks: processes, or virtual ones on a GPU.",
            show_default="4; cuda: 4 and 8",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens of each rank; may be given several times.",
            show_default="512; cuda: 16 to 4096",
        ),
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, show_default="2048; cuda: 7168")] = None,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    num_experts: Annotated[int | None, typer.Option(min=1, show_default="64; cuda: 256")] = None,
    wire: Annotated[
        list[str] | None,
        typer.Option(
            help="The format on the way out; may be given several times.",
            show_default="bf16 and mxfp8; cuda: five",
        ),
    ] = None,
    combine_wire: Annotated[str, typer.Option(help="The format on the way back.")] = "bf16",
    exchange: Annotated[
        list[str] | None, typer.Option(help="Only this exchange; may be given several times.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Round trips of each; on a GPU repeats, of many replays each.",
            show_default="30; cuda: 15",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu: processes. cuda: virtual ranks on one GPU, through one_sided's kernels.")
    ] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="With --device cuda: fewer cells and repeats.")
    ] = False,
    paranoid: Annotated[
        bool, typer.Option("--paranoid", help="Every exchange a second time, watching itself; on the CPU.")
    ] = False,
    out: OutFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this file (needs matplotlib).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast rows travel out and back, beside the floor and a peer: bare gloo, or FlashInfer on a GPU."""
    if device != "cpu":
        _check_cuda_options(device, exchange, paranoid)
        from tokenyard.cli.bench_cuda import dispatch_on_gpu
        from tokenyard.lab.bench.cuda_figures import Shape, grid
        from tokenyard.lab.bench.dispatch_cuda import QUICK_REPEATS, QUICK_REPLAYS, REPEATS, REPLAYS

        dispatch_on_gpu(
            grid(ranks or (), tokens or (), wire or (), quick=quick),
            Shape(
                hidden_size=hidden_size or Shape.hidden_size,
                top_k=top_k,
                num_experts=num_experts or Shape.num_experts,
                combine_wire=combine_wire,
            ),
            repeats=rounds or (QUICK_REPEATS if quick else REPEATS),
            replays=QUICK_REPLAYS if quick else REPLAYS,
            out=out,
            plot=plot,
            as_json=as_json,
        )
        return
    _check_cpu_options(ranks, quick)
    _dispatch_between_processes(
        (ranks or [4])[0],
        tokens or [512],
        hidden_size or 2048,
        top_k,
        num_experts or 64,
        wire or ["bf16", "mxfp8"],
        combine_wire,
        exchange,
        rounds or 30,
        paranoid,
        out,
        plot,
        as_json,
    )


def _check_cuda_options(device: str, exchange: list[str] | None, paranoid: bool) -> None:
    from tokenyard.errors import InputError
    from tokenyard.exchange import resolve

    if device != "cuda":
        raise InputError(
            f"--device {device}", expected="cpu or cuda", fix="`tokenyard doctor` says what is here"
        )
    if other := [name for name in exchange or () if resolve(name).name != "one_sided"]:
        raise InputError(
            f"--exchange {other[0]} with --device cuda",
            expected="one_sided, whose kernels are measured there",
            fix="leave out --exchange, or measure on the CPU",
        )
    if paranoid:
        raise InputError(
            "--paranoid with --device cuda",
            expected="exchanges that can watch themselves: the kernels of one_sided cannot",
            fix="measure on the CPU",
        )


def _check_cpu_options(ranks: list[int] | None, quick: bool) -> None:
    from tokenyard.errors import InputError

    if len(ranks or ()) > 1:
        raise InputError(
            f"--ranks is given {len(ranks or ())} times",
            expected="one number of processes; virtual ranks on a GPU may be several",
            fix="measure one after the other, or add --device cuda",
        )
    if quick:
        raise InputError(
            "--quick without --device cuda",
            expected="--quick for the grid of the GPU",
            fix="choose fewer --tokens, --wire and --rounds",
        )


def _dispatch_between_processes(
    ranks: int,
    tokens: list[int],
    hidden_size: int,
    top_k: int,
    num_experts: int,
    wire: list[str],
    combine_wire: str,
    exchange: list[str] | None,
    rounds: int,
    paranoid: bool,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from tokenyard.group.forkserver import start_forkserver
    from tokenyard.lab.bench.dispatch import measure_dispatch
    from tokenyard.lab.bench.picture import check_picture, draw_dispatch
    from tokenyard.units import size

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
                paranoid=paranoid,
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
        "a token": lambda row: (
            f"{size(row['dispatch_bytes_per_token'])} + {size(row['combine_bytes_per_token'])}"
        ),
    }
    if paranoid:
        columns["watched"] = lambda row: f"{row['paranoid_ms']:.1f}"
        columns["watched / ours"] = lambda row: _with_spread(row, "paranoid_ratio")
    title = (
        f"{ranks} processes, H {hidden_size}, K {top_k}, E {num_experts}, {combine_wire} back: "
        "ms and ratios, medians (quartiles)"
    )
    document = _run(
        "dispatch",
        tokens,
        measure,
        columns,
        out,
        as_json,
        title,
        ("a token", "out + back", "encode", "bare gloo"),
    )
    if plot is not None:
        draw_dispatch(document, plot)


def _with_spread(row: dict[str, Any], name: str) -> str:
    median, low, high = (
        f"{row[key]:.2f}" if row[key] < 10 else f"{row[key]:.1f}"
        for key in (name, f"{name}_low", f"{name}_high")
    )
    return f"{median} ({low}–{high})"


def _run(
    name: str,
    tokens: list[int],
    measure: Callable[[int], list[dict[str, Any]]],
    columns: dict[str, Callable[[dict[str, Any]], str]],
    out: Path | None,
    as_json: bool,
    what: str = "",
    less_needed: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure for each number of tokens, with a sign of life on stderr; then print, and save if asked."""
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
    if as_json:
        print_json(document)
    else:
        _print_figures(name, document, columns, what, less_needed)
    if out is not None:
        save_json(document, out)
    return document


def _print_figures(
    name: str,
    document: dict[str, Any],
    columns: dict[str, Callable[[dict[str, Any]], str]],
    what: str,
    less_needed: Sequence[str],
) -> None:
    from rich.table import Table

    title = ", ".join([name, *([what] if what else []), document["hardware"]["cpu"]])
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in document["results"]:
        table.add_row(*(cell(row) for cell in columns.values()))
    print_table(table, less_needed=less_needed)


for _command in (layer, transformers, cuts, show):
    app.command()(_command)
