"""`tokenyard plan`."""

from __future__ import annotations

import json

import pytest

from tests.cli.runner import MIXTRAL, call, call_json
from tokenyard import draft
from tokenyard.integrations.huggingface import layers_from_config


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    return path


def test_json_is_the_draft(config):
    found = call_json(
        "plan", "--config", config, "--ranks", 3, "--wire", "nvfp4", "--combine-wire", "mxfp8",
        "--max-tokens", 16, "--placement", "round_robin", "--exchange", "allgather", "--in-flight", 2,
    )  # fmt: skip
    layers = layers_from_config(config, wire="nvfp4", combine_wire="mxfp8", placement="round_robin")
    expected = draft(layers, 3, exchange="allgather", max_tokens=16, in_flight=2)
    assert found["config"] == str(config)
    assert (found["ranks"], found["exchange"], found["num_layers"]) == (3, "allgather", 3)
    assert found["bytes_per_rank"]["workspace"] == expected.workspace_bytes
    (row,) = found["wirings"]
    assert row.pop("experts_per_rank") == {"fewest": 2, "most": 3}
    assert [row] == expected.rows()


def test_table_shows_wiring_and_bytes(config):
    result = call("plan", "--config", config.parent, "--ranks", 3, "--wire", "nvfp4")
    assert result.exit_code == 0
    for words in (
        "3 layers on 3 ranks, exchange one_sided (auto: if the ranks share memory)",
        "model.layers.0.mlp",
        "2 to 3 a rank",
        "quantize: sender",
        "reduce ranks: exchange",
        "B/row",
        "All layers share a workspace of",
    ):
        assert words in result.stdout
    assert result.stderr == ""


def test_a_plan_for_training_shows_how_gradients_travel(config):
    command = ("plan", "--config", config, "--ranks", 3, "--wire", "mxfp8", "--max-tokens", 16)
    found = call_json(*command, "--training")
    expected = draft(layers_from_config(config, wire="mxfp8"), 3, max_tokens=16, training=True)
    (row,) = found["wirings"]
    assert row["gradients"] == expected.rows()[0]["gradients"]
    assert (row["gradients"]["wire"], found["training"]) == ("bf16", True)
    assert found["bytes_per_rank"]["workspace"] == expected.workspace_bytes
    shown = call(*command, "--training").stdout
    for words in ("1 in flight, training", "a forward keeps", "weight gradient: experts"):
        assert words in shown
    assert "gradient" not in call(*command).stdout
    assert not call_json(*command)["training"]


def test_what_cannot_be_trained_is_refused(config):
    refused = call("plan", "--config", config, "--ranks", 2, "--training", "--weights", "mxint4")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "a quantized weight has no gradient" in refused.stderr


def test_weights_can_be_chosen(config):
    (row,) = call_json("plan", "--config", config, "--ranks", 2, "--weights", "mxint4")["wirings"]
    assert "mxint4 weights" in row["experts"]
    refused = call("plan", "--config", config, "--ranks", 2, "--weights", "mxint5")
    assert refused.exit_code == 2
    assert "weights=mxint5" in refused.stderr
    assert "    weights=mxfp8" in refused.stderr.splitlines()


def test_plan_error_prints_alternatives_that_work(config):
    wrong = ["plan", "--config", config, "--ranks", 2, "--combine-wire", "fp32"]
    result = call(*wrong)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: layer 'model.layers.0.mlp': combine_wire=fp32" in result.stderr
    assert "one of these works:" in result.stderr
    error = call_json(*wrong, exit_code=2)["error"]
    assert error["type"] == "PlanError"
    assert error["layer"] == "model.layers.0.mlp"
    assert error["alternatives"]
    for alternative in error["alternatives"]:
        assert f"    combine_wire={alternative['combine_wire']}" in result.stderr.splitlines()
        call_json("plan", "--config", config, "--ranks", 2, "--combine-wire", alternative["combine_wire"])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--wire", "nvpf4", "did you mean 'nvfp4'"),
        ("--wire", "mxfp8(alignment=", "cannot be read"),
        ("--exchange", "two_side", "did you mean 'two_sided'"),
        ("--placement", "contigous", "placement=contiguous"),
        ("--experts", "group", "did you mean 'grouped'"),
        ("--config", "/", "cannot be read"),
    ],
)
def test_wrong_names(config, option, value, words):
    arguments = ["plan", "--config", config, "--ranks", 2, option, value]
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert words in call_json(*arguments, exit_code=2)["error"]["message"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "mixtral"}', '{"model_type": "[red]x[/]"}'])
def test_broken_files(config, text):
    config.write_text(text)
    result = call("plan", "--config", config, "--ranks", 2)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {config}")


def test_more_ranks_than_experts(config):
    found = call_json("plan", "--config", config, "--ranks", 64)
    assert found["wirings"][0]["experts_per_rank"] == {"fewest": 0, "most": 1}
