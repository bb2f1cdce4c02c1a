"""Plain weights: every family's names, one file or several, and who reads which bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.checkpoints.small import NAMES, Small, same_bits, save
from tokenyard import launch
from tokenyard.checkpoints import open_checkpoint
from tokenyard.checkpoints.files import open_files
from tokenyard.errors import CheckpointError
from tokenyard.routing import Placement

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("files", "index"), [(1, True), (3, True), (3, False)])
def test_experts_are_the_weights_that_were_saved(tmp_path, dtype, files, index):
    model = Small(dtype=dtype)
    checkpoint = open_checkpoint(save(tmp_path, model.tensors(), model.config(), files=files, index=index))
    assert [layer.name for layer in checkpoint.layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for number in range(2):
        weights = checkpoint.experts(number)
        assert same_bits(weights.w13, model.w13(number))
        assert same_bits(weights.w2, model.w2(number))
        assert weights.b13 is None
        some = checkpoint.experts(f"model.layers.{number}.mlp", [5, 0, 7])
        assert same_bits(some.w13, model.w13(number, [5, 0, 7]))
        assert same_bits(some.w2, model.w2(number, [5, 0, 7]))
    none = checkpoint.experts(0, [])
    assert (none.w13.shape, none.w2.shape) == ((0, 64, 64), (0, 64, 32))


def test_what_a_checkpoint_knows(tmp_path):
    model = Small()
    checkpoint = open_checkpoint(save(tmp_path, model.tensors(), model.config()))
    layer = checkpoint.layer("model.layers.1.mlp")
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (8, 64, 32)
    assert (layer.gated, layer.interleaved, layer.bias, layer.weights) == (True, False, False, "bf16")
    assert layer.nbytes == 8 * 3 * 64 * 32 * 2
    assert checkpoint.experts_nbytes == 2 * layer.nbytes
    assert set(checkpoint.shared) == set(model.shared())
    assert checkpoint.nbytes == checkpoint.shared_nbytes + checkpoint.experts_nbytes
    assert checkpoint.bytes_read == 0
    gate = checkpoint.tensor("model.layers.0.mlp.gate.weight")
    assert same_bits(gate, torch.ones(8, 64))
    assert checkpoint.bytes_read == gate.nbytes
    assert checkpoint.config["model_type"] == "qwen3_moe"


@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_each_of_four_ranks_reads_its_quarter(tmp_path, placement):
    model = Small()
    save(tmp_path, model.tensors(), model.config(), files=3)
    table = getattr(Placement, placement)(8, 4)

    def rank(group):
        checkpoint = open_checkpoint(tmp_path)
        for layer in checkpoint.layers:
            checkpoint.experts(layer.name, table.local_experts(group.rank))
        return checkpoint.bytes_read, checkpoint.experts_nbytes

    for read, everything in launch(4, rank, ranks="threads"):
        assert 4 * read == everything


def test_names_of_mixtral_also_by_the_name_of_the_plan(tmp_path):
    model = Small(
        model_type="mixtral", parent="model.layers.{}.block_sparse_moe", names=NAMES["w1"],
        extra_config={"num_experts": None, "num_local_experts": 8},
    )  # fmt: skip
    checkpoint = open_checkpoint(save(tmp_path, model.tensors(), model.config()))
    assert checkpoint.layers[1].name == "model.layers.1.block_sparse_moe"
    assert same_bits(checkpoint.experts("model.layers.1.mlp").w13, model.w13(1))
    with pytest.raises(CheckpointError, match=r"unknown MoE layer 'model.layers.7.mlp'"):
        checkpoint.experts("model.layers.7.mlp")


@pytest.mark.parametrize("written", ["02", "\N{ARABIC-INDIC DIGIT TWO}", "+2"])
def test_numbers_of_experts_are_written_one_way(tmp_path, written):
    """Their tensors would not be found by the names that the numbers give."""
    model = Small(num_experts=3)
    old, new = "model.layers.1.mlp.experts.2.", f"model.layers.1.mlp.experts.{written}."
    tensors = {name.replace(old, new): tensor for name, tensor in model.tensors().items()}
    folder = save(tmp_path, tensors, model.config())
    with pytest.raises(CheckpointError, match="belongs to experts, under a name that is not known"):
        open_checkpoint(folder)


def test_a_layer_whose_number_is_none(tmp_path):
    """A model of 10^5000 layers is no model; its layer has a name all the same."""
    model = Small(num_layers=1, parent="model.layers." + "9" * 5000 + ".mlp")
    checkpoint = open_checkpoint(save(tmp_path, model.tensors(), model.config()))
    (layer,) = checkpoint.layers
    assert (layer.name, layer.number) == (model.parent, -1)
    assert same_bits(checkpoint.experts(layer.name, [1]).w2, model.w2(0, [1]))


def test_experts_without_a_gate(tmp_path):
    model = Small(model_type="nemotron_h", parent="backbone.layers.{}.mixer")
    tensors = {name: t for name, t in model.tensors().items() if "gate_proj" not in name}
    checkpoint = open_checkpoint(save(tmp_path, tensors, model.config()))
    weights = checkpoint.experts(0)
    assert not checkpoint.layers[0].gated
    assert same_bits(weights.w13, model.w13(0)[:, 32:].contiguous())
    assert same_bits(weights.w2, model.w2(0))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_all_experts_in_one_tensor(tmp_path, transposed, bias):
    """What Transformers saves of gpt-oss (transposed), and holds of the other families."""
    model = Small(model_type="gpt_oss" if transposed else "qwen3_moe")
    tensors = model.shared()
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        w13, w2 = model.w13(layer), model.w2(layer)
        tensors[f"{prefix}.gate_up_proj"] = (w13.mT if transposed else w13).contiguous()
        tensors[f"{prefix}.down_proj"] = (w2.mT if transposed else w2).contiguous()
        if bias:
            tensors[f"{prefix}.gate_up_proj_bias"] = w13[..., 0].contiguous()
            tensors[f"{prefix}.down_proj_bias"] = w2[..., 0].contiguous()
    checkpoint = open_checkpoint(save(tmp_path, tensors, model.config()))
    (layer, _) = checkpoint.layers
    assert (layer.interleaved, layer.bias, layer.num_experts) == (transposed, bias, 8)
    weights = checkpoint.experts(0, [6, 7])
    assert same_bits(weights.w13, model.w13(0, [6, 7]))
    assert same_bits(weights.w2, model.w2(0, [6, 7]))
    assert 4 * checkpoint.bytes_read == layer.nbytes
    if bias:
        assert same_bits(weights.b13, model.w13(0, [6, 7])[..., 0].contiguous())
        assert same_bits(weights.b2, model.w2(0, [6, 7])[..., 0].contiguous())


def test_one_expert_with_biases(tmp_path):
    model = Small(num_experts=1)
    tensors = model.tensors()
    biases = {
        name.removesuffix("weight") + "bias": torch.arange(tensor.shape[0]).to(torch.float16)
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    experts = open_checkpoint(save(tmp_path, tensors | biases, model.config())).experts(1)
    assert experts.b13.dtype == experts.b2.dtype == torch.float16
    assert experts.b13.tolist() == [[*range(32), *range(32)]]
    assert experts.b2.tolist() == [[*range(64)]]


def test_tensors_that_do_not_lie_on_whole_numbers(tmp_path):
    """A tensor of odd size in front shifts the others: torch cannot read bf16 from an odd byte."""
    model = Small(num_layers=1)
    tensors = model.tensors()
    blob, header = b"\x07", {"odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    for name, tensor in tensors.items():
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        places = [len(blob), len(blob) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": places}
        blob += raw
    import json

    text = json.dumps(header).encode()
    save(tmp_path, {}, model.config())
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob)
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert same_bits(checkpoint.experts(0).w13, model.w13(0))
    assert same_bits(checkpoint.experts(0).w2, model.w2(0))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3", "minimax_m2"])
def test_what_transformers_saves(tmp_path, family):
    """The same experts as in the model that was saved."""
    import transformers

    sizes = {
        "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
        "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert [layer.number for layer in checkpoint.layers] == ([1] if family == "deepseek_v3" else [0, 1])
    experts = model.model.layers[1].mlp.experts
    held = {name: p.detach() for name, p in experts.named_parameters()}
    flip = family == "gpt_oss"
    weights = checkpoint.experts("model.layers.1.mlp", [3, 1])
    for ours, theirs in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        expected = held[theirs][[3, 1]]
        assert same_bits(getattr(weights, ours), expected.mT.contiguous() if flip else expected)
    if flip:
        assert checkpoint.layers[0].interleaved
        assert same_bits(weights.b13, held["gate_up_proj_bias"][[3, 1]])
        assert same_bits(weights.b2, held["down_proj_bias"][[3, 1]])


def resident_of(path):
    """Bytes of a file that this process has in memory."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf" {re.escape(str(path))}\n(?:[A-Z]\w+: .*\n)*?Rss: +(\d+) kB", maps)
    assert found
    return 1024 * sum(map(int, found))


def test_no_page_of_a_file_stays_in_memory_whoever_reads_beside_and_whatever_fails(tmp_path):
    model = Small(hidden_size=256, intermediate_size=200, num_layers=1)
    save(tmp_path, model.tensors(), model.config())
    files, _, _ = open_files(tmp_path)
    (path,) = {tensor.file for tensor in files.tensors.values()}
    with files.view(next(iter(files.tensors))) as tensor:
        tensor.clone()
        assert resident_of(path) > 0
    assert resident_of(path) == 0

    def read(name):
        with suppress(ZeroDivisionError), files.view(name) as tensor:
            tensor.clone()
            raise ZeroDivisionError

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, 10 * list(files.tensors)))
    assert resident_of(path) == 0


_MEMORY = """
import sys
from tests.memory import resident
from tokenyard.checkpoints import open_checkpoint

checkpoint = open_checkpoint(sys.argv[1])
checkpoint.experts(0, [0])  # whatever is loaded once
before = resident("VmRSS")
weights = checkpoint.experts(0, range(8))
print((resident("VmRSS") - before) / weights.nbytes)
"""


def test_tensors_that_are_handed_out_are_the_callers_own(tmp_path):
    model = Small()
    checkpoint = open_checkpoint(save(tmp_path, model.tensors(), model.config()))
    name = next(iter(checkpoint.shared))
    first, experts = checkpoint.tensor(name), checkpoint.experts(1, [2])
    before, w13 = first.clone(), experts.w13.clone()
    first.fill_(7)
    experts.w13.fill_(7)
    assert same_bits(checkpoint.tensor(name), before)
    assert same_bits(checkpoint.experts(1, [2]).w13, w13)
    assert (first == 7).all()  # what was read later has not taken its memory back
    assert (experts.w13 == 7).all()


def test_reading_takes_the_memory_of_what_is_read_once(tmp_path):
    """Pages of the files go back as soon as they were copied; otherwise this would be 2."""
    model = Small(hidden_size=1024, intermediate_size=1024, num_layers=1)
    save(tmp_path, model.tensors(), model.config())
    command = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.2
