"""mxfp8: e4m3 elements, one E8M0 scale (a power of two, in a byte) per 32 columns.

    data    e4m3  [T, P]        x / scale, saturating
    scales  uint8 [T, P / 32]   the smallest power of two with amax / scale ≤ 448

P is H rounded up to a multiple of `alignment`. The pad holds zeros, and has scales too, as kernels that need a wider
alignment (256, say) expect. Decoding gives rows of width H again.

The scale is computed on the bits of float32 `amax / 448` (see `bits.e8m0_from_amax`). Scaling by a power of two
is exact, so the only rounding is the cast to e4m3.

Corners: a zero block has byte 0 and zero elements. A block so small that its scale would fall below 2^-127
has byte 0, and its elements are scaled by 2^-127 like any others. Inf in a block: byte 254, Inf elements
saturate to 448, which decodes to Inf again. NaN in a block: byte 255, all its elements are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats import bits, blocks
from tokenyard.formats.base import EncodedRows, InfBecomes, check_rows


@dataclass(frozen=True, kw_only=True)
class Mxfp8(blocks.BlockFormat):
    """e4m3 with an E8M0 scale per 32 columns.

    >>> import torch
    >>> rows = Mxfp8().encode(torch.tensor([[44.8, -1.0, 0.3]]))
    >>> rows.payloads["scales"], rows.decode()
    (tensor([[124]], dtype=torch.uint8), tensor([[44.0000, -1.0000,  0.3125]]))
    >>> Mxfp8().bytes_per_row(7168), Mxfp8(alignment=256).padded_size(2880)
    (7392, 3072)
    """

    name = "mxfp8"
    scale_layouts = ("linear", "swizzled")
    _code = blocks.MXFP8
    block = _code.block
    alignment: int = 32  # the width of a row is padded to a multiple of this; itself a multiple of 32

    @property
    def inf(self) -> InfBecomes:
        """±Inf: 448 at the largest scale is beyond float32."""
        return "Inf"

    def __post_init__(self) -> None:
        good = isinstance(self.alignment, int) and not isinstance(self.alignment, bool)
        if not good or self.alignment <= 0 or self.alignment % self.block:
            raise InputError(
                f"mxfp8 was given alignment={self.alignment!r}",
                expected="a positive multiple of 32: a scale covers 32 columns",
                fix="leave it at 32, or pass what the kernel asks for (say 256)",
            )

    @property
    def row_alignment(self) -> int:
        return self.alignment

    def encode(self, x_TH: Tensor) -> EncodedRows:
        check_rows(x_TH)
        num_rows, hidden_size = x_TH.shape
        payloads = self.empty_payloads(num_rows, hidden_size, x_TH.device)
        data_TP, scales = payloads["data"], payloads["scales"]
        padded_size = data_TP.shape[1]
        scales.copy_(bits.e8m0_from_amax(blocks.block_amax(x_TH, padded_size, self.block)))
        reciprocal = bits.e8m0_reciprocal(scales).unsqueeze(-1)
        for rows, values_RP, _, _ in blocks.float32_chunks(x_TH, padded_size):
            blocks.in_blocks(values_RP, self.block).mul_(reciprocal[rows])
            data_TP[rows] = values_RP.clamp_(-bits.E4M3_MAX, bits.E4M3_MAX)
        blocks.mark_nan_blocks(data_TP, scales == bits.E8M0_NAN, self.block)
        return EncodedRows(format=self, hidden_size=hidden_size, payloads=payloads)
