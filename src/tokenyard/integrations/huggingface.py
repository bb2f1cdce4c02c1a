"""Read a Hugging Face `config.json` as layers: what a model needs of a plan, without its weights.

    layers_from_config("config.json", wire="nvfp4", max_tokens=4096) → [LayerSpec(name="model.layers.3.mlp", …), …]

The file is plain JSON, and transformers is not imported. Model families spell the same things differently, so
each is *declared* in `families.FAMILIES`: under which key it keeps its number of experts, which of its layers are MoE,
how it routes. A new family is a new entry.

What is read strictly, and what is not:

- Shapes (`hidden_size`, experts, top-k, …) must be there: every saved config has them, and a default of
  another model would give a plan of another model. Refinements that older files lack (`norm_topk_prob`,
  `first_k_dense_replace`, …) take the default of the family's config class in transformers. null counts as absent.
- The dtype of the rows is `dtype` (or `torch_dtype`); where neither is written, bf16.
- The bias with which DeepSeek-like routers choose experts is a weight, not a setting: the specs have routers without
  it, and the loader of the weights replaces these.
- A router that is not in `tokenyard.routing` is left out (`router=None`): the caller then passes ready routes,
  and has the duty of the routed scaling, whose factor the spec keeps. DeepSeek-V2's choice by groups is such a router.
- Prediction (MTP) layers follow the last layer, and their numbers continue its number, as in the checkpoint.
- A model of several parts keeps its language model in `text_config`; its layers are then named
  `model.language_model.layers.3.mlp`, as in the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenyard.checkpoints import CONFIG, read_json, recipe_inner, text_config
from tokenyard.checkpoints.families import FAMILIES, Config, Family, family_config, top_k
from tokenyard.errors import InputError, TokenyardError
from tokenyard.experts import Experts
from tokenyard.formats import Format, for_dtype
from tokenyard.formats.base import ROW_DTYPES, dtype_name
from tokenyard.planning.choosing import AUTO
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement, Router
from tokenyard.routing.placement import MOST_EXPERTS

# More than any model has; a file with a typing error must not fill the memory.
_MOST_LAYERS = 4096


def layers_from_config(
    config: Mapping[str, Any] | str | Path,
    *,
    wire: str | Format | None = None,
    combine_wire: str | Format | None = None,
    max_tokens: int | None = None,
    experts: str | type[Experts] = AUTO,
    placement: str | Placement = "contiguous",
    weights: str | None = None,
    inner: str | Format | None = None,
    prefix: str | None = None,
) -> list[LayerSpec]:
    """The MoE layers of a model, in order. `config` is the file, its folder, or what is in it.

    `weights` is the format that holds the experts' weights; by default the plain one of the model's dtype.
    `inner` is how numbers are held between an expert's two products; by default as `quantization_config` says for such
    weights (`activation_scheme` "dynamic": quantized), else exactly.
    `prefix` precedes a layer's number in its name. The other arguments are fields of `LayerSpec`.

    >>> layers = layers_from_config({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    ...     "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}, wire="mxfp8")
    >>> len(layers), layers[3].name, str(layers[3].router)
    (32, 'model.layers.3.mlp', 'softmax(top_k=2, renormalize=True)')
    """
    values, source = _read(config)
    text = text_config(values)
    nested = text is not values
    if nested:
        # The whole model's dtype counts where its language model does not say one of its own.
        dtypes = (part.get(key) for part in (text, values) for key in ("dtype", "torch_dtype"))
        quantization = values.get("quantization_config")
        values = {
            "quantization_config": quantization,
            **text,
            "dtype": next((dtype for dtype in dtypes if dtype is not None), None),
        }
    settings = family_config(values, source)
    family = FAMILIES[settings.family]
    prefix = prefix or ("model.language_model.layers" if nested else "model.layers")
    dtype = _dtype(settings)
    num_experts = settings.whole(*family.num_experts, most=MOST_EXPERTS)
    router = _router(family, settings, num_experts)
    scaling = settings.positive("routed_scaling_factor") if router is None else None
    held = weights or for_dtype(dtype).name
    first = LayerSpec(
        name=prefix,
        hidden_size=settings.whole("hidden_size"),
        intermediate_size=settings.whole(family.intermediate_size),
        num_experts=num_experts,
        top_k=top_k(settings),
        max_tokens=max_tokens,
        dtype=dtype,
        wire=wire,
        combine_wire=combine_wire,
        activation=family.activation(settings),
        bias=family.bias,
        weights=held,
        inner=recipe_inner(held, values.get("quantization_config")) if inner is None else inner,
        router=router,
        routed_scaling=scaling,
        placement=placement,
        experts=experts,
    )
    return [replace(first, name=f"{prefix}.{index}.mlp") for index in _moe_layers(family, settings)]


def _moe_layers(family: Family, config: Config) -> list[int]:
    total = config.whole("num_hidden_layers")
    heads = 0 if family.prediction_layers is None else config.whole(family.prediction_layers, least=0)
    if total + heads > _MOST_LAYERS:
        raise config.wrong("num_hidden_layers", total + heads, f"at most {_MOST_LAYERS} layers")
    numbers = [index for index in range(total) if family.is_moe(config, index)]
    if not numbers:
        raise InputError(
            f"{config.source} ({config.family}): none of the {total} layers is MoE",
            expected="at least one MoE layer",
            fix="a dense model needs no plan; otherwise mend the keys that say which layers are dense",
        )
    # A prediction layer is a copy of the last kind of layer.
    return numbers + list(range(total, total + heads))


def _router(family: Family, config: Config, num_experts: int) -> Router | None:
    try:
        router = family.router(config)
        if router is not None:
            router.check_experts(num_experts)
    except TokenyardError as error:
        if config.source in error.found:
            raise
        # Each value is valid, but their combination is not.
        found = f"{config.source} ({config.family}): {error.found}"
        raise InputError(found, expected=error.expected, fix="mend these keys in the file") from error
    return router


def _dtype(config: Config) -> torch.dtype:
    key = next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    known = {dtype_name(dtype): dtype for dtype in ROW_DTYPES}
    dtype: torch.dtype = torch.bfloat16 if key is None else config.choice(key, known)
    return dtype


def _read(config: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, "the config"
    if not isinstance(config, str | Path):
        raise InputError(
            f"the config is a {type(config).__name__}",
            expected="the path of a config.json, or what is in it as a dict",
            fix="pass config.to_dict() for a config object of transformers",
        )
    path = Path(config) / CONFIG if os.path.isdir(config) else Path(config)
    expected = "the config.json of a Hugging Face model, or its folder"
    values = read_json(path, expected=expected, fix="check the path")
    return values, str(path)


__all__ = ["FAMILIES", "layers_from_config"]
