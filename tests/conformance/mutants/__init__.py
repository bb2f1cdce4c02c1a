"""Parts that are wrong on purpose. Each must be caught by the check that is named for its fault."""

from tests.conformance.mutants import (
    changing,
    declarations,
    exchanges,
    experts,
    formats,
    losses,
    numbers,
    remembering,
    rows,
    uses,
)

__all__ = [
    "changing",
    "declarations",
    "exchanges",
    "experts",
    "formats",
    "losses",
    "numbers",
    "remembering",
    "rows",
    "uses",
]
