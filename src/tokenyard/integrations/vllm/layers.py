"""From a MoE layer of vLLM's to a layer of a plan: its spec, and its weights.

vLLM's `MoERunner` is a layer of a model. Its `routed_experts` hold the weights of this rank's experts, and a method
(`quant_method`) that knows how they are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenyard.errors import ContractError
from tokenyard.experts import ExpertWeights
from tokenyard.experts.spec import EXACT
from tokenyard.formats import for_dtype
from tokenyard.integrations.vllm.interface import VLLM_ACTIVATIONS, activation_of
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """The weights that a rank holds of a layer."""

    format: str  # how the matrices are encoded: `LayerSpec.weights`
    inner: str = EXACT  # how numbers are held between an expert's products: `LayerSpec.inner`
    read: Callable[[], ExpertWeights]  # the weights, once vLLM has loaded them


def held_weights(held: Any) -> HeldWeights:
    """The weights of vLLM's `RoutedExperts`, as their method has made them: packed, or plain."""
    packed: Callable[[Any], HeldWeights] | None = getattr(held.quant_method, "held_weights", None)
    if packed is not None:
        return packed(held)
    return HeldWeights(
        format=for_dtype(held.w13_weight.dtype).name,
        read=lambda: ExpertWeights(
            w13=held.w13_weight.data,
            w2=held.w2_weight.data,
            b13=getattr(held, "w13_bias", None),
            b2=getattr(held, "w2_bias", None),
        ),
    )


def owned_experts(runner: Any) -> list[int]:
    """The global ids of this rank's experts of a layer, in the order in which it holds them."""
    map_E = runner.routed_experts.expert_map
    if map_E is None:
        return list(range(runner.moe_config.num_experts))
    held = [(local, expert) for expert, local in enumerate(map_E.tolist()) if local >= 0]
    return [expert for _, expert in sorted(held)]


def spec_of(runner: Any, table: Sequence[Sequence[int]], max_tokens: int, asked: Settings) -> LayerSpec:
    """The spec of a layer, whose ranks own the experts of `table` and bring at most `max_tokens` each."""
    moe, held = runner.moe_config, runner.routed_experts
    weights = held_weights(held)
    name = moe.activation.value
    if name not in VLLM_ACTIVATIONS:
        raise ContractError(
            f"the layer has activation {name!r}",
            expected=f"one of {', '.join(VLLM_ACTIVATIONS)}",
            fix="unset TOKENYARD_VLLM for this model",
            layer=runner.layer_name,
        )
    return LayerSpec(
        name=runner.layer_name,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        max_tokens=max_tokens,
        dtype=moe.in_dtype,
        weights=weights.format,
        inner=weights.inner,
        activation=activation_of(
            name, limit=held.swiglu_limit, alpha=held.swiglu_alpha, beta=held.swiglu_beta
        ),
        bias=moe.has_bias,
        weight_on="input" if held.apply_router_weight_on_input else "output",
        placement=Placement.explicit(moe.num_experts, table),
        experts=asked.experts,
        wire=asked.wire,
    )
