"""Packs 4-bit weights in the order in which Hopper's tensor cores read them.

The weights are the register operand of `wgmma`: 64 outputs × 16 inputs, of which thread t = 32 w + 4 g + c of 128
holds outputs 16 w + g and 16 w + g + 8 at inputs 2 c, 2 c + 1, 2 c + 8 and 2 c + 9: eight weights, one word. A
matrix is therefore held as

    words   [outputs / 64, inputs / 64, 128 threads, 4 words]    16 bytes a thread, for 64 inputs
    scales  [outputs / 64, inputs / 128, 32 (w, g), spans, 2]    of outputs g and g + 8, for 128 inputs

and a thread decodes the words it has loaded in place: no shuffle, no shared memory. Gate and up rows alternate, 8 and
8, so that a thread has the up of its gate in its own registers. Outputs are padded to 64, inputs to 128, with zeros.

**Bits.** A 16-bit half of a word holds 4 weights, and those of both halves (neighboring inputs) are decoded together.
A signed integer is held as n = value + 8 in one nibble: with the other bits masked, the half is the bf16 number
n · 2^-133 (n · 2^-129 in the next nibble), since subnormal numbers are linear. An e2m1 code has its sign in bit 15 and
its magnitude in bits 8 to 6 of the half, some codes only after a shift: as a bf16 number this is its value · 2^-126.
Three codes need at most one shift each. The fourth needs two, whose results are combined by XOR. The XOR also mixes in
bits of other codes, which are known when words are packed: the packed bits are chosen so that they cancel (E2M1_MIXED).

**Scales** are held times the power of two that compensates these factors, except for the factor LEFT_OVER, with which
the sum is multiplied at the end. Those of integers are bf16. Those of e2m1 are bytes, the upper bits of a bf16 number
(mxfp4: its exponent; nvfp4: the last five bits of the exponent, and three of the fraction). A word holds four bytes:
those of the outputs (g, g + 8) of one span where a mask extracts them, and those of the next span, rotated by 8 bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.formats import QuantizedMatrix, weight_format

OUTPUTS, INPUTS = 64, 128  # matrices are padded to multiples of these
SPARE = 4 * OUTPUTS  # lines after the last matrix, which a block of outputs may read
LEFT_OVER = 2.0**20

# The positions of a weight's four bits in a word, from its sign to its last bit, for the four weights of the lower
# half, by (input + 8?) · 2 + (output + 8?). Those of the upper half are 16 bits higher, modulo 32.
INT4_BITS = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))
E2M1_BITS = ((15, 8, 7, 6), (9, 2, 1, 0), (19, 12, 11, 10), (13, 14, 5, 4))
# The shifts that bring e2m1 codes to bits 15 and 8 to 6: none, left, rotate left, and both left and right.
E2M1_SECOND, E2M1_THIRD, E2M1_FOURTH = 6, 28, (2, 6)
# Bits of the fourth codes, each with the bit that the other shift brings to the same position, in packing order.
E2M1_MIXED = ((21, 29), (13, 21), (5, 13), (4, 12), (20, 28), (14, 6), (30, 22))
# The bits of the fourth codes that XOR with the word, shifted right by this, restores.
E2M1_UNMIXED, E2M1_UNMIXING = 0x20702070, 8
# The exponents of the powers of two that scales are multiplied with: for integers, of outputs g and g + 8; for e2m1,
# of both.
INT4_POWERS, E2M1_POWER = (113, 109), 106
# The largest scale that can be held.
LARGEST_SCALE = {"mxint4": 2.0**12, "mxfp4": 2.0**20, "nvfp4": 2.0**20}
# The lowest bit of a scale's byte in the bf16 number of output g; and the upper bits that all exponents of nvfp4 share.
SCALE_SHIFT, NVFP4_EXPONENT = {"mxfp4": 7, "nvfp4": 4}, 0x7000
# The byte that holds each e4m3 scale, by its code. Scales below 2^-6 are normalized. Zero is held as another scale's
# byte, since the codes of its span are set to zero.
NVFP4_BYTES = (143, 0, 8, 12, 16, 18, 20, 22, *range(24, 143))

# The e4m3 codes of the eight magnitudes of e2m1 at a line's largest scale, as bytes of two words; and what doubling the
# scale adds to each. (The code of zero stays.)
LARGEST_CODES, CODE_FACTORS = (0x6C686000, 0x7C787470), (0x08080800, 0x08080808)
# The largest code is that of 6 · 2^CODES_RAISED; a scale that is smaller than the largest by up to 2^CODE_RANGE gives
# normal numbers of e4m3.
CODES_RAISED, CODE_RANGE = 6, 11

# The places of the eight weights of a word: (half of the word, input + 8?, output + 8?).
_PLACES = tuple(itertools.product(range(2), repeat=3))


@dataclass(frozen=True)
class PackedMatrix:
    """Matrices `[L, N, D]` of a 4-bit format, packed."""

    format: str
    shape: tuple[int, ...]
    gated: bool
    interleaved: bool
    words: Tensor
    scales: Tensor
    global_scale: Tensor | None
    global_factor: Tensor | None


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple.

    >>> padded(2880, INPUTS)
    2944
    """
    return -(-size // multiple) * multiple


def output_order(outputs: int, *, gated: bool, interleaved: bool) -> Tensor:
    """The output that each line of a packed matrix holds; -1 in the pad.

    >>> output_order(32, gated=True, interleaved=False)[:20].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23, 8, 9, 10, 11]
    """
    lines = torch.arange(padded(outputs, OUTPUTS))
    if not gated:
        return torch.where(lines < outputs, lines, -1)
    column, half, columns = lines // 16 * 8 + lines % 8, lines // 8 % 2, outputs // 2
    output = 2 * column + half if interleaved else half * columns + column
    return torch.where(column < columns, output, -1)


def code_order(width: int) -> Tensor:
    """The order of the inputs of rows for `kernels.packed_codes`: permuted within each 16.

    >>> code_order(16).tolist()
    [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    """
    return torch.arange(width).view(-1, 2, 8).transpose(1, 2).flatten()


def largest_scales(matrix: QuantizedMatrix, *, gated: bool, interleaved: bool) -> Tensor | None:
    """For each line of packed mxfp4 matrices, the byte of its largest scale: int32 `[L, lines + spare]`.

    None, if a line has a scale that is smaller than its largest by more than 2^11, so that e4m3 would have to round.
    """
    order = output_order(matrix.shape[1], gated=gated, interleaved=interleaved).to(matrix.device)
    held = torch.full((matrix.shape[0], len(order)), 127, dtype=torch.int32, device=matrix.device)
    for expert, lines in enumerate(held):
        codes, byte = (matrix.payloads[name][expert] for name in ("data", "scales"))
        byte, is_zero = byte.to(torch.int32), (codes & 0x77).view(*byte.shape, -1).amax(-1) == 0
        largest = byte.masked_fill(is_zero, 0).amax(-1)
        smallest = byte.masked_fill(is_zero, 255).amin(-1)
        if bool((largest - smallest > CODE_RANGE).any()):
            return None
        lines[order >= 0] = largest[order[order >= 0]]
    return functional.pad(held.flatten(), (0, SPARE), value=127)


def can_pack(matrix: QuantizedMatrix) -> bool:
    """Whether the packed form can hold every scale, as it can those of usual weights."""
    largest = LARGEST_SCALE[matrix.format.name]
    for expert in range(matrix.shape[0]):
        scales = _scales_of(matrix[expert])
        if matrix.format.name == "nvfp4" and bool(scales.signbit().any()):
            return False
        if not bool((scales.abs() <= largest).all()):
            return False
    return True


def sizes(format: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, int]]:
    """The dtype and the number of elements of the two buffers that hold packed matrices `[L, N, D]`, by name.

    >>> sizes("mxfp4", (2, 64, 128))
    {'words': (torch.int32, 6144), 'word_scales': (torch.int32, 384)}
    """
    experts, outputs, inputs = shape
    elements = (experts * padded(outputs, OUTPUTS) + SPARE) * padded(inputs, INPUTS)
    kept, each = (torch.bfloat16, 1) if format == "mxint4" else (torch.int32, 4)
    return {
        "words": (torch.int32, elements // 8),
        "word_scales": (kept, elements // (each * weight_format(format).block)),
    }


def pack(matrix: QuantizedMatrix, *, gated: bool, interleaved: bool) -> PackedMatrix:
    """Pack matrices `[L, N, D]`, one after the other. The codes of spans of nvfp4 whose scale is zero become zeros."""
    words, scales = (
        torch.zeros(size, dtype=dtype, device=matrix.device)
        for dtype, size in sizes(matrix.format.name, matrix.shape).values()
    )
    others = (matrix.payloads.get(name) for name in ("global_scale", "global_factor"))
    packed = PackedMatrix(matrix.format.name, matrix.shape, gated, interleaved, words, scales, *others)
    pack_into(matrix, packed)
    return packed


def pack_into(matrix: QuantizedMatrix, packed: PackedMatrix) -> None:
    """Write the packed matrices into the words and scales of `packed`, one expert after the other, on their device."""
    experts, outputs, inputs = matrix.shape
    device, width = packed.words.device, padded(inputs, INPUTS)
    order = output_order(outputs, gated=packed.gated, interleaved=packed.interleaved).to(device)
    for expert in range(experts):
        one = matrix[expert]
        one = replace(one, payloads={name: payload.to(device) for name, payload in one.payloads.items()})
        _of_expert(packed.words, packed.shape, expert).copy_(_words(one, order, width))
        _of_expert(packed.scales, packed.shape, expert).copy_(_held_scales(one, order, width))


def per_matrix(packed: Tensor, experts: int, outputs: int) -> int:
    """The number of elements of a packed buffer (words or scales) that belong to each expert."""
    lines = padded(outputs, OUTPUTS)
    return packed.numel() * lines // (experts * lines + SPARE)


def _of_expert(packed: Tensor, shape: tuple[int, ...], expert: int) -> Tensor:
    """The part of a packed buffer (words or scales) that belongs to one expert, as a view."""
    each = per_matrix(packed, *shape[:2])
    return packed[expert * each : (expert + 1) * each]


def unpack(packed: PackedMatrix, device: torch.device | None = None) -> dict[str, Tensor]:
    """The payloads `data` and `scales` of packed matrices, exactly, except for codes whose scale is zero.

    They are made on `device`, one expert after the other, so that the device of the packed matrices needs memory for
    one expert only.
    """
    experts, outputs, inputs = packed.shape
    declared = weight_format(packed.format).payloads(outputs, inputs)
    device = packed.words.device if device is None else device
    found = {
        name: torch.empty(experts, *declared[name].shape, dtype=declared[name].dtype, device=device)
        for name in ("data", "scales")
    }
    order = output_order(outputs, gated=packed.gated, interleaved=packed.interleaved).to(packed.words.device)
    real = order >= 0
    for expert in range(experts):
        data, scales = (found[name][expert] for name in ("data", "scales"))
        by_line = _codes_by_line(packed, expert)
        codes = by_line.new_empty(outputs, by_line.shape[1])
        codes[order[real]] = by_line[real]
        codes = codes[:, : 2 * data.shape[1]]
        data.copy_(codes[:, 0::2] | codes[:, 1::2] << 4)
        by_line = _scales_by_line(packed, expert)
        by_output = by_line.new_empty(outputs, by_line.shape[1])
        by_output[order[real]] = by_line[real]
        (scales.view(torch.uint8) if packed.format == "nvfp4" else scales).copy_(
            by_output[:, : scales.shape[1]]
        )
    return found


def _bit_places(format: str, half: int, kh: int, h: int) -> list[int]:
    """The positions of a weight's bits in its word, from the sign to the last bit."""
    return [
        (place + 16 * half) % 32 for place in (INT4_BITS if format == "mxint4" else E2M1_BITS)[2 * kh + h]
    ]


def _codes_by_line(packed: PackedMatrix, expert: int) -> Tensor:
    """The codes of one packed matrix, line by line, pads included."""
    format, width = packed.format, padded(packed.shape[2], INPUTS)
    w = _of_expert(packed.words, packed.shape, expert).view(-1, width // 64, 4, 8, 4, 4)
    if format != "mxint4":
        for place, other in reversed(E2M1_MIXED):
            w = w ^ (w >> other & 1) << place
    n = torch.empty(*w.shape, 2, 2, 2, dtype=torch.uint8, device=w.device)
    for half, kh, h in _PLACES:
        places = _bit_places(format, half, kh, h)
        code = sum((w >> place & 1) << (3 - nth) for nth, place in enumerate(places))
        n[..., half, kh, h] = code ^ 8 if format == "mxint4" else code
    n = n.permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return n.reshape(-1, width)


def _words(matrix: QuantizedMatrix, order: Tensor, width: int) -> Tensor:
    byte = matrix.payloads["data"]
    codes = torch.stack([byte & 15, byte >> 4], -1).flatten(-2)
    is_integer = matrix.format.name == "mxint4"
    if is_integer:
        codes = codes ^ 8
    elif matrix.format.name == "nvfp4":
        is_zero = matrix.payloads["scales"].float() == 0
        codes = codes.masked_fill(is_zero.repeat_interleave(matrix.format.block, -1), 0)
    nothing = 8 if is_integer else 0
    held = torch.full((len(order), width), nothing, dtype=torch.uint8, device=byte.device)
    real = order >= 0
    held[real, : codes.shape[1]] = codes[order[real]]
    # u w h g | chunk q kh c kl: block, warp, output + 8?, output; 64 inputs, 16, input + 8?, pair, which of the two
    n = held.view(-1, 4, 2, 8, width // 64, 4, 2, 4, 2)
    # u chunk w g c q | kl kh h
    n = n.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)
    w = torch.zeros(n.shape[:6], dtype=torch.int32, device=n.device)
    for half, kh, h in _PLACES:
        for nth, place in enumerate(_bit_places(matrix.format.name, half, kh, h)):
            w |= (n[..., half, kh, h] >> (3 - nth) & 1).int() << place
    if not is_integer:
        for place, other in E2M1_MIXED:
            w ^= (w >> other & 1) << place
    return w.flatten()


def _scales_of(matrix: QuantizedMatrix) -> Tensor:
    """The scales of all spans as float32, without the global scale."""
    scales = matrix.payloads["scales"]
    if matrix.format.name != "mxfp4":
        return scales.float()
    byte = scales.to(torch.int32)
    found = torch.where(byte == 0, 0x00400000, byte << 23).view(torch.float32)
    return torch.where(byte == 255, torch.nan, found)


def _held_scales(matrix: QuantizedMatrix, order: Tensor, width: int) -> Tensor:
    """The scales of one matrix in packed form: bf16 numbers, or words of four bytes."""
    format, span = matrix.format.name, matrix.format.block
    if format == "mxint4":
        found = matrix.payloads["scales"].double()
    elif format == "mxfp4":
        found = matrix.payloads["scales"].to(torch.int64) + E2M1_POWER
    else:
        bits = matrix.payloads["scales"].view(torch.uint8).to(torch.int64)
        found = torch.tensor(NVFP4_BYTES, device=bits.device)[bits]
    held = found.new_zeros(len(order), width // span)
    real = order >= 0
    held[real, : found.shape[1]] = found[order[real]]
    # u w h g | step span  →  u step w g span h
    held = held.view(-1, 4, 2, 8, width // INPUTS, INPUTS // span).permute(0, 4, 1, 3, 5, 2)
    if format == "mxint4":
        return (held * _int4_factors(held.device)).to(torch.bfloat16).flatten()
    shift = SCALE_SHIFT[format]
    pairs = held[..., 0] << shift | held[..., 1] << (shift + 16)
    first, second = pairs[..., 0::2], pairs[..., 1::2]
    return (first | second >> 8 | (second & 0xFF) << 24).to(torch.int32).flatten()


def _scales_by_line(packed: PackedMatrix, expert: int) -> Tensor:
    """The scales of one packed matrix, line by line: numbers of mxint4, or the codes of mxfp4 and nvfp4 scales."""
    format, span = packed.format, weight_format(packed.format).block
    lines, width = padded(packed.shape[1], OUTPUTS), padded(packed.shape[2], INPUTS)
    held = _of_expert(packed.scales, packed.shape, expert)
    if format != "mxint4":
        word, shift = held.to(torch.int64) & 0xFFFFFFFF, SCALE_SHIFT[format]
        pairs = torch.stack([word, word << 8 | word >> 24], -1)
        held = torch.stack([pairs >> shift & 0xFF, pairs >> (shift + 16) & 0xFF], -1)
    held = held.view(-1, width // INPUTS, 4, 8, INPUTS // span, 2).permute(0, 2, 5, 3, 1, 4)
    if format == "mxint4":
        return (held.double() / _int4_factors(held.device)[:, None, None, None]).reshape(lines, -1)
    if format == "mxfp4":
        return held.reshape(lines, -1) - E2M1_POWER
    bits = [NVFP4_BYTES.index(byte) if byte in NVFP4_BYTES else 0 for byte in range(256)]
    return torch.tensor(bits, dtype=torch.uint8, device=held.device)[held.reshape(lines, -1)]


def _int4_factors(device: torch.device) -> Tensor:
    """The factors with which the scales of outputs g and g + 8 are held."""
    return torch.tensor([2.0**power for power in INT4_POWERS], dtype=torch.float64, device=device)
