"""What `tokenyard check` shows of the stack of layers: a row per exchange × wire, with what the wire costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from tokenyard.conformance.stack import StackCell


def stack_fields(cells: list[StackCell]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [asdict(cell) | {"passed": cell.passed} for cell in cells]


def stack_findings(cells: list[StackCell]) -> list[str]:
    """What is off, in words."""
    return [
        f"the stack, {cell.exchange} × {cell.wire}: {complaint}" for cell in cells for complaint in cell.off
    ]


def stack_table(cells: list[StackCell]) -> Table:
    """A row per exchange × wire."""
    from rich.table import Table

    table = Table(
        title="A body of two layers (H 1000, E 16, K 4) on the wire named, and a bf16 head (H 720, E 6, K 2), "
        "on 4 ranks",
        title_justify="left",
    )
    table.add_column("exchange")
    table.add_column("wire")
    for name in ("error against the oracle", "cost of the wire", "tokens/s", "bytes moved per token"):
        table.add_column(name, justify="right")
    table.add_column("")
    for cell in cells:
        mark = "[green]✓" if cell.passed else "[red]✗"
        if cell.oracle_error is None or cell.end_to_end_error is None:
            table.add_row(cell.exchange, cell.wire, "", "", "", "", mark)
            continue
        table.add_row(
            cell.exchange,
            cell.wire,
            f"{cell.oracle_error:.2%}",
            f"{cell.end_to_end_error:.2%}",
            f"{cell.tokens_per_s:,.0f}",
            f"{cell.bytes_per_token:,.0f}",
            mark,
        )
    return table
