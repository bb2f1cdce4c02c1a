"""The forkserver that process ranks are forked from: it has torch and tokenyard loaded, so that ranks start quickly.

This module imports nothing heavy: a command can start the forkserver first, and load torch itself meanwhile.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any

from tokenyard.group.hosts import check_processes

_PRELOAD = [
    "torch",
    "torch.distributed",
    "tokenyard.group.launch",
    "tokenyard.planning.planner",
    "tokenyard.layer",
]
# The id of the process that started the forkserver. A child that was forked from that process sees another id.
_started_by: list[int] = []


def start_forkserver(*more: str) -> ForkServerContext:
    """Start the forkserver, if it is not running, and return its context. Does not wait for it.

    `more` are further modules for it to load; they are ignored if it is already running. Raises where ranks cannot be
    processes.
    """
    check_processes()
    if _started_by and _started_by != [os.getpid()]:
        _forget()
    _started_by[:] = [os.getpid()]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *more])
    # Ctrl-C at a terminal reaches every process there. The forkserver ignores it, but only once it has loaded all of
    # its modules. It is therefore started with the signal blocked, and its ranks inherit that.
    resource_tracker.ensure_running()  # before: starting the tracker unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def end_forkserver(seconds: float) -> None:
    """Kill the forkserver and the processes that came from it, and let none be started again.

    For a process that is about to end. If another thread is starting a process, wait for it, at most `seconds`.
    """
    if _started_by != [os.getpid()]:
        return
    server: Any = forkserver._forkserver
    server._lock.acquire(timeout=seconds)  # never released: nothing is started after this
    for child in multiprocessing.active_children():
        child.kill()
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
    process: Any = multiprocessing.current_process()
    folder = process._config.get("tempdir")  # Python's own, with the socket of the forkserver
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _forget() -> None:
    """Forget the forkserver that the parent process has started: this process needs one of its own."""
    theirs: Any = forkserver._forkserver
    if theirs._forkserver_alive_fd is not None:
        os.close(theirs._forkserver_alive_fd)  # the forkserver lives as long as a process holds this
    theirs.__init__()
