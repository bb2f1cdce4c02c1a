"""Qwen3-MoE in plain functions over a dict of tensors, made for fast training of a small model.

The parameters carry the names of Transformers' `Qwen3MoeForCausalLM`, and `save` writes a checkpoint that it loads;
`lab/tests/shipped` compares the logits of the two. All experts compute all tokens, as one wide feed-forward layer whose
hidden units are scaled by the routing weights (zero for experts that were not chosen): with 16 small experts
that is faster than sorting tokens, and it has the same value and gradient.

Shapes: B sequences, S positions, H hidden size, A heads, D width of a head, E experts, I width of an expert.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tokenyard_lab.training.vocabulary import END, PAD, tokenizer_config, tokenizer_json, vocabulary

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    hidden: int = 192
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 16
    top_k: int = 4
    expert_width: int = 96
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    longest: int = 512

    @property
    def vocabulary(self) -> int:
        return len(vocabulary())


def initialize(shape: Shape, device: torch.device, seed: int) -> Parameters:
    """Fresh parameters in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    wide = shape.hidden**-0.5
    back = wide * (2 * shape.layers) ** -0.5
    parameters = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden, std=0.05),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parameters |= {
            f"{at}.input_layernorm.weight": torch.ones(shape.hidden),
            f"{at}.post_attention_layernorm.weight": torch.ones(shape.hidden),
            f"{at}.self_attn.q_norm.weight": torch.ones(shape.head_dim),
            f"{at}.self_attn.k_norm.weight": torch.ones(shape.head_dim),
            f"{at}.self_attn.q_proj.weight": normal(queries, shape.hidden, std=wide),
            f"{at}.self_attn.k_proj.weight": normal(keys, shape.hidden, std=wide),
            f"{at}.self_attn.v_proj.weight": normal(keys, shape.hidden, std=wide),
            f"{at}.self_attn.o_proj.weight": normal(shape.hidden, queries, std=back),
            f"{at}.mlp.gate.weight": normal(shape.experts, shape.hidden, std=0.02),
            f"{at}.mlp.experts.gate_up_proj": normal(
                shape.experts, 2 * shape.expert_width, shape.hidden, std=wide
            ),
            f"{at}.mlp.experts.down_proj": normal(
                shape.experts, shape.hidden, shape.expert_width, std=shape.expert_width**-0.5 / 2
            ),
        }
    return {name: value.to(device).requires_grad_() for name, value in parameters.items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotations(positions: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, [..., 1, D], for positions of any shape."""
    frequencies = shape.rope_theta ** (
        -torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    )
    angles = (positions.float()[..., None] * frequencies).repeat(*(1,) * positions.dim(), 2)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def project_heads(
    weights: Parameters, at: str, x_BSH: Tensor, shape: Shape, turns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [B, S, heads, D]."""
    size = (*x_BSH.shape[:2], -1, shape.head_dim)
    queries = functional.linear(x_BSH, weights[f"{at}.q_proj.weight"]).view(size)
    keys = functional.linear(x_BSH, weights[f"{at}.k_proj.weight"]).view(size)
    values = functional.linear(x_BSH, weights[f"{at}.v_proj.weight"]).view(size)
    queries = rotate(rms_norm(queries, weights[f"{at}.q_norm.weight"], shape.eps), *turns)
    keys = rotate(rms_norm(keys, weights[f"{at}.k_norm.weight"], shape.eps), *turns)
    return queries, keys, values


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over [B, S, heads, D]; causal where there is no mask. Returns [B, S, heads · D]."""
    groups = queries.shape[2] // keys.shape[2]
    keys, values = (kv.repeat_interleave(groups, dim=2) for kv in (keys, values))
    out = functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.transpose(1, 2).flatten(2)


def choose_experts(weights: Parameters, at: str, x_TH: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """The router: every expert's probability, and the ids and weights of the experts that are chosen."""
    probabilities_TE = functional.linear(x_TH, weights[f"{at}.gate.weight"]).float().softmax(-1)
    top_TK, ids_TK = probabilities_TE.topk(shape.top_k, dim=-1)
    return probabilities_TE, ids_TK, top_TK / top_TK.sum(-1, keepdim=True)


def disturb(x_TH: Tensor, noise: Tensor, normal_TH: Tensor) -> Tensor:
    """Rows with noise, as a share of each row's size.

    The router sees a row as it is; experts see what could be left of it after a coarse wire.
    """
    return x_TH + noise * normal_TH * x_TH.float().pow(2).mean(-1, keepdim=True).sqrt().to(x_TH.dtype)


def mixture(
    weights: Parameters, at: str, x_TH: Tensor, shape: Shape, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts' output, and how unevenly the tokens went to them (1 is even)."""
    probabilities_TE, ids_TK, top_TK = choose_experts(weights, at, x_TH, shape)
    top_TK = top_TK.to(x_TH.dtype)
    routing_TE = torch.zeros_like(probabilities_TE, dtype=x_TH.dtype).scatter(1, ids_TK, top_TK)
    if noise is not None:
        x_TH = disturb(x_TH, noise, torch.randn_like(x_TH))
    hidden = functional.linear(x_TH, weights[f"{at}.experts.gate_up_proj"].flatten(0, 1))
    gate, up = hidden.view(-1, shape.experts, 2, shape.expert_width).unbind(2)
    activated = functional.silu(gate) * up * routing_TE[..., None]
    out_TH = activated.flatten(1) @ weights[f"{at}.experts.down_proj"].transpose(1, 2).flatten(0, 1)
    share_E = (routing_TE > 0).float().mean(0) / shape.top_k
    return out_TH, shape.experts * (share_E.detach() * probabilities_TE.mean(0)).sum()


def attention_block(
    weights: Parameters, at: str, x_BSH: Tensor, shape: Shape, turns: tuple[Tensor, Tensor]
) -> Tensor:
    """The rows behind the attention of a layer."""
    normed = rms_norm(x_BSH, weights[f"{at}.input_layernorm.weight"], shape.eps)
    heads = attend(*project_heads(weights, f"{at}.self_attn", normed, shape, turns), None)
    return x_BSH + functional.linear(heads, weights[f"{at}.self_attn.o_proj.weight"])


def forward(
    weights: Parameters, tokens_BS: Tensor, shape: Shape, noise_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] and the mean unevenness of the layers."""
    batch, length = tokens_BS.shape
    x = weights["model.embed_tokens.weight"][tokens_BS]
    turns = rotations(torch.arange(length, device=x.device), shape, x.dtype)
    noise = None if noise_B is None else noise_B.to(x.dtype).repeat_interleave(length)[:, None]
    uneven = torch.zeros((), device=x.device)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        x = attention_block(weights, at, x, shape, turns)
        normed = rms_norm(x, weights[f"{at}.post_attention_layernorm.weight"], shape.eps)
        out, layer_uneven = mixture(weights, f"{at}.mlp", normed.flatten(0, 1), shape, noise)
        x = x + out.view(batch, length, -1)
        uneven = uneven + layer_uneven / shape.layers
    x = rms_norm(x, weights["model.norm.weight"], shape.eps)
    return functional.linear(x, weights["model.embed_tokens.weight"]), uneven


@torch.no_grad()
def generate(weights: Parameters, prompts: list[list[int]], shape: Shape, most: int) -> list[list[int]]:
    """Greedy continuations of all prompts at once, each up to and without the end token."""
    device = weights["model.norm.weight"].device
    longest = max(map(len, prompts))
    total = longest + most
    padded = [[vocabulary()[PAD]] * (longest - len(prompt)) + prompt for prompt in prompts]
    tokens = torch.tensor(padded, device=device)
    real = torch.ones(len(prompts), total, dtype=torch.bool, device=device)
    real[:, :longest] = torch.arange(longest, device=device) >= torch.tensor(
        [longest - len(prompt) for prompt in prompts], device=device
    ).unsqueeze(1)
    size = (2, shape.layers, len(prompts), total, shape.kv_heads, shape.head_dim)
    cache = torch.zeros(size, device=device, dtype=weights["model.norm.weight"].dtype)
    written: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    start = 0
    for _ in range(most):
        tokens = _continue(weights, tokens, start, real, cache, shape)
        start = longest + len(written)
        written.append(tokens)
        done |= tokens == vocabulary()[END]
        if len(written) % 8 == 0 and bool(done.all()):
            break
        tokens = tokens[:, None]
    rows = torch.stack(written, 1).tolist()
    return [row[: row.index(vocabulary()[END])] if vocabulary()[END] in row else row for row in rows]


def _continue(
    weights: Parameters, tokens_BS: Tensor, start: int, real: Tensor, cache: Tensor, shape: Shape
) -> Tensor:
    """The next token of each sequence, whose tokens from position `start` on are given."""
    batch, length = tokens_BS.shape
    end = start + length
    positions = torch.arange(start, end, device=tokens_BS.device)
    causal = positions[:, None] >= torch.arange(end, device=tokens_BS.device)
    # A pad sees itself, so that its softmax has something to look at.
    mask = (causal & real[:, None, :end]) | (positions[:, None] == torch.arange(end, device=tokens_BS.device))
    x = weights["model.embed_tokens.weight"][tokens_BS]
    turns = rotations(positions, shape, x.dtype)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{at}.input_layernorm.weight"], shape.eps)
        queries, keys, values = project_heads(weights, f"{at}.self_attn", normed, shape, turns)
        cache[0, layer, :, start:end], cache[1, layer, :, start:end] = keys, values
        heads = attend(queries, cache[0, layer, :, :end], cache[1, layer, :, :end], mask[:, None])
        x = x + functional.linear(heads, weights[f"{at}.self_attn.o_proj.weight"])
        normed = rms_norm(x, weights[f"{at}.post_attention_layernorm.weight"], shape.eps)
        x = x + mixture(weights, f"{at}.mlp", normed.flatten(0, 1), shape)[0].view(batch, length, -1)
    last = rms_norm(x[:, -1], weights["model.norm.weight"], shape.eps)
    return functional.linear(last, weights["model.embed_tokens.weight"]).argmax(-1)


def save(parameters: Parameters, shape: Shape, folder: Path) -> None:
    """Write config, tokenizer and bf16 weights, experts one by one, as Transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: Parameters = {}
    for name, value in parameters.items():
        stored = value.detach().to("cpu", torch.bfloat16)
        at = name.rsplit(".", 1)[0]
        if name.endswith("gate_up_proj"):
            for expert, both in enumerate(stored):
                gate, up = both.chunk(2)
                tensors[f"{at}.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{at}.{expert}.up_proj.weight"] = up.clone()
        elif name.endswith("down_proj"):
            for expert, down in enumerate(stored):
                tensors[f"{at}.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[name] = stored.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file, content in {
        "config.json": config(shape),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": vocabulary()[END],
            "pad_token_id": vocabulary()[PAD],
        },
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (folder / file).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def config(shape: Shape) -> dict[str, object]:
    """The model as Transformers describes it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.longest,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": vocabulary()[PAD],
        "eos_token_id": vocabulary()[END],
    }
