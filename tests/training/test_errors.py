"""What goes wrong in a backward reaches all ranks, by name, and what a training plan cannot do is refused."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenyard as ty
from tests.models import on_ranks, raised, spec
from tests.training.batches import Training, trained
from tokenyard.errors import (
    ContractError,
    Drifted,
    HandleError,
    InputError,
    PeerFailed,
    PlanError,
    PlanMismatch,
)
from tokenyard.routing import Placement, SoftmaxRouter

REPLICATED = Placement(num_experts=5, table=((0, 1, 2, 3), (3, 4)))
CASE = Training(trained(dtype=torch.float32))


def failing(group, where):
    """A backward that fails on rank 1, then a step that works."""
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    y_TH = layer(x_TH, routes)
    if group.rank == 1:
        if where == "experts":
            layer.experts.differentiate = lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))
        else:
            with torch.no_grad():
                layer.experts.w13.mul_(1.0)  # a weight that was saved has changed
    try:
        y_TH.backward(dy_TH)
        error = None
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    vars(layer.experts).pop("differentiate", None)
    layer(x_TH, routes).backward(dy_TH)
    return error, x_TH.grad is not None, len(layer.open_backwards)


@pytest.mark.parametrize(
    ("where", "words"), [("experts", "no memory"), ("saved", "modified by an inplace operation")]
)
def test_an_error_on_one_rank_in_a_backward_reaches_all_and_the_next_step_works(where, words):
    (first, *_), (second, *_), (third, *_) = outcomes = on_ranks(3, failing, where)
    assert first.startswith("PeerFailed")
    assert "rank 1 failed" in first
    assert words in first
    assert words in second
    assert third.startswith("PeerFailed")
    assert all(works for _, works, _ in outcomes)


def two_backwards(group, layers):
    """Backwards of two forwards, in another order on rank 1. The routes of both are equal."""
    specs = [CASE.spec, replace(CASE.spec, name="other")][:layers]
    plan = ty.plan(specs, group, training=True)
    built = [plan.layer(spec.name, CASE.weights) for spec in specs]
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    results = [built[0](x_TH, routes), built[-1](x_TH, routes)]
    order = results if group.rank == 1 else results[::-1]
    error = raised(order[0].backward, dy_TH)
    error = error and (type(error), str(error))
    built[0](x_TH, routes).backward(dy_TH)
    return error


@pytest.mark.parametrize("layers", [1, 2])
def test_backwards_in_another_order_raise_on_all_ranks_even_with_equal_routes(layers):
    names = ["'moe'", "'other'" if layers == 2 else "'moe'"]
    for error, message in on_ranks(2, two_backwards, layers):
        assert error is Drifted
        assert f"rank 0: dispatch of the gradients of round 2 of layer {names[1]}, round 3" in message
        assert f"rank 1: dispatch of the gradients of round 1 of layer {names[0]}, round 3" in message


def a_rank_without_backward(group):
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    y_TH = layer(x_TH, routes)
    error = raised(y_TH.backward, dy_TH) if group.rank else raised(layer, x_TH, routes)
    return type(error)


def test_a_rank_that_skips_its_backward_has_drifted():
    assert on_ranks(2, a_rank_without_backward) == [Drifted, Drifted]


def routed_otherwise(group):
    """The forward that checkpointing computes again has other routes, on rank 1."""
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    calls = []

    def call(x_TH):
        calls.append(1)
        again = group.rank == 1 and len(calls) > 1
        ids_TK = routes.topk_ids_TK.flip(0) if again else routes.topk_ids_TK
        return layer(x_TH, replace(routes, topk_ids_TK=ids_TK))

    y_TH = checkpoint(call, x_TH, use_reentrant=False)
    error = raised(y_TH.backward, dy_TH)
    return len(calls), type(error), str(error)


def test_a_forward_that_is_computed_again_with_other_routes_is_an_error_on_all_ranks():
    (_, first, told), (calls, second, words) = on_ranks(2, routed_otherwise)
    assert calls == 2
    assert (first, second) == (PeerFailed, ContractError)
    assert "computed again with other routes" in told
    assert "computed again with other routes" in words


def kept_alive(group, end):
    """Whether something of a forward is still alive after its end."""
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    kept = []
    compute = layer.experts.compute_kept

    def compute_kept(*arguments, **options):
        result, product = compute(*arguments, **options)
        kept.append(weakref.ref(product))
        return result, product

    layer.experts.compute_kept = compute_kept
    y_TH = layer(x_TH, routes)
    due = len(layer.open_backwards)
    alive = [one() is not None for one in kept]
    if end == "backward":
        y_TH.backward(dy_TH)
    elif end == "eval":
        with torch.no_grad():
            layer(x_TH, routes)
    del y_TH
    gc.collect()
    return due, alive, [one() is not None for one in kept], len(layer.open_backwards)


@pytest.mark.parametrize("end", ["backward", "dropped", "eval"])
def test_nothing_is_kept_after_a_backward_or_of_a_graph_that_was_dropped(end):
    assert on_ranks(2, kept_alive, end) == [(1, [True], [False], 0)] * 2


def refused_calls(group):
    plan, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    out = raised(layer, x_TH, routes, out=torch.empty_like(x_TH))
    with torch.no_grad():
        layer(x_TH, routes, out=torch.empty_like(x_TH))
    y_TH = layer(x_TH, routes)
    moved = raised(plan.rebalance, {"moe": "round_robin"})
    y_TH.backward(dy_TH)
    return type(out), str(out), type(moved), str(moved)


def test_a_differentiated_call_takes_no_out_and_experts_of_a_training_plan_do_not_move():
    for out, told, moved, words in on_ranks(2, refused_calls):
        assert out is InputError
        assert "`out` was given to a call that is differentiated" in told
        assert moved is HandleError
        assert "training" in words


@pytest.mark.parametrize(
    ("changes", "words", "alternative"),
    [
        (
            {"dtype": torch.float16, "weights": "fp16"},
            "a GradScaler would not see the overflow",
            {"dtype": torch.bfloat16},
        ),
        ({"weights": "mxfp8"}, "a quantized weight has no gradient", {"weights": "bf16"}),
        ({"spare_experts": 1}, "do not move", {"spare_experts": 0}),
        ({"reduce_ranks": "caller"}, "no gradient", {"reduce_ranks": "exchange"}),
        ({"placement": REPLICATED}, "copies of an expert", {"placement": "contiguous"}),
        (
            {"top_k": 1, "router": SoftmaxRouter(1, renormalize=True)},
            "the gradient of the router always 0",
            {"router": SoftmaxRouter(1, renormalize=False)},
        ),
        ({"experts": "fused"}, "fused experts are for inference", {"experts": "reference"}),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_would_do(changes, words, alternative):
    with pytest.raises(PlanError) as caught:
        ty.draft([spec(**changes)], 2, training=True)
    assert words in str(caught.value)
    assert alternative in [dict(found.changes) for found in caught.value.alternatives]
    assert not ty.draft([spec(**changes)], 2).training


def test_what_survives_losses_is_not_trained_and_ranks_agree_on_training():
    def plans(group):
        survive = raised(ty.plan, [spec()], group, survive=True, training=True)
        differ = raised(ty.plan, [spec()], group, training=group.rank == 0)
        return type(survive), str(survive), type(differ), str(differ)

    for survive, told, differ, words in on_ranks(2, plans):
        assert survive is PlanError
        assert "training=True" in told
        assert differ is PlanMismatch
        assert "training" in words


def sharded_by_another(group):
    _, layer = CASE.make(group)
    x_TH, routes, *_ = CASE.inputs(group)
    layer.experts.w2 = torch.nn.Parameter(layer.experts.w2[:1].detach())
    return str(raised(layer, x_TH, routes))


def test_weights_that_are_not_whole_are_refused():
    for said in on_ranks(2, sharded_by_another):
        assert "w2 holds [1, " in said
        assert "layer.unshard()" in said


def divided(group):
    return CASE.make(group)[0].gradient_divisor(3)


def test_the_divisor_is_the_number_of_ranks_whose_losses_are_summed():
    assert on_ranks(2, divided) == [6, 6]
