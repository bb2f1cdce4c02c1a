"""Does computation overlap with travel? A layer over links with a delay, whose experts compute for a set time.

Hosts, links and ranks are those of `hosts`. Each exchange is measured in six ways, in turns in the same processes:

    travel             two micro-batches one after the other, with experts that compute nothing
    one after another  the same with experts that compute for `compute` ms
    overlapped         the same two, through `overlapped`: one travels while the other is computed
    exchange alone     the whole batch, with experts that compute nothing
    shared for the way out    the same, with shared experts that compute half as long as the exchange alone takes
    shared for the round trip    the same, as long as it takes

The experts multiply matrices until a set time has passed, and scale rows: on a machine with few cores they do not take
longer because of work that runs beside them. The floor of what overlaps is the longer of travel and computation, that
of micro-batches one after another is their sum, and that of shared experts is the exchange alone. Every result is
compared with the bits of the one-process twin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.twin import twin
from tokenyard.group import Group
from tokenyard.layer import MoELayer, overlapped
from tokenyard.planning.planner import plan
from tokenyard.rows import ExpertRows, PlacedRows, ReceivedRows
from tokenyard_lab.bench.hosts import Job, ScalingExperts, found_by_ranks, main, set_links
from tokenyard_lab.bench.rank_rounds import check_bits, slowest_ms, start_together
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.hosts.network import Links

NOTES = [
    "hosts are network namespaces of one machine, ranks are processes; experts compute for a time of the clock",
    "two micro-batches: travel is the time of both with experts that compute nothing",
    "floor: overlapped: the longer of travel and computation; one after another: their sum; shared: the exchange alone",
    "targets: overlapped 1.15 times the floor, shared experts 1.1 times",
]
COLUMNS = ("travel_ms", "computation_ms")
TRAVEL, IN_TURN, OVERLAPPED = "travel", "one after another", "overlapped"
ALONE = "exchange alone"
# Shared experts, and the part of the exchange for which they compute.
SHARED = {"shared for the way out": 0.5, "shared for the round trip": 1.0}
MOST_OVER_LONGER, MOST_FOR_SHARED = 1.15, 1.1
_SIDE = 192  # of the matrices whose products are computed


def compute_for(seconds: float) -> None:
    """Multiply matrices for so long."""
    end = time.perf_counter() + seconds
    matrix = torch.ones(_SIDE, _SIDE)
    while time.perf_counter() < end:
        matrix @ matrix


class ComputingExperts(ScalingExperts):
    """Experts that scale rows, and compute for a while."""

    name = "computing"
    seconds = 0.0  # that they compute; one value for this process

    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | PlacedRows:
        """Compute for `seconds`, and return what scaling experts return."""
        compute_for(self.seconds)
        return super().compute(received, finalize=finalize)


def measure_overlap(job: Job) -> list[Record]:
    """Time what overlaps, through each exchange; a record for each way that has a floor."""
    return _records(job, found_by_ranks(job, "tokenyard_lab.bench.hosts_overlap"))


def _measure_rank(group: Group, job: Job, links: Links) -> dict[str, Any]:
    """Seconds of each way of each exchange, round by round, on one rank."""
    return {"seconds": {name: _measure_exchange(group, job, links, name) for name in job.exchanges}}


def _measure_exchange(group: Group, job: Job, links: Links, exchange: str) -> dict[str, list[float]]:
    spec = replace(job.spec(), experts=ComputingExperts)
    weights, x_TH, routes = random_weights(spec, 0), job.rows(group.rank), job.routes(group.rank)
    half = -(-job.num_tokens // 2)
    parts = [(x_TH[part], routes.of_tokens(part)) for part in (slice(0, half), slice(half, None))]
    made = plan([spec], group, exchange=exchange, in_flight=2)
    mine, wiring = weights.select(made.local_experts(spec.name)), made.wiring(spec.name)
    shared_s = alone_s = 0.0  # seconds that shared experts compute, and that the exchange alone took last

    def shared(x_TH: Tensor) -> Tensor:
        compute_for(shared_s)
        return torch.zeros_like(x_TH)

    def in_turn() -> Tensor:
        return torch.cat([layer(*part) for part in parts])

    layer = MoELayer(made, spec.name, mine)
    with_shared = MoELayer(made, spec.name, mine, shared=shared)
    whole_TH = twin(wiring, weights, x_TH, routes, group.rank)
    parts_TH = torch.cat([twin(wiring, weights, *part, group.rank) for part in parts])
    set_links(group, job, links)
    # The call, the ms that experts compute, and the expected output.
    ways: dict[str, tuple[Callable[[], Tensor], float, Tensor]] = {
        TRAVEL: (in_turn, 0.0, parts_TH),
        IN_TURN: (in_turn, job.compute, parts_TH),
        OVERLAPPED: (lambda: overlapped(layer, x_TH, routes), job.compute, parts_TH),
        ALONE: (lambda: layer(x_TH, routes), 0.0, whole_TH),
        **dict.fromkeys(SHARED, (lambda: with_shared(x_TH, routes), 0.0, whole_TH)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, job.rounds):  # the first round warms up
        for way, (call, compute, due_TH) in ways.items():
            ComputingExperts.seconds = compute / 1e3
            shared_s = SHARED.get(way, 0.0) * alone_s
            start = start_together(group, job.lead)
            y_TH = call()
            took = time.perf_counter() - start
            found = f"{exchange}, {way}, gave other bits than the one-process twin"
            check_bits(torch.equal(y_TH, due_TH), found, "the same sums", group.rank)
            if number >= 0:
                seconds[way].append(took)
            if way == ALONE:
                alone_s = median(group.gather_json(took, phase="comparing times"))
    made.close()
    return seconds


def _records(job: Job, by_rank: Sequence[dict[str, Any]]) -> list[Record]:
    records = []
    for name in job.exchanges:
        measured = [rank["seconds"][name] for rank in by_rank]
        ms = {way: slowest_ms(seconds[way] for seconds in measured) for way in measured[0]}
        travel, computation = median(ms[TRAVEL]), 2 * job.compute
        alone = median(ms[ALONE])
        for way, floor, most in (
            (IN_TURN, travel + computation, None),
            (OVERLAPPED, max(travel, computation), MOST_OVER_LONGER),
            *((way, alone, MOST_FOR_SHARED) for way in SHARED),
        ):
            beside = {"travel_ms": travel, "computation_ms": computation}
            if way in SHARED:
                beside = {"travel_ms": alone, "computation_ms": SHARED[way] * alone}
            records.append(
                Record(
                    parameters={"tokens": job.num_tokens, "exchange": name, "call": way},
                    ours=Spread.of(ms[way]),
                    floor=Spread(floor),
                    target=None if most is None else most * floor,
                    ratios={"ours / floor": Spread.of(one / floor for one in ms[way])},
                    details=beside,
                )
            )
    return records


if __name__ == "__main__":
    main(Path(sys.argv[1]), _measure_rank)
