"""A fresh process takes the place of one that was killed, with rows on a GPU that the ranks share."""

import os
import signal

import pytest

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import same_bits

pytestmark = pytest.mark.gpu

LAYER = spec("moe", experts="reference", num_experts=6, hidden_size=64, wire="mxfp8")
WORLD, LOST = 3, 1


def round_trip(group, layer):
    x_TH, routes = batch(LAYER, 3 + group.rank, seed=group.rank)
    there = ty.Routes(
        topk_ids_TK=routes.topk_ids_TK.to(group.device),
        topk_weights_TK=routes.topk_weights_TK.to(group.device),
    )
    return layer(x_TH.to(group.device), there).cpu()


def lives(group, exchange):
    plan = ty.plan([LAYER], group, exchange=exchange)
    layer = build(plan, "moe").to(group.device)
    is_fresh = max(plan.group.gather_json(0)) > 0  # a fresh rank enters the story where the others are
    before = round_trip(group, layer)
    if is_fresh:
        return same_bits(round_trip(group, layer), before)
    if group.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(round_trip, group, layer)
    assert isinstance(error, ty.PeerLost), error
    assert error.peers == (LOST,)
    plan.go_on_without(error.peers)
    round_trip(group, layer)
    assert plan.stats()["moe"].dropped > 0
    plan.readmit()
    plan.group.gather_json(1)
    after = round_trip(group, layer)
    return same_bits(round_trip(group, layer), after) and same_bits(before, after)


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_killed_replaced_and_bitwise_as_before(exchange):
    results = ty.launch(
        WORLD, lives, exchange, ranks="processes", device="cuda", deadline=8.0, replacements=1
    )
    assert results == [True] * WORLD
