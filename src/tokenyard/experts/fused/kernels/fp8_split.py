"""The activation between products of e4m3: as sums of two e4m3 numbers, or, with an inner format, as e4m3 codes.

Tensor cores can multiply both with e4m3 weights. (If a layer has an inner format and weights that are not e4m3, numbers
are rounded to the values of codes: `round_numbers`.) Codes equal those of `formats.Fp8Block128` bit for bit: e4m3 with
a scale for 128 columns of a row. The sum of two e4m3 numbers is more precise:

A bf16 number has 8 significant bits, an e4m3 number 4. The scale of 128 columns of a row is the smallest power of two
for which the largest of them, divided by it, is at most 448. Of a number divided by the scale, the first four bits are
`high`, and the rest, rounded to four bits, is `low`. If the number is below 2^-6, where e4m3 has fewer bits, all of it
is `low`:

    number ≈ scale · (high + low)

is as close as a bf16 number would be, and exact for bf16 numbers, if |number| >= largest / 896. Smaller ones are off by
at most scale / 2^10, which is below largest / 2^17.8. (Scales end at 2^-100.) Where NaN or an infinity is among the
128, the scale is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.experts.fused.kernels.arguments import await_items
from tokenyard.experts.fused.kernels.decoding import FP8_BLOCK, load_tile
from tokenyard.experts.fused.kernels.row_blocks import permute_inputs

# How `inner` is held: as numbers of its own dtype, as pairs of e4m3 numbers, as codes, or as codes with scales that are
# powers of two.
NUMBERS = tl.constexpr(0)
FP8_SPLIT = tl.constexpr(1)
CODES = tl.constexpr(2)
POWER_CODES = tl.constexpr(3)

# Tiles of at least this many rows mask loads of rows that do not exist. (Shorter tiles wait for weights anyway.)
MASKED_FROM = tl.constexpr(64)


@triton.jit
def split(value, AXIS: tl.constexpr):
    """Split float32 numbers into e4m3 numbers `high` and `low`, with one scale for all numbers along AXIS."""
    # Compared as integers, so that NaN is the largest.
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS)
    is_finite = largest < 0x7F800000
    largest = tl.minimum(largest, 0x7F800000)
    # The exponent of the largest, one more if it is above 1.75 times that power of two.
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 27)
    scale = tl.where(is_finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    number = value * tl.expand_dims(inverse, AXIS)
    high = (number.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    high = tl.where(tl.abs(number) < 0.015625, 0.0, high)
    return high.to(tl.float8e4nv), (number - high).to(tl.float8e4nv), scale


@triton.jit
def quantize(value, AXIS: tl.constexpr, POWERS: tl.constexpr):
    """Quantize float32 numbers to e4m3 as `formats.Fp8Block128` does, with one scale for all numbers along AXIS."""
    largest = tl.max(
        value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS
    )  # compared as integers, so that NaN is the largest
    is_nan = largest > 0x7F800000
    largest = tl.maximum(tl.minimum(largest, 0x7F7FFFFF), 0x2EDBE6FF).to(
        tl.float32, bitcast=True
    )  # from 1e-10 on
    scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    number = tl.div_rn(value, tl.broadcast_to(tl.expand_dims(scale, AXIS), value.shape))
    code = tl.clamp(number, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return code, tl.where(is_nan, float("nan"), scale)


@triton.jit
def store_inner(
    value, place, is_row, column, inner, inner_scales, I: tl.constexpr, AXIS: tl.constexpr, INNER: tl.constexpr
):  # fmt: skip
    """Store a block of 128 columns of some rows, columns along AXIS, into `inner`; columns from I on are zero."""
    WIDTH: tl.constexpr = (I + 127) // 128 * 128
    ACROSS: tl.constexpr = 1 - AXIS
    c = column * 128 + tl.arange(0, 128)
    if I % 128 != 0:
        value = tl.where(tl.expand_dims(c < I, ACROSS), value, 0.0)
    place = place.to(tl.int64)
    mask = tl.expand_dims(is_row, AXIS)
    if INNER == FP8_SPLIT:
        high, low, scale = split(value, AXIS)
        where = inner + tl.expand_dims(place, AXIS) * (2 * WIDTH) + tl.expand_dims(c, ACROSS)
        tl.store(where, high, mask=mask)
        tl.store(where + WIDTH, low, mask=mask)
    else:
        code, scale = quantize(value, AXIS, INNER == POWER_CODES)
        where = inner + tl.expand_dims(place, AXIS) * WIDTH + tl.expand_dims(c, ACROSS)
        tl.store(where, code, mask=mask)
    tl.store(inner_scales + place * (WIDTH // 128) + column, scale, mask=is_row)


@triton.jit(do_not_specialize=["how_many", "max_tiles", "num_places"])
def round_numbers(
    numbers, inner, inner_scales, tiles, how_many, max_tiles, num_places,
    I: tl.constexpr, TILE: tl.constexpr, ITEMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    POWERS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Round the numbers between the products to the values of their codes, and store them in `inner`.

    If `inner_scales` is given, store codes and scales instead, in the order that `kernels.packed_codes` reads. An item
    is ROWS rows of a tile × COLUMNS columns. It waits until ITEMS items of the first product are counted for its tile,
    and is counted itself. With ITEMS = 0 nothing is counted, and all blocks wait for the kernel before.
    """
    if EARLY and ITEMS == 0:
        gdc_wait()
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (I + 127) // 128
    PARTS: tl.constexpr = (TILE + ROWS - 1) // ROWS * ACROSS
    total = tl.load(how_many) * PARTS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        tile, part = item // PARTS, item % PARTS
        start, count = tl.load(tiles + max_tiles + tile), tl.load(tiles + 2 * max_tiles + tile)
        counter = tiles + 5 * max_tiles + tile
        if EARLY and ITEMS > 0:
            # Not earlier, so that the next kernel, which waits for counters alone, does not end before this block.
            if item + tl.num_programs(0) >= total:
                gdc_launch_dependents()
        row = part // ACROSS * ROWS + tl.arange(0, ROWS)[:, None]
        if part // ACROSS * ROWS < count:
            if ITEMS > 0:
                await_items(counter, tl.full([], ITEMS, tl.int32))
            place = (start + row).to(tl.int64)
            column = part % ACROSS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            is_row = row < count
            there = is_row & (column < I)
            value = tl.load(numbers + place * I + column, mask=there, other=0.0)
            code, scale = quantize(tl.reshape(value, [ROWS * COLUMNS // 128, 128]), 1, POWERS)
            if inner_scales is None:
                value = tl.reshape(code.to(tl.float32) * scale[:, None], [ROWS, COLUMNS])
                tl.store(inner + place * I + column, value.to(inner.dtype.element_ty), mask=there)
            else:
                code = permute_inputs(tl.reshape(code, [ROWS, COLUMNS]))
                where = inner + place * (128 * BLOCKS) + column
                tl.store(where, code, mask=is_row & (column < 128 * BLOCKS))
                block = part % ACROSS * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128)[None, :]
                scale = tl.reshape(scale, [ROWS, COLUMNS // 128])
                tl.store(inner_scales + block * num_places + place, scale, mask=is_row & (block < BLOCKS))
            if ITEMS > 0:
                tl.debug_barrier()
                tl.atomic_add(counter, 1, sem="release")


@triton.jit
def load_split(inner, place, is_row, block, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Load the high and low parts of a block of 128 columns of some rows, each `[TILE, 128]`."""
    where = inner + place.to(tl.int64)[:, None] * (2 * WIDTH) + (block * 128 + tl.arange(0, 128))[None, :]
    if TILE >= MASKED_FROM:
        high = tl.load(where, mask=is_row[:, None], other=0.0)
        return high, tl.load(where + WIDTH, mask=is_row[:, None], other=0.0)
    else:
        return tl.load(where), tl.load(where + WIDTH)


@triton.jit
def split_dot(weights, high, low, TRANSPOSED: tl.constexpr, KIND: tl.constexpr):
    """Weights times rows split in two: outputs × rows if TRANSPOSED, else rows × outputs.

    The low parts are added first, because for e4m3 the tensor cores keep fewer bits of a sum than float32 has.
    """
    if KIND == tl.float32:  # the interpreter
        weights, high, low = weights.to(KIND), high.to(KIND), low.to(KIND)
        if TRANSPOSED:
            part = tl.dot(weights, tl.trans(low), input_precision="ieee")
            return tl.dot(weights, tl.trans(high), part, input_precision="ieee")
        else:
            part = tl.dot(low, tl.trans(weights), input_precision="ieee")
            return tl.dot(high, tl.trans(weights), part, input_precision="ieee")
    elif TRANSPOSED:
        return tl.dot(weights, tl.trans(high), tl.dot(weights, tl.trans(low)))
    elif high.shape[0] < 128:
        # In a chain of products, the compiler would give a narrow first one another layout over the warps.
        return tl.dot(low, tl.trans(weights)) + tl.dot(high, tl.trans(weights))
    else:
        return tl.dot(high, tl.trans(weights), tl.dot(low, tl.trans(weights)))


@triton.jit
def split_product(
    inner, inner_scales, place, is_row, w, I: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Some outputs `w` of an expert × some rows split in two, float32 `[OUT, TILE]`; weights in blocks of e4m3."""
    TILE: tl.constexpr = place.shape[0]
    EVEN: tl.constexpr = I % 128 == 0
    BLOCKS: tl.constexpr = (I + 127) // 128
    acc = tl.zeros([w.line.shape[0], TILE], tl.float32)
    w_scale = w.scales + (w.line // 128) * w.scale_stride
    row_scale = inner_scales + place.to(tl.int64) * BLOCKS
    # Scales are loaded a step ahead, because the compiler does not prefetch them.
    by_output, by_row = tl.load(w_scale), tl.load(row_scale)
    for block in range(BLOCKS):
        later = tl.minimum(block + 1, BLOCKS - 1)
        next_by_output, next_by_row = tl.load(w_scale + later), tl.load(row_scale + later)
        weights = load_tile(w, block * 128, FP8_BLOCK, 128, EVEN, KIND, UNIT)
        high, low = load_split(inner, place, is_row, block, BLOCKS * 128, TILE)
        part = split_dot(weights, high, low, True, KIND)
        acc += (part * by_output[:, None]) * by_row[None, :]
        by_output, by_row = next_by_output, next_by_row
    return acc
