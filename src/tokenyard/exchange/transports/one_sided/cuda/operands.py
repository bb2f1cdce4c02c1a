"""The arguments of kernels: how rows and results are encoded and cut into tiles, and where they go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transports.one_sided.kernels import numerics
from tokenyard.exchange.transports.one_sided.kernels import push as push_kernels
from tokenyard.formats import Fp8Block128, Mxfp8, Nvfp4, PlainFormat
from tokenyard.formats.base import Format
from tokenyard.gpu_kernels import aligned
from tokenyard.routing import Placement

# The most rows of a launch with which a row is spread over several blocks.
FEW_ROWS = 256
# With more rows in a launch than this, tiles are chosen for bandwidth, not for latency.
MANY_ROWS = 2048
# Bits of a flag that name the layer.
LAYER_BITS = 12
_KINDS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}
_WORDS = {1: (torch.uint8, tl.uint8), 2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32)}


@dataclass(frozen=True)
class TileConfig:
    """How a row is cut: columns of a tile, blocks that share a row, warps of a block; and how it is stored."""

    tile: int
    parts: int
    warps: int
    streams: bool = False  # whether the launch writes more than a cache holds
    rows: int = 1  # rows that a block moves at a time, more than one if a rank has few blocks
    stages: int = 1  # pipeline stages: how many of these reads are in flight


@dataclass(frozen=True)
class Encoding:
    """What the kernels must know of a format: how it is encoded, its own element type, and its one option."""

    code: Any
    kind: Any
    option: int = 0
    global_scale: float = 1.0

    @classmethod
    def of(cls, format: Format) -> Encoding | None:
        """The encoding of unencoded rows in this format; None if no kernel encodes it."""
        if isinstance(format, PlainFormat):
            return cls(push_kernels.CAST, _KINDS[format.dtype])
        if isinstance(format, Mxfp8):
            return cls(push_kernels.MXFP8, tl.float8e4nv)
        if isinstance(format, Fp8Block128):
            return cls(push_kernels.FP8_BLOCK, tl.float8e4nv, int(format.power_of_two_scales))
        if isinstance(format, Nvfp4):
            if format.global_scale is None:
                return cls(push_kernels.NVFP4, tl.int32)
            smallest, largest = numerics.SMALLEST_EASY_SCALE.value, numerics.LARGEST_EASY_SCALE.value
            easy = smallest <= format.global_scale <= largest
            return cls(push_kernels.NVFP4, tl.int32, 2 if easy else 1, format.global_scale)
        return None

    def several(self, tiles: TileConfig, columns: int, stages: int = 1) -> TileConfig:
        """The same cut for a rank that has few blocks: each moves several rows at a time, if they need no encoding.

        A block reads `columns` elements of these rows at a time; with `stages`, it reads the next while it writes some.
        """
        rows = max(1, min(8, columns // tiles.tile))
        if rows == 1 or self.code not in (push_kernels.COPY, push_kernels.CAST):
            return tiles
        return replace(tiles, rows=rows, stages=stages, warps=16)

    def row(self, hidden: int, padded: int, tiles: TileConfig) -> push_kernels.Row:
        """What kernels are compiled for, for rows of this width that are cut in this way."""
        return push_kernels.Row(
            hidden,
            padded,
            self.code.value,
            self.kind,
            self.option,
            tiles.tile,
            tiles.parts,
            tiles.rows,
            tiles.stages,
            tiles.streams,
        )


def row_tiles(encoding: Encoding, columns: int, tokens: int) -> TileConfig:
    """The cut of a row that goes out, for elements of `encoding`, in a launch of this number of rows."""
    widest, many = max(128, triton.next_power_of_2(columns)), tokens > MANY_ROWS
    if encoding.code == push_kernels.NVFP4:
        if encoding.option == 0:  # the global scale is computed from the whole row
            return TileConfig(min(8192, widest), 1, 4)
        if tokens <= FEW_ROWS and columns % 1024 == 0:
            return TileConfig(1024, columns // 1024, 2)
        # (Tiles of 4096 on 4 warps would be a little faster; triton 3.6 compiles the second one of a row wrongly.)
        return TileConfig(min(2048, widest), 1, 2)
    if encoding.code == push_kernels.COPY:
        return TileConfig(min(4096, widest), 1, 4 if widest < 1024 else 16 if many else 8, streams=many)
    if encoding.code == push_kernels.MXFP8:
        return TileConfig(min(8192 if many else 4096, widest), 1, 8 if widest >= 2048 else 4)
    return TileConfig(min(2048, widest), 1, 4)


def expert_table(placement: Placement, rank: int, *, most_copies: int = 1) -> tuple[Tensor, Tensor]:
    """Which rank holds each expert, as `rank` sees it: `[E, copies]` of rank and local number, and copies of each.

    The table has room for `most_copies`, also where the present placement has fewer.
    """
    seen = placement.owners_seen_by(rank)
    width = max(most_copies, *map(len, seen))
    bits = push_kernels.RANK_BITS.value
    rows = [
        [(owner << bits) | local for owner, local in (pairs + pairs[:1] * (width - len(pairs)))]
        if pairs
        else [-1] * width
        for pairs in seen
    ]
    counts = [max(1, len(pairs)) for pairs in seen]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


def narrow(ids: Tensor) -> Tensor:
    """Ids as int32. An id out of its range becomes the nearest one in range, which no expert has."""
    room = torch.iinfo(torch.int32)
    return (ids.clamp(room.min, room.max) if ids.dtype == torch.int64 else ids).int()


def as_words(rows: Tensor) -> Tensor:
    """A matrix viewed as integers of 4, 2 or 1 bytes: the widest of which a row holds a whole number."""
    row = rows.shape[1] * rows.element_size()
    dtype, _ = _WORDS[math.gcd(row, 4)]
    return aligned(rows).view(torch.uint8).view(dtype)


@dataclass(frozen=True)
class Load:
    """One payload of a batch: rows as the kernel reads them, their encoding, and their encoded width (`padded`)."""

    name: str
    rows: Tensor
    encoding: Encoding
    padded: int


def copied(name: str, rows: Tensor) -> Load:
    """A payload that travels as it is."""
    words = as_words(rows)
    return Load(name, words, Encoding(push_kernels.COPY, _WORDS[words.element_size()][1]), words.shape[1])


@dataclass(frozen=True, kw_only=True)
class DispatchSlots:
    """The slots of one dispatch: its layer, its region, and the slots of each rank's window."""

    spec: ExchangeSpec
    region: int
    max_tokens: int  # the most tokens of a rank in this dispatch: each rank's window has this many slots

    @property
    def layer(self) -> int:
        """What a flag says of it: the layer's index, and a few bits of `max_tokens`, which all ranks must agree on."""
        return self.spec.index | ((self.max_tokens * 2654435761 >> 12) & 0x3FF) << LAYER_BITS


@dataclass(frozen=True)
class ReturnLayout:
    """How results of a layer come home: their encoding, where they lie in a workspace, how wide a row is."""

    encoding: Encoding
    places: push_kernels.Places
    padded: int

    def place_tiles(self) -> TileConfig:
        """How a result is cut where a block encodes it, tile by tile: nvfp4 as in a dispatch."""
        if self.encoding.code == push_kernels.NVFP4:
            return row_tiles(self.encoding, self.padded, FEW_ROWS + 1)
        return TileConfig(min(2048, max(128, triton.next_power_of_2(self.padded))), 1, 4)

    def tiles(self, tokens: int) -> TileConfig:
        """How a row that comes home is cut: a block for each tile."""
        tile = min(2048 if tokens > 64 else 1024, max(128, triton.next_power_of_2(self.padded)))
        return TileConfig(tile, triton.cdiv(self.padded, tile), 4)
