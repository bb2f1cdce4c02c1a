"""Commands lose nothing in a narrow terminal, and break no word: each one's own tables and sentences."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from lab.tests.bench.tile_sweep import COLUMNS, in_words
from tests.cli.runner import MIXTRAL, call
from tokenyard.checkpoints import convert as convert_checkpoint
from tokenyard.checkpoints import open_checkpoint
from tokenyard.cli import bench_output, check, doctor
from tokenyard.cli import convert as convert_command
from tokenyard.cli import eval as eval_command
from tokenyard.cli import run as run_command
from tokenyard.cli.tables import print_table
from tokenyard.conformance.campaign import Cell, CheckedPart
from tokenyard.conformance.draws import draw_cases
from tokenyard.conformance.suites import CheckResult
from tokenyard.exchange import EXCHANGES
from tokenyard.experts.fused.tile_configs import TileConfig
from tokenyard.formats import FORMATS
from tokenyard_lab.bench.machine_rates import Rates
from tokenyard_lab.bench.records import Document, Record, Spread
from tokenyard_lab.evaluation.intervals import Interval
from tokenyard_lab.evaluation.table import Row as EvalRow
from tokenyard_lab.shipped import shipped_model
from tokenyard_lab.soaking import Report, Settings
from tokenyard_lab.soaking.measuring import Sample
from tokenyard_lab.soaking.run_folder import Counts
from tokenyard_lab.soaking.verdict import Growth

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(name):
    return Document.from_dict(stored(name), name).results


# --- The tables of all commands, printed -------------------------------------------------------------------


def plan(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_hidden_layers": 61}))
    return call("plan", "--config", tmp_path, "--ranks", 3, "--wire", "fp8_block128", "--max-tokens", 100_000)


def inspect(tmp_path, monkeypatch):
    return call("inspect", shipped_model())


def convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = convert_checkpoint(open_checkpoint(shipped_model()), "mxint4", "out")
    return printed(lambda: convert_command._show(written, 1.0))


def support(tmp_path, monkeypatch):
    return call("support")


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


def doctor_report(tmp_path, monkeypatch):
    findings = [
        doctor.Finding(
            section="exchanges", name=f"{name} on processes", ok=False, detail="PeerLost: " + "late " * 40
        )
        for name in EXCHANGES
    ]
    return printed(lambda: doctor._show(findings))


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


def check_grid(tmp_path, monkeypatch):
    passed = [CheckResult(check=f"check_{number}", what="") for number in range(32)]
    pairs = [(exchange, ranks) for exchange in EXCHANGES for ranks in ("threads", "processes")]
    parts = [CheckedPart(kind="exchange", name=name, ranks=ranks, results=passed) for name, ranks in pairs]
    cells = [
        Cell(exchange=exchange, ranks=ranks, wire=wire, total=1111, passed=1111)
        for exchange, ranks in pairs
        for wire in [*FORMATS, "nvfp4(global_scale=448.0)"]
    ]
    parts += [CheckedPart(kind="format", name=name, results=passed) for name in FORMATS]
    cases = [case for _, case in draw_cases(40, 0, [(EXCHANGES["two_sided"], "bf16", "threads")])]
    return printed(lambda: check._show(check.console(), "cpu", parts, cells, cases))


def printed(function):
    """What a function prints, as a command's result has it."""
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [])


COMMANDS = [
    plan, inspect, convert, support, show_dispatch, show_experts, show_layer, bench_dispatch, bench_dispatch_paranoid,
    bench_experts, bench_encode, bench_transformers, bench_cuts_of_experts, doctor_report, run, evaluation, soak,
    check_grid,
]  # fmt: skip


def words(text):
    """All words, without the lines of tables."""
    return set(re.sub(r"[━─│┃┏┓┗┛┡┩╇┳┻┼╋├┤┬┴└┘┌┐]", " ", text).split())


def out_of(command, folder, monkeypatch, columns):
    folder.mkdir()
    monkeypatch.setenv("COLUMNS", str(columns))
    result = command(folder, monkeypatch)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_command_fits_and_shows_every_word_or_names_the_columns_that_are_left_out(
    command, columns, tmp_path, monkeypatch
):
    narrow = out_of(command, tmp_path / "narrow", monkeypatch, columns)
    wide = out_of(command, tmp_path / "wide", monkeypatch, 1000)
    assert max(map(len, narrow.splitlines())) <= columns
    # By itself it stands between the first and the last layer.
    assert "…" not in re.sub(r"(?<!\S)…(?!\S)", "", narrow)
    if "Left out for lack of width: " not in narrow:
        assert words(wide) - words(narrow) == set()


def test_a_table_of_support_stays_a_table_in_a_terminal_of_80_columns(tmp_path, monkeypatch):
    shown = out_of(support, tmp_path / "80", monkeypatch, 80)
    assert re.search(r"format +┃ bytes ┃ +allgather", re.sub(r" +┃ +", " ┃ ", shown))


def test_a_figure_stays_beside_its_unit(tmp_path, monkeypatch):
    shown = out_of(run, tmp_path / "80", monkeypatch, 80)
    assert len(re.findall(r"4\.0 GB +4\.0 GB", shown)) == 4  # out and back, of four layers


# --- How a table is made to fit ----------------------------------------------------------------------------


def shown(monkeypatch, columns, **options):
    """A table of three columns, whose words are 10 and 5 and 7 wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    table = Table(title="all")
    for heading in ("first", "second", "third"):
        table.add_column(heading)
    for number in range(3):
        table.add_row("exchange" + f"_{number}", "a b c d", f"x={number}.1234")
    return printed(lambda: print_table(table, **options)).stdout


def test_cells_wrap_before_anything_goes(monkeypatch):
    text = shown(monkeypatch, 34, less_needed=["third"])
    assert "Left out" not in text
    assert {"exchange_2", "third", "x=2.1234"} <= words(text)
    assert "a b c d" not in text
    assert "│" in text


def test_lines_between_columns_go_before_columns(monkeypatch):
    text = shown(monkeypatch, 26, less_needed=["third"])
    assert {"exchange_2", "third", "x=2.1234"} <= words(text)
    assert "│" not in text


def test_a_column_that_goes_is_named(monkeypatch):
    text = shown(monkeypatch, 20, less_needed=["no such column", "third", "first"])
    assert "x=2.1234" not in text
    assert "Left out for lack of width: third." in " ".join(text.split())
    assert {"exchange_2", "second"} <= words(text)


@pytest.mark.parametrize("less_needed", [[], ["second"]])
def test_a_table_that_cannot_fit_becomes_lists_of_all_columns(monkeypatch, less_needed):
    text = shown(monkeypatch, 18, less_needed=less_needed)
    assert text.count("first") == text.count("second") == 3
    assert {"exchange_0", "exchange_1", "exchange_2", "x=2.1234"} <= words(text)
    assert "Left out" not in text


def test_outside_of_a_terminal_a_table_is_as_wide_as_it_needs_to_be(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("word", "more")
    table.add_row("w" * 150, "m" * 150)
    assert "w" * 150 + " │ " + "m" * 150 in printed(lambda: print_table(table, less_needed=["more"])).stdout
