"""A batch in several passes, so that a rank receives at most `plan(max_rows=…)` rows in each.

A pass is a round trip of some tokens of each rank: its rows go out, experts compute them, its results come home. In
front of each pass every rank announces to all the rows that it brings, and the rows that it leaves for later passes.
From these, all ranks know before a row moves whether the pass fits, and whether another one follows.

    first try         all tokens of the batch         if they fit, this is the only pass
    too many rows     the first n-th of tokens left   n: rows announced for the fullest rank, over `max_rows`
    still too many    a larger n                      at last one token of each rank, for which there is room

A pass takes whole tokens, consecutive ones. So all results of a token come home in one pass, and its sum has the same
bits as without a bound. Some exchanges bound other *places* than ranks, such as relays (`Transport.loads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# `Transport.loads`: the rows that a rank, given the counts that it announces, brings to each place with a bound.
Loads = Callable[[int, Sequence[int]], Sequence[int]]


class TooManyRows(Exception):
    """An announced pass brings more rows to a rank than it has room for. All ranks raise it before a row moves."""

    def __init__(self, most: int) -> None:
        self.most = most  # rows at the place that would get most


@dataclass(kw_only=True, eq=False)
class RowBound:
    """Finds from all ranks' announcements whether a pass fits, and how many rows are left for later passes."""

    max_rows: int  # rows that a rank has room for
    loads: Loads
    # Rows for later passes at the fullest place; 0: this is the last pass.
    left: int = field(init=False)

    def hear(self, counts_by_rank: Sequence[Sequence[int]]) -> None:
        """Take each rank's counts, of this pass and then as many of later ones; raise if this pass does not fit."""
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
    """The rows at the place that gets most, from all source ranks.

    >>> fullest([[1, 2], [0, 3]])
    5
    """
    return max(map(sum, zip(*loads_by_rank, strict=True)))


def parts_for(rows: int, max_rows: int) -> int:
    """The number of parts to cut tokens into that bring `rows` rows to the place that gets most.

    >>> parts_for(0, 8), parts_for(8, 8), parts_for(17, 8)
    (1, 1, 3)
    """
    return max(1, -(-rows // max_rows))


def more_parts(parts: int, rows: int, max_rows: int) -> int:
    """The number of parts to try if one of `parts` parts has `rows` rows: at least a quarter more, for few tries.

    >>> more_parts(1, 17, 8), more_parts(5, 9, 8)
    (3, 7)
    """
    return max(-(-parts * rows // max_rows), parts + -(-parts // 4))


def first_part(tokens: int, parts: int) -> int:
    """The number of tokens in the first of `parts` parts: at least one, if there are any.

    >>> first_part(10, 4), first_part(3, 8), first_part(0, 2)
    (3, 1, 0)
    """
    return -(-tokens // parts)
