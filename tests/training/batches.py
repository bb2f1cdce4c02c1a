"""Layers that are trained on batches of all ranks, a step of them on a rank, and the float64 oracle of gradients."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

import tokenyard as ty
from tests.models import spec
from tokenyard.conformance.cases import random_weights
from tokenyard.experts import activation

WEIGHTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def trained(name="moe", dtype=torch.bfloat16, **changes):
    """The spec of a layer whose parameters have the dtype of its rows."""
    fields = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_experts": 8,
        "top_k": 2,
        "max_tokens": 64,
        "weights": WEIGHTS[dtype],
    }
    return spec(name, dtype=dtype, **(fields | changes))


@dataclass(frozen=True)
class Training:
    """One layer and a batch of all ranks together, which follow from a seed."""

    spec: ty.LayerSpec
    tokens: int = 48
    seed: int = 0
    dealt_out: bool = False  # rank r has tokens r::W; else consecutive ones
    unused: tuple[int, ...] = ()  # experts that no token chooses
    options: dict = field(default_factory=dict)  # further arguments of `plan`

    @cached_property
    def batch(self):
        """Rows, ids, routing weights, and the gradient of the result, of all ranks."""
        draw, layer = torch.Generator().manual_seed(self.seed), self.spec
        shape = (self.tokens, layer.hidden_size)
        x_TH, dy_TH = (torch.randn(shape, generator=draw).to(layer.dtype) for _ in range(2))
        ids_TK = torch.randint(-1, layer.num_experts, (self.tokens, layer.top_k), generator=draw)
        weights_TK = torch.rand(self.tokens, layer.top_k, generator=draw)
        for expert in self.unused:
            ids_TK[ids_TK == expert] = -1
        weights_TK[ids_TK < 0] = torch.nan  # whatever stands there means nothing
        return x_TH, ids_TK, weights_TK, dy_TH

    @cached_property
    def weights(self):
        return random_weights(self.spec, self.seed)

    def mine(self, group):
        """The tokens of one rank."""
        if self.dealt_out:
            return torch.arange(self.tokens)[group.rank :: group.size]
        return torch.arange(self.tokens).tensor_split(group.size)[group.rank]

    def make(self, group, **options):
        plan = ty.plan([self.spec], group, training=True, **(self.options | options))
        return plan, plan.layer(self.spec.name, self.weights)

    def inputs(self, group):
        """The inputs of this rank as leaves of the graph, and the gradient of its result."""
        token_T = self.mine(group)
        x_TH, ids_TK, weights_TK, dy_TH = (tensor[token_T] for tensor in self.batch)
        x_TH, weights_TK = x_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
        extra = {"token_numbers": token_T} if self.spec.token_numbers else {}
        return x_TH, routes, extra, dy_TH

    def step(self, group, **options):
        """One forward and backward on a rank: its result and gradients, by name, and the experts that are its own."""
        plan, layer = self.make(group, **options)
        x_TH, routes, extra, dy_TH = self.inputs(group)
        y_TH = layer(x_TH, routes, **extra)
        y_TH.backward(dy_TH)
        found = {"y": y_TH.detach(), "x": x_TH.grad, "weights": routes.topk_weights_TK.grad}
        found |= {name: parameter.grad for name, parameter in layer.experts.named_parameters()}
        return found, plan.local_experts(self.spec.name)

    def on(self, world, *, ranks="threads", hosts=1, **options):
        """Results and gradients of all ranks, put together in the order of tokens and of experts."""
        by_rank = ty.launch(
            world, self._step, options, ranks=ranks, hosts=hosts, deadline=30.0, threads_per_rank=1
        )
        token_T = torch.cat([self.mine(_Rank(rank, world)) for rank in range(world)])
        experts = [expert for _, owned in by_rank for expert in owned]
        together = {}
        for name in by_rank[0][0]:
            parts = torch.cat([found[name] for found, _ in by_rank])
            order = token_T if name in ("y", "x", "weights") else torch.tensor(experts)
            together[name] = torch.empty_like(parts).index_copy_(0, order, parts)
        return together

    def _step(self, group, options):
        return self.step(group, **options)

    @cached_property
    def oracle(self):
        """Results and gradients in float64, by torch's autograd, on one rank, without an exchange."""
        layer, formula = self.spec, activation(self.spec.activation)
        x_TH, ids_TK, weights_TK, dy_TH = self.batch
        matrices = {
            name: part.to(layer.dtype) if name.startswith("w") else part
            for name, part in self.weights.by_name().items()
        }
        leaves = {"x": x_TH, "weights": weights_TK.nan_to_num(0.0), **matrices}
        leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
        y_TH = torch.zeros_like(leaves["x"])
        for choice in range(layer.top_k):
            for expert in range(layer.num_experts):
                rows = (ids_TK[:, choice] == expert).nonzero().squeeze(1)
                weight = leaves["weights"][rows, choice].unsqueeze(1)
                x_nH = leaves["x"][rows] * (weight if layer.weight_on == "input" else 1.0)
                pre = x_nH @ leaves["w13"][expert].t()
                pre = pre + leaves["b13"][expert] if layer.bias else pre
                y_nH = formula(pre) @ leaves["w2"][expert].t()
                y_nH = y_nH + leaves["b2"][expert] if layer.bias else y_nH
                y_TH = y_TH.index_add(0, rows, y_nH * (weight if layer.weight_on == "output" else 1.0))
        y_TH.backward(dy_TH.double())
        return {"y": y_TH.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@dataclass
class _Rank:
    rank: int
    size: int


def errors(found, due):
    """By name, the largest error relative to the largest element."""
    return {
        name: float((found[name].double() - due[name]).abs().max() / due[name].abs().max().clamp_min(1e-30))
        for name in due
    }


def differing(one, other):
    """The names of tensors that are not bitwise equal."""
    return [name for name in one if not torch.equal(one[name], other[name])]
