"""A clock for work on a GPU: CUDA graphs, replayed in turn.

Each piece of work is captured once. A round replays each of them so often that it takes a while, and every second
round goes in the opposite order: a GPU that slows down slows all of them down. Rounds that follow at once find it as
warm as hours of work do, and slower for that, where tensor cores are busy; with a rest before each it is as fast as it
can be.

`Clock` is an argument wherever something is measured: all but the clock runs on a CPU, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

Work = Callable[[], None]

# µs that the replays of a round should take together, at least; and the most of them.
ROUND_US = 15_000.0
MOST_REPLAYS = 200


class Clock(Protocol):
    """Takes pieces of work by name; returns the µs that one run of each took, once for each round."""

    def __call__(self, works: Mapping[str, Work], /) -> dict[str, list[float]]: ...


def graph_clock(device: torch.device, rounds: int, *, rest: float = 0.0) -> Clock:
    """A clock of so many rounds on this GPU, with so many seconds of rest before each."""
    return partial(_graph_times, device, rounds, rest)


def _graph_times(
    device: torch.device, rounds: int, rest: float, works: Mapping[str, Work], /
) -> dict[str, list[float]]:
    graphs = {name: captured(device, work) for name, work in works.items()}
    # The first replay uploads the graph; the second says how long it takes.
    replays = {}
    for name, graph in graphs.items():
        replay(graph, 1)
        replays[name] = max(1, min(MOST_REPLAYS, round(ROUND_US / max(1.0, replay(graph, 1)))))
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(1 + rounds):
        order = list(graphs.items())
        for name, graph in order if number % 2 == 0 else reversed(order):
            time.sleep(rest)
            times[name].append(replay(graph, replays[name]))
    return {name: found[1:] for name, found in times.items()}  # the first round warms up


def captured(device: torch.device, work: Work) -> torch.cuda.CUDAGraph:
    """A graph of some work."""
    work()  # compiles, and fails where a capture would fail
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """The µs of one replay, of so many back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / replays


def spread(name: str, times: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes of a time, as fields; None where there is none.

    >>> spread("us", [4.0, 1.0, 2.0, 3.0, 5.0])
    {'us': 3.0, 'us_low': 2.0, 'us_high': 4.0, 'us_min': 1.0, 'us_max': 5.0}
    """
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if times else (None, None, None)
    return {
        name: median,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_min": min(times, default=None),
        f"{name}_max": max(times, default=None),
    }
