"""DeepSeek-V3 in an engine with the plugin: two ranks answer as vLLM in one process and as Transformers do.

vLLM 0.32 for CPUs rotates the queries of this model wrongly: its kernel takes the stride between heads for the stride
between tokens. What a token becomes then depends on its place in the batch, so that not even vLLM alone answers twice
the same when requests are batched differently. All engines here rotate with vLLM's function in torch instead.
"""

import json

import pytest
import torch
import transformers

from tests.vllm_engines.launching import run_engine

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 64,
    # The only sizes of MLA that vLLM has a CPU kernel for.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 512,
}
# In DeepSeek's own config.json, and read by vLLM, but not written by Transformers.
BESIDE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
PROMPTS = [[(7 * i + 3 * j) % 500 + 1 for j in range(5 + 3 * i)] for i in range(4)]
# float32 sums in another order: seen up to 2e-5.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with random weights and biases of choices, far enough from zero for answers to differ."""
    folder = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.DeepseekV3Config(**CONFIG), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    made.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | BESIDE))
    return folder


def job(model, prompts, **options):
    return {
        "options": {"model": str(model), "skip_tokenizer_init": True, **options},
        "prompts": prompts,
        "rotates_in_torch": True,
    }


def answered(folder, *arguments, **settings):
    ended = run_engine(folder, *arguments, **settings)
    assert ended.codes == [0], ended.said[0][-3000:]
    return [answer for rank in ended.answers for answer in rank["auto"]]


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """What vLLM answers by itself, in one process: to all prompts at a time, then to each alone."""
    folder = tmp_path_factory.mktemp("plain") / "engine"
    return answered(folder, job(model, PROMPTS) | {"again_alone": True}, ranks=1)


def test_vllm_alone_repeats_itself_and_answers_as_transformers_does(model, plain):
    """The reference of the next test. Whatever else is in the batch, it differs by rounding only."""
    together, alone = plain[: len(PROMPTS)], plain[len(PROMPTS) :]
    assert [answer["ids"] for answer in together] == [answer["ids"] for answer in alone]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS * 2, plain, strict=True):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([prompt + answer["ids"]])).logits[0]
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for token, chosen, row in zip(answer["ids"], answer["logprobs"], rows, strict=True):
            assert row.max() - row[token] < TOLERANCE
            assert all(abs(row[int(other)].item() - at) < TOLERANCE for other, at in chosen.items())


@pytest.mark.parametrize("mode", ["experts", "exchange"])
def test_two_ranks_answer_as_one_process_does(model, plain, mode, tmp_path):
    options = {
        "enable_expert_parallel": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
    }
    given = answered(tmp_path / "engine", job(model, PROMPTS, **options), TOKENYARD_VLLM=mode)
    for answer, wanted in zip(given, plain[: len(PROMPTS)] * 2, strict=True):  # of both ranks
        assert answer["ids"] == wanted["ids"]
        for ours, theirs in zip(answer["logprobs"], wanted["logprobs"], strict=True):
            shared = ours.keys() & theirs.keys()
            assert len(shared) >= 2
            assert all(abs(ours[token] - theirs[token]) < TOLERANCE for token in shared)


def test_vllms_kernel_takes_the_stride_of_heads_for_that_of_tokens():
    """Why engines here rotate in torch. If it fails, vLLM has mended it: use its kernel again."""
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    tokens, heads, size = 8, 4, 64
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(size, size, 512, 10000.0, is_neox_style=False, dtype=torch.float32)
    cache = rotary.cos_sin_cache
    positions = torch.arange(tokens)
    query, key = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size)
    # The kernel rotates as many rows as there are tokens, one behind the other, as if each token had one head.
    rows = query.clone().view(-1, 1, size)
    rows[:tokens] = rotary.forward_native(positions, rows[:tokens].clone(), key.clone())[0]
    given = query.clone()
    _custom_ops.rotary_embedding(positions, given, key.clone(), size, cache, False)
    assert torch.allclose(given, rows.view_as(query), atol=1e-5)
    assert not torch.allclose(given, rotary.forward_native(positions, query.clone(), key)[0], atol=1e-2)
