"""Calls that survive the loss of a rank: the same bits, on every rank that is left, wherever it is lost."""

import json
from pathlib import Path

import pytest
import torch

import tokenyard as ty
from tests.faults import survivors
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.planning.planner import state_of
from tokenyard.routing import Placement


class Gone(BaseException):
    """This rank ends here."""


TWICE = Placement.replicated(Placement.contiguous(6, 3), {e: [(e // 2 + 1) % 3] for e in range(6)})
LAYERS = [spec(name, sum="choices", num_experts=6, placement=TWICE) for name in ("first", "second")]


def called(module, given):
    return module(*given)


def started(module, given):
    pending = module.start(*given)
    return pending.finish()


def computed(module, given):
    pending = module.start(*given)
    pending.compute()
    return pending.finish()


def dies(group, exchange, method, passes, call=called):
    """Two layers in turn; rank 1 ends in the third step, in a call of its transport."""
    plan = ty.plan(LAYERS, group, exchange=exchange, survive=True)
    built = [build(plan, layer.name, seed=n) for n, layer in enumerate(LAYERS)]
    results = []
    try:
        for step in range(6):
            if group.rank == 1 and step == 2 and passes is not None:
                ends_in(plan.exchange.transport, group, method, passes)
            for layer, module in zip(LAYERS, built, strict=True):
                results.append(call(module, batch(layer, 4, seed=10 * step + group.rank)))
    except Gone:
        return None
    return results, plan.stats()["first"].lost, plan.group.size


def ends_in(transport, group, method, passes):
    before, left = getattr(transport, method), [passes]

    def end(*arguments):
        if left[0] == 0:
            group.leave("the test has ended it")
            raise Gone
        left[0] -= 1
        return before(*arguments)

    setattr(transport, method, end)


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided", "allgather"])
@pytest.mark.parametrize("method", ["send", "send_back"])
@pytest.mark.parametrize("passes", [0, 1])
def test_a_rank_that_dies_in_a_call_costs_no_result(exchange, method, passes):
    assert_survived(
        on_ranks(3, dies, exchange, method, None), on_ranks(3, dies, exchange, method, passes, deadline=5.0)
    )


@pytest.mark.parametrize("method", ["send", "send_back"])
@pytest.mark.parametrize("call", [started, computed])
@pytest.mark.parametrize("passes", [0, 1])
def test_batches_that_were_started_survive_a_loss(method, call, passes):
    whole = on_ranks(3, dies, "one_sided", method, None)
    assert_survived(whole, on_ranks(3, dies, "one_sided", method, passes, call, deadline=5.0))


def assert_survived(whole, left):
    assert left[1] is None
    for rank in (0, 2):
        expected, found = whole[rank][0], left[rank][0]
        assert len(found) == 12
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert left[rank][1:] == ([1], 2)
        assert whole[rank][1:] == ([], 3)


def one_is_ahead(group, call):
    """Rank 0 has finished a call in which rank 2 has not heard of rank 1: it serves that call once more."""
    plan = ty.plan(LAYERS, group, survive=True)
    built = [build(plan, layer.name, seed=n) for n, layer in enumerate(LAYERS)]
    given = [batch(layer, 4, seed=group.rank) for layer in LAYERS]
    expected = [call(module, x) for module, x in zip(built, given, strict=True)]
    if group.rank == 1:
        signals = plan.exchange.transport.workspace.signals
        tell = signals.tell

        def tell_the_first(target, mine):
            tell(target, mine)
            if mine.phase.value == "combine" and target == 1:  # after rank 0 and itself, before rank 2
                group.leave("the test has ended it")
                raise Gone

        signals.tell = tell_the_first
    try:
        found = [call(module, x) for module, x in zip(built, given, strict=True)]
    except Gone:
        return None
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), state_of(plan).calls


@pytest.mark.parametrize("call", [called, started])
def test_a_rank_that_has_finished_a_call_serves_it_once_more(call):
    first, _, third = on_ranks(3, one_is_ahead, call, deadline=5.0)
    assert first == third == (True, 4)


def not_survived(group):
    plan = ty.plan([spec(sum="choices", num_experts=6, placement=TWICE)], group, survive=True)
    built = build(plan, "moe")
    if group.rank > 0:
        return None
    return type(raised(built, *batch(built.wiring.spec, 4)))


def test_experts_that_are_gone_with_two_ranks_are_a_loss():
    assert on_ranks(3, not_survived, deadline=2.0)[0] is ty.PeerLost


REFUSED = {
    "bits would depend on the ranks that are left": {"placement": TWICE},
    "only one rank has experts [0, 1, 2, 3, 4, 5]": {"sum": "choices"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_could_not_survive_is_refused(reason):
    def refused(group):
        return str(raised(ty.plan, [spec(num_experts=6, **REFUSED[reason])], group, survive=True))

    for error in on_ranks(3, refused):
        assert f"survive=True, and {reason}" in error


def in_flight(group):
    layer = spec(sum="choices", num_experts=6, placement=TWICE)
    first = str(raised(ty.plan, [layer], group, survive=True, in_flight=2))
    second = str(raised(ty.plan, [layer], group, survive=group.rank == 0))
    return first, second


def test_two_in_flight_and_ranks_that_disagree_are_refused():
    for several, differs in on_ranks(3, in_flight):
        assert "survive=True, and 2 calls may be in flight" in several
        assert "survive" in differs


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_costs_no_result(seed):
    trial = survivors.draw(seed)
    assert survivors.complaints(trial, survivors.run(trial)) == []


def test_the_page_quotes_the_last_kills():
    root = Path(__file__).parents[2]
    results = json.loads((root / "bench" / "results" / "survivors-cpu.json").read_text())["results"]
    assert results["trials"] >= 60
    assert results["off"] == []
    assert survivors.sentence(results) in (root / "docs" / "guide" / "losing-ranks.md").read_text()


def loses_a_started_batch(group):
    layer = spec(sum="choices", num_experts=6, placement=TWICE)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    if group.rank == 2:
        return None
    error = raised(lambda: built.start(*batch(layer, 3)).finish())
    return type(error), error.peers, plan.group.size


def test_a_batch_of_a_plan_that_survives_nothing_is_lost():
    assert on_ranks(3, loses_a_started_batch)[:2] == [(ty.PeerLost, (2,), 3)] * 2
