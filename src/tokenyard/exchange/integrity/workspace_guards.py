"""A watched workspace: guards around its regions, and poison in every slot that holds no row.

Each rank checks its own buffer. Bytes between regions hold a pattern that no rank may change (*guards*). Slots of
the dispatch and combine regions that hold no row hold *poison*, bytes of 0xFF: NaN as a number of any width and as a
scale, -1 as an id. A part that reads a slot which was not written gets poison; a part that writes one is detected.

A region can be poisoned only while no other rank uses it. Others push rows into a dispatch region between this rank's
last combine and its dispatch, so the region is checked after a dispatch, and poisoned before the combine is announced.
Others pull results out of a combine region between the combine and the next dispatch, so the region is poisoned after
that dispatch, and checked before the combine is announced. A round that fails leaves rows behind: the next one that
uses the region does not check its unused slots, and poisons all of it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard.errors import Corrupted, PeerLost
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.spec import CHECKSUMS, ExchangeSpec
from tokenyard.exchange.workspace import SlotLayout
from tokenyard.formats.base import EncodedRows

if TYPE_CHECKING:
    from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport, Workspace

# Bytes in front of, between and behind regions: small overruns of a region end in them.
GUARD_BYTES = 1024
GUARD = 0xA5
POISON = 0xFF
# Seconds to wait for the transport's verdict. A rank that waits in the transport began before those that wait for the
# reports of a round, so its wait ends at about the same time as theirs.
_VERDICT, _PAUSE = 1.0, 0.02


class WorkspaceGuards:
    """Writes and checks the guards and the poison in this rank's own buffer of a workspace."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport, self.group = transport, transport.group
        self._regions = range(transport.in_flight)
        self._known: weakref.ref[Workspace] | None = None  # weak: it must not outlive the transport's use
        # The regions whose arrival has not been combined.
        self._open = set[int]()
        # By region: whether all of its dispatch region was poison before its rows came.
        self._poisoned: dict[int, bool] = {}
        # By region: the layer whose results are in its combine region, and their slots; the rest is poison.
        self._results: dict[int, tuple[ExchangeSpec, list[range]]] = {}

    def found_lost(self, lost: PeerLost) -> list[int]:
        """After a `PeerLost` of the group: the ranks that the transport finds lost; empty if it comes to no verdict."""
        until = time.monotonic() + _VERDICT
        while time.monotonic() < until:
            if verdict := self._transport.lost():
                return verdict
            if set(lost.peers) <= set(self.group.gone()):
                break  # the ranks that the group names have ended: no verdict is needed
            time.sleep(_PAUSE)
        return []

    def guard_workspace(self) -> None:
        """Write guards and poison into the workspace, if it is a new one. Collective."""
        workspace = self._transport.workspace
        if self._known is not None and self._known() is workspace:
            return
        layout, mine = workspace.layout, workspace.buffers[self.group.rank]
        for gap in layout.gaps():
            gap.of(mine).fill_(GUARD)
        for region in self._regions:
            layout.dispatch_region(region).of(mine).fill_(POISON)
            layout.combine_region(region).of(mine).fill_(POISON)
        self.group.barrier(phase="sharing memory")  # no rank pushes a row into what is not poisoned yet
        self._known = weakref.ref(workspace)
        self._poisoned, self._results = dict.fromkeys(self._regions, True), {}
        self._open = set()

    @property
    def _workspace(self) -> Workspace:
        return self._transport.workspace

    def _dispatch_region(self, region: int) -> Tensor:
        workspace = self._workspace
        return workspace.layout.dispatch_region(region).of(workspace.buffers[self.group.rank])

    def _combine_region(self, region: int) -> Tensor:
        workspace = self._workspace
        return workspace.layout.combine_region(region).of(workspace.buffers[self.group.rank])

    # -- The steps of a round trip -------------------------------------------------------------------------

    def check_arrival(self, arrival: Arrival) -> None:
        """Check after a dispatch that nothing but the announced rows was written; poison the combine region."""
        if arrival.region in self._open:  # the last arrival there was never combined
            self.round_failed(arrival.region)
        self._open.add(arrival.region)
        self._poison_results(arrival.region)
        self._check_guards()
        self._check_dispatch_region(arrival)

    def round_failed(self, region: int) -> None:
        """Note that a failed round may have left rows in its region, so that the next round does not report them."""
        self._poisoned[region] = False

    def check_results(self, arrival: Arrival) -> None:
        """Check, before results are announced, that nothing else was written; then poison the dispatched rows."""
        spec, region, results = arrival.spec, arrival.region, arrival.results_due
        self._check_guards()
        self._check_dispatch_region(arrival)
        starts = [slot * spec.results_per_row for slot in spec.first_slots(arrival.counts_W)]
        _check_unused("combine", self._combine_region(region), spec.combine_slots, starts, results)
        self._results[region] = (spec, _used(starts, results))
        rows_there = self._dispatch_region(region)
        if self._poisoned[region]:
            used = _used(spec.first_slots(arrival.counts_W), arrival.counts_W)
            for _, rows in _cut(rows_there, spec.dispatch_slots, used):
                rows.fill_(POISON)
        else:
            rows_there.fill_(POISON)
        self._poisoned[region] = True
        self._open.discard(region)

    def _poison_results(self, region: int) -> None:
        """Poison a combine region: all ranks have come to this dispatch, so they have read the results in it."""
        there, known = self._combine_region(region), self._results.pop(region, None)
        if known is None:
            there.fill_(POISON)
            return
        spec, used = known
        for _, rows in _cut(there, spec.combine_slots, used):
            rows.fill_(POISON)
        if (byte := _first_written(there)) is not None:  # poisoned as a whole in the next round
            raise Corrupted(
                f"byte {byte} of region 'combine' was written after this rank's results were there",
                expected="the other ranks to read results, and to write nothing",
                layer=spec.layer,
                place="combine",
            )

    def add_checksums(
        self, arrival: Arrival, make: Callable[[Arrival, EncodedRows], Tensor], *, by_experts: bool
    ) -> None:
        """Add checksums to the results in the combine region.

        If experts wrote them there by themselves, none may be missing. Results that the experts returned were all
        written by the transport: there, a row of NaN may look like the poison, as torch casts it.
        """
        spec, slots_R = arrival.spec, arrival.received.slots_R
        assert slots_R is not None
        slots = self._workspace.combine(self.group.rank, spec, arrival.region)
        (payload,) = spec.combine_wire.payloads(spec.hidden_size)
        rows_RH = slots[payload.name][slots_R]
        blank_R = (rows_RH.view(torch.uint8) == POISON).all(dim=1)
        if by_experts and bool(blank_R.any()):
            row = int(blank_R.nonzero()[0])
            assert arrival.checksums_RC is not None
            source, token = arrival.checksums_RC[row, :2].tolist()
            raise Corrupted(
                f"the experts placed no result for token {token} of rank {source}",
                expected="a result in every slot of `CombineBuffer.slots_R`",
                fix="write all rows before `placed()`",
                source=source,
                token=token,
                place="combine",
            )
        beside = {payload.name: slots[payload.name][slots_R] for payload in spec.returned}
        slots[CHECKSUMS][slots_R] = make(arrival, spec.results({payload.name: rows_RH, **beside}))

    # -- Checks --------------------------------------------------------------------------------------------

    def _check_dispatch_region(self, arrival: Arrival) -> None:
        if self._poisoned[arrival.region]:
            region = self._dispatch_region(arrival.region)
            starts = arrival.spec.first_slots(arrival.counts_W)
            _check_unused("dispatch", region, arrival.spec.dispatch_slots, starts, arrival.counts_W)

    def _check_guards(self) -> None:
        """Raise if a byte between regions was written, and restore the guard for the next round."""
        workspace = self._workspace
        mine, regions = workspace.buffers[self.group.rank], workspace.layout.regions()
        names = [*regions]
        for number, gap in enumerate(workspace.layout.gaps()):
            written = gap.of(mine) != GUARD
            if not bool(written.any()):
                continue
            first, last = int(written.nonzero()[0]), int(written.nonzero()[-1])
            value = int(gap.of(mine)[first])
            gap.of(mine).fill_(GUARD)
            behind = number > 0 and (number == len(names) or first < gap.nbytes - last)
            name = names[number - 1] if behind else names[number]
            where = f"{first + 1} behind" if behind else f"{gap.nbytes - first} in front of"
            raise Corrupted(
                f"byte {where} region {name!r} of this rank's workspace was written ({value:#04x})",
                expected="no writes outside of the regions",
                place=name,
            )


def _used(starts: Sequence[int], counts: Sequence[int]) -> list[range]:
    """The slots that hold rows, as a range for each source rank."""
    return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


def _unused(layout: SlotLayout, starts: Sequence[int], counts: Sequence[int]) -> list[range]:
    """The slots that hold no row, as a range behind the rows of each source rank."""
    ends = [*starts[1:], layout.slots]
    return [range(start + n, end) for start, n, end in zip(starts, counts, ends, strict=True)]


def _cut(region: Tensor, layout: SlotLayout, runs: Sequence[range]) -> Iterator[tuple[str, Tensor]]:
    """The bytes of some runs of slots, payload by payload."""
    for payload, offset in zip(layout.payloads, layout.offsets, strict=True):
        for run in runs:
            first, last = (offset + slot * payload.nbytes for slot in (run.start, run.stop))
            yield payload.name, region[first:last]


def _check_unused(
    name: str, region: Tensor, layout: SlotLayout, starts: Sequence[int], counts: Sequence[int]
) -> None:
    """Raise if a byte of a region that belongs to no row is not poison."""
    runs = _unused(layout, starts, counts)
    width = {payload.name: payload.nbytes for payload in layout.payloads}
    for number, (payload, rows) in enumerate(_cut(region, layout, runs)):
        if (byte := _first_written(rows)) is not None:
            source = number % len(runs)
            place = runs[source].start + byte // width[payload] - starts[source]
            raise Corrupted(
                f"slot {place} for rank {source} of region {name!r} holds no row in this round, and payload "
                f"{payload!r} was written there",
                expected=f"rows from rank {source} in its first {counts[source]} slots only",
                source=source,
                token=None,
                place=name,
            )
    ends = [*layout.offsets[1:], region.numel()]
    for one, offset, end in zip(layout.payloads, layout.offsets, ends, strict=True):
        if (byte := _first_written(region[offset + layout.slots * one.nbytes : end])) is not None:
            raise Corrupted(
                f"byte {byte + 1} behind the slots of payload {one.name!r} in region {name!r} was written",
                expected="no writes outside of the slots",
                place=name,
            )


def _first_written(run: Tensor) -> int | None:
    """The first byte that is not poison, None if all are."""
    if run.numel() == 0 or int(run.min()) == POISON:
        return None
    return int((run != POISON).nonzero()[0])
