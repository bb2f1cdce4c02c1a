"""Processes that run tests of a copy of the repository: how they begin, and how they end."""

import gc
import json
import os
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
import pytest_timeout  # noqa: F401  (imported once here, not once for each mutant)


def run_pytest(folder, arguments, plugin):
    """Run pytest in this process, with the package and the tests of a folder, imported anew. Returns its exit code."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder / 'lab/src'}:{folder}"
    sys.path[:0] = [str(folder / "src"), str(folder / "lab/src"), str(folder)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "tokenyard")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # which processes of ranks would import
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.freeze()  # pytest collects garbage when it ends, and need not look at what was imported before
    unused = [word for name in ("cacheprovider", "xdist", "anyio") for word in ("-p", f"no:{name}")]
    options = ["-x", "-q", *unused, "--timeout", "120"]
    return int(pytest.main([*options, *arguments], plugins=[plugin]))


def lead_a_group(temporary):
    """Let whatever this process starts end with it, and use a folder of its own."""
    os.setsid()
    os.environ["TMPDIR"] = temporary
    tempfile.tempdir = None


def wait_and_end(child, seconds):
    """The exit code of a process; None if it has not ended in time. Whatever it started ends, too."""
    end, code = time.monotonic() + seconds, None
    while code is None and time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    try:
        os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
    except ProcessLookupError:
        pass  # it started nothing, or nothing that outlives it
    return code


class FirstFailure:
    """A plugin of pytest that keeps the name of the test that failed first in a folder."""

    folder = None

    def pytest_runtest_logreport(self, report):
        if report.failed and not (path := self._path()).exists():
            path.write_text(json.dumps(report.nodeid))

    pytest_collectreport = pytest_runtest_logreport  # a file that cannot be imported

    def _path(self):
        return Path(self.folder) / "first_failure.json"


def first_failure(folder):
    """The test that failed first; None if none did."""
    path = Path(folder) / "first_failure.json"
    return json.loads(path.read_text()) if path.exists() else None
