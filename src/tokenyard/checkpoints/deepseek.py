"""The layout of DeepSeek: FP8 in blocks of 128 outputs × 128 inputs.

A linear map [N, D] is `weight` e4m3[N, D] and `weight_scale_inv` [⌈N/128⌉, ⌈D/128⌉], which, despite its name, is
*multiplied* with. DeepSeek stores it as float32, Qwen as bf16, which float32 holds exactly.

Gate and up become one matrix, whose blocks are counted from its first row. So a gate must be a whole number of
blocks, as it is in the models that use this layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenyard.checkpoints.layout import Layout, Piece

BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class DeepSeekFp8(Layout):
    """FP8 as DeepSeek has it."""

    method = "DeepSeek"
    weights = "fp8_block128"
    beside = ("input_scale", "activation_scale")

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "fp8"

    def mismatch(self, quantization: Mapping[str, Any]) -> str | None:
        size = quantization.get("weight_block_size", [BLOCK, BLOCK])
        return (
            None if size == [BLOCK, BLOCK] else f"weight_block_size {size!r:.60} where [128, 128] can be held"
        )

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return shape[0], shape[1]

    def pieces(self, outputs: int, inputs: int) -> dict[str, Piece]:
        blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
        return {
            "data": Piece("weight", ("F8_E4M3",), (outputs, inputs)),
            "scales": Piece("weight_scale_inv", ("F32", "BF16"), blocks),
        }

    def refused(self, outputs: int, inputs: int, parts: int) -> str | None:
        if parts > 1 and outputs % BLOCK:
            return (
                f"gate and up of {outputs} rows each cannot be one matrix: {outputs} is no multiple of {BLOCK}, and "
                "they would share blocks"
            )
        return None

    def quantization_config(self, ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ignored,
        }
