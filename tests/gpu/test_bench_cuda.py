"""`tokenyard bench` on a GPU, on tiny grids: checked, timed, saved and drawn."""

import json

import pytest

from tests.cli.runner import call
from tests.test_bench_experts_cuda import tiny_case
from tokenyard.lab.bench import machine_rates
from tokenyard.lab.bench.expert_figures import CASES

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
    document = json.loads(files[0].read_text())
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert document["benchmark"] == "dispatch-cuda"
    assert document["copy_TB_per_s"] > 0.1
    rows = document["results"]
    assert [(row["operation"], row["num_tokens"]) for row in rows] == [
        *[("dispatch", tokens) for tokens in (8, 8, 80, 80, 1024, 1024)],
        *[("round trip", 8)] * 2,
        ("combine", 1024),
        *[("dispatch", 8)] * 2,
        *[("round trip", 8)] * 2,
    ]
    assert [row["launch"] for row in rows] == ["one for all ranks"] * 9 + ["a stream per rank"] * 4
    for row in rows:
        assert row["note"] == ""
        assert 0 < row["us_min"] <= row["us_low"] <= row["us"] <= row["us_high"] <= row["us_max"]
        assert row["floor_ratio"] == pytest.approx(row["us"] / row["floor_us"])


def test_experts_of_every_format_are_measured(tmp_path, monkeypatch):
    for name in CASES:
        monkeypatch.setitem(CASES, name, tiny_case(name))
    monkeypatch.setattr(machine_rates, "READ_BYTES", 64 * 2**20)
    monkeypatch.setattr(machine_rates, "SQUARE", 1024)
    files = tmp_path / "experts.json", tmp_path / "experts.png"
    options = ["--rounds", 3, "--out", files[0], "--plot", files[1]]
    done = call("bench", "experts", "--device", "cuda", *options)
    assert done.exit_code == 0, done.output
    document = json.loads(files[0].read_text())
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert document["read_TB_per_s"] > 0.1
    assert document["bf16_TFLOP_per_s"] > 1
    rows = document["results"]
    assert [row["weights"] for row in rows] == ["bf16", "fp8_block128", "mxfp8", "mxint4", "nvfp4", "mxfp4"]
    for row in rows:
        assert row["note"] == ""
        assert 0 < row["us_min"] <= row["us_low"] <= row["us"] <= row["us_high"] <= row["us_max"]
        assert row["relative_error"] < 6e-3
    assert rows[0]["peer"] == "F.grouped_mm"
    assert rows[0]["peer_us"] > 0
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
    rows = json.loads(out.read_text())["results"]
    assert [(row["wire"], row["num_tokens"]) for row in rows] == [
        ("bf16", 8),
        ("bf16", 80),
        ("fp8_block128", 8),
        ("fp8_block128", 80),
    ]
    for row in rows:
        assert row["note"] == ""
        assert row["us"] > 0
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert max(row["relative_error"], row["allgather_relative_error"]) < 6e-3
