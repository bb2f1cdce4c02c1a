"""A watched workspace: guards around its regions, and poison in every slot that holds no row.

Each rank looks after its own buffer. Bytes between regions hold a pattern that nobody may change (*guards*). Slots of
the dispatch and combine regions that hold no row hold *poison*, bytes of 0xFF: NaN as a number of any width and as a
scale, -1 as an id. Whoever reads a slot that was not written reads that; whoever writes one leaves a mark.

When a region may be poisoned follows from when others use it. Rows are pushed into a dispatch region between a rank's
last combine and its dispatch, so it is looked at after a dispatch, and poisoned before the combine is announced.
Results are pulled out of a combine region between the combine and the next dispatch, so it is poisoned after that
dispatch, and looked at before the combine is announced. A round that fails leaves rows behind: the next one that uses
the region does not look at its unused slots, and poisons all of it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard.errors import Corrupted, PeerLost
from tokenyard.exchange.spec import SEAL, Dispatched, ExchangeSpec
from tokenyard.exchange.watch import ParanoidWatch
from tokenyard.exchange.workspace import SlotLayout
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Group

if TYPE_CHECKING:
    from tokenyard.exchange.one_sided.exchange import Workspace

# Bytes in front of, between and behind regions: a few rows that go too far still end in them.
GUARD_BYTES = 1024
GUARD = 0xA5
POISON = 0xFF
# Seconds: who waits in the exchange came there before others came to the last word, and gives up about when they do.
_VERDICT, _PAUSE = 1.0, 0.02


class WorkspaceWatch(ParanoidWatch):
    """Looks after the seals of rows, and after this rank's own buffer."""

    guard = GUARD_BYTES

    def __init__(self, group: Group, in_flight: int) -> None:
        super().__init__(group)
        self._in_flight = in_flight
        self._made: weakref.ref[Workspace] | None = None  # it goes when the exchange gives it up
        # The round that came last, and the flights whose rounds have not left: those that failed never do.
        self._last, self._open = 0, set[int]()
        # By flight: whether all of its dispatch region was poison before its rows came.
        self._poisoned: dict[int, bool] = {}
        # By flight: whose results stand in its combine region, and how many for each rank, beside poison.
        self._results: dict[int, tuple[ExchangeSpec, tuple[int, ...]]] = {}

    def given_up(self, lost: PeerLost) -> list[int]:
        workspace = None if self._made is None else self._made()
        until = time.monotonic() + _VERDICT
        while workspace is not None and time.monotonic() < until:
            if verdict := workspace.signals.lost():
                return verdict
            if set(lost.peers) <= set(self.group.gone()):
                break  # there is nobody left to blame wrongly
            time.sleep(_PAUSE)
        return []

    def workspace_made(self, workspace: Workspace, round: int) -> None:
        layout, mine = workspace.layout, workspace.buffers[self.group.rank]
        for gap in layout.gaps():
            gap.of(mine).fill_(GUARD)
        for flight in range(self._in_flight):
            layout.dispatch_region(flight).of(mine).fill_(POISON)
            layout.combine_region(flight).of(mine).fill_(POISON)
        self.group.barrier(phase="sharing memory")  # nobody pushes a row into what is not poisoned yet
        self._made = weakref.ref(workspace)
        self._poisoned, self._results = dict.fromkeys(range(self._in_flight), True), {}
        self._last, self._open = round, set()

    @property
    def _workspace(self) -> Workspace:
        workspace = None if self._made is None else self._made()
        assert workspace is not None  # rows move through it
        return workspace

    def _dispatch_region(self, flight: int) -> Tensor:
        workspace = self._workspace
        return workspace.layout.dispatch_region(flight).of(workspace.buffers[self.group.rank])

    def _combine_region(self, flight: int) -> Tensor:
        workspace = self._workspace
        return workspace.layout.combine_region(flight).of(workspace.buffers[self.group.rank])

    # -- The stations of a round trip ----------------------------------------------------------------------

    def arrived(self, dispatched: Dispatched) -> Dispatched:
        self._note_what_failed(dispatched)
        self._poison_results(dispatched.flight)
        self._check_guards()
        self._check_dispatch_region(dispatched)
        return super().arrived(dispatched)

    def leaving(self, dispatched: Dispatched, *, placed: bool) -> None:
        super().leaving(dispatched, placed=placed)
        spec, flight, counts = (
            dispatched.spec,
            dispatched.flight,
            dispatched.return_path.received_counts,
        )
        if placed:
            self._seal_placed(dispatched)
        self._check_guards()
        self._check_dispatch_region(dispatched)
        _check_unused("combine", self._combine_region(flight), spec.combine_slots, spec, counts)
        self._results[flight] = (spec, counts)
        region = self._dispatch_region(flight)
        if self._poisoned[flight]:
            for _, rows in _cut(region, spec.dispatch_slots, _used(spec, counts)):
                rows.fill_(POISON)
        else:
            region.fill_(POISON)
        self._poisoned[flight] = True
        self._open.discard(flight)

    def _note_what_failed(self, arrived: Dispatched) -> None:
        """Rounds that failed since the last one that came, or never left, have left rows behind."""
        if arrived.round > self._last + 1:  # in a flight that was free
            self._poisoned |= dict.fromkeys(set(self._poisoned) - self._open, False)
        if arrived.flight in self._open:
            self._poisoned[arrived.flight] = False
        self._last = arrived.round
        self._open.add(arrived.flight)

    def _poison_results(self, flight: int) -> None:
        """Poison a combine region: everybody has come to this dispatch, hence has pulled what stood there."""
        region, known = self._combine_region(flight), self._results.pop(flight, None)
        if known is None:
            region.fill_(POISON)
            return
        spec, counts = known
        for _, rows in _cut(region, spec.combine_slots, _used(spec, counts)):
            rows.fill_(POISON)
        if (byte := _first_written(region)) is not None:
            region.fill_(POISON)
            raise Corrupted(
                f"byte {byte} of region 'combine' was written after this rank's results stood there",
                expected="the other ranks to read results, and to write nothing",
                layer=spec.layer,
                place="combine",
            )

    def _seal_placed(self, dispatched: Dispatched) -> None:
        """Seal the results that experts wrote into the combine region by themselves."""
        spec, slots_R = dispatched.spec, dispatched.received.slots_R
        assert slots_R is not None
        slots = self._workspace.combine(self.group.rank, spec, dispatched.flight)
        (payload,) = spec.combine_wire.payloads(spec.hidden_size)
        rows_RH = slots[payload.name][slots_R]
        blank_R = (rows_RH.view(torch.uint8) == POISON).all(dim=1)
        if bool(blank_R.any()):
            row = int(blank_R.nonzero()[0])
            assert dispatched.seals_RC is not None
            source, token = dispatched.seals_RC[row, :2].tolist()
            raise Corrupted(
                f"the experts placed no result for token {token} of rank {source}",
                expected="a result in every slot of `CombineBuffer.slots_R`",
                fix="write all rows before `placed()`",
                source=source,
                token=token,
                place="combine",
            )
        encoded = EncodedRows(
            format=spec.combine_wire,
            hidden_size=spec.hidden_size,
            payloads={payload.name: rows_RH},
        )
        slots[SEAL][slots_R] = self._seals_back(dispatched, encoded)

    # -- Looking -------------------------------------------------------------------------------------------

    def _check_dispatch_region(self, dispatched: Dispatched) -> None:
        if self._poisoned[dispatched.flight]:
            spec, counts = dispatched.spec, dispatched.return_path.received_counts
            region = self._dispatch_region(dispatched.flight)
            _check_unused("dispatch", region, spec.dispatch_slots, spec, counts)

    def _check_guards(self) -> None:
        """Raise if a byte between regions was written; the next round finds the guards whole again."""
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
                expected="nobody to write outside of the regions",
                place=name,
            )


def _used(spec: ExchangeSpec, counts: Sequence[int]) -> list[range]:
    """The slots that hold a row."""
    return [range(source * spec.max_tokens, source * spec.max_tokens + n) for source, n in enumerate(counts)]


def _unused(spec: ExchangeSpec, counts: Sequence[int]) -> list[range]:
    """The slots that hold none."""
    return [
        range(source * spec.max_tokens + n, (source + 1) * spec.max_tokens) for source, n in enumerate(counts)
    ]


def _cut(region: Tensor, layout: SlotLayout, runs: Sequence[range]) -> Iterator[tuple[str, Tensor]]:
    """The bytes of some runs of slots, payload by payload."""
    for payload, offset in zip(layout.payloads, layout.offsets, strict=True):
        for run in runs:
            first, last = (offset + slot * payload.nbytes for slot in (run.start, run.stop))
            yield payload.name, region[first:last]


def _check_unused(
    name: str, region: Tensor, layout: SlotLayout, spec: ExchangeSpec, counts: Sequence[int]
) -> None:
    """Raise if a byte of a region that belongs to no row is not poison."""
    runs = _unused(spec, counts)
    width = {payload.name: payload.nbytes for payload in layout.payloads}
    for number, (payload, rows) in enumerate(_cut(region, layout, runs)):
        if (byte := _first_written(rows)) is not None:
            run = runs[number % len(runs)]
            source, place = divmod(run.start + byte // width[payload], spec.max_tokens)
            raise Corrupted(
                f"slot {place} for rank {source} of region {name!r} holds no row in this round, and payload "
                f"{payload!r} was written there",
                expected=f"rows from rank {source} in its first {counts[source]} slots only",
                source=source,
                token=None,
                place=name,
            )
    starts = [
        offset + layout.slots * payload.nbytes
        for payload, offset in zip(layout.payloads, layout.offsets, strict=True)
    ]
    for payload_, first, last in zip(
        layout.payloads, starts, [*layout.offsets[1:], region.numel()], strict=True
    ):
        if (byte := _first_written(region[first:last])) is not None:
            raise Corrupted(
                f"byte {byte + 1} behind the slots of payload {payload_.name!r} in region {name!r} was written",
                expected="nobody to write outside of the slots",
                place=name,
            )


def _first_written(run: Tensor) -> int | None:
    """The first byte that is not poison, None if all are."""
    if run.numel() == 0 or int(run.min()) == POISON:
        return None
    return int((run != POISON).nonzero()[0])
