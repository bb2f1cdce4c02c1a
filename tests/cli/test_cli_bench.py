"""`tokenyard bench`: the tables, the documents and the errors. What is measured has tests of its own."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from tests.cli.runner import call, call_json
from tokenyard.cli.machine import git_commit

TINY = ["--tokens", 4, "--hidden-size", 256, "--seconds", 0.001]
MEASURED = {
    "num_tokens": 16, "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2, "ours_ms": 1.0,
    "transformers_ms": 2.0, "floor_ms": 0.5, "ratio": 2.0, "ratio_low": 1.9, "ratio_high": 2.1, "over_floor": 2.0,
}  # fmt: skip


def test_encode_saves_what_it_prints(tmp_path):
    out = tmp_path / "encode.json"
    found = call_json("bench", "encode", *TINY, "--tokens", 8, "--out", out)
    assert json.loads(out.read_text()) == found
    assert set(found) == {"benchmark", "date", "hardware", "versions", "git_commit", "results"}
    assert found["hardware"]["cores"] >= 1
    assert found["versions"]["torch"]
    rows = [(row["num_tokens"], row["format"]) for row in found["results"]]
    assert rows[0] == (4, "fp8_block128")
    assert {tokens for tokens, _ in rows} == {4, 8}


def test_encode_shows_a_table_and_a_sign_of_life():
    result = call("bench", "encode", *TINY)
    assert result.exit_code == 0
    assert "nvfp4" in result.stdout
    assert "ceiling (copy), MB/s" in result.stdout  # no encoder is faster
    assert "floor" not in result.stdout
    assert "measuring 4 tokens (1 of 1)" in result.stderr


def test_experts(monkeypatch):
    asked = {}

    def measure_experts(num_tokens, **arguments):
        asked.update(num_tokens=num_tokens, **arguments)
        return MEASURED

    monkeypatch.setattr(import_module("tokenyard.lab.bench.experts"), "measure_experts", measure_experts)
    arguments = ["bench", "experts", "--tokens", 16, "--num-experts", 8, "--top-k", 2, "--rounds", 3]
    assert call_json(*arguments)["results"] == [MEASURED]
    assert (asked["num_tokens"], asked["num_experts"], asked["rounds"], asked["device"]) == (16, 8, 3, "cpu")
    assert "2.00 × (1.90 to 2.10)" in call(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experts", "--top-k", 9, "--num-experts", 8], "--top-k 9"),
        (["experts", "--device", "abacus"], "--device abacus"),
        (["experts", "--weights", "mxint3"], "unknown weight format 'mxint3'"),
        (["experts", "--weights", "fp32"], "--weights fp32 on --device cpu"),
        (["encode", *TINY, "--out", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_errors_come_before_the_time_is_spent(arguments, words):
    result = call("bench", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "measuring" not in result.stderr
    assert words in call_json("bench", *arguments, exit_code=2)["error"]["message"]


def test_git_commit_is_a_hash_or_nothing():
    commit = git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
