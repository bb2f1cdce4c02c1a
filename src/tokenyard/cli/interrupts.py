"""Ctrl-C ends a command within a second, whatever it is doing: one line on stderr, exit code 130, nothing left.

Python would raise `KeyboardInterrupt` in the main thread. That is too late where the main thread is inside of a long
operation of torch, it does not reach the other threads (ranks may be threads), and leaving all blocks of the program
takes as long as the slowest of them waits. So a signal wakes a thread that does nothing else: it ends the processes
of the ranks, removes the temporary folders, writes one line to stderr, and ends this process.

This module is imported before anything that takes time, and imports nothing that does.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# What a terminal, a scheduler or a closed terminal sends. The exit code is 128 + the signal's number.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds for each step that might wait for another thread.
_PATIENCE = 0.2

_SHOW_CURSOR = "\x1b[?25h"

# At most one function, whose text on what was done so far is added to the line.
_describe: list[Callable[[], str]] = []


def end_on_interrupt() -> None:
    """Let signals end this process as described above. A signal that is ignored (`nohup`) stays ignored."""
    began = time.monotonic()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave_it_to_the_thread)
    threading.Thread(target=_wait_and_end, args=(reader, began), name="interrupts", daemon=True).start()


def describe_progress(describe: Callable[[], str]) -> None:
    """Add what `describe` returns, on what was done so far, to the line of an interrupted command.

    `describe` must return at once.
    """
    _describe[:] = [describe]


def _leave_it_to_the_thread(number: int, frame: Any) -> None:
    """Do nothing: the signal has woken the thread that ends the process."""


def _wait_and_end(reader: int, began: float) -> None:
    number = 0
    while number not in _SIGNALS:  # signals with other handlers wake this thread, too
        number = os.read(reader, 1)[0]
    try:
        _end_processes()
        folders = sys.modules.get("tokenyard.temporary_folders")
        if folders is not None:
            folders.remove_temporary_folders(_PATIENCE)
        _say(_line(number, time.monotonic() - began))
    finally:
        os._exit(128 + number)


def _end_processes() -> None:
    """End the processes of ranks, and the one that they come from. Nothing is imported: imports may be locked."""
    forkserver = sys.modules.get("tokenyard.group.forkserver")
    if forkserver is not None:
        forkserver.end_forkserver(_PATIENCE)


def _line(number: int, seconds: float) -> str:
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    try:
        done = "".join(describe() for describe in _describe)
    except Exception:  # it may be called at any moment
        done = ""
    return f"interrupted{by} after {seconds:.1f} s{': ' * bool(done)}{done}"


def _say(line: str) -> None:
    """Write to stderr without Python's locks, which another thread may hold. Of torchrun's ranks, rank 0 writes."""
    if os.environ.get("LOCAL_RANK") is not None and os.environ.get("RANK", "0") != "0":
        return
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]
    for stream in terminals:
        os.write(stream, _SHOW_CURSOR.encode())
    if select.select([], [2], [], _PATIENCE)[1]:  # writing to a full pipe would block this process
        os.write(2, ("\n" * (2 in terminals) + line + "\n").encode())
