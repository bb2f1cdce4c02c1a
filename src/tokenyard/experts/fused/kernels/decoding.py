"""Loads a tile of weights or of rows, in any format, as numbers for a matrix product.

This is what `tokenyard.formats` does in torch, for a tile `[N, BLOCK]` of some outputs (or rows) and BLOCK
inputs. Scales of 16 and 32 inputs are multiplied into the elements; e2m1 and e4m3 times a power of two, and e2m1 times
e4m3, are exact in bf16 (beyond its range aside), and mxint4 is rounded to it once. The scales of 128 × 128 blocks, and
global scales, are applied to the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
FP8_BLOCK = tl.constexpr(1)
MXFP8 = tl.constexpr(2)
NVFP4 = tl.constexpr(3)
MXFP4 = tl.constexpr(4)
MXINT4 = tl.constexpr(5)


class Lines(NamedTuple):
    """Lines of a matrix: rows that are multiplied, or outputs of the weights that multiply them."""

    data: Any
    scales: Any  # scales of blocks or spans, or None
    line: Any  # the number of each line
    stride: Any  # elements of `data` from one line to the next
    scale_stride: Any
    width: Any  # inputs of a line, with the pad


@triton.jit
def e8m0_to_float32(byte):
    """2^(byte - 127); 2^-127 for 0, and NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte.to(tl.int32) << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float32(code):
    """The number of a 4-bit code: the sign in bit 3, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    doubled = tl.where(exponent == 0, mantissa, ((2 | mantissa) << exponent) >> 1)
    return tl.where(code >= 8, -0.5, 0.5) * doubled.to(tl.float32)


@triton.jit
def nibbles_of(byte, N: tl.constexpr, BLOCK: tl.constexpr):
    """Unpack two 4-bit codes per byte, the low one first: `[N, BLOCK / 2]` to `[N, BLOCK]`."""
    byte = byte.to(tl.int32)
    return tl.reshape(tl.join(byte & 15, byte >> 4), [N, BLOCK])


@triton.jit
def scaled(values, scales, N: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Elements `[N, BLOCK]` times the scale of their span, `[N, BLOCK / SPAN]`."""
    by_span = tl.reshape(values, [N, BLOCK // SPAN, SPAN]) * tl.expand_dims(scales, 2)
    return tl.reshape(by_span, [N, BLOCK])


@triton.jit
def load_tile(
    lines, first, FORMAT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
    UNIT: tl.constexpr = 0,
):  # fmt: skip
    """Inputs `first` to `first + BLOCK` of some lines of a matrix.

    Inputs after the end are zero. Blocks of fp8 are returned as e4m3, not multiplied with their scales. If UNIT is not
    0, the matrix is held in boxes of 128 lines × UNIT inputs (`fused.boxes`), and has no end inside of a block.
    """
    N: tl.constexpr = lines.line.shape[0]
    line, width = lines.line.to(tl.int64), lines.width
    if (FORMAT == NVFP4) | (FORMAT == MXFP4) | (FORMAT == MXINT4):
        half = first // 2 + tl.arange(0, BLOCK // 2)
        where = lines.data + line[:, None] * lines.stride + half[None, :]
        if EVEN:
            byte = tl.load(where)
        else:
            byte = tl.load(where, mask=(half < width // 2)[None, :], other=0)
        code = nibbles_of(byte, N, BLOCK)
        if FORMAT == MXINT4:
            values = ((code ^ 8) - 8).to(tl.float32)
        else:
            values = e2m1_to_float32(code)
    else:
        column = first + tl.arange(0, BLOCK)
        if UNIT > 0:
            tl.static_assert(EVEN)
            offset = line // 128 * (128 * lines.stride) + line % 128 * UNIT
            where = lines.data + offset[:, None] + (column // UNIT * (128 * UNIT) + column % UNIT)[None, :]
        else:
            where = lines.data + line[:, None] * lines.stride + column[None, :]
        if EVEN:
            values = tl.load(where)
        else:
            values = tl.load(where, mask=(column < width)[None, :], other=0.0)
    if (FORMAT == PLAIN) | (FORMAT == FP8_BLOCK):
        return values
    else:
        SPAN: tl.constexpr = 16 if FORMAT == NVFP4 else 32
        span = first // SPAN + tl.arange(0, BLOCK // SPAN)
        where = lines.scales + line[:, None] * lines.scale_stride + span[None, :]
        if EVEN:
            found = tl.load(where)
        else:
            found = tl.load(where, mask=(span < width // SPAN)[None, :], other=0.0)
        if (FORMAT == MXFP8) | (FORMAT == MXFP4):
            scale = e8m0_to_float32(found)
        else:
            scale = found.to(tl.float32)
        return scaled(values.to(tl.float32), scale, N, BLOCK, SPAN).to(KIND)
