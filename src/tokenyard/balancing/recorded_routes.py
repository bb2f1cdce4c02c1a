"""The recorded routes of a run: write them to a safetensors file, read them again, and replay them.

A file holds four tensors for each layer. Tokens are in the order of (step, source rank, token); a step is one call of
the layer, which all ranks make together.

    LAYER.ids      int32 [tokens, K]     the experts that a token chose; -1 is no expert
    LAYER.weights  float32 [tokens, K]   their weights
    LAYER.counts   int32 [steps, W]      the tokens that each rank brought to each step
    LAYER.sizes    int64 [4]             experts, hidden size, intermediate size, bytes of one expert's weights
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenyard.checkpoints import read_tensors, write_tensors
from tokenyard.errors import InputError
from tokenyard.routing import Placement, Routes

_SIZES = ("num_experts", "hidden_size", "intermediate_size", "expert_bytes")
_FIELDS = {"ids": torch.int32, "weights": torch.float32, "counts": torch.int32, "sizes": torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRoutes:
    """The routes of one layer, from all ranks."""

    layer: str  # the name of the layer
    ids_NK: Tensor  # int32: global ids of experts; -1 is no expert
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
