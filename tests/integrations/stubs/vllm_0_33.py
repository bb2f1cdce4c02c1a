"""The signatures of vLLM 0.33.0, written by `python -m tests.integrations.vllm_signatures`."""

# ruff: noqa: B027, N802, PLW0211
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: object
    expert_num_tokens_cpu: object
    psum_recv_per_rank: object = None
    rank_expert_offset: object = None


class FusedMoEQuantConfig:
    @staticmethod
    def make(
        quant_dtype=None,
        per_act_token_quant=False,
        per_out_ch_quant=False,
        block_shape=None,
        w1_scale=None,
        w2_scale=None,
        a1_scale=None,
        a2_scale=None,
        g1_alphas=None,
        g2_alphas=None,
        a1_gscale=None,
        a2_gscale=None,
        w1_bias=None,
        w2_bias=None,
        w1_zp=None,
        w2_zp=None,
        weight_dtype=None,
        is_scale_swizzled=True,
        is_scale_transposed=False,
        gemm1_alpha=None,
        gemm1_beta=None,
        gemm1_clamp_limit=None,
    ):
        return SimpleNamespace(**locals())


class FusedMoEPrepareAndFinalizeModular(ABC):
    @property
    @abstractmethod
    def activation_format(self): ...

    def allocate_fused_expert_output(self, shape, dtype, device, weight_and_reduce_impl): ...

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

    def finalize_async(
        self,
        output,
        fused_expert_output,
        topk_weights,
        topk_ids,
        apply_router_weight_on_input,
        weight_and_reduce_impl,
    ): ...

    @abstractmethod
    def max_num_tokens_per_rank(self): ...

    @abstractmethod
    def num_dispatchers(self): ...

    @abstractmethod
    def output_is_reduced(self): ...

    def post_init_setup(self, fused_experts): ...

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

    def prepare_async(
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

    def supports_async(self): ...

    def supports_dbo(self): ...

    def supports_deferred_moe_finalize(self): ...

    @abstractmethod
    def topk_indices_dtype(self): ...


class FusedMoEExpertsModular(ABC):
    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        self.moe_config, self.quant_config = moe_config, quant_config

    def _run_post_gemm2_hook(self, unfinalized, output=None): ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation): ...

    @staticmethod
    def _supports_batch_invariance(): ...

    @staticmethod
    @abstractmethod
    def _supports_current_device(): ...

    @staticmethod
    def _supports_hash_routing(): ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul(): ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config): ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key, activation_key): ...

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype, routing_method): ...

    @staticmethod
    def _supports_routing_method(routing_method, weight_key, activation_key): ...

    @staticmethod
    def _supports_shape(hidden_dim): ...

    def _uses_post_gemm2_hook(self, num_tokens): ...

    @property
    def a1_gscale(self): ...

    @property
    def a1_scale(self): ...

    @property
    def a2_gscale(self): ...

    @property
    def a2_scale(self): ...

    def activation(
        self, activation, output, input, *, topk_ids=None, expert_map=None, valid_token_counts=None
    ): ...

    @staticmethod
    @abstractmethod
    def activation_format(): ...

    @staticmethod
    def adjust_N_for_activation(N, activation): ...

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

    @property
    def block_shape(self): ...

    consumes_expert_mask = False

    @property
    def expects_unquantized_inputs(self): ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self): ...

    @property
    def g1_alphas(self): ...

    @property
    def g2_alphas(self): ...

    @staticmethod
    def is_monolithic(): ...

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format): ...

    def moe_problem_size(self, a1, w1, w2, topk_ids): ...

    def output_hidden_dim(self, hidden_dim): ...

    @property
    def per_act_token_quant(self): ...

    @property
    def per_out_ch_quant(self): ...

    post_gemm2_hook = None

    def process_weights_after_loading(self, layer): ...

    @property
    def quant_dtype(self): ...

    @staticmethod
    def supports_lora(): ...

    def supports_packed_ue8m0_act_scales(self): ...

    @property
    def w1_bias(self): ...

    @property
    def w1_scale(self): ...

    @property
    def w1_zp(self): ...

    @property
    def w2_bias(self): ...

    @property
    def w2_scale(self): ...

    @property
    def w2_zp(self): ...

    @property
    def weight_quant_dtype(self): ...

    def workspace_dtype(self, act_dtype): ...

    @abstractmethod
    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ): ...
