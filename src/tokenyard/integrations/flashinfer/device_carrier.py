"""The carrier of `MoeAlltoAll` on GPUs: no call waits for the device, so round trips can be captured.

Shapes are fixed: every slot is a row, and those that hold none are known by their ids. What goes wrong on another rank,
or in this one's ids, is therefore not raised by the call in which it happens, but by a later one.

**Agreements.** A rank that has something new to agree on, or an error, says so with the flag of its round, like one
that failed, and then looks at the flags of the others, which it has waited for. Did all say so, all look at the same
flags, and meet in an agreement on the host. Did some not, nobody meets: a rank that did raises its own error, or what
is new, and the others find in their status that it failed, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tokenyard.errors import HandleError
from tokenyard.exchange import Arrival, ExchangeSpec
from tokenyard.exchange.one_sided.cuda import CudaTransport
from tokenyard.exchange.one_sided.operands import DispatchSlots
from tokenyard.formats import EncodedRows
from tokenyard.integrations.flashinfer.carriers import Carrier, Mark
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer, LocalRoutes


class DeviceCarrier(Carrier):
    """Between GPUs: ranks agree only where all of them need it."""

    transport_class = CudaTransport
    needs_exact_tokens = False

    def move(self, spec: ExchangeSpec, rows: EncodedRows, routes: Routes, max_tokens: int) -> Arrival:
        with self.exchange.fixed_shapes(max_tokens):
            return self.exchange.dispatch(spec, rows, routes)

    def mark_unused(
        self, arrival: Arrival, payloads: Sequence[Tensor], max_tokens: int, mark: Mark | None
    ) -> None:
        """The others keep what stood there."""
        if mark is not None:
            unused_S1 = self.unused(arrival, max_tokens).view(-1, 1)
            payloads[mark.payload].masked_fill_(unused_S1, mark.value)

    def unused(self, arrival: Arrival, max_tokens: int) -> Tensor:
        routes = cast(LocalRoutes, arrival.received.routes)
        return (routes.ids_RK < 0).all(dim=1).view(self.exchange.group.size, max_tokens)

    def results(self, spec: ExchangeSpec, max_tokens: int) -> CombineBuffer:
        slots = DispatchSlots(spec=spec, region=0, max_tokens=max_tokens)
        buffer: CombineBuffer = self.transport.workspace.results_at(
            slots, None
        )  # results travel back as they are
        return buffer

    def place(self, arrival: Arrival, results: Tensor, payload: Tensor) -> None:
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
