"""The norm of all gradients of a model, over the experts of all ranks, and clipping to it.

torch's `clip_grad_norm_` takes what a rank holds for the whole model: each rank then leaves out the experts of the
others, finds another norm, and clips by another factor. It also refuses DTensors of several meshes in one call. Here
each parameter counts once:

    experts of a layer      what this rank holds, and what the ranks of the plan's group hold
    DTensors                further summed over each dimension of their mesh that shards them
    all other parameters    once; ranks must hold the same gradient, which is checked

The squares of each expert's gradient are summed by themselves, and these sums in a way that does not depend on their
order (`math.fsum`). The norm therefore has the same bits on any number of ranks if the gradients have, as they do with
`sum="choices"`; and all ranks have the same norm, so that they clip by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokenyard.errors import InputError, shown
from tokenyard.group import Group
from tokenyard.layer import MoELayer

_PHASE = "adding up the norm of the gradients"
# torch's: a norm of 0 divides by nothing.
_TINY = 1e-6


def gradient_norm(model: nn.Module) -> float:
    """The 2-norm of the gradients of all parameters, as if one rank held the whole model. Collective.

    All ranks call it after their backwards. Parameters without a gradient are left out. The host waits for the device.
    Ranks that hold different gradients of one replicated parameter raise, all of them.
    """
    return math.sqrt(math.fsum(_squares(model)))


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before. Collective.

    As torch's `clip_grad_norm_`, but for the norm: if that is not finite, neither are the gradients afterwards.
    """
    if not max_norm > 0:
        raise InputError(
            f"max_norm is {shown(max_norm)}",
            expected="a number above 0",
            fix="pass the largest norm that gradients may have, such as 1.0",
        )
    norm = gradient_norm(model)
    factor = max_norm / (norm + _TINY)
    if not factor >= 1.0:  # NaN, too
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


@dataclass(eq=False)
class _Sharded:
    """Squares of parameters that are sharded in one way: over these dimensions of a mesh, and this plan's group."""

    over: tuple[dist.ProcessGroup, ...]
    group: Group | None
    device: torch.device
    squares: list[float] = field(default_factory=list)

    def gathered(self) -> Iterable[float]:
        """The squares of all shards."""
        found = self.squares
        for process_group in self.over:
            found = _of_all_ranks(found, process_group, self.device)
        if self.group is not None:
            found = [square for squares in self.group.gather_json(found, phase=_PHASE) for square in squares]
        return found


def _of_all_ranks(
    numbers: Sequence[float], process_group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """The numbers of all ranks of a process group; ranks may have different counts of them. Collective."""
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(process_group.size())]
    dist.all_gather(counts, torch.tensor([len(numbers)], device=device), group=process_group)
    sizes = [int(count) for count in counts]
    if not any(sizes):
        return []
    mine = torch.zeros(max(sizes), dtype=torch.float64, device=device)
    mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=process_group)
    return [number for part, size in zip(parts, sizes, strict=True) for number in part[:size].tolist()]


def _squares(model: nn.Module) -> Iterator[float]:
    """Squares whose sum is that of all gradients' elements, each parameter's once."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    layer_of = {id(parameter): layer for layer in layers for parameter in layer.experts.parameters()}
    # Every rank makes the same entries in the same order, whichever gradients it has: gathering them is collective.
    ways: dict[tuple[object, ...], _Sharded] = {}
    for parameter in model.parameters():
        layer = layer_of.get(id(parameter))
        over = _sharding_groups(parameter)
        # A DTensor on the mesh of a plan has all experts; any other expert parameter has those of this rank.
        whole = layer is None or (
            isinstance(parameter, DTensor) and parameter.shape[0] == layer.wiring.spec.num_experts
        )
        group = None if whole or layer is None else layer.plan.group
        way = ways.setdefault((*map(id, over), id(group)), _Sharded(over, group, parameter.device))
        if parameter.grad is not None:
            way.squares += _squares_of(parameter.grad, by_expert=layer is not None)
    whole_here = [math.fsum(way.squares) for way in ways.values() if not way.over and way.group is None]
    for group in {id(layer.plan.group): layer.plan.group for layer in layers}.values():
        _check_equal(group, whole_here)
    for way in ways.values():
        yield from way.gathered()


def _sharding_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of the mesh dimensions over which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(number)
        for number, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )


def _squares_of(gradient: Tensor, *, by_expert: bool) -> list[float]:
    """The square of the norm of a gradient's local part, expert by expert if it is of experts."""
    if isinstance(gradient, DTensor):
        if any(placement.is_partial() for placement in gradient.placements):
            raise InputError(
                f"a gradient has the placements {gradient.placements}",
                expected="gradients that are summed: Shard or Replicate",
                fix="reduce it first: gradient.redistribute(placements=parameter.placements)",
            )
        gradient = gradient.to_local()
    # A call for each expert: a reduction over several at once may add in an order that depends on their number.
    parts = gradient.unbind() if by_expert else (gradient,)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().tolist() if norms else []


def _check_equal(group: Group, squares: list[float]) -> None:
    """Raise on all ranks of a group if they hold different gradients of parameters that each holds as a whole."""
    by_rank = group.gather_json(squares, phase=_PHASE)
    if len(set(map(repr, by_rank))) > 1:
        norms = ", ".join(f"rank {rank} has {math.sqrt(sum(one)):.6g}" for rank, one in enumerate(by_rank))
        raise InputError(
            f"the gradients of parameters that every rank holds differ between ranks: their norms are {norms}",
            expected="the same gradient on every rank: the sum over all ranks",
            fix="sum them before, all_reduce(parameter.grad) for each parameter outside of the experts; experts' "
            "gradients are sums already",
            rank=group.rank,
        )
