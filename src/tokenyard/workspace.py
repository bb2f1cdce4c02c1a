"""Bytes: how a row lies on the wire, and how much memory the layers of a plan need.

Everything here is computed from what formats declare (`Format.payloads`), never from a dtype that somebody
assumed: a layer of another format, hidden size or top-k gets other bytes by asking the same question.

A row travels as one packet, so that its payloads, its routes and the caller's further payloads cannot part:

    ┌────────────┬─────────┬──────────┬──────────────┬─────────────────────┐
    │ data       │ scales  │ ids (K)  │ weights (K)  │ further payloads …  │   each starts at a multiple of 16
    └────────────┴─────────┴──────────┴──────────────┴─────────────────────┘

Packets of all rows stand in one matrix of bytes `[rows, stride]`; a payload is a view of its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.formats.base import Payload

# Bytes. Every payload in a packet, and every packet, starts at a multiple of this: the widest single load of
# a GPU thread, and a multiple of every dtype's size, so that a payload can be viewed in its own dtype.
ALIGNMENT = 16


def round_up(size: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`.

    >>> round_up(17), round_up(32)
    (32, 32)
    """
    return -(-size // alignment) * alignment


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a matrix, `[rows, bytes]`, without a copy where it is laid out row by row already."""
    tensor = tensor.contiguous()
    if tensor.stride(-1) != 1:  # a width of 1 counts as contiguous with any stride, and cannot be viewed
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)


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
        for payload, offset in self:
            tensor = tensors[payload.name]
            payload.check(tensor, num_rows)
            end = offset + payload.nbytes
            if payload.nbytes % 8 == 0:  # copying 8 bytes at a time is several times faster
                words = packets.view(torch.int64)[:, offset // 8 : end // 8]
                words.copy_(as_bytes(tensor).view(torch.int64))
            else:
                packets[:, offset:end] = as_bytes(tensor)
            packets[:, end : round_up(end)] = 0
        return packets

    def unpack(self, packets: Tensor) -> dict[str, Tensor]:
        """The payloads as views of the packets: nothing is copied."""
        return {
            payload.name: packets[:, offset : offset + payload.nbytes].view(payload.dtype)
            for payload, offset in self
        }


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The memory that one layer's round trip takes on one rank, at most."""

    dispatch_row: int  # bytes of a packet on the way out
    combine_row: int  # bytes of a packet on the way back
    dispatch: int  # all rows that may arrive: W · max_tokens packets
    combine: int
