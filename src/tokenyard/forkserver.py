"""The forkserver that process ranks come from: it has torch loaded, so that a rank starts in milliseconds.

Nothing heavy is imported here: a command can start the forkserver first and load torch itself meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "tokenyard.group.launch"]
# The process that has started the forkserver, if one has: another, forked from it, has none of its own yet.
_started_by: list[int] = []


def start_forkserver(*more: str) -> ForkServerContext:
    """Start the forkserver, if it is not running, and return its context. Does not wait for it.

    `more` are modules that it loads, too; they count if it is this call that starts it.
    """
    if _started_by and _started_by != [os.getpid()]:
        _forget()
    _started_by[:] = [os.getpid()]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *more])
    forkserver.ensure_running()
    return context


def _forget() -> None:
    """Leave the forkserver of the process that this one was forked from: its children are not ours."""
    theirs: Any = forkserver._forkserver
    if theirs._forkserver_alive_fd is not None:
        os.close(theirs._forkserver_alive_fd)  # it lives as long as somebody holds this
    theirs.__init__()
