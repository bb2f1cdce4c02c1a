"""#41382: results that were reduced already were reduced again: 93% accuracy became 80%, without an error.

Here "reduced" is a type. This file tries every way that the API offers to reduce twice, or not at all.
"""

import dataclasses

import pytest
import torch

import tokenyard as ty
from tests.models import UNREDUCED, batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.duties import Duty, Party
from tokenyard.errors import InputError, PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.group import thread_groups
from tokenyard.routing import SoftmaxRouter
from tokenyard.rows import CombinedRows, ExpertRows, RankRows, UnfinalizedRows

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def dispatched_and_result(plan, name, x_TH, routes):
    layer = build(plan, name)
    flight = plan.exchange.dispatch(layer.wiring.exchange_spec, layer.wiring.wire.encode(x_TH), routes)
    return layer, flight


def attempts(group, exchange):
    layers = [spec(), spec("by caller", reduce_ranks="caller")]
    plan = ty.plan(layers, group, exchange=exchange)
    x_TH, routes = batch(layers[0], 4, seed=group.rank)
    found = {}

    def attempt(name, make, method="combine", layer="moe"):
        built, flight = dispatched_and_result(plan, layer, x_TH, routes)
        result = built.experts(flight.received)
        error = raised(getattr(flight, method), make(built, flight, result))
        found[name] = f"{type(error).__name__}: {error}"

    attempt("unfinalized rows", lambda built, flight, result: built.experts(flight.received, finalize=False))
    combined = build(plan, "moe")(x_TH, routes)
    attempt("a combined output", lambda *_: CombinedRows(y_TH=combined))
    attempt("a plain tensor", lambda built, flight, result: result.rows_RH)
    attempt("a tensor summed over ranks by hand", lambda built, flight, result: result.rows_RH.sum(0))
    attempt("a tuple", lambda built, flight, result: (result, None))
    attempt("nothing", lambda *_: None)
    attempt("one row per token", lambda *_: ExpertRows(rows_RH=torch.zeros(9999, 32)))
    attempt("the received rows", lambda built, flight, result: flight.received)
    attempt("a caller's reduction by the exchange", lambda built, flight, result: result, layer="by caller")
    attempt(
        "an exchange's reduction by the caller",
        lambda built, flight, result: result,
        method="combine_unreduced",
    )

    built, flight = dispatched_and_result(plan, "moe", x_TH, routes)
    result = built.experts(flight.received)
    flight.combine(result)
    found["the same handle twice"] = str(raised(flight.combine, result))
    found["the same handle, unreduced"] = str(raised(flight.combine_unreduced, result))

    built, flight = dispatched_and_result(plan, "by caller", x_TH, routes)
    home = flight.combine_unreduced(built.experts(flight.received))
    found["rows that came home, again"] = str(raised(flight.combine, home))
    attempt("rows that came home", lambda *_: home)

    y_TH = build(plan, "moe")(x_TH, routes)  # after all that, one honest round
    exact = oracle(layers[0], random_weights(layers[0], 0), x_TH, routes)
    return found, relative_error(y_TH, exact), relative_error(home.reduce().y_TH, exact)


EXPECTED = {
    "unfinalized rows": "combine was given a UnfinalizedRows",
    "a combined output": "these rows were reduced over ranks already",
    "a plain tensor": "combine was given a tensor float32",
    "a tensor summed over ranks by hand": "combine was given a tensor",
    "a tuple": "combine was given a tuple of 2",
    "nothing": "combine was given None",
    "one row per token": "one row per received row",
    "the received rows": "combine was given a ReceivedRows",
    "a caller's reduction by the exchange": "the exchange was asked to reduce over ranks; expected the caller",
    "an exchange's reduction by the caller": "the caller was asked to reduce over ranks; expected the exchange",
    "the same handle twice": "this handle is not in flight",
    "the same handle, unreduced": "this handle is not in flight",
    "rows that came home, again": "this handle is not in flight",
    "rows that came home": "these rows came home already",
}


@pytest.mark.parametrize("exchange", UNREDUCED)
def test_41382_reducing_twice_is_unconstructible(exchange):
    for found, error, error_by_caller in on_ranks(2, attempts, exchange):
        assert set(found) == set(EXPECTED)
        for name, part in EXPECTED.items():
            assert part in found[name], name
        assert error < 2**-7
        assert error_by_caller < 2**-7


def test_41382_the_types_have_no_way_to_claim_another_reduction():
    fields = {cls: {f.name for f in dataclasses.fields(cls)} for cls in (ExpertRows, CombinedRows)}
    assert fields == {ExpertRows: {"rows_RH"}, CombinedRows: {"y_TH"}}  # no flag that could be wrong
    assert not issubclass(CombinedRows, ExpertRows)
    assert not issubclass(UnfinalizedRows, ExpertRows)
    assert not issubclass(RankRows, ExpertRows)


def test_41382_every_layer_has_one_party_for_each_reduction():
    for experts in EXPERTS:
        for exchange in EXCHANGES:
            for reduce_ranks in ("exchange", "caller"):
                router = SoftmaxRouter(2, renormalize=True)
                layer = spec(experts=experts, reduce_ranks=reduce_ranks, router=router)
                error = raised(ty.draft, [layer], 2, exchange=exchange)
                if (
                    error is not None
                ):  # logits do not travel through two_sided, unreduced rows not through hierarchical
                    assert isinstance(error, PlanError)
                    continue
                (wiring,) = ty.draft([layer], 2, exchange=exchange).wirings
                expected = Party.EXCHANGE if reduce_ranks == "exchange" else Party.CALLER
                assert wiring.duties[Duty.REDUCE_RANKS] is expected
                assert wiring.duties[Duty.REDUCE_EXPERTS] in (Party.EXPERTS, Party.RECEIVER)


def test_41382_parts_of_experts_whose_results_would_be_partial_sums_are_refused():
    layer = spec()
    plan = ty.plan([layer], thread_groups(1)[0])
    half = dataclasses.replace(layer, intermediate_size=layer.intermediate_size // 2)
    with pytest.raises(InputError, match="w13"):
        ty.MoELayer(plan, layer.name, random_weights(half, 0))


def scaling(group):
    router = SoftmaxRouter(2, renormalize=True, routed_scaling=2.5)
    plan = ty.plan([spec(router=router)], group)
    layer = build(plan, "moe")
    x_TH, _ = batch(spec(), 4)
    logits_TE = torch.randn(4, 5)
    routes = router(logits_TE)
    unscaled = ty.Routes(topk_ids_TK=routes.topk_ids_TK, topk_weights_TK=routes.topk_weights_TK / 2.5)
    return (
        torch.equal(layer(x_TH, logits_TE), layer(x_TH, routes)),
        str(raised(layer, x_TH, unscaled)),
        str(raised(layer, x_TH, dataclasses.replace(routes, scaled_by=2.5 * 2.5))),
    )


def test_41382_routed_scaling_is_applied_exactly_once():
    (same, never, twice), *_ = on_ranks(1, scaling)
    assert same
    assert "scaled_by" in never or "routed scaling" in never
    assert "6.25" in twice
