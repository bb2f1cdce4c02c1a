"""`tokenyard run`: four ranks in processes push tokens through layers of different formats and shapes.

Every exchange × wire format is one cell. In each, a plan of a quantized body and a bf16 head of another shape is made
and run, and every layer's result is checked against a float64 oracle. All exchanges must give the same bits.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenyard.cli.output import JsonFlag, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

EXIT_OFF = 1


def run(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="How many ranks.")] = 4,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the first rank; others bring more, one none.")
    ] = 96,
    kind: Annotated[str, typer.Option(help="Ranks as `processes` or `threads`.")] = "processes",
    exchange: Annotated[
        list[str] | None, typer.Option(help="Only this exchange; may be given several times.")
    ] = None,
    wire: Annotated[
        list[str] | None, typer.Option(help="Only this wire format; may be given several times.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Push tokens through MoE layers of different formats and shapes, and check every result."""
    from tokenyard.forkserver import start_forkserver

    if kind == "processes":
        start_forkserver()  # it loads torch while this process does
    import torch

    from tokenyard.cli.machine import provenance
    from tokenyard.exchange import EXCHANGES, resolve
    from tokenyard.formats import FORMATS, get

    exchanges = [resolve(name).name for name in exchange or EXCHANGES]
    wires = [str(get(name)) for name in wire or FORMATS if wire or get(name).carries(torch.bfloat16) is None]
    cells = [(name, format_name) for format_name in wires for name in exchanges]
    results = _run_cells(cells, ranks, tokens, "threads" if kind == "threads" else "processes", kind)
    passed = all(row["passed"] for row in results)
    if as_json:
        print_json(
            {
                "command": "run",
                "ranks": ranks,
                "kind": kind,
                "passed": passed,
                "cells": results,
                **provenance(),
            }
        )
    else:
        out = console()
        out.print(_table(results, ranks, kind))
        for row in results:
            for complaint in row["off"]:
                out.print(f"{row['exchange']} × {row['wire']}: {complaint}", style="red", markup=False)
        verdict = "all" if passed else f"{sum(row['passed'] for row in results)} of"
        out.print(f"{verdict} {len(results)} cells are right", style="green" if passed else "red")
    if not passed:
        raise typer.Exit(EXIT_OFF)


def _run_cells(
    cells: list[tuple[str, str]], ranks: int, tokens: int, kind: Literal["threads", "processes"], asked: str
) -> list[dict[str, Any]]:
    """Run every cell, with progress on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tokenyard.conformance.stack import run_stack
    from tokenyard.errors import InputError, TokenyardError
    from tokenyard.group import launch

    if asked != kind:
        raise InputError(f"--kind {asked}", expected="processes or threads", fix="choose one of them")
    results: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True)) as progress:
        bar = progress.add_task("starting the ranks", total=len(cells))
        for exchange, wire in cells:
            progress.update(bar, description=f"{ranks} ranks: {exchange} × {wire}")
            try:
                found = [asdict(one) for one in launch(ranks, run_stack, wire, exchange, tokens, ranks=kind)]
                results.append(_judge(exchange, wire, found, results))
            except TokenyardError as error:
                failed = {"exchange": exchange, "wire": wire, "passed": False, "off": [str(error)]}
                results.append(failed)
            progress.advance(bar)
        progress.update(bar, description=f"{ranks} ranks: done")
    return results


def _judge(
    exchange: str, wire: str, by_rank: list[dict[str, Any]], earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """One cell's figures, and what is off in them."""
    from tokenyard.conformance.stack import TOLERANCE

    tokens = sum(rank["tokens"] for rank in by_rank)
    digest = "-".join(rank["digest"] for rank in by_rank)
    row = {
        "exchange": exchange,
        "wire": wire,
        "oracle_error": max(rank["oracle_error"] for rank in by_rank),
        "end_to_end_error": max(rank["end_to_end_error"] for rank in by_rank),
        "tokens": tokens,
        "tokens_per_s": tokens / max(rank["seconds"] for rank in by_rank),
        "bytes_per_token": sum(rank["bytes_sent"] for rank in by_rank) / tokens,
        "digest": digest,
        "off": [],
    }
    # `not <=`: NaN is off, too.
    if not row["oracle_error"] <= TOLERANCE:
        row["off"].append(f"error {row['oracle_error']:.2%} against the oracle, more than {TOLERANCE:.2%}")
    for other in earlier:
        if other["wire"] == wire and other.get("digest", digest) != digest:
            row["off"].append(f"other bits than {other['exchange']}")
    row["passed"] = not row["off"]
    return row


def _table(results: list[dict[str, Any]], ranks: int, kind: str) -> Table:
    from rich.table import Table

    table = Table(
        title=f"A body of two layers (H 1000, E 16, K 4) on the wire named, and a bf16 head (H 720, E 6, K 2), "
        f"on {ranks} {kind}",
        title_justify="left",
    )
    table.add_column("exchange")
    table.add_column("wire")
    for name in ("error against the oracle", "cost of the wire", "tokens/s", "bytes moved per token"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in results:
        if "oracle_error" not in row:
            table.add_row(row["exchange"], row["wire"], "", "", "", "", "[red]✗")
            continue
        table.add_row(
            row["exchange"],
            row["wire"],
            f"{row['oracle_error']:.2%}",
            f"{row['end_to_end_error']:.2%}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['bytes_per_token']:,.0f}",
            "[green]✓" if row["passed"] else "[red]✗",
        )
    return table
