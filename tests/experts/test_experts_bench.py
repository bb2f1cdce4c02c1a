"""The measurement of experts runs, compares equal things, and reports what it promises."""

import sys

import pytest
import torch

from tokenyard.errors import InputError
from tokenyard.lab.bench.experts import compare, measure_experts
from tokenyard.lab.bench.quantized_experts import measure_quantized_experts

SMALL = {
    "num_tokens": 24,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_experts": 8,
    "top_k": 2,
    "rounds": 2,
}


def test_a_small_run() -> None:
    pytest.importorskip("transformers")
    row = measure_experts(**SMALL)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["ours_ms"] > row["floor_ms"] > 0
    assert row["difference"] < 0.02


def test_a_small_run_with_quantized_weights() -> None:
    row = measure_quantized_experts(**SMALL, weights="mxfp4")
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["ours_ms"] > row["floor_ms"] > 0
    assert row["memory_ratio"] <= 0.29
    assert row["difference"] < 0.02


def test_a_different_layer_is_noticed() -> None:
    x = torch.randn(5, 5)
    with pytest.raises(InputError, match="differs from Transformers'"):
        compare(x, x.flip(0), "Transformers'")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("transformers.models.qwen3_moe")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers.models.qwen3_moe.configuration_qwen3_moe", None)
    with pytest.raises(InputError, match=r"transformers is not installed; .* pip install"):
        measure_experts(**SMALL)
