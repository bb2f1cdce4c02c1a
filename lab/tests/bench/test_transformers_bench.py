"""The benchmark against Transformers' own expert parallelism: it runs, compares equal things, and reports."""

import json
from importlib import import_module

import pytest
import torch
import transformers

from tests.cli.runner import call, call_json
from tokenyard.errors import InputError
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.bench.transformers_ep import (
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


@pytest.mark.long  # all layouts, on processes that import Transformers; the command has its test below
def test_a_small_run():
    if not HAS_PEER:
        with pytest.raises(InputError, match=r"expected 5\.19 or newer"):
            measure_transformers_ep(TINY)
        return
    records = measure_transformers_ep(TINY)
    assert [record.parameters["phase"] for record in records] == ["prefill", "decode"]
    for record in records:
        assert any(record.details["peer"].startswith(layout) for layout in layouts(2))
        assert record.details["difference"] < 0.1
        floor = record.floor.median
        others = [record.details[f"{name}_ms"] for name in ("with our experts", "no exchange")]
        for time in (record.ours.median, record.peers["Transformers"].median, *others):
            assert time > floor > 0
        ratio = record.ratios["Transformers / ours"]
        assert 0 < ratio.low <= ratio.median <= ratio.high


def test_different_models_are_noticed():
    logits = torch.randn(2, 5, 7)
    assert _compare(logits, logits) == 0
    with pytest.raises(InputError, match="differ from Transformers'"):
        _compare(logits, logits.flip(0))


@pytest.mark.skipif(not HAS_PEER, reason="an older Transformers is refused before its layout is")
def test_experts_that_transformers_cannot_split():
    with pytest.raises(InputError, match="choose 4 experts"):
        measure_transformers_ep(Workload(ranks=4, num_experts=6))


MEASURED = Record(
    parameters={"phase": "decode"},
    ours=Spread(10.0),
    floor=Spread(5.0),
    peers={"Transformers": Spread(20.0)},
    ratios={"Transformers / ours": Spread(2.0, 1.9, 2.1)},
    details={"peer": "dispatch, FSDP, eager", "with our experts_ms": 15.0, "no exchange_ms": 6.0},
)


def test_the_command(monkeypatch, tmp_path):
    asked = []

    def measure(work):
        asked.append(work)
        return [MEASURED]

    monkeypatch.setattr(
        import_module("tokenyard_lab.bench.transformers_ep"), "measure_transformers_ep", measure
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
    for words in ("2.00 (1.90–2.10)", "dispatch, FSDP, eager", "a token of each sequence"):
        assert words in shown.stdout
    assert "3 processes load the model" in shown.stderr
