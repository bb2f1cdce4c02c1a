"""Commands of other distributions: how they are found, and what is said where they are missing or broken."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tokenyard.cli import plugins
from tokenyard.cli.commands import COMMANDS
from tokenyard.cli.options import JSON_FLAG
from tokenyard.cli.output import Commands, print_json
from tokenyard.errors import InputError

others = typer.Typer()


@others.command()
def one(as_json: bool = JSON_FLAG) -> None:
    """One of several."""
    raise InputError("a mistake", expected="none", fix="make none")


@others.command()
def two() -> None:
    """The other."""


def weigh(as_json: bool = JSON_FLAG) -> None:
    """Weigh the rows."""
    print_json({"kg": 3})


TABLE = {"weigh": weigh, "others": others, "plan": weigh}


def app_with(monkeypatch, *points):
    """An application whose commands are `plan` and those of entry points; tokenyard-lab is not there."""
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    app = typer.Typer(cls=Commands)
    app.command()(COMMANDS["plan"])
    plugins.add_plugins(app, {"plan": COMMANDS["plan"]})
    return lambda *arguments: CliRunner().invoke(app, arguments)


def entry_point(value):
    return EntryPoint(name="scales", value=value, group=plugins.GROUP)


def test_a_distribution_adds_commands_and_applications(monkeypatch):
    call = app_with(monkeypatch, entry_point(f"{__name__}:TABLE"))
    shown = call("--help").stdout
    assert "Weigh the rows." in shown
    assert "others" in shown
    assert json.loads(call("weigh", "--json").stdout) == {"kg": 3}
    assert call("others", "two").exit_code == 0


def test_a_command_that_exists_is_not_replaced(monkeypatch, capsys):
    call = app_with(monkeypatch, entry_point(f"{__name__}:TABLE"))
    assert (
        capsys.readouterr().err == f"warning: the command plan of {__name__}:TABLE exists already: left out\n"
    )
    assert "wired" in call("plan", "--help").stdout


def test_a_distribution_that_cannot_be_imported_takes_no_other_command_along(monkeypatch, capsys):
    call = app_with(monkeypatch, entry_point("no_such_module:TABLE"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no commands of no_such_module:TABLE: ModuleNotFoundError: ")
    assert call("plan", "--help").exit_code == 0


@pytest.mark.parametrize("arguments", [[], ["--help"], ["dispatch", "--ranks", "4"]])
@pytest.mark.parametrize("command", plugins.LAB_COMMANDS)
def test_without_the_lab_its_commands_say_in_one_line_how_to_get_it(command, arguments, monkeypatch):
    done = app_with(monkeypatch)(command, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line == (
        f"error: `tokenyard {command}` is a command of tokenyard-lab, which is not installed: "
        "`pip install ./lab` in a checkout"
    )


def test_without_the_lab_its_commands_are_a_document_with_json_and_not_in_the_help(monkeypatch):
    call = app_with(monkeypatch)
    done = call("bench", "dispatch", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["fix"] == "`pip install ./lab` in a checkout"
    assert "bench" not in call("--help").stdout


def test_the_lab_is_found_on_the_path_without_being_installed(monkeypatch):
    app = app_with(monkeypatch)
    del app
    monkeypatch.setattr(plugins, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(
        plugins, "LAB", EntryPoint(name="lab", value=f"{__name__}:TABLE", group=plugins.GROUP)
    )
    found = typer.Typer(cls=Commands)
    plugins.add_plugins(found, {})
    assert json.loads(CliRunner().invoke(found, ["weigh", "--json"]).stdout) == {"kg": 3}
