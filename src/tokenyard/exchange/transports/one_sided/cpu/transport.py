"""`one_sided`: ranks write rows straight into each other's memory, and read results straight out of it.

    dispatch   pushes: the i-th row for rank w goes into slot `me · max_tokens + i` of w's dispatch region
               with `max_rows`: rows stand without gaps, so ranks first announce to all how many go to each rank
    combine    pulls: results stand in the combine region of the rank that computed them; their owners read them

Slots follow from the order of tokens, so placement is deterministic, and no rank has to ask another for room. A slot
that no rank wrote in this round is never read: announcements tell each rank how many rows came from which rank.

**Why nothing is overwritten too early.** Each of `in_flight` dispatches has a pair of regions, which it keeps until it
is combined. A rank pushes into a dispatch region only after the combine of the rows that stood there. In that combine
it received an announcement from every rank, which each made after its experts had read those rows. A rank writes
results into a combine region only after their dispatch. In that dispatch it received an announcement from every rank,
which each made after it had pulled the results that stood there before. Dispatch and combine regions never overlap, so
a fast rank may push its next layer while a slow one still pulls.

A rank that fails announces that in place of rows; all ranks raise, and the next round starts clean.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenyard.exchange.announcement import Announcement, Announcements
from tokenyard.exchange.batch import Arrival, Batch, Failure, numbered
from tokenyard.exchange.results import Results, ResultsAtHome, RowsAtHome
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.one_sided.cpu.signals import Signals, control_bytes
from tokenyard.exchange.transports.one_sided.declarations import OneSided
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.formats.base import EncodedRows, as_bytes
from tokenyard.group.base import Group, Pending
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows


class Workspace:
    """One symmetric buffer per rank, mapped by all ranks, and the signals in it."""

    def __init__(self, group: Group, layout: WorkspaceLayout) -> None:
        self.layout = layout
        self.nbytes = layout.nbytes
        with torch.inference_mode(False):  # inference tensors could not be written outside of it
            self.buffers = group.share_memory(layout.nbytes)
        controls = [layout.control_region().of(buffer) for buffer in self.buffers]
        self.signals = Signals(controls, group)
        # By layer, rank and region: the layer's spec and the views that were made for it. Making them anew in every
        # round would cost a tenth of a small round trip.
        self._views: dict[
            tuple[int, int, int], tuple[ExchangeSpec, dict[str, Tensor], dict[str, Tensor]]
        ] = {}
        self._rows: dict[tuple[int, int], tuple[ExchangeSpec, EncodedRows]] = {}

    def dispatch(self, rank: int, spec: ExchangeSpec, region: int) -> dict[str, Tensor]:
        """The payloads of all slots of a rank's dispatch region, into which others push rows."""
        return self._views_of(rank, spec, region)[1]

    def combine(self, rank: int, spec: ExchangeSpec, region: int) -> dict[str, Tensor]:
        """The payloads of all slots of a rank's combine region, from which others pull results."""
        return self._views_of(rank, spec, region)[2]

    def rows(self, rank: int, spec: ExchangeSpec, region: int) -> EncodedRows:
        """All slots of a rank's dispatch region as rows."""
        known = self._rows.get((spec.index, region))
        if known is None or known[0] is not spec:
            known = self._rows[spec.index, region] = spec, spec.rows(self.dispatch(rank, spec, region))
        return known[1]

    def _views_of(
        self, rank: int, spec: ExchangeSpec, region: int
    ) -> tuple[ExchangeSpec, dict[str, Tensor], dict[str, Tensor]]:
        known = self._views.get((spec.index, rank, region))
        if known is None or known[0] is not spec:
            buffer, layout = self.buffers[rank], self.layout
            with torch.inference_mode(False):
                known = self._views[spec.index, rank, region] = (
                    spec,
                    spec.dispatch_slots.views(layout.dispatch_region(region).of(buffer)),
                    spec.combine_slots.views(layout.combine_region(region).of(buffer)),
                )
        return known


class SharedMemoryTransport(OneSided[Workspace, Sequence[int]]):
    """`one_sided` between CPU ranks: push out, pull back, through a workspace that all ranks map."""

    bounds_rows = True
    looks_up_ids = False  # rows go where their choices say, if these are given (`BatchRoutes.choices`)

    @classmethod
    def for_device(cls, device: torch.device) -> type[Transport]:
        if device.type != "cuda" or cls is not SharedMemoryTransport:
            return cls
        # Triton is needed only there.
        module: Any = importlib.import_module("tokenyard.exchange.transports.one_sided.cuda.transport")
        chosen: type[Transport] = module.CudaTransport
        return chosen

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        super().__init__(group, in_flight=in_flight, guard=guard)
        self._control_bytes = control_bytes(group.size)

    # -- The workspace -------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers: in the workspace that is there if it suffices, else in a new one for the union."""
        needed = self.layout_for(specs)
        if self._workspace is None:
            self._make_workspace(needed)
        elif not self._workspace.layout.suffices_for(needed):
            self._make_workspace(self._workspace.layout.union(needed))

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers in a workspace that is no larger than they need."""
        needed = self.layout_for(specs)
        if self._workspace is None or self._workspace.layout != needed:
            self._make_workspace(needed)

    def _make_workspace(self, layout: WorkspaceLayout) -> None:
        """Replace the workspace. If one rank cannot allocate, all ranks raise, and the old workspace still serves."""
        self._workspace = Workspace(self.group, layout)

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        self.check_slots(specs)

    def view_slots(self, spec: ExchangeSpec, region: int) -> None:
        """Make the views of a layer's slots in this rank's workspace."""
        self.workspace.dispatch(self.group.rank, spec, region)
        self.workspace.combine(self.group.rank, spec, region)

    def close(self) -> None:
        self._workspace = None

    # -- The way out ---------------------------------------------------------------------------------------

    def send(self, batch: Batch) -> Pending[Arrival[Sequence[int]]]:
        announcements = batch.announcements
        if batch.spec.max_rows is not None:
            self.workspace.signals.publish_counts(announcements.mine)
            self._tell(announcements)
            return Pending(lambda: self._send_where_there_is_room(batch))
        first = self.group.rank * batch.spec.max_tokens
        self.push(batch, [first] * self.group.size)
        self._tell(announcements)
        return Pending(lambda: self._receive(batch, [first] * self.group.size))

    def _send_where_there_is_room(self, batch: Batch) -> Arrival[Sequence[int]]:
        """Read how many rows go from each rank to each, push behind the rows of lower ranks, and announce again."""
        counts_WW = [other.counts for other in self._hear_counts(batch.announcements)]
        before = counts_WW[: self.group.rank]
        firsts = [sum(counts[rank] for counts in before) for rank in range(self.group.size)]
        self.push(batch, firsts)
        told = batch.announcements
        told = replace(told, bound=None, announcer=told.announcer.once_more(self.group))
        self._tell(told)
        return self._receive(replace(batch, announcements=told), firsts)

    def _receive(self, batch: Batch, firsts: Sequence[int]) -> Arrival[Sequence[int]]:
        counts = [announcement.counts[0] for announcement in self._hear(batch.announcements)]
        return batch.arrived(self.received(batch, counts), counts, way_back=firsts)

    @torch.no_grad()  # weights may require a gradient; a workspace with a graph would keep every batch alive
    def push(self, batch: Batch, firsts: Sequence[int]) -> None:
        """Write each row to every rank that owns one of its experts, from slot `firsts[w]` on for rank w."""
        ids_NK, weights_NK = batch.routes.local_routes()
        whole = batch.payloads
        start = 0
        for rank, (tokens, first) in enumerate(zip(batch.routes.tokens_by_rank, firsts, strict=True)):
            count = tokens.numel()
            if count == 0:
                continue
            slots = self.workspace.dispatch(rank, batch.spec, batch.region)
            for name, tensor in whole.items():
                _gather_into(slots[name][first : first + count], tensor, tokens)
            slots["ids"][first : first + count] = ids_NK[start : start + count]
            slots["weights"][first : first + count] = weights_NK[start : start + count]
            start += count

    def received(self, batch: Batch, counts: Sequence[int]) -> ReceivedRows:
        """The received rows, `counts[w]` of them from rank w: views of the workspace, and the slots that hold rows."""
        spec = batch.spec
        slots = self.workspace.dispatch(self.group.rank, spec, batch.region)
        starts = spec.windows if spec.max_rows is None else spec.first_slots(counts)
        slots_R = numbered(starts, counts)
        return ReceivedRows(
            rows=self.workspace.rows(self.group.rank, spec, batch.region),
            routes=LocalRoutes(ids_RK=slots["ids"][slots_R], weights_RK=slots["weights"][slots_R]),
            counts_W=tuple(counts),
            extra={payload.name: slots[payload.name][slots_R] for payload in spec.further},
            slots_R=slots_R,
            results=self.results_at(spec, batch.region, slots_R),
        )

    def results_at(self, spec: ExchangeSpec, region: int, slots_R: Tensor | None) -> CombineBuffer | None:
        """The buffer into which experts may write results, to save a copy; None if these are encoded, or per choice."""
        if spec.combine_wire.quantized or spec.sums_choices:
            return None
        slots = self.workspace.combine(self.group.rank, spec, region)
        (payload,) = spec.combine_wire.payloads(spec.hidden_size)
        # Detached: experts may write tensors that require a gradient, which must not reach the shared views.
        return CombineBuffer(rows_SH=slots[payload.name].detach(), slots_R=slots_R)

    # -- The way back --------------------------------------------------------------------------------------

    def send_back(self, results: Results[Sequence[int]]) -> Pending[ResultsAtHome]:
        if results.encoded is not None:
            self.place(results.arrival, results.encoded)
        results.on_results_written()
        self._tell(results.announcements)

        def pull() -> ResultsAtHome:
            self._hear(results.announcements)
            return self.at_home(results.arrival)

        return Pending(pull)

    @torch.no_grad()
    def place(self, arrival: Arrival, encoded: EncodedRows) -> None:
        """Write results into this rank's combine region, from which their owners pull them."""
        slots, spec = self.workspace.combine(self.group.rank, arrival.spec, arrival.region), arrival.spec
        start = 0
        for row, count in zip(spec.first_slots(arrival.counts_W), arrival.results_due, strict=True):
            first = row * spec.results_per_row
            for name, tensor in encoded.payloads.items():
                slots[name][first : first + count] = tensor[start : start + count]
            start += count

    @torch.no_grad()
    def place_beside(self, arrival: Arrival, slots_R: Tensor, beside: Mapping[str, Tensor]) -> None:
        """Write what comes home beside results into these slots of this rank's combine region."""
        slots = self.workspace.combine(self.group.rank, arrival.spec, arrival.region)
        for name, numbers in beside.items():
            slots[name][slots_R] = numbers

    def at_home(self, arrival: Arrival[Sequence[int]]) -> ResultsAtHome:
        """The results of this rank's tokens, as views of the workspaces in which they stand."""
        payloads_by_rank = []
        for rank, (row, count) in enumerate(zip(arrival.way_back, arrival.routes.result_counts, strict=True)):
            first = row * arrival.spec.results_per_row
            slots = self.workspace.combine(rank, arrival.spec, arrival.region)
            payloads_by_rank.append({name: slots[name][first : first + count] for name in slots})
        return RowsAtHome.of(arrival, payloads_by_rank)

    # -- Announcements -------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        self._tell(failure.announcements)
        self._hear(failure.announcements)

    def _tell(self, announcements: Announcements) -> None:
        """Send this rank's announcement to each rank. The rows or results that it announces must be written before."""
        signals = self.workspace.signals
        if not signals.left:
            for rank in range(self.group.size):
                signals.tell(rank, announcements.for_rank(rank))

    def _hear(self, announcements: Announcements) -> Sequence[Announcement]:
        """Wait for the announcements of all ranks, and return them; raise if one is elsewhere, or failed."""
        return announcements.heard(self._hear_answers(announcements))

    def _hear_answers(self, announcements: Announcements) -> Sequence[Announcement]:
        """Wait for the announcements of all ranks, and count the round, even if it fails. They are not checked yet."""
        signals = self.workspace.signals
        if signals.left:
            raise announcements.announcer.usability.mark_broken_by_drift()
        answers = signals.hear(announcements.mine)
        announcements.all_met()
        if any(other.plan != announcements.mine.plan for other in answers):
            announcements.announcer.usability.mark_broken_by_drift()
        return answers

    def _hear_counts(self, announcements: Announcements) -> Sequence[Announcement]:
        """The announcements of all ranks, with the counts that each has published for all."""
        signals, mine = self.workspace.signals, announcements.mine
        answers = self._hear_answers(announcements)
        published = signals.published_counts(mine.phase, len(mine.counts))
        return announcements.heard(
            [replace(other, counts=counts) for other, counts in zip(answers, published, strict=True)]
        )

    # -- Inside a host -------------------------------------------------------------------------------------

    def mark(self, round: int) -> None:
        """Tell the ranks of the host that this rank's results of a round are in their place."""
        self.workspace.signals.mark(round)

    def all_marked(self, round: int, seconds: float) -> bool:
        """Wait until all ranks of the host have marked a round; False if they have not after so many seconds."""
        return self.workspace.signals.all_marked(round, seconds)

    def leave(self) -> None:
        """Take no further part, because of a loss elsewhere, and end the waits of others for this rank."""
        if self._workspace is not None:
            self._workspace.signals.leave()

    def departed(self) -> bool:
        """Whether the ranks that a `PeerLost` of this transport names are not lost, but have called `leave`."""
        return self._workspace is not None and self._workspace.signals.departed()

    def lost(self) -> list[int]:
        return [] if self._workspace is None else self._workspace.signals.lost()


def _gather_into(slots: Tensor, tensor: Tensor, tokens: Tensor) -> None:
    """Copy some rows of a payload into consecutive slots: one pass, row by row, as bytes."""
    source, target = as_bytes(tensor), slots.view(torch.uint8)
    if tokens.numel() == source.shape[0]:
        target.copy_(source)  # all tokens, in their order
    else:
        torch.index_select(source, 0, tokens, out=target)
