"""The signatures of vLLM's modular kernel, as of commit 003d383e of vllm-project/vllm. Nothing but signatures."""

# ruff: noqa: B027
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: object
    expert_num_tokens_cpu: object
    psum_recv_per_rank: object = None


class FusedMoEPrepareAndFinalizeModular(ABC):
    def __init__(self, moe_config, quant_config): ...

    def post_init_setup(self, fused_experts): ...

    @property
    @abstractmethod
    def activation_format(self): ...

    @abstractmethod
    def topk_indices_dtype(self): ...

    @abstractmethod
    def max_num_tokens_per_rank(self): ...

    @abstractmethod
    def num_dispatchers(self): ...

    @abstractmethod
    def output_is_reduced(self): ...

    def supports_async(self): ...

    def supports_deferred_moe_finalize(self): ...

    @abstractmethod
    def prepare(
        self,
        a1,
        topk_weights,
        topk_ids,
        num_experts,
        expert_map,
        apply_router_weight_on_input,
        quant_config,
        defer_input_quant,
    ): ...

    @abstractmethod
    def finalize(
        self,
        output,
        fused_expert_output,
        topk_weights,
        topk_ids,
        apply_router_weight_on_input,
        weight_and_reduce_impl,
    ): ...


class FusedMoEExpertsModular(ABC):
    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None): ...

    @staticmethod
    def is_monolithic(): ...

    @property
    def expects_unquantized_inputs(self): ...

    @staticmethod
    @abstractmethod
    def activation_format(): ...

    @staticmethod
    @abstractmethod
    def _supports_current_device(): ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul(): ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key): ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation): ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config): ...

    @property
    def a2_scale(self): ...

    def moe_problem_size(self, a1, w1, w2, topk_ids): ...

    def workspace_dtype(self, act_dtype): ...

    @abstractmethod
    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ): ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self): ...

    @abstractmethod
    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ): ...
