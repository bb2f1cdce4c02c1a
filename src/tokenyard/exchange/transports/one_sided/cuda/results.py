"""Results of `one_sided` on GPUs: where they are, and the kernels that wait for the other ranks and sum them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.results import Results, ResultsAtHome
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
from tokenyard.exchange.transports.one_sided.cuda.side_stream import Done, RankStreams
from tokenyard.exchange.transports.one_sided.cuda.workspace import DeviceWorkspace
from tokenyard.gpu_kernels import is_aligned
from tokenyard.group.base import Group
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes, ReceivedRows


@dataclass(frozen=True, kw_only=True, eq=False)
class WayBack:
    """What is kept of a dispatch for its combine."""

    slots: DispatchSlots  # where the rows of the arrival, and their results, are
    slots_TW: Tensor  # the slot of each token on each rank, -1 where it did not go
    sent: tuple[int, ...]  # rows for each rank; empty if the host has not read them
    is_checked: bool  # whether the host reads how many rows came, and whether all went well
    in_slots: bool = False  # whether it reads both after the combine: experts get every slot as a row


def slots_back(arrival: Arrival) -> DispatchSlots:
    """The slots of an arrival's results, whose spec is another than that of its rows after `RoundTrip.redirect`."""
    slots: DispatchSlots = arrival.way_back.slots
    return slots if slots.spec is arrival.spec else replace(slots, spec=arrival.spec)


def choice_places(received: ReceivedRows) -> Tensor:
    """The place in the combine region of each choice's result: every slot has K places."""
    assert isinstance(received.routes, LocalRoutes)
    pairs_N, top_k = received.routes.pairs, received.routes.ids_RK.shape[1]
    if received.slots_R is None:
        return pairs_N
    return received.slots_R[pairs_N // top_k] * top_k + pairs_N % top_k


@dataclass(kw_only=True, eq=False)
class DeviceResults(ResultsAtHome):
    """Results in the workspaces of all ranks; the kernels that sum them wait for the other ranks."""

    group: Group
    workspace: DeviceWorkspace
    streams: RankStreams
    arrival: Arrival  # what these are the results of
    results: Results | None = None  # kept until they have come home
    just_placed: bool = False  # whether a kernel, not the experts, wrote them
    out_TH: Tensor | None = None  # the sum, if it was started when results were sent
    done: Done | None = None  # the end of that sum

    def start_sum(self, out_TH: Tensor, add: Sequence[Tensor], *, ahead: bool = False) -> None:
        """Wait for the other ranks on the device, and write the sums of this rank's tokens into a contiguous tensor.

        `ahead`: the caller computes meanwhile, so only one block waits for the others and leaves multiprocessors free.
        """
        way_back, launcher = self.arrival.way_back, self.workspace.launcher
        home_slots, owners_TK, computed = way_back.slots_TW, None, self.streams.computed
        if self.arrival.spec.sums_choices:
            routes = self.arrival.routes.routes
            assert isinstance(routes, Routes)
            home_slots, owners_TK = launcher.choices_at_home(
                self.arrival.spec, home_slots, routes.topk_ids_TK
            )
        launcher.sum(
            slots_back(self.arrival),
            home_slots,
            out_TH,
            add,
            owners_TK=owners_TK,
            just_placed=self.just_placed,
            one_block_waits=ahead,
            before_adding=None if computed is None else self.streams.join_computed,
            ended=None if computed is None else computed.ended,
            reports_bad_ids=way_back.in_slots,
        )

    def _end(self, done: Done | None = None) -> None:
        """End a round: if it is checked, wait for it (for `done`, on a side stream) and raise what went wrong in it."""
        if self.arrival.way_back.is_checked:
            (self.group.wait_for_device if done is None else done.wait)()
            if self.arrival.way_back.in_slots:
                self.workspace.reports.raise_bad_ids(self.arrival)
            self.workspace.reports.raise_trouble()

    def summed(self) -> Tensor | None:
        if self.out_TH is not None:
            assert self.done is not None
            with self.workspace.launcher.on_device():
                self.done.join()
                self._end(self.done)
        return self.out_TH

    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        with self.workspace.launcher.on_device():
            whole = out_TH
            if not is_aligned(out_TH):
                whole = torch.empty_like(out_TH, memory_format=torch.contiguous_format)
            self.start_sum(whole, add)
            if whole is not out_TH:
                out_TH.copy_(whole)
            self._end()
        return out_TH

    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        launcher, spec, way_back = self.workspace.launcher, self.arrival.spec, self.arrival.way_back
        slots = slots_back(self.arrival)
        with launcher.on_device():
            launcher.signal_and_wait(slots.layer, Phase.COMBINE)
            tokens = tuple(column.nonzero().squeeze(1) for column in (way_back.slots_TW >= 0).unbind(dim=1))
            first = self.group.rank * slots.max_tokens
            home = []
            for rank, token_N in enumerate(tokens):
                payloads = {
                    name: payload[first : first + len(token_N)]
                    for name, payload in self.workspace.combine(slots, rank).items()
                }
                home.append(spec.results(payloads).decode(torch.float32).clone())
            self._end()
        return tuple(home), tokens
