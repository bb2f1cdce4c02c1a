"""The first product for many rows, as rows × outputs, with separate sums for gate and up.

In a transposed product (`products`) a thread has many rows of a tile in its registers, and would need the scale of
each. Here it has a few rows and many outputs, which share a scale. Blocks of e4m3 with their scales leave room
for a tile of 128 rows × 256 outputs, and the larger the tile, the less is read from the level-2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, load_tile
from tokenyard.experts.fused.kernels.fp8_split import MASKED_FROM, NUMBERS, store_inner
from tokenyard.experts.fused.kernels.products import activate, block_part, rows_of


@triton.jit
def load_rows(
    x, x_scales, x_line, is_row, first, width, x_stride, x_scale_stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`load_tile` for rows; tiles of many rows load only the rows that exist, and the others are zero."""
    if TILE >= MASKED_FROM:
        column = first + tl.arange(0, BLOCK)
        where = x + x_line.to(tl.int64)[:, None] * x_stride + column[None, :]
        if EVEN:
            return tl.load(where, mask=is_row[:, None], other=0.0)
        else:
            return tl.load(where, mask=is_row[:, None] & (column < width)[None, :], other=0.0)
    else:
        return load_tile(
            x, x_scales, x_line, first, width, x_stride, x_scale_stride, ROWS, TILE, BLOCK, EVEN, KIND
        )


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
    FORMAT: tl.constexpr = LAYER.weights
    BLOCK: tl.constexpr = TILES.block
    COLUMNS: tl.constexpr = TILES.out // 2
    W_STRIDE: tl.constexpr = TILES.stride
    W_SCALE_WIDTH: tl.constexpr = TILES.scale_width
    place, is_row, pair, line = rows_of(rows, routes, start, count, TILE, LAYER.top_k)
    c = column * COLUMNS + tl.arange(0, COLUMNS)
    if I % COLUMNS == 0:
        i = c  # lines at equal distances, for which one address is enough
    else:
        i = tl.minimum(c, I - 1)
    if LAYER.interleaved:
        gates, ups = 2 * i, 2 * i + 1
    else:
        gates, ups = i, I + i
    SCALED: tl.constexpr = FORMAT == FP8_BLOCK
    if SCALED:
        tl.static_assert(COLUMNS == 128)
    GATE_EDGE: tl.constexpr = 64 if LAYER.interleaved else 128
    UP_EDGE: tl.constexpr = 64 if LAYER.interleaved else 128 - I % 128
    LAST: tl.constexpr = (2 * I - 1) // 128
    # The compiler keeps the result of a reduction; anything cheaper it would recompute, and run out of registers.
    first_gate, first_up = tl.min(gates, axis=0), tl.min(ups, axis=0)
    expert = expert.to(tl.int64)
    w = weights.data + expert * (2 * I * W_STRIDE)
    w_scales = weights.scales
    if SCALED:
        w_scales = w_scales + expert * (((2 * I + 127) // 128) * W_SCALE_WIDTH)
        x_scale = rows.scales + line.to(tl.int64) * rows.scale_stride
    EVEN: tl.constexpr = H % BLOCK == 0
    gate = tl.zeros([TILE, COLUMNS], tl.float32)
    up = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, H, BLOCK):
        some = load_rows(rows.data, rows.scales, line, is_row, first, TILES.rows_width, rows.stride, rows.scale_stride,
                         FORMAT, TILE, BLOCK, EVEN, KIND)  # fmt: skip
        gate_weights = load_tile(w, w_scales, gates, first, TILES.width, W_STRIDE, W_SCALE_WIDTH,
                                 FORMAT, COLUMNS, BLOCK, EVEN, KIND, TILES.unit)  # fmt: skip
        up_weights = load_tile(w, w_scales, ups, first, TILES.width, W_STRIDE, W_SCALE_WIDTH,
                               FORMAT, COLUMNS, BLOCK, EVEN, KIND, TILES.unit)  # fmt: skip
        if SCALED:
            by_row = tl.load(x_scale + first // 128)[:, None]
            gate_scale = block_scale(by_row, w_scales, first_gate, first, W_SCALE_WIDTH, LAST, GATE_EDGE)
            up_scale = block_scale(by_row, w_scales, first_up, first, W_SCALE_WIDTH, LAST, UP_EDGE)
            gate += block_part(some, gate_weights, KIND) * gate_scale
            up += block_part(some, up_weights, KIND) * up_scale
        elif KIND == tl.float32:
            gate += block_part(some, gate_weights, KIND)
            up += block_part(some, up_weights, KIND)
        else:
            gate = tl.dot(some, tl.trans(gate_weights), gate)
            up = tl.dot(some, tl.trans(up_weights), up)
    if LAYER.weight_on_input:
        weight = tl.load(routes.weights_N + pair).to(tl.float32)[:, None]
        gate, up = gate * weight, up * weight
    if weights.bias is not None:
        gate += tl.load(weights.bias + expert * (2 * I) + gates).to(tl.float32)[None, :]
        up += tl.load(weights.bias + expert * (2 * I) + ups).to(tl.float32)[None, :]
    value = activate(gate, up, LAYER.activation, True, LAYER.limit, LAYER.alpha, LAYER.shift)
    if LAYER.inner != NUMBERS:
        tl.static_assert(COLUMNS == 128)
        store_inner(value, place, is_row, column, results.inner, results.inner_scales, I, 1, LAYER.inner)
    else:
        where = results.inner + place.to(tl.int64)[:, None] * I + c[None, :]
        tl.store(where, value.to(results.inner.dtype.element_ty), mask=(c < I)[None, :] & is_row[:, None])
