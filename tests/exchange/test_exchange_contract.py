"""What every exchange promises beyond the result: order, handles, capacity, what travels with a row."""

import dataclasses
import gc
import weakref

import pytest
import torch

import tokenyard as ty
from tests.models import UNREDUCED, WATCHED, batch, build, on_ranks, raised, spec
from tests.products import on_threads_and_processes, product
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import InputError, PeerFailed
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.batch import UnencodedRows
from tokenyard.experts import EXPERTS
from tokenyard.formats import FORMATS, Payload
from tokenyard.routing import Placement
from tokenyard.rows import ExpertRows

KINDS = ["threads", "processes"]
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)
every_exchange_on_both_kinds = pytest.mark.parametrize(
    ("exchange", "ranks"), on_threads_and_processes(EXCHANGES)
)
WATCHED_AND_NOT = {
    **{name: (name, False) for name in EXCHANGES},
    **{f"{name}, paranoid": (name, True) for name in WATCHED},
}

TAG = Payload(name="tag", dtype=torch.int64, width=2)
BLOB = Payload(name="blob", dtype=torch.uint8, width=5)
WIRES = ("bf16", "fp8_block128", "mxfp8(alignment=256)", "nvfp4")


def encoded(plan, name, x_TH):
    return plan.wiring(name).wire.encode(x_TH)


def no_experts(received):
    """A result of the right shape, for tests that only move rows."""
    return ExpertRows(rows_RH=torch.zeros(received.num_rows, received.rows.hidden_size))


def movement(group, exchange, wire):
    layer = spec(num_experts=6, top_k=3, wire=wire, payloads=(TAG, BLOB), hidden_size=40)
    plan = ty.plan([layer], group, exchange=exchange)
    tokens = [4, 0, 7][group.rank]
    x_TH, routes = batch(layer, tokens, seed=group.rank)
    ids_TK = routes.topk_ids_TK.clone()
    if tokens:
        ids_TK[0] = -1  # a token for nobody
        ids_TK[1] = torch.tensor([5, 5, 5])  # one expert, three times
    routes = dataclasses.replace(routes, topk_ids_TK=ids_TK)
    extra = {
        "tag": torch.stack([torch.full((tokens,), group.rank), torch.arange(tokens)], dim=1),
        "blob": torch.randint(0, 256, (tokens, 5), dtype=torch.uint8),
    }
    rows = encoded(plan, "moe", x_TH)
    dispatched = plan.exchange.dispatch(plan.wiring("moe").exchange_spec, rows, routes, extra)
    received = dispatched.received
    sent = (
        {name: payload.view(torch.uint8) for name, payload in rows.payloads.items()},
        extra,
        ids_TK,
        routes.topk_weights_TK,
    )
    arrived = (
        {name: payload.contiguous().view(torch.uint8) for name, payload in received.dense().payloads.items()},
        {name: tensor.clone() for name, tensor in received.extra.items()},
        received.routes.ids_RK.clone(),
        received.routes.weights_RK.clone(),
        received.counts_W,
    )
    combined = dispatched.combine(no_experts(received))  # what arrived is valid until now
    plan.close()
    return sent, arrived, combined.y_TH


def movements(group, exchange):
    return [movement(group, exchange, wire) for wire in WIRES]


@every_exchange_on_both_kinds
def test_rows_arrive_bitwise_once_per_rank_in_source_and_token_order(ranks, exchange):
    for results in zip(*on_ranks(3, movements, exchange, ranks=ranks), strict=True):
        check_movement(results)


def check_movement(results):
    placement = Placement.contiguous(6, 3)
    for rank, (_, (payloads, extra, ids_RK, weights_RK, counts_W), y_TH) in enumerate(results):
        mine = set(placement.local_experts(rank))
        expected = [
            (source, token)
            for source, (sent, _, _) in enumerate(results)
            for token, ids in enumerate(sent[2].tolist())
            if mine & set(ids)
        ]
        assert [tuple(tag) for tag in extra["tag"].tolist()] == expected
        assert list(counts_W) == [sum(source == w for source, _ in expected) for w in range(3)]
        for row, (source, token) in enumerate(expected):
            sent_payloads, sent_extra, sent_ids, sent_weights = results[source][0]
            for name, payload in payloads.items():
                assert torch.equal(payload[row], sent_payloads[name][token])
            assert torch.equal(extra["blob"][row], sent_extra["blob"][token])
            for choice, global_id in enumerate(sent_ids[token].tolist()):
                local = int(ids_RK[row, choice])
                if global_id in mine:
                    assert placement.local_experts(rank)[local] == global_id
                    assert weights_RK[row, choice] == sent_weights[token, choice]
                else:
                    assert local == -1
                    assert weights_RK[row, choice] == 0
        assert y_TH.dtype == torch.bfloat16
        assert not y_TH.any()


def handles(group, exchange):
    plan = ty.plan([spec(), spec("other")], group, exchange=exchange)
    exchange_spec, other = plan.wiring("moe").exchange_spec, plan.wiring("other").exchange_spec
    x_TH, routes = batch(spec(), 3)
    rows = encoded(plan, "moe", x_TH)
    first = plan.exchange.dispatch(exchange_spec, rows, routes)
    messages = {"second dispatch": str(raised(plan.exchange.dispatch, other, rows, routes))}
    messages["layer while in flight"] = str(raised(build(plan, "other"), x_TH, routes))
    result = no_experts(first.received)
    first.combine(result)
    messages["combined twice"] = str(raised(first.combine, result))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.arrival.round = 7
    again = plan.exchange.dispatch(exchange_spec, rows, routes)
    plan.close()
    messages["after close"] = str(raised(again.combine, result))
    return messages


@every_exchange
def test_a_handle_is_combined_once_and_in_its_turn(exchange):
    for messages in on_ranks(2, handles, exchange):
        assert "1 dispatch in flight already (of 'moe')" in messages["second dispatch"]
        assert "plan(..., in_flight=2)" in messages["second dispatch"]
        assert "a dispatch of layer 'moe' is in flight" in messages["layer while in flight"]
        assert "this handle is not in flight" in messages["combined twice"]
        assert "the plan is closed" in messages["after close"]


def two_in_flight(group, exchange):
    layers = [spec("a", experts="reference"), spec("b", experts="reference", hidden_size=100, wire="mxfp8")]
    plan = ty.plan(layers, group, exchange=exchange, in_flight=2)
    alone, together = [], []
    built = [build(plan, layer.name) for layer in layers]
    batches = [batch(layer, 5, seed=10 * index + group.rank) for index, layer in enumerate(layers)]
    for layer, (x_TH, routes) in zip(built, batches, strict=True):
        alone.append(layer(x_TH, routes))
    flights = []
    for layer, (x_TH, routes) in zip(built, batches, strict=True):
        flights.append(
            plan.exchange.dispatch(layer.wiring.exchange_spec, layer.wiring.wire.encode(x_TH), routes)
        )
    third = str(raised(plan.exchange.dispatch, built[0].wiring.exchange_spec, None, None))
    early = str(raised(flights[1].combine, no_experts(flights[1].received)))
    for layer, flight in zip(built, flights, strict=True):
        together.append(flight.combine(layer.experts(flight.received)).y_TH)
    return all(map(same_bits, alone, together)), third, early


@every_exchange_on_both_kinds
def test_two_dispatches_may_be_in_flight_if_the_plan_was_made_for_it(ranks, exchange):
    for same, third, early in on_ranks(2, two_in_flight, exchange, ranks=ranks):
        assert same
        assert "2 dispatch in flight already" in third
        assert "an earlier dispatch is still in flight" in early


def bad_ids(routes):
    return dataclasses.replace(routes, topk_ids_TK=routes.topk_ids_TK + 99)


def failure_beside_a_flight(group, exchange, paranoid, times):
    """A batch of rank 0 is refused, a few times, while another is in flight; then one more is sent."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2, paranoid=paranoid)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    batches = [batch(layer, 5, seed=10 * n + group.rank) for n in range(2)]
    expected = [built(x_TH, routes) for x_TH, routes in batches]
    (x_TH, routes), other = batches
    rows = encoded(plan, "moe", x_TH)
    flights = [plan.exchange.dispatch(exchange_spec, rows, routes)]
    wrong = bad_ids(routes) if group.rank == 0 else routes
    refused = [raised(plan.exchange.dispatch, exchange_spec, rows, wrong) for _ in range(times)]
    flights.append(plan.exchange.dispatch(exchange_spec, encoded(plan, "moe", other[0]), other[1]))
    found = [flight.combine(built.experts(flight.received)).y_TH for flight in flights]
    return list(map(type, refused)), all(map(same_bits, found, expected))


@pytest.mark.parametrize(("exchange", "paranoid"), WATCHED_AND_NOT.values(), ids=WATCHED_AND_NOT)
def test_a_batch_that_is_refused_does_not_touch_the_one_in_flight(exchange, paranoid):
    for times in (1, 2):
        results = on_ranks(2, failure_beside_a_flight, exchange, paranoid, times)
        assert results == [([InputError] * times, True), ([PeerFailed] * times, True)]


def error_of_two(group, exchange, error):
    """Both round trips of a rank end by one error, before either is combined."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built, exchange_spec, batches = (
        build(plan, "moe"),
        plan.wiring("moe").exchange_spec,
        [batch(layer, 5, seed=n) for n in range(2)],
    )
    seen = None
    try:
        with (
            plan.exchange.begin(exchange_spec) as first,
            plan.exchange.begin(exchange_spec) as second,
        ):
            fates = [first, second]
            arrived = [
                trip.dispatch(plan.exchange.encode(trip.spec, x_TH), routes)
                for trip, (x_TH, routes) in zip(fates, batches, strict=True)
            ]
            if group.rank == 0:
                raise error
            for trip, received in zip(fates, arrived, strict=True):
                trip.combine(built.experts(received))
    except BaseException as found:
        seen = type(found)
    return seen, built(*batches[0]).shape


@every_exchange
@pytest.mark.parametrize(
    "error", [ValueError("an expert broke"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_what_ends_a_rank_s_round_trips_reaches_all_and_the_next_one_works(exchange, error):
    (first, _), (second, _) = on_ranks(2, error_of_two, exchange, error, deadline=60.0)
    assert (first, second) == (type(error), PeerFailed)


def long_error(group, exchange, max_rows):
    plan = ty.plan([spec()], group, exchange=exchange, max_rows=max_rows)

    def fail():
        with plan.exchange.begin(plan.wiring("moe").exchange_spec) as trip:
            if group.rank == 0:
                raise InputError(1000 * "~", expected="less", fix="be brief")
            trip.dispatch(plan.exchange.encode(trip.spec, x_TH), routes)

    x_TH, routes = batch(spec(), 4)
    return str(raised(fail)).count("~")


@every_exchange
@pytest.mark.parametrize("max_rows", [None, 8])
def test_most_of_a_long_error_reaches_the_others(exchange, max_rows):
    own, told = on_ranks(2, long_error, exchange, max_rows)
    assert own == 1000
    assert told >= 387  # of the 432 bytes that the numbers leave, without the layer, the rank and the fix


def modes(group, exchange, paranoid, planned_in_inference_mode):
    layer = spec(experts="reference")
    with torch.inference_mode(planned_in_inference_mode):
        plan = ty.plan([layer], group, exchange=exchange, paranoid=paranoid)
        built = build(plan, "moe").eval()  # in training mode, a call with gradients is refused
    x_TH, routes = batch(layer, 5, seed=group.rank)
    wanting = dataclasses.replace(routes, topk_weights_TK=routes.topk_weights_TK.clone().requires_grad_())
    results = []
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            results.append(built(x_TH, routes if inference else wanting).clone())
    return all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize(("exchange_and_paranoid", "ranks"), product(WATCHED_AND_NOT, KINDS))
def test_calls_with_and_without_gradients_and_in_inference_mode_take_turns(exchange_and_paranoid, ranks):
    exchange, paranoid = exchange_and_paranoid
    for planned_in_inference_mode in (False, True):
        found = on_ranks(2, modes, exchange, paranoid, planned_in_inference_mode, ranks=ranks)
        assert found == [True, True]


class Trained(EXPERTS["reference"]):
    """Experts whose results want a gradient."""

    name = "trained"

    def compute(self, received, *, finalize):
        result = super().compute(received, finalize=finalize)
        return ExpertRows(rows_RH=result.rows_RH * torch.ones(1, requires_grad=True))


def remembered(group, exchange, experts):
    layer = spec(experts=experts)
    plan = ty.plan([layer], group, exchange=exchange)
    built, alive = build(plan, "moe").eval(), []
    for seed in range(3):
        x_TH, routes = batch(layer, 5, seed=seed)
        weights_TK = routes.topk_weights_TK.clone().requires_grad_()
        alive.append(weakref.ref(weights_TK))
        built(x_TH, dataclasses.replace(routes, topk_weights_TK=weights_TK * 1))
    del weights_TK, routes
    gc.collect()
    return [weights() is not None for weights in alive]


@every_exchange
@pytest.mark.parametrize("experts", ["reference", Trained])
def test_no_batch_is_remembered(exchange, experts):
    assert on_ranks(2, remembered, exchange, experts) == [[False] * 3] * 2


def wrong_batches(group, exchange):
    layer = spec(wire="mxfp8", payloads=(TAG,))
    plan = ty.plan([layer], group, exchange=exchange)
    exchange_spec = plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 3)
    rows = encoded(plan, "moe", x_TH)
    tag = {"tag": torch.zeros(3, 2, dtype=torch.int64)}
    payloads = dict(rows.payloads)
    lying = dataclasses.replace(rows, payloads=payloads | {"scales": payloads["scales"][:, :0]})
    unscaled = dataclasses.replace(rows, payloads={"data": payloads["data"]})
    attempts = {
        "a plain tensor": (x_TH, routes, tag),
        "another format": (FORMATS["nvfp4"]().encode(x_TH), routes, tag),
        "the same format, aligned otherwise": (FORMATS["mxfp8"](alignment=64).encode(x_TH), routes, tag),
        "a payload that lies": (lying, routes, tag),
        "a payload too few": (unscaled, routes, tag),
        "swizzled scales": (rows.swizzled(), routes, tag),
        "no further payload": (rows, routes, {}),
        "a further payload of another dtype": (rows, routes, {"tag": tag["tag"].int()}),
        "a further payload nobody declared": (rows, routes, tag | {"more": tag["tag"]}),
    }
    errors = {
        name: raised(
            plan.exchange.dispatch, exchange_spec, *(arguments if group.rank == 0 else (rows, routes, tag))
        )
        for name, arguments in attempts.items()
    }
    dispatched = plan.exchange.dispatch(exchange_spec, rows, routes, tag)  # still usable
    dispatched.combine(no_experts(dispatched.received))
    return {name: (type(error).__name__, str(error)) for name, error in errors.items()}


@every_exchange
def test_what_a_payload_declares_is_compared_with_what_arrives_in_every_call(exchange):
    mine, other = on_ranks(2, wrong_batches, exchange)
    assert all(kind == "PeerFailed" for kind, _ in other.values())
    for name, part in {
        "a plain tensor": "dispatch was given a tensor bfloat16[3, 32]; expected EncodedRows",
        "another format": "the rows are nvfp4 of width 32; expected mxfp8 of width 32: the bytes that",
        "the same format, aligned otherwise": "the rows are mxfp8(alignment=64) of width 32; expected mxfp8",
        "a payload that lies": "payload 'scales' is uint8[3, 0]; expected uint8[3, 1], as its format declares",
        "a payload too few": "the rows carry payloads ['data']; expected ['data', 'scales']",
        "swizzled scales": "the rows carry swizzled scales; expected linear scales",
        "no further payload": "the further payloads are []; expected ['tag']",
        "a further payload of another dtype": "payload 'tag' is int32[3, 2]; expected int64[3, 2]",
        "a further payload nobody declared": "the further payloads are ['more', 'tag']",
    }.items():
        assert mine[name][0] in ("InputError", "ContractError")
        assert part in mine[name][1]
        assert mine[name][1].startswith("layer 'moe', rank 0: ")


def idle_and_stranger(group, exchange):
    plan = ty.plan([spec("a"), spec("b")], group, exchange=exchange)
    x_TH, routes = batch(spec(), 3)
    error = raised(build(plan, "ab"[group.rank]), x_TH, routes)
    y_TH = build(plan, "a")(x_TH, routes)
    return type(error).__name__, str(error), bool(torch.isfinite(y_TH).all())


@every_exchange_on_both_kinds
def test_ranks_that_drifted_into_different_layers_all_raise_and_go_on(ranks, exchange):
    for kind, message, finite in on_ranks(2, idle_and_stranger, exchange, ranks=ranks):
        assert kind == "Drifted"
        assert "rank 0: dispatch of layer 'a', round 1" in message
        assert "rank 1: dispatch of layer 'b', round 1" in message
        assert finite


def many_rounds(group, exchange):
    layers = [
        spec("small", experts="reference"),
        spec("large", experts="reference", hidden_size=300, wire="nvfp4"),
    ]
    plan = ty.plan(layers, group, exchange=exchange)
    built = {layer.name: build(plan, layer.name) for layer in layers}
    batches = {layer.name: batch(layer, 4, seed=group.rank) for layer in layers}
    first = {name: built[name](*batches[name]) for name in built}
    return all(same_bits(built[name](*batches[name]), first[name]) for _ in range(40) for name in built)


@every_exchange_on_both_kinds
def test_alternating_layers_stay_bitwise_the_same_over_many_rounds(ranks, exchange):
    assert on_ranks(3, many_rounds, exchange, ranks=ranks) == [True] * 3


def choices_served(group, exchange):
    # Experts 2 and 3 are lost. Ids 0 and 3 together would ask for expert 0 on rank 2; what is left of them, on rank 1.
    placement = Placement(num_experts=4, table=((1,), (0,), (0,)), allow_lost=True)
    layer = spec(num_experts=4, placement=placement)
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH = torch.ones(1, layer.hidden_size, dtype=layer.dtype)
    routes = ty.Routes(topk_ids_TK=torch.tensor([[0, 3]]), topk_weights_TK=torch.ones(1, 2))
    dispatched = plan.exchange.dispatch(plan.wiring("moe").exchange_spec, encoded(plan, "moe", x_TH), routes)
    served = int((dispatched.received.routes.ids_RK >= 0).sum())
    dispatched.combine(no_experts(dispatched.received))
    return served


@every_exchange
def test_where_experts_are_lost_all_ranks_agree_on_the_replicas_of_the_others(exchange):
    assert on_ranks(3, choices_served, exchange) == [0, 2, 1]


def unreduced_twice(group, exchange, dtype):
    layer = spec(reduce_ranks="caller", dtype=dtype, weights="fp32" if dtype == torch.float32 else "bf16")
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, "moe")
    held = built.unreduced(*batch(layer, 5, seed=group.rank))
    before = [rows_NH.clone() for rows_NH in held.rows_by_rank]
    for turn in range(1, 4):  # every place of the workspace is written again
        built.unreduced(*batch(layer, 16, seed=100 * turn + group.rank))
    return all(map(torch.equal, held.rows_by_rank, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", UNREDUCED)
def test_unreduced_rows_that_the_caller_holds_are_not_overwritten_by_later_calls(exchange, dtype):
    assert on_ranks(3, unreduced_twice, exchange, dtype) == [True] * 3


def unencoded(group, exchange):
    """An exchange may be given rows that it encodes itself: checked as all others are."""
    layer = spec(wire="mxfp8")
    plan = ty.plan([layer], group, exchange=exchange)
    exchange_spec, (x_TH, routes) = plan.wiring("moe").exchange_spec, batch(layer, 3)
    with pytest.raises(InputError, match="x_TH is"):
        plan.exchange.dispatch(
            exchange_spec, UnencodedRows(format=exchange_spec.wire, x_TH=x_TH.long()), routes
        )
    dispatched = plan.exchange.dispatch(
        exchange_spec, UnencodedRows(format=exchange_spec.wire, x_TH=x_TH), routes
    )
    data = dispatched.received.dense().payloads["data"]
    return torch.equal(
        data.view(torch.uint8), exchange_spec.wire.encode(x_TH).payloads["data"].view(torch.uint8)
    )


@every_exchange
def test_rows_that_the_exchange_encodes(exchange):
    assert on_ranks(1, unencoded, exchange) == [True]
