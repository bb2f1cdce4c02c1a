"""`layers_from_config` against transformers: the same layers, experts, sizes and routes as the real model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tokenyard import draft
from tokenyard.checkpoints import open_checkpoint
from tokenyard.errors import CheckpointError, InputError, TokenyardError, UnknownName
from tokenyard.integrations.huggingface import FAMILIES, layers_from_config

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "head_dim": 16,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
# What each family's tiny model is made of; sizes differ so that no key can stand in for another.
MODELS = {
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [0, 3]},
    "qwen3_vl_moe_text": {"num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "deepseek_v2": {
        **LATENT,
        "n_routed_experts": 6,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v3": {
        **LATENT,
        **GROUPED,
        "first_k_dense_replace": 2,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 2,
    },
    "gpt_oss": {"num_local_experts": 6, "swiglu_limit": 5.0},
    "glm4_moe": {
        **GROUPED,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 1,
    },
    "glm4v_moe_text": {**GROUPED, "first_k_dense_replace": 1, "norm_topk_prob": False},
    "olmoe": {"num_experts": 6, "norm_topk_prob": True},
    "minimax_m2": {"num_local_experts": 6},
}


def config_of(family: str):
    return transformers.AutoConfig.for_model(family, **TINY, **MODELS[family])


def written(config, tmp_path):
    """The file that transformers writes."""
    config.save_pretrained(tmp_path)
    return tmp_path / "config.json"


def moe_blocks(model) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "experts")}


def the_model(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_layers_are_those_of_the_model(family, tmp_path):
    config = config_of(family)
    blocks = moe_blocks(the_model(config))
    layers = layers_from_config(written(config, tmp_path))
    heads = MODELS[family].get("num_nextn_predict_layers", 0)  # transformers builds them only to generate
    names = [f"model.{name}" for name in blocks]
    names += [f"model.layers.{TINY['num_hidden_layers'] + head}.mlp" for head in range(heads)]
    assert [layer.name for layer in layers] == names
    for layer, block in zip(layers, blocks.values(), strict=False):
        first, second = block.experts.gate_up_proj, block.experts.down_proj
        H, I = layer.hidden_size, layer.intermediate_size  # noqa: E741
        assert sorted(first.shape) == sorted((layer.num_experts, 2 * I, H))
        assert sorted(second.shape) == sorted((layer.num_experts, I, H))
        assert layer.bias == hasattr(block.experts, "gate_up_proj_bias")
        assert layer.top_k == TINY["num_experts_per_tok"]
    assert draft(layers, 3, max_tokens=8).world == 3


@pytest.mark.parametrize("family", MODELS)
def test_router_chooses_and_weighs_as_the_models_gate(family, tmp_path):
    """Same experts, same weights (with the choice bias at zero, which the config does not hold)."""
    config = config_of(family)
    block = next(iter(moe_blocks(the_model(config)).values()))
    gate = block.router if family == "gpt_oss" else block.gate
    for name, buffer in block.named_buffers():
        assert "e_score_correction_bias" in name
        buffer.zero_()
    x = torch.randn(64, TINY["hidden_size"])
    with torch.no_grad():
        bias = [torch.zeros(6)] if family == "minimax_m2" else []
        routed = gate(x, *bias)
    if not isinstance(routed, tuple):
        pytest.skip("in this transformers the gate returns logits, and its block routes")
    logits, weights, ids = routed
    layer = layers_from_config(written(config, tmp_path))[0]
    routes = layer.router(logits.float())
    found = torch.zeros(64, layer.num_experts).scatter(1, routes.topk_ids_TK.long(), routes.topk_weights_TK)
    expected = torch.zeros(64, layer.num_experts).scatter(1, ids, weights.float())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", MODELS)
def test_activation_is_that_of_the_model(family, tmp_path):
    config = config_of(family)
    block = next(iter(moe_blocks(the_model(config)).values()))
    layer = layers_from_config(written(config, tmp_path))[0]
    pre = 8 * torch.randn(16, 2 * layer.intermediate_size)
    if family == "gpt_oss":
        block.experts.limit = MODELS[family][
            "swiglu_limit"
        ]  # older transformers have 7, whatever the config says
        expected = block.experts._apply_gate(pre)
    else:
        gate, up = pre.chunk(2, dim=-1)
        expected = block.experts.act_fn(gate) * up
    torch.testing.assert_close(layer.activation(pre), expected)


_DEEPSEEK = {"moe_layer_freq": 1, "scoring_func": "sigmoid"}
ON_DISK_ONLY = {
    "qwen3_vl_moe_text": {"norm_topk_prob": False},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, "num_nextn_predict_layers": 0},
    "glm4_moe": _DEEPSEEK,
    "glm4v_moe_text": {**_DEEPSEEK, "num_nextn_predict_layers": 1},
    "minimax_m2": {
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    """A default that transformers changes, or that was copied wrong, shows here."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    ours = FAMILIES[family].defaults
    # Keys that are in files on disk, and that the config class does not know.
    unknown = set(ours) - set(theirs)
    assert {key: ours[key] for key in unknown} == ON_DISK_ONLY.get(family, {})
    assert {key: theirs[key] for key in ours if key not in unknown} == {
        key: value for key, value in ours.items() if key not in unknown
    }


def base(**changes) -> dict:
    config = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, **TINY, **GROUPED, **changes}
    return {key: value for key, value in config.items() if value is not ...}


def test_numbers_up_to_the_limit_are_read_and_larger_ones_are_not():
    assert layers_from_config(base(moe_intermediate_size=2**31 - 1))[0].intermediate_size == 2**31 - 1
    with pytest.raises(InputError, match=f"moe_intermediate_size.*{2**31}"):
        layers_from_config(base(moe_intermediate_size=2**31))


def test_mtp_layers_are_numbered_on():
    names = [layer.name for layer in layers_from_config(base(num_nextn_predict_layers=2))]
    assert names == [f"model.layers.{i}.mlp" for i in (3, 4, 5, 6)]
    assert len(layers_from_config(base(num_nextn_predict_layers=0))) == 2


def test_moe_layer_freq_and_layer_types():
    every_other = base(first_k_dense_replace=1, moe_layer_freq=2, num_nextn_predict_layers=0)
    assert [layer.name[13:14] for layer in layers_from_config(every_other)] == ["2", "4"]
    none_dense = base(first_k_dense_replace=0, num_nextn_predict_layers=0)
    assert [layer.name[13:14] for layer in layers_from_config(none_dense)] == list("01234")
    kinds = ["sparse", "dense", "dense", "dense", "sparse"]
    listed = base(model_type="deepseek_v32", mlp_layer_types=kinds, num_nextn_predict_layers=...)
    assert [layer.name[13:14] for layer in layers_from_config(listed)] == ["0", "4"]
    shorter = base(mlp_layer_types=["dense", "sparse"], first_k_dense_replace=3, num_nextn_predict_layers=0)
    assert [layer.name[13:14] for layer in layers_from_config(shorter)] == ["1", "3", "4"]


def test_null_groups_mean_no_groups():
    router = layers_from_config(base(n_group=None, topk_group=None))[0].router
    assert (router.num_groups, router.topk_groups) == (1, 1)


def test_the_router_that_we_do_not_have_leaves_the_scaling_to_the_caller():
    config = config_of("deepseek_v2").to_dict() | {
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    }
    layer = layers_from_config(config)[0]
    assert layer.router is None
    assert layer.routed_scaling == 16.0
    assert draft([layer], 2, max_tokens=4).rows()[0]["duties"]["routed scaling"] == "caller"


def test_a_greedy_choice_of_deepseek_v2_is_a_scaled_softmax():
    config = config_of("deepseek_v2").to_dict() | {"topk_method": "greedy", "norm_topk_prob": False}
    router = layers_from_config(config)[0].router
    assert (router.name, router.renormalize, router.routed_scaling) == ("softmax", False, 16.0)
    assert layers_from_config(config | {"norm_topk_prob": True})[0].router is None
    for wrong in ({"scoring_func": "sigmoid"}, {"topk_method": "noaux_tc"}):
        with pytest.raises(UnknownName, match="which is not known to tokenyard"):
            layers_from_config(config | wrong)


def test_another_scoring_than_that_of_the_family_is_not_taken_for_it():
    with pytest.raises(UnknownName, match=r"scoring_func='softmax'.*expected one of sigmoid"):
        layers_from_config(base(scoring_func="softmax"))


@pytest.mark.parametrize("wrong", ["0", [-1], [0.5], [True], {"0": 1}])
def test_layers_that_are_no_numbers(wrong):
    config = config_of("qwen3_moe").to_dict() | {"mlp_only_layers": wrong}
    with pytest.raises(CheckpointError, match=r"mlp_only_layers=.*expected a list of layer numbers"):
        layers_from_config(config)


def test_layers_that_are_listed_as_plain_are_left_out():
    config = config_of("qwen3_moe").to_dict()
    for listed, left in (([], "01234"), ([0], "1234"), ([4, 0], "123"), (None, "01234")):
        layers = layers_from_config(config | {"mlp_only_layers": listed})
        assert [layer.name for layer in layers] == [f"model.layers.{number}.mlp" for number in left]
    for step, left in ((2, "13"), (3, "2"), (5, "4")):
        layers = layers_from_config(config | {"mlp_only_layers": [], "decoder_sparse_step": step})
        assert [layer.name for layer in layers] == [f"model.layers.{number}.mlp" for number in left]


@pytest.mark.parametrize(
    ("act", "formula"),
    [
        ("silu", "swiglu"),
        ("swish", "swiglu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu2", "relu2"),
    ],
)
def test_what_hidden_act_says_is_multiplied_by_the_up_projection(act, formula):
    found = layers_from_config(base(hidden_act=act))[0].activation
    assert (found.name, found.gated, found.interleaved) == (formula, True, False)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype(key):
    layer = layers_from_config(base(**{key: "float16"}))[0]
    assert (layer.dtype, layer.weights) == (torch.float16, "fp16")
    assert layers_from_config(base())[0].dtype == torch.bfloat16


def test_nested_text_config():
    whole = {"model_type": "some_vl", "dtype": "float32", "text_config": base()}
    layer = layers_from_config(whole)[0]
    assert layer.name == "model.language_model.layers.3.mlp"
    assert layer.dtype == torch.float32
    assert layers_from_config(whole, prefix="blocks")[0].name == "blocks.3.mlp"


def test_arguments_reach_the_layers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base()))
    layers = layers_from_config(
        str(tmp_path), wire="nvfp4", combine_wire="mxfp8", max_tokens=7, experts="reference", weights="fp32"
    )
    assert {(s.wire, s.combine_wire, s.max_tokens, s.experts, s.weights) for s in layers} == {
        ("nvfp4", "mxfp8", 7, "reference", "fp32")
    }
    assert replace(layers[0], name="") == replace(layers[1], name="", router=layers[0].router)


BROKEN = [
    ({"hidden_size": ...}, "'hidden_size'"),
    ({"hidden_size": None}, "'hidden_size'"),
    ({"hidden_size": -7}, "hidden_size=-7"),
    ({"hidden_size": "7168"}, "hidden_size='7168'"),
    ({"hidden_size": 7168.0}, "hidden_size=7168.0"),
    ({"hidden_size": True}, "hidden_size=True"),
    ({"hidden_size": 10**400}, "hidden_size="),
    ({"n_routed_experts": ...}, "'n_routed_experts' (or 'num_local_experts')"),
    ({"n_routed_experts": 10**9}, "n_routed_experts"),
    ({"num_experts_per_tok": 9}, "top_k=9"),
    ({"num_hidden_layers": 10**8}, "num_hidden_layers"),
    ({"num_hidden_layers": 3}, "none of the 3 layers"),
    ({"first_k_dense_replace": [3]}, "first_k_dense_replace"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    ({"routed_scaling_factor": 10**400}, "routed_scaling_factor"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"n_group": 3}, "8 experts in 3 groups"),
    ({"topk_group": 5}, "topk_groups=5"),
    ({"hidden_act": "mish"}, "hidden_act"),
    ({"dtype": "float8_e4m3fn"}, "dtype"),
    ({"dtype": 16}, "dtype"),
    ({"mlp_layer_types": "sparse"}, "mlp_layer_types='sparse'; expected a list"),
    ({"mlp_layer_types": ["sparse", 1, 1, 1, 1]}, "mlp_layer_types=['sparse', 1, 1, 1, 1]; expected a list"),
    ({"mlp_layer_types": 1}, "mlp_layer_types=1; expected a list"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=[str(c)[:50] for c, _ in BROKEN])
def test_errors_name_the_key_the_file_and_the_family(changes, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base(**changes)))
    with pytest.raises((InputError, UnknownName)) as raised:
        layers_from_config(path)
    for part in (words, str(path), "deepseek_v3"):
        assert part in str(raised.value)


def test_unknown_family():
    with pytest.raises(UnknownName, match="model_type 'deepseek_v33', which is not known") as raised:
        layers_from_config(base(model_type="deepseek_v33"))
    assert "deepseek_v3" not in raised.value.fix  # of another family it would be another model
    for wrong in (None, 3, ["mixtral"], {}):
        with pytest.raises(InputError, match="model_type"):
            layers_from_config({"model_type": wrong})
    with pytest.raises(UnknownName, match="some_text"):
        layers_from_config({"model_type": "some_vl", "text_config": {"model_type": "some_text"}})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1} x']
)
def test_files_that_hold_something_else(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        layers_from_config(path)


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({**TINY, "model_type": "mixtral", "num_local_experts": 0})]
)
def test_plans_and_checkpoints_say_the_same_of_a_config_that_is_wrong(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    said = []
    for read in (layers_from_config, open_checkpoint):
        with pytest.raises(CheckpointError) as raised:
            read(tmp_path)
        said.append(raised.value.found)
    assert said[0] == said[1]


def test_paths_that_hold_nothing(tmp_path):
    for path in (tmp_path, tmp_path / "none.json", "", "\0", ["config.json"], None, config_of("mixtral")):
        with pytest.raises(InputError):
            layers_from_config(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
known_keys = sorted({*TINY, *LATENT, *GROUPED, *(k for f in FAMILIES.values() for k in f.defaults), "dtype"})


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    noise=st.dictionaries(
        st.sampled_from([*known_keys, "mlp_only_layers", "text_config", "model_type"]),
        json_values | st.integers(0, 9),
        max_size=4,
    ),
)
def test_whatever_is_in_the_file_only_our_errors_come_out(family, noise):
    experts = dict.fromkeys(FAMILIES[family].num_experts, 8)
    config = {**base(model_type=family), **experts, **noise}
    try:
        layers = layers_from_config(config)
        draft(layers[:2], 2, max_tokens=4)
    except TokenyardError as error:
        str(error)
