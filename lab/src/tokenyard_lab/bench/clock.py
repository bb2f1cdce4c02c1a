"""The clock of a GPU: it times several pieces of work in turns, round by round, as `host_clock` does on a CPU.

Each piece of work is captured once, in a CUDA graph. A round replays each graph as often as fits into
about 15 ms. In rounds without a pause the GPU is as warm as after hours of work, and slower for that where tensor cores
are busy; with a rest before each round it is as fast as it can be.

`Clock` is an argument wherever something is measured on a GPU: all but the clock runs on a CPU, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from tokenyard.errors import InputError
from tokenyard.machine_rates import Clock, Work, in_turns

# µs that the replays of one graph in a round should take together, and the most replays.
ROUND_US = 15_000.0
MOST_REPLAYS = 200
# Seconds of rest before a round, and the number of such rounds.
REST = 0.2
RESTED_ROUNDS = 5


def graph_clock(device: torch.device, rounds: int, *, rest: float = 0.0) -> Clock:
    """A clock of this number of rounds on this GPU, with `rest` seconds without work before each."""
    return partial(_graph_times, device, rounds, rest)


def _graph_times(
    device: torch.device, rounds: int, rest: float, works: Mapping[str, Work], /
) -> dict[str, list[float]]:
    graphs = {name: _captured(device, work) for name, work in works.items()}
    # The first replay uploads the graph; the second says how long it takes.
    replays = {}
    for name, graph in graphs.items():
        _replay(graph, 1)
        replays[name] = max(1, min(MOST_REPLAYS, round(ROUND_US / max(1.0, _replay(graph, 1)))))
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(1 + rounds):
        for name in in_turns(works, number):
            time.sleep(rest)
            times[name].append(_replay(graphs[name], replays[name]))
    return {name: found[1:] for name, found in times.items()}  # the first round warms up


def _captured(device: torch.device, work: Work) -> torch.cuda.CUDAGraph:
    work()  # compiles kernels, and raises errors outside of a capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """The mean µs of a replay, of `replays` replays back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / replays


def check_gpu(otherwise: str) -> torch.device:
    """The current GPU. Without one, raise an error with `otherwise`, which says what to do instead."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise InputError(
            f"torch {torch.__version__} sees no GPU",
            expected="an NVIDIA GPU that torch sees",
            fix=f"{otherwise}, or see what `tokenyard doctor` says about CUDA",
        )
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


def give_back_memory(device: torch.device) -> None:
    """Free the unused memory that torch's allocator caches on a GPU: the next cell may need other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
