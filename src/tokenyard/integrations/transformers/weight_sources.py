"""Where a rank's experts come from: the model that holds all of them, or a checkpoint that has them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tokenyard.checkpoints import Checkpoint, CheckpointLayer
from tokenyard.errors import CheckpointError
from tokenyard.experts import ExpertWeights, activation
from tokenyard.experts.base import WEIGHT_DTYPES
from tokenyard.formats import Format, QuantizedMatrix, weight_format
from tokenyard.integrations.transformers.expert_modules import ExpertModule
from tokenyard.planning.spec import LayerSpec


class WeightSources:
    """The experts of a model's modules, a rank's share at a time, in the format that holds them.

    `weights` is that format, by default the one in which the experts are found; quantized ones are decoded where it is
    a plain one. `inner` is how numbers are held between the two products, by default as the checkpoint's recipe has it
    for weights in that format.

    `prepare` reads the scales, which are small and show whether a checkpoint is good; `take` reads the rest.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, weights: str | None, inner: str | Format | None = None
    ) -> None:
        self.checkpoint, self.weights, self.inner = checkpoint, weights, inner
        self._specs: dict[str, LayerSpec] = {}
        self._readings: dict[str, Any] = {}
        self._experts: dict[str, Sequence[int]] = {}

    def spec(self, module: ExpertModule) -> LayerSpec:
        """The layer that a plan makes of a module, with the format of its weights."""
        spec = module.spec(weights=self.weights, inner=self.inner)
        if self.checkpoint is not None:
            layer = self.checkpoint.layer(module.name)
            _check_fits(self.checkpoint, layer, spec)
            if self.weights is None and weight_format(layer.weights).quantized:
                spec = replace(spec, weights=layer.weights)
            if self.inner is None and spec.weights == layer.weights:
                spec = replace(spec, inner=layer.inner)
        self._specs[module.name] = spec
        return spec

    def prepare(self, module: ExpertModule, experts: Sequence[int]) -> None:
        """Get ready to take these experts of a module."""
        self._experts[module.name] = experts
        if self.checkpoint is not None:
            self._readings[module.name] = self.checkpoint.reading(module.name, experts)
            self._readings[module.name].check_scales()

    def take(self, module: ExpertModule, device: torch.device) -> ExpertWeights:
        """The experts, on a device, for the caller to keep."""
        spec = self._specs[module.name]
        reading = self._readings.pop(module.name, None)
        found = module.weights(self._experts[module.name]) if reading is None else reading.finish()
        if not weight_format(spec.weights).quantized:
            found = found.decode(WEIGHT_DTYPES[spec.weights])  # no copy, where it is that dtype
        elif not isinstance(found.w13, QuantizedMatrix):
            found = found.quantize(spec.weights)
        return _to(found, device)


def _to(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    def moved(part: Any) -> Any:
        if isinstance(part, QuantizedMatrix):
            return replace(part, payloads={name: tensor.to(device) for name, tensor in part.payloads.items()})
        return part.to(device)

    return ExpertWeights(**{name: moved(part) for name, part in weights.parts().items()})


def _check_fits(checkpoint: Checkpoint, layer: CheckpointLayer, spec: LayerSpec) -> None:
    """Raise unless a layer of a checkpoint is the layer of the model."""
    found = {
        "experts": layer.num_experts,
        "hidden size": layer.hidden_size,
        "intermediate size": layer.intermediate_size,
        "gate": layer.gated,
        "gate and up in turns": layer.interleaved,
        "bias": layer.bias,
    }
    formula = activation(spec.activation)
    expected = {
        "experts": spec.num_experts,
        "hidden size": spec.hidden_size,
        "intermediate size": spec.intermediate_size,
        "gate": formula.gated,
        "gate and up in turns": formula.interleaved,
        "bias": spec.bias,
    }
    wrong = {name: value for name, value in found.items() if value != expected[name]}
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} has {', '.join(f'{name} {value}' for name, value in wrong.items())}",
            expected=f"{', '.join(f'{name} {expected[name]}' for name in wrong)}, as the model has it",
            fix="build the model from the config.json of this checkpoint",
            file=checkpoint.path,
            layer=layer.name,
        )
    asked, held = spec.weights, layer.weights
    if weight_format(held).quantized and asked not in (held, *WEIGHT_DTYPES):
        raise CheckpointError(
            f"{checkpoint.path} holds its experts as {held}, and weights={asked!r} was asked for",
            expected=f"weights={held!r}, a plain format, or none: quantizing twice loses twice",
            fix=f"leave `weights` out, or make the checkpoint from plain weights: tokenyard convert --weights {asked}",
            file=checkpoint.path,
            layer=layer.name,
        )
