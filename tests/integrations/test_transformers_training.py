"""A sharded Qwen3-MoE is trained as the whole model is: gradients, auxiliary loss, one step, and the way back."""

import copy
import math
import threading
from functools import cache

import pytest
import torch

from tests.integrations.transformers_models import tiny_config, tiny_model
from tests.models import on_ranks, raised
from tokenyard.errors import HandleError, InputError, PeerFailed, TokenyardError
from tokenyard.integrations.transformers import load_sharded, shard_experts
from tokenyard.routing import Routes
from tokenyard.training import balance_loss, batch_load

WORLD = 2
_lock = threading.Lock()


@cache
def _made(family):
    model = tiny_model(family).float().train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.1
    return model


def trainable(family="qwen3_moe"):
    """A copy: ranks that are threads share the generator from which a model draws its weights."""
    with _lock:
        return copy.deepcopy(_made(family))


def batch(rank, length=7):
    return torch.randint(1, 90, (2, length), generator=torch.Generator().manual_seed(rank))


def loss_of(model, ids):
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    return out.loss, out.aux_loss, out.router_logits


def whole_step(family="qwen3_moe"):
    """The whole model, with the gradients of the sum of all ranks' losses."""
    model = trainable(family)
    losses = []
    for rank in range(WORLD):
        loss, aux, _ = loss_of(model, batch(rank))
        loss.backward()
        losses.append((loss.item(), aux.item()))
    return model, losses


def sum_dense(sharded, group):
    """Sum the gradients of all but experts over the ranks, in rank order."""
    experts = {id(p) for one in sharded.experts for p in one.layer.experts.parameters()}
    for parameter in sharded.model.parameters():
        if id(parameter) not in experts:
            mine = parameter.grad.contiguous().view(-1).view(torch.uint8)
            every = group.all_gather(mine, phase="gradients").view(torch.float32)
            parameter.grad = every.sum(dim=0).view_as(parameter)


def sharded_step(group, source, family="qwen3_moe"):
    if source is None:
        sharded = shard_experts(trainable(family), group, max_tokens=32, training=True)
    else:
        sharded = load_sharded(source, group, dtype=torch.float32, max_tokens=32, training=True)
        sharded.model.train()
    loss, aux, _ = loss_of(sharded.model, batch(group.rank))
    loss.backward()
    sum_dense(sharded, group)
    gradients = {}
    with torch.no_grad():  # through the names of the whole model, as its weights go
        weights = [p.detach().clone() for p in sharded.model.parameters()]
        for parameter in sharded.model.parameters():
            parameter.copy_(parameter.grad)
        gradients = sharded.plain_state_dict()
        for parameter, value in zip(sharded.model.parameters(), weights, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=1e-2)
    optimizer.step()
    return (loss.item(), aux.item()), gradients, sharded.plain_state_dict()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_step_is_that_of_the_whole_model(family):
    model, losses = whole_step(family)
    results = on_ranks(WORLD, sharded_step, None, family)
    for rank, (found, *_) in enumerate(results):
        assert found == pytest.approx(losses[rank], rel=1e-6)
    _, gradients, state = results[0]
    assert results[1][1:] == (None, None)
    for name, parameter in model.named_parameters():
        difference = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 1e-5, name
    routers = [
        name for name in gradients if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))
    ]
    assert routers
    assert all(gradients[name].any() for name in routers)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    # Adam divides by the root of the square: of gradients near zero, the sign is all that it sees.
    for name, parameter in model.named_parameters():
        far = (state[name] - parameter.detach()).abs() > 1e-4
        assert far.float().mean() < 1e-3, name
        assert parameter.grad[far].abs().max() < 1e-6 if far.any() else True, name


def test_a_checkpoint_is_trained_as_the_model_and_goes_back(tmp_path):
    trainable().save_pretrained(tmp_path)
    (_, _, from_model), _ = on_ranks(WORLD, sharded_step, None)
    (_, _, from_folder), _ = on_ranks(WORLD, sharded_step, tmp_path)
    assert from_model.keys() == from_folder.keys()
    assert all(torch.equal(from_model[name], from_folder[name]) for name in from_model)
    again = trainable()
    assert from_model.keys() == again.state_dict().keys()
    again.load_state_dict(from_model)
    ids = batch(0)

    def evaluated(group):
        sharded = shard_experts(copy.deepcopy(again), group, max_tokens=32)
        with torch.no_grad():
            return sharded.model.eval()(ids).logits, sharded.plain_state_dict()

    with torch.no_grad():
        due = again.eval()(ids).logits
    for logits, state in on_ranks(WORLD, evaluated):
        torch.testing.assert_close(logits, due, rtol=1e-5, atol=2e-5)
        assert state is None or all(torch.equal(state[name], from_model[name]) for name in state)


def balanced(group):
    """Transformers' loss is of a rank's own tokens; ours is a share of that of all ranks' tokens."""
    sharded = shard_experts(trainable(), group, max_tokens=32, training=True)
    _, _, logits = loss_of(sharded.model, batch(group.rank))
    total = 0.0
    for layer_TE in logits:
        weights_TK, ids_TK = layer_TE.softmax(dim=1).topk(sharded.model.config.num_experts_per_tok)
        routes = Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
        load = batch_load(routes, layer_TE.shape[1], group)
        total += balance_loss(layer_TE, routes, load).item()
    return total, len(logits), sharded.plan.load()


def test_the_balance_loss_over_ranks_is_that_of_all_tokens():
    results = on_ranks(WORLD, balanced)
    model = trainable()
    joined = torch.cat([batch(rank) for rank in range(WORLD)])
    layers = results[0][1]
    _, _, logits = loss_of(model, joined)
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    E, K = logits[0].shape[1], model.config.num_experts_per_tok
    due = sum(load_balancing_loss_func((one.detach(),), E, K).item() for one in logits)
    assert sum(total for total, *_ in results) == pytest.approx(due, rel=1e-5)
    assert len(results[0][2]) == layers
    assert all(sum(counts) == joined.numel() * K for counts in results[0][2].values())


def idle(group):
    sharded = shard_experts(trainable(), group, max_tokens=32, training=True)
    error = raised(sharded, batch(0) if group.rank == 0 else None)
    entered = raised(sharded.serve)
    with torch.no_grad():  # in an evaluation, a rank may have nothing
        sharded(batch(0) if group.rank == 0 else None)
    loss, *_ = loss_of(sharded.model, batch(group.rank))
    loss.backward()
    return error, entered, math.isfinite(loss.item())


def test_a_rank_without_sequences_is_refused_in_a_step_and_not_in_an_evaluation():
    first, second = on_ranks(WORLD, idle)
    assert isinstance(first[0], PeerFailed)
    assert isinstance(second[0], InputError)
    assert "this rank brings no sequences to a step that is trained" in str(second[0])
    assert isinstance(first[1], HandleError)
    assert first[2]
    assert second[2]


def without_training(group):
    sharded = shard_experts(trainable(), group, max_tokens=32)
    return raised(loss_of, sharded.model, batch(group.rank))


def test_without_training_a_step_says_how():
    for error in on_ranks(WORLD, without_training):
        assert isinstance(error, TokenyardError)
        assert "training=True" in str(error)


def quantized(group):
    return raised(shard_experts(trainable(), group, max_tokens=32, weights="mxfp4").plain_state_dict)


def test_quantized_experts_have_no_state_dict_of_transformers():
    for error in on_ranks(WORLD, quantized):
        assert isinstance(error, InputError)
        assert "the experts are mxfp4; expected plain weights" in str(error)


def test_tiny_models_have_several_layers_of_experts():
    assert tiny_config("qwen3_moe").num_hidden_layers >= 2
