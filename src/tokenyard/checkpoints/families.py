"""How the model families of Hugging Face write down their MoE layers.

A `Family` says under which key a `config.json` keeps its number of experts, which of its layers are MoE, how
it routes and what a missing key means; `FAMILIES` holds one for each `model_type`. Defaults are those of the
family's config class in transformers, and a test compares the two. `Config` reads values by
key, with the type that they must have, and its errors name the key, the file and the family.

All readers of configs raise the error of `unknown_family` for a family that is not in `FAMILIES`, and that of
`Config.choice` for a formula that is not known. Both errors list what is known, but neither suggests a similar name:
with another name in its config, the model would be another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenyard.errors import CheckpointError, InputError, UnknownName, shown
from tokenyard.experts import ACTIVATIONS, Activation
from tokenyard.routing import GroupedSigmoidRouter, Router, SoftmaxRouter, TopLogitsRouter, is_scaling

# The largest size that is accepted: a typing error in a config must not lead to huge allocations.
_LARGEST = 2**31 - 1

# The activation of each value of `hidden_act`. All families here apply it to the gate, and multiply by up.
HIDDEN_ACTS: dict[str, Activation] = {
    "silu": ACTIVATIONS["swiglu"],
    "swish": ACTIVATIONS["swiglu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_new": ACTIVATIONS["gelu_tanh"],
    "gelu_pytorch_tanh": ACTIVATIONS["gelu_tanh"],
    "relu2": Activation(name="relu2", gated=True),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The values of one file, read by key with the type that they must have."""

    values: Mapping[str, Any]  # the values of the file, by key
    source: str  # the name of the file in errors
    family: str  # the `model_type`; empty where the file has none
    # Values of keys that the file may lack.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None  # the file that holds the values, if there is one

    def get(self, key: str) -> Any:
        """The value of a key; if the file lacks it, the family's default, or None."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def whole(self, *keys: str, least: int = 1, most: int = _LARGEST) -> int:
        """The value of the first of these keys that is present: a whole number from `least` to `most`."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = self.get(key)
        if not _is_whole(value, least, most):
            raise self.wrong(key, value, f"a whole number from {least} to {most}", also=keys[1:])
        return int(value)

    def _checked(self, key: str, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(key)
        if not fits(value):
            raise self.wrong(key, value, expected)
        return value

    def positive(self, key: str) -> float:
        """The value of a key that holds a finite number above 0."""
        return float(self._checked(key, is_scaling, "a positive number"))

    def flag(self, key: str) -> bool:
        """The value of a key that holds true or false."""
        return bool(self._checked(key, lambda value: isinstance(value, bool), "true or false"))

    def choice(self, key: str, choices: Mapping[str, Any]) -> Any:
        """The entry of `choices` that the value of a key names."""
        value = self.get(key)
        expected = f"one of {', '.join(choices)}"
        if not isinstance(value, str):
            raise self.wrong(key, value, expected)
        if value not in choices:
            raise UnknownName(
                f"{self.source} ({self.family}) has {key}={shown(value)}, which is not known to tokenyard",
                expected=expected,
                fix=f"use a model with one of these: another {key!r} in the file would be another model",
            )
        return choices[value]

    def text(self, key: str) -> str:
        """The value of a key that holds a string."""
        return str(self._checked(key, lambda value: isinstance(value, str), "a string"))

    def _items(self, key: str, fits: Callable[[Any], bool], expected: str) -> list[Any] | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(map(fits, value))):
            raise self.wrong(key, value, expected)
        return value

    def indices(self, key: str) -> list[int]:
        """The value of a key that holds a list of layer numbers; empty if the key is absent."""
        return self._items(key, lambda index: _is_whole(index, 0), "a list of layer numbers") or []

    def kinds(self, key: str) -> list[str] | None:
        """The value of a key that holds a list with the kind of each layer; None if the key is absent."""
        return self._items(key, lambda kind: isinstance(kind, str), "a list with the kind of each layer")

    def check_present(self) -> None:
        """Raise if a key that is present has a value that no reader takes; absent ones are left to who needs them."""
        for key, read in {**GENERAL_KEYS, **(FAMILY_KEYS if self.family in FAMILIES else {})}.items():
            if self.values.get(key) is not None:
                read(self, key)

    def wrong(self, key: str, value: object, expected: str, also: tuple[str, ...] = ()) -> CheckpointError:
        """The error for a value that is missing or is not what was `expected`; `also` are other names of the key."""
        found = self.source + (f" ({self.family})" if self.family else "")
        fix = f"mend {key!r} in the file"
        if value is None:
            found += f" has no {key!r}" + "".join(f" (or {name!r})" for name in also)
            fix = f"add {key!r} to the file, or check that its model_type is {self.family!r}"
        else:
            found += f" has {key}={shown(value)}"
        return CheckpointError(found, expected=expected, fix=fix, file=self.file)


def _from_zero(config: Config, key: str) -> int:
    return config.whole(key, least=0)


# How the value of each key is read, wherever it is read. Keys that mean the same in all configs;
GENERAL_KEYS: dict[str, Callable[[Config, str], object]] = {
    "model_type": Config.text,
    "hidden_act": Config.text,
    "dtype": Config.text,
    "torch_dtype": Config.text,
    "num_hidden_layers": Config.whole,
    "num_experts_per_tok": Config.whole,
}
# and those that only `FAMILIES` give this meaning.
FAMILY_KEYS: dict[str, Callable[[Config, str], object]] = {
    "decoder_sparse_step": Config.whole,
    "mlp_only_layers": Config.indices,
    "mlp_layer_types": Config.kinds,
    "first_k_dense_replace": _from_zero,
    "moe_layer_freq": Config.whole,
    "num_nextn_predict_layers": _from_zero,
    "norm_topk_prob": Config.flag,
    "routed_scaling_factor": Config.positive,
    "n_group": Config.whole,
    "topk_group": Config.whole,
    "scoring_func": Config.text,
    "topk_method": Config.text,
    "swiglu_limit": Config.positive,
    "swiglu_alpha": Config.positive,
}

# --- Which layers are MoE, and how they route -------------------------------------------------------------


def _sparse_steps(config: Config, index: int) -> bool:
    """Qwen: every `decoder_sparse_step`-th layer is MoE, except those that `mlp_only_layers` lists."""
    step = config.whole("decoder_sparse_step")
    return (index + 1) % step == 0 and index not in config.indices("mlp_only_layers")


def _after_dense(config: Config, index: int) -> bool:
    """DeepSeek: layers are MoE after the first k dense ones. Newer files list the kind of every layer instead."""
    kinds = config.kinds("mlp_layer_types")
    if kinds is not None and index < len(kinds):
        return kinds[index] != "dense"
    first, every = config.whole("first_k_dense_replace", least=0), config.whole("moe_layer_freq")
    return index >= first and index % every == 0


def _renormalized_softmax(config: Config) -> Router | None:
    return SoftmaxRouter(top_k(config), renormalize=True)


def _softmax(config: Config) -> Router | None:
    return SoftmaxRouter(top_k(config), renormalize=config.flag("norm_topk_prob"))


def _softmax_v2(config: Config) -> Router | None:
    """DeepSeek-V2: a scaled softmax. None, so that the caller must route, if the config limits the choice to groups of
    experts, or renormalizes (in which its two reference implementations differ)."""
    config.choice("scoring_func", {"softmax": None})
    greedy = config.choice("topk_method", {"greedy": True, "group_limited_greedy": False})
    if not greedy or config.flag("norm_topk_prob"):
        return None
    scaling = config.positive("routed_scaling_factor")
    return SoftmaxRouter(top_k(config), renormalize=False, routed_scaling=scaling)


def _grouped_sigmoid(config: Config) -> Router | None:
    config.choice("scoring_func", {"sigmoid": None})
    # A model without groups of experts may have null for these keys.
    groups = {
        key: 1 if key in config.values and config.values[key] is None else config.whole(key)
        for key in ("n_group", "topk_group")
    }
    return GroupedSigmoidRouter(
        top_k(config),
        renormalize=config.flag("norm_topk_prob"),
        routed_scaling=config.positive("routed_scaling_factor"),
        num_groups=groups["n_group"],
        topk_groups=groups["topk_group"],
    )


def top_k(config: Config) -> int:
    """K, the experts per token."""
    return config.whole("num_experts_per_tok")


def _clamped_swiglu(config: Config) -> Activation:
    constants = {"limit": config.positive("swiglu_limit"), "alpha": config.positive("swiglu_alpha")}
    base = ACTIVATIONS["swiglu_clamped"]
    return replace(base, parameters=tuple({**dict(base.parameters), **constants}.items()))


# --- The families -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of one `model_type` write down their MoE layers."""

    num_experts: tuple[str, ...]  # the keys that may hold the number of experts, the usual one first
    intermediate_size: str = "moe_intermediate_size"  # the key that holds the width of an expert
    # Whether the layer with this index in the model is MoE.
    is_moe: Callable[[Config, int], bool] = lambda config, index: True
    router: Callable[[Config], Router | None]  # the router that a config describes; None: the caller routes
    # The activation that a config describes.
    activation: Callable[[Config], Activation] = lambda config: config.choice("hidden_act", HIDDEN_ACTS)
    bias: bool = False  # whether experts have biases
    # The key that holds the number of (multi-token) prediction layers after the last one; None: there are none.
    prediction_layers: str | None = None
    # The values of keys that a file may lack.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_MIXTRAL = Family(
    num_experts=("num_local_experts", "num_experts"),
    intermediate_size="intermediate_size",
    router=_renormalized_softmax,
    defaults={"hidden_act": "silu"},
)
_QWEN = Family(
    num_experts=("num_experts", "num_local_experts"),
    is_moe=_sparse_steps,
    router=_softmax,
    defaults={"hidden_act": "silu", "decoder_sparse_step": 1, "norm_topk_prob": False},
)
_SIGMOID = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
_GLM4 = Family(
    num_experts=("n_routed_experts", "num_local_experts"),
    is_moe=_after_dense,
    router=_grouped_sigmoid,
    prediction_layers="num_nextn_predict_layers",
    defaults=_SIGMOID | {"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1},
)
_V3_DEFAULTS = {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_DEEPSEEK_V3 = replace(_GLM4, defaults={**_GLM4.defaults, **_V3_DEFAULTS})

# The families by `model_type`.
FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_next": replace(_QWEN, defaults={**_QWEN.defaults, "norm_topk_prob": True}),
    "qwen3_vl_moe_text": replace(_QWEN, router=_renormalized_softmax),
    "deepseek_v2": Family(
        num_experts=("n_routed_experts", "num_experts"),
        is_moe=_after_dense,
        router=_softmax_v2,
        defaults={
            "hidden_act": "silu",
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(_DEEPSEEK_V3, defaults={**_DEEPSEEK_V3.defaults, "num_nextn_predict_layers": 0}),
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": _GLM4,
    "glm4v_moe_text": replace(_GLM4, prediction_layers=None),
    "gpt_oss": replace(
        _MIXTRAL,
        router=lambda config: TopLogitsRouter(top_k(config)),
        activation=_clamped_swiglu,
        bias=True,
        defaults={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    ),
    "olmoe": replace(
        _MIXTRAL,
        num_experts=_QWEN.num_experts,
        router=_softmax,
        defaults={"hidden_act": "silu", "norm_topk_prob": False},
    ),
    "minimax_m2": replace(_MIXTRAL, router=_grouped_sigmoid, defaults=_SIGMOID),
}


def _is_whole(value: object, least: int, most: int = _LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def family_config(values: Mapping[str, Any], source: str, *, experts: bool = False) -> Config:
    """The values of a config, with the defaults of its family. `experts` is passed on to `unknown_family`."""
    name = values.get("model_type")
    if not isinstance(name, str):
        raise InputError(
            f"{source} has model_type={shown(name)}",
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            fix="pass the config.json of a Hugging Face model",
        )
    if name not in FAMILIES:
        raise unknown_family(values, source, experts=experts)
    return Config(values=values, source=source, family=name, defaults=FAMILIES[name].defaults)


def unknown_family(
    values: Mapping[str, Any], source: str, *, experts: bool = False, why: str = ""
) -> UnknownName:
    """The error for a config whose `model_type` is none of `FAMILIES`. Everything that reads a config raises it.

    `experts` is true if the model has tensors or modules of experts, whatever its config says: it is not called dense
    then. `why` is a further finding, which the message quotes.

    >>> print(unknown_family({"model_type": "jamba", "num_experts": 16}, "config.json"))  # doctest: +ELLIPSIS
    config.json has model_type 'jamba', which is not known to tokenyard; expected one of deepseek_v2, ...
    >>> print(unknown_family({"model_type": "llama"}, "config.json").found)
    config.json has model_type 'llama', which is not known to tokenyard: a dense model, without experts
    """
    dense = not experts and not counts_experts(values)
    found = f"{source} has model_type {shown(values.get('model_type'))}, which is not known to tokenyard"
    return UnknownName(
        found
        + (": a dense model, without experts" if dense else "")
        + (f" ({why})" if why and not dense else ""),
        expected=f"one of {', '.join(sorted(FAMILIES))}",
        fix="use a model with experts: a dense one needs no expert parallelism"
        if dense
        else "use a model of one of these families, or declare this one in `tokenyard.checkpoints.families.FAMILIES`",
    )


def counts_experts(values: Mapping[str, Any]) -> bool:
    """Whether a config of an unknown family, or a config nested in it, has a number of experts that is not 0."""
    return any(
        counts_experts(value)
        if isinstance(value, Mapping)
        else "expert" in str(key) and "per_tok" not in str(key) and type(value) in (int, list) and bool(value)
        for key, value in values.items()
    )
