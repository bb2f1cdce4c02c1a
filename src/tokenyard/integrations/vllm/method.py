"""vLLM's methods for unquantized MoE layers that a plan serves. Imported only where the plugin is on.

vLLM asks a method to make a layer's parameters, to process them when they are loaded, and to run the layer. Processing
makes the plan, and the layer's kernel: vLLM's own `FusedMoEKernel`, with our class that moves rows, and our experts or
vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from tokenyard.integrations.vllm.quantized import PackedExpertsMethod
from tokenyard.integrations.vllm.refusals import MONOLITHIC, QUANTIZED, check_supported, refused
from tokenyard.integrations.vllm.worker_plan import load_kernel, mover_of


class TokenyardMethod(UnquantizedFusedMoEMethod):
    """The method of unquantized layers: tokenyard moves the rows and computes the experts."""

    def __init__(self, moe: Any) -> None:
        # Before vLLM looks for experts of its own.
        check_supported(moe, get_current_vllm_config().parallel_config)
        super().__init__(moe)
        self.moe_kernel: Any  # None until the weights are loaded
        self.supports_pre_processed_weights = False  # those are in the layout of vLLM's own experts

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, _: Any
    ) -> tuple[int, int]:
        """No size has to be rounded up."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the layer's kernel or, if weights are loaded once more, give it the new ones."""
        load_kernel(self, layer)


class TokenyardExchangeMethod(UnquantizedFusedMoEMethod):
    """The method of unquantized layers: tokenyard moves the rows, and the experts that vLLM chose compute."""

    def __init__(self, moe: Any) -> None:
        check_supported(moe, get_current_vllm_config().parallel_config)
        super().__init__(moe)
        if self.experts_cls.is_monolithic():
            raise refused(MONOLITHIC, f"vLLM chose {self.experts_cls.__name__}")

    def _init_moe_kernel(self, layer: Any) -> None:
        """Called by vLLM once the weights are in the layout of its experts."""
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        on_cpu = issubclass(self.experts_cls, CPUUnquantizedExperts)
        experts_cls = with_local_ids(self.experts_cls) if on_cpu else self.experts_cls
        experts = experts_cls(self.moe, self.moe_quant_config)
        self.moe_kernel = mk.FusedMoEKernel(mover_of(layer, self.moe), experts)


class TokenyardRoutedExperts(RoutedExperts):
    """vLLM's container of experts, which refuses layers that none of our methods serves."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        if not isinstance(method, TokenyardMethod | TokenyardExchangeMethod | PackedExpertsMethod):
            raise refused(QUANTIZED, f"the layer is quantized, with {type(method).__name__}", layer=prefix)
        return method


def with_local_ids(experts_cls: Any) -> Any:
    """A subclass of vLLM's CPU experts that applies `expert_map` to the ids, which those experts do not."""

    class LocalIds(experts_cls):
        def apply(
            self, *, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, **rest: Any
        ) -> Any:
            if expert_map is not None:
                local_RK = expert_map[topk_ids.long()]
                topk_ids = local_RK.clamp(min=0).int()
                topk_weights = torch.where(local_RK < 0, 0.0, topk_weights)
            return super().apply(topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **rest)

    LocalIds.__name__ = f"{experts_cls.__name__}WithLocalIds"
    return LocalIds
