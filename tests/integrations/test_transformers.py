"""`shard_experts`: a model whose experts live on four ranks gives what it gave on one."""

import copy

import pytest
import torch

from tests.models import on_ranks

transformers = pytest.importorskip("transformers")

from tests.integrations.transformers_models import FAMILIES, prompts, tiny_model  # noqa: E402
from tokenyard.integrations.transformers import shard_experts  # noqa: E402

WORLD = 4


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def generated(model, ids, tokens):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_the_unsharded_model(family):
    """In float32, where only the order of sums differs. Every rank has its own batch and its own number of tokens."""
    whole = tiny_model(family)

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32)
        ids = prompts(group.rank, batch=1 + group.rank % 2, length=4 + group.rank)
        found = logits_of(sharded.model, ids)
        return ids, found, sharded.generate(ids, max_new_tokens=9 - 2 * group.rank, do_sample=False)

    for rank, (ids, found, tokens) in enumerate(on_ranks(WORLD, rank_main)):
        torch.testing.assert_close(found, logits_of(whole, ids), rtol=1e-4, atol=1e-4)
        assert torch.equal(tokens, generated(whole, ids, 9 - 2 * rank))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_without_a_plan(family):
    """`experts_implementation="tokenyard"` computes the same, on the model's own weights."""
    model = tiny_model(family)
    ids = prompts(0, batch=2, length=7)
    expected = logits_of(model, ids)
    model.set_experts_implementation("tokenyard")
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-4, atol=1e-4)
