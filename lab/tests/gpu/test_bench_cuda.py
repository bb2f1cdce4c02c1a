"""`tokenyard bench` on a GPU, on tiny grids: checked, timed, saved and drawn."""

import dataclasses
import json

import pytest

from lab.tests.bench.test_bench_experts_cuda import tiny_case
from tests.cli.runner import call
from tokenyard.experts.spec import EXACT
from tokenyard_lab.bench import machine_rates
from tokenyard_lab.bench.records import Document
from tokenyard_lab.bench.shapes import CASES

pytestmark = pytest.mark.gpu

TINY = [
    "--ranks",
    2,
    "--tokens",
    8,
    "--tokens",
    80,
    "--tokens",
    1024,
    "--hidden-size",
    256,
    "--num-experts",
    6,
]


def test_a_tiny_grid_is_measured(tmp_path):
    files = tmp_path / "dispatch.json", tmp_path / "dispatch.png"
    wires = ["--wire", "bf16", "--wire", "nvfp4(global_scale=448.0)"]
    options = [*TINY, *wires, "--top-k", 2, "--quick", "--out", files[0], "--plot", files[1]]
    done = call("bench", "dispatch", "--device", "cuda", *options)
    assert done.exit_code == 0, done.output
    document = Document.from_dict(json.loads(files[0].read_text()), "")
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert document.benchmark == "dispatch-cuda"
    assert document.setup["copy_TB_per_s"] > 0.1
    parameters = [record.parameters for record in document.results]
    assert [(found["operation"], found["tokens"]) for found in parameters] == [
        *[("dispatch", tokens) for tokens in (8, 8, 80, 80, 1024, 1024)],
        *[("round trip", 8)] * 2,
        ("combine", 1024),
        *[("dispatch", 8)] * 2,
        *[("round trip", 8)] * 2,
    ]
    launches = [found["launch"] for found in parameters]
    assert launches == ["one for all ranks"] * 9 + ["a stream per rank"] * 4
    for record in document.results:
        check_times(record)
        assert record.floor.median > 0


def check_times(record):
    ours = record.ours
    assert record.note == ""
    assert 0 < ours.least <= ours.low <= ours.median <= ours.high <= ours.most


def test_experts_of_every_format_are_measured(tmp_path, monkeypatch):
    for name, case in CASES.items():
        tiny = tiny_case(name)
        if case.inner != EXACT:
            # Tensor cores keep about 14 bits of a sum of e4m3. Of 128 inputs that moves 1% of the codes between the
            # products to their neighbors, each 6 to 12% away, and few rows do not average it: 1.3 to 2.9% of a result,
            # measured. Of 4,096 inputs the sums are closer, as they are at full size.
            tiny = dataclasses.replace(tiny, hidden_size=4096, intermediate_size=256, sizes=(64,))
        monkeypatch.setitem(CASES, name, tiny)
    monkeypatch.setitem(machine_rates.READ_BYTES, "cuda", 64 * 2**20)
    monkeypatch.setitem(machine_rates.SQUARE, "cuda", 1024)
    files = tmp_path / "experts.json", tmp_path / "experts.png"
    options = ["--rounds", 3, "--out", files[0], "--plot", files[1]]
    done = call("bench", "experts", "--device", "cuda", *options)
    assert done.exit_code == 0, done.output
    document = Document.from_dict(json.loads(files[0].read_text()), "")
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert document.setup["read_TB_per_s"] > 0.1
    assert document.setup["plain_TFLOP_per_s"] > 1
    records = document.results
    measured = [(record.parameters["case"], record.parameters["weights"]) for record in records]
    assert measured == [(name, weights) for name, case in CASES.items() for weights in case.weights]
    for record in records:
        check_times(record)
        assert record.rested.median > 0
        assert record.details["relative_error"] < 6e-3
    assert records[0].details["peer"] == "F.grouped_mm"
    assert records[0].peers["torch"].median > 0
    shown = call("bench", "show", files[0])
    assert shown.exit_code == 0
    assert "torch: F.grouped_mm" in shown.stdout


def test_a_layer_is_measured_beside_an_allgather(tmp_path):
    out = tmp_path / "layer.json"
    shape = ["--hidden-size", 256, "--intermediate-size", 128, "--num-experts", 8, "--top-k", 2]
    options = [*shape, "--tokens", 8, "--tokens", 80, "--ranks", 2, "--rounds", 3, "--out", out]
    done = call("bench", "layer", "--weights", "bf16", "--weights", "fp8_block128", *options)
    assert done.exit_code == 0, done.output
    assert "0.875" in done.stdout
    records = Document.from_dict(json.loads(out.read_text()), "").results
    wholes = [record for record in records if record.parameters["measured"] == "whole layer"]
    assert [(record.details["wire"], record.parameters["tokens"]) for record in wholes] == [
        ("bf16", 8),
        ("bf16", 80),
        ("fp8_block128", 8),
        ("fp8_block128", 80),
    ]
    assert len(records) == 2 * len(wholes)
    for record in records:
        check_times(record)
        ratio = record.ratios["ours / allgather"]
        assert ratio.least <= ratio.median <= ratio.most
    for record in wholes:
        assert record.rested.median > 0
        assert max(record.details["relative_error"], record.details["allgather_relative_error"]) < 6e-3


def test_layers_of_models_are_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "V3", tiny_case("V3"))
    out = tmp_path / "layer.json"
    done = call("bench", "layer", "--cells", "V3", "--rounds", 3, "--out", out)
    assert done.exit_code == 0, done.output
    whole, rows = Document.from_dict(json.loads(out.read_text()), "").results
    for record in (whole, rows):
        check_times(record)
    assert whole.floor.median > rows.floor.median
