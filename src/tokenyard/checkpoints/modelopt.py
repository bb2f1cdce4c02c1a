"""The layout of ModelOpt: NVFP4.

A linear map [N, D] is `weight` u8[N, D/2], `weight_scale` e4m3[N, D/16] and `weight_scale_2`, one float32 that is
*multiplied* with (compressed-tensors stores the reciprocal and divides). `input_scale` is that of activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tokenyard.checkpoints.layout import Layout, Piece, Stored, data_and_scales


@dataclass(frozen=True, kw_only=True)
class ModelOptNvfp4(Layout):
    """NVFP4 as ModelOpt writes it."""

    method = "ModelOpt"
    weights = "nvfp4"
    tensors = data_and_scales(Stored("weight", ("U8",), 2), Stored("weight_scale", ("F8_E4M3",), 16))
    numbers: ClassVar[Mapping[str, Piece]] = {"global_factor": Piece("weight_scale_2", ("F32",), ())}
    beside = ("input_scale",)
    constants: ClassVar[Mapping[str, float]] = {"global_scale": 1.0}

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        algorithm = str(quantization.get("quant_algo", ""))
        return str(quantization.get("quant_method", "")).startswith("modelopt") and (
            "NVFP4" in algorithm or algorithm in ("FP4", "MIXED_PRECISION")
        )
