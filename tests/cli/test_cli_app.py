"""The command line as a whole: help, versions, errors, and what it imports before it knows what is asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenyard
from tests.cli.runner import call, call_json
from tokenyard.cli import output
from tokenyard.cli.output import reported

COMMANDS = ["run", "eval", "check", "plan", "doctor", "support", "inspect", "convert", "bench"]
MODULES = sorted((Path(tokenyard.__file__).parent / "cli").glob("*.py"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command):
    assert command in call("--help").stdout
    assert call(command, "--help").exit_code == 0


def test_version():
    assert call("--version").stdout.strip() == tokenyard.__version__


@pytest.mark.parametrize("wrong", [["fly"], ["plan"], ["plan", "--ranks", "two"], ["bench", "decode"]])
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
        (["bench", "decode"], "'decode'"),
        (["bench", "encode", "--tokens", "two"], "--tokens"),
    ],
)
def test_wrong_usage_with_json_is_one_document(wrong, words):
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
    """`--help` answers at once: at the top of a module only typer, the standard library and the CLI itself."""
    heavy = []
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            room = name.split(".")[0]
            ours = name.startswith("tokenyard.cli")
            if not (ours or room in sys.stdlib_module_names or room in ("typer", "__future__")):
                heavy.append(name)
    assert not heavy


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


@pytest.mark.parametrize("command", [["check"], ["soak"], ["eval"], ["doctor"], ["bench", "transformers"]])
def test_a_variable_that_overrides_the_exchange_is_refused(command, monkeypatch):
    """Each exchange would be told to have done what another one did."""
    monkeypatch.setenv("TOKENYARD_EXCHANGE", "allgather")
    result = call(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "TOKENYARD_EXCHANGE=allgather" in result.stderr
    assert "unset TOKENYARD_EXCHANGE" in result.stderr


def test_a_bug_is_not_dressed_up_as_an_error_of_the_user():
    def broken(as_json: bool = False) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        reported(broken)(as_json=True)
