"""A paranoid plan says nothing where nothing is wrong, gives the same bits, and is agreed on."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, seed, settings

import tokenyard as ty
from tests.exchange.strategies import cases
from tests.models import UNREDUCED, WATCHED, batch, build, on_ranks, raised, spec
from tests.paranoid.tampering import told
from tokenyard.conformance.cases import random_weights, run_case, same_bits
from tokenyard.conformance.suites import assert_passed, check_exchange
from tokenyard.conformance.twin import twin
from tokenyard.errors import ContractError, InputError, PeerFailed, PlanError
from tokenyard.exchange import Pending, TwoSidedTransport
from tokenyard.exchange.integrity.watched import WatchedTransport
from tokenyard.exchange.integrity.workspace_guards import GUARD_BYTES
from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport
from tokenyard.formats import Payload
from tokenyard.group import thread_groups
from tokenyard.planning.drafting import PARANOID_VARIABLE
from tokenyard.routing import Placement

every_exchange = pytest.mark.parametrize("exchange", WATCHED)


@pytest.fixture
def paranoid(monkeypatch):
    monkeypatch.setenv(PARANOID_VARIABLE, "1")


# Handles, growth and many rounds are below, on layers that are paranoid by argument.
@pytest.mark.long  # the other tests of this file are the short ones
@every_exchange
def test_every_exchange_passes_its_suite(paranoid, exchange):
    assert_passed(check_exchange(exchange, ranks="threads", world=3, rounds=4))


def test_any_layer(paranoid):
    seen = []

    @seed(7)
    @settings(max_examples=16, derandomize=False, database=None)
    @given(case=cases(large=False, max_world=4, exchanges=WATCHED))
    def run(case):
        seen.append(case.exchange)
        for outcome in ty.launch(case.world, run_case, case, ranks="threads"):
            assert outcome.passed, outcome

    run()
    assert set(seen) == set(WATCHED)


def both_ways(group, exchange):
    """Whether layers give the same bits with and without a watch, with two in flight, growth, and a failed round."""
    summed_by = "caller" if exchange in UNREDUCED else "exchange"
    layers = [
        spec("moe", wire="mxfp8", combine_wire="nvfp4"),
        spec("head", hidden_size=100, num_experts=3, top_k=4, max_tokens=9, reduce_ranks=summed_by),
        spec("late", hidden_size=300, wire="fp8_block128", dtype=torch.float16, placement="round_robin"),
    ]
    bits = []
    for paranoid in (False, True):
        plan = ty.plan(layers[:2], group, exchange=exchange, in_flight=2, paranoid=paranoid)
        results = [_run(plan, layer, seed) for seed in range(3) for layer in layers[:2]]
        results += _two_in_flight(plan, layers[0])
        plan.extend(layers[2:])
        results += [_run(plan, layer, seed) for seed in range(2) for layer in layers]
        failed = raised(_run, plan, layers[0], 0, tokens=17 if group.rank == 1 else 3)
        assert isinstance(failed, InputError if group.rank == 1 else PeerFailed)
        plan.trim(keep=["moe"])
        results += [_run(plan, layers[0], seed) for seed in range(4)]
        assert str(plan).splitlines()[0].endswith(", paranoid") == paranoid
        plan.close()
        bits.append(results)
    return all(same_bits(plain, watched) for plain, watched in zip(*bits, strict=True))


def _run(plan, layer, seed, tokens=None):
    built, rank = build(plan, layer.name), plan.group.rank
    x_TH, routes = batch(
        layer, (seed * 3 + rank * 4) % 9 if tokens is None else tokens, seed=100 * seed + rank
    )
    if layer.reduce_ranks == "caller":
        return built.unreduced(x_TH, routes).reduce().y_TH
    return built(x_TH, routes, add=x_TH)


def _two_in_flight(plan, layer):
    built, rank = build(plan, layer.name), plan.group.rank
    flights = []
    for number in range(2):
        x_TH, routes = batch(layer, 5 + number, seed=10 * number + rank)
        rows = plan.exchange.encode(built.wiring.exchange_spec, x_TH)
        flights.append(plan.exchange.dispatch(built.wiring.exchange_spec, rows, routes))
    return [flight.combine(built.experts(flight.received)).y_TH for flight in flights]


@every_exchange
def test_the_bits_are_the_same_with_and_without(exchange):
    assert on_ranks(3, both_ways, exchange) == [True] * 3


def goes_on(group, exchange):
    layer = spec(experts="reference", placement=Placement.replicated(Placement.contiguous(5, 3), {4: [0]}))
    plan = ty.plan([layer], group, exchange=exchange, paranoid=True)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 4, seed=group.rank)
    built(x_TH, routes)
    if group.rank == 2:
        group.leave("it was asked to")
        return None
    plan.go_on_without([2])
    wiring = plan.wiring("moe")
    y_TH = build(plan, "moe")(x_TH, routes)
    kept = wiring.exchange_spec.placement.resolve(routes.topk_ids_TK, plan.group.rank)[0] >= 0
    left = dataclasses.replace(routes, topk_ids_TK=routes.topk_ids_TK.masked_fill(~kept, -1))
    due = twin(wiring, random_weights(layer, 0), x_TH, left, plan.group.rank)
    return same_bits(y_TH, due), plan.draft.paranoid


@every_exchange
def test_the_ranks_that_are_left_stay_paranoid(exchange):
    assert on_ranks(3, goes_on, exchange)[:2] == [(True, True)] * 2


# -- The plan ------------------------------------------------------------------------------------------------


def one_of_them(group):
    return told(raised(ty.plan, [spec()], group, paranoid=group.rank == 1))


def test_all_ranks_are_paranoid_or_none_is():
    for error in on_ranks(2, one_of_them):
        assert error["kind"] == "PlanMismatch"
        assert "paranoid: rank 0 has False, rank 1 has True" in error["text"]


@pytest.mark.parametrize("said", ["yes", "2"])
def test_what_else_the_environment_says_is_an_error(monkeypatch, said):
    monkeypatch.setenv(PARANOID_VARIABLE, said)
    with pytest.raises(InputError, match=f"{PARANOID_VARIABLE}='{said}'"):
        ty.draft([spec()], 2)


def test_neither_does_an_argument_that_is_no_bool():
    with pytest.raises(InputError, match="paranoid='yes'"):
        ty.draft([spec()], 2, paranoid="yes")


def test_zero_in_the_environment_is_no(monkeypatch):
    monkeypatch.setitem(os.environ, PARANOID_VARIABLE, "0")
    assert not ty.draft([spec()], 2).paranoid


def test_seals_are_in_the_bytes_of_the_plan():
    plain, watched = (ty.draft([spec()], 2, exchange="one_sided", paranoid=p) for p in (False, True))
    per_row = [d.rows()[0]["bytes_per_row"] for d in (plain, watched)]
    # Three numbers, a checksum of the one payload, and on the way out a copy of two choices.
    assert per_row[1]["dispatch"] - per_row[0]["dispatch"] == 8 * (3 + 1 + 2)
    assert per_row[1]["combine"] - per_row[0]["combine"] == 8 * (3 + 1)


def test_a_payload_cannot_be_called_as_the_checksums_are():
    with pytest.raises(PlanError, match="checksums"):
        ty.draft([spec(payloads=(Payload(name="checksums", dtype=torch.uint8, width=1),))], 2)


class OnGpus(SharedMemoryTransport):
    """Says what one_sided says on GPUs, on a machine that has none."""

    name = "on_gpus"

    @classmethod
    def watches(cls, group):
        class Elsewhere:
            device = torch.device("cuda")

        return super().watches(Elsewhere)


def refused(group):
    error = raised(ty.plan, [spec()], group, exchange=OnGpus, paranoid=True)
    plain = ty.plan([spec()], group, exchange=OnGpus)
    return told(error), plain.draft.paranoid, [str(choice) for choice in error.alternatives]


def test_where_an_exchange_cannot_be_watched_the_plan_says_which_can():
    for error, plain, choices in on_ranks(2, refused):
        assert error["kind"] == "PlanError"
        assert "paranoid=True: the kernels that move rows between GPUs leave no checksums" in error["text"]
        assert {"exchange=two_sided", "exchange=allgather"} <= set(choices)
        assert plain is False


class Noting(TwoSidedTransport):
    """Notes what it is asked for."""

    name = "noting"

    def __init__(self, group, *, in_flight=1, guard=0):
        super().__init__(group, in_flight=in_flight, guard=guard)
        self.asked = [("made", in_flight, guard)]
        for call in ("serve", "trim", "warmup", "fixed_shapes", "fail", "region_bytes"):
            setattr(self, call, lambda *given, call=call: self.asked.append((call, *given)))
        for call in ("synchronize", "close", "lost"):
            setattr(self, call, lambda call=call: self.asked.append((call,)) or [7])


def test_a_transport_that_is_watched_does_all_that_it_did():
    watched = WatchedTransport(Noting, thread_groups(1)[0], in_flight=3)
    failure = SimpleNamespace(arrival=None, region=1)
    watched.serve(["a"])
    watched.trim(["b"])
    watched.warmup(["c"])
    watched.fixed_shapes(4)
    watched.fail(failure)
    watched.region_bytes("layer")
    assert watched.lost() == [7]
    watched.synchronize()
    watched.close()
    assert watched.inner.asked == [
        ("made", 3, GUARD_BYTES),
        ("serve", ["a"]),
        ("trim", ["b"]),
        ("warmup", ["c"]),
        ("fixed_shapes", 4),
        ("fail", failure),
        ("region_bytes", "layer"),
        ("lost",),
        ("synchronize",),
        ("close",),
    ]
    assert (watched.in_flight, watched.guard, watched.guards) == (3, GUARD_BYTES, None)
    failed = []
    watched.guards = SimpleNamespace(round_failed=failed.append)
    watched.fail(failure)
    watched.fail(SimpleNamespace(arrival="came", region=2))  # in the combine, rows have been looked at
    assert failed == [1]


class HomeElsewise(TwoSidedTransport):
    """Brings results home as something that cannot be looked at row by row."""

    name = "home_elsewise"

    def send_back(self, results):
        home = super().send_back(results)
        return Pending(lambda: [home.wait()])


def test_results_that_cannot_be_looked_at_are_refused():
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=HomeElsewise, paranoid=True)
    error = raised(build(plan, "moe"), *batch(spec(), 3))
    assert isinstance(error, ContractError)
    assert "home_elsewise brings results home as" in str(error)
