"""95% confidence intervals of a share of right answers, and of the difference of two shares.

`wilson` is for one share: it stays inside [0, 1], also where all answers are right. Two wirings
answer the *same* questions, so their difference is known much better than the two shares: `paired_difference` looks
only at the questions where they disagree (Agresti and Min: half a question is added to each of the four kinds, so
that no disagreement at all still leaves a little doubt).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The 97.5% quantile of the normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """A value and the bounds around it."""

    value: float
    low: float
    high: float


def wilson(right: int, total: int) -> Interval:
    """The share of right answers.

    >>> found = wilson(98, 100)
    >>> found.value, round(found.low, 3), round(found.high, 3)
    (0.98, 0.93, 0.994)
    >>> wilson(20, 20).low < 1.0 == wilson(20, 20).high
    True
    """
    if total == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = right / total
    spread = _Z * _Z / total
    center = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return Interval(share, 0.0 if right == 0 else center - half, 1.0 if right == total else center + half)


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> Interval:
    """Our share of right answers minus theirs, on the same questions.

    >>> paired_difference([True] * 99 + [False], [True] * 100).value
    -0.01
    >>> same = paired_difference([True] * 2000, [True] * 2000)
    >>> same.value, -0.002 < same.low < 0 < same.high < 0.002
    (0.0, True)
    """
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    total = len(ours)
    if total == 0:
        return Interval(math.nan, -1.0, 1.0)
    value = (gained - lost) / total
    up, down, many = gained + 0.5, lost + 0.5, total + 2
    center = (up - down) / many
    half = _Z * math.sqrt(up + down - (up - down) ** 2 / many) / many
    return Interval(value, max(-1.0, center - half), min(1.0, center + half))
