"""Which kernels compute the products of a call: each `Path` is a way, and `PATHS` says what chooses it.

The tile table (`tile_table`) says which tiles are fastest for a number of rows, and so which path is wanted. Layer, GPU
and rows must allow it; else the next path of the table is used. A test asks for all combinations of GPUs, formats,
sizes and numbers of rows what they launch: a path that none of them chooses, or that others choose, is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from tokenyard.experts.fused.tile_configs import (
    CodesTileConfig,
    NumbersTileConfig,
    TileConfig,
    TileConfigs,
)

# The GPUs that Triton compiles other kernels for: those with e4m3 before Hopper, Hopper, and those after it.
GPUS = {"Ada": (8, 9), "Hopper": (9, 0), "later": (10, 0)}
_EVERY = tuple(GPUS)
_HOPPER = ("Hopper",)


@dataclass(frozen=True, kw_only=True)
class Path:
    """A way to compute one product or both, and what chooses it."""

    name: str  # the module of `kernels` in which it is
    kernels: tuple[str, ...]  # the functions that compute it
    why: str  # what it is for
    gpus: tuple[str, ...]  # the names of `GPUS` that choose it
    weights: tuple[str, ...]  # the formats of weights that choose it
    inner: tuple[str, ...] = ("exact",)  # inner formats of layers that choose it
    multiple: int = 1  # H and I of these layers are multiples of this
    above: float = 0  # it is chosen for more rows per expert than this, on average
    up_to: float = inf  # and for at most this many


_PLAIN_WEIGHTS = ("bf16", "fp16")
_FOUR_BITS = ("nvfp4", "mxfp4", "mxint4")
_BOTH = ("exact", "fp8_block128")

PACKED_CODES = Path(
    name="packed_codes",
    kernels=("packed_codes_product",),
    why="packed mxfp4 weights become e4m3 codes in registers: half the time of products of bf16",
    gpus=_HOPPER,
    weights=("mxfp4",),
    inner=("fp8_block128",),
    multiple=8,
    above=65,
)
PACKED_NUMBERS = Path(
    name="packed_numbers",
    kernels=("packed_numbers_product",),
    why="packed weights become bf16 in registers; some warps load, others multiply",
    gpus=_HOPPER,
    weights=("mxfp4",),
    multiple=8,
    above=28,
    up_to=40,
)
PACKED = Path(
    name="packed",
    kernels=("packed_product",),
    why="packed weights become bf16 in registers; all warps load and multiply",
    gpus=_HOPPER,
    weights=_FOUR_BITS,
    inner=_BOTH,
    multiple=8,
)
EXPANDED = Path(
    name="expanding",
    kernels=("expand_matrices",),
    why="packed mxfp4 weights are expanded to blocks of e4m3, which `specialized` multiplies",
    gpus=_HOPPER,
    weights=("mxfp4",),
    inner=("fp8_block128",),
    multiple=128,
    above=154,
)
SPECIALIZED = Path(
    name="specialized",
    kernels=("specialized_products",),
    why="both products in one launch: some warps load, others multiply",
    gpus=_HOPPER,
    weights=(*_PLAIN_WEIGHTS, "fp8_block128", "mxfp4"),
    inner=_BOTH,
    multiple=8,
)
TMA = Path(
    name="tma",
    kernels=("tma_inner_tile", "tma_result_tile"),
    why="TMA loads matrices of 16-bit numbers, where `specialized` cannot",
    gpus=("Hopper", "later"),
    weights=_PLAIN_WEIGHTS,
    multiple=8,
    above=80,
)
ROWS_FIRST = Path(
    name="rows_first",
    kernels=("rows_first_tile", "rows_first_result_tile"),
    why="rows × outputs of e4m3, so that a thread's outputs share a scale, where `specialized` cannot",
    gpus=_EVERY,
    weights=("fp8_block128", "mxfp8"),
    inner=_BOTH,
    above=20,
)
PRODUCTS = Path(
    name="products",
    kernels=("inner_tile", "result_tile"),
    why="outputs × rows, of any formats, on every GPU",
    gpus=_EVERY,
    weights=(*_PLAIN_WEIGHTS, "fp32", "fp8_block128", "mxfp8", *_FOUR_BITS),
    inner=_BOTH,
)
# In the order in which they are tried.
PATHS = (PACKED_CODES, PACKED_NUMBERS, PACKED, EXPANDED, SPECIALIZED, TMA, ROWS_FIRST, PRODUCTS)


def of_call(tiles: TileConfigs, *, packed: bool, specialized: bool) -> Path:
    """The path of both products; `PRODUCTS` if each product has its own (`of_product`).

    `packed`: whether the weights are packed; `specialized`: whether layer and GPU allow `kernels.specialized`.
    """
    if packed:
        config = tiles.inner
        kinds = {CodesTileConfig: PACKED_CODES, NumbersTileConfig: PACKED_NUMBERS, TileConfig: EXPANDED}
        return kinds.get(type(config), PACKED)
    return SPECIALIZED if specialized and tiles.specialized else PRODUCTS


def of_product(config: TileConfig, *, tma: bool, blocks: bool) -> Path:
    """The path of one product in plain Triton.

    `tma`: whether TMA can load what it multiplies; `blocks`: whether it multiplies rows and weights in blocks of e4m3.

    >>> of_product(TileConfig(256, 128, 64, 8, 4, tma=True), tma=False, blocks=False).name
    'products'
    """
    fits = ((TMA, config.tma and tma), (ROWS_FIRST, config.rows_first and blocks), (PRODUCTS, True))
    return next(path for path, does in fits if does)
