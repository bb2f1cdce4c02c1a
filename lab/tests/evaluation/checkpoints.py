"""A small random checkpoint that reads and writes the words of the shipped model."""

import json

import torch

from tokenyard_lab.training.vocabulary import END, PAD, tokenizer_config, tokenizer_json, vocabulary


def save_random_model(folder):
    """Write it into a folder. It knows nothing, and says so at length."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(vocabulary()),
        hidden_size=96,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        pad_token_id=vocabulary()[PAD],
        eos_token_id=vocabulary()[END],
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    for name, content in {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder
