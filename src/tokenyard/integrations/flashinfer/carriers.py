"""What moves the rows of `MoeAlltoAll`: an exchange over `one_sided`, and what a plan does not need of it.

- Results may be of another spec than what was dispatched: their width is not known before.
- A rank may come to a round only to say that it needs an agreement, or has an error (`NeedsAgreement`); and it can tell
  afterwards whether all ranks came for that.
- Slots that hold no row are made recognizable.

`Carrier` does so on the CPU; `device_carrier` does on GPUs, where no call waits for the device.
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
from tokenyard.exchange import Arrival, Exchange, ExchangeSpec, SharedMemoryTransport, Transport
from tokenyard.formats import EncodedRows
from tokenyard.group.base import Group
from tokenyard.integrations.flashinfer.manifest import clear_unused
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer


class NeedsAgreement(TokenyardError):
    """Announced by a rank that needs an agreement, because of `cause`. Nobody outside of this package sees it."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("an agreement is needed", expected="an agreement round", fix="agree")
        self.cause = cause

    @property
    def announced_as(self) -> Exception:
        """What is new on this rank, or its error."""
        return self.cause


class Mark(NamedTuple):
    """What stands in the slots of a payload that hold no row."""

    payload: int  # the number of the payload
    value: int


class Carrier(ABC):
    """An exchange over `one_sided`, as `MoeAlltoAll` uses it."""

    # The transport that moves the rows.
    transport_class: ClassVar[type[Transport]]
    # Whether a spec serves only its own number of tokens; else any smaller one, too.
    needs_exact_tokens: ClassVar[bool]

    def __init__(self, group: Group, *, plan_id: int) -> None:
        self.exchange = Exchange(self.transport_class, group, plan_id=plan_id)
        self.transport: Any = self.exchange.transport  # of that class

    @property
    def reads_values(self) -> bool:
        """Whether a dispatch may look at values: the ids, and how many rows came."""
        return self.exchange.transport.reads_values

    @property
    def own_buffer(self) -> Tensor:
        """This rank's workspace."""
        buffer: Tensor = self.transport.workspace.buffers[self.exchange.group.rank]
        return buffer

    @abstractmethod
    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> Arrival:
        """Dispatch; at most `max_tokens` come from each rank, and so far apart are their slots."""

    @abstractmethod
    def mark_unused(
        self, arrival: Arrival, payloads: Sequence[Tensor], max_tokens: int, mark: Mark | None
    ) -> None:
        """Fill the slots that hold no row, with `mark` in its payload."""

    @abstractmethod
    def unused(self, arrival: Arrival, max_tokens: int) -> Tensor:
        """Which slots hold no row: `[ranks, max_tokens]`."""

    @abstractmethod
    def results(self, spec: ExchangeSpec, max_tokens: int) -> CombineBuffer:
        """Where results of a spec belong in this rank's workspace; one dispatch is in flight at most."""

    @abstractmethod
    def place(self, arrival: Arrival, results: Tensor, payload: Tensor) -> None:
        """Copy results, `[W, max_tokens, H]`, where they belong in the workspace."""

    @abstractmethod
    def check_may_agree(self, what: str, error: Exception | None) -> None:
        """Raise, on this rank alone, where ranks cannot meet now, because of something new or of an error."""

    @abstractmethod
    def all_need_agreement(self) -> bool:
        """Whether all ranks came to the last phase only to agree, as this one did."""

    def redirect(
        self, arrival: Arrival, spec: ExchangeSpec, max_tokens: int, *, again: bool = False
    ) -> Arrival:
        """The one arrival in flight, with results of this spec; `again` after a combine that was refused."""
        received = replace(arrival.received, results=self.results(spec, max_tokens))
        return self.exchange.redirect(replace(arrival, received=received), spec, again=again)


class SharedMemoryCarrier(Carrier):
    """Between CPU ranks: every call waits for all ranks, so they can always agree."""

    transport_class = SharedMemoryTransport
    needs_exact_tokens = True

    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> Arrival:
        return self.exchange.dispatch(spec, rows, routes)

    def mark_unused(
        self, arrival: Arrival, payloads: Sequence[Tensor], max_tokens: int, mark: Mark | None
    ) -> None:
        """The others are filled with zeros."""
        for number, slots_SX in enumerate(payloads):
            value = mark.value if mark is not None and mark.payload == number else None
            clear_unused(slots_SX, arrival.received.counts_W, max_tokens, value)

    def unused(self, arrival: Arrival, max_tokens: int) -> Tensor:
        counts_W1 = torch.tensor(arrival.received.counts_W).unsqueeze(1)
        return torch.arange(max_tokens) >= counts_W1

    def results(self, spec: ExchangeSpec, max_tokens: int) -> CombineBuffer:
        buffer: CombineBuffer = self.transport.results_at(spec, 0, None)  # results travel back as they are
        return buffer

    def place(self, arrival: Arrival, results: Tensor, payload: Tensor) -> None:
        for source, count in enumerate(arrival.received.counts_W):
            results[source, :count] = payload[source, :count].detach()

    def check_may_agree(self, what: str, error: Exception | None) -> None:
        pass

    def all_need_agreement(self) -> bool:
        return True


def carrier_for(group: Group, *, plan_id: int) -> Carrier:
    """The carrier that serves ranks on the devices of a group."""
    if group.device.type != "cuda":
        return SharedMemoryCarrier(group, plan_id=plan_id)
    # Triton is needed only there.
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
        with torch.inference_mode(False):  # what is made there could not be written elsewhere
            self._rows = [buffer.view(torch.int32) for buffer in group.share_memory(4 * num_experts)]

    def bring(self, mine: Tensor) -> None:
        """Write the counts of this rank, before a dispatch."""
        self._rows[self._rank].copy_(mine)

    def gathered(self) -> Tensor:
        """A copy of the counts of all ranks, after that dispatch."""
        return torch.stack(self._rows)
