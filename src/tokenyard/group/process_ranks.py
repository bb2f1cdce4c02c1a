"""Ranks as processes of one machine: started from the forkserver, watched, and ended.

The ranks find each other over loopback, at a port that the parent holds open. Each rank sends its result or its error
to the parent through a pipe. A rank ends when the parent's end of the pipe closes, so that none outlives the parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist

from tokenyard.errors import InputError, PeerFailed, PeerLost, RankError, shown
from tokenyard.group.base import Group
from tokenyard.group.devices import let_ranks_share_a_gpu, prepare_process, why_none_may_start
from tokenyard.group.distributed import FINDING_EACH_OTHER, DistributedGroup
from tokenyard.group.forkserver import start_forkserver
from tokenyard.group.hosts import HOST_VARIABLE, check_processes, loopback_interface
from tokenyard.group.own_process import OwnProcess, end_forked_child
from tokenyard.group.readmission import READMISSION, TCPStore, address_of, group_key_of
from tokenyard.group.rejoining import rejoin

# Seconds that the other ranks get to notice an error and report, beyond the deadline of their waits.
_GRACE = 2.0
# Seconds between two checks for an interrupt.
_LOOK = 0.5


@dataclass(frozen=True, kw_only=True)
class ProcessLaunch:
    """What the processes of one launch have in common. It is sent to each of them."""

    devices: list[torch.device]  # by rank
    job: bytes  # the function of the ranks and its arguments, pickled
    host_of_rank: list[int]
    deadline: float
    intra_op: int  # threads that an operation of torch uses on a rank


def launch_processes(launched: ProcessLaunch, replacements: int) -> list[Any]:
    """Run the job of a launch on all its ranks; return the results. `replacements` processes may be started anew."""
    store = _meeting_store(launched.deadline)
    processes = _Processes(launched, store)
    try:
        for rank in range(len(launched.devices)):
            processes.start(rank)
        return processes.collect(replacements)
    except (KeyboardInterrupt, SystemExit):  # the caller was interrupted
        processes.kill()
        raise
    finally:
        processes.end()
        del store  # or the traceback of an error would keep its sockets open


def pickled_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function of the ranks and its arguments, pickled. Raises if ranks cannot be processes."""
    check_processes()
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None and getattr(fn, "__module__", None) == "__main__":
        found = f"fn is {shown(fn)}, defined in an interactive session"
    elif file is not None and getattr(main, "__spec__", None) is None and not os.path.exists(file):
        found = f"the program comes from {file}"  # Python reads it again in every process
    else:
        found = None
    if found is not None:
        raise InputError(
            found,
            expected="a function, and a program, that other processes can import",
            fix="write it into a file, or launch with ranks='threads'",
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:  # each class refuses in its own way
        name, value = _unpicklable(fn, args)
        raise InputError(
            f"{name} is {shown(value)}, which cannot be pickled ({type(error).__name__}: {error})",
            expected="what can be sent to other processes: functions and classes of a module, tensors, plain values",
            fix="define it at the top level of a module, with `def` or `class`, or launch with ranks='threads'",
        ) from error


def _unpicklable(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """The name and the value of the part of a job that cannot be pickled."""
    for number, part in enumerate((fn, *args)):
        try:
            pickle.dumps(part)
        except Exception:
            return ("fn" if number == 0 else f"argument {number} of fn"), part
    return "the arguments of fn", args


def first_error(errors: list[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """The first error that was not caused by another rank; if all were, the first of all."""
    causes = [item for item in errors if not isinstance(item[1], (PeerLost, PeerFailed))]
    return (causes or errors)[0]


def _meeting_store(deadline: float) -> Any:
    """The store in which the ranks find each other. It listens on loopback only; torch's default is every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    return TCPStore(
        *listener.getsockname(),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline),
        master_listen_fd=listener.detach(),  # the store closes it
    )


class _Processes:
    """The processes of a launch's ranks, and the pipes over which they report."""

    def __init__(self, launched: ProcessLaunch, store: Any) -> None:
        self._context = start_forkserver()
        self._launched, self._store = launched, store
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def start(self, rank: int, *, fresh: bool = False) -> None:
        """Start a rank; a fresh one takes the place of one that was lost."""
        parent, child = self._context.Pipe()
        group_key = group_key_of("world", range(len(self._launched.devices)))
        rejoins = address_of(self._store, group_key) if fresh else None
        process = self._context.Process(
            target=_rank_main,
            args=(rank, self._launched, self._environment(rank), self._store.port, rejoins, child),
            name=f"rank {rank}",
            daemon=True,
        )
        process.start()
        child.close()
        self._connections[rank], self._processes[rank] = parent, process

    def _environment(self, rank: int) -> dict[str, str]:
        """The environment of a rank's process: with the name of its host, if the ranks act as several hosts."""
        hosts = self._launched.host_of_rank
        return {**os.environ, **({HOST_VARIABLE: f"host {hosts[rank]}"} if len(set(hosts)) > 1 else {})}

    def collect(self, replacements: int) -> list[Any]:
        """Wait for every rank's report and return the results. After the first error, wait at most for the deadline."""
        results: dict[int, Any] = {}
        errors: list[tuple[int, BaseException]] = []
        waiting = set(self._connections)
        until: float | None = None
        while waiting and (until is None or time.monotonic() < until):
            ranks = {self._connections[rank]: rank for rank in waiting}
            for ready in wait(list(ranks), timeout=_LOOK):
                rank = ranks[cast("Connection", ready)]
                try:
                    outcome, value, report = _unpacked(self._connections[rank].recv_bytes(), rank)
                except (EOFError, OSError):  # the process died before it had sent its report
                    if replacements > 0:
                        replacements -= 1
                        self._replace(rank)
                        continue
                    self._processes[rank].join(1.0)
                    outcome, report = "error", ""
                    value = ProcessLookupError(
                        f"the process ended with exit code {self._processes[rank].exitcode}"
                    )
                waiting.remove(rank)
                if outcome == "result":
                    results[rank] = value
                else:
                    if report:
                        value.add_note(f"Traceback on rank {rank}:\n{report}")
                    errors.append((rank, value))
                    until = until or time.monotonic() + self._launched.deadline + _GRACE
        if errors:
            rank, error = first_error(errors)
            raise RankError(rank, error) from error
        return [results[rank] for rank in range(len(self._launched.devices))]

    def _replace(self, rank: int) -> None:
        self._connections[rank].close()
        # Now and not at the end of the launch: after many losses, file descriptors would run out.
        _end([self._processes.pop(rank)])
        self.start(rank, fresh=True)

    def kill(self) -> None:
        """Kill every process."""
        for process in self._processes.values():
            process.kill()

    def end(self) -> None:
        """Let every process end, and wait for it."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(b"leave")
            connection.close()
        _end(list(self._processes.values()))
        self._store = None  # the traceback of an error holds this object, and must not hold its sockets


def _end(processes: list[Any]) -> None:
    """Wait until every process has ended; kill those that do not end by themselves."""
    until = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def _rank_main(
    rank: int,
    launched: ProcessLaunch,
    environment: dict[str, str],
    port: int,
    rejoins: str | None,
    parent: Connection,
) -> None:
    """The main function of one rank's process. The ranks meet at `port`; a fresh one finds them at `rejoins`."""
    devices, deadline = launched.devices, launched.deadline
    # The forkserver still has the environment of the first launch.
    os.environ.clear()
    os.environ.update(environment)
    own_process = OwnProcess(f"rank {rank}")
    # Otherwise `launch` would not see this process end before the processes that it has forked.
    os.register_at_fork(after_in_child=parent.close)
    released = threading.Event()
    threading.Thread(target=_watch_parent, args=(parent, released), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends its ranks
    torch.set_num_threads(launched.intra_op)
    if (interface := loopback_interface()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        if devices[rank].type == "cuda":
            prepare_process()
            if len(set(devices)) < len(devices):
                let_ranks_share_a_gpu()
            torch.cuda.set_device(devices[rank])
        fn, args = pickle.loads(launched.job)
        if rejoins is None:
            group = _find_each_other(rank, devices, port, deadline)
        else:
            group = rejoin(rejoins, rank=rank, device=devices[rank], seconds=max(deadline, READMISSION))
        result = fn(group, *args)
        if not own_process.is_here:
            end_forked_child(None)
        outcome, report = "result", _packed(result, rank)
    except BaseException as error:
        if not own_process.is_here:
            end_forked_child(error)
        outcome, report = "error", pickle.dumps(("error", _picklable(error), _where_raised(error)))
    with contextlib.suppress(OSError):  # the parent may have ended
        parent.send_bytes(report)
    if outcome == "result":
        released.wait()  # stay until all ranks have reported: others may still read from this rank's connections
    os._exit(0)


def _find_each_other(rank: int, devices: list[torch.device], port: int, deadline: float) -> Group:
    """Wait for all ranks, and make their group. Processes start one by one: this may take longer than the deadline."""
    timeout = timedelta(seconds=max(deadline, FINDING_EACH_OTHER))
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    here = [f"tokenyard/here/{other}" for other in range(len(devices))]
    store.set(here[rank], "")
    started = time.monotonic()
    try:
        store.wait(here)
    except RuntimeError as error:  # torch says how many ranks are missing, not which
        missing = [other for other, key in enumerate(here) if not store.check([key])]
        waited = time.monotonic() - started
        lost = PeerLost(missing, phase="finding each other", waited=waited, rank=rank)
        if (hint := why_none_may_start(devices[rank])) is not None:
            lost.add_note(hint)
        raise lost from error
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(devices), timeout=timeout)
    return DistributedGroup(device=devices[rank], deadline=deadline)


def _packed(result: Any, rank: int) -> bytes:
    """A rank's result, as it travels to the parent."""
    try:
        return pickle.dumps(("result", result, ""))
    except Exception as error:
        raise _cannot_travel(result, error, rank) from error


def _unpacked(report: bytes, rank: int) -> tuple[str, Any, str]:
    """A rank's report: "result" or "error", the result or the error itself, and the traceback of an error."""
    try:
        outcome, value, text = pickle.loads(report)
    except Exception as error:
        return "error", _cannot_travel("what cannot be unpickled here", error, rank, write=str), ""
    return outcome, value, text


def _cannot_travel(
    result: Any, error: Exception, rank: int, write: Callable[[object], str] = repr
) -> InputError:
    return InputError(
        f"rank {rank} returned {shown(result, write=write)} ({type(error).__name__}: {error})",
        expected="a result that can be pickled: it comes from another process",
        fix="return tensors, and values of importable classes",
        rank=rank,
    )


def _picklable(error: BaseException) -> BaseException:
    """The error; if it cannot be pickled, a `RuntimeError` with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _where_raised(error: BaseException) -> str:
    """The traceback of an error without its last lines, the message: the error itself is sent, too."""
    report = traceback.TracebackException.from_exception(error)
    return "".join(report.format()).removesuffix("".join(report.format_exception_only())).rstrip()


def _watch_parent(parent: Connection, released: threading.Event) -> None:
    """End this process when the parent has ended: its end of the pipe closes then, however it ended.

    (The forkserver does not do this: it lives as long as any of its children.)
    """
    try:
        parent.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    released.set()
