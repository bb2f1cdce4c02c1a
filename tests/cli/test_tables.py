"""Commands lose nothing in a narrow terminal, and break no word: each one's own tables and sentences."""

import json
import re
from pathlib import Path

import pytest
from rich.table import Table

from tests.checkpoints.small import Small, save
from tests.cli.narrow import check_it_fits, out_of, printed, words
from tests.cli.runner import MIXTRAL, call
from tokenyard.checkpoints import convert as convert_checkpoint
from tokenyard.checkpoints import open_checkpoint
from tokenyard.cli import check, doctor
from tokenyard.cli import convert as convert_command
from tokenyard.cli.tables import print_table
from tokenyard.conformance.campaign import Cell, CheckedPart
from tokenyard.conformance.draws import draw_cases
from tokenyard.conformance.suites import CheckResult
from tokenyard.exchange import EXCHANGES
from tokenyard.formats import FORMATS

MODEL = Small(num_experts=128, num_layers=3)

# --- The tables of all commands, printed -------------------------------------------------------------------


def plan(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_hidden_layers": 61}))
    return call("plan", "--config", tmp_path, "--ranks", 3, "--wire", "fp8_block128", "--max-tokens", 100_000)


def checkpoint(folder, monkeypatch):
    monkeypatch.chdir(folder)  # the path is printed
    return save(Path("model"), MODEL.tensors(), MODEL.config())


def inspect(tmp_path, monkeypatch):
    return call("inspect", checkpoint(tmp_path, monkeypatch))


def convert(tmp_path, monkeypatch):
    written = convert_checkpoint(open_checkpoint(checkpoint(tmp_path, monkeypatch)), "mxint4", "out")
    return printed(lambda: convert_command._show(written, 1.0))


def support(tmp_path, monkeypatch):
    return call("support")


def doctor_report(tmp_path, monkeypatch):
    findings = [
        doctor.Finding(
            section="exchanges", name=f"{name} on processes", ok=False, detail="PeerLost: " + "late " * 40
        )
        for name in EXCHANGES
    ]
    return printed(lambda: doctor._show(findings))


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


COMMANDS = [
    plan,
    inspect,
    convert,
    support,
    doctor_report,
    check_grid,
]


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_a_command_fits_and_shows_every_word_or_names_the_columns_that_are_left_out(
    command, columns, tmp_path, monkeypatch
):
    check_it_fits(command, columns, tmp_path, monkeypatch)


def test_a_table_of_support_stays_a_table_in_a_terminal_of_80_columns(tmp_path, monkeypatch):
    shown = out_of(support, tmp_path / "80", monkeypatch, 80)
    assert re.search(r"format +┃ bytes ┃ +allgather", re.sub(r" +┃ +", " ┃ ", shown))


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
