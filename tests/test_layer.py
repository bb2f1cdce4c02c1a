"""The layer: what it adds, what it refuses, and that an error on one rank reaches all of them."""

import dataclasses
import re

import pytest
import torch

import tokenyard as ty
from tests.models import UNREDUCED, batch, build, on_ranks, raised, spec
from tests.products import on_threads_and_processes, product
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.conformance.twin import twin
from tokenyard.errors import HandleError, InputError, PeerFailed, RankError
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.formats import Payload
from tokenyard.group import thread_groups
from tokenyard.layer.building import LocalIds
from tokenyard.layer.compiled import call_operator
from tokenyard.routing import GroupedSigmoidRouter, Placement

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)
every_exchange_on_both_kinds = pytest.mark.parametrize(
    ("exchange", "ranks"), on_threads_and_processes(EXCHANGES)
)


# -- Bad input: a clear error before anything moves, on every rank -------------------------------------------


def _with_id(routes, value):
    ids_TK = routes.topk_ids_TK.clone()
    ids_TK[1, 0] = value
    return ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=routes.topk_weights_TK)


BAD = {
    "an id beyond the experts": (
        lambda x, r: (x, _with_id(r, 5)),
        r"topk_ids_TK holds id 5 \(token 1, choice 0\); expected ids from 0 to 4, or -1",
    ),
    "an id below -1": (lambda x, r: (x, _with_id(r, -2)), r"topk_ids_TK holds id -2 \(token 1, choice 0\)"),
    "rows of another dtype": (
        lambda x, r: (x.float(), r),
        r"x_TH is a tensor float32\[4, 32\]; expected bfloat16",
    ),
    "rows of another width": (lambda x, r: (x[:, :31], r), r"x_TH is a tensor bfloat16\[4, 31\]"),
    "rows of three dimensions": (lambda x, r: (x[None], r), r"bfloat16\[1, 4, 32\].*x\.reshape\(-1, 32\)"),
    "no rows at all": (lambda x, r: (None, r), "x_TH is None"),
    "routes of fewer tokens": (
        lambda x, r: (x, ty.Routes(topk_ids_TK=r.topk_ids_TK[:3], topk_weights_TK=r.topk_weights_TK[:3])),
        "the routes hold 3 tokens; expected 4, one row of routes per row of x_TH",
    ),
    "routes of another top-k": (
        lambda x, r: (
            x,
            ty.Routes(topk_ids_TK=r.topk_ids_TK[:, :1], topk_weights_TK=r.topk_weights_TK[:, :1]),
        ),
        "the routes hold 1 choices per token; expected 2, as the layer declares",
    ),
    "float ids": (
        lambda x, r: (x, ty.Routes(topk_ids_TK=r.topk_ids_TK.float(), topk_weights_TK=r.topk_weights_TK)),
        r"topk_ids_TK is a tensor float32.*expected a matrix \[T, K\] of int32 or int64",
    ),
    "weights of integers": (
        lambda x, r: (x, ty.Routes(topk_ids_TK=r.topk_ids_TK, topk_weights_TK=r.topk_ids_TK)),
        "topk_weights_TK is a tensor int64",
    ),
    "ids and weights of different shapes": (
        lambda x, r: (x, ty.Routes(topk_ids_TK=r.topk_ids_TK, topk_weights_TK=r.topk_weights_TK[:, :1])),
        r"topk_ids_TK is \[4, 2\] and topk_weights_TK is \[4, 1\]",
    ),
    "a tuple instead of routes": (
        lambda x, r: (x, (r.topk_ids_TK, r.topk_weights_TK)),
        "a tuple of 2 instead of routes.*Routes",
    ),
    "logits without a router": (
        lambda x, r: (x, torch.randn(4, 5)),
        "has no router.*give the LayerSpec a router",
    ),
    "rows on another device": (
        lambda x, r: (x.to("meta"), r),
        "x_TH is on meta; expected cpu",
    ),
    "routes that hold a scaling": (
        lambda x, r: (
            x,
            ty.Routes(topk_ids_TK=r.topk_ids_TK, topk_weights_TK=r.topk_weights_TK, scaled_by=2.5),
        ),
        r"routed scaling factor 2\.5.*would be applied twice",
    ),
    "too many tokens": (
        lambda x, r: batch(spec(), 17),
        "17 tokens; expected at most max_tokens=16 on a rank; fix: send the batch in parts",
    ),
}


def bad_on_rank_one(group, name, exchange):
    plan = ty.plan([spec()], group, exchange=exchange)
    layer = build(plan, "moe")
    x_TH, routes = batch(spec(), 4, seed=group.rank)
    good = layer(x_TH, routes)
    error = raised(layer, *(BAD[name][0](x_TH, routes) if group.rank == 1 else (x_TH, routes)))
    again = layer(x_TH, routes)  # nothing was lost, and the group is still usable
    return type(error).__name__, str(error), same_bits(good, again)


@every_exchange
@pytest.mark.parametrize("name", BAD)
def test_bad_input_on_one_rank_raises_on_all_before_anything_moves(name, exchange):
    results = on_ranks(3, bad_on_rank_one, name, exchange)
    assert results[1][0] in ("InputError", "ContractError")
    assert re.search(BAD[name][1], results[1][1]), results[1][1]
    assert results[1][1].startswith("layer 'moe', rank 1: ")
    for rank in (0, 2):
        assert results[rank][0] == "PeerFailed"
        assert results[rank][1].startswith(f"layer 'moe', rank {rank}: rank 1 failed in dispatch: ")
    assert all(same for _, _, same in results)


def test_bad_input_reaches_other_processes_too():
    results = [
        on_ranks(3, bad_on_rank_one, name, "two_sided", ranks="processes")
        for name in ("too many tokens", "an id beyond the experts")
    ]
    for outcome in results:
        assert [kind for kind, _, _ in outcome] == ["PeerFailed", "InputError", "PeerFailed"]
        assert all(same for _, _, same in outcome)


class Fragile(EXPERTS["reference"]):
    """Experts that raise on rows that hold the number 1000."""

    name = "fragile"

    def compute(self, received, *, finalize):
        if (received.rows.decode() == 1000).any():
            raise ZeroDivisionError("an expert broke")
        return super().compute(received, finalize=finalize)


def expert_raises(group, exchange):
    layer = spec(experts=Fragile, num_experts=3)
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, "moe")
    x_TH, _ = batch(layer, 4, seed=group.rank)
    # Every token goes to expert 2, which rank 2 owns; rank 0 sends the row that breaks it.
    routes = ty.Routes(topk_ids_TK=torch.full((4, 2), 2), topk_weights_TK=torch.ones(4, 2))
    good = built(x_TH, routes)
    bad_TH = x_TH.clone()
    if group.rank == 0:
        bad_TH[0, 0] = 1000
    try:
        built(bad_TH, routes)
        found = ("nothing", "")
    except (ZeroDivisionError, PeerFailed) as error:
        found = (type(error).__name__, str(error))
    return *found, same_bits(good, built(x_TH, routes))


@every_exchange_on_both_kinds
def test_an_expert_that_raises_on_one_rank_reaches_all_and_the_group_stays_usable(ranks, exchange):
    results = on_ranks(3, expert_raises, exchange, ranks=ranks)
    assert [kind for kind, _, _ in results] == ["PeerFailed", "PeerFailed", "ZeroDivisionError"]
    assert "rank 2 failed in combine: ZeroDivisionError: an expert broke" in results[0][1]
    assert all(same for _, _, same in results)


def wrong_weights(group):
    plan = ty.plan([spec()], group)
    everybody = random_weights(spec(), 0)
    error = raised(ty.MoELayer, plan, "moe", everybody)
    return type(error).__name__, str(error)


def weights_of_others(group):
    layer = spec("moe", num_experts=6, placement="round_robin")
    plan = ty.plan([layer], group)
    every = random_weights(layer, 0)
    first = 3 * group.rank
    wrong = every.select(range(first, first + 3))  # as if experts stood in a row
    found = raised(ty.MoELayer, plan, "moe", wrong)
    ty.MoELayer(plan, "moe", dataclasses.replace(wrong, experts=None))
    right = every.select(range(6)).select(plan.local_experts("moe"))
    ty.MoELayer(plan, "moe", right.decode(torch.float32).decode(torch.bfloat16))
    return found


def test_weights_of_experts_that_another_rank_owns_are_refused():
    for rank, error in enumerate(on_ranks(2, weights_of_others)):
        others, own = ([0, 1, 2], [0, 2, 4]) if rank == 0 else ([3, 4, 5], [1, 3, 5])
        assert isinstance(error, InputError)
        assert (
            f"rank {rank}: the weights are those of experts {others}; expected those of experts {own}"
            in str(error)
        )


def moved_or_cast(group, experts):
    layer = spec("moe", experts=experts)
    built = build(ty.plan([layer], group), "moe")
    x_TH, routes = batch(layer, 4)
    built.double()
    cast = raised(built, x_TH, routes)
    built.to("meta")
    return cast, raised(built, x_TH, routes)


@pytest.mark.parametrize("experts", ["reference", "grouped"])
def test_a_layer_that_was_moved_or_cast_after_it_was_built_says_so(experts):
    cast, moved = on_ranks(1, moved_or_cast, experts)[0]
    assert "layer 'moe', rank 0: w13 is float64; expected bfloat16, as the layer was planned" in str(cast)
    assert "layer 'moe', rank 0: the weights are on meta, and the rows on cpu; expected one device" in str(
        moved
    )


def test_weights_of_the_wrong_shape_name_layer_rank_and_expectation():
    kind, message = on_ranks(2, wrong_weights)[1]
    assert kind == "InputError"
    assert message.startswith(
        "layer 'moe', rank 1: w13 is a tensor bfloat16[5, 16, 32]; expected bfloat16[2, 16, 32]"
    )
    assert "select(placement.local_experts(rank))" in message


# -- What it computes -----------------------------------------------------------------------------------------


def everything_added(group, exchange):
    layer = spec(experts="reference", hidden_size=100)
    plan = ty.plan([layer], group, exchange=exchange)
    weights = random_weights(layer, 0)
    mine = weights.select(plan.local_experts("moe"))
    x_TH, routes = batch(layer, 5 + group.rank, seed=group.rank)
    before = x_TH.clone()
    calls = []

    def shared(rows_TH):
        calls.append(rows_TH.shape)
        return rows_TH  # hands out the caller's own tensor: it must not be written into

    residual_TH = torch.randn_like(x_TH)
    kept = residual_TH.clone()
    out_TH = torch.full_like(x_TH, float("nan"))
    plain = ty.MoELayer(plan, "moe", mine)(x_TH, routes)
    y_TH = ty.MoELayer(plan, "moe", mine, shared=shared)(x_TH, routes, out=out_TH, add=residual_TH)
    ranks_sum = ty.MoELayer(plan, "moe", mine)
    into_itself = residual_TH.clone()
    ranks_sum(x_TH, routes, out=into_itself, add=into_itself)
    exact = oracle(layer, weights, x_TH, routes)
    return (
        y_TH.data_ptr() == out_TH.data_ptr(),
        calls == [x_TH.shape],
        same_bits(x_TH, before) and same_bits(residual_TH, kept),
        relative_error(plain, exact),
        relative_error(y_TH, exact + x_TH.double() + residual_TH.double()),
        relative_error(into_itself, exact + residual_TH.double()),
        plain.data_ptr() != x_TH.data_ptr(),
    )


@every_exchange
def test_shared_experts_and_residual_are_added_once_in_one_rounding(exchange):
    for in_place, once, untouched, *errors, fresh in on_ranks(3, everything_added, exchange):
        assert in_place
        assert once
        assert untouched
        assert fresh
        assert max(errors) < 2**-8


def wrong_outputs(group):
    layer = build(ty.plan([spec()], group), "moe")
    x_TH, routes = batch(spec(), 4)
    return [
        str(raised(layer, x_TH, routes, out=torch.empty(4, 32) if group.rank == 0 else None)),
        str(raised(layer, x_TH, routes, add=x_TH[:3] if group.rank == 0 else None)),
        same_bits(layer(x_TH, routes), layer(x_TH, routes)),
    ]


def test_an_output_that_does_not_fit_is_refused_on_all_ranks():
    for rank, (out, add, usable) in enumerate(on_ranks(2, wrong_outputs)):
        assert usable
        if rank == 0:
            assert (
                "a tensor to write into or to add is a tensor float32[4, 32]; expected bfloat16[4, 32]" in out
            )
            assert "bfloat16[3, 32]" in add
        else:
            assert "rank 0 failed in combine: InputError" in out
            assert "rank 0 failed in combine: InputError" in add


def unreduced(group, exchange):
    layers = [
        spec("by exchange", experts="reference"),
        spec("by caller", experts="reference", reduce_ranks="caller"),
    ]
    plan = ty.plan(layers, group, exchange=exchange)
    x_TH, routes = batch(layers[0], 6, seed=group.rank)
    summed = build(plan, "by exchange")(x_TH, routes)
    home = build(plan, "by caller").unreduced(x_TH, routes)
    wrong = [
        raised(build(plan, "by caller"), x_TH, routes),
        raised(build(plan, "by exchange").unreduced, x_TH, routes),
    ]
    return same_bits(summed, home.reduce().y_TH), [str(error) for error in wrong], len(home.rows_by_rank)


@pytest.mark.parametrize("exchange", UNREDUCED)
def test_rows_can_come_home_unreduced_and_only_the_party_with_the_duty_reduces(exchange):
    for same, wrong, ranks in on_ranks(3, unreduced, exchange):
        assert same
        assert ranks == 3
        assert "the exchange was asked to reduce over ranks; expected the caller to do it" in wrong[0]
        assert "the caller was asked to reduce over ranks; expected the exchange to do it" in wrong[1]


def logits_and_routes(group, placement, experts):
    router = GroupedSigmoidRouter(3, num_groups=2, topk_groups=1, routed_scaling=2.5)
    common = {"num_experts": 6, "top_k": 3, "router": router, "placement": placement}
    layers = [spec("by routes", experts="reference", **common), spec("by itself", experts=experts, **common)]
    plan = ty.plan(layers, group, exchange="allgather")
    x_TH, _ = batch(layers[0], [3, 0, 5][group.rank], seed=group.rank)
    logits_TE = torch.randn(x_TH.shape[0], 6, generator=torch.Generator().manual_seed(group.rank))
    ready = router(logits_TE)
    from_logits = build(plan, "by routes")(x_TH, logits_TE)
    return (
        same_bits(from_logits, build(plan, "by routes")(x_TH, ready)),
        same_bits(
            from_logits, twin(plan.wiring("by routes"), random_weights(layers[0], 0), x_TH, ready, group.rank)
        ),
        relative_error(build(plan, "by itself")(x_TH, logits_TE), from_logits),
        str(raised(build(plan, "by itself"), x_TH, ready)),
    )


@pytest.mark.parametrize(
    "placement",
    ["contiguous", "round_robin", Placement.replicated(Placement.contiguous(6, 3), {0: [1, 2]})],
)
def test_logits_travel_to_experts_that_route_by_themselves(placement):
    for from_logits, as_twin, error, message in on_ranks(3, logits_and_routes, placement, "self_routing"):
        assert from_logits
        assert as_twin
        assert error < 2**-7
        assert "the layer's experts route by themselves" in message


def reloaded(group):
    plan = ty.plan([spec(experts="reference")], group)
    layer = build(plan, "moe", seed=1)
    other = build(plan, "moe", seed=2)
    x_TH, routes = batch(spec(), 4, seed=group.rank)
    first, second = layer(x_TH, routes), other(x_TH, routes)
    layer.experts.load_(random_weights(spec(), 2).select(plan.local_experts("moe")))
    return same_bits(first, second), same_bits(layer(x_TH, routes), second)


def name_of_another(group):
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer, spec("kept")], group)
    built, other = build(plan, "moe"), build(plan, "kept")
    x_TH, routes = batch(layer, 4, seed=group.rank)
    first = built(x_TH, routes)
    plan.extend([spec("later")])
    same = torch.equal(built(x_TH, routes), first)  # the layer is the one it was
    plan.trim(keep=["kept"])
    plan.extend([dataclasses.replace(layer, placement="round_robin")])
    return same, raised(built, x_TH, routes), bool(torch.isfinite(other(x_TH, routes)).all())


def test_a_layer_whose_name_was_given_to_another_is_refused():
    for same, error, goes_on in on_ranks(2, name_of_another):
        assert same
        assert goes_on
        assert isinstance(error, HandleError)
        assert "another layer of this name" in str(error)
        assert "make a new layer" in str(error)


def backward(group, wanting):
    layer = spec("moe", experts="reference", dtype=torch.float32, weights="fp32")
    built = build(ty.plan([layer], group), "moe", shared=torch.nn.Linear(32, 32, bias=False))
    x_TH, routes = batch(layer, 4, seed=group.rank)
    weights_TK, add = routes.topk_weights_TK.clone(), torch.zeros_like(x_TH)
    built.shared.weight.requires_grad_(wanting == "shared experts")
    tensors = {"rows": x_TH, "weights": weights_TK, "residual": add}
    if wanting in tensors:
        tensors[wanting].requires_grad_()
    routes = dataclasses.replace(routes, topk_weights_TK=weights_TK)
    refused = [
        raised(built, x_TH, routes, add=add),
        raised(lambda: built.start(x_TH, routes, add=add).finish()),
    ]
    if wanting in ("rows", "weights"):
        refused.append(raised(built.unreduced, x_TH, routes))
    y_TH = built.eval()(x_TH, routes, add=add)
    with torch.no_grad():
        silent = built.train()(x_TH, routes, add=add).requires_grad
    return refused, raised((y_TH + x_TH).sum().backward), silent


@pytest.mark.parametrize("wanting", ["rows", "weights", "residual", "shared experts"])
def test_training_is_refused_and_backward_raises_in_evaluation_mode(wanting):
    ((refused, error, silent),) = on_ranks(1, backward, wanting)
    for one in refused:
        if wanting == "shared experts":  # those of an ordinary module require gradients, also to infer
            assert one is None
            continue
        assert isinstance(one, HandleError)
        assert "layer 'moe', rank 0: the layer was called in training mode, with gradients enabled" in str(
            one
        )
        assert "torch.no_grad(), after model.eval(), or after model.requires_grad_(False)" in str(one)
    assert isinstance(error, HandleError)
    assert "layer 'moe': backward was called through a layer" in str(error)
    assert not silent


def one_rank_trains(group):
    layer = spec("moe")
    built = build(ty.plan([layer], group), "moe")
    x_TH, routes = batch(layer, 4, seed=group.rank)
    expected = built(x_TH, routes)
    error = raised(built, x_TH.clone().requires_grad_(group.rank == 1), routes)
    return error, torch.equal(built(x_TH, routes), expected)


def test_a_rank_that_trains_is_refused_before_its_rows_are_sent():
    """All ranks raise at once, and the next call is not affected."""
    (other, first), (own, second) = on_ranks(2, one_rank_trains)
    assert first
    assert second
    assert isinstance(own, HandleError)
    assert "training mode" in str(own)
    assert isinstance(other, PeerFailed)
    assert "training mode" in str(other)


def test_weights_are_replaced_in_place():
    assert on_ranks(2, reloaded) == [(False, True)] * 2


def changed_after_building(group, adopt):
    layer = spec(max_tokens=8)
    plan = ty.plan([layer], group)
    weights = random_weights(layer, 0).select(plan.local_experts("moe"))
    built = ty.MoELayer(plan, "moe", weights, **({"adopt": True} if adopt else {}))
    x_TH, routes = batch(layer, 8, seed=0)
    before = built(x_TH, routes).clone()
    weights.w2.zero_()
    return same_bits(built(x_TH, routes), before)


@pytest.mark.parametrize("adopt", [False, True])
def test_weights_are_copied_unless_they_are_adopted(adopt):
    assert on_ranks(1, changed_after_building, adopt) == [not adopt]


@pytest.mark.parametrize("adopt", [False, True])
def test_weights_that_want_a_gradient_are_held_without(adopt):
    layer = spec(experts="reference")
    weights = random_weights(layer, 0)
    weights.w13.requires_grad_()
    (group,) = thread_groups(1)
    built = ty.MoELayer(ty.plan([layer], group), "moe", weights, adopt=adopt)
    assert not built.experts.weights.w13.requires_grad
    assert weights.w13.requires_grad


def batch_of_one(group, exchange):
    layer = spec(experts="reference", wire="nvfp4", hidden_size=100, max_tokens=64, placement="round_robin")
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 40, seed=group.rank)
    whole = built(x_TH, routes)
    same = []
    for part in (
        torch.arange(0, 7),
        torch.arange(39, -1, -3),
        torch.tensor([17]),
        torch.tensor([], dtype=torch.long),
    ):
        some = ty.Routes(topk_ids_TK=routes.topk_ids_TK[part], topk_weights_TK=routes.topk_weights_TK[part])
        same.append(same_bits(built(x_TH[part], some), whole[part]))
    return all(same)


@every_exchange_on_both_kinds
def test_a_tokens_result_does_not_depend_on_the_rest_of_the_batch(ranks, exchange):
    assert on_ranks(3, batch_of_one, exchange, ranks=ranks) == [True] * 3


def grouped_layers(group, exchange, wire):
    layer = spec(hidden_size=512, intermediate_size=96, num_experts=12, top_k=4, max_tokens=80, wire=wire)
    plan = ty.plan([layer], group, exchange=exchange)
    weights = random_weights(layer, 0)
    built = ty.MoELayer(plan, "moe", weights.select(plan.local_experts("moe")))
    x_TH, routes = batch(layer, 64 + group.rank, seed=group.rank)
    decoded_TH = plan.wiring("moe").wire.encode(x_TH).decode()
    return relative_error(built(x_TH, routes), oracle(layer, weights, decoded_TH, routes))


@pytest.mark.parametrize(
    ("wire", "exchange"), product(["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4"], list(EXCHANGES))
)
def test_grouped_experts_stay_within_a_bf16_matrix_product_of_the_oracle(exchange, wire):
    # Rows, hidden values, results on the way back and the output are each rounded to bf16 (2^-9, relative).
    assert max(on_ranks(4, grouped_layers, exchange, wire)) < 4 * 2**-9


def shared_without_a_sum(group):
    plan = ty.plan([spec(reduce_ranks="caller")], group)
    return str(raised(build, plan, "moe", shared=torch.nn.Identity()))


def test_shared_experts_of_a_layer_that_does_not_sum_are_refused():
    assert (
        "shared experts were given to a layer whose results come home unreduced"
        in on_ranks(1, shared_without_a_sum)[0]
    )


def errors_with_echoes(group):
    layer = build(ty.plan([spec()], group), "moe")
    x_TH, routes = batch(spec(), 4)
    layer(x_TH, _with_id(routes, 99) if group.rank == 3 else routes)


def test_launch_raises_the_cause_and_not_its_echo_on_other_ranks():
    for _ in range(10):
        with pytest.raises(RankError) as caught:
            on_ranks(4, errors_with_echoes)
        assert caught.value.rank == 3
        assert isinstance(caught.value.__cause__, InputError)


def sliced_routes(group, exchange):
    layer = spec(experts="reference", top_k=4)
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, group.rank, seed=group.rank)  # 0, 1 and 2 tokens
    wide = torch.full((group.rank, 7), 99, dtype=torch.int64)
    wide[:, :4] = routes.topk_ids_TK
    sliced = ty.Routes(topk_ids_TK=wide[:, :4], topk_weights_TK=routes.topk_weights_TK)
    return same_bits(build(plan, "moe")(x_TH, sliced), build(plan, "moe")(x_TH, routes))


@every_exchange_on_both_kinds
def test_routes_may_be_slices_of_wider_tensors(ranks, exchange):
    assert on_ranks(3, sliced_routes, exchange, ranks=ranks) == [True] * 3


def test_the_operator_of_a_compiled_model_gives_what_a_call_gives():
    layer = spec(routed_scaling=2.5)
    built = build(ty.plan([layer], thread_groups(1)[0]), "moe")
    x_TH, routes = batch(layer, 3, scaled_by=2.5)
    due_TH, out = built(x_TH, routes, add=x_TH), torch.empty_like(x_TH)
    with torch.no_grad():
        assert same_bits(call_operator(built, x_TH, routes, {}, None, x_TH), due_TH)
        assert call_operator(built, x_TH, routes, {}, out, x_TH) is out
    assert same_bits(out, due_TH)


def test_a_rank_without_tokens_brings_all_that_others_bring_of_no_token():
    tag = Payload(name="tag", dtype=torch.int16, width=3)
    built = build(ty.plan([spec(payloads=(tag,))], thread_groups(1)[0]), "moe")
    brings = built.no_tokens()
    assert (brings.x_TH.shape, brings.x_TH.dtype) == ((0, 32), torch.bfloat16)
    assert {name: (rows.shape, rows.dtype) for name, rows in brings.payloads.items()} == {
        "tag": ((0, 3), torch.int16)
    }
    assert (
        brings.routes_or_logits.topk_ids_TK.shape == brings.routes_or_logits.topk_weights_TK.shape == (0, 2)
    )
    built.take_part()


def test_ids_become_local_ones_of_a_rank_or_none_where_experts_are_elsewhere():
    ids_RK = torch.tensor([[0, 2], [3, 1]])
    placement = Placement.contiguous(4, 2)
    assert LocalIds(placement, 1)(ids_RK, (1, 1)).tolist() == [[-1, 0], [1, -1]]
    slot_of_L = torch.tensor([5, 3, -1])  # the last one is that of no expert
    assert LocalIds(placement, 1, slot_of_L)(ids_RK, (1, 1)).tolist() == [[-1, 5], [3, -1]]
