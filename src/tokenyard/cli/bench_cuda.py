"""`tokenyard bench dispatch --device cuda`: cells on a GPU, their table; and `bench show`, for all GPU benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tokenyard.cli.output import console, print_json, reported, save_json
from tokenyard.cli.tables import print_table

if TYPE_CHECKING:
    from tokenyard.lab.bench.cuda_figures import Cell, Shape

# The exit code where cells have no time because they failed.
EXIT_FAILED = 1


def dispatch_on_gpu(
    cells: list[Cell],
    shape: Shape,
    *,
    repeats: int,
    replays: int,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure the cells on the current GPU; print, save and draw."""
    import torch

    from tokenyard.cli.machine import provenance
    from tokenyard.lab.bench import dispatch_cuda as bench
    from tokenyard.lab.bench.cuda_figures import BENCHMARK
    from tokenyard.lab.bench.picture import check_picture

    bench.check_cells(cells, shape, repeats)
    if plot is not None:
        check_picture(plot)
    device = bench.check_gpu("leave out --device to measure on the CPU")
    gpu = torch.cuda.get_device_name(device)
    document: dict[str, Any] = {
        "benchmark": BENCHMARK,
        **provenance(),
        "gpu": gpu,
        "shape": asdict(shape),
        "repeats": repeats,
        "replays": replays,
    }
    if out is not None:
        save_json(document, out)  # a file that cannot be written is found out before the time is spent
    timer = bench.graph_timer(device, repeats, replays)
    copy_bytes_per_us = bench.measure_copy(device, timer)
    rows: list[dict[str, Any]] = []
    document |= {"copy_TB_per_s": copy_bytes_per_us / 1e6, "peer": None, "results": rows}
    errors = console(stderr=True)
    measured = bench.measure_cells(
        cells, shape, device=device, gpu=gpu, timer=timer, copy_bytes_per_us=copy_bytes_per_us
    )
    for number, (cell, row) in enumerate(zip(cells, measured, strict=True), start=1):
        rows.append(row)
        took = f"{row['us']:.1f} µs" if row["us"] is not None else row["note"]
        errors.print(f"{number} of {len(cells)}: {cell}: {took}", markup=False)
        if out is not None:
            save_json(document, out)  # as far as it goes: a GPU that is taken away takes no figures with it
    document["peer"] = bench.measure_peers(rows, shape, device=device, timer=timer)
    if out is not None:
        save_json(document, out)
    conclude(document, as_json=as_json, plot=plot, failed=bool(bench.missed(rows)))


def conclude(document: dict[str, Any], *, as_json: bool, plot: Path | None, failed: bool) -> None:
    """Show what a benchmark on a GPU has found, in the ways that were asked for."""
    way = _ways_to_show()[document["benchmark"]]
    if as_json:
        print_json(document)
    else:
        way.print(document)
    if plot is not None:
        way.draw(document, plot)
    if failed:
        raise typer.Exit(EXIT_FAILED)


@reported
def show(
    file: Annotated[Path, typer.Argument(help="A file that a benchmark on a GPU wrote (--out).")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table for a page.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this file (needs matplotlib).")
    ] = None,
) -> None:
    """Show figures of a GPU that were saved: of dispatch, experts or layer."""
    from tokenyard.lab.bench.picture import check_picture

    document = _read(file)
    way = _ways_to_show()[document["benchmark"]]
    if plot is not None:
        check_picture(plot)
        way.draw(document, plot)
    if markdown:
        typer.echo(way.render_markdown(document))
    else:
        way.print(document)


class _WayToShow(NamedTuple):
    """How the documents of one benchmark are shown."""

    print: Callable[[dict[str, Any]], None]
    render_markdown: Callable[[dict[str, Any]], str]
    draw: Callable[[dict[str, Any], Path], None]


def _ways_to_show() -> dict[str, _WayToShow]:
    from tokenyard.cli.bench_experts_cuda import print_experts
    from tokenyard.cli.bench_layer import print_layer
    from tokenyard.lab.bench import cuda_figures, expert_figures, layer_figures
    from tokenyard.lab.bench.picture import draw_dispatch_cuda
    from tokenyard.lab.bench.picture_experts import draw_experts, draw_layer

    return {
        cuda_figures.BENCHMARK: _WayToShow(print_dispatch, cuda_figures.render_markdown, draw_dispatch_cuda),
        expert_figures.BENCHMARK: _WayToShow(print_experts, expert_figures.render_markdown, draw_experts),
        layer_figures.BENCHMARK: _WayToShow(print_layer, layer_figures.render_markdown, draw_layer),
    }


def _read(file: Path) -> dict[str, Any]:
    from tokenyard.errors import InputError

    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error})",
            expected="a JSON document",
            fix="pass a file that --out wrote",
        ) from error
    found = document.get("benchmark") if isinstance(document, dict) else None
    known = _ways_to_show()
    if found not in known or "results" not in document:
        raise InputError(
            f"{file} holds {f'the benchmark {found!r}' if found else 'no finished benchmark'}",
            expected=f"the benchmark {', '.join(map(repr, known))}, with results",
            fix="pass a file that `tokenyard bench dispatch|experts|layer --device cuda --out` wrote",
        )
    return document


def print_dispatch(document: dict[str, Any]) -> None:
    """The figures, for people."""
    from rich.table import Table

    from tokenyard.lab.bench.cuda_figures import ALL_RANKS, PER_RANK, number
    from tokenyard.lab.bench.dispatch_cuda import missed

    rows, shape = document["results"], document["shape"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": lambda row: row["operation"] + ("" if row["launch"] == ALL_RANKS else " *"),
        "W": lambda row: str(row["world"]),
        "T": lambda row: str(row["num_tokens"]),
        "wire": lambda row: row["wire"],
        "ours": lambda row: number(row["us"]) or "failed",
        "quartiles": lambda row: f"{number(row['us_low'])}–{number(row['us_high'])}" if row["us"] else "",
        "floor": lambda row: number(row["floor_us"]),
        "ours / floor": lambda row: f"{row['floor_ratio']:.2f}" if row["floor_ratio"] else "",
        "target": lambda row: number(row["target_us"]),
        "met": lambda row: {None: "", True: "yes", False: "no"}[row["met"]],
        "peer": lambda row: number(row["peer_us"]),
        "peer + quantizer": lambda row: number(row["peer_with_quantizer_us"]),
    }
    table = Table(
        title=f"dispatch, {document['gpu']}, virtual ranks, H {shape['hidden_size']}, K {shape['top_k']}, "
        f"E {shape['num_experts']}, {shape['combine_wire']} back: µs, medians; ours encode on the way",
        title_justify="left",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "wire", "met") else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    print_table(table, less_needed=("quartiles", "peer + quantizer", "target", "met"))
    held = [row["met"] for row in rows if row["met"] is not None]
    sources = dict.fromkeys(row["peer_source"] for row in rows if row["peer_source"])
    notes = [
        f"a copy moves {document['copy_TB_per_s']:.2f} TB/s, read and written; "
        "ranks share one GPU's memory: this is not the speed of a link",
        *([f"* {PER_RANK}"] if any(row["launch"] == PER_RANK for row in rows) else []),
        *([f"peer: {'; '.join(sources)}; rows encoded before the clock starts"] if sources else []),
        *([document["peer"]] if document["peer"] else []),
        *([f"{sum(held)} of {len(held)} targets met"] if held else []),
        *(f"failed: {line}" for line in missed(rows)),
    ]
    console().print("\n".join(notes), markup=False, soft_wrap=True)
