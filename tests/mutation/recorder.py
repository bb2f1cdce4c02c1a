"""A plugin of pytest that records which lines each test runs, how long it takes, and whether it starts processes.

    pytest -p tests.mutation.recorder    with MUTATION_RECORD=<folder>

Lines that run in other processes are not seen; that a test started some is.
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
