"""What one_sided has: a workspace that grows, ranks that run ahead; and results written in place, as in two_sided."""

import time
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.errors import ContractError, Drifted, PlanError
from tokenyard.exchange import SharedMemoryTransport
from tokenyard.exchange.announcement import Phase
from tokenyard.group import thread_groups
from tokenyard.rows import ExpertRows

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])

SMALL = {"hidden_size": 16, "experts": "reference"}
LARGE = {"hidden_size": 600, "experts": "reference", "wire": "bf16", "max_tokens": 64}


def right(plan, layer, tokens, seed):
    """Whether a layer's result is the twin's, bit for bit."""
    x_TH, routes = batch(layer, tokens, seed=seed)
    y_TH = build(plan, layer.name)(x_TH, routes)
    expected = twin(plan.wiring(layer.name), random_weights(layer, 0), x_TH, routes, plan.group.rank)
    return same_bits(y_TH, expected)


class Sleepy(SharedMemoryTransport):
    """Rank 1 falls asleep inside every combine: it has heard from all, and has not pulled yet."""

    name = "sleepy"

    naps = 0

    def at_home(self, arrival):
        home = super().at_home(arrival)
        if self.group.rank == 1:
            time.sleep(0.02)
            self.naps += 1
        return home


def run_ahead(group, in_flight):
    layers = [spec("small", **SMALL), spec("large", **LARGE), spec("four bits", **SMALL | {"wire": "nvfp4"})]
    plan = ty.plan(layers, group, exchange=Sleepy, in_flight=in_flight)
    built = {layer.name: build(plan, layer.name) for layer in layers}
    expected, results = [], []
    for turn in range(12):
        layer = layers[turn % 3]
        x_TH, routes = batch(layer, (turn * 5 + group.rank) % 16, seed=100 * turn + group.rank)
        results.append(built[layer.name](x_TH, routes))
        expected.append((layer, x_TH, routes))
    assert plan.exchange.transport.naps == (12 if group.rank == 1 else 0)
    return all(
        same_bits(y_TH, twin(plan.wiring(layer.name), random_weights(layer, 0), x_TH, routes, group.rank))
        for y_TH, (layer, x_TH, routes) in zip(results, expected, strict=True)
    )


@both_kinds
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_rank_that_sleeps_inside_combine_is_never_overwritten_by_those_that_run_ahead(ranks, in_flight):
    assert on_ranks(4, run_ahead, in_flight, ranks=ranks) == [True] * 4


class Late(SharedMemoryTransport):
    """Rank 1 has told the others that its first combine is here, and looks into its own mail late."""

    name = "late"

    def _make_workspace(self, layout):
        super()._make_workspace(layout)
        hear = self.workspace.signals.hear

        def hear_late(mine):
            if self.group.rank == 1 and mine.phase is Phase.COMBINE and mine.round == 1:
                time.sleep(0.3)
            return hear(mine)

        self.workspace.signals.hear = hear_late


def mail_of_rounds_that_failed(group):
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer], group, exchange=Late, in_flight=2)
    exchange, exchange_spec, built = plan.exchange, plan.wiring("moe").exchange_spec, build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    rows = plan.wiring("moe").wire.encode(x_TH)
    flights = [exchange.dispatch(exchange_spec, rows, routes)]
    wrong = ty.Routes(topk_ids_TK=routes.topk_ids_TK + 99, topk_weights_TK=routes.topk_weights_TK)
    refused = [raised(exchange.dispatch, exchange_spec, rows, wrong) for _ in range(2)]
    flights.append(exchange.dispatch(exchange_spec, rows, routes))
    found = [flight.combine(built.experts(flight.received)).y_TH for flight in flights]
    return all(map(bool, refused)) and same_bits(*found)


def test_mail_is_read_before_it_is_overwritten_however_many_rounds_fail_in_between():
    assert on_ranks(2, mail_of_rounds_that_failed) == [True, True]


def a_thousand_rounds(group):
    layers = [spec("small", **SMALL), spec("large", hidden_size=100, experts="reference", wire="mxfp8")]
    plan = ty.plan(layers, group, exchange="one_sided")
    batches = {layer.name: batch(layer, 3 + group.rank, seed=group.rank) for layer in layers}
    built = {layer.name: build(plan, layer.name) for layer in layers}
    first = {name: built[name](*batches[name]) for name in built}
    return all(same_bits(built[name](*batches[name]), first[name]) for _ in range(500) for name in built)


def test_a_thousand_rounds_without_drift():
    assert on_ranks(2, a_thousand_rounds, ranks="processes") == [True] * 2


# -- Growth --------------------------------------------------------------------------------------------------


def grow(group):
    plan = ty.plan([spec("a", **SMALL)], group, exchange="one_sided")
    layer = build(plan, "a")
    x_TH, routes = batch(spec("a", **SMALL), 4, seed=group.rank)
    before = layer(x_TH, routes)
    flight = plan.exchange.dispatch(layer.wiring.exchange_spec, layer.wiring.wire.encode(x_TH), routes)
    old = plan.exchange.transport.workspace
    plan.extend([spec("b", **LARGE)])
    grown = plan.exchange.transport.workspace
    stale = raised(flight.combine, ExpertRows(rows_RH=torch.zeros(0)))
    plan.extend([spec("c", **SMALL)])
    kept = plan.exchange.transport.workspace
    works = [right(plan, spec(n, **c), 5, group.rank) for n, c in (("a", SMALL), ("b", LARGE), ("c", SMALL))]
    same = same_bits(layer(x_TH, routes), before)  # a layer that was built before the growth
    plan.trim(keep=["a", "c"])
    trimmed = plan.exchange.transport.workspace
    gone = raised(plan.wiring, "b")
    works += [right(plan, spec(n, **SMALL), 5, group.rank) for n in "ac"]
    plan.close()
    return {
        "rebuilt": grown is not old and grown.nbytes > old.nbytes,
        "kept": kept is grown,
        "trimmed": trimmed is not kept and trimmed.nbytes == old.nbytes,
        "stale": type(stale).__name__,
        "gone": type(gone).__name__,
        "works": all(works) and same,
        "closed": type(raised(layer, x_TH, routes)).__name__,
    }


@both_kinds
@pytest.mark.parametrize("world", [2, 5])
def test_the_workspace_grows_for_what_does_not_fit_and_shrinks_on_request(ranks, world):
    assert (
        on_ranks(world, grow, ranks=ranks)
        == [
            {
                "rebuilt": True,
                "kept": True,
                "trimmed": True,
                "stale": "HandleError",
                "gone": "UnknownName",
                "works": True,
                "closed": "HandleError",
            }
        ]
        * world
    )


def cannot_allocate(group):
    plan = ty.plan([spec("a", **SMALL)], group, exchange="one_sided")
    old = plan.exchange.transport.workspace
    if group.rank == 1:
        from tokenyard.group import shared_memory

        def full(*_):
            raise OSError(28, "No space left on device")

        shared_memory.os.posix_fallocate, allocate = full, shared_memory.os.posix_fallocate
    error = raised(plan.extend, [spec("b", **LARGE)])
    if group.rank == 1:
        shared_memory.os.posix_fallocate = allocate
    unchanged = plan.exchange.transport.workspace is old and plan.draft.specs[-1].name == "a"
    works = right(plan, spec("a", **SMALL), 4, group.rank)
    plan.extend([spec("b", **LARGE)])  # and now there is room
    return type(error).__name__, str(error), unchanged, works, right(plan, spec("b", **LARGE), 4, group.rank)


def test_if_one_rank_cannot_allocate_all_raise_and_the_old_workspace_still_works():
    results = on_ranks(3, cannot_allocate, ranks="processes")
    assert [kind for kind, *_ in results] == ["PeerFailed", "GroupError", "PeerFailed"]
    assert "bytes cannot be allocated (No space left on device)" in results[1][1]
    assert "rank 1 failed in sharing memory" in results[0][1]
    for _, _, unchanged, works, after in results:
        assert unchanged
        assert works
        assert after


class TooSmall(SharedMemoryTransport):
    """Says of wide layers that their results take a byte less than they do."""

    name = "too small"

    @classmethod
    def region_bytes(cls, spec):
        nbytes = super().region_bytes(spec)
        return nbytes if spec.hidden_size < 600 else replace(nbytes, combine=spec.combine_slots.end - 1)


def test_a_layer_that_does_not_fit_into_the_workspace_is_named_before_the_first_token():
    errors = on_ranks(
        2, lambda group: raised(ty.plan, [spec("a", **SMALL), spec("b", **LARGE)], group, exchange=TooSmall)
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, ContractError)
        assert str(error).startswith(f"layer 'b', rank {rank}: a region of the workspace has")


def extend_differently(group):
    plan = ty.plan([spec("a", **SMALL)], group, exchange="one_sided")
    error = raised(plan.extend, [spec("b", top_k=1 + group.rank)])
    return type(error).__name__, right(plan, spec("a", **SMALL), 4, group.rank)


def test_ranks_that_extend_by_different_layers_all_raise_and_keep_their_plan():
    assert on_ranks(2, extend_differently) == [("PlanMismatch", True)] * 2


def descriptors_and_mappings(group):
    import os

    def count():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:tokenyard" in line for line in maps)

    def settled(most):
        """What there is, once there are no more descriptors: one that is closed in passing may still be there."""
        until = time.monotonic() + 10
        while (now := count())[0] > most and time.monotonic() < until:
            time.sleep(0.02)
        return now

    group.barrier()  # all connections are made
    before = count()
    plan = ty.plan([spec("a", **SMALL)], group, exchange="one_sided")
    during = settled(before[0])
    plan.extend([spec("b", **LARGE)])
    right(plan, spec("b", **LARGE), 4, 0)
    plan.close()
    return before, during, settled(before[0])


def test_nothing_is_left_behind_by_a_plan_that_was_closed():
    for before, during, after in on_ranks(3, descriptors_and_mappings, ranks="processes"):
        assert during[1] == before[1] + 3  # one mapping for each rank
        assert during[0] <= before[0]  # and no descriptor
        assert after[0] <= before[0]
        assert after[1] == before[1]


# -- Results written in place ---------------------------------------------------------------------------------


def in_place(group, exchange):
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer, spec("back", combine_wire="mxfp8", experts="reference")], group, exchange=exchange)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 6, seed=group.rank)
    expected = built(x_TH, routes)
    rows, exchange = built.wiring.wire.encode(x_TH), plan.exchange

    flight = exchange.dispatch(built.wiring.exchange_spec, rows, routes)
    buffer = flight.received.results
    result = built.experts(flight.received)
    buffer.rows_SH[buffer.slots_R] = result.rows_RH.to(buffer.rows_SH.dtype)
    y_TH = flight.combine(buffer.placed()).y_TH

    flight = exchange.dispatch(built.wiring.exchange_spec, rows, routes)
    wrong = str(raised(flight.combine, buffer.placed()))  # the buffer of the last dispatch

    other = build(plan, "back")
    flight = exchange.dispatch(other.wiring.exchange_spec, rows, routes)
    nowhere = flight.received.results
    flight.combine(other.experts(flight.received))
    return same_bits(y_TH, expected), wrong, nowhere


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
@both_kinds
def test_experts_may_write_their_results_straight_to_where_they_are_read_or_sent(ranks, exchange):
    for same, wrong, nowhere in on_ranks(3, in_place, exchange, ranks=ranks):
        assert same
        assert "placed in the buffer of another dispatch" in wrong or "failed in combine" in wrong
        assert nowhere is None  # quantized rows need a pass of their own


def two_buffers(group, exchange):
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built, exchange = build(plan, "moe"), plan.exchange
    batches = [batch(layer, 5, seed=10 * n + group.rank) for n in range(2)]
    expected = [built(x_TH, routes) for x_TH, routes in batches]
    flights = [
        exchange.dispatch(built.wiring.exchange_spec, built.wiring.wire.encode(x_TH), routes)
        for x_TH, routes in batches
    ]
    buffers = [flight.received.results for flight in flights]
    for flight, buffer in zip(flights, buffers, strict=True):
        buffer.rows_SH[buffer.slots_R] = built.experts(flight.received).rows_RH.to(buffer.rows_SH.dtype)
    found = [f.combine(b.placed()).y_TH for f, b in zip(flights, buffers, strict=True)]
    return all(map(same_bits, found, expected))


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_each_dispatch_in_flight_has_a_buffer_of_its_own(exchange):
    assert on_ranks(2, two_buffers, exchange) == [True, True]


# -- Where it can run ------------------------------------------------------------------------------------------


def elsewhere(group, machine):
    from tokenyard.exchange.transports.one_sided import declarations as module

    module.platform.machine, machine_before = (lambda: machine), module.platform.machine
    try:
        return raised(ty.plan, [spec()], group, exchange="one_sided")
    finally:
        module.platform.machine = machine_before


def test_cpus_that_reorder_stores_are_refused_with_exchanges_that_work():
    (error,) = on_ranks(1, elsewhere, "aarch64")
    assert isinstance(error, PlanError)
    assert "one_sided needs stores that stay in order, as on x86, not aarch64" in str(error)
    assert {alternative.changes["exchange"] for alternative in error.alternatives} == {
        "allgather",
        "two_sided",
    }


def on_two_hosts(group):
    group.host = lambda: f"host {group.rank // 2}"
    return str(raised(ty.plan, [spec()], group, exchange="one_sided"))


def test_ranks_on_several_hosts_are_refused_on_all_of_them():
    for message in on_ranks(3, on_two_hosts):
        assert "one_sided shares memory, and the ranks run on 2 hosts" in message
        assert "exchange=two_sided" in message


def test_a_transport_that_serves_no_layer_has_nobody_to_leave_and_has_lost_nobody():
    transport = SharedMemoryTransport(thread_groups(1)[0])
    (wiring,) = ty.draft([spec()], 1).wirings

    def state():
        return transport.departed(), transport.lost()

    transport.leave()
    assert state() == (False, [])
    transport.serve([wiring.exchange_spec])
    assert state() == (False, [])
    transport.leave()
    assert state() == (True, [0])
    transport.close()
    assert state() == (False, [])
    with pytest.raises(ContractError, match="the exchange has no workspace"):
        transport.workspace.nbytes  # noqa: B018


def test_experts_that_write_what_wants_a_gradient_leave_no_trace_in_the_workspace():
    plan = ty.plan([spec()], thread_groups(1)[0], exchange="one_sided")
    transport, exchange_spec = plan.exchange.transport, plan.wiring("moe").exchange_spec
    buffer = transport.results_at(exchange_spec, 0, None)
    buffer.rows_SH[0] = torch.ones(32, dtype=torch.bfloat16, requires_grad=True)
    (slots,) = transport.workspace.combine(0, exchange_spec, 0).values()
    assert buffer.rows_SH.requires_grad
    assert not slots.requires_grad
    assert slots[0].tolist() == [1.0] * 32


def in_different_layers(group):
    """Each rank calls its own layer: both have told and heard, so this round is over, and another one follows."""
    layers = [spec("a", **SMALL), spec("b", **SMALL)]
    plan = ty.plan(layers, group, exchange="one_sided")
    built = [build(plan, layer.name) for layer in layers]
    x_TH, routes = batch(layers[0], 5, seed=group.rank)
    error = raised(built[group.rank], x_TH, routes)
    return type(error), plan.exchange.rounds, right(plan, layers[0], 5, group.rank), plan.exchange.rounds


def test_a_round_in_which_the_ranks_were_in_different_layers_is_not_made_again():
    assert on_ranks(2, in_different_layers) == [(Drifted, 1, True, 2)] * 2


def test_marks_of_a_round_are_waited_for_for_so_long():
    plan = ty.plan([spec()], thread_groups(1)[0], exchange="one_sided")
    transport, started = plan.exchange.transport, time.monotonic()
    assert not transport.all_marked(1, 0.05)
    assert 0.05 <= time.monotonic() - started < 5
    transport.mark(2)
    assert [transport.all_marked(round, 0.0) for round in (1, 2, 3)] == [True, True, False]
