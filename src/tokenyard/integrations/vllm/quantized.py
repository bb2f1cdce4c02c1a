"""MoE layers of quantized checkpoints in vLLM: tokenyard's experts hold the weights as the checkpoint packs them.

vLLM asks the `QuantizationConfig` of a checkpoint for the method of each layer. Its own methods for MoE layers choose a
kernel when they are made, and refuse CPUs. The configs here are registered in the place of vLLM's, and differ in one
answer: a layer of routed experts gets `PackedExpertsMethod`. Everything else, linear layers too, is vLLM's own.

    quantization in vLLM   its class                   layout of the experts
    fp8                    Fp8Config                   DeepSeek: weight, weight_scale_inv in blocks of 128 x 128
    compressed-tensors     CompressedTensorsConfig     nvfp4, mxfp4, mxfp8, int4 in groups of 32, fp8 in such blocks
    modelopt_fp4           ModelOptNvFp4Config         nvfp4
    gpt_oss_mxfp4          GptOssMxfp4Config           mxfp4, all experts of a layer in one tensor

The method creates a parameter for each payload of the weight format, under the name that vLLM's loader looks for. The
loader passes the checkpoint's tensors one by one, and the layout writes each to its place: nothing is decoded, and
nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.utils import set_weight_attrs

from tokenyard.checkpoints import Layout, PackedMatrix, declared_layout
from tokenyard.errors import CheckpointError
from tokenyard.experts import ExpertWeights
from tokenyard.integrations.vllm.layers import HeldWeights
from tokenyard.integrations.vllm.refusals import QUANTIZED, check_supported, refused
from tokenyard.integrations.vllm.worker_plan import asked_for, load_kernel
from tokenyard.rows import describe

# The place of a projection in w13, by the name that vLLM's loader has for it.
_PARTS = {"w1": 0, "w3": 1}
# What vLLM's model calls the tensors of gpt-oss.
_SUFFIXES = {"blocks": "weight", "scales": "weight_scale"}


class PackedExpertsMethod(FusedMoEMethodBase):
    """vLLM's method for a MoE layer whose experts stay packed as the checkpoint has them."""

    def __init__(self, layout: Layout, inner: str, layer: Any) -> None:
        check_supported(layer.moe_config, get_current_vllm_config().parallel_config, layer=layer.layer_name)
        super().__init__(layer.moe_config)
        self.layout = layout  # how the checkpoint packs the experts
        self.inner = inner  # how numbers are held between an expert's products, as `LayerSpec.inner`
        self._layer_name: str = layer.layer_name
        self._local_place: Callable[[int], int] = layer.expert_map_manager.map_global_to_local
        self._matrices: dict[str, PackedMatrix] = {}
        # Tensors that the loader has not passed yet: the parameter, the expert's place, the projection's.
        self._missing: set[tuple[str, int, int]] = set()

    def held_weights(self, layer: Any) -> HeldWeights:
        """The format of a layer's weights, and a function that reads them once they are loaded."""
        return HeldWeights(
            format=self.layout.weights, inner=self.inner, read=lambda: self._loaded_weights(layer)
        )

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
        """Both sizes as they are: nothing is padded."""
        return hidden_size, intermediate_size

    # -- Loading -------------------------------------------------------------------------------------------

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Register the parameters that vLLM's loader looks for: payloads, biases, and tensors that are not needed."""
        gated = self.moe.is_act_and_mul
        H, I = hidden_size, intermediate_size_per_partition  # noqa: E741
        for matrix, outputs, inputs in (("w13", 2 * I if gated else I, H), ("w2", H, I)):
            parts = 2 if matrix == "w13" and gated and not self.layout.fused else 1
            packed = PackedMatrix(self.layout, (num_experts, outputs, inputs), parts)
            self._matrices[matrix] = packed
            for payload in packed.payloads:
                packed.held(payload)  # allocated here, where vLLM sets the device
            for payload, piece in packed.pieces.items():
                name = f"{matrix}_{_SUFFIXES.get(piece.suffix, piece.suffix)}"
                fill = partial(self._fill, packed, payload)
                self._register(layer, name, packed.held(payload), parts, fill)
            if self.moe.has_bias:
                bias = torch.empty(num_experts, outputs, dtype=params_dtype)
                self._register(layer, f"{matrix}_bias", bias, parts, partial(_fill_bias, bias, parts))
            for suffix in self.layout.unread:
                self._register(layer, f"{matrix}_{suffix}", torch.empty(0), parts, None)

    def _register(
        self, layer: nn.Module, name: str, tensor: Tensor, parts: int, fill: Callable[..., None] | None
    ) -> None:
        """Register a parameter for vLLM's loader: `fill` writes each loaded tensor to its place; None drops it."""
        parameter = nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
        if fill is not None:
            self._missing |= {(name, place, part) for place in range(len(tensor)) for part in range(parts)}
        set_weight_attrs(parameter, {"weight_loader": partial(self._load, name, parts, fill)})

    def _load(
        self,
        name: str,
        parts: int,
        fill: Callable[..., None] | None,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """What vLLM's loader calls: with one projection of one expert, or with all experts of this rank."""
        if expert_id is None:
            places, stored = range(len(param)), list(loaded_weight)
            if fill is not None and len(stored) != len(places):
                raise CheckpointError(
                    f"vLLM passes {len(stored)} experts of {weight_name}, and this rank has {len(places)}",
                    expected="all experts of this rank",
                    fix="use a number of ranks that divides the number of experts",
                    layer=self._layer_name,
                )
        else:
            place = self._local_place(expert_id)
            if place == -1:
                return False if return_success else None
            places, stored = range(place, place + 1), [loaded_weight]
        if fill is None:
            return True if return_success else None
        part = _PARTS.get(shard_id or "", 0) if parts > 1 else 0
        for place, one in zip(places, stored, strict=True):
            fill(weight_name, place, part, one.to(param.device))
            self._missing.discard((name, place, part))
        return True if return_success else None

    def _fill(
        self, packed: PackedMatrix, payload: str, name: str, place: int, part: int, stored: Tensor
    ) -> None:
        if (expected := packed.mismatch(payload, stored)) is not None:
            raise CheckpointError(
                f"{name} is {describe(stored)}",
                expected=f"{expected}, as {self.layout} has it",
                fix="correct the checkpoint's quantization_config: it says which tensors are quantized, and how",
                layer=self._layer_name,
            )
        packed.fill(payload, place, part, stored)
        tensor = f"{name}, of expert {place} of this rank"
        packed.check(payload, place, part, tensor, layer=self._layer_name)

    def _loaded_weights(self, layer: Any) -> ExpertWeights:
        """The weights, when the loader is done. Raises if a tensor did not come."""
        if self._missing and get_current_vllm_config().load_config.load_format != "dummy":
            name, place, _ = min(self._missing)
            raise CheckpointError(
                f"{len(self._missing)} tensors of this rank's experts are missing, {name} of its expert {place} among "
                "them",
                expected=f"every tensor of {self.layout}",
                fix="download the checkpoint again, or correct its quantization_config",
                layer=self._layer_name,
            )
        for packed in self._matrices.values():
            for payload in filter(packed.is_joined, packed.payloads):
                for place in range(packed.shape[0]):
                    expert = f"gate and up of expert {place} of this rank"
                    packed.join(payload, place, expert, layer=self._layer_name)
        parts: dict[str, Any] = {name: packed.matrix() for name, packed in self._matrices.items()}
        if self.moe.has_bias:
            parts |= {"b13": layer.w13_bias.data, "b2": layer.w2_bias.data}
        return ExpertWeights(**parts)

    # -- Computing -----------------------------------------------------------------------------------------

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """vLLM's config with the constants of the activation. How rows are quantized is said by the plan."""
        return FusedMoEQuantConfig.make(
            gemm1_alpha=layer.swiglu_alpha, gemm1_beta=layer.swiglu_beta, gemm1_clamp_limit=layer.swiglu_limit
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the layer's kernel or, if weights are loaded once more, give it the new ones."""
        load_kernel(self, layer)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        """Dispatch the rows, compute, combine."""
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=self._matrices["w13"].held("data"),
            w2=self._matrices["w2"].held("data"),
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


def _fill_bias(bias_LN: Tensor, parts: int, name: str, place: int, part: int, stored: Tensor) -> None:
    bias_LN[place].chunk(parts)[part].copy_(stored)


class _PackedExperts(QuantizationConfig):
    """A config of vLLM's whose MoE layers get `PackedExpertsMethod`."""

    def declared(self, layer: Any, prefix: str) -> Mapping[str, Any] | None:
        """What a `quantization_config` would say of the experts of this layer alone; None if they are plain."""
        raise NotImplementedError

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """vLLM's own method, unless the layer's experts are quantized."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        declared = self.declared(layer, prefix)
        if declared is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        layout = declared_layout(declared)
        problem = _problem(layout, layer.moe_config)
        if problem is not None:
            raise refused(QUANTIZED, f"the experts are quantized with {problem}", layer=prefix)
        assert isinstance(layout, Layout)
        return PackedExpertsMethod(layout, layout.inner(declared), layer)


def _problem(layout: Layout | str, moe: Any) -> str | None:
    """Why the plugin cannot serve experts in this layout, or None."""
    if isinstance(layout, str):
        return layout
    if asked_for().mode == "exchange":
        return f"{layout}, which experts of vLLM's own would have to read"
    if moe.activation.value == "swigluoai" and not layout.fused:
        return f"{layout}, which does not say that gate and up rows take turns"
    for width in (moe.hidden_dim, moe.intermediate_size_per_partition):
        if why := layout.refused(width):
            return f"{layout}, and {why}"
    return None


class PackedFp8Config(_PackedExperts, Fp8Config):
    """vLLM's config of fp8 checkpoints. Experts are served if they are scaled in blocks, as DeepSeek's are."""

    # What the checkpoint's config says.
    checkpoint_config: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """vLLM's own config, with the checkpoint's kept beside it: vLLM drops how scales are rounded."""
        made = super().from_config(config)
        made.checkpoint_config = config
        return made

    def declared(self, layer: Any, prefix: str) -> Mapping[str, Any] | None:
        skipped = is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        )
        return None if skipped else {**self.checkpoint_config, "weight_block_size": self.weight_block_size}


class PackedCompressedTensorsConfig(_PackedExperts, CompressedTensorsConfig):
    """vLLM's config of compressed-tensors checkpoints, whose layers may have different schemes."""

    def declared(self, layer: Any, prefix: str) -> Mapping[str, Any] | None:
        if "Linear" in self.target_scheme_map:  # which includes the linear maps of experts
            self.target_scheme_map.setdefault("RoutedExperts", self.target_scheme_map["Linear"])
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name]
        if any(scheme != schemes[0] for scheme in schemes):
            raise refused(QUANTIZED, "gate, up and down of experts are quantized differently", layer=prefix)
        if schemes[0] is None:
            return None
        group = {
            part: None if scheme is None else scheme.model_dump()
            for part in ("weights", "input_activations")
            for scheme in [schemes[0].get(part)]
        }
        return {
            "quant_method": "compressed-tensors",
            "format": schemes[0]["format"],
            "config_groups": {"group": group},
        }


class PackedModelOptConfig(_PackedExperts, ModelOptNvFp4Config):
    """vLLM's config of ModelOpt's NVFP4 checkpoints."""

    def declared(self, layer: Any, prefix: str) -> Mapping[str, Any] | None:
        excluded = self.is_layer_excluded(prefix)
        return None if excluded else {"quant_method": "modelopt", "quant_algo": self.quant_method}


class PackedGptOssConfig(_PackedExperts, GptOssMxfp4Config):
    """vLLM's config of gpt-oss's MXFP4 checkpoints."""

    def declared(self, layer: Any, prefix: str) -> Mapping[str, Any] | None:
        return {"quant_method": "mxfp4"}


# By the names under which vLLM knows them.
CONFIGS = {
    "fp8": PackedFp8Config,
    "compressed-tensors": PackedCompressedTensorsConfig,
    "modelopt_fp4": PackedModelOptConfig,
    "gpt_oss_mxfp4": PackedGptOssConfig,
}


def register() -> None:
    """Put these configs in the place of vLLM's."""
    for name, config in CONFIGS.items():
        register_quantization_config(name)(config)
