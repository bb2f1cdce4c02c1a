"""Gradients of a layer: near the float64 oracle, zeros where nothing was computed, and the forward's bits untouched."""

import random

import pytest
import torch

from tests.models import on_ranks
from tests.training.batches import Training, errors, trained
from tokenyard.experts import ACTIVATIONS

# The largest error of a gradient, relative to its largest element: what the roundings of the dtype sum up to. Seen in
# 214 drawn cases, on two cores: at most half of these.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def drawn(seed):
    """A case by chance."""
    draw = random.Random(seed)
    dtype = draw.choice(list(BOUNDS))
    spec = trained(
        dtype=dtype,
        activation=draw.choice(list(ACTIVATIONS)),
        bias=draw.random() < 0.5,
        weight_on=draw.choice(["output", "input"]),
        sum=draw.choice(["ranks", "choices"]),
        experts=draw.choice(["grouped", "reference"]),
        top_k=draw.choice([1, 2, 4]),
        placement=draw.choice(["contiguous", "round_robin"]),
        keep=draw.choice(["products", "rows", "nothing"]),
    )
    options = {"exchange": draw.choice(["one_sided", "two_sided", "allgather"])}
    if draw.random() < 0.3:
        options["max_rows"] = draw.choice([8, 20])
    return Training(spec, tokens=draw.choice([5, 24, 40]), seed=seed, options=options), draw.choice([1, 2, 3])


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_near_the_oracle(seed):
    case, world = drawn(seed)
    found = errors(case.on(world), case.oracle)
    bound = BOUNDS[case.spec.dtype]
    assert all(error <= bound for error in found.values()), (case.spec, found)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 400))
def test_gradients_of_many_layers_are_near_the_oracle(seed):
    test_gradients_are_near_the_oracle(seed)


def test_ids_of_nobody_idle_experts_and_ranks_without_tokens_get_zeros():
    case = Training(trained(dtype=torch.float32), tokens=3, unused=(2, 6))
    for world in (1, 4):  # one rank has no tokens
        found = case.on(world)
        nobody = case.batch[1] < 0
        assert nobody.any()
        assert torch.equal(found["weights"][nobody], torch.zeros(int(nobody.sum())))
        assert not any(tensor.isnan().any() for tensor in found.values())
        for name in ("w13", "w2"):
            assert not found[name][[2, 6]].any()
        bounds = errors(found, case.oracle)
        assert all(error < BOUNDS[torch.float32] for error in bounds.values()), bounds


def without_tokens(group):
    case = Training(trained(bias=True), tokens=0)
    found, _ = case.step(group)
    return {name: (tuple(tensor.shape), bool(tensor.any())) for name, tensor in found.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_without_any_tokens_gradients_are_zeros_and_not_none(world):
    for found in on_ranks(world, without_tokens):
        assert not any(value for _, value in found.values())
        assert found["w13"][0] == (8 // world, 64, 64)
        assert found["x"][0] == (0, 64)


def test_a_rank_without_experts_takes_part():
    case = Training(trained(dtype=torch.float32, num_experts=3, bias=True), tokens=20)
    found = errors(case.on(4), case.oracle)
    assert max(found.values()) < BOUNDS[torch.float32], found


def bits_of_forwards(group, spec):
    case = Training(spec)
    _, layer = case.make(group)
    x_TH, routes, extra, _ = case.inputs(group)
    differentiated = layer(x_TH, routes, **extra)
    with torch.no_grad():
        inferred = layer(x_TH, routes, **extra)
    return differentiated.requires_grad, inferred.requires_grad, torch.equal(differentiated, inferred)


@pytest.mark.parametrize("experts", ["grouped", "reference"])
@pytest.mark.parametrize("order", ["ranks", "choices"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_forward_that_is_differentiated_has_the_bits_of_inference(experts, order, dtype):
    spec = trained(dtype=dtype, experts=experts, sum=order)
    assert on_ranks(2, bits_of_forwards, spec) == [(True, False, True)] * 2
