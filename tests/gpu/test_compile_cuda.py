"""Layers under `torch.compile` on a GPU, by the default compiler: one graph, and the bits of an eager call."""

import pytest
import torch
from torch import nn

import tokenyard as ty
from tests.models import batch, build, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.group import thread_groups
from tokenyard.routing import SoftmaxRouter

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


@torch.no_grad()
def compiled_and_eager(group, options, with_out):
    layers = [spec("routes", wire="mxfp8"), spec("logits", router=SoftmaxRouter(2, renormalize=True))]
    plan = ty.plan(layers, group, exchange="one_sided")
    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    by_routes = build(plan, "routes", shared=shared).cuda()
    by_logits = build(plan, "logits").cuda()

    def model(x_TH, ids_TK, weights_TK, logits_TE, out_TH):
        # Around the layers stand operators that round nothing: fused ones keep more digits than eager ones.
        routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
        y_TH = by_routes(x_TH.relu(), routes, add=x_TH)
        return by_logits(y_TH.abs(), logits_TE, out=out_TH).neg()

    compiled = torch.compile(model, fullgraph=True, backend="inductor", options=options)
    same = []
    for tokens in (4, 4, 9, 16, 7):
        x_TH, routes = batch(layers[0], tokens, seed=tokens)
        logits_TE = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(tokens))
        tensors = [t.cuda() for t in (x_TH, routes.topk_ids_TK, routes.topk_weights_TK, logits_TE)]
        into_TH, expected_TH = (torch.zeros_like(tensors[0]) if with_out else None for _ in range(2))
        same.append(same_bits(compiled(*tensors, into_TH).clone(), model(*tensors, expected_TH)))
        same.append(not with_out or same_bits(into_TH, expected_TH))
    return all(same)


# What `mode="reduce-overhead"` sets, with the layers left out of the CUDA graphs.
GRAPHS_BETWEEN_LAYERS = {"triton.cudagraphs": True, "custom_should_partition_ops": ["tokenyard::moe_layer"]}


# The compiler makes no CUDA graphs where a tensor of the caller's is written into.
@pytest.mark.parametrize(("options", "with_out"), [({}, True), (GRAPHS_BETWEEN_LAYERS, False)])
def test_one_graph_with_the_bits_of_an_eager_call(options, with_out):
    # The compiler's CUDA graphs live in the main thread alone.
    (group,) = thread_groups(1, device="cuda", deadline=120.0)
    assert compiled_and_eager(group, options, with_out)
