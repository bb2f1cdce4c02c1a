"""Both products of an expert as outputs × rows (transposed), so that a tile of few rows is narrow and wastes nothing.

    inner  = activation(W13 · x + b13)            rows gathered by index, gate and up in one tile
    result = weight · (W2 · inner + b2)           into `out`, or into `partial_sums` for the sum over a row's experts

A tile of outputs holds gate and up of the same columns, 8 and 8 alternating, so that a thread has both in its own
registers. With weights in blocks of e4m3, `inner` holds pairs of e4m3 numbers, or e4m3 codes (`fp8_split`); else it
holds numbers of 16 or 32 bits.

**The sum.** The result of a row that one expert takes is weighted and written to `out`. If several experts take a row,
each result is written to `partial_sums`, by pair, rounded to the type of the rows and not weighted. Then `summing` adds
them up. (Letting the last block of a row add them up here, with a counter per row, was not faster for any number of
rows.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, PLAIN, Lines, load_tile
from tokenyard.experts.fused.kernels.epilogues import activate, deliver
from tokenyard.experts.fused.kernels.fp8_split import FP8_SPLIT, NUMBERS, split_product, store_inner
from tokenyard.experts.fused.kernels.sorting import unsigned


@triton.jit
def block_part(left, right, KIND: tl.constexpr):
    """The product of one block of inputs, lines of `left` × lines of `right`. Tensor cores multiply e4m3 directly."""
    if KIND == tl.float32:
        return tl.dot(left.to(KIND), tl.trans(right.to(KIND)), input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right))


@triton.jit
def outputs_of(weights, expert, output, OUTPUTS: tl.constexpr, LAYER: tl.constexpr, TILES: tl.constexpr):
    """Some outputs of an expert's matrix."""
    SCALE_LINES: tl.constexpr = (OUTPUTS + 127) // 128 if LAYER.weights == FP8_BLOCK else OUTPUTS
    expert = expert.to(tl.int64)
    data = weights.data + expert * (OUTPUTS * TILES.stride)
    scales = weights.scales
    if scales is not None:
        scales = scales + expert * (SCALE_LINES * TILES.scale_width)
    return Lines(data, scales, output, TILES.stride, TILES.scale_width, TILES.width)


@triton.jit
def block_product(
    x, w, INPUTS: tl.constexpr, ROWS: tl.constexpr, WEIGHTS: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The product of some outputs `w` of an expert and some rows `x`, float32 `[OUT, TILE]`. All lines must exist."""
    OUT: tl.constexpr = w.line.shape[0]
    TILE: tl.constexpr = x.line.shape[0]
    EVEN: tl.constexpr = INPUTS % BLOCK == 0
    # Both are e4m3, which the tensor cores multiply directly.
    NARROW: tl.constexpr = (ROWS == FP8_BLOCK) & (WEIGHTS == FP8_BLOCK) & (KIND != tl.float32)
    BOTH_FP8: tl.constexpr = (ROWS == FP8_BLOCK) & (WEIGHTS == FP8_BLOCK)
    # With many rows there are no registers for a second sum, of one block, so weights are scaled and rounded again.
    FOLDED: tl.constexpr = (WEIGHTS == FP8_BLOCK) & (ROWS != FP8_BLOCK) & (TILE > 16)
    acc = tl.zeros([OUT, TILE], tl.float32)
    # Scales of blocks are loaded a step ahead, because the compiler does not prefetch them.
    if WEIGHTS == FP8_BLOCK:
        w_scale = w.scales + (w.line // 128) * w.scale_stride
        by_output = tl.load(w_scale)
    if ROWS == FP8_BLOCK:
        x_scale = x.scales + x.line.to(tl.int64) * x.scale_stride
        by_row = tl.load(x_scale)
    for first in range(0, INPUTS, BLOCK):
        later = tl.minimum(first + BLOCK, INPUTS - 1) // 128
        if WEIGHTS == FP8_BLOCK:
            next_by_output = tl.load(w_scale + later)
        if ROWS == FP8_BLOCK:
            next_by_row = tl.load(x_scale + later)
        a = load_tile(w, first, WEIGHTS, BLOCK, EVEN, KIND, UNIT)
        b = load_tile(x, first, ROWS, BLOCK, EVEN, KIND)
        if ROWS == FP8_BLOCK:
            if not BOTH_FP8:
                b = b.to(tl.float32) * by_row[:, None]
        if FOLDED:
            a = a.to(tl.float32) * by_output[:, None]
            by_output = next_by_output
        if not NARROW:
            # Through float32: the direct conversion from e4m3 to bf16 has a sixteenth of the rate.
            a, b = a.to(tl.float32).to(KIND), b.to(KIND)
        if (WEIGHTS == FP8_BLOCK) & (not FOLDED):
            part = block_part(a, b, KIND)
            if BOTH_FP8:
                acc += (part * by_output[:, None]) * by_row[None, :]
            else:
                acc += part * by_output[:, None]
            by_output = next_by_output
        elif KIND == tl.float32:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc)
        if ROWS == FP8_BLOCK:
            by_row = next_by_row
    return acc


@triton.jit
def two_block_product(x, w, INPUTS: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr):
    """`block_product` for rows and weights in blocks of e4m3, two adjacent blocks a step. Their number is even."""
    BLOCKS: tl.constexpr = INPUTS // 128
    acc = tl.zeros([w.line.shape[0], x.line.shape[0]], tl.float32)
    w_scale = w.scales + (w.line // 128) * w.scale_stride
    x_scale = x.scales + x.line.to(tl.int64) * x.scale_stride
    by_output, by_row = tl.load(w_scale), tl.load(x_scale)
    other_by_output, other_by_row = tl.load(w_scale + 1), tl.load(x_scale + 1)
    for block in range(0, BLOCKS, 2):
        later = tl.minimum(block + 2, BLOCKS - 2)
        next_by_output, next_by_row = tl.load(w_scale + later), tl.load(x_scale + later)
        next_other_by_output, next_other_by_row = tl.load(w_scale + later + 1), tl.load(x_scale + later + 1)
        a = load_tile(w, block * 128, FP8_BLOCK, 128, True, KIND, UNIT)
        other_a = load_tile(w, block * 128 + 128, FP8_BLOCK, 128, True, KIND, UNIT)
        b = load_tile(x, block * 128, FP8_BLOCK, 128, True, KIND)
        other_b = load_tile(x, block * 128 + 128, FP8_BLOCK, 128, True, KIND)
        acc += (block_part(a, b, KIND) * by_output[:, None]) * by_row[None, :]
        acc += (block_part(other_a, other_b, KIND) * other_by_output[:, None]) * other_by_row[None, :]
        by_output, by_row = next_by_output, next_by_row
        other_by_output, other_by_row = next_other_by_output, next_other_by_row
    return acc


@triton.jit
def global_scale(weights, expert, output, OUTPUTS: tl.constexpr):
    """The factor of the products of some outputs; the two halves of a matrix have their own global scales."""
    half = expert * 2 + (output >= (OUTPUTS + 1) // 2).to(tl.int64)
    return tl.load(weights.global_factor + half) / tl.load(weights.global_scale + half)


@triton.jit
def rows_of(rows, routes, start, count, TILE: tl.constexpr, TOP_K: tl.constexpr):
    """For each row of a tile: its place, whether it exists, its pair, and its line in memory."""
    t = tl.arange(0, TILE)
    place = start + tl.minimum(t, count - 1)  # after the last row, results are computed but not stored
    pair = unsigned(tl.load(routes.order_N + place))
    line = pair // TOP_K
    if rows.slots_R is not None:
        line = tl.load(rows.slots_R + line)
    return place, t < count, pair, line


@triton.jit
def inner_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the first product, activate it, and store it in `inner` at the places of `order_N`."""
    H: tl.constexpr = LAYER.hidden
    I: tl.constexpr = LAYER.intermediate
    OUT: tl.constexpr = TILES.out
    place, is_row, pair, line = rows_of(rows, routes, start, count, TILE, LAYER.top_k)
    j = tl.arange(0, OUT)
    if LAYER.gated:
        COLUMNS: tl.constexpr = OUT // 2
        i = tl.minimum(column * COLUMNS + (j // 16) * 8 + j % 8, I - 1)
        half = (j // 8) % 2
        if LAYER.interleaved:
            output = 2 * i + half
        else:
            output = half * I + i
        OUTPUTS: tl.constexpr = 2 * I
    else:
        COLUMNS: tl.constexpr = OUT
        i = tl.minimum(column * OUT + j, I - 1)
        output = i
        OUTPUTS: tl.constexpr = I
    expert = expert.to(tl.int64)
    x = Lines(rows.data, rows.scales, line, rows.stride, rows.scale_stride, TILES.rows_width)
    w = outputs_of(weights, expert, output, OUTPUTS, LAYER, TILES)
    if TILES.block > 128:
        tl.static_assert((TILES.block == 256) & (H % 256 == 0))
        acc = two_block_product(x, w, H, LAYER.kind, TILES.unit)
    else:
        acc = block_product(x, w, H, LAYER.rows, LAYER.weights, LAYER.kind, TILES.block, TILES.unit)
    if weights.global_scale is not None:
        acc *= global_scale(weights, expert, output, OUTPUTS)[:, None]
    if rows.globals is not None:
        acc = acc / tl.load(rows.globals + line.to(tl.int64) * rows.global_stride)[None, :]
    if LAYER.weight_on_input:
        acc *= tl.load(routes.weights_N + pair).to(tl.float32)[None, :]
    if weights.bias is not None:
        acc += tl.load(weights.bias + expert * OUTPUTS + output).to(tl.float32)[:, None]
    if LAYER.gated:
        both = tl.permute(tl.reshape(acc, [OUT // 16, 2, 8, TILE]), [0, 2, 3, 1])
        gate, up = tl.split(both)
        value = tl.reshape(activate(gate, up, LAYER), [COLUMNS, TILE])
    else:
        value = activate(acc, None, LAYER)
    if LAYER.inner != NUMBERS:
        tl.static_assert(COLUMNS == 128)
        store_inner(value, place, is_row, column, results.inner, results.inner_scales, I, 0, LAYER.inner)
    else:
        c = column * COLUMNS + tl.arange(0, COLUMNS)
        where = results.inner + place.to(tl.int64)[None, :] * I + c[:, None]
        tl.store(where, value.to(results.inner.dtype.element_ty), mask=(c < I)[:, None] & is_row[None, :])


@triton.jit
def result_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the second product, and store its results (`deliver`)."""
    H: tl.constexpr = LAYER.hidden
    I: tl.constexpr = LAYER.intermediate
    OUT: tl.constexpr = TILES.out
    t = tl.arange(0, TILE)
    is_row = t < count
    place = start + tl.minimum(t, count - 1)
    n = column * OUT + tl.arange(0, OUT)
    is_output = n < H
    output = tl.minimum(n, H - 1)
    expert = expert.to(tl.int64)
    w = outputs_of(weights, expert, output, H, LAYER, TILES)
    inner, inner_scales = results.inner, results.inner_scales
    if LAYER.inner == FP8_SPLIT:
        tl.static_assert(TILES.block == 128)
        acc = split_product(inner, inner_scales, place, is_row, w, I, LAYER.kind, TILES.unit)
    else:
        ROWS: tl.constexpr = PLAIN if LAYER.inner == NUMBERS else FP8_BLOCK
        WIDTH: tl.constexpr = I if LAYER.inner == NUMBERS else (I + 127) // 128 * 128
        x = Lines(inner, inner_scales, place, WIDTH, WIDTH // 128, WIDTH)
        acc = block_product(x, w, I, ROWS, LAYER.weights, LAYER.kind, TILES.block, TILES.unit)
    if weights.global_scale is not None:
        acc *= global_scale(weights, expert, output, H)[:, None]
    if weights.bias is not None:
        acc += tl.load(weights.bias + expert * H + output).to(tl.float32)[:, None]
    place = tl.load(routes.order_N + place)
    deliver(
        acc, place, is_row, n, is_output, None, routes, results,
        H, LAYER.top_k, not LAYER.weight_on_input, LAYER.finalize, 0,
    )  # fmt: skip
