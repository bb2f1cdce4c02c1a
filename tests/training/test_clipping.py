"""The norm of all gradients, with experts as plain parameters of their ranks; and where DTensors may have experts."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from tests.models import batch, on_ranks, raised, spec
from tokenyard import plan
from tokenyard.conformance.cases import random_weights
from tokenyard.errors import InputError, PlanError
from tokenyard.planning.sharding import shards
from tokenyard.routing import Placement
from tokenyard.training import clip_gradients, gradient_norm

SPEC = spec(num_experts=6, dtype=torch.float32, weights="fp32", sum="choices", experts="reference")


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.moe = layer


def with_gradients(group, placement="contiguous", tokens=12):
    """A model on these ranks after a backward of the same tokens, dealt out in blocks; dense gradients are equal."""
    layer = SPEC if placement == "contiguous" else spec(
        num_experts=6, dtype=torch.float32, weights="fp32", sum="choices", experts="reference", placement=placement
    )  # fmt: skip
    agreed = plan([layer], group, training=True)
    model = Model(agreed.layer("moe", random_weights(layer, 0)))
    x_TH, routes = batch(layer, tokens)
    mine = slice(tokens // group.size * group.rank, tokens // group.size * (group.rank + 1))
    model.moe(x_TH[mine], routes.of_tokens(mine)).square().sum().backward()
    for parameter in model.dense.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.5
    return model


def norms(group, placement="contiguous"):
    model = with_gradients(group, placement)
    first = gradient_norm(model)
    clipped = clip_gradients(model, first / 4)
    squares = sum(p.grad.double().square().sum().item() for p in model.moe.parameters())
    return (
        first,
        clipped,
        gradient_norm(model),
        squares,
        nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    )


def test_it_counts_the_experts_of_all_ranks_once_and_has_the_same_bits_on_any_number_of_them():
    ((alone, *_),) = on_ranks(1, norms)
    ((_, _, _, squares, _),) = on_ranks(1, norms)
    assert alone == pytest.approx(4 * math.sqrt(squares + 12 * 0.125**2), rel=1e-6)
    for world in (2, 3, 4):
        for first, clipped, after, *_ in on_ranks(world, norms):
            assert first == clipped == alone
            assert after == pytest.approx(alone / 4, rel=1e-6)


def test_torch_omits_the_experts_of_other_ranks():
    ((alone, *_),) = on_ranks(1, norms)
    for *_, theirs in on_ranks(3, norms):
        assert float(theirs) < 0.95 * alone / 4


def test_it_does_not_depend_on_the_placement():
    (first, *_), *_ = on_ranks(2, norms)
    for placement in ("round_robin", Placement.explicit(6, [[5, 3, 1, 0], [2, 4]])):
        assert {one[0] for one in on_ranks(2, norms, placement)} == {first}


def unequal(group):
    model = with_gradients(group)
    if group.rank == 1:
        model.dense.weight.grad += 1
    return raised(gradient_norm, model)


def test_ranks_with_different_gradients_of_one_parameter_all_raise():
    for error in on_ranks(3, unequal):
        assert isinstance(error, InputError)
        assert "rank 0 has 1.73205, rank 1 has 4.58258, rank 2 has 1.73205" in str(error)
        assert "all_reduce(parameter.grad)" in error.fix


def partly(group):
    """Rank 1 has frozen everything: the norm is that of the others."""
    model = with_gradients(group)
    if group.rank == 1:
        for parameter in model.moe.parameters():
            parameter.grad = None
    return gradient_norm(model), sum(
        float(p.grad.double().square().sum()) for p in model.moe.parameters() if p.grad is not None
    )


def test_parameters_without_a_gradient_are_left_out():
    found = on_ranks(2, partly)
    due = math.sqrt(sum(squares for _, squares in found) + 12 * 0.25)
    assert found[0][0] == found[1][0] == pytest.approx(due)


def test_a_norm_that_is_not_finite_is_what_it_is():
    def run(group):
        model = with_gradients(group)
        if group.rank == 0:
            next(iter(model.moe.parameters())).grad[0] = math.nan
        return clip_gradients(model, 1.0), model.dense.weight.grad

    for norm, gradient in on_ranks(2, run):
        assert math.isnan(norm)
        assert gradient.isnan().all()


def test_gradients_below_the_norm_keep_their_bits():
    def run(group):
        model = with_gradients(group)
        before = copy.deepcopy([p.grad for p in model.parameters()])
        clip_gradients(model, 1e9)
        return all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize("norm", [0, -1.0, math.nan])
def test_a_norm_to_clip_to_is_above_zero(norm):
    with pytest.raises(InputError, match="max_norm is"):
        clip_gradients(nn.Linear(1, 1), norm)


# -- Where DTensors may have experts ---------------------------------------------------------------------------


def test_shards_are_those_of_torch():
    for num_experts in range(1, 12):
        for world in range(1, 6):
            due = [part.tolist() for part in torch.arange(num_experts).chunk(world)]
            found = [list(experts) for experts in shards(num_experts, world).table]
            assert found == due + [[]] * (world - len(due))


def on_a_mesh(group):
    mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("ep",))

    def of(placement, num_experts=5):
        return spec(
            num_experts=num_experts, dtype=torch.float32, weights="fp32", sum="choices", placement=placement
        )

    refused = raised(plan, [of("contiguous")], mesh, training=True)
    (alternative,) = refused.alternatives
    found = {}
    for name, layer in {"uneven": of(**alternative.changes), "even": of("contiguous", 8)}.items():
        agreed = plan([layer], mesh, training=True)
        made = agreed.layer("moe", random_weights(layer, 0))
        x_TH, routes = batch(layer, 6, seed=group.rank)
        y_TH = made(x_TH, routes)
        y_TH.sum().backward()
        eager = made.experts.w13.grad.to_local().clone()
        made.zero_grad()
        torch.compiler.reset()  # torch 2.13 takes a graph of 5 experts for one of 8, if a rank has as many of each
        torch.compile(made, backend="aot_eager")(x_TH, routes).sum().backward()
        with torch.no_grad():
            same = torch.equal(made(x_TH, routes), y_TH)
        found[name] = {
            "whole": torch.equal(made.experts.w13.full_tensor(), random_weights(layer, 0).w13),
            "gradient": made.experts.w13.grad.full_tensor(),
            "inference": same,
            "compiled": torch.equal(eager, made.experts.w13.grad.to_local()),
        }
    made.experts.w13.grad = DTensor.from_local(torch.zeros(made.experts.w13.shape), mesh, [Partial()])
    partial = raised(gradient_norm, made)
    plain = plan([of("contiguous")], mesh).layer("moe", random_weights(of("contiguous"), 0))
    return refused, found, partial, [type(one).__name__ for one in plain.experts.buffers()]


def test_a_mesh_gives_dtensors_and_uneven_experts_only_where_dtensors_have_them():
    results = on_ranks(4, on_a_mesh, ranks="processes", deadline=60.0)
    for refused, found, partial, buffers in results:
        assert isinstance(partial, InputError)
        assert "gradients that are summed: Shard or Replicate" in str(partial)
        assert isinstance(refused, PlanError)
        assert "a DTensor of 5 experts has [2, 2, 1, 0] on the ranks of the mesh" in str(refused)
        assert "placement=Placement.explicit(5, [[0, 1], [2, 3], [4], []])" in refused.fix
        for name in ("uneven", "even"):
            assert found[name]["whole"]
            assert found[name]["inference"]
            assert found[name]["compiled"]
            assert torch.equal(found[name]["gradient"], results[0][1][name]["gradient"])
            assert found[name]["gradient"].any()
        assert set(buffers) == {"Tensor"}  # only plans for training have DTensors


def mixed(group):
    mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("ep",))
    given = mesh if group.rank else mesh.get_group()
    return raised(plan, [spec(num_experts=4, dtype=torch.float32, weights="fp32")], given, training=True)


def test_a_mesh_on_some_ranks_only_is_a_mismatch():
    for error in on_ranks(2, mixed, ranks="processes"):
        assert "DTensors: rank 0 has False, rank 1 has True" in str(error)
