"""The second product for many rows of e4m3 (pairs or codes), as rows × outputs, with two sums of 128 outputs each.

As in `rows_first`, a thread has a few rows and many outputs, which share a scale. The registers hold two sums, and the
product of one block for one of them, of a tile of 128 rows × 256 outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, load_tile
from tokenyard.experts.fused.kernels.fp8_split import FP8_SPLIT, load_split, split_dot
from tokenyard.experts.fused.kernels.products import block_part
from tokenyard.experts.fused.kernels.rows_first import load_rows
from tokenyard.experts.fused.kernels.sorting import unsigned


@triton.jit
def deliver_rows(
    value, place, is_row, expert, first, weights, routes, results, LAYER: tl.constexpr, OUT: tl.constexpr
):
    """Store results `[TILE, OUT]` from output `first` on.

    Rows with one expert here go weighted into `out`, others into `partial_sums`.
    """
    H: tl.constexpr = LAYER.hidden
    partial_sums, out = results.partial_sums, results.out
    n = first + tl.arange(0, OUT)
    is_output = (n < H)[None, :]
    if weights.bias is not None:
        value += tl.load(weights.bias + expert.to(tl.int64) * H + n, mask=n < H, other=0.0).to(tl.float32)[
            None, :
        ]
    value = value.to(partial_sums.dtype.element_ty)
    pair = unsigned(place)
    where = partial_sums + pair.to(tl.int64)[:, None] * H + n[None, :]
    if LAYER.finalize:
        tl.store(where, value, mask=is_output & (is_row & (place < 0))[:, None])
        line = pair // LAYER.top_k
        if results.out_slots_R is not None:
            line = tl.load(results.out_slots_R + line, mask=is_row, other=0)
        weighted = value.to(tl.float32)
        if not LAYER.weight_on_input:
            weighted *= tl.load(routes.weights_N + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
        weighted = tl.where(weighted == 0.0, 0.0, weighted)  # -0 becomes +0, as in a sum that begins at +0
        home = out + line.to(tl.int64)[:, None] * results.out_stride + n[None, :]
        tl.store(home, weighted.to(out.dtype.element_ty), mask=is_output & (is_row & (place >= 0))[:, None])
    else:
        tl.store(where, value, mask=is_output & is_row[:, None])


@triton.jit
def rows_first_result_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the second product, and store its results (`deliver_rows`)."""
    H: tl.constexpr = LAYER.hidden
    I: tl.constexpr = LAYER.intermediate
    KIND: tl.constexpr = LAYER.kind
    W_STRIDE: tl.constexpr = TILES.stride
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
    w = weights.data + expert * (H * W_STRIDE)
    scales = weights.scales + expert * (SCALE_LINES * W_SCALE_WIDTH)
    first_scales = scales + (2 * column) * W_SCALE_WIDTH
    second_scales = scales + tl.minimum(2 * column + 1, SCALE_LINES - 1) * W_SCALE_WIDTH
    inner, inner_scales = results.inner, results.inner_scales
    row_scales = inner_scales + place.to(tl.int64) * BLOCKS
    first_sum = tl.zeros([TILE, 128], tl.float32)
    second_sum = tl.zeros([TILE, 128], tl.float32)
    for block in range(BLOCKS):
        if LAYER.inner == FP8_SPLIT:
            high, low = load_split(inner, place, is_row, block, BLOCKS * 128, TILE)
        else:
            codes = load_rows(inner, inner_scales, place, is_row, block * 128, BLOCKS * 128, BLOCKS * 128, BLOCKS,
                              FP8_BLOCK, TILE, 128, True, KIND)  # fmt: skip
        first_weights = load_tile(w, scales, first_lines, block * 128, TILES.width, W_STRIDE, W_SCALE_WIDTH,
                                 FP8_BLOCK, 128, 128, EVEN, KIND, TILES.unit)  # fmt: skip
        second_weights = load_tile(w, scales, second_lines, block * 128, TILES.width, W_STRIDE, W_SCALE_WIDTH,
                                  FP8_BLOCK, 128, 128, EVEN, KIND, TILES.unit)  # fmt: skip
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
