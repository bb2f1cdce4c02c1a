"""How the products of experts are cut into tiles: a pure function of the shape, the rows and the format.

A tile is OUT outputs × TILE rows, computed BLOCK inputs at a time. Few rows an expert: narrow tiles, which only
have to read the weights as fast as the memory gives them. Many rows: wide ones, which feed the tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from tokenyard.experts.fused import tile_table

_Line = TypeVar("_Line")

# Outputs of a tile of the first product whose results become e4m3 (`kernels.fp8_split`): gate and up of 128 columns,
# which share a scale. Without a gate it has half as many.
SPLIT_OUT = 256
SPLIT_BLOCK = 128
# The most rows of a tile of `kernels.specialized`: 64 for each group of warps that multiply, or few for both.
SPECIALIZED_TILES = (16, 32, 64, 128)


@dataclass(frozen=True)
class TileConfig:
    """One product's tiles, and the warps and pipeline stages of the blocks that compute them."""

    out: int
    tile: int
    block: int  # 256 of e4m3, rows and weights: two blocks of scales, if their number is even
    warps: int
    stages: int
    tail: int = 0  # tiles of at most so many rows are computed as narrow ones
    rows_first: bool = False  # rows × outputs (`kernels.rows_first`), where formats and activation allow it
    tma: bool = (
        False  # rows × outputs, matrices by TMA (`kernels.tma`), where GPU, format and activation allow it
    )
    specialized: bool = False  # both products by `kernels.specialized`, where layer, GPU and rows allow it


@dataclass(frozen=True)
class PackedTileConfig:
    """The same for packed weights: 16 · warps · groups outputs; rows in one or two runs of a few widths."""

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
    """The same for packed weights that become codes (`kernels.packed_codes`): 128 outputs × runs of 64 rows."""

    runs: int
    stages: int

    @property
    def tile(self) -> int:
        """The most rows of a tile."""
        return 64 * self.runs


@dataclass(frozen=True)
class NumbersTileConfig:
    """The same for packed weights and rows of bf16, by warps that load and multiply (`kernels.packed_numbers`).

    64 · units · groups outputs; rows in one or two runs of a few widths.
    """

    groups: int  # of four warps that multiply: 2 or 3
    units: int  # of 64 outputs, for each group
    widths: tuple[tuple[int, int], ...]
    stages: int

    @property
    def tile(self) -> int:
        """The most rows of a tile."""
        return sum(self.widths[-1])

    @property
    def run(self) -> int:
        """Rows that are brought together: a run that a tile has no rows for is not brought."""
        return min(32, self.tile)


AnyTileConfig = TileConfig | PackedTileConfig | CodesTileConfig | NumbersTileConfig


@dataclass(frozen=True)
class TileConfigs:
    """The tiles of the first product and of the second: the same rows in both."""

    inner: AnyTileConfig
    result: AnyTileConfig

    def __post_init__(self) -> None:
        assert self.inner.tile == self.result.tile

    @property
    def specialized(self) -> bool:
        """Whether both products are to be computed by warps that load and warps that multiply, if they can."""
        both = (self.inner, self.result)
        return all(isinstance(t, TileConfig) and t.specialized and t.tile in SPECIALIZED_TILES for t in both)

    def without_tails(self) -> TileConfigs:
        """The same tiles, none of them narrow: of e4m3, a narrow one adds in another order."""
        inner, result = (
            replace(config, tail=0) if isinstance(config, TileConfig) else config
            for config in (self.inner, self.result)
        )
        return TileConfigs(inner, result)

    @property
    def can_split(self) -> bool:
        """Whether e4m3 may stand between the products: a tile of the first makes all columns of a scale."""
        inner, result = self.inner, self.result
        if isinstance(inner, CodesTileConfig):
            return True  # codes are made behind it
        if (
            not isinstance(inner, TileConfig)
            or not isinstance(result, TileConfig)
            or result.block != SPLIT_BLOCK
        ):
            return False
        return inner.out == SPLIT_OUT and (not result.rows_first or result.out == 2 * SPLIT_BLOCK)


def expected_pairs(rows: int, top_k: int, local: int, experts: int | None, *, may_be_empty: bool) -> float:
    """How many pairs of a row and a local expert to expect, if experts are hit evenly.

    A row has at least one expert here, unless it may be empty (`ReceivedRows.may_be_empty`).

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
    pairs: float, experts: int, weights: str, *, rows: str | None = None, specialized: bool = False
) -> TileConfigs:
    """The tiles for so many pairs over so many experts, with weights in this format.

    Rows are in the same format, or in `rows`.

    `specialized`: whether products can run by `kernels.specialized`.

    >>> choose_tiles(32, 32, "bf16").inner.tile, choose_tiles(8192, 32, "bf16").inner.tile
    (16, 128)
    >>> choose_tiles(32, 32, "fp8_block128", rows="bf16") == choose_tiles(32, 32, "fp8_block128")
    False
    """
    inner, result = _line_for(pairs / max(1, experts), plain_lines(weights, rows, specialized=specialized))
    return TileConfigs(TileConfig(*inner), TileConfig(*result))


def plain_lines(weights: str, rows: str | None = None, *, specialized: bool = False) -> tile_table.Lines:
    """The lines of the table for weights in this format, and rows in the same, or in `rows`."""
    alike = tile_table.ALIKE.get(weights, weights)
    lines = tile_table.PLAIN[alike]
    if rows is None or rows == weights:
        return tile_table.PLAIN.get(f"{alike}, specialized", lines) if specialized else lines
    return tile_table.PLAIN.get(f"{weights} for other rows", lines)


def choose_packed_tiles(
    pairs: float, experts: int, weights: str, *, expands: bool = False, codes: bool = False
) -> TileConfigs:
    """The same for packed weights.

    With `expands`, they can become blocks of e4m3 before they are multiplied, with `codes` while they are.

    >>> choose_packed_tiles(8, 48, "mxint4").inner.tile
    8
    >>> choose_packed_tiles(48_000, 32, "mxfp4", expands=True).specialized
    True
    >>> choose_packed_tiles(4_096, 128, "mxfp4").inner.groups
    3
    >>> choose_packed_tiles(6_000, 32, "mxfp4", codes=True).inner
    CodesTileConfig(runs=4, stages=4)
    """
    rows, most = pairs / max(1, experts), tile_table.CODES[-1][0] if expands else inf
    if codes and tile_table.CODES_FROM < rows <= most:
        lines = tile_table.CODES
        config = CodesTileConfig(*next((line for up_to, line in lines if rows <= up_to), lines[-1][1]))
        return TileConfigs(config, config)
    above, up_to, line = tile_table.NUMBERS.get(weights, (inf, inf, ()))
    if above < rows <= up_to:
        numbers = NumbersTileConfig(*line)
        return TileConfigs(numbers, numbers)
    if expands and rows > tile_table.EXPANDED_FROM:
        return choose_tiles(pairs, experts, "fp8_block128", specialized=True)
    inner, result = _line_for(rows, tile_table.PACKED[weights])
    return TileConfigs(PackedTileConfig(*inner), PackedTileConfig(*result))


def _line_for(rows: float, lines: Sequence[tuple[float, _Line, _Line]]) -> tuple[_Line, _Line]:
    """The first line that is for at least so many rows an expert."""
    return next((inner, result) for most, inner, result in lines if rows <= most)
