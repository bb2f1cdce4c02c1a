"""How much time uneven load costs, and a move of experts: a layer under uniform and under Zipf load.

Three layers of one plan take turns, in the same processes: one under uniform load, and two under the same Zipf load, of
which one was rebalanced once. A round is one call of a layer on all ranks; it starts at one moment for all ranks
and ends when the last one is done. `busiest / mean` is not timed but counted, from the choices that each rank computes.

Then two experts of each rank, of 12.6 MB each, move to the rank before it, and back.

**The floor of a call** is the call under uniform load. **The floor of a move** is a copy of as many bytes, by all ranks
at once, from memory that these ranks share. The pause of a switch to the new placement has no floor.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenyard.conformance.cases import random_weights
from tokenyard.experts import ExpertWeights
from tokenyard.group import Group, launch
from tokenyard.layer import MoELayer
from tokenyard.planning.planner import Plan, plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement, Routes, imbalance
from tokenyard_lab.bench.rank_rounds import check_bits, layer_spec, slowest_ms, start_together
from tokenyard_lab.bench.records import Record, Spread

UNIFORM, BEFORE, AFTER = "uniform", "uneven", "uneven, rebalanced"
# Targets: times the call under uniform load, times the mean load, times a copy, and ms of a pause.
MOST_OF_UNIFORM, MOST_OF_MEAN, MOST_OF_COPY, LONGEST_PAUSE = 1.15, 1.05, 2.0, 5.0
# The layer whose experts move: 12.6 MB each, two on a rank.
LARGE_EXPERTS: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 1024, "top_k": 1, "max_tokens": 1}
_LARGE = 2
NOTES = [
    "ranks are processes with one thread each; on fewer cores than ranks, they share the work of the busiest",
    "experts of 12.6 MB move, two from each rank to the one before, and back",
    f"targets: a call of {MOST_OF_UNIFORM} x uniform, a move of {MOST_OF_COPY:.0f} x a copy by all ranks at once, "
    f"a pause of {LONGEST_PAUSE:.0f} ms; busiest / mean at most {MOST_OF_MEAN} after one rebalance",
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A layer, and how uneven its load is. Every rank gets a copy."""

    num_tokens: int = 128
    hidden_size: int = 256
    intermediate_size: int = 128
    num_experts: int = 64
    top_k: int = 4
    zipf: float = 1.2
    spare_experts: int = 2
    rounds: int = 9

    def spec(self, name: str) -> LayerSpec:
        moves = {"sum": "choices", "spare_experts": self.spare_experts}
        return layer_spec(self, name=name, intermediate_size=self.intermediate_size, **moves)

    def routes(self, rank: int, seed: int, *, uneven: bool) -> Routes:
        """Different experts for each token: uniformly random, or by Zipf's law, the same hot ones on all ranks."""
        order_E = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(7)).float()
        log_E = -self.zipf * torch.log(order_E + 1) if uneven else torch.zeros(self.num_experts)
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        noise_TE = -torch.log(-torch.log(torch.rand(self.num_tokens, self.num_experts, generator=draw)))
        weights_TK, ids_TK = (log_E + noise_TE).topk(self.top_k)
        return Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK.softmax(-1))


def measure_balance(job: Job, ranks: int) -> list[Record]:
    """Measure calls under each load, the move of experts, and its pause."""
    by_rank = launch(ranks, _measure_rank, job, ranks="processes", threads_per_rank=1)
    first = by_rank[0]
    ms = {name: slowest_ms(rank["calls"][name] for rank in by_rank) for name in (UNIFORM, BEFORE, AFTER)}
    uniform = Spread.of(ms[UNIFORM])
    records = [
        Record(
            parameters={"what": f"a call, {name}"},
            ours=Spread.of(ms[name]),
            floor=uniform,
            target=MOST_OF_UNIFORM * uniform.median if name == AFTER else None,
            ratios={"ours / floor": Spread.ratio(ms[name], ms[UNIFORM])},
            details={"busiest / mean": first["imbalance"][name]},
        )
        for name in (UNIFORM, BEFORE, AFTER)
    ]
    copying, copies = (slowest_ms(rank[key] for rank in by_rank) for key in ("moves", "copies"))
    floor = Spread.of(copies)
    moved = sum(rank["nbytes"] for rank in by_rank) / 1e6
    records.append(
        Record(
            parameters={"what": "a move, in the background"},
            ours=Spread.of(copying),
            floor=floor,
            target=MOST_OF_COPY * floor.median,
            ratios={"ours / floor": Spread.ratio(copying, copies)},
            details={"moved_MB": moved, "GB_per_s": moved / statistics.median(copying)},
        )
    )
    pauses = slowest_ms(rank["pauses"] for rank in by_rank)
    records.append(
        Record(parameters={"what": "the pause of a switch"}, ours=Spread.of(pauses), target=LONGEST_PAUSE)
    )
    return records


def _measure_rank(group: Group, job: Job) -> dict[str, Any]:
    names = (UNIFORM, BEFORE, AFTER)
    made = plan([job.spec(name) for name in names], group)
    weights = random_weights(job.spec(UNIFORM), 0)
    layers = {name: MoELayer(made, name, weights.select(made.local_experts(name))) for name in names}
    x_TH = torch.randn(job.num_tokens, job.hidden_size, generator=torch.Generator().manual_seed(group.rank))
    x_TH = x_TH.to(made.wiring(UNIFORM).spec.dtype)
    routes = {name: job.routes(group.rank, 0, uneven=name != UNIFORM) for name in names}
    for _ in range(3):
        layers[AFTER](x_TH, routes[AFTER])
    made.rebalance(threshold=1.05)
    calls: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, job.rounds):  # the first round warms up
        results: dict[str, Tensor] = {}
        for name in names[:: 1 if number % 2 else -1]:
            start = start_together(group)
            results[name] = layers[name](x_TH, routes[name])
            took = time.perf_counter() - start
            group.barrier()
            if number >= 0:
                calls[name].append(took)
        same = torch.equal(results[BEFORE], results[AFTER])
        found = "the layer that was rebalanced gives other bits"
        check_bits(same, found, "the same bits, wherever experts are", group.rank)
    uneven = {name: _busiest(group, made, name, routes[name]) for name in names}
    return {"calls": calls, "imbalance": uneven, **_measure_moves(group, job.rounds)}


def _busiest(group: Group, made: Plan, name: str, routes: Routes) -> float:
    """The choices that the busiest rank computes, over the mean."""
    rank_TK, _ = made.wiring(name).exchange_spec.placement.resolve(routes.topk_ids_TK, group.rank)
    mine = torch.bincount(rank_TK.flatten(), minlength=group.size).tolist()
    return imbalance([float(sum(counts)) for counts in zip(*group.gather_json(mine), strict=True)])


def _measure_moves(group: Group, rounds: int) -> dict[str, Any]:
    """Time moves of large experts to the rank before and back, and copies of as many bytes from the next rank."""
    found: dict[str, Any] = {"moves": [], "copies": [], "pauses": [], "nbytes": 0}
    spec = LayerSpec(name="large", num_experts=_LARGE * group.size, spare_experts=_LARGE, **LARGE_EXPERTS)
    made = plan([spec], group)
    home = made.wiring(spec.name).exchange_spec.placement
    held = ExpertWeights(
        w13=torch.ones(_LARGE, 2 * spec.intermediate_size, spec.hidden_size, dtype=spec.dtype),
        w2=torch.ones(_LARGE, spec.hidden_size, spec.intermediate_size, dtype=spec.dtype),
    )
    layer = MoELayer(made, spec.name, held)
    away = Placement.explicit(home.num_experts, [*home.table[1:], home.table[0]])
    shared = group.share_memory(held.nbytes)
    shared[group.rank].fill_(1)
    source, target = shared[(group.rank + 1) % group.size], torch.zeros(held.nbytes, dtype=torch.uint8)
    for number in range(-2, rounds):  # memory that is touched for the first time takes longer
        move = made.rebalance({layer.name: home if number % 2 else away})
        start_together(group)
        started = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter() - started
        if number >= 0:
            found["copies"].append(copied)
            found["moves"].append(move.seconds)
            found["pauses"].append(made.stats()[layer.name].moves.switch_s)
            found["nbytes"] = move.nbytes
    made.close()
    return found
