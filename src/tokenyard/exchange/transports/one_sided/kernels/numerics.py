"""The formats inside a kernel: a tile of one row in, codes and scales out, and back.

Each function computes in Triton, bit for bit, what `tokenyard.formats` computes in torch, but in another way:

- Nothing is divided per element. `x / step` is `q − (q · step − x) · r`, where r is the rounded reciprocal of the
  step and q is x · r: with fused multiply-adds that is the rounded quotient itself (Markstein), for three
  operations. For e2m1 two suffice: x · r + x · r', where r' is the error of r.
- e2m1 has steps of a half up to 2, of one up to 4, of two up to 6. So the code of |v| is the smallest of the three
  lines 2|v|, |v| + 2 and |v|/2 + 4, rounded; adding 2^23 rounds to nearest, ties to even, and leaves the code in the
  last bits. Eight codes are packed by one sum of products.
- The E8M0 byte of a block of bf16 or fp16 numbers is read off the bits of its amax: 448 is 1.75 · 2^8, so the scale
  moves on where the mantissa passes 0.75. (float32 rows can hit the rounding of amax / 448 among the subnormal
  numbers, and divide.)

Tiles are one-dimensional, a multiple of 128 columns wide, zero where the row has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# Between these global scales, the remainder of a quotient cannot be a subnormal number.
SMALLEST_EASY_SCALE = tl.constexpr(2.0**-60)
LARGEST_EASY_SCALE = tl.constexpr(2.0**60)


@triton.jit
def larger_or_nan(a, b):
    """The larger of two, or NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def cast_within(values, KIND: tl.constexpr):
    """Cast numbers to a type: those beyond its range saturate, NaN stays NaN; no change if they have that type."""
    if values.dtype == KIND:
        return values
    if tl.float32 == KIND:
        return values.to(tl.float32)
    LARGEST: tl.constexpr = 65504.0 if tl.float16 == KIND else 3.3895313892515355e38
    return tl.clamp(values.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(KIND)


@triton.jit
def block_amax(values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile in blocks `[WIDTH / BLOCK, BLOCK]`, and the largest magnitude of each; NaN if a block holds one."""
    blocks = tl.reshape(values, [WIDTH // BLOCK, BLOCK])
    return blocks, tl.reduce(tl.abs(blocks), 1, larger_or_nan)


@triton.jit
def quotient(values, divisor, reciprocal):
    """`values / divisor` as IEEE division rounds it, signs of zeros included; but NaN where Inf would come out."""
    guess = values * reciprocal
    return tl.fma(tl.fma(guess, divisor, -values), -reciprocal, guess)


@triton.jit
def e8m0_of(amax, EXACT: tl.constexpr):
    """The E8M0 byte (int32) of a block's amax."""
    if EXACT:
        bits = tl.div_rn(amax, 448.0).to(tl.int32, bitcast=True)
        byte = tl.where(bits <= 0x00400000, 0, (bits + 0x7FFFFF) >> 23)
    else:
        bits = amax.to(tl.int32, bitcast=True)
        byte = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)
    return tl.where(bits < INF_BITS, byte, tl.where(bits == INF_BITS, 254, 255))


@triton.jit
def e8m0_scale(byte):
    """2^(byte − 127), as float32."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_mxfp8(values, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """float32 `[WIDTH]` → e4m3 `[WIDTH]`, E8M0 bytes `[WIDTH / 32]`."""
    blocks, amax = block_amax(values, WIDTH, 32)
    byte = e8m0_of(amax, EXACT)
    # 254 − 255 is −1: its scale must stay NaN.
    inverse = e8m0_scale(tl.where(byte == 255, 255, 254 - byte))
    codes = (blocks * inverse[:, None]).to(tl.float8e4nv)
    return tl.reshape(codes, [WIDTH]), byte.to(tl.uint8)


@triton.jit
def encode_fp8_block(values, WIDTH: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """float32 `[WIDTH]` → e4m3 `[WIDTH]`, float32 scales `[WIDTH / 128]`."""
    blocks, amax = block_amax(values, WIDTH, 128)
    is_nan = amax != amax  # noqa: PLR0124
    scales = tl.div_rn(tl.minimum(tl.maximum(amax, 1e-10), FLOAT32_MAX), 448.0)
    if POWER_OF_TWO:
        scales = ((scales.to(tl.int32, bitcast=True) + 0x7FFFFF) & INF_BITS).to(tl.float32, bitcast=True)
    scales = tl.where(is_nan, float("nan"), scales)
    divisor = tl.broadcast_to(scales[:, None], [WIDTH // 128, 128])
    reciprocal = tl.broadcast_to(tl.div_rn(1.0, scales)[:, None], [WIDTH // 128, 128])
    finite = tl.minimum(tl.maximum(blocks, -FLOAT32_MAX), FLOAT32_MAX)
    exact = quotient(finite, divisor, reciprocal)
    if POWER_OF_TWO:  # the largest finite number may stay below 448, but Inf must become 448
        exact = tl.where(finite == blocks, exact, blocks)
    # One bit pattern for all NaNs: the sign of a NaN that was divided differs between devices.
    codes = tl.where(is_nan[:, None], float("nan"), exact).to(tl.float8e4nv)
    return tl.reshape(codes, [WIDTH]), scales


@triton.jit
def row_global_scale(amax):
    """nvfp4's g of a row, from its largest finite magnitude."""
    return tl.where(amax == 0.0, 1.0, tl.minimum(tl.div_rn(2688.0, amax), FLOAT32_MAX))


@triton.jit
def is_easy(g):
    """Whether a global scale is one for which a quotient's remainder is no subnormal number."""
    return (g >= SMALLEST_EASY_SCALE) & (g <= LARGEST_EASY_SCALE)


@triton.jit
def finite_amax(values, WIDTH: tl.constexpr):
    """The largest finite magnitude of a tile. The compiler takes that of its blocks from here, where it is encoded."""
    _, amax = block_amax(values, WIDTH, 16)
    # Bits of magnitudes are ordered as the magnitudes are; those of Inf and NaN are the largest.
    largest = tl.max(amax.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    if not (largest <= FLOAT32_MAX):
        size = tl.abs(values)
        largest = tl.max(tl.where(size <= FLOAT32_MAX, size, 0.0), 0)
    return largest


@triton.jit
def nvfp4_scales(amax, g, EASY: tl.constexpr):
    """Of blocks with this amax: e4m3 scales, and the step of a code; 0 where a scale is 0 or NaN."""
    if EASY:
        sixth = quotient(tl.minimum(amax, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL), 6.0, 1 / 6)
    else:
        sixth = tl.div_rn(amax, 6.0)
    scales = tl.minimum(sixth * g, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    scale = scales.to(tl.float32)
    if EASY:
        step = quotient(scale, g, tl.div_rn(1.0, g))
    else:
        step = tl.div_rn(scale, g)
    return scales, tl.where(scale > 0, step, 0.0)


@triton.jit
def encode_nvfp4(values, g, WIDTH: tl.constexpr, EASY: tl.constexpr):
    """float32 `[WIDTH]`, the global scale g → e2m1 codes, eight a word, `[WIDTH / 8]`; e4m3 scales `[WIDTH / 16]`.

    `EASY` promises that g is between `SMALLEST_EASY_SCALE` and `LARGEST_EASY_SCALE`.
    """
    blocks, amax = block_amax(values, WIDTH, 16)
    scales, step = nvfp4_scales(amax, g, EASY)
    is_used = step > 0
    # A quotient that would round to minus zero does not count as negative, and nothing does in a block of zeros.
    negative = blocks < tl.where(is_used, step * -(2.0**-75) * 2.0**-75, float("-inf"))[:, None]
    if not EASY:
        lift = tl.where(g > LARGEST_EASY_SCALE, 2.0**96, tl.where(g < SMALLEST_EASY_SCALE, 2.0**-96, 1.0))
        blocks *= lift
        step *= lift
    # The rounded 1 / step, and its error: the sum of their products with a number, rounded once, is the quotient.
    near = tl.where(is_used, 1.0 / step, 0.0)
    rest = tl.fma(step, near, -1.0) * -near
    size = tl.abs(tl.fma(blocks, tl.broadcast_to(near[:, None], [WIDTH // 16, 16]), blocks * rest[:, None]))
    # A block that is not used ends at code 0, any other at 7. NaN, which Inf has become, takes that end.
    end = tl.where(is_used, 8388615.0, 8388608.0)[:, None]
    line = tl.minimum(tl.fma(size, 2.0, 8388608.0), size + 8388610.0)
    line = tl.minimum(tl.minimum(line, tl.fma(size, 0.5, 8388612.0)), end)
    codes = line.to(tl.int32, bitcast=True) + tl.where(negative, 8, 0)
    eight = tl.reshape(codes, [WIDTH // 8, 8])
    # Every summand carries the exponent of 2^23, which leaves 0xFB000000 in the sum.
    words = tl.sum(eight * (1 << (4 * tl.arange(0, 8)))[None, :], 1) + 0x05000000
    return words, scales


@triton.jit
def decode_nvfp4(words, scales, g, WIDTH: tl.constexpr):
    """e2m1 codes, eight a word, `[WIDTH / 8]`, e4m3 scales `[WIDTH / 16]`, the global scale g → float32 `[WIDTH]`."""
    codes = (words[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 15
    size = codes & 7
    # From code 2 on, the lowest bit is the mantissa's highest, and the two above it are the exponent.
    number = tl.where(size < 2, size.to(tl.float32) * 0.5, ((size + 252) << 22).to(tl.float32, bitcast=True))
    number = tl.where(codes > 7, -number, number)
    blocks = tl.reshape(number, [WIDTH // 16, 16])
    return tl.reshape(blocks * tl.div_rn(scales.to(tl.float32), g)[:, None], [WIDTH])


@triton.jit
def decode_mxfp8(codes, scales, WIDTH: tl.constexpr):
    """e4m3 `[WIDTH]`, E8M0 bytes `[WIDTH / 32]` → float32 `[WIDTH]`."""
    blocks = tl.reshape(codes.to(tl.float32), [WIDTH // 32, 32])
    return tl.reshape(blocks * e8m0_scale(scales.to(tl.int32))[:, None], [WIDTH])


@triton.jit
def decode_fp8_block(codes, scales, WIDTH: tl.constexpr):
    """e4m3 `[WIDTH]`, float32 scales `[WIDTH / 128]` → float32 `[WIDTH]`."""
    blocks = tl.reshape(codes.to(tl.float32), [WIDTH // 128, 128])
    return tl.reshape(blocks * scales[:, None], [WIDTH])
