"""The lab's commands lose nothing in a narrow terminal, and break no word: each one's own tables and sentences."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.tests.bench.tile_sweep import COLUMNS, in_words
from tests.cli.narrow import check_it_fits, out_of, printed
from tests.cli.runner import call
from tokenyard.experts.fused.tile_configs import TileConfig
from tokenyard_lab.bench.machine_rates import Rates
from tokenyard_lab.bench.records import Document, Record, Spread
from tokenyard_lab.cli import bench_output
from tokenyard_lab.cli import eval as eval_command
from tokenyard_lab.cli import run as run_command
from tokenyard_lab.evaluation.intervals import Interval
from tokenyard_lab.evaluation.table import Row as EvalRow
from tokenyard_lab.soaking import Report, Settings
from tokenyard_lab.soaking.measuring import Sample
from tokenyard_lab.soaking.run_folder import Counts
from tokenyard_lab.soaking.verdict import Growth

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(name):
    return Document.from_dict(stored(name), name).results


def show_dispatch(tmp_path, monkeypatch):
    return call("bench", "show", RESULTS / "dispatch-h200.json")


def show_experts(tmp_path, monkeypatch):
    return call("bench", "show", RESULTS / "experts-h200.json")


def show_layer(tmp_path, monkeypatch):
    return call("bench", "show", RESULTS / "layer-h200.json")


def bench_dispatch(tmp_path, monkeypatch):
    rows = measured("dispatch-cpu")
    monkeypatch.setattr("tokenyard_lab.bench.dispatch.measure_dispatch", lambda *_args, **_options: rows)
    return call("bench", "dispatch", "--wire", "bf16")


def bench_dispatch_paranoid(tmp_path, monkeypatch):
    rows = measured("paranoid-cpu")
    monkeypatch.setattr("tokenyard_lab.bench.dispatch.measure_dispatch", lambda *_args, **_options: rows)
    return call("bench", "dispatch", "--wire", "bf16", "--paranoid")


def bench_experts(tmp_path, monkeypatch):
    rows = iter(measured("experts-quantized-cpu"))
    rates = Rates(read=4.1e3, copy=7.4e3, product=1.2e5, fp8=None)
    monkeypatch.setattr("tokenyard_lab.bench.experts.measure_experts", lambda *_args, **_options: rows)
    monkeypatch.setattr("tokenyard_lab.bench.machine_rates.measure_rates", lambda *_: rates)
    return call("bench", "experts", "--weights", "mxint4", "--tokens", 1, "--tokens", 128)


def bench_encode(tmp_path, monkeypatch):
    rows = measured("encode-cpu")
    monkeypatch.setattr("tokenyard_lab.bench.encode.measure_encode", lambda *_: rows)
    return call("bench", "encode")


def bench_transformers(tmp_path, monkeypatch):
    rows = measured("transformers-cpu")
    monkeypatch.setattr("tokenyard_lab.bench.transformers_ep.measure_transformers_ep", lambda _: rows)
    return call("bench", "transformers")


def bench_cuts_of_experts(tmp_path, monkeypatch):
    config = in_words(TileConfig(128, 64, 64, 8, 4, 16, rows_first=True))
    record = Record(
        parameters={"case": "A", "weights": "fp8_block128", "size": 8192},
        ours=Spread(1289.0),
        floor=Spread(1267.0),
        details={"first_product": config, "second_product": config},
    )
    document = Document(benchmark="tiles-cuda", unit="µs", x="size", columns=COLUMNS, results=[record])
    return printed(lambda: bench_output.print_document(document))


def run(tmp_path, monkeypatch):
    layer = {
        "layer": "model.language_model.layers.60.mlp",
        "rounds": 12_345,
        "rows_sent": [10**6] * 4,
        "dispatch_bytes": [10**9] * 4,
        "combine_bytes": [10**9] * 4,
        "busiest_rank": 3,
        "imbalance": 1.25,
        **{name: [100.0] * 4 for name in ("dispatch_s", "experts_s", "combine_s")},
    }
    question = (
        "Mia has 34 pens. Tom gives her 27 more. She sells 11 of the pens. How many pens does Mia have now?"
    )
    answer = "34 + 27 : 4 7 1 , 3 2 6 = 61 ; 61 - 11 : 1 1 0 , 6 1 5 = 50 ; answer 50"
    answers = [{"answers": [(0, answer, 40)], "seconds": 1.0, "exchange": "one_sided", "layers": [layer] * 4}]
    where = SimpleNamespace(leads=True, size=4, call=lambda *_args, **_options: answers)
    monkeypatch.setattr(run_command, "start_ranks", lambda *_: where)
    return call("run", "--prompt", question)


def evaluation(tmp_path, monkeypatch):
    rows = []
    for row in stored("eval-cpu")["results"]:
        fields = {k: v for k, v in row.items() if k not in ("questions", "wrong")}
        fields["accuracy"] = Interval(**row["accuracy"])
        fields["difference"] = Interval(**row["difference"]) if row["difference"] else None
        rows.append(EvalRow(**fields, right=[True]))
    monkeypatch.setattr(eval_command, "start_ranks", lambda *_: SimpleNamespace(leads=True, size=4))
    monkeypatch.setattr(eval_command, "_run", lambda *_args, **_options: rows)
    return call("eval")


def soak(tmp_path, monkeypatch):
    document = stored("soak-cpu")
    report = Report(
        settings=Settings(ranks=4, kind="threads", seconds=60.0, exchanges=("two_sided",)),
        seconds=3600.0,
        counts=Counts(**document["counts"]),
        samples=[Sample(**document["samples"][-1])],
        growth={name: Growth(**growth) for name, growth in document["growth"].items()},
        findings=[],
    )
    monkeypatch.setattr("tokenyard_lab.soaking.soak", lambda *_: report)
    return call("soak", "--threads")


COMMANDS = [
    show_dispatch,
    show_experts,
    show_layer,
    bench_dispatch,
    bench_dispatch_paranoid,
    bench_experts,
    bench_encode,
    bench_transformers,
    bench_cuts_of_experts,
    run,
    evaluation,
    soak,
]


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_command_fits_and_shows_every_word_or_names_the_columns_that_are_left_out(
    command, columns, tmp_path, monkeypatch
):
    check_it_fits(command, columns, tmp_path, monkeypatch)


def test_a_figure_stays_beside_its_unit(tmp_path, monkeypatch):
    shown = out_of(run, tmp_path / "80", monkeypatch, 80)
    assert len(re.findall(r"4\.0 GB +4\.0 GB", shown)) == 4  # out and back, of four layers
