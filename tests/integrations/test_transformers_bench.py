"""The benchmark against Transformers' own expert parallelism: it runs, compares equal things, and reports."""

import json
from importlib import import_module

import pytest
import torch
import transformers

from tests.cli.runner import call, call_json
from tokenyard.errors import InputError
from tokenyard.lab.bench.transformers_ep import (
    OLDEST_PEER,
    Workload,
    _compare,
    layouts,
    measure_transformers_ep,
)

TINY = Workload(
    ranks=2,
    hidden_size=64,
    intermediate_size=32,
    num_experts=4,
    top_k=2,
    num_layers=2,
    sequences=2,
    length=4,
    steps=2,
    rounds=2,
)
HAS_PEER = tuple(map(int, transformers.__version__.split(".")[:2])) >= OLDEST_PEER


def test_a_small_run():
    if not HAS_PEER:
        with pytest.raises(InputError, match=r"expected 5\.19 or newer"):
            measure_transformers_ep(TINY)
        return
    rows = measure_transformers_ep(TINY)
    assert [row["phase"] for row in rows] == ["prefill", "decode"]
    for row in rows:
        assert any(row["peer"].startswith(layout) for layout in layouts(2))
        assert row["difference"] < 0.1
        for name in ("ours", "peer", "peer_with_our_experts", "no_exchange"):
            assert row[f"{name}_ms"] > row["floor_ms"] > 0
        assert row["over_floor"] > 1
        assert 0 < row["peer_ratio_low"] <= row["peer_ratio"] <= row["peer_ratio_high"]


def test_different_models_are_noticed():
    logits = torch.randn(2, 5, 7)
    assert _compare(logits, logits) == 0
    with pytest.raises(InputError, match="differ from Transformers'"):
        _compare(logits, logits.flip(0))


@pytest.mark.skipif(not HAS_PEER, reason="an older Transformers is refused before its layout is")
def test_experts_that_transformers_cannot_split():
    with pytest.raises(InputError, match="choose 4 experts"):
        measure_transformers_ep(Workload(ranks=4, num_experts=6))


MEASURED = {
    "ours_ms": 10.0, "peer_ms": 20.0, "peer_ratio": 2.0, "peer_ratio_low": 1.9, "peer_ratio_high": 2.1,
    "peer_with_our_experts_ms": 15.0, "peer_with_our_experts_ratio": 1.5, "peer_with_our_experts_ratio_low": 1.4,
    "peer_with_our_experts_ratio_high": 1.6, "floor_ms": 5.0, "no_exchange_ms": 6.0, "ranks": 3,
    "peer": "dispatch, FSDP, eager",
    "hidden_size": 64, "intermediate_size": 32, "num_experts": 6, "top_k": 2, "num_layers": 1, "sequences": 2,
    "length": 4,
}  # fmt: skip


def test_the_command(monkeypatch, tmp_path):
    asked = []

    def measure(work):
        asked.append(work)
        return [MEASURED | {"phase": phase} for phase in ("prefill", "decode")]

    monkeypatch.setattr(
        import_module("tokenyard.lab.bench.transformers_ep"), "measure_transformers_ep", measure
    )
    arguments = [
        "bench",
        "transformers",
        "--ranks",
        3,
        "--num-experts",
        6,
        "--rounds",
        4,
        "--exchange",
        "two_sided",
    ]
    out = tmp_path / "figures.json"
    found = call_json(*arguments, "--out", out)
    assert json.loads(out.read_text()) == found
    assert found["versions"]["transformers"] == transformers.__version__
    assert asked[0] == Workload(ranks=3, num_experts=6, rounds=4, exchange="two_sided")
    shown = call(*arguments)
    assert shown.exit_code == 0
    for words in ("2.00 × (1.90 to 2.10)", "dispatch, FSDP, eager", "a token of each sequence"):
        assert words in shown.stdout
    assert "3 processes load the model" in shown.stderr
