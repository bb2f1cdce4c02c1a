"""`plan.layer`: which experts it selects from the weights that it is given, and what it refuses."""

from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights
from tokenyard.errors import InputError, UnknownName
from tokenyard.experts import ExpertWeights
from tokenyard.layer.rank_weights import rank_weights
from tokenyard.routing import Placement

TWICE = Placement.explicit(4, [[0, 1, 3], [3, 2, 0]])


def made_with_all(group, changes):
    """A layer made of all weights has the experts and the bits of one that is made of this rank's."""
    layer = spec(num_experts=4, **changes)
    plan = ty.plan([layer], group)
    weights = random_weights(layer, 0)
    local = plan.local_experts("moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    numbered = replace(weights, experts=(0, 1, 2, 3))
    turned = numbered.select([3, 1, 2, 0])
    unnumbered = replace(weights.select(local), experts=None)
    given = [weights, numbered, turned, weights.select(local), unnumbered]
    expected = ty.MoELayer(plan, "moe", weights.select(local))(x_TH, routes)
    return [torch.equal(plan.layer("moe", one)(x_TH, routes), expected) for one in given]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"placement": "round_robin"},
        {"placement": TWICE},
        {"placement": TWICE, "spare_experts": 2},
        {"placement": Placement.explicit(4, [[0, 1, 2, 3], []])},
        {"weights": "mxfp4"},
        {"bias": True},
    ],
)
def test_this_ranks_experts_are_selected_from_all_of_them(changes):
    assert on_ranks(2, made_with_all, changes) == [[True] * 5] * 2


def test_what_a_layer_takes_is_passed_on():
    def on_rank(group):
        layer = spec(num_experts=4)
        plan = ty.plan([layer], group)
        weights = random_weights(layer, 0)
        built = plan.layer("moe", weights, shared=torch.zeros_like, adopt=True)
        return built.shared is torch.zeros_like, built.experts.w13.data_ptr() == weights.w13.data_ptr()

    assert on_ranks(1, on_rank) == [(True, True)]  # one rank owns all experts: nothing is copied


def wiring(**changes):
    (made,) = ty.draft([spec(num_experts=4, **changes)], 2).wirings
    return made


def weights_of(count, **changes):
    matrix = torch.zeros(count, 16, 32).bfloat16()
    return ExpertWeights(**({"w13": matrix, "w2": matrix} | changes))


@pytest.mark.parametrize(
    ("weights", "changes", "said"),
    [
        (None, {}, "the weights are None"),
        (torch.zeros(2), {}, "expected ExpertWeights"),
        (
            weights_of(3),
            {},
            "of 3 experts; expected all 4 experts of the layer, or the 2 that",
        ),
        (weights_of(4), {"placement": TWICE, "spare_experts": 1}, None),
        (
            weights_of(2),
            {"placement": TWICE, "spare_experts": 1},
            "the 3 that this rank owns, without its 1 spare",
        ),
        (weights_of(4, w2=torch.zeros(2, 32, 8)), {}, "the weights hold w13 of 4, w2 of 2 experts"),
        (
            weights_of(2, experts=(0, 1)),
            {},
            "[0, 1]; expected those of all 4 experts, or of experts [2, 3]",
        ),
        (weights_of(2, experts=(0, 1, 2, 3)), {}, "the weights are those of experts [0, 1, 2, 3]"),
        (torch.zeros(()), {}, "expected ExpertWeights"),
        (
            weights_of(4),
            {"placement": Placement.explicit(4, [[0, 1, 2, 3], [3, 2, 1, 0]])},
            "in another order",
        ),
        (weights_of(4), {"placement": Placement.explicit(4, [[3, 2, 1, 0], [0, 1, 2, 3]])}, None),
        (
            weights_of(4, experts=(0, 1, 2, 3)),
            {"placement": Placement.explicit(4, [[0, 1, 2, 3], [3, 2, 1, 0]])},
            None,
        ),
    ],
)
def test_weights_that_are_neither_all_nor_this_ranks_are_refused(weights, changes, said):
    if said is None:
        owned = wiring(**changes).exchange_spec.placement.local_experts(1)
        selected = rank_weights(wiring(**changes), 1, weights)
        assert selected.w13.shape[0] == len(owned)
        assert selected.experts in (None, owned)
        return
    error = raised(rank_weights, wiring(**changes), 1, weights)
    assert isinstance(error, InputError)
    assert said in str(error)
    assert "layer 'moe'" in str(error)
    assert "rank 1" in str(error)


def test_the_fixes_for_an_ambiguous_order_work():
    placed = wiring(placement=Placement.explicit(4, [[0, 1, 2, 3], [3, 2, 1, 0]]))
    weights = random_weights(placed.spec, 0)
    error = str(raised(rank_weights, placed, 1, weights))
    assert "weights.select(range(4))" in error
    of_layer = rank_weights(placed, 1, weights.select(range(4)))
    assert torch.equal(of_layer.w13, weights.w13.flip(0))
    of_rank = rank_weights(placed, 1, replace(weights, experts=(3, 2, 1, 0)))
    assert of_rank.w13 is weights.w13


def test_a_layer_that_the_plan_does_not_have_is_named():
    def on_rank(group):
        return raised(ty.plan([spec()], group).layer, "mo", None)

    assert isinstance(on_ranks(1, on_rank)[0], UnknownName)
