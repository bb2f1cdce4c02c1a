"""The measurement of experts runs, compares equal things, and reports what it promises."""

import sys

import pytest
import torch

from tokenyard.errors import InputError
from tokenyard.machine_rates import host_clock
from tokenyard_lab.bench.experts import GROUPED, measure_experts
from tokenyard_lab.bench.experts_peers import check_transformers, compare
from tokenyard_lab.bench.machine_rates import Machine, measure_rates
from tokenyard_lab.bench.shapes import Case, Cell

CPU = torch.device("cpu")


def measured(weights: str):
    shape = Case(
        hidden_size=64,
        intermediate_size=32,
        local_experts=8,
        num_experts=8,
        top_k=2,
        weights=(weights,),
        sizes=(24,),
        arrives=((weights, "bf16"),),
    )
    clock = host_clock(3)
    rates = measure_rates(CPU, clock)
    cell = Cell(case="", shape=shape, weights=weights, size=24)
    machine = Machine(device=CPU, name="cpu", clock=clock, rates=rates)
    (record,) = measure_experts([cell], kind=GROUPED, machine=machine)
    return record


@pytest.mark.parametrize(
    ("weights", "peer"),
    [("bf16", "Transformers"), ("mxfp4", "decoded first"), ("fp8_block128", "decoded first")],
)
def test_a_small_run(weights, peer) -> None:
    if peer == "Transformers":
        pytest.importorskip("transformers")
    record = measured(weights)
    assert record.note == ""
    assert record.parameters == {"weights": weights, "tokens": 24}
    ratio = record.ratios["peer / ours"]
    assert 0 < ratio.low <= ratio.median <= ratio.high
    assert record.ours.median > record.floor.median > 0
    assert list(record.peers) == [peer]
    assert record.details["difference"] < 0.02
    assert record.details["relative_error"] < 6e-3


def test_a_different_layer_is_noticed() -> None:
    x = torch.randn(5, 5)
    with pytest.raises(InputError, match=r"differs from that of the peer \(Transformers\)"):
        compare(x, x.flip(0), "Transformers")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("transformers.models.qwen3_moe")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers.models.qwen3_moe", None)
    with pytest.raises(InputError, match=r"transformers is not installed; .* pip install"):
        check_transformers()
