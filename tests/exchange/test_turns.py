"""Turns: dispatches in flight are combined in their order, and one thread at a time makes the calls of a plan."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import ConcurrentUse, PeerFailed
from tokenyard.exchange import EXCHANGES, LocalTransport, Pending, RoundTrip
from tokenyard.experts import ReferenceExperts
from tokenyard.group import thread_groups
from tokenyard.planning import gather_stats

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def encoded(plan, name, x_TH):
    return plan.wiring(name).wire.encode(x_TH)


def out_of_turn(group, exchange):
    """A layer is called while a dispatch is in flight, and inside another layer's round trip."""
    layers = [spec("a", experts="reference"), spec("b", experts="reference")]
    plan = ty.plan(layers, group, exchange=exchange, in_flight=2)
    first, second = build(plan, "a"), build(plan, "b")
    nested = build(plan, "b", shared=lambda x_TH: first(x_TH, routes))
    x_TH, routes = batch(layers[0], 5, seed=group.rank)
    expected = first(x_TH, routes)
    flight = plan.exchange.dispatch(first.wiring.exchange_spec, first.wiring.wire.encode(x_TH), routes)
    refused = raised(second, x_TH, routes)
    home = flight.combine(first.experts(flight.received)).y_TH
    inside = raised(nested, x_TH, routes)
    return str(refused), str(inside), same_bits(home, expected), same_bits(first(x_TH, routes), expected)


@every_exchange
def test_a_layer_that_is_called_out_of_turn_leaves_nothing_in_flight(exchange):
    for refused, inside, home, after in on_ranks(2, out_of_turn, exchange):
        assert "layer 'b'" in refused
        assert "a dispatch of layer 'a' is in flight, and is combined only after this call" in refused
        assert "combine the dispatch of 'a' first" in refused
        assert "a dispatch of layer 'b' is in flight" in inside
        assert home
        assert after


def combined_too_early(group, exchange):
    """The second of two round trips is combined first, inside `round_trip`: it is given up, in its turn."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    with plan.exchange.begin(exchange_spec) as trip:
        flight = plan.exchange.dispatch(exchange_spec, encoded(plan, "moe", x_TH), routes)
        received = trip.dispatch(plan.exchange.encode(trip.spec, x_TH), routes)
        early = raised(trip.combine, built.experts(received))
        home = flight.combine(built.experts(flight.received)).y_TH
        again = trip.combine(built.experts(received)).y_TH
    return str(early), same_bits(home, expected), same_bits(again, expected)


@every_exchange
def test_a_combine_out_of_turn_can_be_made_in_its_turn(exchange):
    for early, home, again in on_ranks(2, combined_too_early, exchange):
        assert "an earlier dispatch is still in flight" in early
        assert home
        assert again


def escapes_too_early(group, exchange):
    """The error of a combine out of turn leaves `round_trip`: all ranks hear of it when its turn comes."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    flights = []

    def round_trip():
        with plan.exchange.begin(exchange_spec) as trip:
            flights.append(plan.exchange.dispatch(exchange_spec, encoded(plan, "moe", x_TH), routes))
            trip.combine(built.experts(trip.dispatch(plan.exchange.encode(trip.spec, x_TH), routes)))

    early, flight = raised(round_trip), flights[0]
    assert "an earlier dispatch is still in flight" in str(early)
    home = flight.combine(built.experts(flight.received)).y_TH
    return same_bits(home, expected), same_bits(built(x_TH, routes), expected)


@every_exchange
def test_a_round_trip_that_ends_by_a_combine_out_of_turn_is_not_left_in_flight(exchange):
    assert on_ranks(2, escapes_too_early, exchange) == [(True, True)] * 2


def finds_a_problem(group, exchange):
    """Rank 1 finds a dispatch wrong while the rows of the next one travel: these arrive, and are combined."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    transport, problem, order = plan.exchange.transport, ValueError("a row is odd"), []
    send, fail = transport.send, transport.fail

    def send_odd(batch):
        pending = send(batch)
        transport.send = send_next
        return Pending(lambda: replace(pending.wait(), problem=problem))

    def send_next(batch):
        pending = send(batch)
        transport.send = send
        return Pending(lambda: (pending.wait(), order.append("the next one arrives"))[0])

    def fail_noted(failure):
        order.append("the others are told")
        fail(failure)

    if group.rank == 1:
        transport.send, transport.fail = send_odd, fail_noted
    first, second = [RoundTrip(plan.exchange, exchange_spec) for _ in "ab"]
    for trip in (first, second):
        trip.send(encoded(plan, "moe", x_TH), routes, ahead=True)
    try:
        error = raised(first.combine, built.experts(first.receive()))
    except ValueError as found:
        error = found
    home = second.combine(built.experts(second.receive())).y_TH
    return str(error), order, same_bits(home, expected), same_bits(built(x_TH, routes), expected)


@every_exchange
def test_a_dispatch_that_is_found_wrong_is_given_up_after_what_travels_has_arrived(exchange):
    (told, *first), (own, *second) = on_ranks(2, finds_a_problem, exchange)
    assert "rank 1 failed in combine: ValueError: a row is odd" in told
    assert own == "a row is odd"
    assert first == [[], True, True]
    assert second == [["the next one arrives", "the others are told"], True, True]


def fails_in_both(group, exchange):
    """Rank 1 fails in a first dispatch; rank 0 has begun it, and fails before it begins a second one."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    kept = [built.start(x_TH, routes)] if group.rank == 0 else []
    error = raised(built.start, x_TH, None)
    return str(error), len(kept), same_bits(built(x_TH, routes), expected)


@every_exchange
def test_nobody_is_told_of_a_dispatch_that_nobody_begins_because_the_one_before_failed(exchange):
    for error, _, worked in on_ranks(2, fails_in_both, exchange, deadline=5.0):
        assert "the layer was given None instead of routes" in error
        assert worked


class Tells(LocalTransport):
    """One rank, which writes down what it tells; its results are refused if asked."""

    name = "tells"
    refuses = False

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.told = []

    def send_back(self, results):
        pending = super().send_back(results)

        def refuse():
            raise PeerFailed(0, "no room", phase="combine")

        return Pending(refuse) if self.refuses else pending

    def fail(self, failure):
        self.told.append((failure.arrival.round, str(failure.announcements.mine.error)))
        super().fail(failure)


@pytest.mark.parametrize("refuses", [False, True])
def test_what_was_given_up_is_told_when_its_turn_has_come(refuses):
    """Right after the combine before it, also where that one fails."""
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], exchange=Tells, in_flight=2)
    built, exchange = build(plan, "moe"), plan.exchange
    x_TH, routes = batch(spec(), 5)
    layer = plan.wiring("moe").exchange_spec
    first, second = (exchange.dispatch(layer, encoded(plan, "moe", x_TH), routes) for _ in "ab")
    exchange._in_flight.give_up(second.arrival, ValueError("late"))
    exchange.transport.refuses = refuses
    error = raised(first.combine, built.experts(first.received))
    assert isinstance(error, PeerFailed) == refuses
    assert exchange.transport.told == [(second.arrival.round, "ValueError: late")]
    assert second not in exchange._in_flight


def test_nobody_is_told_of_a_loss_and_the_plan_is_broken_by_it():
    """Whoever is left finds out by itself; a word to ranks that are lost would wait for them."""
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], exchange=Tells)
    exchange, layer = plan.exchange, plan.wiring("moe").exchange_spec
    x_TH, routes = batch(spec(), 5)
    lost = ty.PeerLost([0], phase="dispatch", waited=0.5)

    def lose(batch):
        raise lost

    exchange.transport.send = lose
    assert raised(exchange.dispatch, layer, encoded(plan, "moe", x_TH), routes) is lost
    assert lost.layer == "moe"
    assert exchange.usability.broken_by is lost
    assert exchange.transport.told == []


def test_a_batch_that_was_dropped_after_its_results_were_sent_is_an_error_of_the_next_call():
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], in_flight=2)
    built, exchange = build(plan, "moe"), plan.exchange
    x_TH, routes = batch(spec(), 5)
    trip = exchange.open(plan.wiring("moe").exchange_spec)
    trip.send(exchange.encode(trip.spec, x_TH), routes)
    trip.send_back(built.experts(trip.receive()))
    trip.is_dropped = True
    assert "what `start` returned is gone" in str(raised(built, x_TH, routes))
    assert built(x_TH, routes).shape == (5, 32)  # it is said once


# -- One thread at a time ------------------------------------------------------------------------------------


class Paused(ReferenceExperts):
    """Experts that wait, in the middle of a call, until another thread has tried to make one."""

    name = "paused"
    inside = tried = None

    def compute(self, received, *, finalize):
        if self.inside is not None:
            self.inside.set()
            self.tried.wait(20)
        return super().compute(received, finalize=finalize)


def two_threads(group, exchange):
    layer = spec(experts=Paused)
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    inside, tried = threading.Event(), threading.Event()
    built.experts.inside, built.experts.tried = inside, tried
    refused = []

    def second():
        inside.wait(20)
        refused.append(raised(built, x_TH, routes))
        refused.append(raised(gather_stats, plan))
        tried.set()

    thread = threading.Thread(target=second, name="second")
    thread.start()
    found = built(x_TH, routes)
    thread.join()
    built.experts.inside = None
    with ThreadPoolExecutor(1) as pool:  # one after the other, threads may change
        later = pool.submit(built, x_TH, routes).result()
    return refused, same_bits(found, expected), same_bits(later, expected)


@every_exchange
def test_a_second_thread_is_refused_while_a_call_is_under_way(exchange):
    for refused, found, later in on_ranks(2, two_threads, exchange):
        assert [type(error) for error in refused] == [ConcurrentUse] * 2
        assert "thread 'second' calls the plan, which thread 'rank " in str(refused[0])
        assert found
        assert later


def on_a_cpu(group, exchange):
    """What only comes after something else, or on GPUs alone, is refused by name."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 5, seed=group.rank)
    with plan.exchange.begin(exchange_spec) as trip:
        first = raised(trip.combine, None)
    no_routes = raised(plan.exchange.dispatch, exchange_spec, encoded(plan, "moe", x_TH), routes.topk_ids_TK)
    fixed = raised(plan.fixed_shapes)
    plan.synchronize()
    return [first, no_routes, fixed], built(x_TH, routes).shape


@every_exchange
def test_what_is_not_ready_or_only_on_gpus_is_refused(exchange):
    for errors, shape in on_ranks(2, on_a_cpu, exchange):
        first, no_routes, fixed = map(str, errors)
        assert "nothing was dispatched" in first
        assert "the routes are a tensor int64[5, 2]" in no_routes
        assert f"{exchange} on cpu was asked for fixed shapes" in fixed
        assert shape == (5, 32)
