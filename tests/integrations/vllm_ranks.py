"""One layer of a plan on one rank, as `MoELayer` and as vLLM's kernel."""

from types import SimpleNamespace

import torch

import tokenyard as ty
from tests.integrations.vllm_kernel import make_kernel, moe_config
from tests.models import batch, build, spec
from tokenyard.conformance.cases import random_weights, same_bits

WORLD = 3
TOKENS = (5, 0, 7)  # a rank without tokens takes part


class Rank:
    """One layer of a plan on one rank, as `MoELayer` and as vLLM's kernel."""

    def __init__(self, vllm, group, exchange="one_sided", foreign=None, **changes):
        self.spec = spec(**({"experts": "reference"} | changes))
        self.plan = ty.plan([self.spec], group, exchange=exchange)
        self.rank = group.rank
        self.layer = build(self.plan, "moe")
        self.weights = random_weights(self.spec, 0).select(self.plan.local_experts("moe"))
        quant = None
        if self.spec.bias:
            quant = SimpleNamespace(
                quant_dtype=None, block_shape=None, w1_bias=self.weights.b13, w2_bias=self.weights.b2
            )
        self.mover = vllm.TokenyardPrepareAndFinalize(
            self.plan, "moe", routed_scaling_in_weights=self.spec.routed_scaling or 1.0
        )
        self.experts = vllm.TokenyardExperts(
            self.plan, "moe", moe_config=moe_config(self.spec, group), quant_config=quant
        )
        if foreign is not None:
            self.experts = foreign(self.layer)
            self.experts.format = self.mover.activation_format
            self.experts.moe_config = moe_config(self.spec, group)
        self.kernel = make_kernel(self.mover, self.experts)

    @property
    def expert_map(self):
        map_E = torch.full((self.spec.num_experts,), -1, dtype=torch.int32)
        mine = self.plan.local_experts("moe")
        map_E[mine] = torch.arange(len(mine), dtype=torch.int32)
        return map_E

    def batch(self, tokens=None, seed=0):
        tokens = TOKENS[self.rank] if tokens is None else tokens
        x_TH, routes = batch(
            self.spec, tokens, seed=seed + self.rank, scaled_by=self.spec.routed_scaling or 1.0
        )
        if tokens > 2:
            routes.topk_ids_TK[0] = -1  # for nobody
            routes.topk_ids_TK[1, 0] = -1
        return x_TH, routes

    def call(self, x_TH, routes, *, ids=None, weights=None, num_experts=None, **options):
        return self.kernel(
            x_TH,
            self.weights.w13,
            self.weights.w2,
            routes.topk_weights_TK if weights is None else weights,
            routes.topk_ids_TK if ids is None else ids,
            num_experts=num_experts or self.spec.num_experts,
            on_input=options.pop("on_input", self.spec.weight_on == "input"),
            **options,
        )

    def is_right(self, seed=0, **options):
        """Whether a round trip gives the bits of the layer, and leaves its input alone."""
        x_TH, routes = self.batch(seed=seed)
        before = [x_TH.clone(), routes.topk_ids_TK.clone(), routes.topk_weights_TK.clone()]
        y_TH = self.call(x_TH, routes, **options)
        after = [x_TH, routes.topk_ids_TK, routes.topk_weights_TK]
        kept = all(same_bits(a, b) for a, b in zip(before, after, strict=True))
        return kept and same_bits(y_TH, self.layer(x_TH, routes))


def finished(vllm):
    """What our experts say of their results."""
    return vllm.experts.Finished()
