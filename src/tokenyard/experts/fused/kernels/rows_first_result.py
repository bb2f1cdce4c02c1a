"""The second product for many rows: rows in digits or codes of e4m3 × outputs, 128 and 128 in sums of their own.

As in `rows_first`, a thread has a few rows and many outputs, which share a scale. Two sums and the product of a block
for one of them at a time leave room for a tile of 128 rows × 256 outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, load_tile
from tokenyard.experts.fused.kernels.digits import DIGITS, load_split, split_dot
from tokenyard.experts.fused.kernels.products import block_part, tile_of
from tokenyard.experts.fused.kernels.rows_first import load_rows
from tokenyard.experts.fused.kernels.sorting import unsigned


@triton.jit
def deliver_rows(
    value, place, is_row, first, b2, weights_N, left, out, out_slots_R, out_stride,
    H: tl.constexpr, TOP_K: tl.constexpr, HAS_OUT_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr, FINALIZE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Results `[TILE, OUT]` from output `first` on: alone in their row, weighted, into `out`; else into `left`."""
    n = first + tl.arange(0, OUT)
    is_output = (n < H)[None, :]
    if HAS_BIAS:
        value += tl.load(b2 + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
    value = value.to(left.dtype.element_ty)
    pair = unsigned(place)
    where = left + pair.to(tl.int64)[:, None] * H + n[None, :]
    if FINALIZE:
        tl.store(where, value, mask=is_output & (is_row & (place < 0))[:, None])
        line = pair // TOP_K
        if HAS_OUT_SLOTS:
            line = tl.load(out_slots_R + line, mask=is_row, other=0)
        weighted = value.to(tl.float32)
        if WEIGHTED:
            weighted *= tl.load(weights_N + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
        home = out + line.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(home, weighted.to(out.dtype.element_ty), mask=is_output & (is_row & (place >= 0))[:, None])
    else:
        tl.store(where, value, mask=is_output & is_row[:, None])


@triton.jit
def rows_first_result_tile(
    inner, inner_scales, w2, w2_scales, b2, weights_N, left, out, out_slots_R, out_stride,
    order_N, expert, start, count, column,
    H: tl.constexpr, I: tl.constexpr, W_WIDTH: tl.constexpr, W_SCALE_WIDTH: tl.constexpr,
    W_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    KIND: tl.constexpr, HAS_OUT_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FINALIZE: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the second product, delivered."""
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
    w = w2 + expert * (H * W_STRIDE)
    scales = w2_scales + expert * (SCALE_LINES * W_SCALE_WIDTH)
    first_scales = scales + (2 * column) * W_SCALE_WIDTH
    second_scales = scales + tl.minimum(2 * column + 1, SCALE_LINES - 1) * W_SCALE_WIDTH
    row_scales = inner_scales + place.to(tl.int64) * BLOCKS
    first_sum = tl.zeros([TILE, 128], tl.float32)
    second_sum = tl.zeros([TILE, 128], tl.float32)
    for block in range(BLOCKS):
        if INNER == DIGITS:
            high, low = load_split(inner, place, is_row, block, BLOCKS * 128, TILE)
        else:
            rows = load_rows(inner, inner_scales, place, is_row, block * 128, BLOCKS * 128, BLOCKS * 128, BLOCKS,
                             FP8_BLOCK, TILE, 128, True, KIND)  # fmt: skip
        first_weights = load_tile(w, scales, first_lines, block * 128, W_WIDTH, W_STRIDE, W_SCALE_WIDTH,
                                 FP8_BLOCK, 128, 128, EVEN, KIND)  # fmt: skip
        second_weights = load_tile(w, scales, second_lines, block * 128, W_WIDTH, W_STRIDE, W_SCALE_WIDTH,
                                  FP8_BLOCK, 128, 128, EVEN, KIND)  # fmt: skip
        by_row = tl.load(row_scales + block)[:, None]
        first_scale, second_scale = tl.load(first_scales + block), tl.load(second_scales + block)
        if INNER == DIGITS:
            first_sum += split_dot(first_weights, high, low, False, KIND) * (by_row * first_scale)
            second_sum += split_dot(second_weights, high, low, False, KIND) * (by_row * second_scale)
        else:
            first_sum += block_part(rows, first_weights, KIND) * (by_row * first_scale)
            second_sum += block_part(rows, second_weights, KIND) * (by_row * second_scale)
    place = tl.load(order_N + place)
    deliver_rows(
        first_sum, place, is_row, first, b2 + expert * H, weights_N, left, out, out_slots_R, out_stride,
        H, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, 128,
    )  # fmt: skip
    deliver_rows(
        second_sum, place, is_row, first + 128, b2 + expert * H, weights_N, left, out, out_slots_R, out_stride,
        H, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, 128,
    )  # fmt: skip


@triton.jit(do_not_specialize=["how_many", "max_tiles"])
def rows_first_result(
    inner, inner_scales, w2, w2_scales, b2, weights_N, left, out, out_slots_R, out_stride,
    order_N, tiles, how_many, max_tiles,
    H: tl.constexpr, I: tl.constexpr, W_WIDTH: tl.constexpr, W_SCALE_WIDTH: tl.constexpr,
    W_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    KIND: tl.constexpr, HAS_OUT_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    FINALIZE: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The second product of all experts: every block takes tiles in turn."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (H + 255) // 256
    expert, start, count = tile_of(tiles, max_tiles, tl.program_id(0), ACROSS)  # early, as in `products`
    total = tl.load(how_many) * ACROSS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        column = item % ACROSS
        next_expert, next_start, next_count = tile_of(tiles, max_tiles, item + tl.num_programs(0), ACROSS)
        if (TAIL > 0) & (count <= TAIL):
            rows_first_result_tile(
                inner, inner_scales, w2, w2_scales, b2, weights_N, left, out, out_slots_R, out_stride,
                order_N, expert, start, count, column,
                H, I, W_WIDTH, W_SCALE_WIDTH, W_STRIDE, TOP_K,
                KIND, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, INNER, TAIL if TAIL > 0 else TILE,
            )  # fmt: skip
        else:
            rows_first_result_tile(
                inner, inner_scales, w2, w2_scales, b2, weights_N, left, out, out_slots_R, out_stride,
                order_N, expert, start, count, column,
                H, I, W_WIDTH, W_SCALE_WIDTH, W_STRIDE, TOP_K,
                KIND, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, INNER, TILE,
            )  # fmt: skip
        expert, start, count = next_expert, next_start, next_count
