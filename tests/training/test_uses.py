"""How trainers use a layer: checkpointing, accumulation, frozen parts, mixed precision, parts of a batch."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenyard as ty
from tests.models import on_ranks
from tests.training.batches import Training, differing, errors, trained
from tokenyard.layer import overlapped
from tokenyard.routing import ROUTERS, SoftmaxRouter

CASE = Training(trained(dtype=torch.float32, bias=True))


def gradients(layer, x_TH, routes):
    found = {name: parameter.grad for name, parameter in layer.experts.named_parameters()}
    return found | {"x": x_TH.grad, "weights": routes.topk_weights_TK.grad}


def called(group, call, in_flight=1):
    """The gradients after `call(layer, x, routes)`, whose result is differentiated."""
    case = CASE
    plan, layer = case.make(group, in_flight=in_flight)
    x_TH, routes, extra, dy_TH = case.inputs(group)
    y_TH = call(layer, x_TH, routes, **extra)
    y_TH.backward(dy_TH)
    return {"y": y_TH.detach()} | gradients(layer, x_TH, routes), plan.load(), len(layer.open_backwards)


def plainly(layer, x_TH, routes, **extra):
    return layer(x_TH, routes, **extra)


def checkpointed(layer, x_TH, routes):
    return checkpoint(layer, x_TH, routes, use_reentrant=False)


def reentrant(layer, x_TH, routes):
    """The other kind of checkpointing, whose first forward has no graph."""
    return checkpoint(layer, x_TH, routes, use_reentrant=True)


def started(layer, x_TH, routes):
    pending = layer.start(x_TH, routes)
    pending.compute()
    return pending.finish()


@pytest.mark.parametrize("call", [checkpointed, reentrant, started])
def test_other_ways_to_call_give_the_same_bits_and_count_the_load_once(call):
    plain = on_ranks(2, called, plainly)
    other = on_ranks(2, called, call)
    for (one, load, _), (two, same_load, left) in zip(plain, other, strict=True):
        assert differing(one, two) == []
        assert load == same_load
        assert left == 0


def extended(group):
    """A plan that grows between a forward and its backward."""
    plan, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    y_TH = layer(x_TH, routes)
    plan.extend([replace(CASE.spec, name="other", hidden_size=128)])
    y_TH.backward(dy_TH)
    return {"y": y_TH.detach()} | gradients(layer, x_TH, routes)


def test_a_plan_may_grow_while_a_backward_is_due():
    for (plain, *_), found in zip(on_ranks(2, called, plainly), on_ranks(2, extended), strict=True):
        assert differing(plain, found) == []


def in_parts(layer, x_TH, routes):
    return overlapped(layer, x_TH, routes, parts=2)


def test_a_batch_in_parts_has_the_gradients_of_the_whole():
    for (whole, _, _), (parts, _, left) in zip(
        on_ranks(2, called, plainly), on_ranks(2, called, in_parts, 2), strict=True
    ):
        assert left == 0
        assert max(errors(parts, {name: tensor.double() for name, tensor in whole.items()}).values()) < 1e-6


def accumulated(group, times):
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    if times == "retained":
        y_TH = layer(x_TH, routes)
        y_TH.backward(dy_TH, retain_graph=True)
        y_TH.backward(dy_TH)
    elif times == "two calls, then both backwards":
        first, second = layer(x_TH, routes), layer(x_TH, routes)
        with torch.no_grad():
            layer(x_TH, routes)
        second.backward(dy_TH)
        first.backward(dy_TH)
    elif times == "twice in a forward":
        (layer(x_TH, routes) + layer(x_TH, routes)).backward(dy_TH)
    else:
        layer(x_TH, routes).backward(dy_TH)
        layer(x_TH, routes).backward(dy_TH)
    return gradients(layer, x_TH, routes)


@pytest.mark.parametrize(
    "times", ["twice", "retained", "two calls, then both backwards", "twice in a forward"]
)
def test_two_backwards_give_twice_the_gradients(times):
    for (once, *_), twice in zip(on_ranks(2, called, plainly), on_ranks(2, accumulated, times), strict=True):
        once.pop("y")
        assert differing({name: 2 * tensor for name, tensor in once.items()}, twice) == []


def frozen(group, what):
    _, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    if what == "experts" or (what == "everything on rank 0" and group.rank == 0):
        layer.requires_grad_(False)
    if what == "router" or (what == "everything on rank 0" and group.rank == 0):
        routes = replace(routes, topk_weights_TK=routes.topk_weights_TK.detach())
    if what == "everything on rank 0" and group.rank == 0:
        x_TH = x_TH.detach()
    layer(x_TH, routes).backward(dy_TH)
    group.barrier()
    return gradients(layer, x_TH, routes)


@pytest.mark.parametrize("what", ["experts", "router", "everything on rank 0"])
def test_what_is_frozen_has_no_gradient_and_the_rest_keeps_its_bits(what):
    plain = [found for found, *_ in on_ranks(2, called, plainly)]
    found = on_ranks(2, frozen, what)
    for rank, (mine, due) in enumerate(zip(found, plain, strict=True)):
        there = {name: tensor for name, tensor in mine.items() if tensor is not None}
        assert differing(there, due) == []
        missing = {name for name, tensor in mine.items() if tensor is None}
        parameters = {"w13", "w2", "b13", "b2"}
        due_missing = {
            "experts": parameters,
            "router": {"weights"},
            "everything on rank 0": {*parameters, "weights", "x"} if rank == 0 else set(),
        }
        assert missing == due_missing[what]


def with_terms(group):
    """Shared experts, and a tensor that is added: both belong to the graph."""
    torch.manual_seed(7)
    case = CASE
    plan = ty.plan([case.spec], group, training=True)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer = plan.layer("moe", case.weights, shared=lambda x_TH: torch.tanh(x_TH @ weight))
    x_TH, routes, _, dy_TH = case.inputs(group)
    add = x_TH.detach().clone().requires_grad_()
    layer(x_TH, routes, add=add).backward(dy_TH)
    found = {"x": x_TH.grad, "add": add.grad, "shared": weight.grad}
    alone = plan.layer("moe", case.weights)
    x_TH, routes, _, dy_TH = case.inputs(group)
    due = weight.detach().clone().requires_grad_()
    (alone(x_TH, routes) + torch.tanh(x_TH @ due)).backward(dy_TH)
    return found, {"x": x_TH.grad, "add": dy_TH, "shared": due.grad}


def test_shared_experts_and_what_is_added_are_differentiated():
    for found, due in on_ranks(2, with_terms):
        assert torch.equal(found["add"], due["add"])
        assert max(errors(found, {name: tensor.double() for name, tensor in due.items()}).values()) < 1e-6


def routed(group, router):
    """The gradient of logits that the layer routes by itself, and what the oracle gives."""
    case = Training(trained(dtype=torch.float32, router=router), tokens=16)
    logits_TE = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    routes = router(logits_TE)
    case.__dict__["batch"] = (
        case.batch[0], routes.topk_ids_TK.long(), routes.topk_weights_TK.detach(), case.batch[3]
    )  # fmt: skip
    weights_TK = case.oracle["weights"].float()
    (due_TE,) = torch.autograd.grad(routes.topk_weights_TK, logits_TE, weights_TK)
    token_T = case.mine(group)
    mine_TE = logits_TE.detach()[token_T].requires_grad_()
    x_TH, _, _, dy_TH = case.inputs(group)
    _, layer = case.make(group)
    layer(x_TH, mine_TE).backward(dy_TH)
    return errors({"logits": mine_TE.grad}, {"logits": due_TE[token_T].double()})["logits"]


@pytest.mark.parametrize(
    "router",
    [SoftmaxRouter(2, renormalize=True), SoftmaxRouter(2, renormalize=False), ROUTERS["grouped_sigmoid"](2)],
    ids=str,
)
def test_the_gradient_of_logits_goes_through_the_router_of_the_layer(router):
    assert max(on_ranks(2, routed, router)) < 1e-5


def mixed(group, way):
    weights = {"float32 parameters": "fp32", "autocast": "fp32", "bf16 parameters": "bf16"}[way]
    case = Training(replace(trained(), weights=weights))
    _, layer = case.make(group)
    x_TH, routes, _, dy_TH = case.inputs(group)
    if way == "autocast":
        x_TH = x_TH.detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y_TH = layer(x_TH, routes)
    else:
        y_TH = layer(x_TH, routes)
    y_TH.backward(dy_TH)
    experts = layer.experts
    return {"y": y_TH.detach(), "x": x_TH.grad, "w13": experts.w13.grad, "w2": experts.w2.grad}


@pytest.mark.parametrize("way", ["float32 parameters", "autocast"])
def test_float32_parameters_are_multiplied_in_bf16_and_have_float32_gradients(way):
    """Gradients have more digits than those of bf16 parameters, to which they round."""
    for found, due in zip(on_ranks(2, mixed, way), on_ranks(2, mixed, "bf16 parameters"), strict=True):
        assert found["w13"].dtype == found["w2"].dtype == torch.float32
        assert torch.equal(found["y"], due["y"])
        assert torch.equal(found["w13"].bfloat16(), due["w13"])
        assert torch.equal(found["w2"].bfloat16(), due["w2"])
        assert not torch.equal(found["w13"], due["w13"].float())
        assert torch.equal(found["x"].bfloat16(), due["x"])


def stepped(group):
    """Losses of some steps of AdamW."""
    case = Training(trained(dtype=torch.float32, sum="choices", bias=True))
    _, layer = case.make(group)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        x_TH, routes, _, dy_TH = case.inputs(group)
        y_TH = layer(x_TH, routes)
        optimizer.zero_grad()
        ((y_TH - dy_TH) ** 2).sum().backward()
        optimizer.step()
        losses.append(y_TH.detach())
    return losses


def test_some_steps_of_an_optimizer_have_the_same_bits_on_any_number_of_ranks():
    (alone,) = on_ranks(1, stepped, threads_per_rank=1)
    for world in (2, 4):
        by_rank = on_ranks(world, stepped, threads_per_rank=1)
        for step, due in enumerate(alone):
            assert torch.equal(torch.cat([steps[step] for steps in by_rank]), due)
    assert not torch.equal(alone[0], alone[-1])
