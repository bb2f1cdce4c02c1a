"""`tokenyard bench dispatch`: the document, the table, the picture and the errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from tests.cli.runner import call, call_json
from tokenyard.exchange import EXCHANGES
from tokenyard_lab.bench.dispatch import Job
from tokenyard_lab.bench.records import Document, figure

TINY = ["--ranks", 2, "--tokens", 8, "--hidden-size", 256, "--top-k", 2, "--num-experts", 4, "--rounds", 2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dispatch")
    files = folder / "dispatch.json", folder / "dispatch.png"
    document = call_json("bench", "dispatch", *TINY, "--out", files[0], "--plot", files[1])
    return document, *files


def test_saves_what_it_prints_with_its_provenance(measured):
    document, saved, _ = measured
    assert json.loads(saved.read_text()) == document
    assert {"benchmark", "unit", "setup", "date", "hardware", "versions", "git_commit"} <= set(document)
    assert (document["benchmark"], document["unit"]) == ("dispatch", "ms")
    found = [record["parameters"] for record in document["results"]]
    cells = [(parameters["wire"], parameters["exchange"]) for parameters in found]
    assert cells == [(wire, exchange) for wire in ("bf16", "mxfp8") for exchange in EXCHANGES]


def test_ratios_fit_the_times(measured):
    for record in Document.from_dict(measured[0], "").results:
        gloo = record.peers["gloo"]
        pairs = (("gloo / ours", gloo, record.ours), ("ours / floor", record.ours, record.floor))
        for name, above, below in pairs:
            ratio = record.ratios[name]
            assert above.least / below.most * 0.999 <= ratio.median <= above.most / below.least * 1.001
            assert ratio.low <= ratio.median <= ratio.high


def test_draws_a_picture(measured):
    picture = measured[2]
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 10_000


def test_shows_ours_beside_gloo_and_the_floor(measured, monkeypatch, tmp_path):
    """The table and the picture from figures that are known already."""
    records, asked = Document.from_dict(measured[0], "").results, []

    def measure_dispatch(job, ranks):
        asked.append((ranks, job))
        found = [record for record in records if record.parameters["wire"] == job.wire]
        return [replace(r, parameters={**r.parameters, "tokens": job.num_tokens}) for r in found]

    monkeypatch.setattr(import_module("tokenyard_lab.bench.dispatch"), "measure_dispatch", measure_dispatch)
    picture = tmp_path / "picture.svg"
    options = ["--wire", "bf16", "--tokens", 9, "--exchange", "two_sided", "--plot", picture]
    result = call("bench", "dispatch", *TINY, *options)
    assert result.exit_code == 0, result.output
    tiny = {"hidden_size": 256, "top_k": 2, "num_experts": 4, "exchanges": ["two_sided"], "rounds": 2}
    assert asked == [(2, Job(num_tokens=count, **tiny)) for count in (8, 9)]
    gloo = figure(records[0].peers["gloo"].median)
    for word in ("gloo, ms", "floor, ms", "gloo / ours", "two_sided", gloo):
        assert word in result.stdout
    assert "measuring 9 tokens (2 of 2)" in result.stderr
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--top-k", 5], "top_k is 5"),
        (["--wire", "bf61"], "bf61"),
        (["--plot", "/nowhere/at/all.png"], "cannot be written"),
        (["--plot", "picture.bmp3"], ".png"),
        (["--paranoid", "--device", "cuda"], "--paranoid with --device cuda"),
        (["--out", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_errors_are_messages(options, words):
    result = call("bench", "dispatch", *TINY, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert words in call_json("bench", "dispatch", *TINY, *options, exit_code=2)["error"]["message"]


def test_without_matplotlib_the_fix_is_named_before_the_time_is_spent(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("bench", "dispatch", *TINY, "--plot", tmp_path / "picture.png")
    assert result.exit_code == 2
    assert "fix: pip install matplotlib" in result.stderr
    assert "measuring" not in result.stderr
