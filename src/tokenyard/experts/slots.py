"""The slots of a rank's weights: one for each of its experts, and spare ones for experts that move to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import QuantizedMatrix


class ExpertSlots:
    """Which slot of a rank's weights holds which expert.

    An expert keeps its slot as long as it stays on the rank. The weights of an expert that moves to this rank are
    written into a spare slot, which is used from the next `switch` on. The switch also frees the slots of experts that
    leave.

    >>> slots = ExpertSlots([4, 5, 6], count=4)
    >>> slots.free
    [3]
    >>> slots.switch([6, 0, 4], {0: 3})
    >>> slots.free, slots.lookup(torch.device("cpu")).tolist()
    ([1], [2, 3, 0, -1, -1])
    """

    def __init__(self, experts: Sequence[int], count: int, slots: Sequence[int] | None = None) -> None:
        self.count = count  # slots, spare ones included
        self._experts = list(experts)  # in the order of local ids
        self._slot_of = dict(zip(experts, range(count) if slots is None else slots, strict=False))

    def of(self, expert: int) -> int:
        """The slot of an expert of this rank."""
        return self._slot_of[expert]

    def places(self, experts: Sequence[int]) -> dict[int, int]:
        """The slots for experts that move to this rank: the one that an expert has already, else a spare one."""
        free = iter(self.free)
        return {
            expert: self._slot_of[expert] if expert in self._slot_of else next(free) for expert in experts
        }

    @property
    def free(self) -> list[int]:
        """The spare slots."""
        taken = set(self._slot_of.values())
        return [slot for slot in range(self.count) if slot not in taken]

    def as_dict(self) -> dict[str, Any]:
        """The arguments of the constructor that make equal slots, to be sent to other ranks."""
        slots = [self._slot_of[expert] for expert in self._experts]
        return {"experts": self._experts, "count": self.count, "slots": slots}

    def switch(self, experts: Sequence[int], came: dict[int, int]) -> None:
        """Hold these experts from now on, in the order of local ids; `came` has the slots of those that are new."""
        known = self._slot_of | came
        self._experts = list(experts)
        self._slot_of = {expert: known[expert] for expert in experts}

    def lookup(self, device: torch.device, before: Tensor | None = None) -> Tensor | None:
        """The slot of each local id, with -1 at index -1; None if every local id equals its slot.

        On a GPU, `before` is overwritten and returned, because captured graphs read it. For the same reason a tensor is
        made even if ids equal slots, where there are spare ones.
        """
        slots = [self._slot_of[expert] for expert in self._experts]
        spare, on_gpu = self.count - len(slots), device.type == "cuda"
        if slots == list(range(len(slots))) and not (on_gpu and (spare or before is not None)):
            return None
        made = torch.tensor([*slots, *[-1] * (spare + 1)], dtype=torch.int32)
        return before.copy_(made) if on_gpu and before is not None else made.to(device)


_ALIGNMENT = 64  # bytes, as torch aligns its own allocations


def _aligned_nbytes(tensor: Tensor, spare: int) -> int:
    """Bytes of a tensor with `spare` more experts, rounded up to the alignment of the next tensor."""
    nbytes = tensor.dtype.itemsize * math.prod((len(tensor) + spare, *tensor.shape[1:]))
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def with_spare_slots(
    weights: ExpertWeights, spare: int, *, allocate: Callable[[int], Tensor]
) -> ExpertWeights:
    """A copy of the weights with `spare` more experts at the end. On a CPU, `allocate(nbytes)` gives the memory."""
    sizes = [_aligned_nbytes(tensor, spare) for tensor in weights.by_name().values() if tensor.is_cpu]
    room: Iterator[Tensor] = iter(allocate(sum(sizes)).split(sizes) if sizes else ())

    def longer(tensor: Tensor) -> Tensor:
        shape = (len(tensor) + spare, *tensor.shape[1:])
        if tensor.is_cpu:
            held = next(room).view(tensor.dtype)[: math.prod(shape)].view(shape)
        else:
            held = tensor.new_empty(shape)
        held[: len(tensor)] = tensor.detach()
        # Spare slots get a copy of the first expert, so that they hold valid weights, which can be packed or recoded.
        held[len(tensor) :] = tensor[:1].detach() if len(tensor) else 0
        return held

    parts: dict[str, Tensor | QuantizedMatrix] = {}
    for name, part in weights.parts().items():
        if isinstance(part, QuantizedMatrix):
            payloads = {key: longer(payload) for key, payload in part.payloads.items()}
            parts[name] = replace(part, shape=(part.shape[0] + spare, *part.shape[1:]), payloads=payloads)
        else:
            parts[name] = longer(part)
    return ExpertWeights(**parts)  # type: ignore[arg-type]
