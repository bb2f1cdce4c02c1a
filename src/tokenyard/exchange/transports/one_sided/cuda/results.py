"""Results of `one_sided` on GPUs: where they stand, and the kernels that wait for the other ranks and sum them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.results import Results, ResultsAtHome
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
from tokenyard.exchange.transports.one_sided.cuda.side_stream import Done
from tokenyard.gpu_kernels import is_aligned
from tokenyard.rows import LocalRoutes, ReceivedRows

if TYPE_CHECKING:
    from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport


@dataclass(frozen=True, kw_only=True, eq=False)
class WayBack:
    """What is kept of a dispatch for its combine."""

    slots_TW: Tensor  # the slot of each token on each rank, -1 where it did not go
    max_tokens: int  # of any rank, in this dispatch: windows are so many slots apart
    sent: tuple[int, ...]  # rows for each rank; empty if the host has not read them
    is_checked: bool  # whether the host reads how many rows came, and whether all went well
    in_slots: bool = False  # whether it reads both after the combine: experts get every slot as a row


def slots_of(arrival: Arrival) -> DispatchSlots:
    """Where the rows of an arrival, and their results, stand."""
    return DispatchSlots(spec=arrival.spec, region=arrival.region, max_tokens=arrival.way_back.max_tokens)


def choice_places(received: ReceivedRows) -> Tensor:
    """The place in the combine region of each choice's result: every slot has K places."""
    assert isinstance(received.routes, LocalRoutes)
    pairs_N, top_k = received.routes.pairs, received.routes.ids_RK.shape[1]
    if received.slots_R is None:
        return pairs_N
    return received.slots_R[pairs_N // top_k] * top_k + pairs_N % top_k


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceResults(ResultsAtHome):
    """Results in the workspaces of all ranks; the kernels that sum them wait for the other ranks."""

    transport: CudaTransport
    arrival: Arrival  # what these are the results of
    results: Results | None = None  # kept until they have come home
    just_placed: bool = False  # whether a kernel of this transport, not the experts, wrote them
    out_TH: Tensor | None = None  # the sum, if it was started when results were sent
    done: Done | None = None  # the end of that sum

    def summed(self) -> Tensor | None:
        if self.out_TH is not None:
            assert self.done is not None
            with self.transport.launcher.on_device():
                self.done.join()
                self.transport.end(self.arrival, self.done)
        return self.out_TH

    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        with self.transport.launcher.on_device():
            whole = (
                out_TH
                if is_aligned(out_TH)
                else torch.empty_like(out_TH, memory_format=torch.contiguous_format)
            )
            self.transport.sum(self.arrival, whole, add, just_placed=self.just_placed)
            if whole is not out_TH:
                out_TH.copy_(whole)
            self.transport.end(self.arrival)
        return out_TH

    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        transport, spec, way_back = self.transport, self.arrival.spec, self.arrival.way_back
        slots = slots_of(self.arrival)
        with transport.launcher.on_device():
            transport.launcher.signal_and_wait(slots.layer, Phase.COMBINE)
            tokens = tuple(column.nonzero().squeeze(1) for column in (way_back.slots_TW >= 0).unbind(dim=1))
            first = transport.group.rank * slots.max_tokens
            home = []
            for rank, token_N in enumerate(tokens):
                payloads = {
                    name: payload[first : first + len(token_N)]
                    for name, payload in transport.workspace.combine(slots, rank).items()
                }
                home.append(spec.results(payloads).decode(torch.float32).clone())
            transport.end(self.arrival)
        return tuple(home), tokens
