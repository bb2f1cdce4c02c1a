"""A batch in several passes: what a rank receives in one of them has a bound, `plan(max_rows=…)`.

A pass is a round trip of some tokens of each rank: its rows go out, experts compute them, its results come home. In
front of each pass every rank announces two things to all: the rows that it brings, and those that it leaves for later.
So all ranks know alike, before a row moves, whether the pass fits, and whether another one follows.

    first try      all tokens of the batch           fits: one pass, and nothing more was said than without a bound
    else           the first n-th of what is left     n from what was announced: times by which the fullest rank is over
    still over     a larger n                         at last one token of each rank, for which there is room

A rank takes consecutive tokens, so each token's results are complete in its pass, and its sum is that of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# What a rank that announces certain counts brings to each place of an exchange that has a bound: `Transport.loads`.
Loads = Callable[[int, Sequence[int]], Sequence[int]]


class TooManyRows(Exception):
    """An announced pass brings more rows to a rank than it has room for. All ranks raise it before a row moves."""

    def __init__(self, most: int) -> None:
        self.most = most  # rows at the fullest place


@dataclass(kw_only=True, eq=False)
class RowBound:
    """What all ranks hear of one pass: whether it fits, and what is left."""

    max_rows: int  # rows that a rank has room for
    loads: Loads
    # Rows for later passes at the fullest place; 0: this is the last pass.
    left: int = field(init=False)

    def hear(self, counts_by_rank: Sequence[Sequence[int]]) -> None:
        """Take what each rank announces, the counts of this pass and as many of later ones; raise if it is too much."""
        now, later = (
            [self.loads(rank, part) for rank, part in enumerate(parts)]
            for parts in zip(
                *((both[: len(both) // 2], both[len(both) // 2 :]) for both in counts_by_rank), strict=True
            )
        )
        if (most := fullest(now)) > self.max_rows:
            raise TooManyRows(most)
        self.left = fullest(later)


def fullest(loads_by_rank: Sequence[Sequence[int]]) -> int:
    """The rows at the place that gets most.

    >>> fullest([[1, 2], [0, 3]])
    5
    """
    return max(map(sum, zip(*loads_by_rank, strict=True)))


def parts_for(rows: int, max_rows: int) -> int:
    """How many parts so many rows at the fullest place are cut into.

    >>> parts_for(0, 8), parts_for(8, 8), parts_for(17, 8)
    (1, 1, 3)
    """
    return max(1, -(-rows // max_rows))


def more_parts(parts: int, rows: int, max_rows: int) -> int:
    """How many parts to try when one of `parts` parts has so many rows: a quarter more at least, so it ends soon.

    >>> more_parts(1, 17, 8), more_parts(5, 9, 8)
    (3, 7)
    """
    return max(-(-parts * rows // max_rows), parts + -(-parts // 4))


def first_part(tokens: int, parts: int) -> int:
    """The tokens of the first of so many parts: at least one, where there are any.

    >>> first_part(10, 4), first_part(3, 8), first_part(0, 2)
    (3, 1, 0)
    """
    return -(-tokens // parts)
