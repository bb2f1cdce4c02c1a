"""Chooses the tiles of the experts' products, by pure functions of the number of rows and the formats.

A tile is OUT outputs × TILE rows, computed BLOCK inputs at a time. With few rows per expert, tiles are narrow, since
the time is that of reading the weights from memory. With many, they are wide, to keep the tensor cores busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from tokenyard.experts.fused import tile_table

_Line = TypeVar("_Line")

# Outputs of a tile of the first product whose results are stored as e4m3 (`kernels.fp8_split`): gate and up of the 128
# columns that share a scale. Without a gate, half as many.
SPLIT_OUT = 256
SPLIT_BLOCK = 128
# The tile sizes, in rows, that `kernels.specialized` supports.
SPECIALIZED_TILES = (16, 32, 64, 128)


@dataclass(frozen=True)
class TileConfig:
    """The tiles of one product, and the warps and pipeline stages of the blocks that compute them."""

    out: int
    tile: int
    block: int  # inputs at a time; 256, for e4m3 only: two blocks of scales, if their number is even
    warps: int
    stages: int
    tail: int = 0  # tiles with at most this many rows are computed as tiles of this size
    rows_first: bool = False  # rows × outputs (`kernels.rows_first`), where formats and activation allow it
    tma: bool = (
        False  # rows × outputs, matrices by TMA (`kernels.tma`), where GPU, format and activation allow it
    )
    specialized: bool = False  # both products by `kernels.specialized`, where layer, GPU and rows allow it


@dataclass(frozen=True)
class PackedTileConfig:
    """The tiles of a product with packed weights: 16 · warps · groups outputs × one of `widths`, in rows.

    A width is the rows of one or two accumulators.
    """

    widths: tuple[tuple[int, int], ...]
    groups: int
    ahead: int
    stages: int
    warps: int
    registers: int | None = None

    @property
    def out(self) -> int:
        """Outputs of a group."""
        return 16 * self.warps

    @property
    def tile(self) -> int:
        """The most rows of a tile."""
        return sum(self.widths[-1])


@dataclass(frozen=True)
class CodesTileConfig:
    """The tiles of `kernels.packed_codes`, which decodes packed weights to e4m3: 128 outputs × runs of 64 rows."""

    runs: int
    stages: int

    @property
    def tile(self) -> int:
        """The most rows of a tile."""
        return 64 * self.runs


@dataclass(frozen=True)
class NumbersTileConfig:
    """The tiles of `kernels.packed_numbers`, for packed weights and rows of bf16, with specialized warps.

    A tile is 64 · units outputs for each of three groups of warps × one of `widths`, in rows.
    """

    units: int
    widths: tuple[int, ...]
    stages: int

    @property
    def tile(self) -> int:
        """The most rows of a tile."""
        return self.widths[-1]

    @property
    def run(self) -> int:
        """Rows that are loaded together; runs beyond the last row of a tile are not loaded."""
        return min(32, self.tile)


AnyTileConfig = TileConfig | PackedTileConfig | CodesTileConfig | NumbersTileConfig


@dataclass(frozen=True)
class TileConfigs:
    """The tiles of both products, which have the same number of rows."""

    inner: AnyTileConfig
    result: AnyTileConfig

    def __post_init__(self) -> None:
        assert self.inner.tile == self.result.tile

    @property
    def specialized(self) -> bool:
        """Whether `kernels.specialized` should compute both products, if it can."""
        both = (self.inner, self.result)
        return all(isinstance(t, TileConfig) and t.specialized and t.tile in SPECIALIZED_TILES for t in both)

    def without_tails(self) -> TileConfigs:
        """The same tiles with `tail=0`, because narrow tiles of e4m3 add in another order."""
        inner, result = (
            replace(config, tail=0) if isinstance(config, TileConfig) else config
            for config in (self.inner, self.result)
        )
        return TileConfigs(inner, result)

    @property
    def can_split(self) -> bool:
        """Whether the first product can store e4m3: each of its tiles must have all columns that share a scale."""
        inner, result = self.inner, self.result
        if isinstance(inner, CodesTileConfig):
            return True  # a later kernel makes the codes
        if (
            not isinstance(inner, TileConfig)
            or not isinstance(result, TileConfig)
            or result.block != SPLIT_BLOCK
        ):
            return False
        return inner.out == SPLIT_OUT and (not result.rows_first or result.out == 2 * SPLIT_BLOCK)


def expected_pairs(rows: int, top_k: int, local: int, experts: int | None, *, may_be_empty: bool) -> float:
    """The expected number of (row, local expert) pairs, if all experts are equally likely.

    Every row has at least one expert on this rank, unless it may be empty (`ReceivedRows.may_be_empty`).

    >>> expected_pairs(100, 8, 256, 256, may_be_empty=False)
    800.0
    >>> round(expected_pairs(100, 8, 32, 256, may_be_empty=False))
    152
    """
    if local == 0:
        return 0.0
    share = local / experts if experts else 1.0
    pairs = rows * top_k * share
    return pairs if may_be_empty or share == 1.0 else pairs / (1.0 - (1.0 - share) ** top_k)


def choose_tiles(
    pairs: float,
    experts: int,
    weights: str,
    *,
    rows: str | None = None,
    specialized: bool = False,
    boxed: bool = False,
) -> TileConfigs:
    """The tiles for `pairs` pairs over `experts` experts, with weights in this format.

    Rows are in the format of the weights, or in `rows`. `specialized`: whether `kernels.specialized` can be used.
    `boxed`: whether the weights are held in the order in which that kernel loads them (`boxes`).

    >>> choose_tiles(32, 32, "bf16").inner.tile, choose_tiles(8192, 32, "bf16").inner.tile
    (16, 128)
    >>> choose_tiles(32, 32, "fp8_block128", rows="bf16") == choose_tiles(32, 32, "fp8_block128")
    False
    >>> [choose_tiles(32, 32, "bf16", specialized=True, boxed=boxed).specialized for boxed in (False, True)]
    [False, True]
    """
    lines = plain_lines(weights, rows, specialized=specialized, boxed=boxed)
    inner, result = _line_for(pairs / max(1, experts), lines)
    return TileConfigs(TileConfig(*inner), TileConfig(*result))


def plain_lines(
    weights: str, rows: str | None = None, *, specialized: bool = False, boxed: bool = False
) -> tile_table.Lines:
    """The lines of the tile table for weights in this format, and rows in the same format or in `rows`."""
    alike = tile_table.ALIKE.get(weights, weights)
    lines = tile_table.PLAIN[alike]
    if rows is None or rows == weights:
        if specialized:
            lines = tile_table.PLAIN.get(f"{alike}, specialized", lines)
            lines = tile_table.PLAIN.get(f"{alike}, boxed", lines) if boxed else lines
        return lines
    return tile_table.PLAIN.get(f"{weights} for other rows", lines)


def choose_packed_tiles(
    pairs: float,
    experts: int,
    weights: str,
    *,
    expands: bool = False,
    codes: bool = False,
    rounds: bool = False,
) -> TileConfigs:
    """The tiles for `pairs` pairs over `experts` experts, with packed weights.

    `expands`: whether they can be expanded to blocks of e4m3 before the products; `codes`: whether the products can
    decode them to e4m3 codes. `rounds`: whether the first product stores float32 numbers, which a kernel rounds;
    `kernels.packed_numbers` has no shared memory for these.

    >>> choose_packed_tiles(8, 48, "mxint4").inner.tile
    8
    >>> choose_packed_tiles(48_000, 32, "mxfp4", expands=True).specialized
    True
    >>> [type(choose_packed_tiles(4_096, 128, "mxfp4", rounds=rounds).inner).__name__ for rounds in (False, True)]
    ['NumbersTileConfig', 'PackedTileConfig']
    >>> choose_packed_tiles(6_000, 32, "mxfp4", codes=True).inner
    CodesTileConfig(runs=4, stages=4)
    """
    rows, most = pairs / max(1, experts), tile_table.CODES[-1][0] if expands else inf
    if codes and tile_table.CODES_FROM < rows <= most:
        lines = tile_table.CODES
        config = CodesTileConfig(*next((line for up_to, line in lines if rows <= up_to), lines[-1][1]))
        return TileConfigs(config, config)
    above, up_to, line = tile_table.NUMBERS.get(weights, (inf, inf, ()))
    if above < rows <= up_to and not rounds:
        numbers = NumbersTileConfig(*line)
        return TileConfigs(numbers, numbers)
    if expands and rows > tile_table.EXPANDED_FROM:
        return choose_tiles(pairs, experts, "fp8_block128", specialized=True)
    inner, result = _line_for(rows, tile_table.PACKED[weights])
    return TileConfigs(PackedTileConfig(*inner), PackedTileConfig(*result))


def _line_for(rows: float, lines: Sequence[tuple[float, _Line, _Line]]) -> tuple[_Line, _Line]:
    """The first line of the table whose limit is at least this many rows per expert."""
    return next((inner, result) for most, inner, result in lines if rows <= most)
