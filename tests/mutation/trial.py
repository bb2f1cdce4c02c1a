"""One mutant against its tests, in a process of its own."""

import json
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  (imported once here, not once for each mutant)
import pytest
import torch  # noqa: F401

_KEPT = (
    "src",
    "tests",
    "docs",
    "bench",
    "pyproject.toml",
    "README.md",
    "constraints.txt",
    "Makefile",
    "CONTRIBUTING.md",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, timed out, alive, or met by no test."""

    verdict: str
    test: str | None = None  # that killed it
    tests: int = 0  # that it met
    seconds: float = 0.0

    @property
    def lives(self):
        """Whether no test has noticed the mutant."""
        return self.verdict in ("alive", "met by no test")


class Checkout:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, root):
        self._folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        for name in _KEPT:
            if (source := Path(root) / name).is_dir():
                shutil.copytree(source, self._folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self._folder / name)

    def remove(self):
        shutil.rmtree(self._folder, ignore_errors=True)

    def meet(self, mutant, tests, seconds, reliable=frozenset()):
        """Run these tests with the mutant in place, at most for so long.

        What stops them must not happen without the mutant: a test that fails there, too, is left out. Tests that are
        `reliable` are not asked again.
        """
        while tests:
            outcome = self._run_changed(mutant, tests, seconds)
            if outcome.lives or outcome.test in reliable:
                return outcome
            failed = [test for test in tests if test == outcome.test or test.startswith(f"{outcome.test}::")]
            failed = failed or tests  # a crash, or no time left, names no test
            if self._run(failed, seconds).lives:
                return outcome
            tests = [test for test in tests if test not in failed]
        return Outcome("met by no test")

    def _run_changed(self, mutant, tests, seconds):
        path = self._folder / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            return self._run(tests, seconds)
        finally:
            path.write_text(source)

    def _run(self, tests, seconds):
        began = time.monotonic()
        temporary = tempfile.mkdtemp(prefix="mutant-")
        result = Path(temporary) / "result.json"
        child = os.fork()
        if child == 0:
            self._become_pytest(tests, temporary, result)
        code = _wait(child, began + seconds)
        _kill(child)  # and whatever it started
        test = json.loads(result.read_text()) if result.exists() else None
        shutil.rmtree(temporary, ignore_errors=True)
        verdict = "timed out" if code is None else "alive" if code == 0 else "killed"
        return Outcome(verdict, test, len(tests), round(time.monotonic() - began, 1))

    def _become_pytest(self, tests, temporary, result):
        """Never returns."""
        code = 1
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            os.chdir(self._folder)
            os.environ |= {"TMPDIR": temporary, "PYTHONPATH": f"{self._folder / 'src'}:{self._folder}"}
            tempfile.tempdir = None
            sys.path[:0] = [str(self._folder / "src"), str(self._folder)]
            for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "tokenyard")]:
                del sys.modules[name]
            sys.modules["__main__"] = types.ModuleType("__main__")  # which processes of ranks would import
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "120"]
            code = int(pytest.main([*options, *tests], plugins=[_FirstFailure(result)]))
        finally:
            os._exit(code)


class _FirstFailure:
    """Keeps the name of the test that failed."""

    def __init__(self, path):
        self._path = path

    def pytest_runtest_logreport(self, report):
        if report.failed and not self._path.exists():
            self._path.write_text(json.dumps(report.nodeid))

    def pytest_collectreport(self, report):
        if report.failed and not self._path.exists():
            self._path.write_text(json.dumps(report.nodeid))  # a file that cannot be imported


def _wait(child, end):
    """Its exit code; None if it has not ended in time."""
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def _kill(child):
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(child, 0)
    except ChildProcessError:
        return


# -- Several at a time ---------------------------------------------------------------------------------------------

_checkouts = []  # of a worker: one


def start_worker(root):
    """In each worker: a copy of the repository, which goes when the worker ends."""
    _checkouts.append(Checkout(root))
    multiprocessing.util.Finalize(None, _checkouts[0].remove, exitpriority=1)


def meet(trial):
    """A mutant, and what became of it, after so many tests at a time."""
    mutant, stages, reliable = trial
    outcome = Outcome("met by no test")
    for tests, seconds in stages:
        if tests and outcome.lives:
            outcome = _checkouts[0].meet(mutant, tests, seconds, reliable)
    return mutant, outcome
