"""Every family of Transformers that has experts is known here, or is refused in one way, wherever a config is read.

Models are built on the meta device, with the sizes of their config class and few layers, and their checkpoints are
headers before files without content: nothing is computed, and nothing is read. `make test` looks at some families, and
`make test-all` at all of them: their configs take seconds to import.
"""

import warnings

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tests.cli.runner import call
from tests.integrations.transformers_models import tiny_config
from tests.models import on_ranks, raised
from tokenyard.checkpoints.families import FAMILIES
from tokenyard.checkpoints.writer import SPELLINGS, CheckpointWriter, Entry
from tokenyard.errors import InputError, UnknownName
from tokenyard.integrations.huggingface import layers_from_config
from tokenyard.integrations.transformers import experts_left_out, load_sharded, shard_experts
from tokenyard.integrations.transformers.expert_modules import is_experts
from tokenyard.integrations.transformers.registry_backend import tokenyard_experts

LAYERS = 6
# What the config class of a family lacks, or says so that no model can be built.
SETTINGS = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "head_dim": 128, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}  # fmt: skip
# Families that were once refused for a reason that was not true.
REPORTED = (
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "longcat_flash",
    "jetmoe",
    "laguna",
    "aria_text",
)
SOME = (*REPORTED, "dbrx", "nemotron_h", "llama4_text", "jamba", "dots1")
# A checkpoint of a family whose model this Transformers does not build from a config.
DBRX = {"transformer.blocks.0.ffn.experts.mlp.w1": (64, 32), "transformer.wte.weight": (100, 32)}


def config_of(name):
    try:
        return transformers.CONFIG_MAPPING[name](**({"num_hidden_layers": LAYERS} | SETTINGS.get(name, {})))
    except Exception:  # a vision model, a model of models: other settings
        return None


def counts_experts(values):
    return any(
        counts_experts(value) if isinstance(value, dict) else str(key).endswith("experts") and bool(value)
        for key, value in values.items()
    )


def is_unknown(name):
    """Whether the configs of a model type have experts, and `FAMILIES` does not hold it."""
    config = config_of(name)
    has_experts = config is not None and counts_experts(config.to_dict())
    return has_experts and config.get_text_config().model_type not in FAMILIES


@pytest.fixture(scope="module")
def unknown():
    """All of them."""
    return list(filter(is_unknown, transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES))


def model_of(name):
    """A language model on the meta device; None where Transformers builds none from a config."""
    config = config_of(name)
    if config.get_text_config() is not config:  # of several parts: the part with the experts is a family, too
        return None
    kinds = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING)
    kind = next((mapping[type(config)] for mapping in kinds if type(config) in mapping), None)
    if kind is None or name == "dbrx":
        return None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(config)


def save(folder, config, tensors):
    """A checkpoint that has headers, and holes where its numbers would be."""
    config.save_pretrained(folder)
    entries = [
        Entry(name=name, dtype=SPELLINGS[t.dtype], shape=tuple(t.shape)) for name, t in tensors.items()
    ]
    CheckpointWriter(folder, entries, largest_file=1 << 60).abandon()
    return folder


def refusals(name):
    """What is said of a family, or of the family of its language model."""
    config = config_of(name)
    for family in {config.model_type, config.get_text_config().model_type}:
        yield f"has model_type {family!r}, which is not known to tokenyard"


def check(error, name):
    """The one way: what was found, that it is not known, and all that is."""
    assert isinstance(error, UnknownName)
    assert any(words in error.found for words in refusals(name))
    assert "dense" not in str(error)
    assert error.expected == f"one of {', '.join(sorted(FAMILIES))}"
    assert "did you mean" not in error.fix


@pytest.mark.parametrize("name", SOME)
def test_a_family_of_transformers_that_is_not_known(name):
    assert is_unknown(name)


@pytest.mark.long
def test_the_families_are_those_of_transformers(unknown):
    assert set(SOME) <= set(unknown)
    assert len(unknown) > 50


@pytest.mark.parametrize("name", SOME)
def test_the_config_is_refused(name):
    check_config(name)


@pytest.mark.long
def test_all_configs_are_refused(unknown):
    for name in unknown:
        check_config(name)


def check_config(name):
    values = config_of(name).to_dict()
    if "text_config" not in values and "thinker_config" in values:
        values = values["thinker_config"]  # a model of two models
    check(raised(layers_from_config, values), name)


@pytest.mark.parametrize("name", SOME)
def test_model_and_checkpoint_are_refused(name, tmp_path):
    check_model_and_checkpoint(name, tmp_path)


@pytest.mark.long
def test_all_models_and_checkpoints_are_refused(unknown, tmp_path):
    for name in unknown:
        check_model_and_checkpoint(name, tmp_path / name)


def check_model_and_checkpoint(name, path):
    model = model_of(name)
    if model is None:
        assert name not in REPORTED
        model = torch.nn.Module()
        model.config = config_of(name)
        tensors = {key: torch.empty(shape, device="meta") for key, shape in DBRX.items()}
    else:
        tensors = revert_weight_conversion(model, model.state_dict())
        modules = [module for module in model.modules() if is_experts(module)]
        for module in modules:
            rows, ids = torch.empty(3, 8, device="meta"), torch.zeros(3, 2, dtype=torch.int64, device="meta")
            check(raised(tokenyard_experts, module, rows, ids, torch.ones(3, 2, device="meta")), name)
        if modules:
            with experts_left_out():
                check(raised(model_of, name), name)
    folder = save(path, config_of(name), tensors)

    def rank_main(group):
        return raised(shard_experts, model, group), raised(load_sharded, folder, group)

    for error in on_ranks(1, rank_main)[0]:
        check(error, name)
    inspected = call("inspect", folder, "--json")
    assert any(words in inspected.stdout for words in refusals(name))
    if inspected.exit_code:
        out = path / "out"
        for command in (("inspect", folder), ("convert", folder, "--weights", "mxfp8", "--out", out)):
            result = call(*command)
            assert result.exit_code == 2
            assert any(words in result.stderr for words in refusals(name))


# --- experts_implementation="tokenyard" ------------------------------------------------------------------


def named(name):
    """A model that is built with our experts by name, or the error."""
    config = config_of(name)
    config._experts_implementation = "tokenyard"
    kinds = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING)
    kind = next((mapping[type(config)] for mapping in kinds if type(config) in mapping), None)
    if kind is None or name in NOT_BUILT:
        return None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(config)
        except InputError as error:
            return error


# Models of several parts and others that Transformers builds from no config as it stands.
NOT_BUILT = ("dbrx", "deepseek_ocr2", "qwen3_5_moe", "qwen4_exp", "llama4")
# Families whose experts do not ask Transformers' registry what computes them.
IGNORING = ["doge", "jetmoe", "llama4_text", "longcat_flash", "nllb-moe", "step3p7", "switch_transformers"]


@pytest.mark.parametrize("name", [*SOME, *(name for name in FAMILIES if config_of(name) is not None)])
def test_a_name_that_is_accepted_is_used(name):
    check_name_is_used(name)


@pytest.mark.long
def test_all_names_that_are_accepted_are_used(unknown):
    for name in unknown:
        check_name_is_used(name)


def check_name_is_used(name):
    """Every experts module then calls `tokenyard_experts`, which computes, or refuses the family by its name."""
    model = named(name)
    if model is None:
        return
    if isinstance(model, InputError):
        assert name in IGNORING
        assert "experts_implementation='tokenyard', and would ignore it" in str(model)
        assert "the experts of model_type" in str(model)
        assert "cannot be replaced by name" in str(model)
        assert "leave `experts_implementation` out" in str(model)
        return
    asking = [module for module in model.modules() if is_experts(module)]
    assert asking
    assert not [
        type(module).__name__
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
        and not is_experts(module)
        and "Shared" not in type(module).__name__
    ]
    for module in asking:
        assert module.config._experts_implementation == "tokenyard"
    hidden = torch.empty(3, 8, device="meta"), torch.zeros(3, 2, dtype=torch.int64, device="meta")
    if name not in FAMILIES:
        check(raised(asking[0], *hidden, torch.ones(3, 2, device="meta")), name)


@pytest.mark.long
def test_families_that_ignore_the_name_are_still_those(unknown):
    assert {name for name in unknown if isinstance(named(name), InputError)} == set(IGNORING)


def small_llama4():
    text = {
        "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "vocab_size": 64,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    config = transformers.Llama4Config(text_config=text, vision_config=vision, pad_token_id=0)
    return transformers.Llama4ForConditionalGeneration(config)


@pytest.mark.parametrize("part", [None, "language_model"])
def test_llama4_is_refused_when_it_is_given_the_name_later(part):
    whole = small_llama4()
    model = (
        whole if part is None else whole.get_submodule(f"model.{part}" if hasattr(whole, "model") else part)
    )
    before = whole.config.text_config._experts_implementation
    error = raised(model.set_experts_implementation, "tokenyard")
    assert isinstance(error, InputError)
    assert "experts of model_type 'llama4_text' cannot be replaced by name" in str(error)
    assert whole.config.text_config._experts_implementation == before


def test_models_without_experts_take_any_name():
    """Such as the vision part of a model whose language model has experts."""
    model = transformers.LlamaModel(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    ))  # fmt: skip
    model.set_experts_implementation("tokenyard")


# --- What is refused for another reason ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
        ("gemma4_text", {}),
    ],
)
def test_dense_models_are_called_dense(name, settings, tmp_path):
    config = transformers.CONFIG_MAPPING[name](num_hidden_layers=2, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    folder = save(tmp_path, config, model.state_dict())

    def rank_main(group):
        return raised(shard_experts, model, group), raised(load_sharded, folder, group)

    refused = call("inspect", folder)
    assert refused.exit_code == 2
    for error in [*on_ranks(1, rank_main)[0], raised(layers_from_config, config.to_dict())]:
        assert isinstance(error, UnknownName)
        words = f"has model_type {name!r}, which is not known to tokenyard: a dense model, without experts"
        assert error.found.endswith(words)
        assert words in refused.stderr
        assert error.expected == f"one of {', '.join(sorted(FAMILIES))}"
        assert error.fix == "use a model with experts: a dense one needs no expert parallelism"


def test_an_activation_that_is_not_known_is_not_advised_to_be_another(tmp_path):
    config = tiny_config("qwen3_moe", hidden_act="relu6")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    module = model.model.layers[0].mlp.experts
    rows, ids = torch.zeros(3, config.hidden_size), torch.zeros(3, 2, dtype=torch.int64)

    def rank_main(group):
        return raised(shard_experts, model, group), raised(load_sharded, tmp_path, group)

    errors = [
        *on_ranks(1, rank_main)[0],
        raised(layers_from_config, config.to_dict()),
        raised(tokenyard_experts, module, rows, ids, torch.ones(3, 2)),
    ]
    for error in errors:
        assert isinstance(error, UnknownName)
        assert error.found.endswith("(qwen3_moe) has hidden_act='relu6', which is not known to tokenyard")
        assert error.expected == "one of silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu2"
        assert "would be another model" in error.fix
    assert "hidden_act='relu6', which is not known to tokenyard" in call("inspect", tmp_path).stdout
