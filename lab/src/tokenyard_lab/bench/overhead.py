"""How much time does an exchange add on one rank? A layer beside its experts, a model beside plain Transformers.

**A layer**: one call with one token on one CPU rank, whose floor is the time of that layer's experts alone. The
difference is the router, the plan, both ways of the exchange, and all checks.

**A model**: the one that ships, sharded over one rank, decodes token by token beside the same checkpoint in plain
Transformers. Both take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tokenyard.conformance.cases import Case
from tokenyard.formats import get
from tokenyard.group import Group, thread_groups
from tokenyard.layer import MoELayer
from tokenyard.machine_rates import host_clock
from tokenyard.planning.planner import plan
from tokenyard.routing import SoftmaxRouter
from tokenyard.rows import LocalRoutes, ReceivedRows
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.bench.transformers_ep import OURS, PEER, Candidate, alternate
from tokenyard_lab.evaluation.models import load_whole
from tokenyard_lab.shipped import shipped_model

# Targets: times the experts alone, and times a step of plain Transformers.
MOST_OF_LAYER = 2.0
MOST_OF_MODEL = 1.2
STEPS = 16
NOTE = "floor of the layer: its experts alone; one thread a rank, one rank, one token"


def measure_overhead(rounds: int) -> Iterator[list[Record]]:
    """The figures of a layer, then those of the model that ships: ms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (group,) = thread_groups(1)
        yield [_layer(group, rounds)]
        yield [_model(group, rounds)]
    finally:
        torch.set_num_threads(threads)


def _layer(group: Group, rounds: int) -> Record:
    """The record of a call of a layer with one token, beside its experts."""
    case = Case(
        tokens=(1,), hidden_size=256, intermediate_size=128, num_experts=16, top_k=4, experts="grouped"
    )
    spec, (x_TH, routes) = replace(case.spec(), router=SoftmaxRouter(4, renormalize=True)), case.batch(0)
    logits_TE = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    made = plan([spec], group)
    layer = MoELayer(made, spec.name, case.all_weights())
    received = ReceivedRows(
        rows=get("bf16").encode(x_TH),
        routes=LocalRoutes(ids_RK=routes.topk_ids_TK.int(), weights_RK=routes.topk_weights_TK),
        counts_W=(1,),
    )
    works = {"ours": lambda: layer(x_TH, logits_TE), "experts": lambda: layer.experts(received)}
    # Calls of less than a millisecond: many of them make a round.
    times = {name: [us / 1e3 for us in found] for name, found in host_clock(20 * rounds)(works).items()}
    made.close()
    experts = Spread.of(times["experts"])
    return Record(
        parameters={"call": "a layer, one token"},
        ours=Spread.of(times["ours"]),
        floor=experts,
        target=MOST_OF_LAYER * experts.median,
        ratios={"ours / floor": Spread.ratio(times["ours"], times["experts"])},
    )


def _model(group: Group, rounds: int) -> Record:
    """The record of a decoding step of one token, beside plain Transformers."""
    from tokenyard.integrations.transformers import load_sharded

    folder = shipped_model()
    prompt = torch.arange(1, 33).unsqueeze(0)
    models = {PEER: load_whole(folder), OURS: load_sharded(folder, group, max_tokens=32).model}
    candidates = {
        name: Candidate(model=model, batch=prompt, own=slice(None), steps=STEPS)
        for name, model in models.items()
    }
    seconds = alternate(group, candidates, rounds)
    ms = {name: [1e3 * one.decode / STEPS for one in found] for name, found in seconds.items()}
    peer = Spread.of(ms[PEER])
    return Record(
        parameters={"call": "the shipped model, one token"},
        ours=Spread.of(ms[OURS]),
        target=MOST_OF_MODEL * peer.median,
        peers={PEER: peer},
        ratios={"ours / Transformers": Spread.ratio(ms[OURS], ms[PEER])},
    )
