"""Start the ranks of a group, as threads or as processes, and bring back what they return.

    def main(group, greeting):
        return f"{greeting} from rank {group.rank} of {group.size}"

    launch(4, main, "hello", ranks="processes")

Processes come from a forkserver that has torch loaded: four ranks start in 0.1 s, where spawn needs 3.4 s.
They meet over loopback, at a port that the parent holds open. A rank that raises or dies ends the others'
waits (their connections close); `launch` raises the *first* error, with its rank, and leaves no process behind,
not even when the parent itself is killed.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from tokenyard.errors import InputError, RankError, shown
from tokenyard.group.base import DEFAULT_DEADLINE, check_deadline
from tokenyard.group.devices import MOST_THREADS_ON_CUDA, devices_of_ranks, rank_on
from tokenyard.group.hosts import hosts_of_ranks
from tokenyard.group.own_process import OwnProcess, end_forked_child
from tokenyard.group.process_ranks import ProcessLaunch, first_error, launch_processes, pickled_job
from tokenyard.group.threads import ThreadGroup, thread_groups

Result = TypeVar("Result")

# Seconds that threads get to end when `launch` is interrupted.
_INTERRUPTED = 0.5
# Seconds between two checks for an interrupt.
_LOOK = 0.5
# The most ranks, threads or processes, that `launch` starts on one machine.
_MOST_RANKS = 1024


def launch(
    world: int,
    fn: Callable[..., Result],
    *args: Any,
    ranks: Literal["threads", "processes"] = "threads",
    device: str | torch.device | None = None,
    deadline: float = DEFAULT_DEADLINE,
    threads_per_rank: int | None = None,
    replacements: int = 0,
    hosts: int | Sequence[int] = 1,
) -> list[Result]:
    """Run `fn(group, *args)` on every rank of a new group of `world` ranks; return the results in rank order.

    With `ranks="processes"`, `fn`, `args` and the results must be picklable, and a script that calls this
    needs the usual `if __name__ == "__main__":`. `threads_per_rank` sets torch's intra-op threads; by default
    the ranks share the machine's cores. `deadline` is the seconds that any single wait in the group may take.

    `device` is where the group's rows live: the CPU, or with `device="cuda"` a GPU. Threads share it, each on a
    stream of its own; processes get the GPUs in turn, and share them if there are more processes than GPUs.

    `replacements` is the number of times that a rank whose process dies is started anew. In the new process `fn` runs
    from its beginning, with a group that is made when the ranks that are left call `plan.readmit` (or `group.readmit`).

    `hosts` lets the ranks act as if they were on several hosts, which share no memory: a number of hosts with
    consecutive ranks, or a list of the ranks on each host, `hosts=[3, 1]`. It is for tests of code for several hosts.

    >>> launch(3, lambda group: sum(group.gather_json(group.rank)))
    [3, 3, 3]
    """
    on_machine = f"at least one rank, and at most {_MOST_RANKS} on one machine"
    _check_count("world", world, 1, on_machine, "pass world ≥ 1", most=_MOST_RANKS)
    deadline = check_deadline(deadline)
    if threads_per_rank is not None:
        shared = "leave it out: the ranks then share the machine's cores"
        _check_count("threads_per_rank", threads_per_rank, 1, "at least one thread", shared)
    anew = "how many ranks may be started anew: 0 or more"
    _check_count("replacements", replacements, 0, anew, "leave it out, for none")
    intra_op = threads_per_rank or max(1, (os.cpu_count() or 1) // world)
    if ranks == "threads" and replacements:
        raise InputError(
            f"{replacements} replacements for ranks that are threads",
            expected="ranks that are processes: threads do not die",
            fix="launch with ranks='processes', or start a thread that calls `rejoin`",
        )
    host_of_rank = hosts_of_ranks(hosts, world)
    if ranks == "threads":
        groups = thread_groups(world, device=device, deadline=deadline, hosts=hosts)
        return _launch_threads(groups, fn, args, intra_op)
    if ranks == "processes":
        launched = ProcessLaunch(
            devices=devices_of_ranks(device, world),
            job=pickled_job(fn, args),
            host_of_rank=host_of_rank,
            deadline=deadline,
            intra_op=intra_op,
        )
        return launch_processes(launched, replacements)
    raise InputError(f"ranks is {ranks!r}", expected="'threads' or 'processes'", fix="choose one of them")


def _check_count(
    name: str, value: object, least: int, expected: str, fix: str, most: float = math.inf
) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{name} is {shown(value)}", expected=expected, fix=fix)


def _launch_threads(
    groups: list[ThreadGroup], fn: Callable[..., Result], args: tuple[Any, ...], intra_op: int
) -> list[Result]:
    world = len(groups)
    if groups[0].device.type == "cuda" and world > MOST_THREADS_ON_CUDA:
        raise InputError(
            f"{world} threads on one GPU",
            expected=f"at most {MOST_THREADS_ON_CUDA}: torch has no more streams, and two ranks on one would wait "
            "for each other",
            fix="launch fewer ranks, or ranks='processes'",
        )
    results: dict[int, Result] = {}
    errors: list[tuple[int, BaseException]] = []
    intra_op_before = torch.get_num_threads()

    done, own_process = [threading.Event() for _ in range(world)], OwnProcess("launch")

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(intra_op)
            with rank_on(groups[rank].device):
                result = fn(groups[rank], *args)
                if not own_process.is_here:
                    end_forked_child(None)
                results[rank] = result
        except BaseException as error:
            if not own_process.is_here:
                end_forked_child(error)
            errors.append((rank, error))
            groups[rank].leave(f"it raised {type(error).__name__}: {error}")
        else:
            groups[rank].leave("it has returned")
        finally:
            done[rank].set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)
    ]
    try:
        for thread in threads:
            thread.start()
        for event in done:
            while not event.wait(_LOOK):  # without a limit, it would miss a signal that came just before
                continue
    except BaseException:  # Ctrl-C: end all ranks
        _end_threads([thread for thread in threads if thread.ident is not None], groups)
        raise
    else:
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(intra_op_before)
    if errors:
        rank, error = first_error(errors)
        raise RankError(rank, error) from error
    return [results[rank] for rank in range(world)]


def _end_threads(threads: list[threading.Thread], groups: list[ThreadGroup]) -> None:
    """End the threads of ranks: end their waits in the group, and raise `SystemExit` in the Python code that they run.

    A thread that is inside of an operation of torch ends only when the operation returns. It is waited for briefly.
    """
    for group in groups:
        group.leave("launch was interrupted")
    for thread in threads:  # the one exception that ends a thread without a traceback
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(cast("int", thread.ident)), ctypes.py_object(SystemExit)
        )
    until = time.monotonic() + _INTERRUPTED
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
