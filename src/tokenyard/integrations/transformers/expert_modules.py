"""The experts modules of a Transformers model: where they are, what they compute, and their weights in our layout.

Transformers 5 keeps the experts of a layer in one module, with fused weights, and calls it with the routes that the
model's own router has found:

    block.experts(hidden_states, top_k_index, top_k_weights)

All that a plan needs to know of such a module is read from the module itself: its sizes from the shapes of its weights
(also on the meta device), its layout from the flags that Transformers puts on it, the number of choices and the scaling
factor from the router beside it. So layers of one model may differ, and a wrong config does no harm. Only the formula
between the two products comes from the model's family (`FAMILIES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenyard.checkpoints import Checkpoint, CheckpointLayer
from tokenyard.checkpoints.families import FAMILIES, Config, family_config
from tokenyard.errors import ContractError, InputError
from tokenyard.experts import Activation, ExpertWeights, activation
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import Format, QuantizedMatrix, weight_format
from tokenyard.formats.base import dtype_name
from tokenyard.layer.compiled import INFERENCE
from tokenyard.planning.spec import LayerSpec
from tokenyard.rows import describe

# Our names of an experts module's weights, and the module's own.
FIELDS = {"w13": "gate_up_proj", "w2": "down_proj", "b13": "gate_up_proj_bias", "b2": "down_proj_bias"}
# The attributes by which Transformers declares a module's layout.
FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the fused experts of a layer, as Transformers has them."""
    return all(hasattr(module, name) for name in (*FLAGS, "down_proj"))


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertModule:
    """One experts module, and the block around it, whose router chooses the experts."""

    name: str  # the name of the block in the model: model.layers.3.mlp
    block: nn.Module
    attribute: str  # the attribute of the block that holds the module
    activation: Activation
    top_k: int
    routed_scaling: float  # the factor that the router's weights hold

    @property
    def module(self) -> nn.Module:
        """The module that is there now: the model's own experts, or those that replaced them."""
        found: nn.Module = getattr(self.block, self.attribute)
        return found

    def replace_by(self, experts: nn.Module) -> None:
        """Replace the module by one in the same mode. Its weights are freed, unless something else refers to them."""
        setattr(self.block, self.attribute, experts.train(self.module.training))

    @property
    def is_loaded(self) -> bool:
        """Whether the module holds numbers, and not only shapes."""
        return not any(tensor.is_meta for tensor in tensors_of(self.module).values())

    def spec(self, **changes: Any) -> LayerSpec:
        """The module as a layer of a plan, with these changes. Rows have the dtype of the weights."""
        num_experts, hidden, inner = sizes_of(self.module)
        held = tensors_of(self.module)["w13"]
        spec = LayerSpec(
            name=self.name,
            hidden_size=hidden,
            intermediate_size=inner,
            num_experts=num_experts,
            top_k=self.top_k,
            dtype=held.dtype,
            activation=self.activation,
            bias=bool(self.module.has_bias),
            weights=plain_format(held, self.name),
            routed_scaling=self.routed_scaling,
        )
        return replace(spec, **{name: value for name, value in changes.items() if value is not None})

    def weights(self, experts: Sequence[int]) -> ExpertWeights:
        """Some experts' weights, in our layout: a copy, or the module's own tensors if all experts are asked for."""
        if not self.is_loaded:
            raise InputError(
                f"the experts have shapes ({', '.join(FIELDS[name] for name in tensors_of(self.module))}) and no "
                "numbers: they were left out, or are on the meta device",
                expected="loaded experts, or a checkpoint that they come from",
                fix="pass `checkpoint=`, the folder of the model",
                layer=self.name,
            )
        chosen = weights_of(self.module)
        if list(experts) != list(range(sizes_of(self.module)[0])):
            chosen = chosen.select(experts)
        w13, w2 = chosen.plain_matrices()
        return replace(chosen, w13=w13.contiguous(), w2=w2.contiguous())


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The weights of an experts module, as it has them, by our names."""
    names = ("w13", "w2", "b13", "b2") if module.has_bias else ("w13", "w2")
    return {name: getattr(module, FIELDS[name]) for name in names}


def sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """E, H and I of an experts module."""
    num_experts, hidden, inner = tensors_of(module)["w2"].shape
    return (num_experts, inner, hidden) if module.is_transposed else (num_experts, hidden, inner)


def weights_of(module: nn.Module) -> ExpertWeights:
    """All weights of an experts module, in our layout: views, no copies."""
    tensors = {name: tensor.detach() for name, tensor in tensors_of(module).items()}
    if module.is_transposed:
        tensors |= {name: tensors[name].mT for name in ("w13", "w2")}
    return ExpertWeights(**tensors)  # type: ignore[arg-type]


def plain_format(held: Tensor, layer: str | None = None) -> str:
    """The name of the weight format that plain weights are in."""
    for name, dtype in WEIGHT_DTYPES.items():
        if dtype == held.dtype:
            return name
    raise InputError(
        f"the experts hold {describe(held)}",
        expected=f"weights in {' or '.join(map(dtype_name, WEIGHT_DTYPES.values()))}",
        fix="leave the experts out when the model is loaded (`experts_left_out`), and let them come from the "
        "checkpoint (`checkpoint=`), which reads quantized ones as they are",
        layer=layer,
    )


def expert_modules(model: nn.Module) -> list[ExpertModule]:
    """The experts modules of a model, in the order of its layers."""
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    config = config_of(model, type(model).__name__)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts module (fused weights `gate_up_proj` and `down_proj`)",
            expected="a Mixture-of-Experts model of Transformers 5, not yet sharded",
            fix="a dense model needs no plan, and a sharded one is sharded once",
        )
    return [_read(model, name, module, config) for name, module in found]


def config_of(owner: nn.Module, source: str) -> Config:
    """The values of the text config of a model, or of one of its modules, with the defaults of its family."""
    config = getattr(owner, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"{source} has no config of Transformers",
            expected="a model of Transformers",
            fix="pass what AutoModelForCausalLM.from_pretrained returns",
        )
    assert config is not None
    values = config.get_text_config().to_dict()
    shows = values.get("model_type") not in FAMILIES and any(map(is_experts, owner.modules()))
    return family_config(values, source, experts=shows)


def _read(model: nn.Module, name: str, module: nn.Module, config: Config) -> ExpertModule:
    block_name, _, attribute = name.rpartition(".")
    block = model.get_submodule(block_name)
    router = getattr(block, "gate", None) or getattr(block, "router", None)
    top_k = getattr(router, "top_k", None) or getattr(block, "top_k", None)
    return ExpertModule(
        name=block_name,
        block=block,
        attribute=attribute,
        activation=activation_of(module, config, block_name),
        top_k=config.whole("num_experts_per_tok") if top_k is None else int(top_k),
        routed_scaling=float(getattr(router, "routed_scaling_factor", 1.0)),
    )


def no_gradient(what: str = "backward was called through tokenyard's experts") -> ContractError:
    """The error of asking for gradients of a model's experts, which have none, like those of a layer."""
    return ContractError(what, expected="inference: experts are not differentiated", fix=INFERENCE)


def activation_of(module: nn.Module, config: Config, layer: str | None = None) -> Activation:
    """The family's activation, with the constants of this module. Raises if it does not fit the module's layout."""
    family = FAMILIES[config.family]
    formula = family.activation(config)
    fits = (
        bool(module.has_gate) == formula.gated
        and bool(module.is_concatenated) != formula.interleaved
        and bool(module.has_bias) == family.bias
        and not getattr(module, "has_post_expert_norm", False)
    )
    if not fits:
        flags = ", ".join(f"{flag}={getattr(module, flag)}" for flag in FLAGS)
        raise InputError(
            f"{type(module).__name__} has {flags}",
            expected=f"experts with{'' if formula.gated else 'out'} a gate"
            f"{', interleaved with up' if formula.interleaved else ''}, with{'' if family.bias else 'out'} a bias: "
            f"those of {config.family}",
            fix="use a version of Transformers whose experts of this family are laid out so",
            layer=layer,
        )
    constants = {name: float(getattr(module, name, value)) for name, value in formula.parameters}
    return replace(formula, parameters=tuple(constants.items()))


# --- Where a rank's experts come from -----------------------------------------------------------------------


class ExpertSource:
    """Where a rank's experts of one module come from: the model that holds all of them, or a checkpoint.

    `weights` is the format that holds them, by default the one in which the experts are found; if it is a plain format,
    quantized experts are decoded. `inner` is how numbers are held between the two products, by default as the
    checkpoint's recipe has it for weights in that format.

    `prepare` reads the scales, which are small and show whether a checkpoint is good; `take` reads the rest.
    """

    def __init__(
        self,
        module: ExpertModule,
        checkpoint: Checkpoint | None,
        weights: str | None,
        inner: str | Format | None = None,
    ) -> None:
        self.module, self._checkpoint = module, checkpoint
        self._read: Callable[[], ExpertWeights] | None = None
        spec = module.spec(weights=weights, inner=inner)
        if checkpoint is not None:
            layer = checkpoint.layer(module.name)
            _check_fits(checkpoint, layer, spec)
            if weights is None and weight_format(layer.weights).quantized:
                spec = replace(spec, weights=layer.weights)
            if inner is None and spec.weights == layer.weights:
                spec = replace(spec, inner=layer.inner)
        self.spec = spec  # the layer that a plan makes of the module

    def prepare(self, experts: Sequence[int]) -> None:
        """Choose the experts that `take` will read; from a checkpoint, read and check their scales now."""
        if self._checkpoint is None:
            self._read = partial(self.module.weights, experts)
        else:
            reading = self._checkpoint.reading(self.module.name, experts)
            reading.check_scales()
            self._read = reading.finish

    def take(self, device: torch.device) -> ExpertWeights:
        """Read the experts that were prepared, in the format of `spec`, and move them to a device."""
        read, self._read = self._read, None
        assert read is not None  # by `prepare`
        found = read()
        if not weight_format(self.spec.weights).quantized:
            found = found.decode(WEIGHT_DTYPES[self.spec.weights])  # no copy, where it is that dtype
        elif not isinstance(found.w13, QuantizedMatrix):
            found = found.quantize(self.spec.weights)
        return _to(found, device)


def _to(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    def moved(part: Any) -> Any:
        if isinstance(part, QuantizedMatrix):
            return replace(part, payloads={name: tensor.to(device) for name, tensor in part.payloads.items()})
        return part.to(device)

    return ExpertWeights(**{name: moved(part) for name, part in weights.parts().items()})


def _check_fits(checkpoint: Checkpoint, layer: CheckpointLayer, spec: LayerSpec) -> None:
    """Raise unless a checkpoint's layer has the model's shapes and layout, and the weight format can be had."""
    formula = activation(spec.activation)
    compared = {
        "experts": (layer.num_experts, spec.num_experts),
        "hidden size": (layer.hidden_size, spec.hidden_size),
        "intermediate size": (layer.intermediate_size, spec.intermediate_size),
        "gate": (layer.gated, formula.gated),
        "gate and up in turns": (layer.interleaved, formula.interleaved),
        "bias": (layer.bias, spec.bias),
    }
    wrong = {name: values for name, values in compared.items() if values[0] != values[1]}
    if wrong:
        raise checkpoint.error(
            f" has {', '.join(f'{name} {found}' for name, (found, _) in wrong.items())}",
            expected=f"{', '.join(f'{name} {wanted}' for name, (_, wanted) in wrong.items())}, as the model has it",
            fix="build the model from the config.json of this checkpoint",
        ).at(layer=layer.name)
    asked, held = spec.weights, layer.weights
    if weight_format(held).quantized and asked not in (held, *WEIGHT_DTYPES):
        raise checkpoint.error(
            f" holds its experts as {held}, and weights={asked!r} was asked for",
            expected=f"weights={held!r}, a plain format, or none: quantizing twice loses twice",
            fix=f"leave `weights` out, or make the checkpoint from plain weights: tokenyard convert --weights {asked}",
        ).at(layer=layer.name)
