"""Linear maps as the libraries write them that checkpoints come from, and what these libraries read of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.checkpoints.small import Written

PRESETS = {
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8A16",
    "mxint4": "W4A16",
    "fp8_block128": "FP8_BLOCK",
}
FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxint4": "pack-quantized",
    "fp8_block128": "float-quantized",
}


def scheme(weights: str) -> Any:
    """The scheme of compressed-tensors that holds a weight format."""
    from compressed_tensors.quantization import preset_name_to_scheme

    found = preset_name_to_scheme(PRESETS[weights], ["Linear"])
    if weights == "mxint4":
        found.weights.group_size = 32
    return found


def compressor(weights: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(FORMATS[weights])


def compress(weights: str, w: Tensor) -> Written:
    """A linear map, quantized and packed by compressed-tensors."""
    from compressed_tensors.quantization.utils import calculate_qparams

    if weights == "fp8_block128":
        written = deepseek(w)
        return {"weight": written["weight"], "weight_scale": written["weight_scale_inv"]}
    how = scheme(weights)
    grouped = w.float().unflatten(1, (-1, how.weights.group_size))
    state = {"weight": w.float()}
    if weights == "nvfp4":
        state["weight_global_scale"] = (torch.tensor(2688.0) / w.float().abs().amax()).view(1)
    scale, zero_point = calculate_qparams(
        grouped.amin(-1), grouped.amax(-1), how.weights, global_scale=state.get("weight_global_scale")
    )
    state["weight_scale"] = scale.bfloat16() if weights == "mxint4" else scale
    state["weight_zero_point"] = zero_point
    return dict(compressor(weights).compress(state, how))


def decompress(weights: str, written: Written) -> Tensor:
    """What compressed-tensors reads of a linear map."""
    if weights == "fp8_block128":
        return deepseek_read({"weight": written["weight"], "weight_scale_inv": written["weight_scale"]})
    return compressor(weights).decompress(dict(written), scheme(weights))["weight"].detach()


def compressed_config(weights: str) -> dict[str, Any]:
    """The quantization_config that compressed-tensors itself writes for this scheme."""
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(
        config_groups={"group_0": scheme(weights)},
        format=FORMATS[weights],
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return config.model_dump(mode="json")


def e2m1(packed: Tensor) -> Tensor:
    """The numbers of e2m1 codes, by a table of their own."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return torch.where(codes > 7, -table[codes & 7], table[codes & 7])


def modelopt(w: Tensor) -> Written:
    """A linear map in NVFP4 as ModelOpt writes it, its second scale multiplied with."""
    second = w.float().abs().amax() / 2688
    blocks = w.float().unflatten(1, (-1, 16))
    first = (blocks.abs().amax(-1) / 6 / second).clamp(max=448).to(torch.float8_e4m3fn)
    values = (blocks / (first.float() * second).clamp(min=1e-30).unsqueeze(-1)).flatten(1)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(values.abs(), edges) + 8 * (values < 0)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return {
        "weight": packed,
        "weight_scale": first,
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.5),
    }


def modelopt_read(written: Written) -> Tensor:
    scales = written["weight_scale"].float() * written["weight_scale_2"]
    return e2m1(written["weight"]) * scales.repeat_interleave(16, dim=1)


def deepseek(w: Tensor, scale_dtype: torch.dtype = torch.float32) -> Written:
    """A linear map in FP8 as DeepSeek writes it, block by block."""
    outputs, inputs = w.shape
    data = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-outputs // 128), -(-inputs // 128), dtype=scale_dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = w[block].float().abs().amax() / 448
            data[block] = (w[block].float() / scales[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale_inv": scales}


def deepseek_read(written: Written) -> Tensor:
    scales = written["weight_scale_inv"].float()
    outputs, inputs = written["weight"].shape
    scales = scales.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)[:outputs, :inputs]
    return written["weight"].float() * scales
