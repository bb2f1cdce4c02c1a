"""Where a rank's weights stand: a slot for each of its experts, and spare ones for experts that come."""

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

    An expert keeps its slot as long as it stays on the rank. One that comes is written into a spare slot, and read only
    after a switch; the slots of those that leave are spare then.

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
        """The slots of experts that come: those that were made for them, else spare ones."""
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
        """The arguments that make the same slots: other ranks are told them."""
        slots = [self._slot_of[expert] for expert in self._experts]
        return {"experts": self._experts, "count": self.count, "slots": slots}

    def switch(self, experts: Sequence[int], came: dict[int, int]) -> None:
        """Hold these experts, in this order of local ids; some came, into these slots."""
        known = self._slot_of | came
        self._experts = list(experts)
        self._slot_of = {expert: known[expert] for expert in experts}

    def lookup(self, device: torch.device, before: Tensor | None = None) -> Tensor | None:
        """The slot of each local id, and -1 for id -1; None where each local id is its slot.

        On a GPU it stands where it stood before, from the beginning if there are spare slots: captured graphs read it.
        """
        slots = [self._slot_of[expert] for expert in self._experts]
        spare, on_gpu = self.count - len(slots), device.type == "cuda"
        if slots == list(range(len(slots))) and not (on_gpu and (spare or before is not None)):
            return None
        made = torch.tensor([*slots, *[-1] * (spare + 1)], dtype=torch.int32)
        return before.copy_(made) if on_gpu and before is not None else made.to(device)


_ALIGNMENT = 64  # bytes: that of torch's own memory


def _aligned_nbytes(tensor: Tensor, spare: int) -> int:
    """Bytes of a tensor with so many more experts, up to where the next one may begin."""
    nbytes = tensor.dtype.itemsize * math.prod((len(tensor) + spare, *tensor.shape[1:]))
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def with_spare_slots(
    weights: ExpertWeights, spare: int, *, allocate: Callable[[int], Tensor]
) -> ExpertWeights:
    """A copy of weights, and behind them room for some more experts. On CPUs `allocate` gives the bytes for it."""
    sizes = [_aligned_nbytes(tensor, spare) for tensor in weights.by_name().values() if tensor.is_cpu]
    room: Iterator[Tensor] = iter(allocate(sum(sizes)).split(sizes) if sizes else ())

    def longer(tensor: Tensor) -> Tensor:
        shape = (len(tensor) + spare, *tensor.shape[1:])
        if tensor.is_cpu:
            held = next(room).view(tensor.dtype)[: math.prod(shape)].view(shape)
        else:
            held = tensor.new_empty(shape)
        held[: len(tensor)] = tensor.detach()
        # Weights that every form can hold stand there, too, before an expert comes.
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
