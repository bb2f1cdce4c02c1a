"""`tokenyard bench cuts`: which cuts of fused experts are fastest on this GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenyard.cli.bench_experts_cuda import cases_of
from tokenyard.cli.output import JsonFlag, console, print_json, reported, save_json
from tokenyard.cli.tables import print_table


@reported
def cuts(
    weights: Annotated[
        list[str] | None,
        typer.Option(help="The format of the weights; may be given several times.", show_default="all"),
    ] = None,
    cells: Annotated[
        str | None, typer.Option(help="A, B and C (several with commas).", show_default="all")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", help="Save all that was tried, with date, hardware and commit.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Which cuts of fused experts are fastest on this GPU, beside those that the table chooses.

    Every cut is compiled once: for all cells that takes many minutes.
    """
    from tokenyard.cli.machine import provenance
    from tokenyard.lab.bench.cut_sweep import BENCHMARK, sweep
    from tokenyard.lab.bench.dispatch_cuda import check_gpu
    from tokenyard.lab.bench.expert_figures import cell_of, grid
    from tokenyard.lab.bench.graph_clock import graph_clock

    chosen = grid(cases_of(cells), weights or [])
    device = check_gpu("measure on a machine that has one")
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {"benchmark": BENCHMARK, **provenance(), "rounds": rounds, "results": rows}
    if out is not None:
        save_json(document, out)  # a file that cannot be written is found out before the time is spent
    errors = console(stderr=True)
    for number, row in enumerate(sweep(chosen, device=device, clock=graph_clock(device, rounds)), start=1):
        rows.append(row)
        errors.print(f"{number} of {len(chosen)}: {cell_of(row)}: {len(row['tried'])} tried", markup=False)
        if out is not None:
            save_json(document, out)
    if as_json:
        print_json(document)
    else:
        print_cuts(document)


def print_cuts(document: dict[str, Any]) -> None:
    """The fastest of each cell, for people."""
    from rich.table import Table

    from tokenyard.lab.bench.cuda_figures import number

    columns = ("", "weights", "rows", "the table's", "fastest", "ratio", "first product", "second product")
    table = Table(title="cuts of fused experts: µs of the whole stage", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in columns[2:6] else "left")
    for row in document["results"]:
        fastest = row["fastest"]
        table.add_row(
            row["case"],
            row["weights"],
            f"{row['size']:,}",
            number(row["chosen_us"]) or "failed",
            number(row["fastest_us"]) or "none runs",
            f"{row['ratio']:.2f}" if row["ratio"] is not None else "",
            *([in_words(fastest["inner"]), in_words(fastest["result"])] if fastest else ["", ""]),
        )
    print_table(table)


def in_words(cut: Mapping[str, Any]) -> str:
    """A cut as a line of the table has it, with names; what is left out is zero, no, or any.

    >>> in_words({"out": 64, "tile": 16, "tail": 0, "rows_first": False})
    'out 64, tile 16'
    """
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in cut.items() if value)
