"""One mutant against its tests, in a process of its own."""

import multiprocessing.util
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  (imported once here, not once for each mutant)
import torch  # noqa: F401

from tests.mutation import preloaded, processes

_KEPT = (
    "src",
    "lab",
    "tests",
    "conftest.py",
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
    """A copy of the repository in which one file at a time is changed.

    With `arguments` for pytest, the tests that these name are imported once, and mutants may meet them there.
    """

    def __init__(self, root, arguments=()):
        self._folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        self._failing = set()  # without any mutant
        for name in _KEPT:
            if (source := Path(root) / name).is_dir():
                shutil.copytree(source, self._folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self._folder / name)
        self._preloaded = preloaded.PreloadedTests(self._folder, arguments) if arguments else None

    def remove(self):
        if self._preloaded:
            self._preloaded.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def meet(self, mutant, tests, seconds, reliable=frozenset(), anew=True):
        """Run these tests with the mutant in place, at most for so long; `anew`: in a process that imports them.

        What stops them must happen again, and must not happen without the mutant: a test that fails there, too, or
        passes with it the second time, is left out. Tests that are `reliable` are not asked again.
        """
        if self._preloaded:  # the record may be of tests that have another name by now
            tests = [test for test in tests if test in self._preloaded.names]
        tests = [test for test in tests if test not in self._failing]
        while tests:
            outcome = self._run_changed(mutant, tests, seconds, anew)
            if outcome.lives or outcome.test in reliable:
                return outcome
            failed = [test for test in tests if test == outcome.test or test.startswith(f"{outcome.test}::")]
            failed = failed or tests  # a crash, or no time left, names no test
            unchanged = self._run(failed, seconds, anew)
            if unchanged.lives and not self._run_changed(mutant, failed, seconds, anew).lives:
                return outcome
            self._failing |= {unchanged.test} - {None}
            tests = [test for test in tests if test not in failed]
        return Outcome("met by no test")

    def _run_changed(self, mutant, tests, seconds, anew):
        path = self._folder / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            return self._run(tests, seconds, anew, changed=str(path))
        finally:
            path.write_text(source)

    def _run(self, tests, seconds, anew, changed=None):
        began = time.monotonic()
        temporary = tempfile.mkdtemp(prefix="mutant-")
        code = preloaded.UNCLEAR if anew else self._preloaded.run(changed, tests, seconds, temporary)
        if code == preloaded.UNCLEAR:
            code = self._run_anew(tests, seconds, temporary)
        test = processes.first_failure(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        verdict = "timed out" if code is None else "alive" if code == 0 else "killed"
        return Outcome(verdict, test, len(tests), round(time.monotonic() - began, 1))

    def _run_anew(self, tests, seconds, temporary):
        """The exit code of these tests in a process that imports them anew."""
        if (child := os.fork()) == 0:
            code = 1
            try:
                processes.lead_a_group(temporary)
                plugin = processes.FirstFailure()
                plugin.folder = temporary
                code = processes.run_pytest(self._folder, tests, plugin)
            finally:
                os._exit(code)
        return processes.wait_and_end(child, seconds)


# -- Several at a time ---------------------------------------------------------------------------------------------

_checkouts = []  # of a worker: one


def start_worker(root, arguments=()):
    """In each worker: a copy of the repository, which goes when the worker ends."""
    _checkouts.append(Checkout(root, arguments))
    multiprocessing.util.Finalize(None, _checkouts[0].remove, exitpriority=1)


def meet(trial):
    """A mutant, and what became of it, after so many tests at a time; in each of these ways, until it dies."""
    mutant, stages, reliable, ways = trial
    outcome = Outcome("met by no test")
    for way in ways:
        for tests, seconds in stages:
            if tests and outcome.lives:
                outcome = _checkouts[0].meet(mutant, tests, seconds, reliable, anew=way == "anew")
    return mutant, outcome
