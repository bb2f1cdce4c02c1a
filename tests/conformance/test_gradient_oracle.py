"""The oracle of gradients against central differences of the oracle of results."""

import math

import pytest
import torch

from tests.models import batch, spec
from tokenyard import ExpertWeights, Routes
from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.gradient_oracle import exact_gradients, excess_of_gradient
from tokenyard.conformance.oracle import oracle
from tokenyard.experts import ACTIVATIONS

TOKENS = 4


def given(activation, bias, weight_on, dtype=torch.float32):
    layer = spec(
        hidden_size=5, intermediate_size=3, num_experts=4, activation=activation, bias=bias,
        weight_on=weight_on, dtype=dtype, weights={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
    )  # fmt: skip
    weights = random_weights(layer, seed=1)
    x_TH, routes = batch(layer, TOKENS)
    routes.topk_ids_TK[1] = torch.tensor([2, 2])  # an expert twice
    routes.topk_ids_TK[2, 0] = -1
    routes.topk_ids_TK[routes.topk_ids_TK == 3] = 0  # an expert that is idle
    routes.topk_weights_TK[2, 0] = math.nan
    dy_TH = torch.randn(x_TH.shape, generator=torch.Generator().manual_seed(2))
    return layer, weights, x_TH, routes, dy_TH


def moved(tensors, name, place, step):
    """The same tensors in float64, one element of one of them moved."""
    wide = {key: value.double().clone() for key, value in tensors.items()}
    wide[name].view(-1)[place] += step
    return wide


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_derivative_of_the_oracle(activation, bias, weight_on):
    layer, weights, x_TH, routes, dy_TH = given(activation, bias, weight_on)
    exact, size = exact_gradients(layer, weights, x_TH, routes, dy_TH)
    tensors = {"rows_TH": x_TH, "weights_TK": routes.topk_weights_TK, **weights.by_name()}
    assert set(exact.by_name()) == set(size.by_name()) == set(tensors)

    def loss(wide):
        routed = Routes(topk_ids_TK=routes.topk_ids_TK, topk_weights_TK=wide["weights_TK"])
        moved_weights = ExpertWeights(**{name: wide[name] for name in weights.by_name()})
        return float((oracle(layer, moved_weights, wide["rows_TH"], routed) * dy_TH).sum())

    chance = torch.Generator().manual_seed(3)
    for name, gradient in exact.by_name().items():
        assert gradient.shape == tensors[name].shape
        assert gradient.isfinite().all()
        assert (size.by_name()[name] >= gradient.abs() * (1 - 1e-12)).all()
        for place in torch.randperm(gradient.numel(), generator=chance)[:12].tolist():
            high, low = (loss(moved(tensors, name, place, step)) for step in (1e-6, -1e-6))
            assert gradient.view(-1)[place].item() == pytest.approx((high - low) / 2e-6, abs=2e-6), name


def test_idle_experts_and_nobody_have_zeros():
    layer, weights, x_TH, routes, dy_TH = given("swiglu", True, "output")
    exact, size = exact_gradients(layer, weights, x_TH, routes, dy_TH)
    for gradients in (exact, size):
        assert not any(gradients.by_name()[name][3].any() for name in ("w13", "w2", "b13", "b2"))
        assert gradients.weights_TK[2, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
def test_gradients_in_that_dtype_are_within_the_tolerance_and_wrong_ones_are_not(
    activation, weight_on, dtype
):
    layer, weights, x_TH, routes, dy_TH = given(activation, True, weight_on, dtype)
    exact, size = exact_gradients(layer, weights, x_TH, routes, dy_TH)
    leaves = {"rows_TH": x_TH.clone(), **weights.by_name()}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    routing = routes.topk_weights_TK.nan_to_num().clone().requires_grad_()
    y_TH = torch.zeros(x_TH.shape)
    for token in range(TOKENS):
        for choice, expert in enumerate(routes.topk_ids_TK[token].tolist()):
            if expert < 0:
                continue
            x_H, weight = leaves["rows_TH"][token], routing[token, choice]
            x_H = (x_H * weight).to(dtype) if weight_on == "input" else x_H
            pre = leaves["w13"][expert] @ x_H + leaves["b13"][expert]
            hidden = ACTIVATIONS[activation](pre).to(dtype)
            result = (leaves["w2"][expert] @ hidden + leaves["b2"][expert]).float()
            row = result if weight_on == "input" else weight * result
            y_TH = y_TH.index_add(0, torch.tensor([token]), row.unsqueeze(0))
    (y_TH.to(dtype).float() * dy_TH.to(dtype).float()).sum().backward()
    found = {name: leaf.grad for name, leaf in leaves.items()} | {"weights_TK": routing.grad}
    exact, size = exact_gradients(layer, weights, x_TH, routes, dy_TH.to(dtype))
    for name, gradient in exact.by_name().items():
        one = size.by_name()[name]
        assert excess_of_gradient(layer, found[name], gradient, one, TOKENS) <= 0, name
        for wrong in (2 * found[name], found[name] / 2, 0 * found[name], math.nan * found[name]):
            assert excess_of_gradient(layer, wrong, gradient, one, TOKENS) > 0, name
