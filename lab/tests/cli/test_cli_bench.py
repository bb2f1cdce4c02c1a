"""`tokenyard bench`: the tables, the documents and the errors. What is measured has tests of its own."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from tests.cli.runner import call, call_json
from tokenyard.cli.machine import git_commit
from tokenyard_lab.bench.machine_rates import Rates
from tokenyard_lab.bench.records import Document, Record, Spread
from tokenyard_lab.bench.shapes import CASES, MODELS

TINY = ["--tokens", 4, "--hidden-size", 256, "--seconds", 0.001]
MEASURED = Record(
    parameters={"weights": "bf16", "tokens": 16},
    ours=Spread(1.0),
    floor=Spread(0.5),
    peers={"Transformers": Spread(2.0)},
    ratios={"peer / ours": Spread(2.0, 1.9, 2.1)},
)


def test_encode_saves_what_it_prints(tmp_path):
    out = tmp_path / "encode.json"
    found = call_json("bench", "encode", *TINY, "--tokens", 8, "--out", out)
    assert json.loads(out.read_text()) == found
    assert {"benchmark", "unit", "setup", "date", "hardware", "versions", "git_commit"} <= set(found)
    assert found["hardware"]["cores"] >= 1
    assert found["versions"]["torch"]
    rows = [tuple(record["parameters"].values()) for record in found["results"]]
    assert rows[0] == (4, "fp8_block128")
    assert {tokens for tokens, _ in rows} == {4, 8}


@pytest.mark.parametrize(("command", "cases"), [("experts", CASES), ("layer", MODELS)])
def test_help_names_every_case(command, cases):
    words = call("bench", command, "--help").stdout.replace(",", " ").replace(":", " ").split()
    assert set(cases) <= set(words)


def test_encode_shows_a_table_and_a_sign_of_life():
    result = call("bench", "encode", *TINY)
    assert result.exit_code == 0
    assert "nvfp4" in result.stdout
    assert "ceiling, MB/s" in result.stdout  # no encoder is faster
    assert "floor" not in result.stdout
    assert "measuring 4 tokens (1 of 1)" in result.stderr


def test_experts(monkeypatch):
    asked = []

    def measure_experts(cells, *, kind, **_):
        asked.append((kind, *cells))
        return iter([MEASURED])

    bench = import_module("tokenyard_lab.bench.experts")
    monkeypatch.setattr(bench, "measure_experts", measure_experts)
    rates = Rates(read=1.0, copy=1.0, product=1.0, fp8=None)
    monkeypatch.setattr("tokenyard_lab.bench.machine_rates.measure_rates", lambda *_: rates)
    arguments = ["bench", "experts", "--tokens", 16, "--num-experts", 8, "--top-k", 2, "--rounds", 3]
    found = call_json(*arguments)
    assert Document.from_dict(found, "").results == [MEASURED]
    assert (found["setup"]["num_experts"], found["setup"]["rounds"]) == (8, 3)
    kind, cell = asked[0]
    assert kind is bench.GROUPED
    assert (cell.size, cell.shape.num_experts, cell.shape.local_experts, cell.shape.top_k) == (16, 8, 8, 2)
    assert "2.00 (1.90–2.10)" in call(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experts", "--top-k", 9, "--num-experts", 8], "top_k is 9, of 8 experts"),
        (["experts", "--device", "abacus"], "--device abacus"),
        (["experts", "--weights", "mxint3"], "unknown weight format 'mxint3'"),
        (["experts", "--weights", "fp32"], "--weights fp32 with --device cpu"),
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


def test_combine_error_has_every_way_back_beside_the_exact_result(tmp_path):
    arguments = ["--hidden-size", 200, "--intermediate-size", 8, "--num-experts", 6, "--top-k", 3]
    picture = tmp_path / "errors.png"
    found = call_json(
        *("bench", "combine-error", *arguments, "--tokens", 4, "--layers", 1, "--ranks", 1, "--ranks", 2),
        *("--plot", picture),
    )
    error = {tuple(record["parameters"].values()): record["ours"]["median"] for record in found["results"]}
    wires = ("bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4", "e4m3_unscaled")
    assert set(error) == {
        (ranks, results, wire)
        for ranks in (1, 2)
        for results in ("gaussian", "outliers", "small")
        for wire in wires
    }
    for ranks in (1, 2):
        for results in ("gaussian", "small"):
            assert 0.1 < error[ranks, results, "bf16"] < 0.5
            assert 2 < error[ranks, results, "mxfp8"] < 3.5
            assert 6 < error[ranks, results, "nvfp4"] < 14
        # A scale makes up for the size of a row; without one, small numbers are lost.
        assert error[ranks, "small", "mxfp8"] == pytest.approx(error[ranks, "gaussian", "mxfp8"], rel=0.01)
        assert error[ranks, "small", "e4m3_unscaled"] > 2 * error[ranks, "gaussian", "e4m3_unscaled"]
    # Nothing is lost beyond the output's own rounding where one rank's results come home as bf16.
    first = found["results"][0]
    assert first["ours"]["median"] == pytest.approx(first["floor"]["median"], rel=0.01)
    outliers = next(r for r in found["results"] if r["parameters"]["results"] == "outliers")
    assert outliers["details"]["ordinary"] > 0
    assert picture.stat().st_size > 10_000


def test_no_plan_takes_the_bad_example_of_a_study():
    from tokenyard.errors import UnknownName
    from tokenyard.formats import get

    with pytest.raises(UnknownName, match="e4m3_unscaled"):
        get("e4m3_unscaled")
