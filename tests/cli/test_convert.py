"""`tokenyard convert`."""

from __future__ import annotations

import pytest

from tests.checkpoints.small import Small, same_bits, save
from tests.cli.runner import call, call_json
from tokenyard.checkpoints import TARGETS, open_checkpoint

MODEL = Small(num_experts=4, hidden_size=64, intermediate_size=128)


@pytest.fixture
def plain(tmp_path):
    return save(tmp_path / "plain", MODEL.tensors(), MODEL.config())


@pytest.mark.parametrize("weights", list(TARGETS))
def test_what_was_written_is_what_is_said(plain, tmp_path, weights):
    out = tmp_path / "out"
    found = call_json("convert", plain, "--weights", weights, "--out", out, "--largest-file", 50_000)
    checkpoint = open_checkpoint(out)
    assert (found["path"], found["out"], found["weights"]) == (str(plain), str(out), weights)
    assert found["files"] == [file.name for file in checkpoint.files]
    assert len(found["files"]) > 1
    assert found["bytes"] == {"before": open_checkpoint(plain).nbytes, "after": checkpoint.nbytes}
    assert [layer["name"] for layer in found["layers"]] == [layer.name for layer in checkpoint.layers]
    assert [layer["layout"] for layer in found["layers"]] == [
        str(layer.layout) for layer in checkpoint.layers
    ]
    assert all(0.01 < layer["relative_error"] < 0.2 for layer in found["layers"])
    expected = open_checkpoint(plain).experts(1).quantize(weights).by_name()
    for name, tensor in checkpoint.experts(1).by_name().items():
        assert same_bits(tensor, expected[name])


def test_table_and_progress(plain, tmp_path):
    result = call("convert", plain, "--weights", "mxint4", "--out", tmp_path / "out")
    assert result.exit_code == 0
    told = " ".join(result.stdout.split())  # however long the path is, and wherever a line ends
    for words in (
        "experts in mxint4",
        "model.layers.1.mlp",
        "compressed-tensors mxint4",
        "relative error",
        "became",
    ):
        assert words in told
    assert "model.layers.1.mlp" in result.stderr  # where it had come to
    assert "inspect" in call("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weights", "mxint5"], "did you mean 'mxint4'"),
        (["--weights", "bf16"], "unknown weight format to convert into 'bf16'"),
        (["--weights", "mxint4", "--out", "plain"], "is there already"),
    ],
)
def test_errors_are_messages(plain, tmp_path, arguments, words):
    options = {"--out": tmp_path / "out"} | dict(zip(arguments[::2], arguments[1::2], strict=True))
    if options["--out"] == "plain":
        options["--out"] = plain
    flat = [part for pair in options.items() for part in pair]
    result = call("convert", plain, *flat)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert words in call_json("convert", plain, *flat, exit_code=2)["error"]["message"]
    assert not (tmp_path / "out").exists()
