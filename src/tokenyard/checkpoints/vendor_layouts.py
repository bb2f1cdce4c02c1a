"""The layouts of DeepSeek, ModelOpt and gpt-oss.

DeepSeek: FP8 in blocks of 128 outputs × 128 inputs.

A linear map [N, D] is `weight` e4m3[N, D] and `weight_scale_inv` [⌈N/128⌉, ⌈D/128⌉], which, despite its name, is
*multiplied* with. DeepSeek stores it as float32, Qwen as bf16, which float32 holds exactly.

Gate and up become one matrix, whose blocks are counted from its first row. In the models that use this layout a gate
is a whole number of blocks, so that blocks of both stay as they are. Otherwise one block holds rows of gate and of up,
and later blocks are shifted against those of up: the matrix can be held exactly only if all blocks from the gate's last
one on have the same scale (for each 128 inputs). Conversion gives them one scale; since e4m3 has exponents of its own,
this costs next to no accuracy. A file whose scales differ there is refused.

ModelOpt: NVFP4.

A linear map [N, D] is `weight` u8[N, D/2], `weight_scale` e4m3[N, D/16] and `weight_scale_2`, one float32 that is
*multiplied* with (compressed-tensors stores the reciprocal and divides). `input_scale` is for activations, and is not
read.

gpt-oss: MXFP4, all experts of a layer in one tensor.

    gate_up_proj_blocks u8[E, 2I, H/32, 16]   gate_up_proj_scales u8[E, 2I, H/32]   gate_up_proj_bias bf16[E, 2I]
    down_proj_blocks    u8[E, H, I/32, 16]    down_proj_scales    u8[E, H, I/32]    down_proj_bias    bf16[E, H]

A block's 32 codes are 16 bytes, low nibble first, as in the format `mxfp4`, with blocks in a dimension of their own.
Gate and up rows alternate, and stay in this order, because the activation of gpt-oss is interleaved, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenyard.checkpoints.layout import E8M0, Layout, Piece, Stored, data_and_scales
from tokenyard.experts.spec import EXACT
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import Fp8Block128, QuantizedMatrix

BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class DeepSeekFp8(Layout):
    """FP8 with a scale per 128 × 128 block, as DeepSeek stores it."""

    method = "DeepSeek"
    weights = "fp8_block128"
    tensors: ClassVar[Mapping[str, Stored]] = {"data": Stored("weight", ("F8_E4M3",), 1)}
    unread: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale")
    # The suffix of the tensor that holds the scales.
    scales: ClassVar[str] = "weight_scale_inv"

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        return quantization.get("quant_method") == "fp8"

    def mismatch(self, quantization: Mapping[str, Any]) -> str | None:
        size = quantization.get("weight_block_size", [BLOCK, BLOCK])
        return (
            None if size == [BLOCK, BLOCK] else f"weight_block_size {size!r:.60} where [128, 128] can be held"
        )

    def inner(self, quantization: Mapping[str, Any]) -> str:
        """`fp8_block128` if activations are quantized dynamically, which includes those between the products."""
        if quantization.get("activation_scheme") != "dynamic":
            return EXACT
        return str(Fp8Block128(power_of_two_scales=quantization.get("scale_fmt") == "ue8m0"))

    def pieces(self, outputs: int, inputs: int) -> dict[str, Piece]:
        blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
        return super().pieces(outputs, inputs) | {"scales": Piece(self.scales, ("F32", "BF16"), blocks)}

    def refused(self, inputs: int) -> str | None:
        return None

    def overlaps(self, outputs: int, parts: int) -> bool:
        return parts > 1 and outputs % BLOCK != 0

    def join(self, shares: list[Tensor], outputs: int) -> Tensor | None:
        gate, up = shares
        whole = outputs // BLOCK  # blocks that hold rows of the gate only
        shared = torch.cat((gate[whole:], up))
        if not bool((shared == shared[0]).all()):
            return None
        rest = -(-2 * outputs // BLOCK) - whole
        return torch.cat((gate[:whole], shared[:1].expand(rest, -1)))

    def split(self, name: str, payload: Tensor, parts: int, outputs: int) -> Sequence[Tensor]:
        if name != "scales" or not self.overlaps(outputs, parts):
            return payload.chunk(parts)
        whole, blocks = outputs // BLOCK, -(-outputs // BLOCK)
        return payload[:blocks], payload[whole : whole + 1].expand(blocks, -1)

    def quantize(self, weights: ExpertWeights, parts: int) -> ExpertWeights:
        quantized = super().quantize(weights, parts)
        w13 = quantized.w13
        assert isinstance(w13, QuantizedMatrix)
        assert isinstance(weights.w13, Tensor)
        outputs = w13.shape[1] // parts
        if self.overlaps(outputs, parts):
            whole = outputs // BLOCK
            scales, data = w13.payloads["scales"], w13.payloads["data"]
            scales[:, whole:] = scales[:, whole:].amax(dim=1, keepdim=True)
            by_input = scales[:, whole:, None].repeat_interleave(BLOCK, dim=-1)[..., : w13.shape[-1]]
            rows = weights.w13[:, whole * BLOCK :].float()
            data[:, whole * BLOCK :] = (rows / by_input[:, 0]).clamp_(-448, 448).to(data.dtype)
        return quantized

    def quantization_config(self, ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ignored,
        }


@dataclass(frozen=True, kw_only=True)
class ModelOptNvfp4(Layout):
    """NVFP4 as ModelOpt writes it."""

    method = "ModelOpt"
    weights = "nvfp4"
    tensors = data_and_scales(Stored("weight", ("U8",), 2), Stored("weight_scale", ("F8_E4M3",), 16))
    numbers: ClassVar[Mapping[str, Piece]] = {"global_factor": Piece("weight_scale_2", ("F32",), ())}
    unread = ("input_scale",)
    constants: ClassVar[Mapping[str, float]] = {"global_scale": 1.0}

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        algorithm = str(quantization.get("quant_algo", ""))
        return str(quantization.get("quant_method", "")).startswith("modelopt") and (
            "NVFP4" in algorithm or algorithm in ("FP4", "MIXED_PRECISION")
        )


@dataclass(frozen=True, kw_only=True)
class GptOssMxfp4(Layout):
    """MXFP4 as gpt-oss stores it, with all experts in one tensor."""

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
