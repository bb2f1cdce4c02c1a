"""What is in flight: its order, its regions, and what becomes of it when layers change or a plan is closed."""

import gc
import threading
import time
import weakref
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.errors import HandleError
from tokenyard.exchange import EXCHANGES, Arrival
from tokenyard.exchange.open_trips import InFlightQueue
from tokenyard.group import thread_groups
from tokenyard.planning import gather_stats
from tokenyard.rows import ExpertRows

LAYER = SimpleNamespace(layer="next")


def arrival(layer, round, region=0):
    """An arrival of which only the place is known."""
    return Arrival(
        way_back=None,
        received=None,
        spec=SimpleNamespace(layer=layer),
        round=round,
        region=region,
        routes=None,
        counts_W=(),
    )


def test_room_and_regions_up_to_the_capacity():
    queue = InFlightQueue(2, rank=3)
    first, second = arrival("a", 1, region=0), arrival("b", 2, region=1)
    assert queue.is_empty
    assert queue.oldest is None
    for free, one in enumerate((first, second)):
        queue.check_room(LAYER)
        assert queue.free_region == free
        queue.add(one)
    assert not queue.is_empty
    assert queue.oldest is first
    with pytest.raises(HandleError) as caught:
        queue.check_room(LAYER)
    assert str(caught.value) == (
        "layer 'next', rank 3: 2 dispatch in flight already (of 'a', 'b'); expected at most 2; "
        "fix: combine it first, or plan(..., in_flight=3)"
    )
    queue.take(first)
    assert queue.free_region == 0  # the region of the one that was combined, though another is in flight
    assert second in queue
    assert first not in queue


def test_a_whole_round_trip_needs_an_empty_queue():
    queue = InFlightQueue(2, rank=3)
    queue.check_empty("next")
    queue.add(arrival("a", 1))
    with pytest.raises(HandleError, match="layer 'next', rank 3: a dispatch of layer 'a' is in flight"):
        queue.check_empty("next")


def test_only_the_oldest_is_taken_and_each_refusal_has_its_own_words():
    queue = InFlightQueue(2, rank=3)
    first, second = arrival("a", 1), arrival("b", 2)
    with pytest.raises(
        HandleError, match=r"layer 'a', rank 3: this handle is not in flight.*fix: dispatch again"
    ):
        queue.take(first)
    queue.add(first)
    queue.add(second)
    early = (
        r"layer 'b', rank 3: an earlier dispatch is still in flight.*fix: combine the oldest dispatch first"
    )
    with pytest.raises(HandleError, match=early):
        queue.take(second)
    queue.take(first)
    queue.take(second)
    with pytest.raises(HandleError, match="this handle is not in flight"):
        queue.take(second)


def test_those_that_were_given_up_are_told_in_their_turn():
    queue = InFlightQueue(4, rank=0)
    arrivals = [arrival(name, round) for round, name in enumerate("abcd", start=1)]
    for one in arrivals:
        queue.add(one)
    errors = [ValueError(name) for name in "abcd"]
    queue.give_up(arrivals[1], errors[1])
    assert list(queue.take_given_up()) == []  # the oldest was not given up
    queue.give_up(arrivals[0], errors[0])
    queue.give_up(arrivals[3], errors[3])
    assert list(queue.take_given_up()) == [(arrivals[0], errors[0]), (arrivals[1], errors[1])]
    queue.take(arrivals[2])
    assert list(queue.take_given_up()) == [(arrivals[3], errors[3])]
    assert list(queue.take_given_up()) == []


def test_what_is_not_in_flight_is_not_given_up_and_nothing_is_left_of_what_was_cleared():
    queue = InFlightQueue(1, rank=0)
    gone, other = arrival("a", 1), arrival("b", 1)
    queue.give_up(gone, ValueError("late"))
    queue.add(other)
    assert list(queue.take_given_up()) == []
    queue.give_up(other, ValueError("now"))
    queue.clear()
    assert other not in queue
    again = arrival("c", 1)
    queue.add(again)
    assert list(queue.take_given_up()) == []
    assert again in queue


# -- A plan whose layers change, or that is closed -----------------------------------------------------------

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def dispatched(plan):
    wiring = plan.wiring("moe")
    x_TH, routes = batch(spec(), 3)
    return plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes)


@pytest.mark.parametrize("exchange", ["local", *EXCHANGES])
def test_rounds_grow_after_a_dispatch_that_failed_and_after_a_combine_that_was_made_again(exchange):
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], exchange=exchange)
    layer, wiring = build(plan, "moe"), plan.wiring("moe")
    x_TH, routes = batch(spec(), 3)
    too_few = wiring.wire.encode(x_TH[:2])
    assert raised(plan.exchange.dispatch, wiring.exchange_spec, too_few, routes) is not None
    flight = dispatched(plan)
    assert flight.arrival.round == 2  # all ranks have met in the one that failed
    flight.redirect(flight.spec, again=True)
    assert flight.arrival.round == 3
    flight.combine(layer.experts(flight.received))
    assert dispatched(plan).arrival.round == 4


@every_exchange
def test_what_was_in_flight_before_layers_changed_takes_no_room_and_cannot_be_combined(exchange):
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], exchange=exchange)
    layer = build(plan, "moe")
    assert [dispatched(plan).arrival.round] == [1]
    for change in (lambda: plan.extend([spec("more")]), plan.trim):
        change()
        flight = dispatched(plan)
        assert "1 dispatch in flight already (of 'moe')" in str(raised(dispatched, plan))
    result = layer.experts(flight.received)
    plan.trim()
    assert "this handle is not in flight" in str(raised(flight.combine, result))
    again = dispatched(plan)
    assert again.combine(layer.experts(again.received)).y_TH.shape == (3, 32)


@every_exchange
def test_a_plan_that_was_closed_holds_no_batch_and_says_that_it_is_closed(exchange):
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=exchange, in_flight=2)
    kept = dispatched(plan)
    dropped = weakref.ref(dispatched(plan))
    assert [kept.arrival.round, dropped().arrival.round] == [1, 2]
    plan.close()
    gc.collect()
    assert dropped() is None
    for call in (
        lambda: kept.combine(ExpertRows(rows_RH=torch.zeros(0))),
        lambda: kept.combine_unreduced(ExpertRows(rows_RH=torch.zeros(0))),
        lambda: kept.refuse(ValueError("never told")),
        lambda: dispatched(plan),
        partial(gather_stats, plan),
        plan.trim,
    ):
        assert "the plan is closed; expected an open plan" in str(raised(call))


def closed_while_rows_travel(group, exchange, closes, computes):
    """Whether a batch is gone when the plan is closed; without `computes`, rank 1 starts it when rank 0 closes."""
    plan = ty.plan([spec()], group, exchange=exchange)
    built = build(plan, "moe")
    threads, in_background = [], group.in_background

    def noting(job):
        running = in_background(job)
        threads.append(running.thread)
        return running

    group.in_background = noting
    x_TH, routes = batch(spec(), 3)
    assert group.rank == 0 or computes or closes.wait(20)
    started, held = built.start(x_TH, routes), weakref.ref(x_TH)
    if computes:
        started.compute()
    closes.set()
    plan.close()
    ended = not any(thread.is_alive() for thread in threads)
    refused = str(raised(started.finish))
    del started, x_TH
    for _ in range(5):  # while another rank, a thread like this one, collects, this does nothing
        if held() is not None:
            gc.collect()
            time.sleep(0.001)
    return refused, ended, held() is None


@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize(("exchange", "ranks"), [("local", 1), *product(EXCHANGES, (1, 2))])
def test_a_plan_that_was_closed_holds_no_batch_that_was_started(exchange, ranks, computes):
    found = on_ranks(ranks, closed_while_rows_travel, exchange, threading.Event(), computes)
    for refused, ended, given_back in found:
        assert "the plan is closed; expected an open plan" in refused
        assert ended
        assert given_back
