"""The experts modules of a Transformers model: where they are, what they compute, and their weights in our layout.

Transformers 5 keeps the experts of a layer in one module, with fused weights, and calls it with the routes that the
model's own router has found:

    block.experts(hidden_states, top_k_index, top_k_weights)

All that a plan needs to know of such a module is read from the module itself: its sizes from the shapes of its weights
(also on the meta device), its layout from the flags that Transformers puts on it, the number of choices and the scaling
factor from the router beside it. So layers of one model may differ, and what a config says wrong misleads nobody. Only
the formula between the two products is a matter of the model's family, and `FAMILIES` knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tokenyard.errors import InputError, unknown_name
from tokenyard.experts import Activation, ExpertWeights
from tokenyard.experts.base import WEIGHT_DTYPES
from tokenyard.formats.base import dtype_name
from tokenyard.integrations.families import FAMILIES, Config
from tokenyard.rows import describe
from tokenyard.spec import LayerSpec

# Our names of an experts module's weights, and the module's own.
FIELDS = {"w13": "gate_up_proj", "w2": "down_proj", "b13": "gate_up_proj_bias", "b2": "down_proj_bias"}
# What Transformers says of a module's layout.
FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the fused experts of a layer, as Transformers has them."""
    return all(hasattr(module, name) for name in (*FLAGS, "down_proj"))


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertModule:
    """One experts module, and the block around it, whose router chooses."""

    name: str  # of the block, as layers are called: model.layers.3.mlp
    block: nn.Module
    attribute: str  # under which the block keeps the module
    activation: Activation
    top_k: int
    routed_scaling: float  # the factor that the router's weights hold

    @property
    def module(self) -> nn.Module:
        """What is there now: the model's own experts, or those that took their place."""
        found: nn.Module = getattr(self.block, self.attribute)
        return found

    def replace_by(self, experts: nn.Module) -> None:
        """Put another module in its place. The weights of the first are gone if nobody else holds them."""
        setattr(self.block, self.attribute, experts)

    @property
    def is_loaded(self) -> bool:
        """Whether the module holds numbers, and not only shapes."""
        return not any(getattr(self.module, FIELDS[name]).is_meta for name in self._fields())

    def _fields(self) -> list[str]:
        return ["w13", "w2", *(("b13", "b2") if self.module.has_bias else ())]

    def spec(self, dtype: torch.dtype | None = None, **changes: Any) -> LayerSpec:
        """The layer that a plan makes of it. Rows have the dtype of the weights, unless another is given."""
        module = self.module
        first, second = getattr(module, FIELDS["w13"]), getattr(module, FIELDS["w2"])
        num_experts, hidden, inner = second.shape
        if module.is_transposed:
            hidden, inner = inner, hidden
        dtype = first.dtype if dtype is None else dtype
        spec = LayerSpec(
            name=self.name,
            hidden_size=hidden,
            intermediate_size=inner,
            num_experts=num_experts,
            top_k=self.top_k,
            dtype=dtype,
            activation=self.activation,
            bias=bool(module.has_bias),
            weights=self._plain_format(first, dtype),
            routed_scaling=self.routed_scaling,
        )
        return replace(spec, **{name: value for name, value in changes.items() if value is not None})

    def _plain_format(self, first: Tensor, dtype: torch.dtype) -> str:
        for name, held in WEIGHT_DTYPES.items():
            if held == (dtype if first.is_meta else first.dtype):
                return name
        raise InputError(
            f"the experts hold {describe(first)}",
            expected=f"weights in {' or '.join(map(dtype_name, WEIGHT_DTYPES.values()))}",
            fix="leave the experts out when the model is loaded (`experts_left_out`), and let them come from the "
            "checkpoint (`checkpoint=`), which reads quantized ones as they are",
            layer=self.name,
        )

    def weights(self, experts: Sequence[int]) -> ExpertWeights:
        """Some experts' weights, in our layout: a copy, or the module's own tensors where it is all of them."""
        module = self.module
        everybody = list(experts) == list(range(len(getattr(module, FIELDS["w2"]))))
        parts: dict[str, Tensor] = {}
        for name in self._fields():
            tensor = getattr(module, FIELDS[name]).detach()
            if tensor.is_meta:
                raise InputError(
                    f"{FIELDS[name]} has a shape, {list(tensor.shape)}, and no numbers (it is on the meta device)",
                    expected="loaded experts, or a checkpoint that they come from",
                    fix="pass `checkpoint=`, the folder of the model",
                    layer=self.name,
                )
            chosen = tensor if everybody else tensor[list(experts)]
            transposed = module.is_transposed and name.startswith("w")
            parts[name] = chosen.mT.contiguous() if transposed else chosen
        return ExpertWeights(**parts)


def expert_modules(model: nn.Module) -> list[ExpertModule]:
    """The experts modules of a model, in the order in which a token meets them."""
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    config = _config(model)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts module (fused weights `gate_up_proj` and `down_proj`)",
            expected="a Mixture-of-Experts model of Transformers 5, not yet sharded",
            fix="a dense model needs no plan, and a sharded one is sharded once",
        )
    return [_read(model, name, module, config) for name, module in found]


def _config(model: nn.Module) -> Config:
    """The values of the model's text config, with the defaults of its family."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"the model is {describe(model)} without a config of Transformers",
            expected="a model of Transformers",
            fix="pass what AutoModelForCausalLM.from_pretrained returns",
        )
    assert config is not None
    values = config.get_text_config().to_dict()
    family = str(values.get("model_type"))
    if family not in FAMILIES:
        error = unknown_name("model family", family, FAMILIES)
        error.found = f"{type(model).__name__} is of an {error.found}"
        raise error
    return Config(
        values=values, source=type(model).__name__, family=family, defaults=FAMILIES[family].defaults
    )


def _read(model: nn.Module, name: str, module: nn.Module, config: Config) -> ExpertModule:
    block_name, _, attribute = name.rpartition(".")
    block = model.get_submodule(block_name)
    _check_layout(module, block_name, config)
    router = getattr(block, "gate", None) or getattr(block, "router", None)
    top_k = getattr(router, "top_k", None) or getattr(block, "top_k", None)
    return ExpertModule(
        name=block_name,
        block=block,
        attribute=attribute,
        activation=_activation(module, config),
        top_k=config.whole("num_experts_per_tok") if top_k is None else int(top_k),
        routed_scaling=float(getattr(router, "routed_scaling_factor", 1.0)),
    )


def _activation(module: nn.Module, config: Config) -> Activation:
    """The family's formula, with the constants that the module computes with."""
    formula = FAMILIES[config.family].activation(config)
    constants = {name: float(getattr(module, name, value)) for name, value in formula.parameters}
    return replace(formula, parameters=tuple(constants.items()))


def _check_layout(module: nn.Module, name: str, config: Config) -> None:
    """Raise where the module is laid out, or computes, as its family does not."""
    family, interleaved = FAMILIES[config.family], not module.is_concatenated
    expected = family.activation(config)
    fits = (
        bool(module.has_gate) == expected.gated
        and interleaved == expected.interleaved
        and bool(module.has_bias) == family.bias
        and not getattr(module, "has_post_expert_norm", False)
    )
    if not fits:
        flags = ", ".join(f"{flag}={getattr(module, flag)}" for flag in FLAGS)
        raise InputError(
            f"{type(module).__name__} has {flags}",
            expected=f"the experts of {config.family}",
            fix="this version of Transformers has other experts than those we know; compare with "
            "tokenyard.integrations.transformers.expert_modules",
            layer=name,
        )
