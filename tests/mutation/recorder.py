"""A plugin of pytest that records which lines each test runs, how long it takes, and whether it starts processes.

    pytest -p tests.mutation.recorder    with MUTATION_RECORD=<folder>, and MUTATION_CASES=<number> if need be

Lines that run in other processes are not seen; that a test started some is. With a number of cases, each test function
runs with so many of its parameters, evenly chosen: enough to see most of its lines, where there is no time for all of
them. The names of the others are kept, too.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import coverage
import pytest


class _Recorder:
    def __init__(self, worker):
        self.folder = Path(os.environ["MUTATION_RECORD"])
        self.worker = worker
        self.tests = {}
        self.started = False
        self.measured = coverage.Coverage(
            data_file=str(self.folder / f"coverage.{worker}"), source=["src/tokenyard"], config_file=False
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        if most := int(os.environ.get("MUTATION_CASES", "0")):
            kept = set(chosen_cases([item.nodeid for item in items], most))
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
            others = [item.nodeid for item in items if item.nodeid not in kept]
            (self.folder / f"others.{self.worker}.json").write_text(json.dumps(others))
            items[:] = [item for item in items if item.nodeid in kept]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.measured.switch_context(item.nodeid)
        self.started, began = False, time.monotonic()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = {
                "seconds": round(time.monotonic() - began, 3),
                "processes": self.started,
                "passed": self.tests.get(item.nodeid, {}).get("passed", True),
            }
            self.measured.switch_context("")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tests.setdefault(report.nodeid, {})["passed"] = False

    def pytest_sessionfinish(self):
        self.measured.stop()
        self.measured.save()
        (self.folder / f"tests.{self.worker}.json").write_text(json.dumps(self.tests))


def chosen_cases(tests, most):
    """Of each test function, at most so many cases, from the first to the last at even distances."""
    cases = {}
    for test in tests:
        cases.setdefault(test.split("[")[0], []).append(test)
    for of_function in cases.values():
        number = min(most, len(of_function))
        yield from (
            of_function[place * (len(of_function) - 1) // max(1, number - 1)] for place in range(number)
        )


def pytest_configure(config):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    if worker == "main" and config.getoption("numprocesses", None):
        return  # the workers record
    recorder = _Recorder(worker)

    def noting(start):
        def started(*arguments, **settings):
            recorder.started = True
            return start(*arguments, **settings)

        return started

    subprocess.Popen.__init__ = noting(subprocess.Popen.__init__)
    os.posix_spawn = noting(os.posix_spawn)
    import multiprocessing.process

    multiprocessing.process.BaseProcess.start = noting(multiprocessing.process.BaseProcess.start)
    recorder.measured.start()
    config.pluginmanager.register(recorder)
