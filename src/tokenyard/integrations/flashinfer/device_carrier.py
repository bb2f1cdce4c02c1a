"""The carrier of a compatible door on GPUs: no call waits for the device, so round trips can be captured.

Shapes are fixed: every slot is a row, and those that hold none are known by their ids. What goes wrong on another rank,
or in this one's ids, is therefore not raised by the call in which it happens, but by a later one.

**At the door.** A rank that has something new to agree on, or an error, says so with the flag of its round, like one
that failed, and then looks at the flags of the others, which it has waited for. Were all at the door, all look at the
same flags, and meet in an agreement on the host. Were some not, nobody meets: who was at the door raises what brought
it there, and the others find in their status that this rank failed, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from tokenyard.errors import HandleError, PeerFailed
from tokenyard.exchange import Dispatched, ExchangeSpec
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.one_sided.control import ROUND, Trouble
from tokenyard.exchange.one_sided.cuda import CudaOneSidedExchange, DevicePath
from tokenyard.exchange.one_sided.launches import Crossing
from tokenyard.formats import EncodedRows
from tokenyard.integrations.flashinfer.carriers import AtTheDoor, Carrier
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes


class DeviceCarrier(Carrier, CudaOneSidedExchange):
    """The one-sided exchange of a compatible door, by kernels."""

    needs_exact_tokens = False
    reads_values = False
    _door_flag = 0

    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> Dispatched:
        with self.fixed_shapes(max_tokens):
            return self.dispatch(spec, rows, routes)

    def mark_unused(
        self,
        flight: Dispatched,
        payloads: Sequence[Tensor],
        max_tokens: int,
        number: int | None,
        mark: int | None,
    ) -> None:
        """Fill the slots of payload `number` that hold no row with `mark`. Others keep what stood there."""
        if number is None or mark is None:
            return
        routes = cast(LocalRoutes, flight.received.routes)
        unused_S1 = (routes.ids_RK < 0).all(dim=1, keepdim=True)
        payloads[number].masked_fill_(unused_S1, mark)

    def place(self, flight: Dispatched, results: Tensor, payload: Tensor) -> None:
        results.copy_(payload.detach())

    def results(self, spec: ExchangeSpec, max_tokens: int) -> Tensor:
        crossing = Crossing(spec=spec, flight=0, max_tokens=max_tokens)
        (rows_SH,) = self.memory.combine(crossing, self.group.rank).values()
        return rows_SH

    @property
    def own_buffer(self) -> Tensor:
        return self.memory.buffers[self.group.rank]

    def redirect(self, dispatched: Dispatched, spec: ExchangeSpec, *, again: bool = False) -> Dispatched:
        path = cast(DevicePath, dispatched.return_path)
        path = replace(path, crossing=replace(path.crossing, spec=spec))
        return super().redirect(replace(dispatched, return_path=path), spec, again=again)

    # -- At the door ---------------------------------------------------------------------------------------

    def check_may_agree(self, what: str, error: Exception | None) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise error or HandleError(
                f"{what} is new, and a CUDA graph is being captured",
                expected="a call that all ranks have made before: they cannot agree in a graph",
                fix="make one round trip with these dtypes and shapes before capturing",
                rank=self.group.rank,
            )

    def is_agreed_on(self, phase: str) -> bool:
        there = self.memory.control.flags(list(Phase).index(Phase(phase)), self._door_flag >> 24)
        return bool((self._words()[there] == self._door_flag).all())

    def _words(self) -> Tensor:
        """This rank's control region."""
        return self.memory.layout.control_region().of(self.own_buffer).view(torch.int64)

    def _tell_failure(self, crossing: Crossing, phase: Phase, error: BaseException) -> None:
        number = list(Phase).index(phase)
        round = int(self._words()[ROUND + number]) + 1
        # What stands at every rank if all are at the door; and no older flag, if this round has failed before.
        self._door_flag = round << 24 | crossing.layer << 2 | number | 2
        cause = error.cause if isinstance(error, AtTheDoor) else error
        # The text of an older failure stays where it is: this one says of which round it is.
        told = _Told(f"{_stamp(phase, round)}{type(cause).__name__}: {cause}")
        super()._tell_failure(crossing, phase, told)

    def _raise_trouble(self, least: Trouble = Trouble.BAD_IDS) -> None:
        kind, flag, ranks, _ = self.launcher.told[0].tolist()
        if kind in (Trouble.FAILED, Trouble.DRIFTED):
            phase = list(Phase)[flag & 1]
            stamp = _stamp(phase, flag >> 24)
            for rank in range(self.group.size):
                text = bytes(self.memory.text(rank).cpu().tolist()).rstrip(b"\0").decode(errors="replace")
                if ranks >> rank & 1 and stamp in text:
                    self._forget_trouble()
                    raise PeerFailed(rank, text.partition(stamp)[2], phase=phase.value, rank=self.group.rank)
        super()._raise_trouble(least)


class _Told(Exception):
    """Only its text is used."""


def _stamp(phase: Phase, round: int) -> str:
    return f"{phase.value} {round}: "
