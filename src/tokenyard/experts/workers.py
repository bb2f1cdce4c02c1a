"""Runs several experts at a time on a CPU, one thread each, instead of all threads in every small operation.

Torch spreads each operation over its threads and waits for all of them at its end. Experts are a few hundred
small operations, so that is a few hundred waits; where other processes use the cores too, each wait may cost
a time slice. Measured for 64 experts with 64 rows each on 2 busy cores: 1.2 to 5.7 s with 2 threads in every
operation, 0.9 to 1.2 s with 2 experts at a time.

Experts are therefore distributed over a pool of as many threads as torch would use, and torch runs
single-threaded in each of them. The caller's `torch.get_num_threads()` is read at each call and not changed. Torch
keeps this number for each thread, but new threads start with the number that any thread set last; so it is set back
right after a pool was made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import torch

Item = TypeVar("Item")

# The pools by process id, since threads do not survive a fork, and by number of threads.
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def worth_sharing(counts: Iterable[int], threads: int) -> bool:
    """Whether experts with these numbers of rows keep all threads busy if each expert has one thread.

    >>> worth_sharing([60, 70, 65, 61], threads=2), worth_sharing([1000, 2, 2], threads=2), worth_sharing([], threads=2)
    (True, False, False)
    """
    counts = list(counts)
    return threads > 1 and 0 < max(counts, default=0) * threads <= sum(counts)


def for_each(function: Callable[[Item], object], items: Iterable[Item], threads: int) -> None:
    """Call `function` on every item, in `threads` threads; the first error is raised."""
    inference = torch.is_inference_mode_enabled()

    def call(item: Item) -> None:
        # Gradient modes are per thread, and tensors made in inference mode can only be written in inference mode.
        with torch.inference_mode(inference), torch.no_grad():
            function(item)

    def carry(item: Item) -> Callable[[], None]:
        # Copy the caller's context variables (the acting party, the open ledger) into the threads of the pool.
        return partial(copy_context().run, call, item)

    for _ in _pool(threads).map(lambda job: job(), map(carry, items)):
        pass


def _pool(threads: int) -> ThreadPoolExecutor:
    with _pools_lock:
        key = (os.getpid(), threads)
        if key not in _pools:
            _pools[key] = _new_pool(threads)
        return _pools[key]


def _new_pool(threads: int) -> ThreadPoolExecutor:
    before = torch.get_num_threads()
    all_started = threading.Barrier(threads)

    def start(_: int) -> None:
        torch.get_num_threads()  # a thread's first call resets its number to the global one: before it is set
        torch.set_num_threads(1)
        all_started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenyard-experts")
    list(pool.map(start, range(threads)))
    torch.set_num_threads(before)
    return pool


def _reset_lock() -> None:
    global _pools_lock  # noqa: PLW0603
    _pools_lock = threading.Lock()


# The child of a fork gets a new lock, because another thread of the parent may hold the old one.
os.register_at_fork(after_in_child=_reset_lock)
