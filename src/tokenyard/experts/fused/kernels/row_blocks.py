"""Recodes rows of mxfp8 to fp8_block128: e4m3 with a scale for 128 inputs, which tensor cores multiply directly.

`decode_rows` decodes them to bf16 instead, exactly, for weights that are multiplied in bf16.

The scale of 128 inputs is the largest scale of their spans that are not all zero. The codes of a span whose scale is
smaller by 2^d are multiplied by 2^-d and rounded to the nearest code. e4m3 has four bits down to 2^-6 and steps of 2^-9
below, so a number changes by at most 2^-10 of the scale. In rows of mxfp8 the largest code of a span is at least 224,
and the largest of the 128 stays the same: no number changes by more than 2^-17.8 of the largest of them.
Where NaN or an infinity is among the 128, the scale is NaN. Rows for `kernels.packed_codes` have their inputs permuted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.experts.fused.kernels.decoding import e8m0_to_float32

# Every code is rounded to zero after this many halvings.
MOST_HALVINGS = tl.constexpr(24)


@triton.jit
def without_sign(number):
    """The bits of float32 numbers without signs, as integers: infinity is above all numbers, and NaN above infinity."""
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def permute_inputs(codes):
    """Codes `[rows, columns]` of whole blocks in the order of `packing.code_order`."""
    ROWS: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    by_sixteen = tl.reshape(codes, [ROWS * COLUMNS // 16, 2, 8])
    return tl.reshape(tl.permute(by_sixteen, [0, 2, 1]), [ROWS, COLUMNS])


@triton.jit
def recode_part(
    x, x_scales, line, is_line, part, x_stride, x_scale_stride, H: tl.constexpr, COLUMNS: tl.constexpr
):
    """Recode a part of some rows: returns codes of fp8_block128 `[rows, COLUMNS]`, and the scales of their blocks."""
    ROWS: tl.constexpr = line.shape[0]
    BLOCKS: tl.constexpr = COLUMNS // 128
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    span = part * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)[None, :]
    line, is_line = line[:, None], is_line[:, None]
    code = tl.load(x + line * x_stride + column, mask=is_line & (column < H), other=0.0)
    byte = tl.load(x_scales + line * x_scale_stride + span, mask=is_line & (span * 32 < H), other=0)
    value = tl.reshape(code.to(tl.float32), [ROWS * BLOCKS, 4, 32])
    byte = tl.reshape(byte.to(tl.int32), [ROWS * BLOCKS, 4])
    largest = tl.max(without_sign(value), axis=2)
    block_byte = tl.max(tl.where(largest > 0, byte, 0), axis=1)
    decoded = largest.to(tl.float32, bitcast=True) * e8m0_to_float32(byte)
    is_finite = tl.max(without_sign(decoded), axis=1) < 0x7F800000
    halvings = tl.minimum(tl.maximum(block_byte[:, None] - byte, 0), MOST_HALVINGS)
    smaller = ((127 - halvings) << 23).to(tl.float32, bitcast=True)
    recoded = (value * tl.expand_dims(smaller, 2)).to(tl.float8e4nv)
    scale = tl.where(is_finite, e8m0_to_float32(block_byte), float("nan"))
    return tl.reshape(recoded, [ROWS, COLUMNS]), tl.reshape(scale, [ROWS, BLOCKS])


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def recode_rows(
    x, x_scales, slots_R, blocks, block_scales, order_N, tiles, how_many, num_rows, max_tiles, x_stride, x_scale_stride,
    H: tl.constexpr, TOP_K: tl.constexpr, HAS_SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Recode rows into contiguous ones, padded to whole blocks; each thread block loops over parts of ROWS rows.

    If `order_N` is given, recode the row of each of its places, permuted for `kernels.packed_codes`; `num_rows` is then
    the number of places that `blocks` has, and scales are by block and place.
    """
    PLACED: tl.constexpr = order_N is not None
    if EARLY:
        if PLACED:
            gdc_wait()
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    WIDTH: tl.constexpr = (H + 127) // 128 * 128
    total = num_rows
    if PLACED:
        total = places_of(tiles, how_many, max_tiles)
    for item in range(tl.program_id(0), tl.cdiv(total, ROWS) * ACROSS, tl.num_programs(0)):
        row = (item // ACROSS * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row < total
        part = item % ACROSS
        line = row
        if PLACED:
            pair = tl.load(order_N + row, mask=is_row, other=0)
            line = (tl.where(pair < 0, ~pair, pair) // TOP_K).to(tl.int64)
        if HAS_SLOTS:
            line = tl.load(slots_R + line, mask=is_row, other=0).to(tl.int64)
        code, scale = recode_part(x, x_scales, line, is_row, part, x_stride, x_scale_stride, H, COLUMNS)
        column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        row, is_row = row[:, None], is_row[:, None]
        if PLACED:
            code = permute_inputs(code)
        tl.store(blocks + row * WIDTH + column, code, mask=is_row & (column < WIDTH))
        block = part * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128)[None, :]
        if PLACED:
            tl.store(block_scales + block * num_rows + row, scale, mask=is_row & (block < WIDTH // 128))
        else:
            tl.store(block_scales + row * (WIDTH // 128) + block, scale, mask=is_row & (block < WIDTH // 128))
    if EARLY and not PLACED:
        # Rows and slots are older than the sort, and this kernel does not read the sort's results. But later kernels,
        # which wait only for this one, do: so this one must not end before the sort.
        gdc_wait()


@triton.jit
def places_of(tiles, how_many, max_tiles):
    """The number of pairs in `order_N`: the end of the last tile."""
    last = tl.load(how_many) - 1
    places = tl.load(tiles + max_tiles + last, mask=last >= 0, other=0)
    return places + tl.load(tiles + 2 * max_tiles + last, mask=last >= 0, other=0)


@triton.jit(do_not_specialize=["num_rows"])
def decode_rows(
    x, x_scales, slots_R, numbers, num_rows, x_stride, x_scale_stride,
    H: tl.constexpr, HAS_SLOTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Decode rows into contiguous rows of numbers; each thread block loops over parts of rows."""
    if EARLY:
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    for item in range(tl.program_id(0), num_rows * ACROSS, tl.num_programs(0)):
        row = tl.zeros([], tl.int64) + item // ACROSS
        part = item % ACROSS
        line = row
        if HAS_SLOTS:
            line = tl.load(slots_R + row).to(tl.int64)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        span = part * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
        code = tl.load(x + line * x_stride + column, mask=column < H, other=0.0)
        byte = tl.load(x_scales + line * x_scale_stride + span, mask=span * 32 < H, other=0)
        value = tl.reshape(code.to(tl.float32), [COLUMNS // 32, 32]) * e8m0_to_float32(byte)[:, None]
        value = tl.reshape(value, [COLUMNS]).to(numbers.dtype.element_ty)
        tl.store(numbers + row * H + column, value, mask=column < H)
    if EARLY:
        gdc_wait()  # as in `recode_rows`
