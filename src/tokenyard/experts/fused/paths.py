"""Which kernels compute the products of a call: each `Path` is a way.

The tile table (`tile_table`) says which tiles are fastest for a number of rows, and so which path is wanted. Layer, GPU
and rows must allow it; else the next path is used. `docs/generate/kernel_paths.py` declares what chooses each path, and
a test asks for all combinations of GPUs, formats, sizes and numbers of rows what they launch: a path that none of them
chooses, or that others choose, is an error.
"""

from __future__ import annotations

from enum import Enum

from tokenyard.experts.fused.tile_configs import (
    CodesTileConfig,
    NumbersTileConfig,
    TileConfig,
    TileConfigs,
)


class Path(Enum):
    """A way to compute one product or both, by the module of `kernels` in which it is; in the order of choice."""

    PACKED_CODES = "packed_codes"
    PACKED_NUMBERS = "packed_numbers"
    PACKED = "packed"
    EXPANDED = "expanding"
    SPECIALIZED = "specialized"
    TMA = "tma"
    ROWS_FIRST = "rows_first"
    PRODUCTS = "products"


def of_call(tiles: TileConfigs, *, packed: bool, specialized: bool) -> Path:
    """The path of both products; `PRODUCTS` if each product has its own (`of_product`).

    `packed`: whether the weights are packed; `specialized`: whether layer and GPU allow `kernels.specialized`.
    """
    if packed:
        config = tiles.inner
        kinds = {
            CodesTileConfig: Path.PACKED_CODES,
            NumbersTileConfig: Path.PACKED_NUMBERS,
            TileConfig: Path.EXPANDED,
        }
        return kinds.get(type(config), Path.PACKED)
    return Path.SPECIALIZED if specialized and tiles.specialized else Path.PRODUCTS


def of_product(config: TileConfig, *, tma: bool, blocks: bool) -> Path:
    """The path of one product in plain Triton.

    `tma`: whether TMA can load what it multiplies; `blocks`: whether it multiplies rows and weights in blocks of e4m3.

    >>> of_product(TileConfig(256, 128, 64, 8, 4, tma=True), tma=False, blocks=False).value
    'products'
    """
    fits = (
        (Path.TMA, config.tma and tma),
        (Path.ROWS_FIRST, config.rows_first and blocks),
        (Path.PRODUCTS, True),
    )
    return next(path for path, does in fits if does)
