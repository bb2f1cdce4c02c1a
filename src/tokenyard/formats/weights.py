"""The formats that hold weights, and the registry that finds them by name.

    format        data                     scales                        global_scale
    bf16 …        the plain tensor
    fp8_block128  e4m3  [N, D]             float32 [⌈N/128⌉, ⌈D/128⌉]
    mxfp8         e4m3  [N, P]             E8M0    [N, P / 32]
    nvfp4         e2m1  [N, P / 2] uint8   e4m3    [N, P / 16]           float32 [2], and global_factor
    mxfp4         e2m1  [N, P / 2] uint8   E8M0    [N, P / 32]
    mxint4        int4  [N, P / 2] uint8   bf16    [N, P / 32]

P is D rounded up to whole blocks. A byte holds two 4-bit codes, low nibble first along D. Where a format is also one
of rows, weights are encoded by the same rule as rows, except that

- fp8_block128 has a scale per block of 128 outputs × 128 inputs (and no pad: what DeepSeek's checkpoints hold);
- nvfp4 has one global scale per matrix, `2688 / amax`, since all weights are known when they are quantized. It is
  held once for each half of the outputs, because some checkpoints quantize gate and up, the halves of w13, separately.
  Beside it a factor is held, which is 1 for weights quantized here. Some checkpoints store the reciprocal,
  `amax / 2688`, as this factor: dividing by its rounded inverse instead would give other numbers.

mxfp4 and mxint4 are formats of weights only; rows do not travel in them.

mxfp4: value = e2m1 · 2^(b-127). The byte is the exponent of amax, rounded to one bit of mantissa, less 2
(`scale_rule="even"`, as torchao and compressed-tensors have it), or that of the smallest power of two with
amax / scale ≤ 6 (`"ceil"`, as ModelOpt has it); decoding is the same for both. Corners: a zero block has
byte 0 and code 0 everywhere. Inf in a block: byte 254, Inf elements saturate to ±6. NaN: byte 255, the codes
are 0, and the block decodes to NaN.

mxint4: value = int4 · scale, with scale = bf16(max(max / 7, -min / 8)): the largest element may use 7 steps and
the smallest 8. Elements are x / scale, rounded to the nearest integer (ties to even), in [-8, 7]. Corners: a
block whose scale rounds to zero has code 0 everywhere. Inf counts as the largest bf16 in the scale, and Inf
elements saturate. NaN in a block: its scale is NaN, the codes are 0, and it decodes to NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.errors import InputError, unknown_name
from tokenyard.formats import bits, blocks
from tokenyard.formats.fp8_block import SMALLEST_AMAX, Fp8Block128, divide_into_e4m3
from tokenyard.formats.matrix import HeldPayload, QuantizedMatrix, WeightFormat, check_matrix
from tokenyard.formats.mxfp8 import Mxfp8
from tokenyard.formats.nvfp4 import Nvfp4, row_global_scale

_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


class PlainWeights(WeightFormat):
    """Weights in a plain dtype. Experts hold them as plain tensors, without quantizing or decoding."""

    quantized = False
    row_formats = (Fp8Block128.name, Mxfp8.name, Nvfp4.name)
    inf = "the largest number"
    dtype: ClassVar[torch.dtype]  # the dtype of the weights

    def payloads(self, outputs: int, inputs: int) -> dict[str, HeldPayload]:
        return {"data": HeldPayload(self.dtype, (outputs, inputs))}

    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        check_matrix(w_ND)
        largest = torch.finfo(self.dtype).max
        data = w_ND.detach().float().clamp(-largest, largest).to(self.dtype)
        return QuantizedMatrix(format=self, shape=tuple(w_ND.shape), payloads={"data": data})

    def decode_rows(self, matrix: QuantizedMatrix, first: int, last: int) -> Tensor:
        return matrix.payloads["data"][first:last].float()


@dataclass(frozen=True, kw_only=True)
class Bf16Weights(PlainWeights):
    """Weights as bfloat16."""

    name = "bf16"
    dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Fp16Weights(PlainWeights):
    """Weights as float16; magnitudes over 65504 saturate."""

    name = "fp16"
    dtype = torch.float16


@dataclass(frozen=True, kw_only=True)
class Fp32Weights(PlainWeights):
    """Weights as float32."""

    name = "fp32"
    dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Fp8Block128Weights(WeightFormat):
    """e4m3 with a float32 scale per 128 outputs × 128 inputs.

    >>> matrix = Fp8Block128Weights().quantize(torch.full((200, 300), 56.0))
    >>> matrix.payloads["scales"]
    tensor([[0.1250, 0.1250, 0.1250],
            [0.1250, 0.1250, 0.1250]])
    """

    name = "fp8_block128"
    inf = "the largest number"
    block = 128
    row_formats = (Fp8Block128.name,)
    inner_formats = (Fp8Block128.name,)

    def payloads(self, outputs: int, inputs: int) -> dict[str, HeldPayload]:
        scales = (-(-outputs // self.block), -(-inputs // self.block))
        return {
            "data": HeldPayload(torch.float8_e4m3fn, (outputs, inputs)),
            "scales": HeldPayload(torch.float32, scales),
        }

    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        rows_RD = _as_rows(w_ND)
        *many, outputs, inputs = w_ND.shape
        amax_RC = blocks.block_amax(rows_RD, self.padded_size(inputs), self.block)
        amax_NC = functional.pad(
            amax_RC.unflatten(0, (math.prod(many), outputs)), (0, 0, 0, -outputs % self.block)
        )
        amax = amax_NC.unflatten(1, (-1, self.block)).amax(2).clamp_(SMALLEST_AMAX, bits.FLOAT32_MAX)
        scales = amax / bits.constant(bits.E4M3_MAX, w_ND.device)
        scales.masked_fill_(scales.isnan(), torch.nan)
        data = torch.empty(rows_RD.shape, dtype=torch.float8_e4m3fn, device=w_ND.device)
        by_row = scales.repeat_interleave(self.block, dim=1)[:, :outputs].flatten(0, 1)
        divide_into_e4m3(rows_RD, by_row, data)
        return _held(self, w_ND, data=data, scales=scales.view(*many, *scales.shape[1:]))

    def decode_rows(self, matrix: QuantizedMatrix, first: int, last: int) -> Tensor:
        values_nD = bits.e4m3_to_float32(matrix.payloads["data"][first:last])
        block_n = torch.arange(first, last, device=values_nD.device) // self.block
        scales = matrix.payloads["scales"][block_n]
        whole = values_nD.shape[1] // self.block * self.block
        if whole:
            in_blocks = values_nD[:, :whole].unflatten(1, (-1, self.block))
            in_blocks.mul_(scales[:, : whole // self.block].unsqueeze(-1))
        if whole < values_nD.shape[1]:
            values_nD[:, whole:].mul_(scales[:, -1:])
        return values_nD


class BlockWeights(WeightFormat):
    """A weight format of elements with a scale for each block of inputs of an output."""

    _code: ClassVar[blocks.BlockCode]  # the block size, and the dtypes of elements and scales

    def payloads(self, outputs: int, inputs: int) -> dict[str, HeldPayload]:
        widths = self._code.widths(self.padded_size(inputs))
        return {name: HeldPayload(dtype, (outputs, width)) for name, (dtype, width) in widths.items()}

    def decode_rows(self, matrix: QuantizedMatrix, first: int, last: int) -> Tensor:
        values_nP = self._code.element_values(matrix.payloads["data"][first:last])
        scales = self._scale_values(matrix, first, last)
        blocks.in_blocks(values_nP, self.block).mul_(scales.unsqueeze(-1))
        return values_nP[:, : matrix.shape[-1]]

    def _scale_values(self, matrix: QuantizedMatrix, first: int, last: int) -> Tensor:
        """The scales of outputs `first` to `last` of one matrix, as float32."""
        return self._code.scale_values(matrix.payloads["scales"][first:last])


@dataclass(frozen=True, kw_only=True)
class Mxfp8Weights(BlockWeights):
    """e4m3 with an E8M0 scale per 32 inputs: each output is encoded as a row of mxfp8.

    >>> Mxfp8Weights().quantize(torch.tensor([[44.8, -1.0, 0.3]])).decode()
    tensor([[44.0000, -1.0000,  0.3125]])
    """

    name = "mxfp8"
    inf = "Inf"
    _code = blocks.MXFP8
    block = _code.block
    row_formats = (Mxfp8.name,)

    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        return _held(self, w_ND, **Mxfp8().encode(_as_rows(w_ND)).payloads)


@dataclass(frozen=True, kw_only=True)
class Nvfp4Weights(BlockWeights):
    """e2m1 with an e4m3 scale per 16 inputs, and a float32 global scale per matrix: 2688 / amax.

    value = e2m1 · (scale / global_scale · global_factor), with global scale and factor of the half of the outputs.

    >>> matrix = Nvfp4Weights().quantize(torch.tensor([[6.0, -3.0, 0.3]]))
    >>> matrix.payloads["global_scale"], matrix.decode()
    (tensor([448., 448.]), tensor([[ 6.0000, -3.0000,  0.5000]]))
    """

    name = "nvfp4"
    inf = "the largest of its matrix"
    _code = blocks.NVFP4
    block = _code.block
    row_formats = (Nvfp4.name,)

    def payloads(self, outputs: int, inputs: int) -> dict[str, HeldPayload]:
        return {
            **super().payloads(outputs, inputs),
            "global_scale": HeldPayload(torch.float32, (2,)),
            "global_factor": HeldPayload(torch.float32, (2,)),
        }

    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        rows_RD = _as_rows(w_ND)
        *many, outputs, inputs = w_ND.shape
        amax_RC = blocks.block_amax(rows_RD, self.padded_size(inputs), self.block)
        matrices = rows_RD.reshape(math.prod(many), outputs * inputs)
        g_M1 = row_global_scale(amax_RC.reshape(len(matrices), outputs * amax_RC.shape[1]), matrices)
        rows = Nvfp4().encode(rows_RD, global_scale_T=g_M1.repeat_interleave(outputs))
        global_scale = g_M1.expand(-1, 2).contiguous()
        factors = torch.ones_like(global_scale)
        return _held(self, w_ND, **{**rows.payloads, "global_scale": global_scale, "global_factor": factors})

    def _scale_values(self, matrix: QuantizedMatrix, first: int, last: int) -> Tensor:
        scales = super()._scale_values(matrix, first, last)
        half_n = torch.arange(first, last, device=scales.device) >= -(-matrix.shape[-2] // 2)
        divisor_n1, factor_n1 = (
            matrix.payloads[name][half_n.long()].unsqueeze(1) for name in ("global_scale", "global_factor")
        )
        return (scales / divisor_n1).mul_(factor_n1)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weights(BlockWeights):
    """e2m1 with an E8M0 scale per 32 inputs.

    >>> matrix = Mxfp4Weights().quantize(torch.tensor([[6.9, -3.0, 0.3]]))
    >>> matrix.payloads["scales"], matrix.decode()
    (tensor([[127]], dtype=torch.uint8), tensor([[ 6.0000, -3.0000,  0.5000]]))
    """

    name = "mxfp4"
    inf = "Inf"
    _code = blocks.MXFP4
    block = _code.block
    row_formats = (Mxfp8.name,)
    inner_formats = (Fp8Block128.name,)
    # how the byte of a scale is computed: "even" as torchao does, "ceil" as ModelOpt and FlashInfer do
    scale_rule: Literal["even", "ceil"] = "even"

    def __post_init__(self) -> None:
        if self.scale_rule not in ("even", "ceil"):
            raise InputError(
                f"mxfp4 was given scale_rule={self.scale_rule!r}",
                expected="'even' or 'ceil'",
                fix="pass 'even', or 'ceil' for the scales of ModelOpt",
            )

    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        rows_RD = _as_rows(w_ND)
        padded_size = self.padded_size(rows_RD.shape[1])
        amax = blocks.block_amax(rows_RD, padded_size, self.block)
        even = self.scale_rule == "even"
        scales = bits.e8m0_from_rounded_amax(amax) if even else bits.e8m0_from_amax(amax, bits.E2M1_MAX)
        data = torch.empty(len(rows_RD), padded_size // 2, dtype=torch.uint8, device=w_ND.device)
        blocks.write_e2m1(rows_RD, bits.e8m0_to_float32(scales), data)
        return _held(self, w_ND, data=data, scales=scales)


@dataclass(frozen=True, kw_only=True)
class Mxint4Weights(BlockWeights):
    """Signed 4-bit integers with a bf16 scale per 32 inputs.

    >>> matrix = Mxint4Weights().quantize(torch.tensor([[7.0, -8.0, 2.4]]))
    >>> matrix.payloads["scales"], matrix.decode()
    (tensor([[1.]], dtype=torch.bfloat16), tensor([[ 7., -8.,  2.]]))
    """

    name = "mxint4"
    inf = "Inf"
    _code = blocks.MXINT4
    block = _code.block

    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        rows_RD = _as_rows(w_ND)
        padded_size, seven = self.padded_size(rows_RD.shape[1]), bits.constant(7.0, w_ND.device)
        shape = (len(rows_RD), padded_size // self.block)
        scales = torch.empty(shape, dtype=torch.bfloat16, device=w_ND.device)
        data = torch.empty(len(rows_RD), padded_size // 2, dtype=torch.uint8, device=w_ND.device)
        for rows, values_RP, spare_RP, _ in blocks.float32_chunks(rows_RD, padded_size):
            in_blocks = blocks.in_blocks(values_RP, self.block)
            largest, smallest = in_blocks.amax(-1), in_blocks.amin(-1)
            scale = torch.maximum(largest / seven, smallest * -0.125).abs_()  # no -0.0
            scales[rows] = scale.clamp_(max=_LARGEST_BF16).bfloat16()
            is_nan = scale.isnan()
            # Dividing by Inf gives the zeros that a block of scale 0 must have.
            step = scales[rows].float()
            step = step.masked_fill(step == 0, torch.inf).masked_fill_(is_nan, torch.inf)
            in_blocks.div_(step.unsqueeze(-1)).round_().clamp_(-8, 7)
            if bits.some(is_nan):
                in_blocks.masked_fill_(is_nan.unsqueeze(-1), 0.0)
            codes = spare_RP.view(torch.int32).copy_(values_RP).bitwise_and_(15).to(torch.int8)
            data[rows] = bits.pack_nibbles_(codes)
        scales.masked_fill_(scales.isnan(), torch.nan)
        return _held(self, w_ND, data=data, scales=scales)


# The formats that hold weights, by name.
WEIGHT_FORMATS: dict[str, type[WeightFormat]] = {
    kind.name: kind
    for kind in (
        Bf16Weights,
        Fp16Weights,
        Fp32Weights,
        Fp8Block128Weights,
        Mxfp8Weights,
        Nvfp4Weights,
        Mxfp4Weights,
        Mxint4Weights,
    )
}


def weight_format(name: str | WeightFormat) -> WeightFormat:
    """The weight format of this name; a format comes back as it is.

    >>> weight_format("mxint4").nbytes(8, 4096, 7168) / weight_format("bf16").nbytes(8, 4096, 7168)
    0.28125
    """
    if isinstance(name, WeightFormat):
        return name
    if not isinstance(name, str) or name not in WEIGHT_FORMATS:
        raise unknown_name("weight format", str(name), WEIGHT_FORMATS)
    return WEIGHT_FORMATS[name]()


def _as_rows(w_ND: Tensor) -> Tensor:
    check_matrix(w_ND)
    return w_ND.reshape(-1, w_ND.shape[-1])


def _held(format: WeightFormat, w_ND: Tensor, **payloads: Tensor) -> QuantizedMatrix:
    """Reshape payloads `[rows, width]` of the rows of all matrices to payloads of the matrices `[.., N, D]`."""
    *many, outputs, inputs = w_ND.shape
    declared = format.payloads(outputs, inputs)
    shaped = {name: payloads[name].reshape(*many, *p.shape) for name, p in declared.items()}
    return QuantizedMatrix(format=format, shape=tuple(w_ND.shape), payloads=shaped)
