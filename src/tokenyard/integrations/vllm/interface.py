"""What both classes know of vLLM: its types, or stand-ins; its names for activations and formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.duties import Duty, Party
from tokenyard.errors import ContractError, InputError
from tokenyard.experts import ACTIVATIONS, Activation
from tokenyard.planning.planner import Plan
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement
from tokenyard.rows import describe

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
# What vLLM calls an activation: the values of its enum.
VLLM_ACTIVATIONS: dict[str, Activation] = {
    "silu": ACTIVATIONS["swiglu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "relu2_no_mul": ACTIVATIONS["relu2"],  # "relu2" has a gate there
    "swigluoai": ACTIVATIONS["swiglu_clamped"],
    "swigluoai_uninterleave": replace(ACTIVATIONS["swiglu_clamped"], interleaved=False),
}
# How vLLM's quantization configs name the formats in which rows travel: quant_dtype, and the block's width for fp8.
QUANT_DTYPES: dict[str, tuple[torch.dtype | str, int | None]] = {
    "fp8_block128": (torch.float8_e4m3fn, 128),
    "mxfp8": ("mxfp8", None),
    "nvfp4": ("nvfp4", None),
}
# The kinds of `weight_and_reduce_impl`, by the names of vLLM's classes: rows are weighted and summed already,
# or `finalize` has to do it.
FINISHED = "TopKWeightAndReduceNoOP"
UNFINISHED = ("TopKWeightAndReduceContiguous", "TopKWeightAndReduceDelegate")


# What `declared_quantization` takes over from a quantization config of vLLM's.
_KEPT = ("w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")


class _StandardFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class _TokensOfExperts:
    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor | None


class TopKWeightAndReduceNoOP:
    """Says that results are weighted and summed over the experts of this rank already."""


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Stand-in for vLLM's `FusedMoEQuantConfig`: how rows are quantized, biases, constants of the activation."""

    quant_dtype: torch.dtype | str | None = None
    block_shape: list[int] | None = None
    a2_scale: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None


class _Base:
    """Base class of the experts where vLLM is not installed. It holds the two configurations."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config


def _vllm_or(stand_in: Any, module: str, name: str) -> Any:
    """What vLLM's module has under a name; the stand-in where there is no vLLM."""
    if find_spec("vllm") is None:
        return stand_in
    found = import_module(f"{_FUSED_MOE}.{module}")
    if hasattr(found, name):
        return getattr(found, name)
    raise ContractError(
        f"{found.__name__} has no {name}",
        expected="a vLLM with modular MoE kernels, as docs/guide/vllm.md names them",
        fix="install one of those versions",
    )


if TYPE_CHECKING:

    class PrepareAndFinalizeOfVllm:
        """The base class of `TokenyardPrepareAndFinalize`."""

    ExpertsOfVllm = _Base
else:
    PrepareAndFinalizeOfVllm = _vllm_or(object, "modular_kernel", "FusedMoEPrepareAndFinalizeModular")
    ExpertsOfVllm = _vllm_or(_Base, "modular_kernel", "FusedMoEExpertsModular")
ActivationFormat: Any = _vllm_or(_StandardFormat, "modular_kernel", "FusedMoEActivationFormat")
ExpertTokensMetadata: Any = _vllm_or(_TokensOfExperts, "modular_kernel", "ExpertTokensMetadata")
Finished: Any = _vllm_or(TopKWeightAndReduceNoOP, "topk_weight_and_reduce", FINISHED)
# Makes a quantization config, of the arguments that are given by name.
make_quant_config: Any = getattr(_vllm_or(QuantConfig, "config", "FusedMoEQuantConfig"), "make", QuantConfig)


def check_layer(plan: Plan, layer: str) -> None:
    """Raise unless a layer of the plan can be served through vLLM's interface."""
    wiring = plan.wiring(layer)
    exchange_spec = wiring.exchange_spec
    names = [payload.name for payload in exchange_spec.wire.payloads(exchange_spec.hidden_size)]
    if not exchange_spec.reduces_ranks:
        found, fix = 'reduce_ranks="caller"', 'plan with reduce_ranks="exchange": output_is_reduced() says so'
    elif exchange_spec.carries_logits:
        found = f"{wiring.experts.name} experts, which route by themselves"
        fix = "use experts that take routes"
    elif exchange_spec.extra:
        found, fix = "further payloads", "plan the layer without `payloads`"
    elif len(names) > 2:
        found = f"wire {exchange_spec.wire}, whose rows are {', '.join(names)}"
        fix = f"give every row one scale: {exchange_spec.wire.name}(global_scale=…)"
    else:
        return
    raise ContractError(
        f"the layer has {found}",
        expected="rows, one tensor of scales, ids and weights out, and one reduced row per token back",
        fix=fix,
        layer=layer,
        rank=plan.group.rank,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertTables:
    """Tables on the group's device that turn global ids of experts into numbers on this rank, and back."""

    placement: Placement
    local_E: Tensor  # an expert's number on this rank, or -1: what vLLM calls `expert_map`
    global_L: Tensor  # the id of each expert of this rank; one entry more, at the end, turns -1 into -1
    mapped_L: Tensor  # the same, but -1 becomes an expert elsewhere, for kernels that look up every id

    @classmethod
    def of(cls, plan: Plan, layer: str, known: ExpertTables | None = None) -> ExpertTables:
        """The tables of a layer: the known ones, unless the plan has another placement by now."""
        placement = plan.wiring(layer).exchange_spec.placement
        if known is not None and known.placement is placement:
            return known
        mine, device = plan.local_experts(layer), plan.group.device
        local = {expert: number for number, expert in enumerate(mine)}
        experts = range(placement.num_experts)
        elsewhere = next((expert for expert in experts if expert not in local), -1)
        return cls(
            placement=placement,
            local_E=torch.tensor([local.get(expert, -1) for expert in experts], device=device),
            global_L=torch.tensor([*mine, -1], device=device),
            mapped_L=torch.tensor([*mine, elsewhere], device=device),
        )

    def check(self, expert_map: Tensor) -> None:
        """Raise unless an engine's map is that of the layer's placement."""
        if expert_map.shape != self.local_E.shape:
            found = f"expert_map is {describe(expert_map)}"
        elif bool((differs := expert_map.to(self.local_E.device) != self.local_E).any()):
            expert = int(differs.nonzero()[0])
            found = f"expert_map has {int(expert_map[expert])} for expert {expert}"
            found += f", where the layer's placement has {int(self.local_E[expert])}"
        else:
            return
        raise InputError(
            found,
            expected=f"the map of {self.placement} ({len(self.local_E)} entries; -1 is elsewhere)",
            fix="plan the layer with the engine's placement: Placement.explicit(num_experts, table)",
        )


def check_weight_on(wiring: Wiring, apply_router_weight_on_input: bool) -> None:
    """Raise unless vLLM and the layer want the routing weight in the same place."""
    weight_on = "input" if apply_router_weight_on_input else "output"
    if weight_on != wiring.spec.weight_on:
        raise ContractError(
            f"apply_router_weight_on_input={apply_router_weight_on_input}, and the layer has "
            f"weight_on={wiring.spec.weight_on!r}",
            expected="both to say the same: weights would be applied twice, or never",
            fix=f"plan the layer with weight_on={weight_on!r}",
        )


def declared_quantization(wiring: Wiring, given: Any = None) -> Any:
    """vLLM's quantization config of a layer, with the rows quantized as the layer declares.

    Biases and constants of the activation are those of `given`. A config that says how rows are quantized is returned
    as it is: `post_init_setup` compares it with the layer before the first token.
    """
    if getattr(given, "quant_dtype", None) is not None:
        return given
    quantized = wiring.expert_rows if wiring.duties[Duty.QUANTIZE] is Party.EXPERTS else wiring.wire
    dtype, block = QUANT_DTYPES.get("" if quantized is None else quantized.name, (None, None))
    rest = {name: value for name in _KEPT if (value := getattr(given, name, None)) is not None}
    return make_quant_config(quant_dtype=dtype, block_shape=None if block is None else [block, block], **rest)


def activation_of(
    name: str, *, limit: float | None = None, alpha: float | None = None, beta: float | None = None
) -> Activation:
    """The activation that vLLM calls by a name, with the constants that it keeps elsewhere. Unknown names: KeyError.

    >>> activation_of("silu").name, activation_of("silu", limit=10.0).parameters
    ('swiglu', (('limit', 10.0), ('alpha', 1.0), ('up_shift', 0.0)))
    """
    known = VLLM_ACTIVATIONS[name]
    if limit is None or name not in ("silu", "swigluoai_uninterleave"):
        return known
    constants = (("limit", limit), ("alpha", 1.0 if alpha is None else alpha), ("up_shift", beta or 0.0))
    return replace(ACTIVATIONS["swiglu_clamped"], interleaved=False, parameters=constants)


def same_formula(one: Activation, other: Activation) -> bool:
    """Whether two activations differ in nothing but their constants, which vLLM keeps elsewhere."""
    return replace(one, parameters=other.parameters) == other if one.name == other.name else False
