"""The first product for many rows: rows × outputs, gate and up in sums of their own.

Turned, as in `products`, a thread has many rows of a tile in its registers, and would need the scale of each. Here it
has a few rows and many outputs, which share a scale: so blocks of e4m3 with their scales leave room for a tile of
128 rows × 256 outputs, and the tile's size is what a GPU's level-2 cache is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, load_tile
from tokenyard.experts.fused.kernels.products import activate
from tokenyard.experts.fused.kernels.sorting import unsigned


@triton.jit
def block_part(rows, weights, KIND: tl.constexpr):
    """The product of a block of inputs alone. The tensor cores take e4m3 as it is."""
    if KIND == tl.float32:
        return tl.dot(rows.to(KIND), tl.trans(weights.to(KIND)), input_precision="ieee")
    else:
        return tl.dot(rows, tl.trans(weights))


@triton.jit
def block_scale(scales, output, first, stride, UNIFORM: tl.constexpr):
    """The scale of a block of weights: one for all outputs, or one for each."""
    if UNIFORM:
        return tl.load(scales + (tl.min(output, axis=0) // 128) * stride + first // 128)
    else:
        return tl.load(scales + (output // 128) * stride + first // 128)[None, :]


@triton.jit
def rows_first_tile(
    x, x_scales, slots_R, w13, w13_scales, b13, weights_N, inner,
    order_N, expert, start, count, column, x_stride, x_scale_stride,
    H: tl.constexpr, I: tl.constexpr, X_WIDTH: tl.constexpr, W_WIDTH: tl.constexpr, W_SCALE_WIDTH: tl.constexpr,
    W_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    FORMAT: tl.constexpr, KIND: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the first product, activated, into `inner` at the places of `order_N`."""
    t = tl.arange(0, TILE)
    is_row = t < count
    place = start + tl.minimum(t, count - 1)  # behind the last row it is computed again, and not stored
    pair = unsigned(tl.load(order_N + place))
    line = pair // TOP_K
    if HAS_SLOTS:
        line = tl.load(slots_R + line)
    c = column * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.minimum(c, I - 1)
    if INTERLEAVED:
        gates, ups = 2 * i, 2 * i + 1
    else:
        gates, ups = i, I + i
    SPAN: tl.constexpr = 2 * COLUMNS if INTERLEAVED else COLUMNS
    # All outputs of the tile lie in one block of 128.
    UNIFORM: tl.constexpr = (128 % SPAN == 0) & (INTERLEAVED | (I % COLUMNS == 0))
    SCALED: tl.constexpr = FORMAT == FP8_BLOCK
    expert = expert.to(tl.int64)
    w = w13 + expert * (2 * I * W_STRIDE)
    w_scales = w13_scales + expert * (((2 * I + 127) // 128) * W_SCALE_WIDTH)
    x_scale = x_scales + line.to(tl.int64) * x_scale_stride
    EVEN: tl.constexpr = H % BLOCK == 0
    gate = tl.zeros([TILE, COLUMNS], tl.float32)
    up = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, H, BLOCK):
        rows = load_tile(x, x_scales, line, first, X_WIDTH, x_stride, x_scale_stride,
                         FORMAT, TILE, BLOCK, EVEN, KIND)  # fmt: skip
        gate_weights = load_tile(w, w_scales, gates, first, W_WIDTH, W_STRIDE, W_SCALE_WIDTH,
                                 FORMAT, COLUMNS, BLOCK, EVEN, KIND)  # fmt: skip
        up_weights = load_tile(w, w_scales, ups, first, W_WIDTH, W_STRIDE, W_SCALE_WIDTH,
                               FORMAT, COLUMNS, BLOCK, EVEN, KIND)  # fmt: skip
        if SCALED:
            by_row = tl.load(x_scale + first // 128)[:, None]
            gate_scale = block_scale(w_scales, gates, first, W_SCALE_WIDTH, UNIFORM)
            up_scale = block_scale(w_scales, ups, first, W_SCALE_WIDTH, UNIFORM)
            gate += block_part(rows, gate_weights, KIND) * (by_row * gate_scale)
            up += block_part(rows, up_weights, KIND) * (by_row * up_scale)
        elif KIND == tl.float32:
            gate += block_part(rows, gate_weights, KIND)
            up += block_part(rows, up_weights, KIND)
        else:
            gate = tl.dot(rows, tl.trans(gate_weights), gate)
            up = tl.dot(rows, tl.trans(up_weights), up)
    if WEIGHTED:
        weight = tl.load(weights_N + pair).to(tl.float32)[:, None]
        gate, up = gate * weight, up * weight
    if HAS_BIAS:
        gate += tl.load(b13 + expert * (2 * I) + gates).to(tl.float32)[None, :]
        up += tl.load(b13 + expert * (2 * I) + ups).to(tl.float32)[None, :]
    value = activate(gate, up, ACTIVATION, True, LIMIT, ALPHA, SHIFT)
    where = inner + place.to(tl.int64)[:, None] * I + c[None, :]
    tl.store(where, value.to(inner.dtype.element_ty), mask=(c < I)[None, :] & is_row[:, None])


@triton.jit(do_not_specialize=["how_many", "max_tiles"])
def rows_first_product(
    x, x_scales, slots_R, w13, w13_scales, b13, weights_N, inner,
    order_N, tiles, how_many, max_tiles, x_stride, x_scale_stride,
    H: tl.constexpr, I: tl.constexpr, X_WIDTH: tl.constexpr, W_WIDTH: tl.constexpr, W_SCALE_WIDTH: tl.constexpr,
    W_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    FORMAT: tl.constexpr, KIND: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first product of all experts: every block takes tiles in turn."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    total = tl.load(how_many) * ACROSS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        tile, column = item // ACROSS, item % ACROSS
        expert, start = tl.load(tiles + tile), tl.load(tiles + max_tiles + tile)
        count = tl.load(tiles + 2 * max_tiles + tile)
        if (TAIL > 0) & (count <= TAIL):
            rows_first_tile(
                x, x_scales, slots_R, w13, w13_scales, b13, weights_N, inner,
                order_N, expert, start, count, column, x_stride, x_scale_stride,
                H, I, X_WIDTH, W_WIDTH, W_SCALE_WIDTH, W_STRIDE, TOP_K,
                FORMAT, KIND, HAS_SLOTS, HAS_BIAS, WEIGHTED, ACTIVATION, INTERLEAVED, LIMIT, ALPHA, SHIFT,
                COLUMNS, TAIL if TAIL > 0 else TILE, BLOCK,
            )  # fmt: skip
        else:
            rows_first_tile(
                x, x_scales, slots_R, w13, w13_scales, b13, weights_N, inner,
                order_N, expert, start, count, column, x_stride, x_scale_stride,
                H, I, X_WIDTH, W_WIDTH, W_SCALE_WIDTH, W_STRIDE, TOP_K,
                FORMAT, KIND, HAS_SLOTS, HAS_BIAS, WEIGHTED, ACTIVATION, INTERLEAVED, LIMIT, ALPHA, SHIFT,
                COLUMNS, TILE, BLOCK,
            )  # fmt: skip
