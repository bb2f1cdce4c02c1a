"""The carrier of `MoeAlltoAll` on GPUs: no call waits for the device, so round trips can be captured.

Shapes are fixed: every slot counts as a row, and in a slot that holds none all ids are -1. Errors of another rank, or
in this rank's ids, are therefore raised by a later call than the one in which they happen.

**Agreements.** A rank that brings something new, or has an error, sets the flag of its round as a failed rank does,
waits for the flags of the others, and reads them. If all ranks have set such a flag, each of them sees this, and they
agree on the host. If some have not, there is no agreement: a rank that has set it raises its own error, or what is new,
and the others find in their status that it failed, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tokenyard.errors import HandleError
from tokenyard.exchange import ExchangeSpec, RoundTrip
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport
from tokenyard.formats import EncodedRows
from tokenyard.integrations.flashinfer.carriers import Carrier, Mark
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer, LocalRoutes


class DeviceCarrier(Carrier):
    """Moves rows between GPUs. Ranks agree only if all of them need it."""

    transport_class = CudaTransport
    needs_exact_tokens = False

    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> RoundTrip:
        with self.exchange.fixed_shapes(max_tokens):
            return self.exchange.dispatch(spec, rows, routes)

    def mark_unused(
        self, trip: RoundTrip, payloads: Sequence[Tensor], max_tokens: int, mark: Mark | None
    ) -> None:
        """Unused slots of the other payloads keep older bytes."""
        if mark is not None:
            unused_S1 = self.unused(trip, max_tokens).view(-1, 1)
            payloads[mark.payload].masked_fill_(unused_S1, mark.value)

    def unused(self, trip: RoundTrip, max_tokens: int) -> Tensor:
        routes = cast(LocalRoutes, trip.received.routes)
        return (routes.ids_RK < 0).all(dim=1).view(self.exchange.group.size, max_tokens)

    def results(self, spec: ExchangeSpec, max_tokens: int) -> CombineBuffer:
        slots = DispatchSlots(spec=spec, region=0, max_tokens=max_tokens)
        # Results travel back as they are.
        buffer: CombineBuffer = self.transport.workspace.results_at(slots, None)
        return buffer

    def place(self, trip: RoundTrip, results: Tensor, payload: Tensor) -> None:
        results.copy_(payload.detach())

    def check_may_agree(self, what: str, error: Exception | None) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise error or HandleError(
                f"{what} is new, and a CUDA graph is being captured",
                expected="a call that all ranks have made before: they cannot agree in a graph",
                fix="make one round trip with these dtypes and shapes before capturing",
                rank=self.exchange.group.rank,
            )

    def all_need_agreement(self) -> bool:
        return bool(self.transport.all_failed())
