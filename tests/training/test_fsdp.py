"""EP 2 × FSDP 2 on four gloo processes: gradients, the divisor, norm and clipping, optimizers, distributed checkpoints.

One launch does all of it, and brings back what it found; the tests below look at that.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.models import on_ranks
from tokenyard import ExpertWeights, LayerSpec, Routes, plan
from tokenyard.training import clip_gradients, gradient_norm

H, INNER, E, K, T, W = 32, 16, 8, 2, 8, 4
SPEC = LayerSpec(
    name="moe", hidden_size=H, intermediate_size=INNER, num_experts=E, top_k=K, max_tokens=T,
    dtype=torch.float32, weights="fp32", sum="choices", bias=True,
)  # fmt: skip


class Block(nn.Module):
    """A router that is trained through the routing weights, and a layer of experts."""

    def __init__(self, layer):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.moe = layer
        with torch.no_grad():
            self.gate.weight.copy_(torch.randn(E, H, generator=torch.Generator().manual_seed(1)) / 4)

    def forward(self, x_TH):
        weights_TK, ids_TK = self.gate(x_TH).softmax(dim=1).topk(K)
        return x_TH + self.moe(x_TH, Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK))


class PlainExperts(nn.Module):
    """The oracle: all experts on one rank, in torch's own words."""

    def __init__(self, weights):
        super().__init__()
        self.experts = nn.ParameterDict(
            {name: nn.Parameter(part) for name, part in weights.by_name().items()}
        )

    def forward(self, x_TH, routes):
        w13, w2, b13, b2 = (self.experts[name] for name in ("w13", "w2", "b13", "b2"))
        y_TH = torch.zeros_like(x_TH)
        for token, ids in enumerate(routes.topk_ids_TK.tolist()):
            for choice, expert in enumerate(ids):
                gate, up = (w13[expert] @ x_TH[token] + b13[expert]).chunk(2)
                result = w2[expert] @ (nn.functional.silu(gate) * up) + b2[expert]
                weighted = routes.topk_weights_TK[token, choice] * result
                y_TH = y_TH.index_add(0, torch.tensor([token]), weighted.unsqueeze(0))
        return y_TH


def all_weights():
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw) / shape[-1] ** 0.5

    return ExpertWeights(
        w13=normal(E, 2 * INNER, H), w2=normal(E, H, INNER), b13=normal(E, 2 * INNER), b2=normal(E, H)
    )


def batch(rank):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(100 + rank))


def loss_of(model, x_TH):
    return model(x_TH).square().sum()


def oracle():
    """The model on one rank, with the gradients of the mean of all ranks' losses."""
    model = Block(PlainExperts(all_weights())).double()
    (sum(loss_of(model, batch(rank).double()) for rank in range(W)) / W).backward()
    return model


def whole(tensor):
    """A tensor of the whole model, on every rank."""
    while isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def named(model, of):
    return {name: whole(of(parameter)) for name, parameter in model.named_parameters()}


def sharded(mesh, *, divisor):
    """The model on EP × FSDP, or on EP alone where the mesh has one dimension."""
    ep = mesh["ep"] if mesh.ndim > 1 else mesh
    agreed = plan([SPEC], ep, training=True)
    model = Block(agreed.layer("moe", all_weights()))
    if "efsdp" in mesh.mesh_dim_names:
        fully_shard(model.moe, mesh=mesh["efsdp"])
        if divisor:
            model.moe.set_gradient_divide_factor(agreed.gradient_divisor(mesh["efsdp"].size()))
        model.moe.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        fully_shard(model, mesh=init_device_mesh("cpu", (W,), mesh_dim_names=("fsdp",)))
    return model


def optimized(model, *, fused=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    optimizer.step()
    return optimizer


def moments(model, optimizer):
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {
        f"{name}.{key}": whole(one[key]) for name, one in state.items() for key in ("exp_avg", "exp_avg_sq")
    }


def train(group, folder):
    """Everything that is measured, on one rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    x_TH, found = batch(group.rank), {}
    wrong = sharded(mesh, divisor=False)
    loss_of(wrong, x_TH).backward()
    found["default divisor"] = named(wrong, lambda parameter: parameter.grad)
    model = sharded(mesh, divisor=True)
    found["kinds"] = {name: type(one.data).__name__ for name, one in model.named_parameters()}
    found["shapes"] = {name: tuple(one.shape) for name, one in model.named_parameters()}
    loss_of(model, x_TH).backward()
    found["gradients"] = named(model, lambda parameter: parameter.grad)
    found["norm"] = gradient_norm(model)
    found["norm of clipping"] = clip_gradients(model, found["norm"] / 3)
    found["clipped"] = named(model, lambda parameter: parameter.grad)
    optimizer = optimized(model)
    found["after a step"] = named(model, lambda parameter: parameter)
    found["moments"] = moments(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    with torch.no_grad():
        found["output"] = model(x_TH)
    for name, other in (("EP 4", (1, 4)), ("EP 1", (4, 1))):
        loaded = sharded(init_device_mesh("cpu", other, mesh_dim_names=("dp", "ep")), divisor=False)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        again = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
        model_state, optimizer_state = get_state_dict(loaded, again)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(loaded, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        with torch.no_grad():
            output = loaded(x_TH)
        found[name] = named(loaded, lambda parameter: parameter), moments(loaded, again), output
    fused = sharded(mesh, divisor=True)
    loss_of(fused, x_TH).backward()
    clip_gradients(fused, found["norm"] / 3)
    optimized(fused, fused=True)
    found["after a fused step"] = named(fused, lambda parameter: parameter)
    return found if group.rank == 0 else {name: found[name] for name in ("norm", "output", "EP 4", "EP 1")}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks(W, train, str(tmp_path_factory.mktemp("checkpoint")), ranks="processes", deadline=60.0)


@pytest.fixture(scope="module")
def exact():
    return oracle()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def relative(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def test_parameters_are_dtensors_of_the_whole_layer(found):
    assert set(found[0]["kinds"].values()) == {"DTensor"}
    assert found[0]["shapes"] == {name: tuple(one.shape) for name, one in oracle().named_parameters()}


def test_with_the_plans_divisor_gradients_are_those_of_the_mean_of_all_losses(found, exact):
    for name, due in gradients_of(exact).items():
        assert relative(found[0]["gradients"][name], due) < 1e-6, name


def test_with_fsdps_own_divisor_those_of_experts_are_twice_as_large(found, exact):
    for name, due in gradients_of(exact).items():
        factor = 2.0 if name.startswith("moe.") else 1.0
        assert relative(found[0]["default divisor"][name], factor * due) < 1e-6, name


def test_the_norm_is_that_of_the_whole_model_and_equal_on_all_ranks(found, exact):
    due = torch.cat([gradient.flatten() for gradient in gradients_of(exact).values()]).norm().item()
    assert found[0]["norm"] == pytest.approx(due, rel=1e-6)
    assert {one["norm"] for one in found} == {found[0]["norm"]} == {found[0]["norm of clipping"]}


def test_clipped_gradients_have_the_asked_norm(found, exact):
    for name, due in gradients_of(exact).items():
        assert relative(found[0]["clipped"][name], due / 3) < 1e-5, name


@pytest.mark.parametrize("kind", ["after a step", "after a fused step"])
def test_a_step_of_adamw_is_that_of_the_whole_model(kind, found, exact):
    model = copy.deepcopy(exact)
    for parameter, gradient in zip(model.parameters(), gradients_of(exact).values(), strict=True):
        parameter.grad = gradient / 3
    optimized(model)
    for name, due in model.named_parameters():
        torch.testing.assert_close(found[0][kind][name].double(), due.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["EP 4", "EP 1"])
def test_a_checkpoint_has_the_same_weights_moments_and_outputs_on_other_ranks(kind, found):
    for one in found:
        weights, moments, output = one[kind]
        assert all(torch.equal(weights[name], found[0]["after a step"][name]) for name in weights)
        assert all(torch.equal(moments[name], found[0]["moments"][name]) for name in moments)
        assert torch.equal(output, one["output"])
    assert len(moments) == 2 * len(weights) == 10
