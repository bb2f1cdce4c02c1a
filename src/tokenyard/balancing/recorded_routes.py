"""Record the routes of a run, write them to a safetensors file, read them again, and replay them.

A file holds four tensors for each layer. Tokens stand in the order of (step, source rank, token); a step is one call of
the layer, which all ranks make together.

    LAYER.ids      int32 [tokens, K]     the experts that a token chose; -1 is nobody
    LAYER.weights  float32 [tokens, K]   their weights
    LAYER.counts   int32 [steps, W]      the tokens that each rank brought to each step
    LAYER.sizes    int64 [4]             experts, hidden size, intermediate size, bytes of one expert's weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.checkpoints import read_tensors, write_tensors
from tokenyard.errors import InputError
from tokenyard.group import Group
from tokenyard.layer import MoELayer
from tokenyard.routing import Placement, Routes

_SIZES = ("num_experts", "hidden_size", "intermediate_size", "expert_bytes")
_FIELDS = {"ids": torch.int32, "weights": torch.float32, "counts": torch.int32, "sizes": torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRoutes:
    """The routes of one layer, from all ranks."""

    layer: str  # the name of the layer
    ids_NK: Tensor  # int32: global ids of experts; -1 is nobody
    weights_NK: Tensor  # float32: the routing weights
    counts_SW: Tensor  # int32: the tokens of each rank in each step
    num_experts: int  # E
    hidden_size: int  # H
    intermediate_size: int  # I
    expert_bytes: int  # the bytes of one expert's weights

    @property
    def num_steps(self) -> int:
        """Calls of the layer."""
        return self.counts_SW.shape[0]

    @property
    def world(self) -> int:
        """W, the ranks that were recorded."""
        return self.counts_SW.shape[1]

    def load(self) -> list[int]:
        """How many choices each expert got."""
        chosen = self.ids_NK[self.ids_NK >= 0].long()
        load: list[int] = chosen.bincount(minlength=self.num_experts).tolist()
        return load

    def replay(self, rank: int) -> Iterator[Routes]:
        """The routes that a rank brought, step by step: an empty batch where it had no tokens."""
        at = 0
        for counts in self.counts_SW.tolist():
            first = at + sum(counts[:rank])
            rows = slice(first, first + counts[rank])
            yield Routes(topk_ids_TK=self.ids_NK[rows], topk_weights_TK=self.weights_NK[rows])
            at += sum(counts)

    def rows_by_rank(self, placement: Placement) -> list[int]:
        """The choices that each rank would compute under a placement, replicas chosen as a layer chooses them.

        On another number of ranks than was recorded, the tokens of a step are assigned to them in turns.
        """
        world = placement.world
        counts = self.counts_SW.long()
        if world == self.world:
            source_N = torch.arange(world).repeat(self.num_steps).repeat_interleave(counts.flatten())
        else:
            first_S = counts.sum(dim=1).cumsum(0) - counts.sum(dim=1)
            place_N = torch.arange(len(self.ids_NK)) - first_S.repeat_interleave(counts.sum(dim=1))
            source_N = place_N % world
        total = torch.zeros(world, dtype=torch.int64)
        for rank in range(world):
            rank_NK, _ = placement.resolve(self.ids_NK[source_N == rank], rank)
            total += rank_NK[rank_NK >= 0].bincount(minlength=world)
        rows: list[int] = total.tolist()
        return rows


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


def write_routes(path: Path, recorded: Sequence[RecordedRoutes]) -> None:
    """Write the routes of some layers into one file."""
    tensors: dict[str, Tensor] = {}
    for routes in recorded:
        sizes = [getattr(routes, name) for name in _SIZES]
        tensors |= {
            f"{routes.layer}.ids": routes.ids_NK,
            f"{routes.layer}.weights": routes.weights_NK,
            f"{routes.layer}.counts": routes.counts_SW,
            f"{routes.layer}.sizes": torch.tensor(sizes, dtype=torch.int64),
        }
    write_tensors(path, tensors)


def read_routes(path: Path) -> list[RecordedRoutes]:
    """The routes of every layer in a file, in the order of their names. Raises unless they fit together."""
    tensors = read_tensors(path)
    layers = sorted({name.rpartition(".")[0] for name in tensors}, key=_natural)
    if not layers:
        raise _unfit(path, "holds no tensors")
    return [_checked(path, layer, tensors) for layer in layers]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts layer 10 behind layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _checked(path: Path, layer: str, tensors: dict[str, Tensor]) -> RecordedRoutes:
    found = {field: tensors.get(f"{layer}.{field}") for field in _FIELDS}
    for field, dtype in _FIELDS.items():
        tensor = found[field]
        if tensor is None or tensor.dtype != dtype or tensor.dim() != (1 if field == "sizes" else 2):
            raise _unfit(path, f"has no routes of a layer {layer!r}: {field} is missing, or of another kind")
    ids, weights, counts, sizes = (tensor for tensor in found.values() if tensor is not None)
    if ids.shape != weights.shape or sizes.numel() != 4 or (counts < 0).any() or counts.sum() != len(ids):
        raise _unfit(path, f"has routes of a layer {layer!r} whose tensors do not fit together")
    named = dict(zip(_SIZES, sizes.tolist(), strict=True))
    Routes(topk_ids_TK=ids, topk_weights_TK=weights).check(named["num_experts"])
    return RecordedRoutes(layer=layer, ids_NK=ids, weights_NK=weights, counts_SW=counts, **named)


def _unfit(path: Path, found: str) -> InputError:
    return InputError(
        f"{path} {found}",
        expected="routes that were recorded by `tokenyard run --record`",
        fix="record them again",
    )
