"""A copy of a layer shares its plan and has weights of its own; plans, groups and layers are not pickled."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tokenyard as ty
from tokenyard.errors import HandleError
from tokenyard.experts import ExpertWeights
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats.weights import WEIGHT_FORMATS
from tokenyard.group import thread_groups
from tokenyard.planning.planner import state_of
from tokenyard.routing import Placement

SPEC = ty.LayerSpec(name="moe", hidden_size=128, intermediate_size=128, num_experts=4, top_k=2, max_tokens=8)


def layer_on(group: ty.Group, **changes: Any) -> ty.MoELayer:
    spec = replace(SPEC, **changes)
    made = ty.plan([spec], group)
    torch.manual_seed(1)
    dtype = WEIGHT_DTYPES.get(spec.weights, torch.bfloat16)
    weights = ExpertWeights(w13=torch.randn(4, 256, 128).to(dtype), w2=torch.randn(4, 128, 128).to(dtype))
    if spec.weights not in WEIGHT_DTYPES:
        weights = weights.quantize(spec.weights)
    return ty.MoELayer(made, "moe", weights.select(made.local_experts("moe")))


def batch(seed: int) -> tuple[torch.Tensor, ty.Routes]:
    torch.manual_seed(seed)
    ids_TK = torch.stack([torch.randperm(4)[:2] for _ in range(3)])
    return torch.randn(3, 128).bfloat16(), ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.rand(3, 2))


def changed(layer: ty.MoELayer) -> None:
    """Change the weights of a layer: its experts have them in the opposite order."""
    with torch.no_grad():
        for buffer in layer.experts.buffers():
            held = buffer.view(torch.uint8)
            held.copy_(held.flip(0))


@pytest.mark.parametrize("weights", sorted(WEIGHT_FORMATS))
@pytest.mark.parametrize("experts", ["grouped", "reference"])
def test_a_copy_has_weights_of_its_own(experts, weights):
    (group,) = thread_groups(1)
    layer = layer_on(group, experts=experts, weights=weights)
    expected = layer(*batch(0))
    copied = copy.deepcopy(layer)
    assert copied.plan is layer.plan
    assert torch.equal(copied(*batch(0)), expected)
    changed(copied)
    others = copied(*batch(0))
    assert not torch.equal(others, expected)
    assert torch.equal(layer(*batch(0)), expected)
    changed(layer)
    assert torch.equal(layer(*batch(0)), others)
    layer.load_state_dict(copied.state_dict())
    assert torch.equal(layer(*batch(0)), others)


def average(group: ty.Group) -> bool:
    """An average of a model's weights, as training keeps one: a copy that follows the model."""
    model = nn.Sequential(nn.Linear(128, 128).bfloat16(), layer_on(group))
    following = copy.deepcopy(model)
    x_TH, routes = batch(group.rank)
    with torch.no_grad():
        expected = model[1](model[0](x_TH), routes)
        assert torch.equal(following[1](following[0](x_TH), routes), expected)
        changed(model[1])
        assert not torch.equal(model[1](model[0](x_TH), routes), expected)
        return torch.equal(following[1](following[0](x_TH), routes), expected)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_copy_of_a_model_on_all_ranks(ranks):
    assert ty.launch(2, average, ranks=ranks) == [True, True]


def test_a_compiled_copy_calls_the_copy():
    (group,) = thread_groups(1)
    layer = layer_on(group)
    copied = copy.deepcopy(layer)
    assert int(copied.key) != int(layer.key)
    changed(copied)
    x_TH, routes = batch(0)
    called = torch.ops.tokenyard.moe_layer(
        x_TH, routes.topk_ids_TK, routes.topk_weights_TK, 1.0, [], [], None, None, [], copied.key, False
    )
    assert torch.equal(called, copied(x_TH, routes))
    assert not torch.equal(called, layer(x_TH, routes))


def test_shared_experts_and_routers_are_copied_with_their_layer():
    (group,) = thread_groups(1)
    made = ty.plan([SPEC], group)
    weights = ExpertWeights(w13=torch.ones(4, 256, 128).bfloat16(), w2=torch.ones(4, 128, 128).bfloat16())
    layer = ty.MoELayer(made, "moe", weights, shared=nn.Linear(128, 128).bfloat16())
    copied = copy.deepcopy(layer)
    assert copied.shared is not layer.shared
    with torch.no_grad():
        expected = layer(*batch(0))
        assert torch.equal(copied(*batch(0)), expected)
        copied.shared.weight.zero_()
        assert torch.equal(layer(*batch(0)), expected)


def moves(group: ty.Group) -> list[str]:
    layer = layer_on(group, spare_experts=2, sum="choices")
    x_TH, routes = batch(group.rank)
    expected, said = layer(x_TH, routes), []
    everything = {"moe": Placement.explicit(4, [[2, 3], [0, 1]])}
    copied = copy.deepcopy(layer) if group.rank == 0 else None
    try:
        layer.plan.rebalance(everything)
    except ty.TokenyardError as error:
        said.append(f"{type(error).__name__}: {error}")
    assert torch.equal(layer(x_TH, routes), expected)
    # The layer goes, and its copy stays: it takes the layer's place, and its experts move.
    if copied is not None:
        layer = copied
    del copied
    gc.collect()
    layer.plan.rebalance(everything)
    assert torch.equal(layer(x_TH, routes), expected)
    moving = layer.plan.rebalance({"moe": Placement.explicit(4, [[0, 1], [2, 3]])}, wait=False)
    try:
        copy.deepcopy(layer)
    except HandleError as error:
        said.append(str(error))
    moving.wait()
    assert torch.equal(layer(x_TH, routes), expected)
    return said


def test_experts_do_not_move_beside_a_copy():
    first, second = ty.launch(2, moves, deadline=60.0)
    assert first[0].startswith(
        "PlanError: layer 'moe', rank 0: this layer has a copy (copy.deepcopy), whose experts"
    )
    assert "; fix: free the copy first" in first[0]
    assert second[0].startswith("PeerFailed: ")
    assert "this layer has a copy" in second[0]
    for said in (first, second):
        assert "copy.deepcopy of a layer was called while experts move" in said[1]


def test_a_copy_outlives_its_layer():
    (group,) = thread_groups(1)
    layer = layer_on(group)
    expected, made, copied = layer(*batch(0)), layer.plan, copy.deepcopy(layer)
    assert state_of(made).layers["moe"] is layer
    del layer
    gc.collect()
    assert state_of(made).layers["moe"] is copied
    assert torch.equal(copied(*batch(0)), expected)


def test_what_stays_in_its_process_says_so_when_it_is_pickled():
    (group,) = thread_groups(1)
    layer = layer_on(group)
    for kept in (layer, nn.Sequential(layer)):
        with pytest.raises(
            HandleError, match=r"layer 'moe', rank 0: a layer was to be pickled.*state_dict\(\)"
        ):
            pickle.dumps(kept)
    with pytest.raises(HandleError, match=r"rank 0: the plan was to be pickled.*make the plan on each rank"):
        pickle.dumps(layer.plan)
    with pytest.raises(HandleError, match=r"rank 0: group 'threads' was to be pickled.*in each process"):
        pickle.dumps(group)
    assert copy.deepcopy(group) is group
    assert copy.deepcopy(layer.plan) is layer.plan
