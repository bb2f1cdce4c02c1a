"""The layouts of compressed-tensors: NVFP4, MXFP4, MXFP8, int4 in groups of 32, and FP8 in blocks of 128 x 128.

    format in the config   tensors of a linear map [N, D]
    nvfp4-pack-quantized   weight_packed u8[N, D/2], weight_scale e4m3[N, D/16], weight_global_scale f32[1] (divides)
    mxfp4-pack-quantized   weight_packed u8[N, D/2], weight_scale u8[N, D/32] (E8M0)
    mxfp8-quantized        weight e4m3[N, D], weight_scale u8[N, D/32] (E8M0)
    pack-quantized         weight_packed i32[N, D/8], weight_scale bf16[N, D/32], weight_shape i64[2]
    float-quantized        weight e4m3[N, D], weight_scale bf16 or f32[⌈N/128⌉, ⌈D/128⌉]: DeepSeek's, under another name

pack-quantized stores eight integers in a 32-bit word, number i in bits 4i to 4i + 3, as value + 8. Byte by byte this is
the order of `mxint4`, low nibble first. Only the highest bit of each nibble differs, and an xor flips it: nothing is
decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenyard.checkpoints.layout import E8M0, Layout, Piece, Stored, data_and_scales
from tokenyard.checkpoints.vendor_layouts import BLOCK, DeepSeekFp8
from tokenyard.experts.spec import EXACT
from tokenyard.formats import Fp8Block128

# The highest bit of both nibbles of a byte. Flipping it turns value + 8 into two's complement, and back.
SIGN_BITS = 0x88


class CompressedTensorsLayout(Layout):
    """One of the formats of compressed-tensors."""

    method = "compressed-tensors"
    unread: ClassVar[tuple[str, ...]] = (
        "input_global_scale",
        "input_scale",
        "input_zero_point",
        "output_scale",
    )
    # The value of `format` in the `quantization_config` of such a checkpoint.
    config_format: ClassVar[str]
    # The entries that `weights` of a config group must have, and further ones that are written into it.
    arguments: ClassVar[Mapping[str, Any]]
    spellings: ClassVar[Mapping[str, Any]] = {"strategy": "group", "dynamic": False}

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        if quantization.get("quant_method") != "compressed-tensors":
            return False
        formats = [quantization.get("format"), *(group.get("format") for group in _groups(quantization))]
        return self.config_format in formats

    def quantization_config(self, ignored: list[str]) -> dict[str, Any]:
        group = {
            "targets": ["Linear"],
            "weights": {**self.arguments, **self.spellings},
            "input_activations": None,
            "output_activations": None,
            "format": self.config_format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.config_format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }

    def mismatch(self, quantization: Mapping[str, Any]) -> str | None:
        declared = [
            group["weights"] for group in _groups(quantization) if isinstance(group.get("weights"), Mapping)
        ]
        wanted = self.arguments
        if not declared or any(
            all(group.get(key, value) == value for key, value in wanted.items()) for group in declared
        ):
            return None
        group = declared[0]
        wrong = {key: group[key] for key, value in wanted.items() if key in group and group[key] != value}
        return ", ".join(f"{key} {value!r} where {wanted[key]!r} can be held" for key, value in wrong.items())


def _groups(quantization: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield group


def _arguments(kind: str, bits: int, group: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "group_size": group, "symmetric": True}


@dataclass(frozen=True, kw_only=True)
class CompressedNvfp4(CompressedTensorsLayout):
    """nvfp4-pack-quantized."""

    weights = "nvfp4"
    config_format = "nvfp4-pack-quantized"
    tensors = data_and_scales(Stored("weight_packed", ("U8",), 2), Stored("weight_scale", ("F8_E4M3",), 16))
    numbers: ClassVar[Mapping[str, Piece]] = {"global_scale": Piece("weight_global_scale", ("F32",), (1,))}
    constants: ClassVar[Mapping[str, float]] = {"global_factor": 1.0}
    arguments = _arguments("float", 4, 16)
    spellings: ClassVar[Mapping[str, Any]] = {
        "strategy": "tensor_group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }

    def spelled(self, payloads: Mapping[str, Tensor], outputs: int, inputs: int) -> dict[str, Tensor]:
        return super().spelled({**payloads, "global_scale": payloads["global_scale"][:1]}, outputs, inputs)


class _CompressedMx(CompressedTensorsLayout):
    """A format with an E8M0 scale (an exponent of 8 bits) for every 32 columns."""

    spellings: ClassVar[Mapping[str, Any]] = {
        **CompressedTensorsLayout.spellings,
        "scale_dtype": "torch.uint8",
    }


@dataclass(frozen=True, kw_only=True)
class CompressedMxfp4(_CompressedMx):
    """mxfp4-pack-quantized."""

    weights = "mxfp4"
    config_format = "mxfp4-pack-quantized"
    tensors = data_and_scales(Stored("weight_packed", ("U8",), 2), Stored("weight_scale", E8M0, 32))
    arguments = _arguments("float", 4, 32)

    def matches(self, present: Mapping[str, Any]) -> bool:
        return super().matches(present) and "weight_global_scale" not in present


@dataclass(frozen=True, kw_only=True)
class CompressedMxfp8(_CompressedMx):
    """mxfp8-quantized."""

    weights = "mxfp8"
    config_format = "mxfp8-quantized"
    tensors = data_and_scales(Stored("weight", ("F8_E4M3",), 1), Stored("weight_scale", E8M0, 32))
    arguments = _arguments("float", 8, 32)


@dataclass(frozen=True, kw_only=True)
class CompressedInt4(CompressedTensorsLayout):
    """pack-quantized, with 4 bits and groups of 32."""

    weights = "mxint4"
    config_format = "pack-quantized"
    tensors = data_and_scales(Stored("weight_packed", ("I32",), 8), Stored("weight_scale", ("BF16",), 32))
    unread = (*CompressedTensorsLayout.unread, "weight_shape")
    written = (Piece("weight_shape", ("I64",), (2,)),)
    arguments = _arguments("int", 4, 32)

    def fill(self, payload: str, stored: Tensor, out: Tensor) -> None:
        if payload == "data":
            torch.bitwise_xor(stored.view(torch.uint8), SIGN_BITS, out=out)
        else:
            super().fill(payload, stored, out)

    def spelled(self, payloads: Mapping[str, Tensor], outputs: int, inputs: int) -> dict[str, Tensor]:
        words = (payloads["data"] ^ SIGN_BITS).view(torch.int32)
        shape = torch.tensor([outputs, inputs])
        return {**super().spelled({**payloads, "data": words}, outputs, inputs), "weight_shape": shape}


@dataclass(frozen=True, kw_only=True)
class CompressedFp8(CompressedTensorsLayout, DeepSeekFp8):
    """float-quantized, with a scale for each block of 128 x 128."""

    config_format = "float-quantized"
    unread = CompressedTensorsLayout.unread
    scales = "weight_scale"
    arguments: ClassVar[Mapping[str, Any]] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [BLOCK, BLOCK],
        "symmetric": True,
    }
    spellings: ClassVar[Mapping[str, Any]] = {"dynamic": False}

    def inner(self, quantization: Mapping[str, Any]) -> str:
        """`fp8_block128` if the config quantizes activations dynamically, which includes those between the products."""
        rows = [group.get("input_activations") for group in _groups(quantization)]
        dynamic = any(isinstance(scheme, Mapping) and scheme.get("dynamic") is True for scheme in rows)
        return str(Fp8Block128()) if dynamic else EXACT


COMPRESSED_LAYOUTS: tuple[CompressedTensorsLayout, ...] = (
    CompressedNvfp4(),
    CompressedMxfp4(),
    CompressedMxfp8(),
    CompressedInt4(),
    CompressedFp8(),
)
