"""Reads a model's `config.json`, and from it the sizes and the quantization of the experts, for all families.

The weights in the files are compared with what `model_config` returns. How a family routes, and which of its layers are
MoE, is not needed to read weights; `tokenyard.integrations.huggingface` reads that from the same values
(`families.Config`).
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.checkpoints.families import FAMILIES, Config
from tokenyard.checkpoints.header import parse_json
from tokenyard.errors import CheckpointError

# The file of a checkpoint that describes the model.
CONFIG = "config.json"
# JSON files of a checkpoint are read whole. The index of a model of a million tensors has about 100 MB.
_LARGEST_JSON = 256_000_000

# The keys that families use, of which the first one present is read. Where `moe_intermediate_size` is present,
# `intermediate_size` is that of the dense layers.
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_INTERMEDIATE_SIZE = ("moe_intermediate_size", "intermediate_size")
_HIDDEN_SIZE = ("hidden_size",)

# The file in which ModelOpt describes its quantization, for models whose config.json does not.
_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model's config says about the weights of its experts; None for a key that the file lacks."""

    values: Mapping[str, Any]  # all values of the file
    file: Path
    model_type: str | None
    num_experts: int | None
    hidden_size: int | None
    intermediate_size: int | None
    # Empty where nothing is quantized.
    quantization: Mapping[str, Any]

    @property
    def quantized_as(self) -> str:
        """The quantization method that the config declares, in words for error messages."""
        if not self.quantization:
            return "no quantization_config"
        return f"quantization_config with {quantization_in_words(self.quantization)}"


def quantization_in_words(quantization: Mapping[str, Any]) -> str:
    """The method, algorithm and format that a `quantization_config` declares, in words for error messages."""
    declared = {
        key: quantization[key] for key in ("quant_method", "quant_algo", "format") if key in quantization
    }
    return ", ".join(f"{key} {value!r:.60}" for key, value in declared.items())


def read_json(
    path: Path, *, expected: str = "a JSON object", fix: str = "download or copy the file again"
) -> dict[str, Any]:
    """The JSON object in a file. If it cannot be read, the error has this `expected` and this `fix`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device or a pipe has no end
            raise ValueError("no file")
        if found.st_size > _LARGEST_JSON:
            raise ValueError(f"more than {_LARGEST_JSON} bytes")
        values = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else str(error)[:120]
        raise CheckpointError(
            f"{path} cannot be read ({why})", expected=expected, fix=fix, file=path
        ) from error
    return values


def model_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """The sizes and the quantization of the experts, from the values of a config."""
    text = text_config(values)
    model_type = text.get("model_type")
    family = model_type if isinstance(model_type, str) else None
    config = Config(values=text, source=str(file), family=family or "", file=file)
    if (inner := values.get("text_config")) is not None and not isinstance(inner, Mapping):
        raise config.wrong("text_config", inner, "an object")
    config.check_present()

    def size(keys: tuple[str, ...]) -> int | None:
        return config.whole(*keys) if any(text.get(key) is not None for key in keys) else None

    num_experts, top_k = size(_NUM_EXPERTS), size(("num_experts_per_tok",))
    if num_experts is not None and top_k is not None and top_k > num_experts:
        raise config.wrong("num_experts_per_tok", top_k, f"at most {num_experts}, the number of experts")
    return ModelConfig(
        values=values,
        file=file,
        model_type=family,
        num_experts=num_experts,
        hidden_size=size(_HIDDEN_SIZE),
        intermediate_size=size(_INTERMEDIATE_SIZE),
        quantization=_quantization(config, values),
    )


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: `text_config` in multimodal models, else the whole."""
    inner = values.get("text_config")
    return inner if isinstance(inner, Mapping) and values.get("model_type") not in list(FAMILIES) else values


def _quantization(config: Config, values: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in (values, config.values):
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise config.wrong(key, found, "an object")
            return _checked_quantization(config, found)
    assert config.file is not None
    beside = config.file.with_name(_MODELOPT_FILE)
    if beside.is_file():
        found = read_json(beside).get("quantization")
        if isinstance(found, Mapping):
            return _checked_quantization(config, {"quant_method": "modelopt", **found})
    return {}


def _checked_quantization(config: Config, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a quantization; raise if one that layouts read as a name is none."""
    for key in ("quant_method", "quant_algo", "format", "activation_scheme", "scale_fmt"):
        value = quantization.get(key)
        if value is not None and not isinstance(value, str):
            raise config.wrong(f"quantization_config.{key}", value, "a string")
    return quantization
