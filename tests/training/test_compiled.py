"""Layers of a training plan under `torch.compile`: one graph, the bits of eager gradients, and nothing stays behind."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tokenyard as ty
from tests.models import on_ranks
from tests.training.batches import Training, differing, trained
from tests.training.test_uses import gradients
from tokenyard.formats import Payload
from tokenyard.layer import compiled_training

PAYLOADS = (Payload(name="position", dtype=torch.int32, width=1),)
CASE = Training(trained(dtype=torch.float32, bias=True, sum="choices", payloads=PAYLOADS, token_numbers=True))


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def trained_twice(group, backend, call):
    """Two steps of two layers, compiled or not: gradients, and the tickets that are left."""
    torch._dynamo.reset()
    plan = ty.plan([CASE.spec], group, training=True)
    weight = torch.full((64, 64), 0.01, requires_grad=True)
    layer = plan.layer("moe", CASE.weights, shared=lambda x_TH: x_TH @ weight)
    layer.experts.b2.requires_grad_(False)
    x_TH, routes, extra, dy_TH = CASE.inputs(group)
    payloads = {"position": torch.zeros(len(x_TH), 1, dtype=torch.int32)}

    def model(x_TH, ids_TK, weights_TK, numbers_T):
        routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
        y_TH = layer(x_TH.relu(), routes, payloads=payloads, add=x_TH, token_numbers=numbers_T)
        return layer(y_TH, routes, payloads=payloads, token_numbers=numbers_T)

    step = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    arguments = (routes.topk_ids_TK, routes.topk_weights_TK, extra["token_numbers"])
    for _ in range(2):
        if call == "checkpointed":
            y_TH = checkpoint(step, x_TH, *arguments, use_reentrant=False)
        else:
            y_TH = step(x_TH, *arguments)
        y_TH.backward(dy_TH)
    held = []
    if backend is not None:
        dropped = step(x_TH, *arguments)
        held.append(len(compiled_training._held))
        del dropped
        with torch.no_grad():
            step(x_TH, *arguments)
    del y_TH
    gc.collect()
    held.append(len(compiled_training._held))
    found = gradients(layer, x_TH, routes) | {"shared": weight.grad}
    assert found.pop("b2") is None
    return found, held


def test_a_compiled_step_has_the_bits_of_an_eager_one():
    ((eager, _),) = on_ranks(1, trained_twice, None, "plain")
    ((found, held),) = on_ranks(1, trained_twice, "aot_eager", "plain", deadline=120.0)
    assert differing(eager, found) == []
    assert held[-1] <= 2  # of the call whose result was dropped


@pytest.mark.long
@pytest.mark.parametrize("call", ["plain", "checkpointed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients_have_the_bits_of_eager_ones(backend, call):
    ((eager, _),) = on_ranks(1, trained_twice, None, call)
    ((found, held),) = on_ranks(1, trained_twice, backend, call)
    assert differing(eager, found) == []
    assert held[-1] <= 2  # of the call whose result was dropped
    assert held[0] <= 4


@pytest.mark.long
def test_ranks_that_are_processes_train_compiled_models():
    """Ranks that are threads would share the tracer."""
    options = {"ranks": "processes", "deadline": 120.0, "threads_per_rank": 1}
    eager, found = (
        on_ranks(2, trained_twice, backend, "plain", **options) for backend in (None, "aot_eager")
    )
    for (due, _), (one, held) in zip(eager, found, strict=True):
        assert differing(due, one) == []
        assert held[-1] <= 2
