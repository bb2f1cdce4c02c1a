"""How fast one thread encodes rows, per format, beside the ceiling.

The unit is MB (10^6 bytes) of *bf16 input* per second, whatever the format writes, so that formats compare.
The ceiling is `x.clone()` of the same rows in the same run: reading and writing every byte once, which no
encoder that writes as much could beat, and which tells a slow machine from a slow encoder. Rounds of all
formats and of the ceiling are interleaved, so that a busy neighbor slows down all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tokenyard.formats import FORMATS, Format
from tokenyard.units import MB

CEILING = "ceiling (clone)"


def measure_encode(
    num_tokens: int = 512, hidden_size: int = 7168, seconds: float = 1.0
) -> list[dict[str, Any]]:
    """Encode bf16 rows in every quantized format on one thread, for about `seconds` per format.

    One dict per format: `format`, `MB_per_s` (median over rounds), `MB_per_s_low` and `MB_per_s_high` (the
    quartiles), `rounds`, `threads`, `ceiling_MB_per_s` and `ratio` (ceiling over ours: 1 would be perfect).

    >>> [row["format"] for row in measure_encode(num_tokens=4, hidden_size=256, seconds=0.01)]
    ['fp8_block128', 'mxfp8', 'nvfp4']
    """
    x_TH = torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    formats: list[Format] = [kind() for kind in FORMATS.values() if kind.quantized]
    calls: dict[str, Callable[[], object]] = {CEILING: x_TH.clone}
    calls |= {str(format): _encoder(format, x_TH) for format in formats}
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = _rates(calls, x_TH.numel() * x_TH.element_size() / MB, seconds)
    finally:
        torch.set_num_threads(threads_before)
    ceiling = statistics.median(rates[CEILING])
    return [_summary(str(format), rates[str(format)], ceiling) for format in formats]


def _encoder(format: Format, x_TH: torch.Tensor) -> Callable[[], object]:
    return lambda: format.encode(x_TH)


def _rates(
    calls: dict[str, Callable[[], object]], megabytes: float, seconds: float
) -> dict[str, list[float]]:
    """MB/s of every round of every call: round-robin, until there are five rounds and the time is spent."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # the first call pays for pages and tables
    deadline = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < deadline or min(map(len, rates.values())) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            rates[name].append(megabytes / (time.perf_counter() - start))
    return rates


def _summary(name: str, rates: list[float], ceiling: float) -> dict[str, Any]:
    low, median, high = statistics.quantiles(rates, n=4)
    return {
        "format": name,
        "MB_per_s": median,
        "MB_per_s_low": low,
        "MB_per_s_high": high,
        "rounds": len(rates),
        "threads": 1,
        "ceiling_MB_per_s": ceiling,
        "ratio": ceiling / median,
    }
