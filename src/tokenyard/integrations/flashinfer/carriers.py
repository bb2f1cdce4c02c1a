"""What moves the rows of a compatible door: the one-sided exchange, taught three things that a plan does not need.

- Results may be of another spec than what was dispatched (`redirect`): their width is not known before.
- A rank may come to a round only to say that it needs an agreement, or has an error (`AtTheDoor`); and it can tell
  afterwards whether all ranks came for that.
- Slots that hold no row are made recognizable.

`Carrier` does so on the CPU; `device_carrier` does on GPUs, where no call waits for the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from tokenyard.errors import TokenyardError
from tokenyard.exchange import Dispatched, ExchangeSpec, OneSidedExchange
from tokenyard.formats import EncodedRows
from tokenyard.group.base import Group
from tokenyard.integrations.flashinfer.manifest import clear_unused
from tokenyard.routing import Routes


class AtTheDoor(TokenyardError):
    """Announced by a rank that needs an agreement, because of `cause`. Nobody outside of this package sees it."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("at the door", expected="an agreement", fix="agree")
        self.cause = cause


class Carrier(OneSidedExchange):
    """The one-sided exchange of a compatible door, on the CPU."""

    # Whether a spec serves only its own number of tokens; else any smaller one, too.
    needs_exact_tokens = True
    # Whether a dispatch may look at values: the ids, and how many rows came.
    reads_values = True

    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> Dispatched:
        """Dispatch; at most `max_tokens` come from each rank, and so far apart are their slots."""
        return self.dispatch(spec, rows, routes)

    def mark_unused(
        self,
        flight: Dispatched,
        payloads: Sequence[Tensor],
        max_tokens: int,
        number: int | None,
        mark: int | None,
    ) -> None:
        """Fill the slots that hold no row: with zeros, and in payload `number` with `mark`."""
        for each, slots_SX in enumerate(payloads):
            clear_unused(slots_SX, flight.received.counts_W, max_tokens, mark if each == number else None)

    def place(self, flight: Dispatched, results: Tensor, payload: Tensor) -> None:
        """Copy results, `[W, max_tokens, H]`, where they belong in the workspace."""
        for source, count in enumerate(flight.received.counts_W):
            results[source, :count] = payload[source, :count].detach()

    def results(self, spec: ExchangeSpec, max_tokens: int) -> Tensor:
        """Where results of a spec belong in this rank's workspace, `[slots, H]`; one dispatch is in flight at most."""
        (rows_SH,) = self.workspace.combine(self.group.rank, spec, flight=0).values()
        return rows_SH

    @property
    def own_buffer(self) -> Tensor:
        """This rank's workspace."""
        return self.workspace.buffers[self.group.rank]

    def redirect(self, dispatched: Dispatched, spec: ExchangeSpec, *, again: bool = False) -> Dispatched:
        """The one dispatch in flight, with results of this spec; `again` after a combine that was refused."""
        round = self._round + 1 if again else dispatched.round
        self._in_flight.land_all()
        redirected = replace(dispatched, spec=spec, round=round)
        self._in_flight.add(redirected)
        return redirected

    def refuse(self, dispatched: Dispatched, error: Exception) -> NoReturn:
        """Take part in a combine only to say that this rank has an error."""
        self._land(dispatched)
        self._fail(dispatched.spec, error, partial(self._fail_back, dispatched, error))

    def check_may_agree(self, what: str, error: Exception | None) -> None:
        """Raise, on this rank alone, where ranks cannot meet now, because of something new or of an error."""

    def is_agreed_on(self, phase: str) -> bool:
        """Whether all ranks meet in an agreement, after this one was at the door in a phase. On the CPU they do."""
        return True


def carrier_for(group: Group) -> type[Carrier]:
    """The carrier that serves ranks on the devices of a group."""
    if group.device.type != "cuda":
        return Carrier
    # Triton is needed only there.
    module: Any = importlib.import_module("tokenyard.integrations.flashinfer.device_carrier")
    chosen: type[Carrier] = module.DeviceCarrier
    return chosen
