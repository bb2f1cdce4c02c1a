"""Transports: siblings under one exchange, whose calls to send wait for nobody; routes that are used again."""

import threading
from typing import Generic

import pytest
import torch

import tokenyard as ty
from tests.models import WATCHED, batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import PlanBroken
from tokenyard.exchange import EXCHANGES, Exchange, LocalTransport, Pending, Transport
from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport
from tokenyard.exchange.transports.one_sided.declarations import OneSided
from tokenyard.group import thread_groups
from tokenyard.planning import gather_stats
from tokenyard.routing import Placement
from tokenyard.rows import ExpertRows

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def test_transports_are_siblings_and_the_exchange_has_no_subclasses():
    classes = {*EXCHANGES.values(), CudaTransport}
    # What CPUs and GPUs declare alike is abstract: no transport inherits from another.
    assert {base for cls in classes for base in cls.__bases__} <= {Transport, OneSided, Generic}
    assert OneSided.__abstractmethods__ >= {"send", "send_back", "fail"}
    assert Exchange.__final__
    assert Exchange.__subclasses__() == []


def waits_between(base, sent):
    """A transport whose rank 1 starts each phase only when rank 0 has returned from sending."""

    class WaitsBetween(base):
        name = "waits_between"

        def send(self, batch):
            return self.in_order("out", lambda: super(WaitsBetween, self).send(batch))

        def send_back(self, results):
            return self.in_order("back", lambda: super(WaitsBetween, self).send_back(results))

        def in_order(self, way, start):
            if self.group.rank == 1:
                assert sent[way].wait(20), "rank 0 has not returned from sending"
            pending = start()
            sent[way].set()
            return pending

    return WaitsBetween


def one_call(group, exchange, paranoid):
    plan = ty.plan([spec()], group, exchange=exchange, paranoid=paranoid)
    x_TH, routes = batch(spec(), 4, seed=group.rank)
    return build(plan, "moe")(x_TH, routes).shape


@pytest.mark.parametrize(
    ("exchange", "paranoid"), [*((name, False) for name in EXCHANGES), *((name, True) for name in WATCHED)]
)
def test_sending_waits_for_nobody(exchange, paranoid):
    sent = {"out": threading.Event(), "back": threading.Event()}
    cls = waits_between(EXCHANGES[exchange], sent)
    assert ty.launch(2, one_call, cls, paranoid, deadline=30) == [(4, 32)] * 2


def along_the_same_routes(group, exchange):
    """Two batches, the second along the routes of the first: as if its own had been given."""
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange)
    wiring = plan.wiring("moe")
    x_TH, routes = batch(layer, 5 - group.rank, seed=group.rank)
    other_TH = torch.randn_like(x_TH)
    first = plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes)
    first.combine(ExpertRows(rows_RH=first.received.dense().decode()))
    found = []
    for known in (routes, first.arrival.routes):
        arrival = plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(other_TH), known)
        rows_RH = arrival.received.dense().decode()
        home = arrival.combine(ExpertRows(rows_RH=rows_RH)).y_TH
        found.append((rows_RH.clone(), arrival.received.routes.ids_RK.clone(), home))
    return all(same_bits(*pair) for pair in zip(*found, strict=True)), first.arrival.routes.num_tokens


@every_exchange
def test_routes_of_a_batch_can_be_used_again(exchange):
    assert on_ranks(2, along_the_same_routes, exchange) == [(True, 5), (True, 4)]


def routes_of_elsewhere(group):
    here, there = spec(num_experts=4), spec("other", num_experts=4, placement=Placement.round_robin(4, 2))
    plan = ty.plan([here, there], group)
    x_TH, routes = batch(here, 3, seed=group.rank)
    wire = plan.wiring("moe").wire
    arrival = plan.exchange.dispatch(plan.wiring("moe").exchange_spec, wire.encode(x_TH), routes)
    arrival.combine(ExpertRows(rows_RH=arrival.received.dense().decode()))
    other = plan.wiring("other").exchange_spec
    return str(raised(plan.exchange.dispatch, other, wire.encode(x_TH), arrival.arrival.routes))


def test_routes_of_a_layer_whose_experts_are_elsewhere_are_refused():
    for message in on_ranks(2, routes_of_elsewhere):
        assert "the routes are those of layer 'moe', whose experts are elsewhere" in message
        assert "fix: pass Routes" in message


def test_a_pending_call_is_finished_once():
    calls = []
    pending = Pending(lambda: calls.append(1) or len(calls))
    assert [pending.wait(), pending.wait()] == [1, 1]


class FewTerms(LocalTransport):
    """A transport that adds one tensor in its sum, as those on GPUs add a few."""

    name = "few_terms"
    most_terms = 1


def test_as_many_tensors_are_added_as_a_transport_can():
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], exchange=FewTerms)
    layer, wiring = build(plan, "moe"), plan.wiring("moe")
    x_TH, routes = batch(spec(), 3)

    def combined(terms):
        arrival = plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes)
        return arrival.combine(layer.experts(arrival.received), add=[x_TH] * terms).y_TH

    assert not torch.equal(combined(1), combined(0))
    assert "2 tensors to add; expected at most 1 on a GPU" in str(raised(combined, 2))
    assert combined(1).shape == (3, 32)  # the plan goes on


class LosesLater(LocalTransport):
    """A transport whose calls do not wait: what went wrong is told when somebody asks."""

    name = "loses_later"

    def synchronize(self):
        raise ty.PeerLost([0], phase="dispatch", waited=0.5)


def test_a_loss_that_is_told_when_the_device_is_waited_for_breaks_the_plan():
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=LosesLater)
    assert isinstance(raised(plan.synchronize), ty.PeerLost)
    assert isinstance(raised(build(plan, "moe"), *batch(spec(), 3)), PlanBroken)


def refused_by_one(group, exchange):
    plan = ty.plan([spec(experts="reference")], group, exchange=exchange)
    layer, wiring = build(plan, "moe"), plan.wiring("moe")
    x_TH, routes = batch(spec(), 3, seed=group.rank)
    arrival = plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes)
    if group.rank == 1:
        with pytest.raises(ValueError, match="no such results") as caught:
            arrival.refuse(ValueError("no such results"))
        said = caught.value
    else:
        said = raised(arrival.combine, layer.experts(arrival.received))
    gone = raised(arrival.combine, layer.experts(arrival.received))
    return str(said), str(gone), bool(layer(x_TH, routes).any())


@every_exchange
def test_a_rank_that_refuses_to_combine_tells_the_others_why(exchange):
    other, own = on_ranks(2, refused_by_one, exchange)
    assert "rank 1 failed in combine: ValueError: no such results" in other[0]
    assert own[0] == "no such results"
    for _, gone, worked in (other, own):
        assert "this handle is not in flight" in gone
        assert worked


class LosesAtOnce(LocalTransport):
    """A transport that finds a rank lost as it sends."""

    name = "loses_at_once"
    on_the_way = "out"

    def send(self, batch):
        if self.on_the_way == "out":
            raise ty.PeerLost([0], phase="dispatch", waited=0.5)
        return super().send(batch)

    def send_back(self, results):
        raise ty.PeerLost([0], phase="combine", waited=0.5)


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_loss_that_is_found_as_rows_are_sent_breaks_the_plan(way):
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=LosesAtOnce)
    plan.exchange.transport.on_the_way = way
    built = build(plan, "moe")
    assert type(raised(built, *batch(spec(), 3))) is ty.PeerLost
    assert isinstance(raised(built, *batch(spec(), 3)), PlanBroken)


def test_a_loss_in_a_call_that_moves_no_rows_breaks_the_plan_too(monkeypatch):
    plan = ty.plan([spec()], thread_groups(1)[0])

    def lose(*_, **__):
        raise ty.PeerLost([0], phase="gather_stats", waited=0.5)

    monkeypatch.setattr(plan.group, "gather_json", lose)
    assert type(raised(gather_stats, plan)) is ty.PeerLost
    assert isinstance(raised(build(plan, "moe"), *batch(spec(), 3)), PlanBroken)


@pytest.mark.parametrize("exchange", ["local", *EXCHANGES])
def test_what_arrives_wants_no_gradient_and_round_trips_leave_nothing_open(exchange):
    plan = ty.plan([spec(experts="reference")], thread_groups(1)[0], exchange=exchange)
    built, wiring = build(plan, "moe"), plan.wiring("moe")
    x_TH, routes = batch(spec(), 3)
    wants = ty.Routes(
        topk_ids_TK=routes.topk_ids_TK, topk_weights_TK=routes.topk_weights_TK.clone().requires_grad_()
    )
    with plan.exchange.begin(wiring.exchange_spec) as trip:
        received = trip.dispatch(plan.exchange.encode(trip.spec, x_TH), wants)
        assert not received.routes.weights_RK.requires_grad
        home = trip.combine(built.experts(received)).y_TH
    assert plan.exchange.trips._open == []
    assert same_bits(built.start(x_TH, routes).finish(), home)


class CountsAtEnd(LocalTransport):
    """A transport that knows only after the combine how many rows it has moved, as kernels do."""

    name = "counts_at_end"
    reads_values = False
    returned = None

    def rows_sent(self, batch, arrival):
        return [0]

    def counts_at_end(self, arrival):
        return [7], [5]

    def bytes_returned(self, arrival):
        self.returned = arrival.counts_W
        return super().bytes_returned(arrival)


def test_rows_that_are_counted_after_the_combine():
    plan = ty.plan([spec(wire="mxfp8")], thread_groups(1)[0], exchange=CountsAtEnd)
    x_TH, routes = batch(spec(), 3)
    build(plan, "moe")(x_TH, routes)
    stats = plan.exchange.stats["moe"]
    assert (stats.rows_sent, stats.rows_received) == ([7], [3 + 5])  # 3 were known when they came
    row = plan.exchange.transport.region_bytes(plan.wiring("moe").exchange_spec).dispatch_row
    assert stats.dispatch_bytes == [7 * row]
    assert row > 0
    assert plan.exchange.transport.returned == (5,)
