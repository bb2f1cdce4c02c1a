"""`shard_experts`: a model whose experts live on four ranks gives what it gave on one, in every family."""

import copy

import pytest
import torch
import transformers

from tests.integrations.transformers_models import (
    FAMILIES,
    VARIANTS,
    generated,
    logits_of,
    prompts,
    tiny_config,
    tiny_model,
)
from tests.models import on_ranks
from tokenyard.checkpoints import open_checkpoint
from tokenyard.errors import InputError
from tokenyard.exchange import EXCHANGES
from tokenyard.integrations.transformers import load_sharded, loading, shard_experts
from tokenyard.integrations.transformers.expert_modules import expert_modules
from tokenyard.integrations.transformers.loading import experts_left_out, fill_shared, load_without_experts
from tokenyard.planning import drafting

WORLD = 4
# Only the order of float32 sums differs: a few units in the last place of logits that are about 5.
SAME = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny model of a family, as Transformers saves it, and the model."""
    kept = {}

    def save(family):
        if family not in kept:
            model, folder = tiny_model(family), tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            kept[family] = model, folder
        return kept[family]

    return save


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_logits_and_tokens_are_those_of_the_unsharded_model(family):
    """Every rank has its own batch and generates its own number of tokens, with a cache."""
    whole = tiny_model(family)

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32)
        ids = prompts(group.rank, batch=1 + group.rank % 2, length=4 + group.rank)
        found = logits_of(sharded.model, ids)
        return ids, found, sharded.generate(ids, max_new_tokens=9 - 2 * group.rank, do_sample=False)

    for rank, (ids, found, tokens) in enumerate(on_ranks(WORLD, rank_main)):
        torch.testing.assert_close(found, logits_of(whole, ids), **SAME)
        assert torch.equal(tokens, generated(whole, ids, 9 - 2 * rank))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_loaded_by_the_share(family, saved):
    """Each rank reads what all need and its own experts, and no other byte; the model is the same."""
    whole, folder = saved(family)

    def rank_main(group):
        checkpoint = open_checkpoint(folder)
        sharded = load_sharded(checkpoint, group, max_tokens=32)
        ids = prompts(group.rank)
        owned = sum(experts.layer.experts.weights.nbytes for experts in sharded.experts)
        assert not any(p.is_meta for p in sharded.model.parameters())
        return ids, logits_of(sharded.model, ids), checkpoint.bytes_read - checkpoint.shared_nbytes, owned

    results = on_ranks(WORLD, rank_main)
    for ids, found, bytes_read, owned in results:
        torch.testing.assert_close(found, logits_of(whole, ids), **SAME)
        assert bytes_read == owned
    assert sum(owned for *_, owned in results) == open_checkpoint(folder).experts_nbytes


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["on meta", "experts left out", "whole"])
def test_half_loaded_models(family, kind, saved):
    """Built on the meta device, or without experts, or with all of them: a checkpoint's experts are taken."""
    whole, folder = saved(family)
    if kind == "on meta":
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    elif kind == "experts left out":
        with experts_left_out():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())
    else:
        model = copy.deepcopy(whole)
        for module in expert_modules(model):
            module.module.down_proj.zero_()  # what must not be used

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(model), group, max_tokens=32, checkpoint=folder)
        ids = prompts(group.rank)
        return ids, logits_of(sharded.model, ids)

    for ids, found in on_ranks(WORLD, rank_main):
        torch.testing.assert_close(found, logits_of(whole, ids), **SAME)


def test_each_layer_is_wired_once_while_a_model_is_loaded(saved, monkeypatch):
    """The draft that says whose experts to read is the one that the ranks agree on."""
    wired, wire_layer = [], drafting.wire_layer

    def counted(spec, **arguments):
        wired.append(spec.name)
        return wire_layer(spec, **arguments)

    monkeypatch.setattr(drafting, "wire_layer", counted)
    sharded = on_ranks(1, lambda group: load_sharded(saved("qwen3_moe")[1], group, max_tokens=32).layers)
    assert [wired] == sharded


def test_tied_embeddings_of_a_model_on_meta_stay_tied(tmp_path):
    """Both names of the embeddings get their numbers, which are one tensor, as Transformers has it."""
    whole = tiny_model("qwen3_moe", tie_word_embeddings=True)
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        config = tiny_config("qwen3_moe", tie_word_embeddings=True)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(model), group, max_tokens=32, checkpoint=tmp_path)
        filled, ids = sharded.model, prompts(group.rank)
        named = [
            *filled.named_parameters(remove_duplicate=False),
            *filled.named_buffers(remove_duplicate=False),
        ]
        left = [name for name, tensor in named if tensor.is_meta]
        return left, filled.lm_head.weight is filled.model.embed_tokens.weight, ids, logits_of(filled, ids)

    for left, is_tied, ids, found in on_ranks(2, rank_main):
        assert left == []
        assert is_tied
        torch.testing.assert_close(found, logits_of(whole, ids), **SAME)


def test_what_has_no_numbers_in_the_checkpoint_does_not_stay_on_meta(saved, monkeypatch):
    """Whatever the model of the checkpoint could not fill either is an error, and no garbage."""
    _, folder = saved("qwen3_moe")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=torch.float32)
    half_loaded = load_without_experts(folder)
    half_loaded.model.norm.to("meta")
    monkeypatch.setattr(loading, "load_without_experts", lambda *_, **__: half_loaded)
    with pytest.raises(InputError, match=r"model\.norm\.weight is on the meta device"):
        fill_shared(model, open_checkpoint(folder))


def test_what_is_no_experts_is_loaded_without_a_copy(saved):
    _, folder = saved("deepseek_v3")
    checkpoint = open_checkpoint(folder)
    read = {}
    tensor, checkpoint.tensor = checkpoint.tensor, lambda name: read.setdefault(name, tensor(name))
    model = load_without_experts(checkpoint)
    pointers = {held.data_ptr() for held in read.values()}
    assert {p.data_ptr() for p in model.parameters()} <= pointers
    assert model.generation_config.eos_token_id is None


@pytest.mark.parametrize("placement", ["round_robin", "contiguous"])
def test_exchanges_agree_to_the_bit(placement):
    whole = tiny_model("qwen3_moe", torch.bfloat16)

    def rank_main(group, exchange):
        sharded = shard_experts(
            copy.deepcopy(whole), group, exchange=exchange, max_tokens=32, placement=placement
        )
        return logits_of(sharded.model, prompts(group.rank, batch=2))

    first, *others = [on_ranks(WORLD, rank_main, exchange) for exchange in EXCHANGES]
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def test_experts_move_while_a_model_generates(saved):
    whole, folder = saved("qwen3_moe")

    def rank_main(group):
        sharded = load_sharded(folder, group, max_tokens=32, placement="round_robin", spare_experts=3)
        move = sharded.plan.rebalance(dict.fromkeys(sharded.layers, "contiguous"), wait=False)
        ids = prompts(group.rank)
        tokens = []
        while not move.is_done:
            tokens.append(sharded.generate(ids, max_new_tokens=3, do_sample=False))
        tokens.append(sharded.generate(ids, max_new_tokens=3, do_sample=False))
        return ids, tokens, repr(sharded.experts[0]), sharded.plan.local_experts(sharded.layers[0])

    for rank, (ids, tokens, shown, local) in enumerate(on_ranks(WORLD, rank_main)):
        assert all(torch.equal(some, generated(whole, ids, 3)) for some in tokens)
        assert local == ([0, 1, 2], [3, 4, 5], [6, 7], [8, 9])[rank]
        assert f"{len(local)} of 10 experts here" in shown


def test_layers_that_differ():
    """What a layer is, is read from its module: widths and numbers of choices may change from layer to layer."""
    whole = tiny_model("qwen3_moe")
    wide, _, last = whole.model.layers[0], whole.model.layers[1], whole.model.layers[2]
    other = tiny_model("qwen3_moe", moe_intermediate_size=40, num_experts=7, num_experts_per_tok=2, seed=1)
    last.mlp = other.model.layers[2].mlp

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32)
        specs = [sharded.plan.wiring(name).spec for name in sharded.layers]
        ids = prompts(group.rank)
        return (
            ids,
            logits_of(sharded.model, ids),
            [(s.num_experts, s.intermediate_size, s.top_k) for s in specs],
        )

    for ids, found, sizes in on_ranks(WORLD, rank_main):
        assert sizes == [(10, 32, 3), (7, 40, 2)]
        torch.testing.assert_close(found, logits_of(whole, ids), **SAME)
    assert wide.mlp.experts.num_experts == 10


def test_a_language_model_inside_of_another_model():
    """What stands in `text_config` counts, and layers have the names of the whole model."""
    text = tiny_config("qwen3_moe", mlp_only_layers=[]).to_dict() | {
        "model_type": "qwen3_vl_moe_text",
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)
    for module in expert_modules(whole):
        module.module.down_proj.normal_()
        module.module.gate_up_proj.normal_()

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32)
        return logits_of(sharded.model, prompts(group.rank)), sharded.layers

    for rank, (found, layers) in enumerate(on_ranks(WORLD, rank_main)):
        assert layers == [f"model.language_model.layers.{layer}.mlp" for layer in range(3)]
        torch.testing.assert_close(found, logits_of(whole, prompts(rank)), **SAME)


def test_a_sharded_model_compiles_as_one_graph():
    whole = tiny_model("qwen3_moe", num_hidden_layers=1)

    def rank_main(group):
        sharded = shard_experts(copy.deepcopy(whole), group, max_tokens=32)
        compiled = torch.compile(sharded.model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            return compiled(prompts(0), use_cache=False).logits

    (found,) = on_ranks(1, rank_main, deadline=60.0)
    torch.testing.assert_close(found, logits_of(whole, prompts(0)), **SAME)
