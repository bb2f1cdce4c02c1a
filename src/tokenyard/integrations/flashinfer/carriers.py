"""Carriers move the rows of `MoeAlltoAll` over `one_sided`, and add what plans do not need of an exchange.

- Results may have another spec than the dispatched rows, because their width is not known at dispatch.
- A rank may take part in a round only to announce that it needs an agreement, or has an error (`NeedsAgreement`), and
  finds out whether all ranks did so.
- Slots that hold no row are marked.

`SharedMemoryCarrier` does this on the CPU, and `device_carrier` on GPUs, where no call waits for the device.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tokenyard.errors import TokenyardError
from tokenyard.exchange import Exchange, ExchangeSpec, RoundTrip, SharedMemoryTransport, Transport
from tokenyard.formats import EncodedRows
from tokenyard.group.base import Group
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer


class NeedsAgreement(TokenyardError):
    """Announced by a rank that needs an agreement, because of `cause`. It never leaves this package."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("an agreement is needed", expected="an agreement round", fix="agree")
        self.cause = cause

    @property
    def announced_as(self) -> Exception:
        """The error that other ranks receive: this rank's own, or one that says what is new on it."""
        return self.cause


class Mark(NamedTuple):
    """The value that is written into the slots of one payload that hold no row."""

    payload: int  # the number of the payload
    value: int


class Carrier(ABC):
    """An exchange over `one_sided`, as `MoeAlltoAll` uses it."""

    # The transport that moves the rows.
    transport_class: ClassVar[type[Transport]]
    # Whether a spec serves only calls with exactly its `max_tokens`; otherwise it also serves fewer tokens.
    needs_exact_tokens: ClassVar[bool]

    def __init__(self, group: Group, *, plan_id: int) -> None:
        self.exchange = Exchange(self.transport_class, group, plan_id=plan_id)
        self.transport: Any = self.exchange.transport  # of that class

    @property
    def reads_values(self) -> bool:
        """Whether a dispatch reads values of tensors on the host: the ids, and how many rows came."""
        return self.exchange.transport.reads_values

    @property
    def own_buffer(self) -> Tensor:
        """This rank's workspace."""
        buffer: Tensor = self.transport.workspace.buffers[self.exchange.group.rank]
        return buffer

    @abstractmethod
    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> RoundTrip:
        """Dispatch. Each source rank sends at most `max_tokens` rows, and has that many slots."""

    @abstractmethod
    def mark_unused(
        self, trip: RoundTrip, payloads: Sequence[Tensor], max_tokens: int, mark: Mark | None
    ) -> None:
        """Write `mark` into the slots of its payload that hold no row. Subclasses say what the other payloads get."""

    @abstractmethod
    def unused(self, trip: RoundTrip, max_tokens: int) -> Tensor:
        """Which slots hold no row: `[ranks, max_tokens]`."""

    @abstractmethod
    def results(self, spec: ExchangeSpec, max_tokens: int) -> CombineBuffer:
        """The buffer for results of a spec in this rank's workspace: always the same, for one dispatch in flight."""

    @abstractmethod
    def place(self, trip: RoundTrip, results: Tensor, payload: Tensor) -> None:
        """Copy `payload` into `results`, its place in the workspace. Both are `[W, max_tokens, H]`."""

    @abstractmethod
    def check_may_agree(self, what: str, error: Exception | None) -> None:
        """Raise `error`, or that `what` is new, on this rank alone, if ranks cannot agree now (in a CUDA graph)."""

    @abstractmethod
    def all_need_agreement(self) -> bool:
        """Whether all ranks came to the last phase only to agree, as this one did."""

    def redirect(self, trip: RoundTrip, spec: ExchangeSpec, max_tokens: int, *, again: bool = False) -> None:
        """Switch the one dispatch in flight to results of this spec; `again`: after a combine that was refused."""
        received = replace(trip.received, results=self.results(spec, max_tokens))
        trip.redirect(spec, received=received, again=again)


class SharedMemoryCarrier(Carrier):
    """Moves rows between CPU ranks. Every call waits for all ranks, so they can always agree."""

    transport_class = SharedMemoryTransport
    needs_exact_tokens = True

    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> RoundTrip:
        return self.exchange.dispatch(spec, rows, routes)

    def mark_unused(
        self, trip: RoundTrip, payloads: Sequence[Tensor], max_tokens: int, mark: Mark | None
    ) -> None:
        """Unused slots of the other payloads are filled with zeros, over rows of earlier rounds."""
        for number, slots_SX in enumerate(payloads):
            for source, count in enumerate(trip.received.counts_W):
                unused = slots_SX[source * max_tokens + count : (source + 1) * max_tokens]
                if mark is not None and mark.payload == number:
                    unused.fill_(mark.value)
                elif slots_SX.shape[1] > 0:
                    # As bytes: torch does not fill every dtype that a payload may have.
                    unused.view(torch.uint8).zero_()

    def unused(self, trip: RoundTrip, max_tokens: int) -> Tensor:
        counts_W1 = torch.tensor(trip.received.counts_W).unsqueeze(1)
        return torch.arange(max_tokens) >= counts_W1

    def results(self, spec: ExchangeSpec, max_tokens: int) -> CombineBuffer:
        buffer: CombineBuffer = self.transport.results_at(spec, 0, None)  # results travel back as they are
        return buffer

    def place(self, trip: RoundTrip, results: Tensor, payload: Tensor) -> None:
        for source, count in enumerate(trip.received.counts_W):
            results[source, :count] = payload[source, :count].detach()

    def check_may_agree(self, what: str, error: Exception | None) -> None:
        pass

    def all_need_agreement(self) -> bool:
        return True


def carrier_for(group: Group, *, plan_id: int) -> Carrier:
    """The carrier that serves ranks on the devices of a group."""
    if group.device.type != "cuda":
        return SharedMemoryCarrier(group, plan_id=plan_id)
    # Imported only for GPUs, because it needs Triton.
    module: Any = importlib.import_module("tokenyard.integrations.flashinfer.device_carrier")
    chosen: Carrier = module.DeviceCarrier(group, plan_id=plan_id)
    return chosen


class GatheredStatistics:
    """EPLB statistics: the counts of all ranks, `[ranks, num_experts]`, int32, gathered in the course of a dispatch.

    Making one is collective. Each rank writes its counts into memory that all ranks map, before it dispatches. A
    dispatch returns after every rank has announced its own, so every row is there. No rank can write the counts of its
    next dispatch before all others have read these: it has to combine first, and the others come to that combine after
    they have read.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        self._rank = group.rank
        with torch.inference_mode(False):  # an inference tensor could not be written outside
            self._rows = [buffer.view(torch.int32) for buffer in group.share_memory(4 * num_experts)]

    def bring(self, mine: Tensor) -> None:
        """Write the counts of this rank, before a dispatch."""
        self._rows[self._rank].copy_(mine)

    def gathered(self) -> Tensor:
        """A copy of the counts of all ranks, after that dispatch."""
        return torch.stack(self._rows)
