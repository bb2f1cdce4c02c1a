"""Converting: what is written is read back by compressed-tensors, and by us, bit for bit."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoints import references
from tests.checkpoints.small import NAMES, Small, same_bits, save
from tests.checkpoints.test_quantized import gpt_oss_checkpoint
from tokenyard.checkpoints import TARGETS, convert, open_checkpoint, writer
from tokenyard.errors import CheckpointError, UnknownName
from tokenyard.experts import ExpertWeights
from tokenyard.formats import WEIGHT_FORMATS

MODEL = Small(num_experts=5, hidden_size=96, intermediate_size=128)
every_target = pytest.mark.parametrize("weights", list(TARGETS))


def tensors_of(folder) -> dict[str, torch.Tensor]:
    """Everything in a folder's files, as the safetensors library reads it."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def in_memory(model: Small, layer: int, weights: str) -> ExpertWeights:
    return ExpertWeights(w13=model.w13(layer), w2=model.w2(layer)).quantize(weights)


def assert_same_weights(found: ExpertWeights, expected: ExpertWeights) -> None:
    assert list(found.by_name()) == list(expected.by_name())
    for name, tensor in expected.by_name().items():
        assert same_bits(found.by_name()[name], tensor), name


def test_every_quantized_weight_format_is_a_target():
    assert set(TARGETS) == {name for name, kind in WEIGHT_FORMATS.items() if kind.quantized}


@every_target
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_we_read_back_what_quantizing_in_memory_makes(tmp_path, weights, dtype):
    model = Small(num_experts=5, hidden_size=96, intermediate_size=128, dtype=dtype)
    source = open_checkpoint(save(tmp_path / "plain", model.tensors(), model.config(), files=2))
    written = convert(source, weights, tmp_path / "out")
    back = open_checkpoint(tmp_path / "out")
    for layer in range(2):
        assert_same_weights(back.experts(layer), in_memory(model, layer, weights))
    assert {layer.weights for layer in back.layers} == {weights}
    assert written.bytes_after == back.nbytes
    assert written.bytes_before == source.nbytes
    decoded = in_memory(model, 0, weights).decode()
    plain = torch.cat([model.w13(0).flatten(), model.w2(0).flatten()]).float()
    error = (torch.cat([decoded.w13.flatten(), decoded.w2.flatten()]) - plain).norm() / plain.norm()
    assert written.layers[0].relative_error == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize("weights", sorted({*references.FORMATS} - {"fp8_block128"}))  # which is DeepSeek's
def test_compressed_tensors_reads_what_we_write(tmp_path, weights):
    from compressed_tensors.quantization import QuantizationConfig

    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    convert(source, weights, tmp_path / "out")
    held, back = tensors_of(tmp_path / "out"), open_checkpoint(tmp_path / "out")
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(quantization)
    (scheme,) = config.config_groups.values()
    assert config.format == scheme.format == references.FORMATS[weights]
    compressor = references.compressor(weights)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    for layer in range(2):
        ours = back.experts(layer).decode()
        for expert in range(5):
            gate, up = ours.w13[expert].chunk(2)
            for name, expected in zip(NAMES["gate_proj"], (gate, up, ours.w2[expert]), strict=True):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}."
                state = {key.removeprefix(prefix): t for key, t in held.items() if key.startswith(prefix)}
                assert set(state) == set(compressor.compression_param_names(scheme))
                theirs = compressor.decompress(state, scheme)["weight"]
                assert same_bits(theirs.detach(), expected.to(theirs.dtype))


@pytest.mark.parametrize("weights", ["mxint4", "mxfp4"])
def test_transformers_runs_what_we_write(tmp_path, weights):
    """Loaded by from_pretrained as any checkpoint, the model gives the logits of our own decoded weights, bit for bit.

    (Of nvfp4 experts Transformers 5.22 drops the global scales, and mxfp8 ones it cannot expand.)
    """
    import transformers

    sizes = {
        "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "plain")
    convert(open_checkpoint(tmp_path / "plain"), weights, tmp_path / "out")
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading.values())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        for layer in range(2):
            decoded = open_checkpoint(tmp_path / "out").experts(layer).decode(torch.bfloat16)
            experts = model.model.layers[layer].mlp.experts
            experts.gate_up_proj.copy_(decoded.w13)
            experts.down_proj.copy_(decoded.w2)
        ours = model(ids).logits
        assert same_bits(theirs.eval()(ids).logits, ours)
    assert not torch.equal(ours, before)


def test_the_ignore_list_leaves_only_experts_to_be_quantized(tmp_path):
    from compressed_tensors.utils.match import is_match

    beside = {"model.norm.weight": torch.ones(8), "model.table": torch.ones(8, 8)}  # no linear maps
    source = save(tmp_path / "plain", MODEL.tensors() | beside, MODEL.config())
    convert(open_checkpoint(source), "mxint4", tmp_path / "out")
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    linear = torch.nn.Linear(1, 1)
    modules = {name.removesuffix(".weight") for name in MODEL.tensors() if name.endswith(".weight")}
    quantized = {
        name for name in modules | {"lm_head"} if is_match(name, linear, ["Linear"], quantization["ignore"])
    }
    assert quantized == {name for name in modules if ".experts." in name}
    matrices = {name for name, tensor in MODEL.tensors().items() if tensor.dim() == 2}
    others = {name.removesuffix(".weight") for name in matrices if ".experts." not in name}
    assert set(quantization["ignore"]) == others | {"lm_head"}


def test_deepseek_layout(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    convert(source, "fp8_block128", tmp_path / "out")
    held, ours = tensors_of(tmp_path / "out"), open_checkpoint(tmp_path / "out").experts(1).decode()
    written = {
        suffix: held[f"model.layers.1.mlp.experts.3.up_proj.{suffix}"]
        for suffix in ("weight", "weight_scale_inv")
    }
    assert same_bits(references.deepseek_read(written), ours.w13[3, 128:].contiguous())
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]


@every_target
def test_everything_else_is_copied(tmp_path, weights):
    tensors = MODEL.tensors() | {"odd": torch.arange(3, dtype=torch.uint8), "flag": torch.tensor(True)}
    plain = save(tmp_path / "plain", tensors, MODEL.config())
    texts = {
        "tokenizer.json": '{"a": 1}', "tokenizer_config.json": '{"b": 2}', "generation_config.json": '{"c": 3}',
        "chat_template.jinja": "{{ d }}", "additional_chat_templates/tools.jinja": "{{ e }}", "merges.txt": "f g",
        "spiece.model": "h", "vocab.bpe": "i", "configuration_mine.py": "j = 1", "LICENSE": "k", "sounds.pb": "l",
    }  # fmt: skip
    (plain / "additional_chat_templates").mkdir()
    for name, text in texts.items():
        (plain / name).write_text(text)
    for name in (
        "weights.bin",
        "pytorch_model.bin.index.json",
        "old.index.json",
        "tf_model.h5",
        ".gitattributes",
    ):
        (plain / name).write_bytes(b"\x80\x04.")
    convert(open_checkpoint(plain), weights, tmp_path / "out")
    held = tensors_of(tmp_path / "out")
    for name, tensor in tensors.items():
        if ".experts." not in name:
            assert same_bits(held[name], tensor), name
    out = tmp_path / "out"
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {"config.json", "model.safetensors", *texts}
    assert {name: (out / name).read_text() for name in texts} == texts
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: value for key, value in config.items() if key != "quantization_config"} == MODEL.config()


def test_several_files_with_an_index(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    written = convert(source, "mxfp4", tmp_path / "out", largest_file=40_000)
    assert len(written.files) > 3
    assert all((tmp_path / "out" / name).stat().st_size < 60_000 for name in written.files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as held:
            assert name in held.keys()  # noqa: SIM118
    assert index["metadata"]["total_size"] == written.bytes_after
    assert_same_weights(open_checkpoint(tmp_path / "out").experts(1), in_memory(MODEL, 1, "mxfp4"))


def test_two_files_have_an_index_and_one_has_none_and_all_are_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or fsync(fd)
    )
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    one = convert(source, "mxfp4", tmp_path / "one")
    two = convert(source, "mxfp4", tmp_path / "two", largest_file=one.bytes_after * 2 // 3)
    assert [len(written.files) for written in (one, two)] == [1, 2]
    index = "model.safetensors.index.json"
    assert [(tmp_path / name / index).exists() for name in ("one", "two")] == [False, True]
    assert sorted(synced) == sorted([*one.files, *two.files])


def test_files_of_a_conversion_that_fails_are_closed(tmp_path, monkeypatch):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))

    def fail(checkpoint, layouts, writer, progress):
        entry = next(iter(writer._places.values())).entry
        writer.write_bytes(entry.name, torch.zeros(entry.nbytes, dtype=torch.uint8))
        opened.extend(writer._descriptors.values())
        raise OSError("no more space")

    opened = []
    monkeypatch.setattr("tokenyard.checkpoints.conversion._write", fail)
    with pytest.raises(CheckpointError, match="no more space"):
        convert(source, "mxfp4", tmp_path / "out")
    assert len(opened) == 1
    assert not Path(f"/proc/self/fd/{opened[0]}").exists()


def test_numbers_lie_on_multiples_of_their_size(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    convert(source, "mxint4", tmp_path / "out")
    sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2}
    for tensor in open_checkpoint(tmp_path / "out").tensors.values():
        assert tensor.begin % sizes[tensor.dtype] == 0


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_change_nothing(tmp_path, three_threads):
    model = Small(num_experts=5, hidden_size=96, intermediate_size=64, model_type="gpt_oss")
    for name, tensors, config, weights in (
        ("one by one", MODEL.tensors(), MODEL.config(), "mxint4"),
        ("in one tensor", fused(model), model.config(), "mxfp4"),
    ):
        source = open_checkpoint(save(tmp_path / name, tensors, config))
        convert(source, weights, tmp_path / name / "out")
        back = open_checkpoint(tmp_path / name / "out")
        assert_same_weights(back.experts(1), source.experts(1).quantize(weights))


def test_progress_ends_at_its_total(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    said: list[tuple[str, int, int]] = []
    convert(source, "mxfp8", tmp_path / "out", progress=lambda *news: said.append(news))
    assert [what for what, _, _ in said][:2] == ["shared weights"] * 2
    assert {what for what, _, _ in said} >= {"model.layers.0.mlp", "model.layers.1.mlp"}
    done = [bytes_done for _, bytes_done, _ in said]
    assert done == sorted(done)
    assert said[-1][1] == said[-1][2] == source.nbytes


@pytest.mark.parametrize("gated", [True, False])
def test_names_stay_as_they_were(tmp_path, gated):
    names = NAMES["w1"] if gated else NAMES["gate_proj"]
    model = Small(num_experts=5, names=names, parent="model.layers.{}.block_sparse_moe")
    tensors = {name: t for name, t in model.tensors().items() if gated or "gate_proj" not in name}
    source = open_checkpoint(save(tmp_path / "plain", tensors, model.config()))
    convert(source, "mxint4", tmp_path / "out")
    back = open_checkpoint(tmp_path / "out")
    assert [layer.projections for layer in back.layers] == [layer.projections for layer in source.layers]
    assert_same_weights(back.experts(0), source.experts(0).quantize("mxint4"))
    assert {layer.gated for layer in back.layers} == {gated}


def fused(model: Small) -> dict[str, torch.Tensor]:
    tensors = model.shared()
    for layer in range(model.num_layers):
        prefix, flip = f"model.layers.{layer}.mlp.experts", model.model_type == "gpt_oss"
        w13, w2 = model.w13(layer), model.w2(layer)
        tensors[f"{prefix}.gate_up_proj"] = (w13.mT if flip else w13).contiguous()
        tensors[f"{prefix}.down_proj"] = (w2.mT if flip else w2).contiguous()
        if flip:
            tensors[f"{prefix}.gate_up_proj_bias"] = w13[..., 0].contiguous()
            tensors[f"{prefix}.down_proj_bias"] = w2[..., 0].contiguous()
    return tensors


def test_experts_in_one_tensor_are_written_one_by_one(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", fused(MODEL), MODEL.config()))
    convert(source, "nvfp4", tmp_path / "out")
    back = open_checkpoint(tmp_path / "out")
    assert back.layers[0].projections.w13 == ("gate_proj", "up_proj")
    assert_same_weights(back.experts(1), in_memory(MODEL, 1, "nvfp4"))


def test_gpt_oss_is_written_as_gpt_oss(tmp_path):
    """Its gate and up rows take turns; no other layout says so."""
    model = Small(num_experts=5, hidden_size=96, intermediate_size=64, model_type="gpt_oss")
    source = open_checkpoint(save(tmp_path / "plain", fused(model), model.config()))
    convert(source, "mxfp4", tmp_path / "out")
    back = open_checkpoint(tmp_path / "out")
    assert (str(back.layers[0].layout), back.layers[0].interleaved) == ("gpt-oss mxfp4", True)
    found = back.experts(1)
    assert_same_weights(found, source.experts(1).quantize("mxfp4"))
    assert same_bits(found.b13, model.w13(1)[..., 0].contiguous())
    with pytest.raises(CheckpointError, match=r"gate and up rows take turns.*one of these works: mxfp4"):
        convert(source, "mxint4", tmp_path / "other")


@pytest.mark.parametrize("width", [64, 96, 129, 200])
def test_gate_and_up_that_share_blocks_share_a_scale(tmp_path, width):
    """In the layout of DeepSeek a gate has blocks of its own, in our matrix it ends amid one: both are exact."""
    model = Small(num_experts=3, hidden_size=200, intermediate_size=width)
    source = open_checkpoint(save(tmp_path / "plain", model.tensors(), model.config()))
    written = convert(source, "fp8_block128", tmp_path / "out")
    assert written.layers[0].relative_error < 0.03
    held, found = tensors_of(tmp_path / "out"), open_checkpoint(tmp_path / "out").experts(1)
    for expert in range(3):
        ours = (*found.w13[expert].decode().chunk(2), found.w2[expert].decode())
        for name, expected in zip(NAMES["gate_proj"], ours, strict=True):
            prefix = f"model.layers.1.mlp.experts.{expert}.{name}"
            theirs = {end: held[f"{prefix}.{end}"] for end in ("weight", "weight_scale_inv")}
            outputs, inputs = theirs["weight"].shape
            assert theirs["weight_scale_inv"].shape == (-(-outputs // 128), -(-inputs // 128))
            assert same_bits(references.deepseek_read(theirs), expected.contiguous())
    # Blocks before those that are shared are as ever.
    alone = in_memory(model, 1, "fp8_block128")
    whole = width // 128 * 128
    assert same_bits(found.w13.payloads["data"][:, :whole], alone.w13.payloads["data"][:, :whole])
    assert_same_weights(ExpertWeights(w13=found.w2, w2=found.w2), ExpertWeights(w13=alone.w2, w2=alone.w2))


# -- What cannot be converted --------------------------------------------------------------------------------


def test_an_empty_folder_may_be_there(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    (tmp_path / "out").mkdir()
    convert(source, "mxint4", tmp_path / "out")
    assert_same_weights(open_checkpoint(tmp_path / "out").experts(1), in_memory(MODEL, 1, "mxint4"))


def test_folders_above_the_new_one_are_made(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    convert(source, "mxint4", tmp_path / "not" / "yet" / "out")
    assert left_behind(tmp_path / "not" / "yet") == ["out"]
    assert stat.S_IMODE((tmp_path / "not" / "yet" / "out").stat().st_mode) == 0o755  # others may read it
    assert_same_weights(
        open_checkpoint(tmp_path / "not" / "yet" / "out").experts(1), in_memory(MODEL, 1, "mxint4")
    )


def left_behind(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_cannot_be_converted(tmp_path):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    with pytest.raises(UnknownName, match=r"'mxint5'.*did you mean 'mxint4'"):
        convert(source, "mxint5", tmp_path / "out")
    with pytest.raises(UnknownName, match="'bf16'"):
        convert(source, "bf16", tmp_path / "out")
    with pytest.raises(CheckpointError, match="plain is there already"):
        convert(source, "mxint4", tmp_path / "plain")
    quantized = gpt_oss_checkpoint(tmp_path / "gpt_oss", Small(model_type="gpt_oss"))
    with pytest.raises(CheckpointError, match="the experts are gpt-oss mxfp4 already"):
        convert(quantized, "mxint4", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(source, "mxint4", tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(source, "mxint4", "/proc/nobody/out")  # where no folder can be made
    assert left_behind(tmp_path) == ["file", "gpt_oss", "plain"]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a\ud800b"], ids=["too long", "a zero", "no text"])
def test_a_name_that_no_system_takes(tmp_path, name):
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(source, "mxint4", tmp_path / name)
    assert left_behind(tmp_path) == ["plain"]


@pytest.mark.parametrize("beside", [False, True], ids=["in the config", "beside the config"])
def test_plain_experts_beside_quantized_attention_are_refused(tmp_path, beside):
    """The new config would say nothing of the attention's codes, which engines would then take for numbers."""
    attention = "model.layers.0.self_attn.q_proj"
    tensors = MODEL.tensors() | {
        f"{attention}.weight": torch.ones(64, 64).to(torch.float8_e4m3fn),
        f"{attention}.weight_scale_inv": torch.ones(1, 1),
    }
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    folder = save(
        tmp_path / "mixed",
        tensors,
        MODEL.config() | ({} if beside else {"quantization_config": quantization}),
    )
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(
        CheckpointError,
        match=r"quantization_config with quant_method 'fp8', of other weights than those of experts",
    ):
        convert(open_checkpoint(folder), "mxfp4", tmp_path / "out")
    assert left_behind(tmp_path) == ["mixed"]


@pytest.mark.parametrize(
    ("weights", "sizes", "fit"),
    [
        ("mxint4", (80, 128), "nvfp4, fp8_block128"),
        ("nvfp4", (40, 128), "fp8_block128"),
        ("mxfp8", (48, 128), "nvfp4, fp8_block128"),
    ],
)
def test_sizes_that_a_layout_cannot_say(tmp_path, weights, sizes, fit):
    model = Small(num_experts=2, hidden_size=sizes[0], intermediate_size=sizes[1])
    source = open_checkpoint(save(tmp_path / "plain", model.tensors(), model.config()))
    with pytest.raises(CheckpointError, match=f"one of these works: {fit}"):
        convert(source, weights, tmp_path / "out")
    for name in fit.split(", "):
        convert(source, name, tmp_path / name)
        assert_same_weights(open_checkpoint(tmp_path / name).experts(1), in_memory(model, 1, name))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_written(tmp_path, wrong):
    tensors = MODEL.tensors()
    tensors["model.layers.1.mlp.experts.4.down_proj.weight"][0, 0] = wrong
    source = open_checkpoint(save(tmp_path / "plain", tensors, MODEL.config()))
    with pytest.raises(
        CheckpointError, match=r"w2 of expert 4 \(.*experts\.4\.down_proj\.weight\) holds NaN"
    ):
        convert(source, "mxint4", tmp_path / "out")
    assert left_behind(tmp_path) == ["plain"]  # nothing that is half done


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    source = open_checkpoint(save(tmp_path / "plain", MODEL.tensors(), MODEL.config()))
    due = convert(source, "mxint4", tmp_path / "first").bytes_after
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, due - 1))
    with pytest.raises(CheckpointError, match=f"has {due - 1} bytes left; expected {due} bytes"):
        convert(source, "mxint4", tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, due))
    convert(source, "mxint4", tmp_path / "out")


def entry(name, nbytes, dtype="U8"):
    return writer.Entry(name=name, dtype=dtype, shape=(nbytes // (writer.DTYPES[dtype][0] // 8),))


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([4, 6], [["0", "1"]]),  # full to the last byte
        ([4, 7], [["0"], ["1"]]),
        ([4, 11, 4, 6], [["0"], ["1"], ["2", "3"]]),  # one that is too large is alone
        ([11], [["0"]]),
        ([], [[]]),
    ],
)
def test_files_are_filled_up_to_the_largest_size(sizes, files):
    divided = writer._divide([entry(str(number), size) for number, size in enumerate(sizes)], 10)
    assert [[one.name for one in share] for share in divided] == files


def test_wide_numbers_stand_first_in_a_file():
    (share,) = writer._divide([entry("bytes", 3), entry("words", 8, "F32"), entry("halves", 6, "BF16")], 100)
    assert [one.name for one in share] == ["words", "halves", "bytes"]


def test_nothing_is_written_into_files_that_were_abandoned(tmp_path):
    entries = [writer.Entry(name=name, dtype="F32", shape=(2,)) for name in "ab"]
    making = writer.CheckpointWriter(tmp_path, entries)
    strided = torch.ones(2, 2)[:, 0].requires_grad_()  # wherever it stands, whatever is computed of it
    making.write("a", strided)
    making.abandon()
    making.write("b", torch.ones(2))
    assert load_file(tmp_path / "model.safetensors")["b"].tolist() == [0.0, 0.0]
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [1.0, 1.0]
    making.abandon()  # a second time


def test_what_is_written_in_several_calls_stands_one_behind_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_AT_ONCE", 3)
    making = writer.CheckpointWriter(tmp_path, [writer.Entry(name="a", dtype="F32", shape=(5,))])
    making.write("a", torch.arange(5.0))
    making.close()
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_files_are_closed_when_all_is_written(tmp_path):
    making = writer.CheckpointWriter(tmp_path, [writer.Entry(name="a", dtype="F32", shape=(2,))])
    making.write("a", torch.ones(2))
    file = tmp_path / "model.safetensors"
    assert file in open_files()
    making.close()
    assert file not in open_files()
    making.write("a", torch.zeros(2))  # too late
    assert load_file(file)["a"].tolist() == [1.0, 1.0]


def open_files() -> set[Path]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {Path(os.readlink(link)) for link in links if os.path.lexists(link)}


def test_tensors_are_written_wherever_they_stand_and_whatever_is_computed_of_them(tmp_path):
    """A parameter of a model, a view whose rows lie apart, and a number."""
    tensors = {
        "parameter": torch.arange(6.0).view(2, 3).requires_grad_(),
        "columns": torch.arange(12, dtype=torch.int32).view(3, 4)[:, 1:3],
        "number": torch.tensor(7, dtype=torch.int16),
    }
    writer.write_tensors(tmp_path / "some.safetensors", tensors)
    found = load_file(tmp_path / "some.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
