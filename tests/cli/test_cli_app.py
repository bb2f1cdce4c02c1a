"""The command line as a whole: help, versions, errors, and what it imports before it knows what is asked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenyard
from tests.cli.runner import call
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


def test_a_bug_is_not_dressed_up_as_an_error_of_the_user():
    def broken(as_json: bool = False) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        reported(broken)(as_json=True)
