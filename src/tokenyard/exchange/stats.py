"""What an exchange counts: rows, bytes and waits, per layer and per rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class MoveStats:
    """Counters of one layer's moves to other placements, on one rank."""

    experts: int = 0  # experts that came to this rank while the plan was in use
    nbytes: int = 0  # bytes that came, including those of layers that switched at the same time
    copy_s: float = 0.0  # seconds that copying took for the last switch, while the layers ran
    switches: int = 0  # to other placements
    switch_s: float = 0.0  # seconds of the last switch, in which no layer runs
    given_up: int = 0  # moves that were given up: the experts stayed where they were
    looks: int = 0  # times that `autobalance`, or `rebalance` without placements, looked at the load
    imbalance: float = 0.0  # load of the busiest rank over the mean load, at the last look
    imbalance_before: float = 0.0  # the same, at the look before
    imbalance_expected: float = 0.0  # the imbalance computed for the last better placement that was found
    refused: str = ""  # why `autobalance` could not move what it wanted to, the last time

    def count_look(self, imbalance: float) -> None:
        """Count one more look at the load, and keep the imbalance that it found."""
        self.looks += 1
        self.imbalance_before, self.imbalance = self.imbalance, imbalance

    def count_switch(self, came: int, seconds: float, nbytes: int, copying: float) -> None:
        """Count a switch to another placement, for which `came` experts came to this rank."""
        self.switches += 1
        self.experts += came
        self.nbytes += nbytes
        self.switch_s, self.copy_s = seconds, copying


@dataclass
class LayerStats:
    """Counters of one layer on one rank. Lists have an entry for each rank of the group."""

    world: int  # W, the number of ranks
    rounds: int = 0  # batches that went out and came home
    passes: int = 0  # round trips that these took: more where a batch had no room in one (`plan(max_rows=…)`)
    tokens: int = 0  # tokens that this rank brought
    dropped: int = 0  # choices of tokens whose expert was lost with its rank
    rows_sent: list[int] = field(default_factory=list)  # rows that went to each rank
    rows_received: list[int] = field(default_factory=list)  # rows that came from each rank
    dispatch_bytes: list[int] = field(default_factory=list)  # bytes put on the wire for each rank
    combine_bytes: list[int] = field(default_factory=list)  # bytes of results, returned to each rank
    lost: list[int] = field(default_factory=list)  # ranks that are gone, as the whole group numbered them
    moves: MoveStats = field(default_factory=MoveStats)  # moves of experts, and the imbalance of the load
    # Seconds in which this rank moved bytes or waited for others, by phase.
    wait_s: dict[str, float] = field(default_factory=lambda: {"dispatch": 0.0, "combine": 0.0})

    def __post_init__(self) -> None:
        for name in ("rows_sent", "rows_received", "dispatch_bytes", "combine_bytes"):
            setattr(self, name, [0] * self.world)
        self._stopwatches = {phase: _Stopwatch(self.wait_s, phase) for phase in self.wait_s}

    def count_dispatch(
        self,
        tokens: int,
        sent: Sequence[int],
        received: Sequence[int],
        nbytes: Sequence[int],
        *,
        is_next: bool = False,
    ) -> None:
        """Count one more dispatch: of a batch, or (`is_next`) of a further pass of the same batch."""
        self.rounds += not is_next
        self.passes += 1
        self.tokens += tokens
        self.count_rows(sent, received, nbytes)

    def count_rows(self, sent: Sequence[int], received: Sequence[int], nbytes: Sequence[int]) -> None:
        """Add rows and bytes, by rank. Called by itself if they are known only after their dispatch."""
        for totals, more in (
            (self.rows_sent, sent),
            (self.rows_received, received),
            (self.dispatch_bytes, nbytes),
        ):
            for rank, count in enumerate(more):
                totals[rank] += count

    def count_dropped(self, dropped_TK: Tensor) -> None:
        """Count choices that no rank serves; not during a CUDA graph capture, in which the host can read nothing."""
        if not (dropped_TK.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.dropped += int(dropped_TK.sum())

    def count_combine(self, nbytes: Sequence[int]) -> None:
        """Add the bytes of one more combine, by rank."""
        for rank, count in enumerate(nbytes):
            self.combine_bytes[rank] += count

    def waiting(self, phase: str) -> AbstractContextManager[None]:
        """A context whose seconds are added to `wait_s` of a phase."""
        return self._stopwatches[phase]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


# Choices up to which a batch on the CPU is counted in Python: an operation of torch takes longer.
_FEW_CHOICES = 64


class LoadCounter:
    """How many choices of this rank's tokens fell on each expert, by layer, since the counts were last reset.

    Each layer has one tensor of counts on the device of the rows. Counting there needs no wait, and a CUDA graph that
    holds a dispatch counts whenever it is replayed.

    >>> counter = LoadCounter(torch.device("cpu"))
    >>> counter.serve({"moe": 3})
    >>> counter.count("moe", torch.tensor([[0, 2], [2, -1]]))
    >>> counter.of("moe")
    [1, 0, 2]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: dict[str, Tensor] = {}  # choices of nobody, then of each expert
        self._few: dict[str, list[int]] = {}  # the same, of small batches on a CPU

    def serve(self, num_experts: Mapping[str, int]) -> None:
        """Count for these layers, with so many experts each. Allocates their tensors, before any CUDA graph capture."""
        with torch.inference_mode(False):  # inference tensors could not be written outside of it
            for layer, count in num_experts.items():
                if len(self._few.get(layer, ())) != count + 1:
                    self._counts[layer] = torch.zeros(count + 1, dtype=torch.int64, device=self._device)
                    self._few[layer] = [0] * (count + 1)
        for layer in self._few.keys() - num_experts.keys():
            del self._counts[layer], self._few[layer]

    def count(self, layer: str, topk_ids_TK: Tensor) -> None:
        """Add the choices of a batch to the counts of a layer."""
        if topk_ids_TK.is_cpu and topk_ids_TK.numel() <= _FEW_CHOICES:
            counts = self._few[layer]
            for choices in topk_ids_TK.tolist():
                for expert in choices:
                    counts[expert + 1] += 1
            return
        choices_N = topk_ids_TK.flatten().long() + 1
        self._counts[layer].scatter_add_(0, choices_N, torch.ones_like(choices_N))

    def counts(self, layer: str) -> Tensor:
        """The tensor that counts a layer's choices: those of nobody, then those of each expert."""
        return self._counts[layer]

    def of(self, layer: str) -> list[int]:
        """The choices that fell on each expert of a layer. Waits for the device."""
        many: list[int] = self._counts[layer][1:].tolist()
        return [count + more for count, more in zip(many, self._few[layer][1:], strict=True)]

    def reset(self) -> None:
        """Count from nothing again, in the same tensors."""
        for counts in self._counts.values():
            counts.zero_()
        self._few = {layer: [0] * len(counts) for layer, counts in self._few.items()}


class _Stopwatch:
    """Adds the seconds of a block to those of its phase."""

    __slots__ = ("_phase", "_seconds", "_started")

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] += time.monotonic() - self._started
