"""Quantized checkpoints in engines with the plugin: two ranks answer as one process does, and experts stay packed.

The checkpoints are small, random, and written by the libraries that such checkpoints come from. The one process is
Transformers, with tokenyard's experts on one rank.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.checkpoints import references
from tests.vllm_engines.launching import ROOT, search_path
from tokenyard import launch
from tokenyard.checkpoints import convert, open_checkpoint
from tokenyard.integrations.transformers import load_sharded

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
PROMPTS = [[(7 * i + 3 * j) % 500 + 1 for j in range(5 + 3 * i)] for i in range(4)]
TENSOR, DATA = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
# The name of the layout, and how ranks share the work.
CASES = {
    "compressed-tensors nvfp4": TENSOR,
    "compressed-tensors mxfp4": DATA,
    "compressed-tensors mxfp8": TENSOR,
    "compressed-tensors mxint4": DATA,
    "compressed-tensors fp8_block128": TENSOR,
    "DeepSeek fp8_block128": DATA,
    "ModelOpt nvfp4": TENSOR,
    "gpt-oss mxfp4": DATA,
}
# float32 sums in another order: seen up to 1e-5.
TOLERANCE = 1e-3
# Seconds for all engines to start, answer and end; 425 on two cores with sixteen other jobs.
MOST_SECONDS = 800
pytestmark = pytest.mark.timeout(MOST_SECONDS + 100)


def random_model(config):
    """A model with random weights that are far enough from zero for answers to differ."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.to(torch.bfloat16)


def written(name, folder):
    """A checkpoint whose experts have this layout, and nothing else is quantized."""
    method, weights = name.split()
    if method == "gpt-oss":
        config = transformers.GptOssConfig(
            **SIZES, intermediate_size=128, num_local_experts=8, sliding_window=64
        )
        random_model(config).save_pretrained(folder / "plain")
        convert(open_checkpoint(folder / "plain"), weights, folder / "quantized")
        return folder / "quantized"
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=128, moe_intermediate_size=128, num_experts=7, norm_topk_prob=True
    )
    state = random_model(config).state_dict()
    plain = [
        key.removesuffix(".weight") for key, value in state.items() if value.dim() == 2 and "norm" not in key
    ]
    write, quantization = {
        "compressed-tensors": (
            lambda w: references.compress(weights, w),
            lambda: references.compressed_config(weights) | {"ignore": plain},
        ),
        "DeepSeek": (
            references.deepseek,
            lambda: {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": plain,
            },
        ),
        "ModelOpt": (
            references.modelopt,
            lambda: {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": plain},
        ),
    }[method]
    tensors = {}
    for key, value in state.items():
        if ".mlp.experts." not in key:
            tensors[key] = value
            continue
        prefix, _, kind = key.rpartition(".")
        names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        for expert, matrix in enumerate(value):
            for projection, w in zip(names, matrix.chunk(len(names)), strict=True):
                for suffix, tensor in write(w).items():
                    tensors[f"{prefix}.{expert}.{projection}.{suffix}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(
            config.to_dict()
            | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": quantization()}
        )
    )
    return folder


def free_ports(count):
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: written(name, tmp_path_factory.mktemp("checkpoint")) for name in CASES}


@pytest.fixture(scope="module")
def ended(checkpoints, tmp_path_factory):
    """What both ranks answered, with all checkpoints: engines are started once, one after the other."""
    folder = tmp_path_factory.mktemp("engines")
    store, *ports = free_ports(1 + len(CASES))
    engines = {
        name: (port, {"model": str(checkpoints[name]), **parallel})
        for port, (name, parallel) in zip(ports, CASES.items(), strict=True)
    }
    (folder / "job.json").write_text(json.dumps({"prompts": PROMPTS, "engines": engines}))
    settings = {
        "TOKENYARD_VLLM": "experts",
        "PYTHONPATH": search_path(),
        "HOME": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={store}"]
    command += ["-m", "tests.vllm_engines.quantized_ranks", str(folder / "job.json"), str(folder / "answers")]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(MOST_SECONDS)
        finally:
            process.terminate()  # torchrun ends its ranks then
            process.wait(20)
    assert code == 0, log.read_text(errors="replace")[-3000:]
    return [json.loads((folder / f"answers.{rank}").read_text()) for rank in range(2)]


def logprobs_in_one_process(checkpoint, sequences):
    """The log-probabilities of every next token of these sequences."""

    def rank(group):
        sharded = load_sharded(checkpoint, group, max_tokens=64, dtype=torch.float32)
        with torch.no_grad():
            return [
                sharded.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
                for tokens in sequences
            ]

    return launch(1, rank, ranks="threads")[0]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_answer_as_one_process_does(name, checkpoints, ended):
    answers = {}
    for rank, given in enumerate(ended):
        assert given[name]["weights"] == [name.split()[1]]
        # gpt-oss has 8 experts, the others 7.
        assert given[name]["experts"] == (4 if rank == 0 or name.startswith("gpt-oss") else 3)
        for number, answer in given[name]["answers"].items():
            assert answers.setdefault(int(number), answer) == answer  # ranks of one TP group have the same
    assert sorted(answers) == list(range(len(PROMPTS)))
    sequences = [prompt + answers[number]["ids"] for number, prompt in enumerate(PROMPTS)]
    expected = logprobs_in_one_process(checkpoints[name], sequences)
    for number, prompt in enumerate(PROMPTS):
        rows = expected[number][len(prompt) - 1 : -1]
        for token, chosen, row in zip(answers[number]["ids"], answers[number]["logprobs"], rows, strict=True):
            assert row.max() - row[token] < TOLERANCE  # the likeliest, or its equal
            assert len(chosen) >= 3
            assert all(abs(row[int(other)].item() - at) < TOLERANCE for other, at in chosen.items())
