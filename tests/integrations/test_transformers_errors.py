"""What cannot be sharded is refused, on every rank, with what would work; and what is registered in Transformers."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers

from tests.integrations.transformers_models import FAMILIES, logits_of, prompts, tiny_config, tiny_model
from tests.models import on_ranks, raised
from tokenyard.errors import (
    CheckpointError,
    ContractError,
    HandleError,
    InputError,
    PeerFailed,
    PlanError,
    PlanMismatch,
    UnknownName,
)
from tokenyard.integrations.transformers import load_sharded, shard_experts
from tokenyard.integrations.transformers.loading import experts_left_out

WORLD = 2


@pytest.fixture(scope="module")
def whole():
    return tiny_model("qwen3_moe")


@pytest.fixture
def folder(whole, tmp_path):
    whole.save_pretrained(tmp_path)
    return tmp_path


def errors_of(model, *, ranks=WORLD, by_rank=None, load=None, **options):
    """What `shard_experts` (or `load_sharded`) raises on each rank."""

    def rank_main(group):
        mine = options | (by_rank(group.rank) if by_rank else {})
        if load is not None:
            return raised(load_sharded, load, group, **mine)
        return raised(shard_experts, copy.deepcopy(model), group, **({"max_tokens": 8} | mine))

    return on_ranks(ranks, rank_main)


def test_models_that_are_none(whole):
    dense = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", mlp_only_layers=[0, 1, 2]))
    for model, words in (
        (dense, "has no experts module"),
        (torch.nn.Linear(2, 2), "no config of Transformers"),
    ):
        for error in errors_of(model):
            assert isinstance(error, InputError)
            assert words in str(error)


def test_a_model_is_sharded_once(whole):
    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=8)
        error = raised(shard_experts, sharded.model, group)
        sharded.close()
        return error, raised(logits_of, sharded.model, prompts(0))

    for again, closed in on_ranks(WORLD, rank_main):
        assert isinstance(again, InputError)
        assert "not yet sharded" in again.expected
        assert isinstance(closed, HandleError)


def test_experts_on_meta_need_a_checkpoint():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    for error in errors_of(model):
        assert "no numbers" in error.found
        assert "checkpoint=" in error.fix
    with experts_left_out():
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    with pytest.raises(ContractError, match="experts were left out"):
        logits_of(model, prompts(0))


def test_options_that_do_not_fit(whole):
    for error in errors_of(whole, wire="mxpf8"):
        assert isinstance(error, UnknownName)
    for error in errors_of(whole, inner="nvfp4"):
        assert isinstance(error, PlanError)
        assert error.alternatives
    for error in errors_of(whole, weights="mxpf4"):
        assert isinstance(error, PlanError | UnknownName)
    for error in errors_of(whole, exchange="three_sided"):
        assert isinstance(error, UnknownName)


def test_ranks_that_disagree(whole):
    errors = errors_of(whole, by_rank=lambda rank: {"wire": "mxfp8" if rank else None})
    assert all(isinstance(error, PlanMismatch) for error in errors)
    assert all("layers[0].wire" in error.differences for error in errors)


def test_experts_of_another_dtype_are_refused(whole):
    model = copy.deepcopy(whole)
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(
        experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False
    )
    for error in errors_of(model):
        assert "float8_e4m3fn" in error.found
        assert "experts_left_out" in error.fix


def test_backward_raises_instead_of_giving_nothing(whole):
    def rank_main(group):
        model = shard_experts(copy.deepcopy(whole), group, max_tokens=8).model
        model.model.embed_tokens.weight.requires_grad_(True)
        first = raised(model(prompts(0)).logits.sum().backward)
        return first, raised(model.train(), prompts(0))

    for error, refused in on_ranks(WORLD, rank_main):
        assert isinstance(error, ContractError)
        assert "backward was called" in str(error)
        assert isinstance(refused, HandleError)
        assert "layer 'model.layers.0.mlp', rank " in str(refused)
        assert "the layer was called in training mode" in str(refused)


def test_the_gradient_of_a_router_is_refused_too(whole):
    """Even if nothing else wants one: it would silently be missing."""

    def rank_main(group):
        model = shard_experts(copy.deepcopy(whole), group, max_tokens=8).model
        model.model.layers[0].mlp.gate.weight.requires_grad_(True)
        first = raised(model(prompts(0)).logits.sum().backward)
        return first, raised(model.train(), prompts(0))

    for error, refused in on_ranks(WORLD, rank_main):
        assert "backward was called" in str(error)
        assert "in training mode" in str(refused)
        assert "torch.no_grad()" in error.fix


# --- Checkpoints ------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model(folder):
    model = tiny_model("qwen3_moe", moe_intermediate_size=40)
    for error in errors_of(model, checkpoint=folder):
        assert isinstance(error, CheckpointError)
        assert "intermediate size 32" in error.found
        assert "intermediate size 40" in error.expected


def test_what_all_ranks_need_is_missing(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    for error in errors_of(None, load=folder):
        assert isinstance(error, CheckpointError)
        assert "model.norm.weight" in str(error)


def test_quantized_attention_is_not_read_as_numbers(folder):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    for error in errors_of(None, load=folder):
        assert isinstance(error, CheckpointError)
        assert "quantizes more than its experts" in error.found


def test_one_rank_cannot_read_and_all_end(folder):
    errors = errors_of(None, load=folder)
    assert errors == [None] * WORLD

    def rank_main(group):
        path = folder if group.rank == 0 else folder / "elsewhere"
        return raised(load_sharded, path, group)

    errors = on_ranks(WORLD, rank_main)
    assert isinstance(errors[0], PeerFailed)
    assert isinstance(errors[1], CheckpointError)


def test_a_model_of_an_unknown_family_is_refused_before_it_is_read(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "jamba"}))
    for error in errors_of(None, load=folder):
        assert isinstance(error, UnknownName)
        assert "jamba" in error.found
        assert "qwen3_moe" in error.expected


# --- One rank, without a plan -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_registered_implementation(family):
    model = tiny_model(family)
    ids = prompts(0, batch=2, length=7)
    expected = logits_of(model, ids)
    model.set_experts_implementation("tokenyard")
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-5, atol=2e-5)


def test_the_registered_implementation_copies_no_weights_and_follows_the_model():
    from tokenyard.integrations.transformers import registry_backend

    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config("qwen3_moe"), experts_implementation="tokenyard"
    )
    model = model.eval().requires_grad_(False)
    experts, ids = model.model.layers[0].mlp.experts, prompts(0)
    first = logits_of(model, ids)
    built, _ = registry_backend._built[experts]
    assert built.get_buffer("w13").data_ptr() == experts.gate_up_proj.data_ptr()
    assert built.get_buffer("w2").data_ptr() == experts.down_proj.data_ptr()
    logits_of(model, ids)
    assert registry_backend._built[experts][0] is built
    experts.down_proj.mul_(50)  # in place: seen at once
    second = logits_of(model, ids)
    assert not torch.equal(first, second)
    model.to(torch.bfloat16)  # elsewhere: built anew
    third = logits_of(model, ids)
    assert third.dtype == torch.bfloat16
    assert registry_backend._built[experts][0] is not built
    model.set_experts_implementation("eager")
    torch.testing.assert_close(third, logits_of(model, ids), rtol=0.1, atol=0.1)


def test_the_registered_implementation_has_no_gradients():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("tokenyard")
    weights = {
        "embeddings": model.model.embed_tokens.weight,
        "a router": model.model.layers[0].mlp.gate.weight,
        "experts": model.model.layers[0].mlp.experts.down_proj,
    }
    for weight in weights.values():
        model.eval().requires_grad_(False)
        assert model(prompts(0)).logits.requires_grad is False
        weight.requires_grad_(True)
        with torch.no_grad():
            model.train()(prompts(0))
        with pytest.raises(
            ContractError, match=r"MoeExperts was called in training mode.*torch\.no_grad\(\)"
        ):
            model(prompts(0))
        with pytest.raises(ContractError, match="backward"):
            model.eval()(prompts(0)).logits.sum().backward()


def test_without_transformers_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['transformers.integrations.moe'] = None\n"
        "try:\n    import tokenyard.integrations.transformers\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "pip install 'tokenyard[transformers]'" in done.stdout
