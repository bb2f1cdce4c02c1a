"""`tokenyard inspect`."""

from __future__ import annotations

import pytest

from tests.checkpoints import references
from tests.checkpoints.small import NAMES, Small, save
from tests.checkpoints.test_quantized import WRITERS, any_checkpoint
from tests.cli.runner import call, call_json
from tokenyard.checkpoints import open_checkpoint
from tokenyard.experts import EXPERTS

MODEL = Small(num_experts=7, num_layers=3, extra_config={"vocab_size": 16})


@pytest.fixture
def folder(tmp_path):
    """A 4-bit body with a bf16 head."""
    body = MODEL.tensors(lambda w: references.compress("mxfp4", w))
    plain = {name: t for name, t in MODEL.tensors().items() if "layers.2.mlp.experts" in name}
    tensors = {name: t for name, t in body.items() if "layers.2.mlp.experts" not in name} | plain
    config = MODEL.config() | {"quantization_config": references.compressed_config("mxfp4")}
    return save(tmp_path / "model", tensors, config, files=2)


def test_json_is_what_the_headers_say(folder):
    found = call_json("inspect", folder, "--ranks", 3)
    checkpoint = open_checkpoint(folder)
    assert found["path"] == str(folder)
    assert (found["model_type"], found["ranks"], found["notes"]) == ("qwen3_moe", 3, [])
    assert found["bytes"]["total"] == checkpoint.nbytes
    assert found["bytes"]["experts"] == checkpoint.experts_nbytes
    assert found["bytes"]["shared"] == checkpoint.shared_nbytes
    assert [file["name"] for file in found["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    body, _, head = found["layers"]
    assert (body["weights"], body["layout"]) == ("mxfp4", "compressed-tensors mxfp4")
    assert (head["weights"], head["layout"], head["bytes"]) == ("bf16", "plain", 7 * 3 * 64 * 32 * 2)
    assert (head["experts_per_rank"], head["bytes_per_rank"]) == (3, 3 * 3 * 64 * 32 * 2)
    assert found["bytes"]["rank"] == found["bytes"]["shared"] + sum(
        layer["bytes_per_rank"] for layer in found["layers"]
    )


def test_what_runs_it_is_what_the_experts_declare(folder):
    body, _, head = call_json("inspect", folder)["layers"]
    for layer in (body, head):
        for name, kind in EXPERTS.items():
            if layer["weights"] not in kind.weight_formats:
                assert f"weights={layer['weights']}" in layer["experts"][name]
    assert body["experts"]["grouped"] is None
    assert head["experts"]["reference"] is None


def test_table_shows_layers_formats_and_bytes(folder):
    result = call("inspect", folder)
    assert result.exit_code == 0
    assert result.stderr == ""
    for words in (
        "qwen3_moe, 3 MoE layers",
        "model.layers.0.mlp",
        "… model.layers.1.mlp",
        "(2 layers)",
        "model.layers.2.mlp",
        "compressed-tensors mxfp4",
        "7 experts",
        "H 64, I 32",
        "experts: reference, grouped",
        "rows: plain, mxfp8",
        "a rank of 4",
        "With 4 ranks, one holds",
    ):
        assert words in result.stdout, result.stdout


@pytest.mark.parametrize("kind", WRITERS)
def test_every_layout(tmp_path, kind):
    expected = any_checkpoint(tmp_path, kind).layers[0]
    layer = call_json("inspect", tmp_path)["layers"][0]
    assert (layer["weights"], layer["layout"]) == (expected.weights, str(expected.layout))
    assert layer["bytes"] == expected.nbytes
    assert layer["experts"]["grouped"] is None
    assert call("inspect", tmp_path).exit_code == 0


def test_families_that_cannot_be_planned_are_still_shown(tmp_path):
    model = Small(model_type="nemotron_h", parent="backbone.layers.{}.mixer")
    tensors = {name: t for name, t in model.tensors().items() if "gate_proj" not in name}
    save(tmp_path, tensors, model.config())
    found = call_json("inspect", tmp_path)
    assert [layer["gated"] for layer in found["layers"]] == [False, False]
    assert "model_type 'nemotron_h', which is not known to tokenyard" in found["notes"][0]
    assert "nemotron_h" in call("inspect", tmp_path).stdout


def test_layers_that_are_missing_are_told(tmp_path):
    model = Small(names=NAMES["w1"], parent="model.layers.{}.block_sparse_moe", model_type="mixtral")
    config = model.config() | {"num_hidden_layers": 4, "intermediate_size": 32, "num_local_experts": 8}
    save(tmp_path, model.tensors(), config)
    notes = call_json("inspect", tmp_path)["notes"]
    assert notes == [
        "The config has MoE layers that are not in the files: model.layers.2.mlp … model.layers.3.mlp (2 layers)."
    ]


def test_errors_are_messages(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = call("inspect", folder)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {path} ends at byte")
    assert "  fix: download or copy the file again" in result.stderr
    error = call_json("inspect", folder, exit_code=2)["error"]
    assert error["type"] == "CheckpointError"
    assert call_json("inspect", folder / "none", exit_code=2)["error"]["found"].endswith("is not there")
