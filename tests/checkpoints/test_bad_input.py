"""Bad files: each a clear error that names file and tensor, before anything large is allocated."""

from __future__ import annotations

import contextlib
import json
import mmap
import pickle
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoints import references
from tests.checkpoints.small import Small, save
from tests.models import raised
from tokenyard.checkpoints import config as configs
from tokenyard.checkpoints import families, files, header, open_checkpoint
from tokenyard.errors import CheckpointError, InputError, UnknownName

MODEL = Small(num_experts=4)
EXPERT = "model.layers.1.mlp.experts.2"


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(tmp_path, MODEL.tensors(), MODEL.config())


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of expert 2 of layer 1, by the end of their name; None removes one."""
    path = folder / "model.safetensors"
    held = load_file(path)
    for end, tensor in tensors.items():
        name = f"{EXPERT}.{end.replace('__', '.')}"
        if tensor is None:
            del held[name]
        else:
            assert name in held, name
            held[name] = tensor
    save_file(held, path)


def reconfigure(folder: Path, **values) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refused(folder: Path, *words: str, experts: bool = False) -> CheckpointError:
    def use() -> None:
        checkpoint = open_checkpoint(folder)
        if experts:
            checkpoint.experts(1)

    with pytest.raises(CheckpointError) as caught:
        use()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "; expected " in message
    assert "; fix: " in message
    assert isinstance(caught.value, InputError)
    return caught.value


# -- Files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 5000, -1])
def test_truncated_file(folder, kept):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    error = refused(folder, str(path), "download or copy the file again")
    assert error.file == path
    if kept in (5000, -1):
        assert error.tensor in load_file_names(content)


def load_file_names(content: bytes) -> set[str]:
    return set(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def test_bytes_behind_the_last_tensor(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"xyz")
    refused(folder, "3 bytes after its last tensor")


HEADERS = {
    "not JSON": b"{,}",
    "a JSON list": b"[]",
    "has dtype 'F99'": {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
    "has shape [-1]": {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    "has shape [1.0]": {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
    "has shape [true]".replace("true", "True"): {
        "a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}
    },
    "lies at [4, 0]": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    "lies at None": {"a": {"dtype": "F32", "shape": [1]}},
    "is F32[2] and has 4 bytes; expected 8 bytes": {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}
    },
    "which ends at": {"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}},
    "overlaps": {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
    },
    "leaves 1 bytes out": {"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}},
    "is there twice": b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
    "dtype None": {"a": 3},
    r"whose name is no text: 'a\ud800'": {"a\ud800": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}},
    "has a header that is not JSON": b"[" * 100_000,
}


@pytest.mark.parametrize("words", HEADERS)
def test_damaged_headers(folder, words):
    header = HEADERS[words]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")
    refused(folder, str(path), words)


def test_names_may_be_of_any_script(tmp_path):
    names = ["größe", "大小", "\U0001f9ee"]
    path = tmp_path / "a.safetensors"
    save_file({name: torch.zeros(1) for name in names}, path)
    assert sorted(tensor.name for tensor in header.read_header(path)[0]) == sorted(names)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**9])
def test_a_huge_header_is_not_allocated(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    refused(folder, str(path), f"a header of {length} bytes")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize("length", [3, 1000, 10**9])
def test_a_header_that_is_longer_than_the_file_says_how_long_both_are(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    refused(folder, f"has 10 bytes, and a header of {length} bytes is announced")


def test_a_header_beyond_what_is_read_at_all(folder):
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # a hole: no bytes on the disk
    refused(folder, "announces a header of 200000000 bytes, more than 100000000")


def test_missing_shard(tmp_path):
    for index in (True, False):
        folder = save(tmp_path / str(index), MODEL.tensors(), MODEL.config(), files=3, index=index)
        missing = folder / "model-00002-of-00003.safetensors"
        missing.unlink()
        first = list(MODEL.tensors())[1]  # tensors are dealt to the files in turn
        beside = "model-00001-of-00003.safetensors is there"
        why = (
            f"model.safetensors.index.json says that it holds tensor {first!r} and others"
            if index
            else beside
        )
        error = refused(folder, f"{missing} is missing; {why}")
        assert error.file == missing


def test_a_shard_of_another_version(tmp_path):
    folder = save(tmp_path, MODEL.tensors(), MODEL.config(), files=3)
    path = folder / "model-00003-of-00003.safetensors"
    held = load_file(path)
    name = sorted(held)[0]
    del held[name]
    save_file(held, path)
    assert refused(folder, str(path), f"does not hold tensor {name!r}").tensor == name


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names the file '../model.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd.safetensors"}}', "names the file '/etc/passwd.safetensors'"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "pytorch_model.bin is a pickle"),
    ],
)
def test_broken_index(folder, index, words):
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, words)


def test_a_tensor_in_two_files(folder):
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, folder / "more.safetensors")
    refused(folder, "'model.embed_tokens.weight' is in model.safetensors and in more.safetensors")


class Evil:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["pickle", "archive"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickles_are_refused_by_name_and_by_content(tmp_path, kind, name):
    trap, path = tmp_path / "touched", tmp_path / name
    (tmp_path / "config.json").write_text("{}")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Evil(trap)))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Evil(trap)))
    for place in (tmp_path, path):
        error = refused(place, name, "pickle", "expected a safetensors file")
        assert error.file == path
    assert not trap.exists()


def test_a_header_whose_length_begins_as_a_pickle_does(tmp_path):
    """0x0480 bytes of JSON: the file begins with the two bytes of pickle's fourth protocol."""
    tensors, config = MODEL.tensors(), MODEL.config()
    folder = save(tmp_path, tensors, config)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    longer = length + (0x0480 - length) % 0x10000
    path.write_bytes(
        longer.to_bytes(8, "little") + content[8 : 8 + length].ljust(longer) + content[8 + length :]
    )
    assert path.read_bytes().startswith(b"\x80\x04")
    assert len(open_checkpoint(folder).layers) == 2
    assert len(open_checkpoint(path).layers) == 2


def test_nothing_there(tmp_path):
    refused(tmp_path / "none", "is not there")
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "holds no safetensors file")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path / "notes.txt", "is not a safetensors file")
    save_file({"model.embed_tokens.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    refused(tmp_path, "none of the 1 tensors of")


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors"])
def test_a_file_that_cannot_be_read(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")  # a file whose first bytes nobody may read
    refused(path, f"{path} cannot be read (Input/output error)")
    if name == "model.safetensors":
        refused(folder, f"{path} cannot be read (Input/output error)")


def test_a_json_file_that_cannot_be_read_is_told_in_the_words_of_the_system(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        configs.read_json(tmp_path / "config.json")
    assert f"{tmp_path}/config.json cannot be read (No such file or directory); expected" in str(caught.value)


def test_a_file_that_is_gone_since_it_was_opened(folder):
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be mapped \(No such file or directory\)"):
        checkpoint.experts(1)


def test_a_tensor_that_is_not_there_or_cannot_be_held(folder):
    write_raw(
        folder / "more.safetensors", {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"\0\0"
    )
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        CheckpointError, match=r"'model.embed.weight'.*did you mean 'model.embed_tokens.weight'"
    ):
        checkpoint.tensor("model.embed.weight")
    with pytest.raises(CheckpointError, match="a dtype that torch can hold"):
        checkpoint.tensor("a")
    assert checkpoint.bytes_read == 0


@pytest.mark.parametrize(
    ("tensor", "dense"), [("model.experts_of_mine", False), ("model.embed_tokens", True)]
)
def test_a_family_that_is_not_known(tmp_path, tensor, dense):
    folder = save(tmp_path, {tensor: torch.zeros(3)}, {"model_type": "mine"})
    with pytest.raises(UnknownName, match="model_type 'mine', which is not known") as caught:
        open_checkpoint(folder)
    assert ("a dense model" in str(caught.value)) is dense
    assert ("none of the 1 tensors of" in str(caught.value)) is not dense


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_to_a_header_is_an_error_or_harmless(tmp_path_factory, data):
    """Whatever bytes of a header are changed, cut or added: never another exception, never more than is there."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    if not folder.exists():
        save(
            folder,
            {"a.experts.gate_up_proj": torch.ones(2, 4, 2), "a.experts.down_proj": torch.ones(2, 2, 2)},
            {},
        )
        shutil.copyfile(folder / "model.safetensors", folder / "whole")
    content = bytearray((folder / "whole").read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(8 + length, len(content) - 1)))
        kind = data.draw(st.sampled_from(["change", "cut", "add"]))
        byte = data.draw(st.sampled_from(b'0123456789{}[]",:-.eE\x00\xff BFIU') | st.integers(0, 255))
        if kind == "change":
            content[place] = byte
        elif kind == "cut":
            del content[place : place + data.draw(st.integers(1, 9))]
        else:
            content.insert(place, byte)
    (folder / "model.safetensors").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.nbytes <= len(content)
        for layer in checkpoint.layers:
            checkpoint.experts(layer.name)


def test_a_file_that_changes_after_it_was_opened(folder):
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"model\.safetensors had \d+ bytes when opened, now \d+"):
        checkpoint.experts(0)


# -- Tensors -------------------------------------------------------------------------------------------------


def test_wrong_shape(folder):
    change(folder, up_proj__weight=torch.zeros(33, 64, dtype=torch.bfloat16))
    error = refused(
        folder,
        "model.safetensors",
        f"tensor '{EXPERT}.up_proj.weight' is BF16[33, 64]",
        "expected BF16[32, 64]",
    )
    assert (error.tensor, error.layer) == (f"{EXPERT}.up_proj.weight", "model.layers.1.mlp")


def test_wrong_dtype(folder):
    change(folder, down_proj__weight=torch.zeros(64, 32))
    refused(folder, f"tensor '{EXPERT}.down_proj.weight' is F32[64, 32]", "expected BF16[64, 32]")


def test_missing_tensor(folder):
    change(folder, gate_proj__weight=None)
    refused(folder, f"tensor '{EXPERT}.gate_proj.weight' is missing")


def test_missing_expert(folder):
    change(folder, gate_proj__weight=None, up_proj__weight=None, down_proj__weight=None)
    refused(folder, "expert 2 is missing", EXPERT, "4 experts, as")


def test_a_projection_missing_everywhere(folder):
    path = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if ".down_proj" not in name}, path)
    refused(folder, "have gate_proj, up_proj; down_proj is missing")


def test_a_tensor_nobody_would_read(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {f"{EXPERT}.up_proj.weight_g_idx": torch.zeros(3)}, path)
    refused(folder, f"tensor '{EXPERT}.up_proj.weight_g_idx' is F32[3]", "no layer reads this tensor")
    save_file(load_file(path) | {"model.layers.1.mlp.experts.mystery": torch.zeros(3)}, path)
    refused(folder, "tensor 'model.layers.1.mlp.experts.mystery' belongs to experts")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"down_proj": torch.zeros(4, 64, 31)},
            "down_proj' is F32[4, 64, 31]; expected a shape that fits that of",
        ),
        ({"down_proj": torch.zeros(3, 64, 32)}, "down_proj' is F32[3, 64, 32]; expected"),
        ({"gate_up_proj": torch.zeros(64, 64)}, "gate_up_proj' is F32[64, 64]; expected"),
        ({"gate_up_proj": torch.zeros(0, 64, 64), "down_proj": torch.zeros(0, 64, 32)}, "is F32[0, 64, 64]"),
        ({"gate_up_proj": None}, "gate_up_proj is missing"),
        ({"gate_up_proj_bias": torch.zeros(4, 64)}, "down_proj_bias' is missing"),
        ({"0.down_proj.weight": torch.zeros(64, 32)}, "experts.0.down_proj.weight' is F32[64, 32]; expected"),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_all_experts_in_one_tensor_of_the_wrong_kind(tmp_path, changes, words, told):
    tensors = {"gate_up_proj": torch.zeros(4, 64, 64), "down_proj": torch.zeros(4, 64, 32), **changes}
    named = {f"model.layers.0.mlp.experts.{name}": t for name, t in tensors.items() if t is not None}
    refused(save(tmp_path, named, MODEL.config() if told else {}), "model.safetensors", words)


@pytest.mark.parametrize("down", [(4, 48), (4, 48, 32, 1)], ids=str)
def test_sizes_are_those_of_the_first_matrices_where_the_second_are_no_matrices(tmp_path, down):
    """As most models have them, `[N, D]`: whether they are transposed cannot be told then."""
    tensors = {"gate_up_proj": torch.zeros(4, 64, 48), "down_proj": torch.zeros(down)}
    named = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()}
    folder = save(tmp_path, named, {"model_type": "qwen3_moe"})
    refused(folder, f"down_proj' is F32{list(down)}; expected F32[4, 48, 32]: hidden size 48")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 96}, "hidden size 96"),
        ({"moe_intermediate_size": 48}, "intermediate size 48"),
        ({"num_experts": 3}, "is of expert 3; expected experts 0 to 2, as"),
        ({"num_experts": 5}, "expert 4 is missing"),
        ({"num_experts": "4"}, "num_experts='4'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"quantization_config": 3}, "quantization_config=3"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quant_method 'mxfp4', but no tensor has scales",
        ),
    ],
)
def test_config_that_disagrees(folder, config, words):
    reconfigure(folder, **config)
    refused(folder, "config.json", words)


def test_config_that_says_nothing_of_sizes(folder):
    reconfigure(folder, hidden_size=None, moe_intermediate_size=None, num_experts=None)
    layer = open_checkpoint(folder).layers[0]
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (4, 64, 32)


@pytest.mark.parametrize("wrong", [4, -1, 1.5, "2", None])
def test_expert_out_of_range(folder, wrong):
    with pytest.raises(CheckpointError, match=r"layer 'model.layers.0.mlp': expert .* ids from 0 to 3"):
        open_checkpoint(folder).experts(0, [0, wrong])


# -- Scales --------------------------------------------------------------------------------------------------

QUANTIZATION = {name: references.compressed_config(name) for name in references.FORMATS}
QUANTIZATION["modelopt"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
QUANTIZATION["deepseek"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(params=list(QUANTIZATION))
def quantized(request, tmp_path) -> tuple[str, Path]:
    kind, model = request.param, Small(num_experts=4, hidden_size=128, intermediate_size=128)
    own = {"modelopt": references.modelopt, "deepseek": references.deepseek}
    write = own.get(kind) or (lambda w: references.compress(kind, w))
    config = model.config() | {"quantization_config": QUANTIZATION[kind]}
    return kind, save(tmp_path, model.tensors(write), config)


def scale_name(kind: str) -> str:
    return "up_proj__weight_scale_inv" if kind == "deepseek" else "up_proj__weight_scale"


def scales_of(folder: Path, end: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[f"{EXPERT}.{end.replace('__', '.')}"]


def test_sizes_are_read_off_quantized_weights_where_the_config_says_nothing(quantized):
    _, folder = quantized
    reconfigure(folder, hidden_size=None, moe_intermediate_size=None, num_experts=None)
    for layer in open_checkpoint(folder).layers:
        assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (4, 128, 128)
        assert (layer.gated, layer.intermediate_size) == (True, 128)


def test_scales_that_do_not_match(quantized):
    kind, folder = quantized
    end = scale_name(kind)
    scales = scales_of(folder, end)
    change(folder, **{end: torch.cat((scales, scales), dim=1)})
    error = refused(folder, "model.safetensors", f"{EXPERT}.up_proj.weight_scale", f"{list(scales.shape)}")
    assert error.layer == "model.layers.1.mlp"
    change(folder, **{end: None})
    refused(folder, f"tensor '{EXPERT}.{end.replace('__', '.')}' is missing")


def test_nan_scales(quantized):
    kind, folder = quantized
    end = scale_name(kind)
    scales = scales_of(folder, end)
    if scales.dtype == torch.uint8:
        scales[0, 0] = 255
    elif scales.dtype == torch.float8_e4m3fn:
        scales.view(torch.uint8)[0, 0] = 0x7F
    else:
        scales[0, 0] = torch.nan
    change(folder, **{end: scales})
    open_checkpoint(folder).experts(1, [0, 1, 3])  # others do not touch it
    words = ("model.safetensors", f"{EXPERT}.up_proj.weight_scale", "of expert 2", "NaN", "at [0, 0]")
    error = refused(folder, *words, experts=True)
    assert (error.layer, error.tensor) == ("model.layers.1.mlp", f"{EXPERT}.{end.replace('__', '.')}")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_global_scales_that_are_no_divisors(tmp_path, value):
    config = MODEL.config() | {"quantization_config": QUANTIZATION["nvfp4"]}
    folder = save(tmp_path, MODEL.tensors(lambda w: references.compress("nvfp4", w)), config)
    change(folder, gate_proj__weight_global_scale=torch.tensor([value]))
    refused(folder, "gate_proj.weight_global_scale", "NaN, infinite or zero", experts=True)


def test_nan_scales_are_found_before_the_weights_are_read(tmp_path):
    config = MODEL.config() | {"quantization_config": QUANTIZATION["mxfp4"]}
    folder = save(tmp_path, MODEL.tensors(lambda w: references.compress("mxfp4", w)), config)
    change(folder, down_proj__weight_scale=torch.full((64, 1), 255, dtype=torch.uint8))
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="NaN"):
        checkpoint.experts(1)
    everything = checkpoint.layer(1).nbytes
    assert checkpoint.bytes_read < everything / 8


def test_a_config_of_another_quantization(quantized):
    kind, folder = quantized
    for other, quantization in {**QUANTIZATION, "nothing": None}.items():
        if other == kind:
            continue
        reconfigure(folder, quantization_config=quantization)
        refused(folder, "model.safetensors" if quantization else "no quantization_config", "config.json")
        if quantization:
            error = refused(
                folder, "the config.json that belongs to these weights", "model.safetensors: tensor"
            )
            assert error.tensor.startswith(
                "model.layers.0.mlp.experts.0.gate_proj."
            )  # the first that is looked at


@pytest.mark.parametrize(
    ("kind", "words", "changes"),
    [
        ("mxint4", "group_size 128 where 32 can be held", {"group_size": 128}),
        ("mxint4", "num_bits 8 where 4 can be held", {"num_bits": 8}),
        ("mxint4", "symmetric False where True can be held", {"symmetric": False}),
        ("deepseek", "weight_block_size [64, 64] where [128, 128] can be held", {}),
    ],
)
def test_a_quantization_that_cannot_be_held(tmp_path, kind, words, changes):
    model = Small(num_experts=4, hidden_size=128, intermediate_size=128)
    quantization = json.loads(json.dumps(QUANTIZATION[kind]))
    if changes:
        quantization["config_groups"]["group_0"]["weights"] |= changes
    else:
        quantization["weight_block_size"] = [64, 64]
    write = references.deepseek if kind == "deepseek" else lambda w: references.compress(kind, w)
    folder = save(tmp_path, model.tensors(write), model.config() | {"quantization_config": quantization})
    refused(folder, words)


@pytest.mark.parametrize("kind", ["mxint4", "deepseek"])
def test_a_declared_quantization_of_which_a_piece_is_missing_everywhere(tmp_path, kind):
    model = Small(num_experts=4, hidden_size=128, intermediate_size=128)
    write = references.deepseek if kind == "deepseek" else lambda w: references.compress(kind, w)
    scales = scale_name(kind).partition("__")[2]
    tensors, config = model.tensors(write), model.config() | {"quantization_config": QUANTIZATION[kind]}
    missing = {name: tensor for name, tensor in tensors.items() if not name.endswith(scales)}
    first = f"model.layers.0.mlp.experts.0.gate_proj.{scales}"
    error = refused(save(tmp_path / "missing", missing, config), f"tensor '{first}' is missing")
    assert (error.tensor, error.layer) == (first, "model.layers.0.mlp")
    doubled = {name: t.double() if name.endswith(scales) else t for name, t in tensors.items()}
    refused(save(tmp_path / "doubled", doubled, config), f"tensor '{first}' is F64")


@pytest.mark.parametrize("kind", ["mxint4", "nvfp4"])
def test_rows_that_are_no_whole_number_of_blocks(tmp_path, kind):
    model = Small(num_experts=4, hidden_size=128, intermediate_size=128)
    config = model.config() | {"quantization_config": QUANTIZATION[kind], "hidden_size": 136}
    folder = save(tmp_path, model.tensors(lambda w: references.compress(kind, w)), config)
    refused(folder, "rows of 136 columns are no whole number of blocks", "that can be held")


def test_gate_and_up_that_would_share_blocks(tmp_path):
    model = Small(num_experts=4, hidden_size=128, intermediate_size=96)
    config = model.config() | {"quantization_config": QUANTIZATION["deepseek"]}
    folder = save(tmp_path, model.tensors(references.deepseek), config)
    words = (
        "gate and up of expert 0 have 96 rows each and different scales",
        "experts.0.up_proj.weight_scale_inv",
    )
    refused(folder, *words, experts=True)


def test_an_unknown_quantization(folder):
    path = folder / "model.safetensors"
    held = load_file(path)
    held = {name: t.to(torch.int8) if ".experts." in name else t for name, t in held.items()}
    save_file(held, path)
    reconfigure(folder, quantization_config={"quant_method": "awq"})
    refused(
        folder,
        "hold weight I8[32, 64] each",
        "quant_method 'awq'",
        "compressed-tensors nvfp4",
        "DeepSeek fp8",
    )


@pytest.mark.parametrize("kind", ["mxint4", "deepseek"])
def test_weights_that_no_layout_calls_so(tmp_path, kind):
    """What the config names is not missed tensor by tensor, where none of them is there."""
    tensors = MODEL.tensors(lambda w: {"qweight": w.to(torch.int32), "qzeros": torch.zeros(1)})
    folder = save(tmp_path, tensors, MODEL.config() | {"quantization_config": QUANTIZATION[kind]})
    method = QUANTIZATION[kind]["quant_method"]
    refused(folder, "hold qweight I32[32, 64], qzeros F32[1] each", f"quant_method {method!r}")


# -- At the limits -------------------------------------------------------------------------------------------


def test_a_header_of_the_largest_size_is_read_and_a_longer_one_is_not(folder, monkeypatch):
    with (folder / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    monkeypatch.setattr(header, "LARGEST_HEADER", length)
    assert len(open_checkpoint(folder).layers) == 2
    monkeypatch.setattr(header, "LARGEST_HEADER", length - 1)
    refused(folder, f"announces a header of {length} bytes, more than {length - 1}")


def test_a_json_file_of_the_largest_size_is_read_and_a_longer_one_is_not(folder, monkeypatch):
    size = (folder / "config.json").stat().st_size
    monkeypatch.setattr(configs, "_LARGEST_JSON", size)
    assert len(open_checkpoint(folder).layers) == 2
    monkeypatch.setattr(configs, "_LARGEST_JSON", size - 1)
    refused(folder, "config.json cannot be read", f"more than {size - 1} bytes")


def test_a_last_tensor_that_ends_with_the_last_page_of_the_file(folder):
    """None of its pages can be given back, and behind it there is no page at all."""
    held = MODEL.tensors() | {"z": torch.arange(8, dtype=torch.uint8)}
    save_file(held, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    held["filling"] = torch.zeros(-(size + 64) % mmap.PAGESIZE + mmap.PAGESIZE, dtype=torch.uint8)
    save_file(held, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    held["filling"] = held["filling"][: len(held["filling"]) - size % mmap.PAGESIZE]
    save_file(held, folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size % mmap.PAGESIZE == 0
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["z"].begin + 8 == (folder / "model.safetensors").stat().st_size
    assert checkpoint.tensor("z").tolist() == list(range(8))


def write_raw(path: Path, entries: dict, data: bytes) -> None:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_file_may_end_with_its_header_and_tensors_may_be_empty(tmp_path):
    write_raw(tmp_path / "none.safetensors", {}, b"")
    assert header.read_header(tmp_path / "none.safetensors")[0] == []
    empty = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    write_raw(tmp_path / "empty.safetensors", {"a": empty}, b"")
    found, sizes = header.read_header(tmp_path / "empty.safetensors")
    opened = files.TensorFiles({"a": found[0]}, {found[0].file: sizes})
    assert opened.read("a").shape == (0, 4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([1] * 64, None),
        ([1] * 65, "at most 64 whole numbers"),
        ([0, 2**62], None),
        ([0, 2**63 - 1], None),
        ([0, 2**62, 2], "fewer than 2^63 elements"),
        ([0, 2**63], "at most 64 whole numbers"),
    ],
)
def test_shapes_up_to_the_limits_are_read(tmp_path, shape, words):
    size = 0 if 0 in shape else 1
    write_raw(
        tmp_path / "a.safetensors",
        {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}},
        b"\0" * size,
    )
    if words is None:
        assert header.read_header(tmp_path / "a.safetensors")[0][0].shape == tuple(shape)
    else:
        with pytest.raises(CheckpointError) as caught:
            header.read_header(tmp_path / "a.safetensors")
        assert words in str(caught.value)


def test_a_file_that_has_changed_since_it_was_opened_is_not_read(folder):
    checkpoint = open_checkpoint(folder)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="bytes when opened, now"):
        checkpoint.experts(1)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_any_of_several_numbered_files_is_missed(folder, missing):
    (folder / "model.safetensors").unlink()
    tensors = list(MODEL.tensors().items())
    for number in {1, 2, 3} - {missing}:
        save_file(dict(tensors[number - 1 :: 3]), folder / f"model-{number:05}-of-00003.safetensors")
    refused(folder, f"model-{missing:05}-of-00003.safetensors is missing")
    save_file(dict(tensors[missing - 1 :: 3]), folder / "another.safetensors")  # which has no number
    refused(folder, f"model-{missing:05}-of-00003.safetensors is missing")


def test_what_is_viewed_lies_on_a_multiple_of_its_size(tmp_path):
    """Wherever it lies in the file: some kernels and some machines cannot read from an odd address."""
    entries = {
        "odd": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "words": {"dtype": "F32", "shape": [2], "data_offsets": [2, 10]},
    }
    write_raw(tmp_path / "a.safetensors", entries, b"\7\7" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    found, size = header.read_header(tmp_path / "a.safetensors")
    opened = files.TensorFiles({tensor.name: tensor for tensor in found}, {tmp_path / "a.safetensors": size})
    assert found[1].begin % 4 != 0
    with opened.view("odd") as odd, opened.view_bytes("odd") as raw:
        assert odd.data_ptr() == raw.data_ptr()  # no copy, where none is needed
    with opened.view("words") as words:
        assert words.data_ptr() % 4 == 0
        assert words.tolist() == [1.5, -2.0]


def test_the_bytes_that_were_read_are_given_back(folder, monkeypatch):
    """Those of a tensor, or of one expert's share of it."""
    given = []
    monkeypatch.setattr(files._Map, "give_back", lambda self, first, last: given.append((first, last)))
    found, size = header.read_header(folder / "model.safetensors")
    opened = files.TensorFiles(
        {tensor.name: tensor for tensor in found}, {folder / "model.safetensors": size}
    )
    stored = next(tensor for tensor in found if len(tensor.shape) == 2)
    rows, columns = stored.shape
    width = stored.nbytes // rows
    for index in (None, 0, rows - 1):
        with opened.view(stored.name, index) as tensor:
            assert tensor.shape == ((rows, columns) if index is None else (columns,))
    last = stored.begin + stored.nbytes
    assert given == [(stored.begin, last), (stored.begin, stored.begin + width), (last - width, last)]


def test_a_long_reason_is_cut(tmp_path):
    """Python's words for a number of too many digits are longer than a line."""
    (tmp_path / "config.json").write_text('{"hidden_size": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match="digits") as own:
        int("1" * 5000)
    words = str(own.value)
    assert len(words) > 120
    error = raised(open_checkpoint, tmp_path)
    assert f"({words[:120]})" in str(error)


# -- Values of a config --------------------------------------------------------------------------------------

WRONG_VALUES = {
    "num_hidden_layers": [-3, 0, 2.5, True, "28", [28]],
    "num_experts_per_tok": [0, -1, 1.5, "2", [2], 5],  # there are 4 experts
    "hidden_act": [{"a": 1}, ["silu"], 3, True],
    "dtype": [16, {"a": 1}],
    "torch_dtype": [["bfloat16"]],
    "model_type": [3, ["qwen3_moe"], {}],
    "text_config": ["qwen3_moe", 3, []],
    "decoder_sparse_step": [0, -1, "1"],
    "mlp_only_layers": [3, [-1], ["0"], {}],
    "mlp_layer_types": ["dense", [1]],
    "first_k_dense_replace": [-1, 0.5],
    "moe_layer_freq": [0, "1"],
    "num_nextn_predict_layers": [-1, 2**31],
    "norm_topk_prob": [1, "true"],
    "routed_scaling_factor": [0, -1.0, float("inf"), float("nan"), "2.5", True],
    "n_group": [0, -8],
    "topk_group": [0, "4"],
    "scoring_func": [1, ["sigmoid"]],
    "topk_method": [8],
    "swiglu_limit": [0, -7.0, "7"],
    "swiglu_alpha": [0],
    "quantization_config": [3, "fp8", []],
    "compression_config": ["fp8"],
}


def test_every_key_that_a_family_reads_is_among_them():
    assert set(families.GENERAL_KEYS) | set(families.FAMILY_KEYS) <= set(WRONG_VALUES)
    defaults = {key for family in families.FAMILIES.values() for key in family.defaults}
    assert defaults <= set(families.GENERAL_KEYS) | set(families.FAMILY_KEYS)


@pytest.mark.parametrize(
    ("key", "value"), [(key, bad) for key, values in WRONG_VALUES.items() for bad in values]
)
def test_a_value_that_nobody_could_use_is_refused_when_the_checkpoint_is_opened(folder, key, value):
    reconfigure(folder, **{key: value})
    refused(folder, f"{folder}/config.json", f" has {key}=", "expected", f"mend {key!r} in the file")


@pytest.mark.parametrize("key", ["quant_method", "quant_algo", "format", "activation_scheme", "scale_fmt"])
def test_a_setting_of_a_quantization_that_is_no_name_is_refused(folder, key):
    reconfigure(folder, quantization_config={"quant_method": "fp8", key: {"a": 1}})
    refused(folder, f"has quantization_config.{key}={{'a': 1}}", "expected a string")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_a_name_that_stands_twice_in_an_object_is_refused(folder, file):
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    inner = json.dumps(values)[:-1] + (", " if values else "")
    path.write_text(inner + '"nested": {"a": [{"top_k": 2, "top_k": 2}]}}')
    refused(folder, f"{path} cannot be read (the name 'top_k' is there twice)")
    path.write_text(inner + '"num_experts": 4, "hidden_size": 1, "num_experts": 4}')
    refused(folder, "is there twice")


def test_keys_of_other_families_mean_what_they_mean_there(folder):
    """A family that is not known may write lists where the known ones have numbers."""
    reconfigure(folder, model_type="mine", moe_layer_freq=[0, 1], norm_topk_prob="yes")
    assert open_checkpoint(folder).layers
