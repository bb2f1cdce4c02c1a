"""mxfp8 and mxfp4 weights as blocks of e4m3, which tensor cores multiply as they are.

Both formats have a scale for 32 inputs of an output (a span), while products of e4m3 are scaled once in 128 inputs. A
recoded matrix is therefore held in `fp8_block128`, with a scale for 128 outputs × 128 inputs: the largest scale of the
block's spans that are not all zero. All scales are powers of two: the codes of a span whose scale is smaller by 2^d are
multiplied by 2^-d.

    data    e4m3     [N, P]                  P is the number of inputs rounded up to 32; zeros behind the last
    scales  float32  [⌈N/128⌉, ⌈P/128⌉]      2^(b-127)

**What is lost.** e4m3 has four significant bits down to 2^-6 and steps of 2^-9 below. Numbers below 2^-6 times their
block's scale are rounded, to the nearest, and change by at most 2^-10 times the scale. Since codes reach 448, this is
2^-18 of the largest number that the block may hold. If all scales of a block are equal, nothing is rounded.

Codes of mxfp4 reach 6. They are held times 2^6, with a block scale that is smaller by this factor. They have two
significant bits, so they are rounded only where the scales of one block differ by more than 2^14. mxfp4 weights stay
packed (`packing`). They are expanded to blocks for calls with many rows (`kernels.expanding`), and only the scales of
the blocks are kept.

**The guarantee.** Weights are recoded only if no line (an output of an expert) changes by more than 2^-12 of its
length, in L2, and if they are numbers: no NaN among scales and codes, no scale beyond 2^100. Gaussian weights change by
about 2^-20. A matrix that was recoded and given back is recoded to the same bits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.formats import QuantizedMatrix, e2m1_to_float32, weight_format

BLOCK, SPAN = 128, 32
# The largest relative change of a line, in L2.
LARGEST_CHANGE = 2.0**-12
# The largest scale, as an E8M0 byte: with larger ones, a product of e4m3 times its scale might overflow.
LARGEST_BYTE = 127 + 100
_NAN_BYTE = 255
# Codes are held times 2^this, scales times 2^-this. Block scales have at least the smallest byte, so that 1 / scale
# is finite.
_RAISED = {"mxfp8": 0, "mxfp4": 6}
_SMALLEST_BYTE = {"mxfp8": 0, "mxfp4": 60}
# Every code is rounded to zero after this many halvings.
_MOST_HALVINGS = 24
# The number of weights that are recoded at a time, rounded to whole blocks of outputs, at least one.
_AT_A_TIME = 1 << 23


class _Lines(NamedTuple):
    """Some whole blocks of outputs of one matrix, while they are recoded."""

    first: int
    values: Tensor  # float32 [n, spans, 32]: the numbers of the old codes, without their scales
    bytes: Tensor  # int32 [n, spans]: the E8M0 bytes of the spans' scales
    levels: Tensor  # int32 [n, spans]: `bytes`, but 0 for a span of zeros
    block_bytes: Tensor  # int32 [blocks of outputs, blocks of inputs]: the largest of their levels
    halvings: Tensor  # int32 [n, spans]: how often the codes of a span are halved
    raised: int  # as in `_RAISED`

    @property
    def block_scales(self) -> Tensor:
        """The scales of blocks, float32."""
        return _scale_of(self.block_bytes - self.raised)

    @property
    def codes(self) -> Tensor:
        """The new codes, e4m3 `[n, spans, 32]`."""
        return (self.values * _power_of_two(-self.halvings).unsqueeze(-1)).to(torch.float8_e4m3fn)

    def is_close(self) -> Tensor:
        """Whether all of these lines are recoded within the guarantee, as a bool tensor on the device."""
        # In units of the largest scale of a line, so that squares neither overflow nor underflow.
        unit = _power_of_two((self.bytes - self.levels.amax(1, keepdim=True)).clamp(max=0)).unsqueeze(-1)
        found = self.codes.float() * _power_of_two(self.halvings).unsqueeze(-1)
        changes = ((found - self.values) * unit).square().sum((1, 2))
        length = (self.values * unit).square().sum((1, 2))
        # A comparison with NaN is False.
        close = (changes <= LARGEST_CHANGE**2 * length).all()
        return close & (self.levels <= LARGEST_BYTE).all() & (self.bytes != _NAN_BYTE).all()


def can_recode(matrix: QuantizedMatrix, device: torch.device | None = None) -> bool:
    """Whether matrices `[L, N, D]` can be recoded within the guarantee; computed on `device`."""
    device = matrix.device if device is None else device
    fine = torch.ones((), dtype=torch.bool, device=device)
    for expert in range(matrix.shape[0]):
        for lines in _lines_of(matrix[expert], device):
            fine &= lines.is_close()
    return bool(fine)


def recode(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """mxfp8 or mxfp4 matrices `[L, N, D]` as `fp8_block128` ones, as wide as their data.

    >>> format = weight_format("mxfp8")
    >>> matrix = format.quantize(torch.cat([torch.full((1, 1, 32), 448.0), torch.full((1, 1, 32), 0.3)], 2))
    >>> blocks = recode(matrix)
    >>> matrix.payloads["scales"].tolist(), blocks.payloads["scales"].tolist()
    ([[[127, 117]]], [[[1.0]]])
    >>> torch.equal(blocks.decode(), matrix.decode())
    True
    """
    blocks = empty_blocks(matrix.shape, matrix.device)
    recode_into(matrix, blocks)
    return blocks


def empty_blocks(shape: tuple[int, ...], device: torch.device) -> QuantizedMatrix:
    """Uninitialized `fp8_block128` matrices for the recoded ones of a shape `[L, N, D]`."""
    experts, outputs, inputs = shape
    format, width = weight_format("fp8_block128"), weight_format("mxfp8").padded_size(inputs)
    payloads = {
        name: torch.empty((experts, *declared.shape), dtype=declared.dtype, device=device)
        for name, declared in format.payloads(outputs, width).items()
    }
    return QuantizedMatrix(format=format, shape=(experts, outputs, width), payloads=payloads)


def recode_into(matrix: QuantizedMatrix, blocks: QuantizedMatrix) -> None:
    """Write the recoded matrices into the payloads of `blocks`, on their device, a few lines at a time."""
    for expert in range(matrix.shape[0]):
        data, scales = blocks.payloads["data"][expert], blocks.payloads["scales"][expert]
        for lines in _lines_of(matrix[expert], blocks.device):
            codes = lines.codes.flatten(1)
            data[lines.first : lines.first + len(codes)].copy_(codes)
            at = lines.first // BLOCK
            scales[at : at + len(lines.block_bytes)].copy_(lines.block_scales)


def block_scales(matrix: QuantizedMatrix, device: torch.device) -> Tensor:
    """Only the scales of the matrices that `recode` gives: float32 `[L, ⌈N/128⌉, ⌈P/128⌉]`."""
    return torch.stack(
        [
            torch.cat([lines.block_scales for lines in _lines_of(matrix[expert], device)])
            for expert in range(matrix.shape[0])
        ]
    )


def give_back(blocks: QuantizedMatrix, device: torch.device | None = None) -> dict[str, Tensor]:
    """The mxfp8 payloads of the same numbers, as copies: the recoded codes, and for each span its block's scale.

    They are made on `device`, one expert after the other.

    >>> matrix = weight_format("mxfp8").quantize(torch.tensor([[[448.0] * 32 + [0.25] * 8]]))
    >>> matrix.payloads["scales"].tolist(), give_back(recode(matrix))["scales"].tolist()
    ([[[127, 117]]], [[[127, 127]]])
    """
    experts, outputs, width = blocks.shape
    device = blocks.device if device is None else device
    data = blocks.payloads["data"].to(device, copy=True)
    scales = torch.empty(experts, outputs, width // SPAN, dtype=torch.uint8, device=device)
    for expert in range(experts):
        block_bytes = (blocks.payloads["scales"][expert].view(torch.int32) >> 23).to(torch.uint8)
        by_line = block_bytes.repeat_interleave(BLOCK, 0)[:outputs]
        scales[expert] = by_line.repeat_interleave(BLOCK // SPAN, 1)[:, : width // SPAN]
    return {"data": data, "scales": scales}


def _scale_of(byte: Tensor) -> Tensor:
    """2^(byte - 127) of bytes below 255: that of 0 is a subnormal number."""
    return torch.where(byte == 0, 0x00400000, byte << 23).view(torch.float32)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for exponents up to 127; 0 where float32 has no normal number for it."""
    return ((exponent + 127).clamp(min=0) << 23).view(torch.float32)


def _lines_of(matrix: QuantizedMatrix, device: torch.device) -> Iterator[_Lines]:
    """Iterate over one matrix `[N, D]`, some blocks of outputs at a time, on `device`."""
    (outputs, inputs), format = matrix.shape, matrix.format.name
    data, scales, raised = matrix.payloads["data"], matrix.payloads["scales"], _RAISED[format]
    step = max(1, _AT_A_TIME // (BLOCK * inputs)) * BLOCK
    for first in range(0, outputs, step):
        codes, byte = (part[first : first + step].to(device) for part in (data, scales))
        values = e2m1_to_float32(codes) * 2.0**raised if format == "mxfp4" else codes.float()
        values[:, inputs:] = 0.0
        values = values.unflatten(1, (-1, SPAN))
        byte = byte.to(torch.int32)
        levels = torch.where(values.abs().amax(-1) != 0, byte, 0)
        lines, spans = levels.shape
        whole = functional.pad(levels, (0, -spans % (BLOCK // SPAN), 0, -lines % BLOCK))
        block_bytes = whole.unflatten(1, (-1, BLOCK // SPAN)).unflatten(0, (-1, BLOCK)).amax((1, 3))
        block_bytes = block_bytes.clamp(min=_SMALLEST_BYTE[format])
        by_span = block_bytes.repeat_interleave(BLOCK, 0)[:lines].repeat_interleave(BLOCK // SPAN, 1)
        halvings = (by_span[:, :spans] - byte).clamp(0, _MOST_HALVINGS)
        yield _Lines(first, values, byte, levels, block_bytes, halvings, raised)
