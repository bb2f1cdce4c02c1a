"""What `tokenyard check` shows of the stack of layers: a row per exchange × wire, with what the wire costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenyard.cli.tables import show_table

if TYPE_CHECKING:
    from tokenyard.conformance.stack import StackCell


def stack_fields(cells: list[StackCell]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [asdict(cell) | {"passed": cell.passed} for cell in cells]


def stack_findings(cells: list[StackCell]) -> list[str]:
    """What is off, in words."""
    return [
        f"the stack, {cell.exchange} × {cell.wire}: {complaint}" for cell in cells for complaint in cell.off
    ]


def show_stack(cells: list[StackCell]) -> None:
    """A row per exchange × wire."""
    figures = ("error against the oracle", "cost of the wire", "tokens/s", "bytes moved per token")

    def figures_of(cell: StackCell) -> list[str]:
        if cell.oracle_error is None or cell.end_to_end_error is None:
            return [""] * len(figures)
        speed = [f"{cell.tokens_per_s:,.0f}", f"{cell.bytes_per_token:,.0f}"]
        return [f"{cell.oracle_error:.2%}", f"{cell.end_to_end_error:.2%}", *speed]

    show_table(
        ("exchange", "wire", *figures, ""),
        [
            (cell.exchange, cell.wire, *figures_of(cell), "[green]✓" if cell.passed else "[red]✗")
            for cell in cells
        ],
        right=figures,
        title="A body of two layers (H 1000, E 16, K 4) on the wire named, and a bf16 head (H 720, E 6, K 2), on 4 "
        "ranks",
    )
