"""Tiny models of the families that Transformers and we both know, with random weights that follow from a seed."""

import torch
import transformers

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
}
GROUPED = {"n_routed_experts": 12, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}
# Ten and twelve experts: over four ranks, shares differ.
FAMILIES = {
    "mixtral": {"num_local_experts": 10},
    "qwen2_moe": {"num_experts": 10, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 10, "moe_intermediate_size": 32, "mlp_only_layers": [1], "head_dim": 16},
    "deepseek_v2": {
        **LATENT,
        "n_routed_experts": 10,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
        "topk_method": "greedy",
    },
    "deepseek_v3": {**LATENT, **GROUPED, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "gpt_oss": {
        "num_local_experts": 10,
        "head_dim": 16,
        "swiglu_limit": 2.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
    },
    "glm4_moe": {**GROUPED, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "head_dim": 16},
    "olmoe": {"num_experts": 10, "norm_topk_prob": True},
    "minimax_m2": {"num_local_experts": 10, "head_dim": 16, "rotary_dim": 8},
}
# Families that are variants of those above: these are run once.
VARIANTS = {
    "qwen3_next": {
        **FAMILIES["qwen2_moe"],
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v32": {
        **LATENT,
        **GROUPED,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
}


def tiny_config(family: str, **changes):
    return transformers.AutoConfig.for_model(family, **(TINY | (FAMILIES | VARIANTS)[family] | changes))


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
    """A model of the family whose layers all matter: nothing is zero, and residuals do not drown the experts."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            torch.nn.init.uniform_(tensor, 0.8, 1.2)
        elif "correction_bias" in name:  # moves some choices, not all
            torch.nn.init.normal_(tensor, std=0.05)
        elif "inv_freq" not in name:
            fan_in = tensor.shape[-2] if name.endswith("_proj") and family == "gpt_oss" else tensor.shape[-1]
            torch.nn.init.normal_(tensor, std=1.5 / fan_in**0.5)
    return model.requires_grad_(False)


def prompts(rank: int, seed: int = 0, batch: int = 1, length: int = 5) -> torch.Tensor:
    """Token ids [batch, length] that no other rank has."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(2, TINY["vocab_size"], (batch, length), generator=draw)


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def generated(model, ids: torch.Tensor, tokens: int, **options) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
