"""The record of all benchmarks: JSON and back, the table, the summary; the clock of a CPU; options by device."""

import json
from pathlib import Path

import pytest

from tokenyard.errors import InputError
from tokenyard.machine_rates import host_clock
from tokenyard_lab.bench.overhead import measure_overhead
from tokenyard_lab.bench.records import Document, Record, Spread
from tokenyard_lab.cli.bench_options import OPTIONS, choose, default_of

RESULTS = Path(__file__).parents[3] / "bench" / "results"
FILES = [path for path in sorted(RESULTS.glob("*.json")) if "parameters" in path.read_text()]


def document(*records, unit="ms", **more):
    return Document(benchmark="any", unit=unit, x="tokens", results=list(records), **more)


def record(ours=10.0, **more):
    return Record(parameters={"tokens": 8}, ours=Spread(ours), **more)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_figures_are_read_and_written_as_they_are(path):
    stored = json.loads(path.read_text())
    assert Document.from_dict(stored, path.name).as_dict() == stored | {"columns": tuple(stored["columns"])}
    assert {"date", "hardware", "versions", "git_commit"} <= set(stored)


def test_every_benchmark_has_stored_figures():
    kinds = {json.loads(path.read_text())["benchmark"] for path in FILES}
    on_gpu = {"dispatch-cuda", "experts-cuda", "layer-cuda", "tiles-cuda", "overlap"}
    assert kinds == {
        "encode",
        "experts",
        "dispatch",
        "transformers",
        "combine-error",
        "overhead",
        "hosts",
        "balance",
        *on_gpu,
    }


def test_what_is_derived_and_what_was_measured_round_by_round():
    derived = document(record(floor=Spread(4.0), peers={"gloo": Spread(8.0)})).table()
    assert (derived["ours / floor"], derived["ours / best peer"]) == (["2.50"], ["1.25"])
    measured = document(record(floor=Spread(4.0), ratios={"ours / floor": Spread(2.4, 2.1, 2.8)})).table()
    assert measured["ours / floor"] == ["2.40 (2.10–2.80)"]
    assert "ours / best peer" not in measured


def test_of_rates_more_is_better():
    table = document(record(floor=Spread(40.0)), unit="MB/s").table()
    assert table["ceiling, MB/s"] == ["40.0"]
    assert table["ceiling / ours"] == ["4.00"]


def test_a_column_that_would_be_empty_is_left_out():
    both = document(record(target=9.0, details={"seen": 0.25, "hidden": 1}), record(), columns=("seen",))
    assert list(both.table()) == ["tokens", "ours, ms", "target", "met", "seen"]
    assert both.table()["met"] == ["no", ""]


def test_a_record_that_failed_has_no_time_and_is_named():
    failed = Record(parameters={"wire": "bf16", "tokens": 8}, note="ContractError: other bits")
    found = document(failed, notes=["a note"])
    assert found.table()["ours, ms"] == ["failed"]
    assert found.summary() == ["a note", "failed: bf16, tokens 8: ContractError: other bits"]


@pytest.mark.parametrize("broken", [{}, {"results": [{}]}, {"results": [{"parameters": {}}]}, {"more": 1}])
def test_what_is_no_document_is_refused(broken):
    whole = document(record()).as_dict()
    with pytest.raises(InputError, match=r"some\.json holds no finished benchmark"):
        Document.from_dict({**whole, **broken} if broken else {}, "some.json")


def test_the_clock_of_a_cpu_takes_turns_in_both_orders_and_goes_on_until_the_time_is_over():
    ran = []
    times = host_clock(2)({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")})
    assert ran == ["a", "b", "a", "b", "b", "a"]  # a first call of each, and two rounds
    assert all(len(found) == 2 and min(found) > 0 for found in times.values())
    assert len(host_clock(2, seconds=0.02)({"a": list})["a"]) > 2


def test_options_are_those_that_were_given_or_the_defaults_of_the_device():
    given = dict.fromkeys(OPTIONS["dispatch"]["cpu"]) | {"tokens": [7], "exchange": ["one_sided"]}
    on_cpu, on_gpu = (choose("dispatch", device, given) for device in ("cpu", "cuda"))
    assert (on_cpu.tokens, on_cpu.hidden_size, on_cpu.exchange) == ([7], 2048, ["one_sided"])
    assert (on_gpu.tokens, on_gpu.hidden_size, on_gpu.exchange) == ([7], 7168, ["one_sided"])
    with pytest.raises(InputError, match=r"--device tpu; expected cpu or cuda"):
        choose("dispatch", "tpu", given)


@pytest.mark.parametrize("command", OPTIONS)
def test_every_device_knows_all_options_of_its_command_and_says_why_one_is_refused(command):
    first, *others = (set(options) for options in OPTIONS[command].values())
    assert all(names == first for names in others)
    for options in OPTIONS[command].values():
        for name, option in options.items():
            refuses = option.default is None and not option.allows([object()])
            assert (option.expected and option.fix) or not refuses, name
    assert all(default_of(command, name) for name in first - {"plot", "quick", "paranoid"})


def test_what_one_rank_pays_is_measured_beside_experts_and_transformers():
    pytest.importorskip("transformers")
    (layer,), (model,) = measure_overhead(2)
    assert layer.ours.median > layer.floor.median > 0
    assert layer.target == pytest.approx(2 * layer.floor.median)
    assert model.target == pytest.approx(1.2 * model.peers["Transformers"].median)
    assert model.ratios["ours / Transformers"].median > 0
