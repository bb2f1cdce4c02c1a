"""Records the routes of every call of some layers, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.balancing.recorded_routes import RecordedRoutes
from tokenyard.group import Group
from tokenyard.layer import MoELayer
from tokenyard.routing import Routes


class RouteRecorder:
    """Keeps the routes of every call of some layers on this rank, until `remove` is called."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers
        self._calls: dict[str, list[Routes]] = {layer.name: [] for layer in layers}
        self._hooks = [layer.register_forward_pre_hook(self._keep) for layer in layers]

    def _keep(self, layer: Any, arguments: tuple[Any, ...]) -> None:
        _, routes = arguments
        assert isinstance(routes, Routes)  # the layers of a Transformers model get routes, not logits
        self._calls[layer.name].append(routes.to("cpu"))

    def remove(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def gather(self, group: Group) -> list[RecordedRoutes]:
        """The routes of all ranks, on every rank. Collective over the group."""
        return [self._gather_layer(layer, group) for layer in self._layers]

    def _gather_layer(self, layer: MoELayer, group: Group) -> RecordedRoutes:
        calls, spec = self._calls[layer.name], layer.wiring.spec
        by_rank = group.gather_json([routes.num_tokens for routes in calls], phase="recorded routes")
        counts_SW = torch.tensor(by_rank, dtype=torch.int32).reshape(group.size, -1).t().contiguous()
        none = torch.empty(0, spec.top_k)
        gathered = []
        for dtype, rows in (
            (torch.int32, [routes.topk_ids_TK for routes in calls]),
            (torch.float32, [routes.topk_weights_TK for routes in calls]),
        ):
            mine = torch.cat([none.to(dtype), *(part.to(dtype) for part in rows)])
            every = group.all_gather_rows(
                mine.view(torch.uint8).to(group.device),
                counts_SW.sum(dim=0).tolist(),
                phase="recorded routes",
            )
            gathered.append(every.cpu().view(dtype))
        order_N = _by_step(counts_SW)
        return RecordedRoutes(
            layer=layer.name,
            ids_NK=gathered[0][order_N],
            weights_NK=gathered[1][order_N],
            counts_SW=counts_SW,
            num_experts=spec.num_experts,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            expert_bytes=layer.experts.weights.nbytes // max(1, layer.experts.spec.num_local_experts),
        )


def _by_step(counts_SW: Tensor) -> Tensor:
    """The index that brings tokens from the order of (rank, step) into the order of (step, rank).

    >>> _by_step(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    steps, world = counts_SW.shape
    counts_WS = counts_SW.t().long()
    step_N = torch.arange(steps).repeat(world).repeat_interleave(counts_WS.flatten())
    return step_N.argsort(stable=True)
