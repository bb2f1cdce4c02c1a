"""Bytes: how a row lies on the wire, and how much memory the layers of a plan need.

Everything here is computed from what formats declare (`Format.payloads`), never from an assumed dtype, so a layer
of any format, hidden size or top-k gets the bytes that it needs.

A row travels as one packet, which keeps its payloads, its routes and the caller's further payloads together:

    ┌────────────┬─────────┬──────────┬──────────────┬─────────────────────┐
    │ data       │ scales  │ ids (K)  │ weights (K)  │ further payloads …  │   each starts at a multiple of 16
    └────────────┴─────────┴──────────┴──────────────┴─────────────────────┘

Packets of all rows stand in one matrix of bytes `[rows, stride]`; a payload is a view of its columns.

In the symmetric workspace of the one-sided exchange rows lie payload by payload instead, so that each payload of
all slots is one matrix that kernels can read: `[slots, width]`, where slot `w · max_tokens + i` takes the i-th row
from rank w. The workspace of a rank is

    ┌──────────────────────┬──────────────────────────┬─────────────────────────┐
    │ control: flags, mail │ dispatch (× in flight)   │ combine (× in flight)   │   every region starts at 128
    └──────────────────────┴──────────────────────────┴─────────────────────────┘

Each region is as large as the largest of any layer, and regions never overlap. So a fast rank can write rows of its
next layer while a slow one still reads results of the layer before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import ContractError
from tokenyard.formats.base import Payload, as_bytes

# Bytes. Every payload in a packet, and every packet, starts at a multiple of this: the widest single load of
# a GPU thread, and a multiple of every dtype's size, so that a payload can be viewed in its own dtype.
ALIGNMENT = 16


def round_up(size: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`.

    >>> round_up(17), round_up(32)
    (32, 32)
    """
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class RowLayout:
    """Where each payload of a row lies in its packet.

    >>> layout = RowLayout.of([Payload(name="data", dtype=torch.uint8, width=50),
    ...                        Payload(name="ids", dtype=torch.int32, width=4)])
    >>> layout.offsets, layout.stride
    ((0, 64), 80)
    """

    payloads: tuple[Payload, ...]
    offsets: tuple[int, ...]
    stride: int  # bytes from one row to the next

    @classmethod
    def of(cls, payloads: Iterable[Payload]) -> RowLayout:
        """Lay out payloads one behind the other."""
        payloads = tuple(payloads)
        offsets, end = [], 0
        for payload in payloads:
            offsets.append(end)
            end = round_up(end + payload.nbytes)
        return cls(payloads, tuple(offsets), end)

    def __iter__(self) -> Iterator[tuple[Payload, int]]:
        return zip(self.payloads, self.offsets, strict=True)

    def pack(self, tensors: Mapping[str, Tensor], num_rows: int, device: torch.device) -> Tensor:
        """The packets `[rows, stride]` of rows whose payloads are given by name. Gaps are zero."""
        packets = torch.empty(num_rows, self.stride, dtype=torch.uint8, device=device)
        self.write(packets, tensors)
        return packets

    def write(self, packets: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write the payloads of rows, which are given by name, into their packets. Gaps become zero."""
        for payload, offset in self:
            tensor = tensors[payload.name]
            payload.check(tensor, packets.shape[0])
            _copy_bytes(packets[:, offset : offset + payload.nbytes], as_bytes(tensor))
        self._clear_gaps(packets)

    def write_some(
        self,
        parts: Sequence[Tensor],
        tensors: Mapping[str, Tensor],
        tokens: Sequence[Tensor],
        routes: Mapping[str, Tensor],
    ) -> None:
        """Write packets, in parts: part i takes rows `tokens[i]` of `tensors`; `routes` has a row for each packet."""
        counts = [packets.shape[0] for packets in parts]
        for payload, offset in self:
            columns = [packets[:, offset : offset + payload.nbytes] for packets in parts]
            if payload.name in routes:
                payload.check(routes[payload.name], sum(counts))
                for some, rows in zip(
                    columns, as_bytes(routes[payload.name]).split_with_sizes(counts), strict=True
                ):
                    _copy_bytes(some, rows)
            else:
                tensor = tensors[payload.name].detach()
                payload.check(tensor, tensor.shape[0])
                rows = as_bytes(tensor)
                for some, token_N in zip(columns, tokens, strict=True):
                    # Gathered straight into the packets: a temporary tensor would cost several times as much.
                    torch.index_select(rows, 0, token_N, out=some)
        for packets in parts:
            self._clear_gaps(packets)

    def _clear_gaps(self, packets: Tensor) -> None:
        for payload, offset in self:
            end = offset + payload.nbytes
            if end % ALIGNMENT:  # else there is no gap
                packets[:, end : round_up(end)] = 0

    def unpack(self, packets: Tensor) -> dict[str, Tensor]:
        """The payloads as views of the packets: nothing is copied."""
        return {
            payload.name: packets[:, offset : offset + payload.nbytes].view(payload.dtype)
            for payload, offset in self
        }


def _copy_bytes(columns: Tensor, rows: Tensor) -> None:
    """Copy rows of bytes into the columns of packets."""
    width = rows.shape[1]
    if width % 8 == 0 and columns.storage_offset() % 8 == 0 and rows.storage_offset() % 8 == 0:
        # Copying 8 bytes at a time is several times faster.
        columns.view(torch.int64).copy_(rows.view(torch.int64))
    else:
        columns.copy_(rows)


# Bytes. Every region of the workspace, and every payload in it, starts at a multiple of this: two cache lines, so
# that neighbors which different ranks write do not slow each other down.
REGION_ALIGNMENT = 128


@dataclass(frozen=True)
class SlotLayout:
    """Where the payloads of `slots` rows lie in a region, one behind the other.

    >>> layout = SlotLayout.of([Payload(name="data", dtype=torch.uint8, width=50),
    ...                         Payload(name="ids", dtype=torch.int32, width=4)], slots=6)
    >>> layout.offsets, layout.nbytes
    ((0, 384), 512)
    """

    payloads: tuple[Payload, ...]
    slots: int
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, payloads: Iterable[Payload], slots: int) -> SlotLayout:
        """Lay out payloads one behind the other."""
        payloads = tuple(payloads)
        offsets, end = [], 0
        for payload in payloads:
            offsets.append(end)
            end = round_up(end + slots * payload.nbytes, REGION_ALIGNMENT)
        return cls(payloads, slots, tuple(offsets), end)

    @property
    def end(self) -> int:
        """The first byte behind the last slot."""
        ends = [
            offset + self.slots * payload.nbytes
            for payload, offset in zip(self.payloads, self.offsets, strict=True)
        ]
        return max(ends, default=0)

    def views(self, region: Tensor) -> dict[str, Tensor]:
        """The payloads of all slots, `[slots, width]`, as views of a region's bytes. They must fit into it."""
        if region.numel() < self.end:
            raise ContractError(
                f"a region of the workspace has {region.numel()} bytes",
                expected=f"at least {self.end}: {self.slots} slots of "
                + ", ".join(f"{payload.name} ({payload.nbytes})" for payload in self.payloads),
                fix="size the workspace by what every layer declares, for all ranks of the group, pads included",
            )
        return {
            payload.name: region[offset : offset + self.slots * payload.nbytes]
            .view(payload.dtype)
            .view(self.slots, payload.width)
            for payload, offset in zip(self.payloads, self.offsets, strict=True)
        }


@dataclass(frozen=True, kw_only=True)
class Region:
    """A range of bytes in a workspace."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes

    def of(self, workspace: Tensor) -> Tensor:
        """Its bytes, as a view."""
        return workspace[self.offset : self.end]


@dataclass(frozen=True, kw_only=True)
class WorkspaceLayout:
    """Where everything lies in a rank's workspace. The same on every rank.

    >>> layout = WorkspaceLayout(control=100, dispatch=1000, combine=500, in_flight=2)
    >>> [layout.dispatch_region(n).offset for n in (0, 1)], [layout.combine_region(n).offset for n in (0, 1)]
    ([128, 1152], [2176, 2688])
    >>> layout.nbytes  # 128 + 2 · 1024 + 2 · 512
    3200

    With a `guard`, so many unused bytes lie in front of, between and behind the regions:

    >>> guarded = WorkspaceLayout(control=100, dispatch=1000, combine=500, guard=256)
    >>> [(name, region.offset) for name, region in guarded.regions().items()]
    [('control', 256), ('dispatch 0', 640), ('combine 0', 1920)]
    >>> [(gap.offset, gap.nbytes) for gap in guarded.gaps()]
    [(0, 256), (356, 284), (1640, 280), (2420, 268)]
    """

    control: int  # bytes of flags and announcements
    dispatch: int  # bytes of the largest dispatch region
    combine: int  # bytes of the largest combine region
    in_flight: int = 1
    guard: int = 0  # bytes, a multiple of the alignment

    def control_region(self) -> Region:
        """Flags and announcements."""
        return Region(offset=self.guard, nbytes=self.control)

    def dispatch_region(self, flight: int) -> Region:
        """The region into which rows of a dispatch in flight arrive."""
        start = round_up(self.control_region().end, REGION_ALIGNMENT) + self.guard
        return Region(offset=start + flight * self._dispatch_step, nbytes=self.dispatch)

    def combine_region(self, flight: int) -> Region:
        """The region from which results of a dispatch in flight are read."""
        start = self.dispatch_region(self.in_flight).offset
        return Region(offset=start + flight * self._combine_step, nbytes=self.combine)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace: control + (largest dispatch + largest combine) · in flight, each rounded up."""
        return self.combine_region(self.in_flight).offset

    @property
    def _dispatch_step(self) -> int:
        return round_up(self.dispatch, REGION_ALIGNMENT) + self.guard

    @property
    def _combine_step(self) -> int:
        return round_up(self.combine, REGION_ALIGNMENT) + self.guard

    def regions(self) -> dict[str, Region]:
        """All regions by name, in the order in which they lie."""
        flights = range(self.in_flight)
        return {
            "control": self.control_region(),
            **{f"dispatch {flight}": self.dispatch_region(flight) for flight in flights},
            **{f"combine {flight}": self.combine_region(flight) for flight in flights},
        }

    def gaps(self) -> list[Region]:
        """The bytes of no region: in front of the first, between each and the next, behind the last."""
        regions = list(self.regions().values())
        starts = [0, *(region.end for region in regions)]
        ends = [*(region.offset for region in regions), self.nbytes]
        return [Region(offset=a, nbytes=b - a) for a, b in zip(starts, ends, strict=True)]

    def suffices_for(self, other: WorkspaceLayout) -> bool:
        """Whether every region of another layout fits into this one's."""
        return (
            (self.control, self.in_flight, self.guard) == (other.control, other.in_flight, other.guard)
            and self.dispatch >= other.dispatch
            and self.combine >= other.combine
        )

    def union(self, other: WorkspaceLayout) -> WorkspaceLayout:
        """The smallest layout whose regions suffice for both."""
        return WorkspaceLayout(
            control=max(self.control, other.control),
            dispatch=max(self.dispatch, other.dispatch),
            combine=max(self.combine, other.combine),
            in_flight=max(self.in_flight, other.in_flight),
            guard=max(self.guard, other.guard),
        )


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The memory that one layer's round trip takes on one rank, at most."""

    dispatch_row: int  # bytes of a packet on the way out
    combine_row: int  # bytes of a packet on the way back
    dispatch: int  # bytes of all rows that may arrive at a time
    combine: int  # bytes of all their results
