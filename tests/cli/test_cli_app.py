"""The command line as a whole: help, versions, errors, and what it imports before it knows what is asked."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import tokenyard
from tests.cli.runner import call, call_json
from tokenyard.cli import output
from tokenyard.cli.output import reported
from tokenyard.errors import Alternative, PlanError, RankError

COMMANDS = ["check", "plan", "balance", "doctor", "support", "inspect", "convert"]
MODULES = sorted((Path(tokenyard.__file__).parent / "cli").glob("*.py"))
# Modules of the package that import nothing but the standard library.
LIGHT = ("errors", "units", "version")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command):
    assert command in call("--help").stdout
    assert call(command, "--help").exit_code == 0


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_shows_a_flag_by_its_name_alone_and_breaks_lines_only_where_they_are_full(command, monkeypatch):
    check_help(command, monkeypatch)


def check_help(command, monkeypatch):
    """Raise unless the help of a command is as wide as a terminal of 80 columns, and shows flags without a type."""
    monkeypatch.setenv("COLUMNS", "80")
    told = call(*command, "--help").stdout
    assert "bool" not in told.lower()
    assert re.search(r"--help +-h  ", told)
    prose = [line.strip() for line in told.split("╭")[0].splitlines()]
    for line, following in itertools.pairwise(prose):
        if line and following:  # the first word of the next line had no room in this one
            assert len(line) + 1 + len(following.split()[0]) > 78, line


def test_sentences_are_broken_between_words_and_keep_their_indentation(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    result = call("plan", "--config", "there_is_no_such_file.json", "--ranks", 2)
    assert result.stderr.splitlines() == [
        "error:",
        "there_is_no_such_file.json",
        "cannot be read (No such file",
        "or directory)",
        "  expected: the config.json of",
        "  a Hugging Face model, or its",
        "  folder",
        "  fix: check the path",
    ]


def test_version():
    assert call("--version").stdout.strip() == tokenyard.__version__


def outside(*arguments, **environment):
    """`python -m tokenyard` in another process."""
    return subprocess.run(
        [sys.executable, "-m", "tokenyard", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_as_a_module():
    assert outside("--version").stdout.strip() == tokenyard.__version__
    assert outside("-h").stdout.split()[:2] == ["Usage:", "tokenyard"]


def test_an_encoding_without_our_signs_is_no_error():
    done = outside("support", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bf16" in done.stdout


@pytest.mark.parametrize("wrong", [["fly"], ["plan"], ["plan", "--ranks", "two"]])
def test_wrong_usage_is_exit_code_2_and_says_so_on_stderr(wrong):
    result = call(*wrong)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["fly"], "'fly'"),
        (["--fly"], "--fly"),
        (["plan", "--config", "mix", "--ranks", 0], "--ranks"),
        (["plan", "--config", "mix", "--ranks", "two"], "--ranks"),
        (["plan", "--ranks", 2], "--config"),
        (["plan", "--fly"], "--fly"),
        (["inspect"], "path"),
    ],
)
def test_wrong_usage_with_json_is_one_document(wrong, words):
    check_wrong_usage(wrong, words)


def check_wrong_usage(wrong, words):
    """Raise unless wrong usage with `--json` gives one document, whose error has these words."""
    error = call_json(*wrong, exit_code=2)["error"]
    assert error["type"] == "InputError"
    assert words in error["found"].lower()
    assert "--help" in error["fix"]
    assert call(*wrong, "--json").stderr == ""


@pytest.mark.parametrize("wrong", [["plan", "--ranks", "two"], ["inspect", "nowhere"]])
def test_of_the_ranks_of_torchrun_one_prints_the_document(wrong, monkeypatch):
    monkeypatch.setattr(output, "_RANK_0_FIRST", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    assert call_json(*wrong, exit_code=2)["error"]
    monkeypatch.setenv("RANK", "3")
    other = call(*wrong, "--json")
    assert (other.exit_code, other.stdout) == (2, "")
    assert other.stderr.startswith("error: ")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_nothing_heavy_is_imported_before_a_command_runs(path):
    check_light(path)


def check_light(path):
    """Raise unless a module of commands imports typer, the standard library, the CLI and light modules alone."""
    light = ("typer", "typer.core", "__future__", *(f"tokenyard.{name}" for name in LIGHT))
    commands = ("tokenyard.cli", "tokenyard_lab.cli")
    heavy = [
        name
        for name in imported_at_the_top(path)
        if not (name.startswith(commands) or name.split(".")[0] in sys.stdlib_module_names or name in light)
    ]
    assert not heavy


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_the_standard_library_alone(name):
    path = Path(tokenyard.__file__).parent / f"{name}.py"
    assert all(found.split(".")[0] in sys.stdlib_module_names for found in imported_at_the_top(path))


def imported_at_the_top(path):
    found = []
    for node in ast.parse(path.read_text()).body:
        found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return found


def test_console_script_from_outside(tmp_path):
    """The real thing: another process, another folder, and an error that is no traceback."""
    script = "from tokenyard.cli import main; main()"
    source = str(Path(tokenyard.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "--config", "none.json", "--ranks", "2"],
        cwd=tmp_path,
        env={"PYTHONPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: none.json cannot be read (No such file or directory)",
        "  expected: the config.json of a Hugging Face model, or its folder",
        "  fix: check the path",
    ]


@pytest.mark.parametrize("command", [["check"], ["doctor"]])
def test_a_variable_that_overrides_the_exchange_is_refused(command, monkeypatch):
    check_an_override_is_refused(command, monkeypatch)


def check_an_override_is_refused(command, monkeypatch):
    """Raise unless a command refuses the variable: it would say that one exchange did what another one did."""
    monkeypatch.setenv("TOKENYARD_EXCHANGE", "allgather")
    result = call(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "TOKENYARD_EXCHANGE=allgather" in result.stderr
    assert "unset TOKENYARD_EXCHANGE" in result.stderr


def test_the_error_of_a_rank_is_shown_with_its_own_alternatives(capsys):
    def command(as_json: bool = False) -> None:
        cause = PlanError(
            "wire=fp32: takes float32 rows",
            expected="a layer that fits",
            layer="moe",
            rank=3,
            alternatives=[Alternative(changes={"wire": "bf16"})],
        )
        raise RankError(3, cause) from cause

    with pytest.raises(typer.Exit):
        reported(command)()
    assert capsys.readouterr().err.splitlines() == [
        "error: rank 3 raised PlanError: layer 'moe': wire=fp32: takes float32 rows",
        "  expected: a layer that fits",
        "  one of these works:",
        "    wire=bf16",
    ]
    with pytest.raises(typer.Exit):
        reported(command)(as_json=True)
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["rank"], error["layer"]) == ("RankError", 3, "moe")
    assert error["alternatives"] == [{"wire": "bf16"}]


def test_an_error_of_a_rank_that_is_not_ours_is_shown_with_its_traceback(capsys):
    def raises_on_its_rank(group):
        raise KeyError("a bug")

    def command() -> None:
        tokenyard.launch(1, raises_on_its_rank)

    with pytest.raises(typer.Exit):
        reported(command)()
    told = capsys.readouterr().err
    assert told.count("in raises_on_its_rank\n") == 1
    assert "error: rank 0 raised KeyError: 'a bug'\n" in told


def test_a_bug_is_not_dressed_up_as_an_error_of_the_user():
    def broken(as_json: bool = False) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        reported(broken)(as_json=True)
