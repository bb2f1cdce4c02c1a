"""The rates of a machine: bytes that it copies, and operations of plain matrix products. All are per µs.

A `Clock` is an argument wherever something is measured: `host_clock` times what a CPU does. Pieces of work take turns,
round by round. Every second round goes in the opposite order, so that a machine that slows down affects all pieces of
work alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], Any]

# By kind of device: bytes that are copied, far more than caches hold, and the side of the product.
COPY_BYTES = {"cuda": 2**30, "cpu": 256 * 2**20}
SQUARE = {"cuda": 8192, "cpu": 2048}


class Clock(Protocol):
    """Takes pieces of work by name; returns the µs that one run of each took, once for each round."""

    def __call__(self, works: Mapping[str, Work], /) -> dict[str, list[float]]: ...


def host_clock(rounds: int, *, seconds: float = 0.0) -> Clock:
    """A clock of this number of rounds on the CPU, or more, until `seconds` have passed for each piece of work."""
    return partial(_host_times, rounds, seconds)


def _host_times(rounds: int, seconds: float, works: Mapping[str, Work], /) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()  # the first call allocates pages and builds tables
    deadline = time.perf_counter() + seconds * len(works)
    number = 0
    while number < rounds or time.perf_counter() < deadline:
        for name in in_turns(works, number):
            start = time.perf_counter()
            works[name]()
            times[name].append(1e6 * (time.perf_counter() - start))
        number += 1
    return times


def in_turns(works: Mapping[str, Work], number: int) -> list[str]:
    """The names of pieces of work in the order of a round."""
    return list(works)[:: 1 if number % 2 == 0 else -1]


def copy_rate(device: torch.device, clock: Clock) -> float:
    """The bandwidth of a large copy: bytes read plus bytes written, per µs."""
    nbytes = COPY_BYTES[device.type]
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        # By a kernel, as in what it is compared with. In a graph, `copy_` runs on the copy engines: 2.77 TB/s on an
        # H200, where this kernel reaches 4.25.
        torch.mul(source, 2.0, out=target)

    return 2 * nbytes / fastest(clock, {"copy": copy})


def product_rate(device: torch.device, clock: Clock) -> float:
    """Operations per µs of a plain square product, in the faster dtype."""
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.bfloat16, torch.float32]
    works = {str(dtype): _product(device, dtype) for dtype in dtypes}
    return 2 * float(SQUARE[device.type]) ** 3 / fastest(clock, works)


def fastest(clock: Clock, works: Mapping[str, Work]) -> float:
    """The median time of the fastest of several ways to do the same, in µs."""
    return min(statistics.median(times) for times in clock(works).values())


def square(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A factor of the plain product."""
    side, draw = SQUARE[device.type], torch.Generator(device).manual_seed(0)
    return torch.randn(side, side, device=device, generator=draw).to(dtype)


def _product(device: torch.device, dtype: torch.dtype) -> Work:
    a = square(device, dtype)
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, a.t(), out=out)

    return multiply
