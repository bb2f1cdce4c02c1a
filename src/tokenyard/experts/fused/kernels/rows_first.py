"""Both products for many rows of e4m3, as rows × outputs, with two sums of 128 outputs each.

In a transposed product (`products`) a thread has many rows of a tile in its registers, and would need the scale of
each. Here it has a few rows and many outputs, which share a scale. Blocks of e4m3 with their scales leave room
for a tile of 128 rows × 256 outputs, and the larger the tile, the less is read from the level-2 cache.

The sums of the first product are those of gate and up. Rows of the second are pairs or codes (`fp8_split`); the
registers hold two sums, and the product of one block for one of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, Lines, load_tile
from tokenyard.experts.fused.kernels.epilogues import activate_rows, deliver
from tokenyard.experts.fused.kernels.fp8_split import (
    FP8_SPLIT,
    MASKED_FROM,
    load_split,
    split_dot,
    store_inner,
)
from tokenyard.experts.fused.kernels.products import block_part, outputs_of, rows_of


@triton.jit
def load_rows(x, is_row, first, BLOCK: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr):
    """`load_tile` for rows of e4m3; tiles of many rows load only the rows that exist, and the others are zero."""
    if x.line.shape[0] >= MASKED_FROM:
        column = first + tl.arange(0, BLOCK)
        where = x.data + x.line.to(tl.int64)[:, None] * x.stride + column[None, :]
        if EVEN:
            return tl.load(where, mask=is_row[:, None], other=0.0)
        else:
            return tl.load(where, mask=is_row[:, None] & (column < x.width)[None, :], other=0.0)
    else:
        return load_tile(x, first, FP8_BLOCK, BLOCK, EVEN, KIND)


@triton.jit
def block_scale(by_row, scales, output, first, stride, LAST: tl.constexpr, EDGE: tl.constexpr):
    """The scales of rows `[TILE, 1]` times those of 128 columns of weights, from `output` on.

    The first EDGE columns are in one block of outputs, the others in the next. EDGE is a compile-time constant, so that
    a thread knows the block of its columns: a scale for each column would take too many registers.
    """
    line = output // 128
    near = by_row * tl.load(scales + line * stride + first // 128)
    if EDGE == 128:
        return near
    else:
        far = by_row * tl.load(scales + tl.minimum(line + 1, LAST) * stride + first // 128)
        return tl.where((tl.arange(0, 128) < EDGE)[None, :], near, far)


@triton.jit
def rows_first_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the first product, activate it, and store it in `inner` at the places of `order_N`."""
    H: tl.constexpr = LAYER.hidden
    I: tl.constexpr = LAYER.intermediate
    KIND: tl.constexpr = LAYER.kind
    BLOCK: tl.constexpr = TILES.block
    W_SCALE_WIDTH: tl.constexpr = TILES.scale_width
    tl.static_assert(TILES.out == 256)
    place, is_row, pair, line = rows_of(rows, routes, start, count, TILE, LAYER.top_k)
    c = column * 128 + tl.arange(0, 128)
    if I % 128 == 0:
        i = c  # lines at equal distances, for which one address is enough
    else:
        i = tl.minimum(c, I - 1)
    if LAYER.interleaved:
        gates, ups = 2 * i, 2 * i + 1
    else:
        gates, ups = i, I + i
    GATE_EDGE: tl.constexpr = 64 if LAYER.interleaved else 128
    UP_EDGE: tl.constexpr = 64 if LAYER.interleaved else 128 - I % 128
    LAST: tl.constexpr = (2 * I - 1) // 128
    # The compiler keeps the result of a reduction; anything cheaper it would recompute, and run out of registers.
    first_gate, first_up = tl.min(gates, axis=0), tl.min(ups, axis=0)
    expert = expert.to(tl.int64)
    x = Lines(rows.data, rows.scales, line, rows.stride, rows.scale_stride, TILES.rows_width)
    gate_lines = outputs_of(weights, expert, gates, 2 * I, LAYER, TILES)
    up_lines = outputs_of(weights, expert, ups, 2 * I, LAYER, TILES)
    w_scales = gate_lines.scales
    x_scale = rows.scales + line.to(tl.int64) * rows.scale_stride
    EVEN: tl.constexpr = H % BLOCK == 0
    gate = tl.zeros([TILE, 128], tl.float32)
    up = tl.zeros([TILE, 128], tl.float32)
    for first in range(0, H, BLOCK):
        some = load_rows(x, is_row, first, BLOCK, EVEN, KIND)
        gate_weights = load_tile(gate_lines, first, FP8_BLOCK, BLOCK, EVEN, KIND, TILES.unit)
        up_weights = load_tile(up_lines, first, FP8_BLOCK, BLOCK, EVEN, KIND, TILES.unit)
        by_row = tl.load(x_scale + first // 128)[:, None]
        gate_scale = block_scale(by_row, w_scales, first_gate, first, W_SCALE_WIDTH, LAST, GATE_EDGE)
        up_scale = block_scale(by_row, w_scales, first_up, first, W_SCALE_WIDTH, LAST, UP_EDGE)
        gate += block_part(some, gate_weights, KIND) * gate_scale
        up += block_part(some, up_weights, KIND) * up_scale
    value = activate_rows(gate, up, pair, expert, gates, ups, weights, routes, LAYER)
    store_inner(value, place, is_row, column, results.inner, results.inner_scales, I, 1, LAYER.inner)


@triton.jit
def deliver_rows(
    value, place, is_row, expert, first, weights, routes, results, LAYER: tl.constexpr, OUT: tl.constexpr
):
    """Add the bias to results `[TILE, OUT]` from output `first` on, and store them (`deliver`)."""
    H: tl.constexpr = LAYER.hidden
    n = first + tl.arange(0, OUT)
    if weights.bias is not None:
        bias = tl.load(weights.bias + expert.to(tl.int64) * H + n, mask=n < H, other=0.0)
        value += bias.to(tl.float32)[None, :]
    deliver(
        value, place, is_row, n, n < H, None, routes, results,
        H, LAYER.top_k, not LAYER.weight_on_input, LAYER.finalize, 1,
    )  # fmt: skip


@triton.jit
def rows_first_result_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the second product, and store its results (`deliver_rows`)."""
    H: tl.constexpr = LAYER.hidden
    I: tl.constexpr = LAYER.intermediate
    KIND: tl.constexpr = LAYER.kind
    W_SCALE_WIDTH: tl.constexpr = TILES.scale_width
    EVEN: tl.constexpr = I % 128 == 0
    BLOCKS: tl.constexpr = (I + 127) // 128
    SCALE_LINES: tl.constexpr = (H + 127) // 128
    t = tl.arange(0, TILE)
    is_row = t < count
    place = start + tl.minimum(t, count - 1)
    first = column * 256
    first_lines = tl.minimum(first + tl.arange(0, 128), H - 1)
    second_lines = tl.minimum(first + 128 + tl.arange(0, 128), H - 1)
    expert = expert.to(tl.int64)
    first_outputs = outputs_of(weights, expert, first_lines, H, LAYER, TILES)
    second_outputs = outputs_of(weights, expert, second_lines, H, LAYER, TILES)
    scales = first_outputs.scales
    first_scales = scales + (2 * column) * W_SCALE_WIDTH
    second_scales = scales + tl.minimum(2 * column + 1, SCALE_LINES - 1) * W_SCALE_WIDTH
    inner, inner_scales = results.inner, results.inner_scales
    row_scales = inner_scales + place.to(tl.int64) * BLOCKS
    x = Lines(inner, inner_scales, place, BLOCKS * 128, BLOCKS, BLOCKS * 128)
    first_sum = tl.zeros([TILE, 128], tl.float32)
    second_sum = tl.zeros([TILE, 128], tl.float32)
    for block in range(BLOCKS):
        if LAYER.inner == FP8_SPLIT:
            high, low = load_split(inner, place, is_row, block, BLOCKS * 128, TILE)
        else:
            codes = load_rows(x, is_row, block * 128, 128, True, KIND)
        first_weights = load_tile(first_outputs, block * 128, FP8_BLOCK, 128, EVEN, KIND, TILES.unit)
        second_weights = load_tile(second_outputs, block * 128, FP8_BLOCK, 128, EVEN, KIND, TILES.unit)
        by_row = tl.load(row_scales + block)[:, None]
        first_scale, second_scale = tl.load(first_scales + block), tl.load(second_scales + block)
        if LAYER.inner == FP8_SPLIT:
            first_sum += split_dot(first_weights, high, low, False, KIND) * (by_row * first_scale)
            second_sum += split_dot(second_weights, high, low, False, KIND) * (by_row * second_scale)
        else:
            first_sum += block_part(codes, first_weights, KIND) * (by_row * first_scale)
            second_sum += block_part(codes, second_weights, KIND) * (by_row * second_scale)
    place = tl.load(routes.order_N + place)
    deliver_rows(first_sum, place, is_row, expert, first, weights, routes, results, LAYER, 128)
    deliver_rows(second_sum, place, is_row, expert, first + 128, weights, routes, results, LAYER, 128)
