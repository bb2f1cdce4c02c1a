"""What a model's `config.json` says of its experts, whatever the family: sizes, and how they are quantized.

This is what the weights are held against. How a family routes, and which of its layers are MoE, is not needed to
read weights; `tokenyard.integrations.huggingface` reads that of the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.checkpoints.files import read_json
from tokenyard.errors import CheckpointError

# The keys that families use; the first that is there counts. `intermediate_size` is that of the dense layers where
# there is a key of the experts' own.
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_INTERMEDIATE_SIZE = ("moe_intermediate_size", "intermediate_size")
_HIDDEN_SIZE = ("hidden_size",)

# Where ModelOpt writes down what it did, beside configs that do not say it.
_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's config, as far as its experts' weights go. None: the file does not say."""

    file: Path
    model_type: str | None
    num_experts: int | None
    hidden_size: int | None
    intermediate_size: int | None
    # Empty where nothing is quantized.
    quantization: Mapping[str, Any]

    @property
    def quantized_as(self) -> str:
        """How the config calls its way of quantizing, for messages."""
        if not self.quantization:
            return "no quantization_config"
        told = {
            key: self.quantization[key]
            for key in ("quant_method", "quant_algo", "format")
            if key in self.quantization
        }
        return "quantization_config with " + ", ".join(f"{key} {value!r:.60}" for key, value in told.items())


def model_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """Read a config's values."""
    text = text_config(values)

    def size(keys: tuple[str, ...]) -> int | None:
        key = next((key for key in keys if text.get(key) is not None), None)
        if key is None:
            return None
        value = text[key]
        if type(value) is not int or not 1 <= value < 2**31:
            raise CheckpointError(
                f"{file} has {key}={value!r:.80}",
                expected="a whole number from 1 to 2147483647",
                fix=f"mend {key!r} in the file",
                file=file,
            )
        return value

    model_type = text.get("model_type")
    return ModelConfig(
        file=file,
        model_type=model_type if isinstance(model_type, str) else None,
        num_experts=size(_NUM_EXPERTS),
        hidden_size=size(_HIDDEN_SIZE),
        intermediate_size=size(_INTERMEDIATE_SIZE),
        quantization=_quantization(values, text, file),
    )


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is about the language model: a model of several parts keeps it in `text_config`."""
    inner = values.get("text_config")
    return inner if isinstance(inner, Mapping) and "hidden_size" not in values else values


def _quantization(values: Mapping[str, Any], text: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    for part in (values, text):
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointError(
                    f"{file} has {key}={found!r:.80}",
                    expected="an object",
                    fix=f"mend {key!r} in the file",
                    file=file,
                )
            return found
    beside = file.with_name(_MODELOPT_FILE)
    if beside.is_file():
        found = read_json(beside).get("quantization")
        if isinstance(found, Mapping):
            return {"quant_method": "modelopt", **found}
    return {}
