"""The forkserver that process ranks come from: it has torch loaded, so that a rank starts in milliseconds.

Nothing heavy is imported here: a command can start the forkserver first and load torch itself meanwhile.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_PRELOAD = ["torch", "torch.distributed", "tokenyard.group.launch"]


def start_forkserver(*more: str) -> ForkServerContext:
    """Start the forkserver, if it is not running, and return its context. Does not wait for it.

    `more` are modules that it loads, too; they count if it is this call that starts it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *more])
    forkserver.ensure_running()
    return context
