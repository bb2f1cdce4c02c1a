"""The lab's commands as a whole: help, errors, and what they import before they know what is asked."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import tokenyard_lab
from tests.cli.runner import call
from tests.cli.test_cli_app import check_an_override_is_refused, check_help, check_light, check_wrong_usage
from tokenyard.cli import plugins
from tokenyard_lab.commands import COMMANDS

BENCHMARKS = ["encode", "experts", "dispatch", "layer", "transformers", "overhead", "combine-error", "hosts"]
BENCHMARKS += ["balance", "show"]
PACKAGE = Path(tokenyard_lab.__file__).parent
MODULES = [PACKAGE / "commands.py", *sorted((PACKAGE / "cli").glob("*.py"))]


def test_the_lab_has_the_commands_that_the_library_knows_of():
    assert sorted(COMMANDS) == sorted(plugins.LAB_COMMANDS)
    assert plugins.LAB.load() is COMMANDS


def test_the_entry_point_is_the_one_that_the_library_falls_back_to():
    import tomllib

    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][plugins.GROUP].items()
    assert EntryPoint(name=name, value=value, group=plugins.GROUP) == plugins.LAB


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command):
    assert command in call("--help").stdout
    assert call(command, "--help").exit_code == 0


@pytest.mark.parametrize(
    "command", [*([name] for name in COMMANDS), *(["bench", name] for name in BENCHMARKS)]
)
def test_help_shows_a_flag_by_its_name_alone_and_breaks_lines_only_where_they_are_full(command, monkeypatch):
    check_help(command, monkeypatch)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_nothing_heavy_is_imported_before_a_command_runs(path):
    check_light(path)


def test_a_benchmark_that_does_not_exist_is_wrong_usage():
    result = call("bench", "decode")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["bench", "decode"], "'decode'"),
        (["bench", "encode", "--tokens", "two"], "--tokens"),
    ],
)
def test_wrong_usage_with_json_is_one_document(wrong, words):
    check_wrong_usage(wrong, words)


@pytest.mark.parametrize("command", [["soak"], ["eval"], ["bench", "transformers"]])
def test_a_variable_that_overrides_the_exchange_is_refused(command, monkeypatch):
    check_an_override_is_refused(command, monkeypatch)


def test_a_forecast_that_balance_has_saved_is_drawn(tmp_path):
    saved, picture = tmp_path / "balance.json", tmp_path / "balance.svg"
    layer = {"layer": "moe", "rows_before": [6, 2], "rows_after": [4, 4], "before": 1.5, "after": 1.0}
    document = {"command": "balance", "ranks": 2, "replicas": 0, "steps": 2, "layers": [layer]}
    saved.write_text(json.dumps(document))
    assert call("bench", "show", saved, "--plot", picture).exit_code == 0
    assert "<svg" in picture.read_text()
    refused = call("bench", "show", saved)
    assert refused.exit_code == 2
    assert "--plot" in refused.stderr
