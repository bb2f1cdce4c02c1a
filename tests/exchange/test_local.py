"""`local` serves one rank: the bits, types and errors are those of every other exchange."""

import pytest
import torch
from hypothesis import given, seed, settings

import tokenyard as ty
from tests.exchange.strategies import cases
from tests.models import UNREDUCED, WATCHED, batch, build, raised, spec
from tokenyard.conformance.cases import run_case, same_bits
from tokenyard.exchange import LocalTransport
from tokenyard.formats import Payload
from tokenyard.group import thread_groups
from tokenyard.routing import Placement, SoftmaxRouter
from tokenyard.rows import RoutingLogits

OTHERS = ["one_sided", "two_sided", "allgather"]


def alone():
    return thread_groups(1)[0]


@seed(1)
@settings(max_examples=60, database=None)
@given(case=cases(large=False, max_world=1, exchanges=("local",)))
def test_any_layer_on_one_rank(case):
    outcome = run_case(alone(), case)
    assert outcome.passed, outcome


def routes_of(kind, x_TH, routes):
    """Routes of every kind: whole, some choices of nobody, tokens that nobody takes, one expert twice."""
    ids_TK = routes.topk_ids_TK.clone()
    if kind == "gaps":
        ids_TK[::2, 0] = -1
    elif kind == "nobody":
        ids_TK[1:] = -1
    elif kind == "duplicates":
        ids_TK[:, 1] = ids_TK[:, 0]
    return ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=routes.topk_weights_TK)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("kind", ["whole", "gaps", "nobody", "duplicates"])
@pytest.mark.parametrize(
    ("dtype", "wire", "combine_wire"),
    [
        (torch.bfloat16, None, None),
        (torch.float16, "fp8_block128", "bf16"),
        (torch.float32, None, None),
        (torch.bfloat16, "mxfp8", "mxfp8"),
        (torch.bfloat16, "nvfp4", "nvfp4"),
    ],
)
def test_results_and_counters_are_those_of_other_exchanges(dtype, wire, combine_wire, kind, tokens):
    layer = spec(dtype=dtype, wire=wire, combine_wire=combine_wire, experts="reference")
    x_TH, routes = batch(layer, tokens)
    routes = routes_of(kind, x_TH, routes)
    results = {}
    for exchange in ("local", *OTHERS):
        plan = ty.plan([layer], alone(), exchange=exchange)
        built = build(plan, "moe")
        out_TH = torch.full_like(x_TH, 7.0)
        returned = built(x_TH, routes, out=out_TH, add=x_TH)
        assert returned is out_TH
        stats = plan.stats()["moe"]
        results[exchange] = built(x_TH, routes), out_TH, (stats.tokens, stats.rows_sent, stats.rows_received)
    y_TH, out_TH, counted = results["local"]
    for exchange in OTHERS:
        assert same_bits(y_TH, results[exchange][0]), exchange
        assert same_bits(out_TH, results[exchange][1]), exchange
        assert counted == results[exchange][2], exchange


@pytest.mark.parametrize("kind", ["whole", "gaps"])
def test_what_arrives_is_that_of_other_exchanges_and_a_copy(kind):
    payload = Payload(name="position", dtype=torch.int64, width=1)
    layer = spec(payloads=(payload,), placement=Placement.explicit(5, [[4, 3, 2, 1, 0]]))
    x_TH, routes = batch(layer, 5)
    routes, extra = routes_of(kind, x_TH, routes), {"position": torch.arange(5).unsqueeze(1)}
    arrived = {}
    for exchange in ("local", "two_sided"):
        plan = ty.plan([layer], alone(), exchange=exchange, in_flight=2)
        wiring = plan.wiring("moe")
        first, second = (
            plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes, extra)
            for _ in range(2)
        )
        given = [x_TH, routes.topk_ids_TK, routes.topk_weights_TK, *extra.values()]
        assert (first.arrival.round, second.arrival.round) == (1, 2)
        for arrival in (first, second):
            held = arrival.received
            rows = held.rows if held.slots_R is None else held.rows.select(held.slots_R)
            beside = [held.routes.ids_RK, held.routes.weights_RK, *held.extra.values()]
            mine = [*held.rows.payloads.values(), *beside]
            assert not {t.data_ptr() for t in mine} & {t.data_ptr() for t in given}
            arrived.setdefault(exchange, []).append([*rows.payloads.values(), *beside])
    for mine, others in zip(arrived["local"], arrived["two_sided"], strict=True):
        assert [t.dtype for t in mine] == [t.dtype for t in others]
        assert all(map(same_bits, mine, others))


def test_rows_come_home_unreduced_as_in_other_exchanges():
    layer = spec(reduce_ranks="caller", experts="reference")
    x_TH, routes = batch(layer, 4)
    rows = {
        exchange: build(ty.plan([layer], alone(), exchange=exchange), "moe").unreduced(x_TH, routes)
        for exchange in ("local", *UNREDUCED)
    }
    for exchange in UNREDUCED:
        assert all(map(same_bits, rows["local"].rows_by_rank, rows[exchange].rows_by_rank))
        assert all(map(torch.equal, rows["local"].tokens_by_rank, rows[exchange].tokens_by_rank))


def test_a_paranoid_plan_watches_it():
    layer = spec(wire="mxfp8", experts="reference")
    x_TH, routes = batch(layer, 4)
    y_TH = {
        exchange: build(ty.plan([layer], alone(), exchange=exchange, paranoid=True), "moe")(x_TH, routes)
        for exchange in ("local", *WATCHED)
    }
    assert all(same_bits(y_TH["local"], y_TH[exchange]) for exchange in WATCHED)


def test_auto_takes_it_for_one_rank_only():
    assert "exchange local (auto: one rank), 1 in flight" in str(ty.plan([spec()], alone()))
    assert ty.draft([spec()], 1).exchange is LocalTransport
    assert ty.draft([spec()], 2).exchange.name == "one_sided"
    assert ty.draft([spec()], 1, device=torch.device("cuda")).exchange.name == "one_sided"


def test_two_ranks_are_refused_and_told_what_works():
    error = raised(ty.draft, [spec()], 2, exchange="local")
    assert "exchange=local: local serves at most 1 rank, and the experts are on 2" in str(error)
    assert "exchange=one_sided" in str(error)


def test_a_call_takes_few_operators():
    """A call of a layer on one rank: 30 operators beside those of its router and its experts, at most."""
    layer = spec(experts="grouped")
    x_TH, routes = batch(layer, 1)
    built = build(ty.plan([layer], alone()), "moe")

    def operators(call):
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return sum(event.cpu_parent is None for event in profile.events())

    kept = []
    compute = built.experts.compute
    built.experts.compute = lambda received, finalize: (
        kept.append(received) or compute(received, finalize=finalize)
    )
    whole = operators(lambda: built(x_TH, routes))
    assert whole - operators(lambda: compute(kept[0], finalize=True)) <= 30


class Noting(LocalTransport):
    """A transport that makes room for layers, and has no way of its own to give some back."""

    served = ()

    def serve(self, specs):
        self.served = tuple(specs)


def test_a_transport_that_is_trimmed_serves_the_layers_that_are_left():
    transport = Noting(alone())
    transport.trim(["body", "head"])
    assert transport.served == ("body", "head")


def test_logits_that_arrive_are_a_copy():
    layer = spec(experts="self_routing", router=SoftmaxRouter(top_k=2, renormalize=True))
    plan = ty.plan([layer], alone(), exchange="local")
    x_TH, _ = batch(layer, 4)
    logits_TE = torch.randn(4, 5, requires_grad=True)
    arrival = plan.exchange.dispatch(
        plan.wiring("moe").exchange_spec,
        plan.wiring("moe").wire.encode(x_TH),
        RoutingLogits(logits_RE=logits_TE),
    )
    held = arrival.received.routes.logits_RE
    assert torch.equal(held, logits_TE)
    assert held.data_ptr() != logits_TE.data_ptr()
    assert not held.requires_grad


def test_experts_that_write_into_their_weights_do_not_write_into_those_of_the_caller():
    plan = ty.plan([spec()], alone(), exchange="local")
    wiring = plan.wiring("moe")
    x_TH, routes = batch(spec(), 3)
    weights_TK = routes.topk_weights_TK.clone()
    assert weights_TK.dtype is torch.float32
    arrival = plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes)
    arrival.received.routes.weights_RK.zero_()
    assert torch.equal(routes.topk_weights_TK, weights_TK)


def test_an_exchange_counts_for_the_layers_that_it_serves():
    """One that stays goes on counting; one that leaves is counted no longer."""
    both = [spec("stays"), spec("leaves")]
    plan = ty.plan(both, alone())
    build(plan, "stays")(*batch(both[0], 3, seed=0))
    plan.exchange.serve([plan.wiring("stays").exchange_spec])
    assert {name: stats.tokens for name, stats in plan.stats().items()} == {"stays": 3}
