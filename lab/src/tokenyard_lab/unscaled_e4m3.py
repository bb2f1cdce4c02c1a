"""A bad example for studies of combine wires: results are cast to e4m3 without a scale.

e4m3 has numbers from 2^-9 to 448. Results below 2^-10 become zero and those above 448 saturate, whatever the rest of
the row is. No plan finds this format by its name: it is in no registry, and only studies of `tokenyard_lab` ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.formats import FORMATS, get
from tokenyard.formats.base import EncodedRows, Format, Payload, check_rows

UNSCALED = "e4m3_unscaled"


@dataclass(frozen=True, kw_only=True)
class UnscaledE4m3(Format):
    """Rows as e4m3, without scales.

    >>> UnscaledE4m3().encode(torch.tensor([[0.0009, 3.1, 500.0]])).decode()
    tensor([[  0.,   3., 448.]])
    """

    name = UNSCALED

    def payloads(self, hidden_size: int) -> tuple[Payload, ...]:
        return (Payload(name="data", dtype=torch.float8_e4m3fn, width=hidden_size),)

    def encode(self, x_TH: Tensor) -> EncodedRows:
        check_rows(x_TH)
        largest = torch.finfo(torch.float8_e4m3fn).max
        data = x_TH.float().clamp(-largest, largest).to(torch.float8_e4m3fn)
        return EncodedRows(format=self, hidden_size=x_TH.shape[1], payloads={"data": data})

    def decode(self, rows: EncodedRows, dtype: torch.dtype = torch.float32) -> Tensor:
        return rows.payloads["data"].to(dtype)


def studied_format(name: str) -> Format:
    """The format of this name, for a study: a registered one, or the bad example."""
    return UnscaledE4m3() if name == UNSCALED else get(name)


def studied_ways_back() -> list[str]:
    """The names of all formats in which results of a bf16 layer come home, and that of the bad example.

    >>> studied_ways_back()
    ['bf16', 'fp16', 'fp8_block128', 'mxfp8', 'nvfp4', 'e4m3_unscaled']
    """
    return [*(name for name in FORMATS if get(name).returns(torch.bfloat16) is None), UNSCALED]
