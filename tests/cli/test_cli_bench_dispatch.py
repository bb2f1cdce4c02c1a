"""`tokenyard bench dispatch`: the document, the table, the picture and the errors."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest

from tests.cli.runner import call, call_json
from tokenyard.exchange import EXCHANGES

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
    assert set(document) == {"benchmark", "date", "hardware", "versions", "git_commit", "results"}
    cells = [(row["wire"], row["exchange"]) for row in document["results"]]
    assert cells == [(wire, exchange) for wire in ("bf16", "mxfp8") for exchange in EXCHANGES]


def extremes(row, name):
    """The smallest and the largest of two rounds, whose quartiles lie a quarter of the way in."""
    spread = row[f"{name}_high"] - row[f"{name}_low"]
    return row[name] - spread, row[name] + spread


def test_ratios_fit_the_times(measured):
    for row in measured[0]["results"]:
        for name, above, below in (("gloo_ratio", "gloo_ms", "ms"), ("floor_ratio", "ms", "floor_ms")):
            least, most = extremes(row, above)
            below_least, below_most = extremes(row, below)
            assert least / below_most * 0.999 <= row[name] <= most / below_least * 1.001
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_draws_a_picture(measured):
    picture = measured[2]
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 10_000


def test_shows_ours_beside_gloo_and_the_floor(measured, monkeypatch, tmp_path):
    """The table and the picture from figures that are known already."""
    rows, asked = measured[0]["results"], []

    def measure_dispatch(ranks, num_tokens, hidden_size, top_k, num_experts, wire, exchanges, rounds, **more):
        asked.append((ranks, num_tokens, wire, exchanges, rounds, more))
        return [{**row, "num_tokens": num_tokens} for row in rows if row["wire"] == wire]

    monkeypatch.setattr(import_module("tokenyard.lab.bench.dispatch"), "measure_dispatch", measure_dispatch)
    picture = tmp_path / "picture.svg"
    options = ["--wire", "bf16", "--tokens", 9, "--exchange", "two_sided", "--plot", picture]
    result = call("bench", "dispatch", *TINY, *options)
    assert result.exit_code == 0, result.output
    assert asked == [
        (2, n, "bf16", ["two_sided"], 2, {"combine_wire": "bf16", "paranoid": False}) for n in (8, 9)
    ]
    row = rows[0]
    for word in ("bare gloo", "floor", "gloo / ours", "two_sided", f"{row['gloo_ms']:.1f}"):
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
    assert "pip install 'tokenyard[plot]'" in result.stderr
    assert "measuring" not in result.stderr
