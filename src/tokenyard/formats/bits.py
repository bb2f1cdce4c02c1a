"""Conversions from and to the small number types, on their bits: E8M0 scales, e2m1, int4 and e4m3 elements.

The reference implementations of these formats disagree in corner cases, mostly because they use `log2`, or a
cast whose overflow changed between versions of torch. Here everything is computed on the bits of float32, so
that one rule holds on every device, and a GPU kernel can give bitwise equal results.

    E8M0   one byte b, the scale 2^(b-127); no zero, no sign; 255 is NaN
    e2m1   0, .5, 1, 1.5, 2, 3, 4, 6 as codes 0 to 7, the sign in bit 3; two codes a byte, low nibble first
    int4   -8 to 7, two's complement; two a byte, low nibble first
    e4m3   `torch.float8_e4m3fn`: up to 448, no Inf

Traps:

- Byte 0 of E8M0 is 2^-127, which is a *subnormal* float32: shifting the byte into the exponent gives 0.
- `ceil(log2(x))` is wrong just above a power of two, where `log2` rounds down to it.
- float32 → e4m3 over 448 is NaN on torch 2.11 and 448 on 2.13: clamp before every cast.
- torch has no cast to or from its 4-bit type: codes are uint8.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FLOAT32_MAX = torch.finfo(torch.float32).max
E4M3_NAN_CODE = 0x7F
E8M0_NAN = 255
E8M0_LARGEST = 254

_MANTISSA_BITS = 23
_EXPONENT_MASK = 0x7F800000
_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_TWO_TO_MINUS_127_BITS = 0x00400000


def some(mask: Tensor) -> bool:
    """Whether any element of a mask may be true. Always True on a GPU, where reading the mask would synchronize.

    >>> some(torch.tensor([False, True])), some(torch.tensor([False]))
    (True, False)
    """
    return mask.device.type != "cpu" or bool(mask.any())


def _all_between(bits: Tensor, low: int, high: int) -> bool:
    """Whether all bits are above `low` and below `high`, so that corner cases need no masks. Always False on a GPU."""
    if bits.device.type != "cpu" or not bits.numel():
        return False
    smallest, largest = bits.aminmax()
    return low < int(smallest) and int(largest) < high


def constant(number: float, device: torch.device) -> Tensor:
    """A number as a float32 tensor without dimensions, for divisions that must round only once.

    torch computes `tensor / number` as a product with 1/number on CUDA, and `number / tensor` as one with
    the reciprocal everywhere. That rounds twice, and a few percent of the results are off by a bit. The tensor
    is filled on the device, because a copy from the host would break the capture of a CUDA graph.

    >>> seven = torch.tensor(7.0)
    >>> (2688.0 / seven).item(), (constant(2688.0, seven.device) / seven).item()
    (384.0000305175781, 384.0)
    """
    return torch.full((), number, dtype=torch.float32, device=device)


def e8m0_from_amax(amax: Tensor, largest: float = E4M3_MAX) -> Tensor:
    """The byte of the smallest scale 2^(b-127) with `amax / scale ≤ largest`, for float32 `amax ≥ 0`.

    448 fits scale 1 (byte 127), the next float32 needs 2. Zero and underflow give byte 0, Inf 254, NaN 255.

    >>> e8m0_from_amax(torch.tensor([448.0, 448.00003, 1.0, 0.0, float("inf"), float("nan")])).tolist()
    [127, 128, 119, 0, 254, 255]
    """
    bits = (amax / constant(largest, amax.device)).view(torch.int32)
    # The exponent, plus one if any mantissa bit is set.
    byte = (bits + ((1 << _MANTISSA_BITS) - 1)) >> _MANTISSA_BITS
    if not _all_between(bits, _TWO_TO_MINUS_127_BITS, _INF_BITS):
        byte.masked_fill_(bits <= _TWO_TO_MINUS_127_BITS, 0)  # 2^-127 is a subnormal float32
        byte.masked_fill_(bits == _INF_BITS, E8M0_LARGEST).masked_fill_(bits > _INF_BITS, E8M0_NAN)
    return byte.to(torch.uint8)


def e8m0_from_rounded_amax(amax: Tensor) -> Tensor:
    """The byte of e2m1's scale 2^(b-127) by the rule "even", for float32 `amax ≥ 0`.

    It is the exponent of amax, rounded to e2m1's one bit of mantissa, less that of 6, e2m1's largest: 6.9 rounds
    to 6 and needs scale 1, 7 rounds to 8 and needs 2. Zero and underflow give byte 0, Inf 254, NaN 255.

    >>> e8m0_from_rounded_amax(torch.tensor([6.9, 7.0, 1.0, 0.0, float("inf"), float("nan")])).tolist()
    [127, 128, 125, 0, 254, 255]
    """
    bits = amax.view(torch.int32)
    # Adding half of the kept mantissa bit rounds to it. Then 2, the exponent of 6, is subtracted.
    byte = ((bits + (1 << (_MANTISSA_BITS - 2))) >> _MANTISSA_BITS).sub_(2).clamp_(min=0)
    byte.masked_fill_(bits == _INF_BITS, E8M0_LARGEST).masked_fill_(bits > _INF_BITS, E8M0_NAN)
    return byte.to(torch.uint8)


def e8m0_to_float32(byte: Tensor) -> Tensor:
    """The scales 2^(b-127) of E8M0 bytes, as float32.

    >>> e8m0_to_float32(torch.tensor([127, 130, 255], dtype=torch.uint8))
    tensor([1., 8., nan])
    >>> e8m0_to_float32(torch.tensor([0], dtype=torch.uint8)).item() == 2.0**-127
    True
    """
    bits = byte.to(torch.int32) << _MANTISSA_BITS
    if not _all_between(bits, 0, _INF_BITS):
        bits.masked_fill_(byte == 0, _TWO_TO_MINUS_127_BITS).masked_fill_(byte == E8M0_NAN, _NAN_BITS)
    return bits.view(torch.float32)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """One over the scales of E8M0 bytes, 2^(127-b): exact, so that multiplying equals dividing.

    >>> e8m0_reciprocal(torch.tensor([127, 130, 255], dtype=torch.uint8))
    tensor([1.0000, 0.1250,    nan])
    """
    # 254 - b wraps to 255 for b = 255: NaN stays NaN.
    return e8m0_to_float32(E8M0_LARGEST - byte)


def power_of_two_at_least(scale: Tensor) -> Tensor:
    """2^ceil(log2(scale)) of positive *normal* float32 numbers, computed on their bits; NaN stays NaN.

    >>> power_of_two_at_least(torch.tensor([1.0, 1.0000001, 3.0]))
    tensor([1., 2., 4.])
    """
    bits = (scale.view(torch.int32) + (1 << _MANTISSA_BITS) - 1) & _EXPONENT_MASK
    return bits.masked_fill_(scale.isnan(), _NAN_BITS).view(torch.float32)


def e4m3_to_float32(codes: Tensor) -> Tensor:
    """e4m3 elements as float32 numbers.

    >>> e4m3_to_float32(torch.tensor([1.0, -0.5, 448.0]).to(torch.float8_e4m3fn))
    tensor([  1.0000,  -0.5000, 448.0000])
    """
    if codes.device.type != "cpu":
        return codes.float()
    # A table: 1.1 ns per element on one core, where the cast of torch 2.13 takes 4.2.
    index = codes.reshape(-1).view(torch.uint8).to(torch.int32)
    return torch.index_select(_e4m3_table(), 0, index).view(codes.shape)


@functools.cache
def _e4m3_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def e2m1_codes_(values: Tensor, spare: Tensor, spare2: Tensor) -> Tensor:
    """Round float32 numbers to e2m1: nearest, ties to even, saturating at ±6. Returns int8, one code per element.

    All arguments are overwritten, and the codes lie in the memory of `values`; there must be no NaN. A
    negative number that rounds to zero gets code 8 (minus zero), an exact ±0 gets code 0: that is what
    compressed-tensors does.

    >>> v = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, 9.0, -0.1, -0.0]])
    >>> e2m1_codes_(v, torch.empty_like(v), torch.empty_like(v)).tolist()
    [[0, 2, 2, 4, 4, 6, 6, 15, 7, 8, 0]]
    """
    values += 0.0  # -0.0 becomes 0.0
    sign_bits, bits, step_bits = (t.view(torch.int32) for t in (values, spare, spare2))
    torch.bitwise_and(sign_bits, 0x7FFFFFFF, out=bits)
    spare.clamp_(max=E2M1_MAX)
    # With 2^e ≤ max(|v|, 1) < 2^(e+1), two neighbors of e2m1 are 2^(e-1) apart. Adding 2^(e+22), whose own
    # last bit is worth just that, makes the adder round |v| to it: once, nearest, ties to even. The last
    # bits of the sum then count the steps k, and the code is k + 2e.
    torch.clamp(spare, min=1.0, out=spare2)
    step_bits &= _EXPONENT_MASK
    step_bits += 22 << _MANTISSA_BITS
    spare += spare2
    step_bits >>= _MANTISSA_BITS - 1  # 2 (e + 127 + 22)
    bits += step_bits
    sign_bits >>= 28
    sign_bits &= 8
    bits += sign_bits  # the code + 298, of which the low byte is the code + 42
    codes = values.view(-1).view(torch.int8)[: values.numel()].view(values.shape)
    codes.copy_(bits)
    codes -= 42
    return codes


def pack_nibbles_(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes (int8, 0 to 15) along the last dimension into bytes, low nibble first.

    `codes` is overwritten. The result is int16, whose low byte holds the two codes: copy it to uint8.

    >>> packed = pack_nibbles_(torch.tensor([[1, 2, 15, 8]], dtype=torch.int8)).to(torch.uint8)
    >>> [hex(byte) for byte in packed[0].tolist()]
    ['0x21', '0x8f']
    """
    pairs = codes.view(torch.int16)  # little endian: 0x0H0L, the first code of a pair is L
    pairs *= 0x11  # 0xHHLL, whose middle byte is 0xHL
    pairs >>= 4
    return pairs


def e2m1_to_float32(packed: Tensor) -> Tensor:
    """Packed e2m1 codes as float32 numbers, two for each byte along the last dimension.

    >>> e2m1_to_float32(torch.tensor([[0x21, 0x8F]], dtype=torch.uint8))
    tensor([[ 0.5000,  1.0000, -6.0000, -0.0000]])
    """
    return _look_up_pairs(_e2m1_pairs(), packed) if packed.device.type == "cpu" else _e2m1_by_bits(packed)


def _e2m1_by_bits(packed: Tensor) -> Tensor:
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    # Shifted by 22, the three bits of a magnitude are the low end of float32's exponent and the high end of its
    # mantissa; the factor 2^126 corrects the bias. Code 1 becomes a subnormal float32: exact, but slow on a CPU.
    magnitudes = ((codes & 7) << 22).view(torch.float32) * 2.0**126
    return torch.where(codes > 7, -magnitudes, magnitudes).view(shape)


@functools.cache
def _e2m1_pairs() -> Tensor:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return _pair_table(magnitudes + [-m for m in magnitudes])


def int4_to_float32(packed: Tensor) -> Tensor:
    """Packed signed 4-bit integers as float32 numbers, two for each byte along the last dimension.

    >>> int4_to_float32(torch.tensor([[0x21, 0x8F]], dtype=torch.uint8))
    tensor([[ 1.,  2., -1., -8.]])
    """
    return _look_up_pairs(_int4_pairs(), packed) if packed.device.type == "cpu" else _int4_by_bits(packed)


def _int4_by_bits(packed: Tensor) -> Tensor:
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    return ((codes ^ 8) - 8).float().view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _int4_pairs() -> Tensor:
    return _pair_table([float((code ^ 8) - 8) for code in range(16)])


def _pair_table(values: list[float]) -> Tensor:
    """The two float32 numbers of each byte, viewed as one int64, which torch copies as a whole."""
    pairs = torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)])
    return pairs.view(torch.int64).view(-1)


def _look_up_pairs(table: Tensor, packed: Tensor) -> Tensor:
    # Takes 0.5 ns per element on one core, and 1.8 ns if an entry is two float32 numbers.
    pairs = torch.index_select(table, 0, packed.reshape(-1).to(torch.int32))
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])
