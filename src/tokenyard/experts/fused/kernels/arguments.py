"""What kernels are given, grouped by what it is; and the loop over tiles that products in plain Triton share.

`None` stands for what a layer does not have: nothing is compiled for it. What a kernel is compiled for comes in `Layer`
and `Tiles`, which are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Rows(NamedTuple):
    """The rows of a product."""

    data: Any
    scales: Any  # of blocks or spans, or None
    globals: Any  # of rows, or None
    slots_R: Any  # where each row stands, or None: one after the other
    stride: Any
    scale_stride: Any
    global_stride: Any


class Weights(NamedTuple):
    """The matrices of a product, and what belongs to them."""

    data: Any  # None, where they come by TMA
    scales: Any  # of blocks or spans, or None
    global_scale: Any  # or None
    global_factor: Any
    bias: Any  # or None


class Routes(NamedTuple):
    """Which rows go to which expert (`kernels.sorting`), and the weights of pairs."""

    order_N: Any
    tiles: Any
    how_many: Any
    max_tiles: Any
    weights_N: Any


class Results(NamedTuple):
    """Where the first product leaves its results, and where the second does."""

    inner: Any
    inner_scales: Any  # None: numbers of 16 or 32 bits
    partial_sums: Any  # the results of rows that several experts take, by pair
    out: Any
    out_slots_R: Any  # or None
    out_stride: Any


class Layer(NamedTuple):
    """What both products of a layer are compiled for: sizes, formats, the activation, and what stands between them."""

    hidden: int
    intermediate: int
    top_k: int
    experts: int
    rows: int  # a format of `kernels.decoding`
    weights: int
    kind: Any  # the type in which numbers are multiplied
    weight_on_input: bool
    finalize: bool
    gated: bool
    interleaved: bool
    activation: int
    limit: float
    alpha: float
    shift: float
    inner: int  # as `kernels.fp8_split` calls it


class Tiles(NamedTuple):
    """The tiles of one product, and the widths of its rows and matrices: inputs with their pad, elements of a line."""

    across: int  # tiles that all outputs make
    out: int
    tile: int
    tail: int  # tiles of at most so many rows are computed as narrow ones
    block: int
    rows_width: int
    width: int
    stride: int
    scale_width: int


@triton.jit
def tile_of(routes, item, ACROSS: tl.constexpr):
    """Expert, first place and count of an item's tile; something of no meaning for an item behind the last."""
    tile = tl.minimum(item // ACROSS, routes.max_tiles - 1)
    tiles, max_tiles = routes.tiles, routes.max_tiles
    return tl.load(tiles + tile), tl.load(tiles + max_tiles + tile), tl.load(tiles + 2 * max_tiles + tile)


@triton.jit(do_not_specialize=["routes"])
def every_tile(
    x_descriptor, tail_descriptor, w_descriptor, rows, weights, routes, results,
    compute: tl.constexpr, LAYER: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A product of all experts: every block takes tiles in turn, each computed by the function that is handed in."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # A tile is looked up before it is known to be there, and the next one early: no load waits for another.
    expert, start, count = tile_of(routes, tl.program_id(0), TILES.across)
    total = tl.load(routes.how_many) * TILES.across
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        column = item % TILES.across
        next_expert, next_start, next_count = tile_of(routes, item + tl.num_programs(0), TILES.across)
        if (TILES.tail > 0) & (count <= TILES.tail):
            compute(
                tail_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
                LAYER, TILES, TILES.tail if TILES.tail > 0 else TILES.tile,
            )  # fmt: skip
        else:
            compute(
                x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
                LAYER, TILES, TILES.tile,
            )  # fmt: skip
        expert, start, count = next_expert, next_start, next_count
