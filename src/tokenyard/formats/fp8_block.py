"""fp8_block128: e4m3 elements, one float32 scale per 128 columns.

    data    e4m3    [T, P]         x / scale, saturating
    scales  float32 [T, P / 128]   max(amax, 1e-10) / 448

With `power_of_two_scales` the scale is rounded up to a power of two. Decoding multiplies with the scale.

Corners: a zero block has scale 1e-10/448 and zero elements. Inf counts as the largest float32, so its block
has a finite scale and Inf elements saturate. NaN in a block: its scale is NaN, and so are all its elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import ContractError, InputError
from tokenyard.formats import bits, blocks
from tokenyard.formats.base import EncodedRows, InfBecomes, check_rows

# A smaller amax counts as this one, so that divisions stay far from subnormal numbers.
SMALLEST_AMAX = 1e-10


@dataclass(frozen=True, kw_only=True)
class Fp8Block128(blocks.BlockFormat):
    """e4m3 with a float32 scale per 128 columns.

    >>> rows = Fp8Block128().encode(torch.tensor([[56.0, -1.0, 0.3]]))
    >>> rows.payloads["scales"], rows.decode()
    (tensor([[0.1250]]), tensor([[56.0000, -1.0000,  0.3125]]))
    >>> Fp8Block128().bytes_per_row(7168)
    7392
    """

    name = "fp8_block128"
    scale_layouts = ("linear",)
    _code = blocks.FP8_BLOCK128
    block = _code.block
    power_of_two_scales: bool = False  # whether scales are rounded up to powers of two

    @property
    def inf(self) -> InfBecomes:
        """± the largest float32, or ±Inf, which a scale that is rounded up reaches."""
        return "Inf" if self.power_of_two_scales else "the largest number"

    def __post_init__(self) -> None:
        if not isinstance(self.power_of_two_scales, bool):
            raise InputError(
                f"fp8_block128 was given power_of_two_scales={self.power_of_two_scales!r}",
                expected="True or False",
                fix="pass True where the kernel wants scales that are powers of two",
            )

    def encode(self, x_TH: Tensor) -> EncodedRows:
        check_rows(x_TH)
        num_rows, hidden_size = x_TH.shape
        payloads = self.empty_payloads(num_rows, hidden_size, x_TH.device)
        data_TP, scales = payloads["data"], payloads["scales"]
        padded_size = data_TP.shape[1]
        amax = blocks.block_amax(x_TH, padded_size, self.block).clamp_(SMALLEST_AMAX, bits.FLOAT32_MAX)
        torch.div(amax, bits.constant(bits.E4M3_MAX, x_TH.device), out=scales)
        if self.power_of_two_scales:
            scales.copy_(bits.power_of_two_at_least(scales))
        scales.masked_fill_(scales.isnan(), torch.nan)  # a division gives NaN other bits on other devices
        divide_into_e4m3(x_TH, scales, data_TP)
        return EncodedRows(format=self, hidden_size=hidden_size, payloads=payloads)

    def swizzle(self, rows: EncodedRows) -> EncodedRows:
        raise ContractError(
            "fp8_block128 rows were asked for swizzled scales; theirs are float32",
            expected="one-byte scales (mxfp8, nvfp4): the 128×4 layout is made for these",
            fix="use the linear scales",
        )


def divide_into_e4m3(x_TH: Tensor, scales: Tensor, data: Tensor) -> None:
    """Write x / scale, saturating, into `data`, which may include the pad; elements are NaN where their scale is."""
    block, width = Fp8Block128.block, data.shape[1]
    is_nan = scales.isnan()
    some_nan = bits.some(is_nan)
    for rows, values_RP, _, _ in blocks.float32_chunks(x_TH, scales.shape[1] * block):
        blocks.in_blocks(values_RP, block).div_(scales[rows].unsqueeze(-1))
        data[rows] = values_RP.clamp_(-bits.E4M3_MAX, bits.E4M3_MAX)[:, :width]
        if some_nan:
            is_nan_RP = is_nan[rows].repeat_interleave(block, dim=1)[:, :width]
            data[rows].view(torch.uint8).masked_fill_(is_nan_RP, bits.E4M3_NAN_CODE)
