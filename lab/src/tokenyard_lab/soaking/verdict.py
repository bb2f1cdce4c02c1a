"""Which growth in the samples of a soak is a leak.

**Memory** is fitted with a line, robustly: the median of the slopes between all pairs of samples (Theil–Sen), so that
a few odd samples, taken while a process had just started or ended, do not count. The first third of the samples is
left out: libraries are loaded, pools filled, every kind of episode seen once. A slope of 1 MB in 10 minutes is a
finding, if it is not chance (the lower end of its 95% interval is above zero).

A short soak cannot distinguish 1 MB in 10 minutes from noise. There, memory must also have grown by 16 MB in all.

**Descriptors, sockets, threads and processes** are whole numbers that come back to where they were: their smallest
count in the last third of the samples must not be above the largest in the third before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.units import MB
from tokenyard_lab.soaking.measuring import Sample
from tokenyard_lab.soaking.run_folder import Finding

# Bytes per second: 1 MB in 10 minutes.
MOST_GROWTH = MB / 600
# Seconds after the warm-up from which on such a growth can be distinguished from noise.
LONG_ENOUGH = 600.0
# Bytes that a shorter soak must have grown by.
MOST_IN_SHORT = 16 * MB
_FEWEST = 9  # samples: three thirds of three
_MOST_POINTS = 400  # samples that are compared pair by pair
_Z = 1.96  # of a 95% interval

MEMORIES = ("memory", "lasting_memory", "shared_memory", "device_memory")
COUNTS = ("descriptors", "sockets", "threads", "processes")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The slope of something measured, in bytes per 10 minutes, and its 95% interval."""

    value: float
    low: float
    high: float
    seconds: float  # the time that was fitted

    @property
    def total(self) -> float:
        """Bytes of growth over the time that was fitted."""
        return self.value * self.seconds / 600

    @property
    def leaks(self) -> bool:
        """Whether the growth is beyond the limit."""
        enough = self.seconds >= LONG_ENOUGH or self.total >= MOST_IN_SHORT
        return self.value >= MOST_GROWTH * 600 and self.low > 0 and enough


def judge(samples: Sequence[Sample]) -> tuple[dict[str, Growth], list[Finding]]:
    """The growth of each kind of memory, and a finding for each leak."""
    if len(samples) < _FEWEST:
        return {}, []
    third = len(samples) // 3
    settled = samples[third:]
    growth, findings = {}, []
    for name in MEMORIES:
        values = [getattr(sample, name) for sample in settled]
        if None in values:
            continue
        growth[name] = fit([sample.seconds for sample in settled], values)
        if growth[name].leaks:
            findings.append(Finding(kind="memory", what=_said(name, growth[name])))
    for name in COUNTS:
        before = max(getattr(sample, name) for sample in settled[:-third])
        after = min(getattr(sample, name) for sample in settled[-third:])
        if after > before:
            what = f"{name}: at least {after} in the last third of the samples, at most {before} in the one before"
            findings.append(Finding(kind="leak", what=what))
    return growth, findings


def fit(seconds: Sequence[float], values: Sequence[float]) -> Growth:
    """The Theil–Sen slope of values over time, per 10 minutes.

    >>> fit([0, 60, 120, 180], [10.0, 11.0, 900.0, 13.0]).value  # the third is odd, and does not count
    10.0
    """
    step = math.ceil(len(seconds) / _MOST_POINTS)
    at, value = np.asarray(seconds[::step], float), np.asarray(values[::step], float)
    one, other = np.triu_indices(len(at), k=1)
    later = at[other] > at[one]
    one, other = one[later], other[later]
    slopes = np.sort((value[other] - value[one]) / (at[other] - at[one])) * 600
    # Sen's interval: how far from the middle chance moves the rank of a slope.
    n = len(at)
    away = _Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low = max(0, round(len(slopes) / 2 - away))
    high = min(len(slopes) - 1, round(len(slopes) / 2 + away))
    return Growth(
        value=float(np.median(slopes)),
        low=float(slopes[low]),
        high=float(slopes[high]),
        seconds=float(at[-1] - at[0]),
    )


def _said(name: str, growth: Growth) -> str:
    return (
        f"{name.replace('_', ' ')} grows by {growth.value / MB:.2f} MB in 10 minutes "
        f"({growth.low / MB:.2f} to {growth.high / MB:.2f}); expected less than {MOST_GROWTH * 600 / MB:.0f}"
    )
