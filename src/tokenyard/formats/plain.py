"""Formats without scales: bf16, fp16, fp32.

A layer without a declared wire uses the one of its input's dtype, and results can travel back in a narrower dtype
than they were computed in. Rows of the format's own dtype are not copied: the payload *is* the caller's tensor, and
decoding to that dtype returns it, so copy it before changing it. Other rows are converted to float32 and clamped to
the finite range of the target before the cast: 1e5 in a float32 row arrives as 65504 in fp16, not as Inf. Inf is
clamped, too, and NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from tokenyard.formats.base import EncodedRows, Format, InfBecomes, Payload, check_rows, saturated


@cache
def _payloads(dtype: torch.dtype, width: int) -> tuple[Payload, ...]:
    """The payloads of plain rows, cached because every call of a layer uses them several times."""
    return (Payload(name="data", dtype=dtype, width=width),)


class PlainFormat(Format):
    """A format of one payload, `data`, without scales and without a pad."""

    quantized = False
    dtype: ClassVar[torch.dtype]  # the dtype of the elements

    @property
    def inf(self) -> InfBecomes:
        """±Inf if the rows have the format's dtype; else ± the largest number of that dtype."""
        return "Inf, or the largest number if cast"

    def payloads(self, hidden_size: int) -> tuple[Payload, ...]:
        return _payloads(self.dtype, hidden_size)

    def encode(self, x_TH: Tensor) -> EncodedRows:
        check_rows(x_TH)
        data = saturated(x_TH, self.dtype).contiguous()
        return EncodedRows(format=self, hidden_size=x_TH.shape[1], payloads={"data": data})

    def decode(self, rows: EncodedRows, dtype: torch.dtype = torch.float32) -> Tensor:
        return rows.payloads["data"].to(dtype)


@dataclass(frozen=True, kw_only=True)
class Bf16(PlainFormat):
    """Rows as bfloat16.

    >>> Bf16().bytes_per_row(7168)
    14336
    """

    name = "bf16"
    dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Fp16(PlainFormat):
    """Rows as float16; magnitudes over 65504 saturate.

    >>> Fp16().encode(torch.tensor([[1e5, -3.0]])).decode()
    tensor([[ 6.5504e+04, -3.0000e+00]])
    """

    name = "fp16"
    dtype = torch.float16


@dataclass(frozen=True, kw_only=True)
class Fp32(PlainFormat):
    """Rows as float32. Refuses narrower rows: a bf16 row would travel in twice its bytes.

    >>> print(Fp32().carries(torch.bfloat16))
    wire=fp32: takes float32 rows, not bfloat16
    """

    name = "fp32"
    dtype = torch.float32
    wire_dtypes = combine_dtypes = (torch.float32,)
