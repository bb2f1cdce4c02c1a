"""The forkserver: it runs when it was started, Ctrl-C does not reach it, and nothing is left of it at the end."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tokenyard.group import forkserver

_SCRIPT = """
import json, multiprocessing, os, signal, time
from multiprocessing import forkserver, resource_tracker
from tokenyard.group import forkserver as ours

def blocked(pid):
    with open(f"/proc/{pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["SigBlk"], 16) >> signal.SIGINT - 1 & 1

def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"

ours._PRELOAD = []  # it would load torch
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
ours.end_forkserver(1.0)  # there is none
context = ours.start_forkserver()
server = forkserver._forkserver
first = server._forkserver_pid
tracker = resource_tracker._resource_tracker._pid is not None
again = ours.start_forkserver() is not None and server._forkserver_pid == first
folder = multiprocessing.current_process()._config["tempdir"]
told = {
    "kind": context.get_start_method(),
    "runs": first is not None and lives(first),
    "blocked": blocked(first),
    "tracker": tracker,
    "again": again,
    "mask": before == signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "folder": os.path.isdir(folder),
    "started by": ours._started_by == [os.getpid()],
}
rank = context.Process(target=signal.pause)
rank.start()
told["rank"] = lives(rank.pid)
ours.end_forkserver(1.0)
os.waitpid(first, 0)
until = time.monotonic() + 20
while lives(rank.pid) and time.monotonic() < until:
    time.sleep(0.01)
told["rank ended"] = not lives(rank.pid)
told |= {"ended": not lives(first), "gone": not os.path.exists(folder), "locked": server._lock.locked()}
print(json.dumps(told), flush=True)
os._exit(0)
"""


def test_it_runs_with_the_signal_blocked_and_ends_with_all_that_it_made():
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    told = json.loads(done.stdout)
    assert told.pop("kind") == "forkserver"
    assert told.pop("blocked") == 1
    assert told == dict.fromkeys(told, True), done.stderr


def test_a_child_lets_go_of_the_forkserver_of_its_parent(monkeypatch):
    """The forkserver lives as long as a process holds the other end of its pipe."""
    reading, writing = os.pipe()
    theirs = SimpleNamespace(_forkserver_alive_fd=writing)
    made_anew = []
    theirs.__init__ = lambda: made_anew.append(True)
    monkeypatch.setattr(forkserver.forkserver, "_forkserver", theirs)
    forkserver._forget()
    assert os.read(reading, 1) == b""  # nobody can write any more
    os.close(reading)
    theirs._forkserver_alive_fd = None
    forkserver._forget()
    assert made_anew == [True] * 2  # as one that has started nothing


@pytest.mark.parametrize(("started_by", "forgets"), [([], False), ([os.getpid], False), ([os.getppid], True)])
def test_a_process_takes_the_forkserver_that_it_has_started_and_no_other(started_by, forgets, monkeypatch):
    calls = []
    monkeypatch.setattr(forkserver, "_started_by", [number() for number in started_by])
    monkeypatch.setattr(forkserver, "_forget", lambda: calls.append("forgets"))
    monkeypatch.setattr(forkserver.forkserver, "ensure_running", lambda: calls.append("runs"))
    forkserver.start_forkserver()
    assert calls == ["forgets"] * forgets + ["runs"]
    assert forkserver._started_by == [os.getpid()]


def test_a_forkserver_of_which_nothing_is_there_can_be_ended(monkeypatch, tmp_path):
    """Somebody has removed its folder, its process has ended, or it was not started yet; its lock is taken anyway."""
    locks = []
    server = SimpleNamespace(
        _lock=SimpleNamespace(acquire=lambda **given: locks.append(given["timeout"])), _forkserver_pid=None
    )
    process = SimpleNamespace(_config={"tempdir": str(tmp_path / "gone")})
    monkeypatch.setattr(forkserver.forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver.multiprocessing, "current_process", lambda: process)
    monkeypatch.setattr(forkserver.multiprocessing, "active_children", list)
    monkeypatch.setattr(forkserver, "_started_by", [os.getpid()])
    forkserver.end_forkserver(0.5)
    server._forkserver_pid = 1 << 23  # above the largest number that Linux gives to a process
    process._config = {}
    forkserver.end_forkserver(0.25)
    monkeypatch.setattr(forkserver, "_started_by", [1])
    forkserver.end_forkserver(0.125)  # that of another process
    assert locks == [0.5, 0.25]
