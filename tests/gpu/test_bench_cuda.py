"""`tokenyard bench dispatch --device cuda` on a tiny grid: checked, timed, saved and drawn."""

import json

import pytest

from tests.cli.runner import call

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
