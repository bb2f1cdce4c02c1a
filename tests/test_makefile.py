"""Targets of make say what they do while pip works, and are silent about what is done already."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.integrations.flashinfer.signatures import VERSION

ROOT = Path(__file__).resolve().parent.parent

# Stands for Python: `-m venv` makes an environment of programs that print nothing, but for tokenyard.
_PYTHON = """#!/bin/sh
if [ "$1" = --version ]; then echo "Python 3"; exit; fi
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\ncase "$*" in *"-m pip "*) ;; *) echo the job: "$@";; esac\\n' > "$3/bin/python"
    printf '#!/bin/sh\\necho the job: "$@"\\n' > "$3/bin/tokenyard"
    chmod +x "$3/bin/python" "$3/bin/tokenyard"
fi
"""


@pytest.fixture
def run(tmp_path):
    """Runs a target of make in a folder of its own, with a Python that installs nothing."""
    (tmp_path / "lab").mkdir()
    for name in (
        "Makefile",
        "pyproject.toml",
        "lab/pyproject.toml",
        "constraints.txt",
        "requirements-vllm.txt",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)

    def run(target: str = "run") -> list[str]:
        command = ["make", "--no-print-directory", target, f"PYTHON={python}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return run


def test_make_run_says_what_takes_its_time_and_only_once(run):
    *steps, job = run()
    assert job == "the job: run"
    assert len(steps) == 3
    assert steps[0].startswith("Making .venv")
    assert "torch" in steps[1]
    assert "a few minutes" in steps[1]
    assert "tokenyard-lab and transformers" in steps[2]
    assert run() == [job]


def test_make_run_vllm_has_an_environment_of_its_own(run):
    *steps, job = run("run-vllm")
    assert job == "the job: -m tests.vllm_engines"
    assert len(steps) == 2
    assert steps[0].startswith("Making .venv-vllm")
    assert "2 GB, a few minutes, once" in steps[1]
    assert run("run-vllm") == [job]


def test_make_test_latest_looks_for_newer_versions_each_time(run):
    first, *steps, job = run("test-latest")
    assert first.startswith("Making .venv-latest")
    assert job.endswith("the job: -m pytest -n 2 --dist worksteal")
    assert run("test-latest")[0] == next(step for step in steps if step.startswith("Installing the newest"))
    told = dry_run("test-latest")
    assert "--upgrade-strategy eager --editable '.[dev]'" in told
    assert "constraint" not in told
    assert "\n.venv-latest/\n" in (ROOT / ".gitignore").read_text()


def test_make_test_all_runs_what_make_test_leaves_out():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert '-m "not long"' in options["addopts"]
    assert any(marker.startswith("long: ") for marker in options["markers"])
    told, short = dry_run("test-all"), dry_run("test")
    assert told.splitlines()[-1] == f"{short.splitlines()[-1]} -m long"


def test_run_and_test_install_both_distributions():
    for target in ("run", "test"):
        told = dry_run(target, "--always-make")
        assert "--editable . --editable ./lab" in told


def dry_run(target, *options):
    command = ["make", "--dry-run", "--no-print-directory", *options, target]  # `make test` runs this, too
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_wheel_of_flashinfer_that_is_fetched_is_the_one_whose_signatures_are_stored():
    assert f" flashinfer-python=={VERSION}\n" in (ROOT / "Makefile").read_text()
