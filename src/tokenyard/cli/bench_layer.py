"""`tokenyard bench layer`: a whole layer on a GPU, beside the same experts behind an allgather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenyard.cli.bench_cuda import conclude
from tokenyard.cli.output import JsonFlag, console, reported, save_json
from tokenyard.cli.tables import print_table


@reported
def layer(
    tokens: Annotated[
        list[int],
        typer.Option(min=1, help="Tokens of each rank; may be given several times."),
    ] = [128, 512, 4096],  # noqa: B006
    ranks: Annotated[int, typer.Option(min=1, max=64, help="How many virtual ranks.")] = 4,
    weights: Annotated[
        list[str],
        typer.Option(
            help="The format of the weights; may be given several times. Rows travel as fp8_block128 or mxfp8 to "
            "experts with such weights, else as bf16."
        ),
    ] = ["bf16"],  # noqa: B006
    hidden_size: Annotated[int, typer.Option(min=1)] = 7168,
    intermediate_size: Annotated[int, typer.Option(min=1)] = 2048,
    num_experts: Annotated[int, typer.Option(min=1)] = 256,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=2, help="Both contestants take turns so often.")] = 15,
    device: Annotated[str, typer.Option(help="cuda: virtual ranks that share one GPU.")] = "cuda",
    out: Annotated[
        Path | None, typer.Option("--out", help="Save the figures, with date, hardware, versions and commit.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures into this file (needs matplotlib).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a whole layer is on a GPU, beside the same experts behind an allgather of plain copies."""
    import torch

    from tokenyard.cli.machine import provenance
    from tokenyard.errors import InputError
    from tokenyard.lab.bench import layer_cuda as bench
    from tokenyard.lab.bench.dispatch_cuda import check_gpu
    from tokenyard.lab.bench.graph_clock import graph_clock
    from tokenyard.lab.bench.layer_figures import (
        BENCHMARK,
        REPORTED_BY,
        REPORTED_MS,
        REPORTED_ON,
        REPORTED_RATIO,
        LayerShape,
        layer_grid,
        missed,
    )
    from tokenyard.lab.bench.picture import check_picture

    if device != "cuda":
        raise InputError(
            f"--device {device}",
            expected="cuda: the experts that are measured are kernels for GPUs",
            fix="`tokenyard bench dispatch` and `bench experts` measure the halves on a CPU",
        )
    cells = layer_grid(ranks, tokens, weights)
    shape = LayerShape(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts, top_k=top_k
    )
    bench.check_layer(cells, shape)
    if plot is not None:
        check_picture(plot)
    gpu_device = check_gpu("measure the halves on the CPU: `bench dispatch` and `bench experts`")
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "benchmark": BENCHMARK,
        **provenance(),
        "gpu": torch.cuda.get_device_name(gpu_device),
        "shape": asdict(shape),
        "rounds": rounds,
        "reported": {"by": REPORTED_BY, "on": REPORTED_ON, "ms": list(REPORTED_MS), "ratio": REPORTED_RATIO},
        "results": rows,
    }
    if out is not None:
        save_json(document, out)  # a file that cannot be written is found out before the time is spent
    errors = console(stderr=True)
    measured = bench.measure_layer(cells, shape, device=gpu_device, clock=graph_clock(gpu_device, rounds))
    for number, (cell, row) in enumerate(zip(cells, measured, strict=True), start=1):
        rows.append(row)
        took = (
            f"{row['us']:.0f} µs, {row['allgather_us']:.0f} behind an allgather"
            if row["us"] is not None
            else row["note"]
        )
        errors.print(f"{number} of {len(cells)}: {cell}: {took}", markup=False)
        if out is not None:
            save_json(document, out)  # as far as it goes: a GPU that is taken away takes no figures with it
    conclude(document, as_json=as_json, plot=plot, failed=bool(missed(rows)))


def print_layer(document: dict[str, Any]) -> None:
    """The figures, for people."""
    from rich.table import Table

    from tokenyard.lab.bench.cuda_figures import number
    from tokenyard.lab.bench.layer_figures import missed

    def with_spread(name: str, digits: int) -> Callable[[dict[str, Any]], str]:
        return lambda row: (
            f"{row[name]:.{digits}f} ({row[f'{name}_min']:.{digits}f}–{row[f'{name}_max']:.{digits}f})"
            if row[name] is not None
            else ""
        )

    rows, shape, reported_there = document["results"], document["shape"], document["reported"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "W": lambda row: str(row["world"]),
        "T": lambda row: str(row["num_tokens"]),
        "weights": lambda row: row["weights"],
        "one_sided": lambda row: number(row["us"]) or "failed",
        "allgather": lambda row: number(row["allgather_us"]),
        "ratio": with_spread("ratio", 3),
        "rows alone": lambda row: number(row["exchange_us"]),
        "allgather alone": lambda row: number(row["allgather_exchange_us"]),
        "ratio alone": with_spread("exchange_ratio", 2),
        f"{reported_there['by']}": lambda row: f"{reported_there['ratio']:.3f}",
    }
    table = Table(
        title=f"layer, {document['gpu']}, virtual ranks, H {shape['hidden_size']}, I {shape['intermediate_size']}, "
        f"E {shape['num_experts']}, K {shape['top_k']}: µs of all ranks, medians; ratios with best and worst round",
        title_justify="left",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "weights" else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    print_table(table, less_needed=(reported_there["by"], "allgather alone", "rows alone"))
    ours, theirs = reported_there["ms"]
    faster = [row["faster"] for row in rows if row["faster"] is not None]
    notes = [
        "both run the same experts, one rank after the other in one graph; rows alone: there and back, no experts",
        f"{reported_there['by']} reports {ours:.0f} against {theirs:.0f} ms on {reported_there['on']}; "
        "here ranks share one GPU's memory: this is not the speed of a link",
        f"{sum(faster)} of {len(faster)} faster than behind an allgather",
        *(f"failed: {line}" for line in missed(rows)),
    ]
    console().print("\n".join(notes), markup=False, soft_wrap=True)
