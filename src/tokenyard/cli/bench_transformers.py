"""`tokenyard bench transformers`: a model over several processes, beside Transformers' own expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenyard.cli.output import JsonFlag, console, print_json, reported, save_json
from tokenyard.cli.parts import refuse_override
from tokenyard.cli.tables import print_table


@reported
def transformers(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Processes.")] = 4,
    hidden_size: Annotated[int, typer.Option(min=1)] = 512,
    intermediate_size: Annotated[int, typer.Option(min=1, help="The width of an expert.")] = 256,
    num_experts: Annotated[int, typer.Option(min=1)] = 32,
    top_k: Annotated[int, typer.Option(min=1)] = 4,
    num_layers: Annotated[int, typer.Option(min=1)] = 6,
    sequences: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that follow it, one pass each.")] = 8,
    rounds: Annotated[int, typer.Option(min=2)] = 7,
    exchange: Annotated[str, typer.Option(help="Ours.")] = "one_sided",
    out: Annotated[
        Path | None, typer.Option("--out", help="Save the figures, with date, hardware, versions and commit.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How fast a sharded model answers, beside Transformers' own expert parallelism (5.19 or newer).

    Same model, same batch, same processes. Transformers' fastest layout is the peer.
    """
    from tokenyard.cli.machine import provenance
    from tokenyard.lab.bench.transformers_ep import Workload, measure_transformers_ep

    refuse_override()
    work = Workload(
        ranks=ranks,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=num_layers,
        sequences=sequences,
        length=length,
        steps=steps,
        rounds=rounds,
        exchange=exchange,
    )
    document: dict[str, Any] = {"benchmark": "transformers", **provenance(), "results": []}
    if out is not None:
        save_json(document, out)  # a file that cannot be written is found out before the time is spent
    errors = console(stderr=True)
    message = (
        f"transformers: {ranks} processes load the model, try Transformers' layouts, then {rounds} rounds"
    )
    if not errors.is_terminal:
        errors.print(message)
    with errors.status(message):
        document["results"] = measure_transformers_ep(work)
    if as_json:
        print_json(document)
    else:
        _print(document, work.exchange)
    if out is not None:
        save_json(document, out)


def _print(document: dict[str, Any], exchange: str) -> None:
    from rich.table import Table

    first = document["results"][0]
    title = (
        f"{first['num_layers']} layers, H {first['hidden_size']}, I {first['intermediate_size']}, "
        f"E {first['num_experts']}, K {first['top_k']}, {first['ranks']} processes with {first['sequences']} × "
        f"{first['length']} tokens each, {exchange}, {document['hardware']['cpu']}\n"
        f"peer: Transformers {document['versions']['transformers']}, {first['peer']}"
    )
    table = Table(title=title, title_justify="left")
    headings = (
        "",
        "ours, ms",
        "peer, ms",
        "floor, ms",
        "peer / ours",
        "peer with our experts / ours",
        "no exchange, ms",
    )
    for heading in headings:
        table.add_column(heading)
    for row in document["results"]:
        table.add_row(
            {"prefill": "a pass over the prompts", "decode": "a token of each sequence"}[row["phase"]],
            f"{row['ours_ms']:.1f}",
            f"{row['peer_ms']:.1f}",
            f"{row['floor_ms']:.1f}",
            _spread(row, "peer_ratio"),
            _spread(row, "peer_with_our_experts_ratio"),
            f"{row['no_exchange_ms']:.1f}",
        )
    print_table(table)


def _spread(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} × ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"
