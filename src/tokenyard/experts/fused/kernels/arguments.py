"""The groups of arguments of kernels, and the loop over tiles that products in plain Triton share.

An argument that a layer does not have is `None`, and no code is compiled for it. `Layer` and `Tiles` hold the
compile-time constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Rows(NamedTuple):
    """The rows of a product."""

    data: Any
    scales: Any  # scales of blocks or spans, or None
    globals: Any  # global scales of rows, or None
    slots_R: Any  # the line of `data` that holds each row; None: row r is line r
    stride: Any
    scale_stride: Any
    global_stride: Any


class Weights(NamedTuple):
    """The matrices of a product, with their scales and bias."""

    data: Any  # None, if TMA loads them
    scales: Any  # scales of blocks or spans, or None
    global_scale: Any  # or None
    global_factor: Any
    bias: Any  # or None


class Routes(NamedTuple):
    """The pairs sorted by expert, their tiles (see `kernels.sorting`), and the routing weights of pairs."""

    order_N: Any
    tiles: Any
    how_many: Any
    max_tiles: Any
    weights_N: Any


class Results(NamedTuple):
    """The output buffers of the first product and of the second."""

    inner: Any
    inner_scales: Any  # None, if `inner` holds numbers of 16 or 32 bits
    partial_sums: Any  # the results of rows that several experts take, by pair
    out: Any
    out_slots_R: Any  # or None
    out_stride: Any


# Instructions that wait until a counter ($1) has reached a number ($2). Each thread then sees what was counted. They
# read the counter every tenth of a microsecond only, because each such read empties the multiprocessor's cache.
AWAIT = tl.constexpr("""{
.reg .pred enough;
.reg .s32 found;
again:
ld.acquire.gpu.global.s32 found, [$1];
setp.ge.s32 enough, found, $2;
@enough bra done;
nanosleep.u32 100;
bra again;
done:
mov.u32 $0, 0;
}""")


class Counted(NamedTuple):
    """What has been counted for a tile when its rows between the products are there: items of the kernels before.

    That is `items` of the first product, and, for every `rows` rows of the tile, `parts` of `fp8_split.round_numbers`.
    """

    items: int
    rows: int = 1
    parts: int = 0


class Layer(NamedTuple):
    """The compile-time constants of both products: sizes, formats, activation, and how `inner` is held."""

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
    inner: int  # how the activation is held: a constant of `kernels.fp8_split`


class Tiles(NamedTuple):
    """The tiles of one product, and the widths of its rows and matrices, pad included."""

    across: int  # tiles along the outputs
    out: int
    tile: int
    tail: int  # tiles with at most this many rows are computed as tiles of this size
    block: int
    rows_width: int
    width: int
    stride: int
    scale_width: int
    unit: int = 0  # inputs of a line that a box of weights holds (`fused.boxes`); 0: held line by line


@triton.jit
def await_items(counter, enough):
    """Wait until counters have reached numbers. Each thread that waited then sees what was stored before."""
    tl.inline_asm_elementwise(AWAIT, "=r,l,r", [counter, enough], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def tile_of(routes, item, ACROSS: tl.constexpr):
    """The expert, the first place and the row count of an item's tile; arbitrary values after the last item."""
    tile = tl.minimum(item // ACROSS, routes.max_tiles - 1)
    tiles, max_tiles = routes.tiles, routes.max_tiles
    return tl.load(tiles + tile), tl.load(tiles + max_tiles + tile), tl.load(tiles + 2 * max_tiles + tile)


@triton.jit(do_not_specialize=["routes"])
def every_tile(
    x_descriptor, tail_descriptor, w_descriptor, rows, weights, routes, results,
    compute: tl.constexpr, LAYER: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A product of all experts: every block loops over tiles, each of which the function `compute` computes."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # A tile is loaded before it is known to exist, and the next one ahead of time: no load waits for another.
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
