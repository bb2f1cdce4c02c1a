"""The one reader of a model's `config.json`, and what the file says of the experts, whatever the family.

`model_config` reads what weights are compared with: sizes, and how they are quantized. How a family routes, and which
of its layers are MoE, is not needed to read weights; `tokenyard.integrations.huggingface` takes that from the same
values (`families.Config`).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.checkpoints.families import FAMILIES, Config
from tokenyard.errors import CheckpointError

# The file that says what a model is.
CONFIG = "config.json"
# JSON files of a checkpoint are read whole. The index of a model of a million tensors has about 100 MB.
_LARGEST_JSON = 256_000_000

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

    values: Mapping[str, Any]  # what is in the file
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
        return f"quantization_config with {quantization_in_words(self.quantization)}"


def quantization_in_words(quantization: Mapping[str, Any]) -> str:
    """How a `quantization_config` calls its way of quantizing, for messages."""
    declared = {
        key: quantization[key] for key in ("quant_method", "quant_algo", "format") if key in quantization
    }
    return ", ".join(f"{key} {value!r:.60}" for key, value in declared.items())


def read_json(
    path: Path, *, expected: str = "a JSON object", fix: str = "download or copy the file again"
) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device or a pipe has no end
            raise ValueError("no file")
        if found.st_size > _LARGEST_JSON:
            raise ValueError(f"more than {_LARGEST_JSON} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else str(error)[:120]
        raise CheckpointError(
            f"{path} cannot be read ({why})", expected=expected, fix=fix, file=path
        ) from error
    return values


def model_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """Read a config's values."""
    text = text_config(values)
    model_type = text.get("model_type")
    family = model_type if isinstance(model_type, str) else None
    config = Config(values=text, source=str(file), family=family or "", file=file)

    def size(keys: tuple[str, ...]) -> int | None:
        return config.whole(*keys) if any(text.get(key) is not None for key in keys) else None

    return ModelConfig(
        values=values,
        file=file,
        model_type=family,
        num_experts=size(_NUM_EXPERTS),
        hidden_size=size(_HIDDEN_SIZE),
        intermediate_size=size(_INTERMEDIATE_SIZE),
        quantization=_quantization(config, values),
    )


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is about the language model: a model of several parts keeps it in `text_config`."""
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
            return found
    assert config.file is not None
    beside = config.file.with_name(_MODELOPT_FILE)
    if beside.is_file():
        found = read_json(beside).get("quantization")
        if isinstance(found, Mapping):
            return {"quant_method": "modelopt", **found}
    return {}
