"""The experts of a model whose ranks share them: tokenyard's layers, and torch's own all-to-all to compare with.

Both have the parameters of this rank's experts by name, and turn the rows of this rank into the sum of their experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tokenyard import LayerSpec, MoELayer, Routes, plan
from tokenyard.experts import ExpertWeights
from tokenyard.group import Group
from tokenyard_lab.training.network import Shape

# tokenyard with `sum="choices"` or `sum="ranks"`; the sum of choices by torch's collectives.
How = Literal["choices", "ranks", "all_to_all"]


class ExpertLayers(Protocol):
    """The experts of all layers, on this rank."""

    # This rank's experts, by their names in Transformers: gate_up_proj [L, 2I, H], down_proj [L, H, I] of each layer.
    parameters: dict[str, nn.Parameter]

    def __call__(self, layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The sum of each token's experts."""
        ...


def names(layer: int) -> tuple[str, str]:
    """The names of a layer's expert weights, as in Transformers."""
    return tuple(f"model.layers.{layer}.mlp.experts.{part}_proj" for part in ("gate_up", "down"))  # type: ignore[return-value]


class YardExperts:
    """Layers of one training plan."""

    def __init__(
        self,
        group: Group,
        shape: Shape,
        weights: Mapping[str, Tensor],
        tokens: int,
        *,
        how: Literal["choices", "ranks"],
    ) -> None:
        specs = [
            LayerSpec(
                name=f"moe.{layer}", hidden_size=shape.hidden, intermediate_size=shape.expert_width,
                num_experts=shape.experts, top_k=shape.top_k, dtype=torch.float32, weights="fp32", sum=how,
            )
            for layer in range(shape.layers)
        ]  # fmt: skip
        self.plan = plan(specs, group, max_tokens=tokens, training=True)
        self._layers: list[MoELayer] = []
        self.parameters: dict[str, nn.Parameter] = {}
        for layer, spec in enumerate(specs):
            gate_up, down = names(layer)
            made = self.plan.layer(spec.name, ExpertWeights(w13=weights[gate_up], w2=weights[down]))
            self._layers.append(made)
            of_layer = dict(made.experts.named_parameters())
            self.parameters |= {gate_up: of_layer["w13"], down: of_layer["w2"]}

    def __call__(self, layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH: Tensor = self._layers[layer](x_TH, Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK))
        return y_TH


class AllToAllExperts:
    """The usual way: sort the choices by expert, all-to-all, products, all-to-all back, weigh and sum at home."""

    def __init__(self, group: Group, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        self._shape, self._ranks = shape, group.size
        local = shape.experts // group.size
        mine = slice(group.rank * local, (group.rank + 1) * local)
        self.parameters = {
            name: nn.Parameter(weights[name][mine].clone())
            for layer in range(shape.layers)
            for name in names(layer)
        }

    def __call__(self, layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order_N = ids_TK.flatten().argsort(stable=True)
        token_N = order_N // self._shape.top_k
        out_E = ids_TK.flatten().bincount(minlength=self._shape.experts)
        in_WL = torch.empty_like(out_E)
        dist.all_to_all_single(in_WL, out_E)
        in_WL = in_WL.view(self._ranks, -1)
        sent, came = out_E.view(self._ranks, -1).sum(1).tolist(), in_WL.sum(1).tolist()
        rows = _exchange(x_TH[token_N], came, sent)
        expert_R = torch.arange(in_WL.shape[1]).repeat(self._ranks).repeat_interleave(in_WL.flatten())
        by_expert_R = expert_R.argsort(stable=True)
        gate_up, down = (self.parameters[name] for name in names(layer))
        parts = []
        for expert, part in enumerate(rows[by_expert_R].split(in_WL.sum(0).tolist())):
            gate, up = functional.linear(part, gate_up[expert]).chunk(2, dim=-1)
            parts.append(functional.linear(functional.silu(gate) * up, down[expert]))
        results = torch.cat(parts)[by_expert_R.argsort()]
        home = _exchange(results, sent, came)
        weighted = home * weights_TK.flatten()[order_N].unsqueeze(1)
        return torch.zeros_like(x_TH).index_add(0, token_N, weighted)


class _Exchange(torch.autograd.Function):
    """`all_to_all_single`, whose backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        ctx.splits = send, receive
        came = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), receive, send)
        return came

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(gradients[0], *ctx.splits), None, None


def _exchange(rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
    """Send rows to all ranks, and return those that come."""
    came: Tensor = _Exchange.apply(rows, receive, send)  # type: ignore[no-untyped-call]
    return came
