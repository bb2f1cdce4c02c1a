"""The layout of gpt-oss: MXFP4, all experts of a layer in one tensor.

    gate_up_proj_blocks u8[E, 2I, H/32, 16]   gate_up_proj_scales u8[E, 2I, H/32]   gate_up_proj_bias bf16[E, 2I]
    down_proj_blocks    u8[E, H, I/32, 16]    down_proj_scales    u8[E, H, I/32]    down_proj_bias    bf16[E, H]

A block's 32 codes are 16 bytes, low nibble first: the rows of our own mxfp4, in one more dimension. Gate and up
rows take turns, and stay so: the activation of gpt-oss is interleaved, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenyard.checkpoints.layout import E8M0, Layout, Piece, Stored, data_and_scales


@dataclass(frozen=True, kw_only=True)
class GptOssMxfp4(Layout):
    """MXFP4 as gpt-oss has it."""

    method = "gpt-oss"
    weights = "mxfp4"
    tensors = data_and_scales(Stored("blocks", ("U8",), 32), Stored("scales", E8M0, 32))
    fused = True

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "mxfp4"

    def pieces(self, outputs: int, inputs: int) -> dict[str, Piece]:
        found = super().pieces(outputs, inputs)
        return found | {"data": found["data"]._replace(shape=(outputs, inputs // 32, 16))}

    def quantization_config(self, ignored: list[str]) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
