"""The state dict of a sharded model as Transformers has it, with all experts: for models on one rank, and for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats import QuantizedMatrix
from tokenyard.group import Group
from tokenyard.integrations.transformers.expert_modules import FIELDS, ExpertModule
from tokenyard.routing import Placement

if TYPE_CHECKING:
    from tokenyard.integrations.transformers.sharding import ShardedExperts


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """What the parameters of an experts module are called in the state dict of its model, and how they are laid out."""

    prefix: str  # the name of the module in the model
    is_transposed: bool  # whether matrices are [E, in, out]

    @classmethod
    def of(cls, module: ExpertModule) -> ParameterNames:
        """The names of a module that is still there."""
        return cls(
            prefix=f"{module.name}.{module.attribute}", is_transposed=bool(module.module.is_transposed)
        )


def plain_state_dict(model: Any, experts: Sequence[ShardedExperts], group: Group) -> dict[str, Tensor] | None:
    """The state dict that the model had before it was sharded, on rank 0; None on other ranks. Collective."""
    prefixes = tuple(f"{one.names.prefix}." for one in experts)
    keeps = group.rank == 0
    state = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(prefixes):
            whole = _whole(tensor.detach())
            if keeps:
                state[name] = whole.to("cpu", copy=True)  # as those of experts: later steps do not change it
    for one in experts:
        placement = one.layer.wiring.exchange_spec.placement
        for field in one.layer.experts.spec.shapes():
            held: Any = getattr(one.layer.experts, field, None)
            if not hasattr(held, "full_tensor"):  # kernels may hold weights in a form of their own
                held = one.layer.experts.weights.parts()[field]
            if isinstance(held, QuantizedMatrix):
                raise InputError(
                    f"the experts are {one.layer.wiring.spec.weights}",
                    expected="plain weights: a state dict of Transformers holds no quantized ones",
                    fix="shard the model with `weights` of a plain format",
                    layer=one.layer.name,
                    rank=group.rank,
                )
            whole = _all_experts(held.detach(), placement, group)
            if keeps:
                transposed = one.names.is_transposed and field.startswith("w")
                laid_out = whole.mT.contiguous() if transposed else whole
                state[f"{one.names.prefix}.{FIELDS[field]}"] = laid_out.cpu()
    return state if keeps else None


def _whole(tensor: Any) -> Tensor:
    """All of a DTensor, or the tensor itself."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _all_experts(held: Tensor, placement: Placement, group: Group) -> Tensor:
    """The parameters of all experts of a layer, in the order of their ids, from those of each rank."""
    if hasattr(held, "full_tensor"):  # its shards stand in this order
        return _whole(held)
    counts = [placement.num_local(rank) for rank in range(placement.world)]
    rows = held.contiguous().flatten(1).view(torch.uint8)
    gathered = group.all_gather_rows(rows, counts, phase="gathering the experts of a layer")
    order = [expert for experts in placement.table for expert in experts]
    return gathered.view(held.dtype).view(-1, *held.shape[1:])[torch.tensor(order).argsort()]
