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

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from tokenyard.errors import InputError, PeerFailed, PeerLost, RankError, shown
from tokenyard.forkserver import start_forkserver
from tokenyard.group.base import DEFAULT_DEADLINE, Group, check_deadline
from tokenyard.group.devices import (
    MOST_THREADS_ON_CUDA,
    devices_of_ranks,
    let_ranks_share_a_gpu,
    prepare_process,
    rank_on,
    why_none_may_start,
)
from tokenyard.group.distributed import FINDING_EACH_OTHER, DistributedGroup, loopback_interface
from tokenyard.group.readmission import READMISSION, TCPStore, address_of, lineage_of
from tokenyard.group.rejoining import rejoin
from tokenyard.group.threads import thread_groups

Result = TypeVar("Result")

# Seconds that the other ranks get to notice an error and report, beyond the deadline of their waits.
_GRACE = 2.0
# Seconds between two looks whether all of this is still wanted.
_LOOK = 0.5
# Threads or processes that one machine is asked to start.
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
) -> list[Result]:
    """Run `fn(group, *args)` on every rank of a new group of `world` ranks; return the results in rank order.

    With `ranks="processes"`, `fn`, `args` and the results must be picklable, and a script that calls this
    needs the usual `if __name__ == "__main__":`. `threads_per_rank` sets torch's intra-op threads; by default
    the ranks share the machine's cores. `deadline` is the seconds that any single wait in the group may take.

    `device` is where the group's rows live: the CPU, or with `device="cuda"` a GPU. Threads share it, each on a
    stream of its own; processes are dealt the GPUs in turn, and share them where they are more.

    `replacements`: so many ranks whose process dies are started anew. In the new process `fn` runs from its beginning,
    with a group that is made when the ranks that are left call `plan.readmit` (or `group.readmit`).

    >>> launch(3, lambda group: sum(group.gather_json(group.rank)))
    [3, 3, 3]
    """
    if not isinstance(world, int) or not 1 <= world <= _MOST_RANKS:
        raise InputError(
            f"world is {shown(world)}",
            expected=f"at least one rank, and at most {_MOST_RANKS} on one machine",
            fix="pass world ≥ 1",
        )
    deadline = check_deadline(deadline)
    if threads_per_rank is not None and (not isinstance(threads_per_rank, int) or threads_per_rank < 1):
        raise InputError(
            f"threads_per_rank is {shown(threads_per_rank)}",
            expected="at least one thread",
            fix="leave it out: the ranks then share the machine's cores",
        )
    if not isinstance(replacements, int) or replacements < 0:
        raise InputError(
            f"replacements is {shown(replacements)}",
            expected="how many ranks may be started anew: 0 or more",
            fix="leave it out, for none",
        )
    intra_op = threads_per_rank or max(1, (os.cpu_count() or 1) // world)
    if ranks == "threads" and replacements:
        raise InputError(
            f"{replacements} replacements for ranks that are threads",
            expected="ranks that are processes: threads do not die",
            fix="launch with ranks='processes', or start a thread that calls `rejoin`",
        )
    if ranks == "threads":
        return _launch_threads(world, fn, args, device, deadline, intra_op)
    if ranks == "processes":
        devices = devices_of_ranks(device, world)
        return _launch_processes(fn, args, devices, deadline, intra_op, replacements)
    raise InputError(f"ranks is {ranks!r}", expected="'threads' or 'processes'", fix="choose one of them")


def _rank_error(rank: int, error: BaseException, report: str) -> RankError:
    summary = f"{type(error).__name__}: {error}"
    raised = RankError(
        f"rank {rank} raised {summary}",
        expected="every rank to return",
        fix="the error of that rank is the cause of this one",
        rank=rank,
    )
    if report:
        raised.add_note(f"On rank {rank}:\n{report}")
    return raised


def _launch_threads(
    world: int,
    fn: Callable[..., Result],
    args: tuple[Any, ...],
    device: str | torch.device | None,
    deadline: float,
    intra_op: int,
) -> list[Result]:
    groups = thread_groups(world, device=device, deadline=deadline)
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

    done = [threading.Event() for _ in range(world)]

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(intra_op)
            with rank_on(groups[rank].device):
                results[rank] = fn(groups[rank], *args)
        except BaseException as error:
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
            while not event.wait(_LOOK):  # a signal that comes just before a wait does not end it
                continue
    except BaseException:  # Ctrl-C: every rank's next wait ends, and nothing of this launch runs on
        for group in groups:
            group.leave("launch was interrupted")
        until = time.monotonic() + _GRACE
        for thread, event in zip(threads, done, strict=True):
            if thread.ident is not None and event.wait(max(0.0, until - time.monotonic())):
                thread.join()
        raise
    else:
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(intra_op_before)
    if errors:
        rank, error = _first_error(errors)
        raise _rank_error(rank, error, "".join(traceback.format_exception(error))) from error
    return [results[rank] for rank in range(world)]


def _first_error(errors: list[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """The first error that is not merely the echo of another rank's."""
    causes = [item for item in errors if not isinstance(item[1], (PeerLost, PeerFailed))]
    return (causes or errors)[0]


def _launch_processes(
    fn: Callable[..., Result],
    args: tuple[Any, ...],
    devices: list[torch.device],
    deadline: float,
    intra_op: int,
    replacements: int,
) -> list[Result]:
    store = _meeting_store(deadline)
    processes = _Processes(devices, store, deadline, intra_op, pickle.dumps((fn, args)))
    try:
        for rank in range(len(devices)):
            processes.start(rank)
        return processes.collect(replacements)
    finally:
        processes.end()
        del store  # or the traceback of an error would keep its sockets open


def _meeting_store(deadline: float) -> Any:
    """The store in which the ranks find each other, on loopback: by itself torch would listen to every network."""
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

    def __init__(
        self, devices: list[torch.device], store: Any, deadline: float, intra_op: int, job: bytes
    ) -> None:
        self._context = start_forkserver()
        self._devices, self._store, self._deadline = devices, store, deadline
        self._intra_op, self._job = intra_op, job
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def start(self, rank: int, *, fresh: bool = False) -> None:
        """Start a rank; a fresh one takes the place of one that was lost."""
        parent, child = self._context.Pipe()
        lineage = lineage_of("world", range(len(self._devices)))
        process = self._context.Process(
            target=_rank_main,
            args=(
                rank,
                self._devices,
                self._store.port,
                address_of(self._store, lineage) if fresh else None,
                self._deadline,
                self._intra_op,
                child,
                self._job,
                dict(os.environ),
            ),
            name=f"rank {rank}",
            daemon=True,
        )
        process.start()
        child.close()
        self._connections[rank], self._processes[rank] = parent, process

    def collect(self, replacements: int) -> list[Any]:
        """Wait for every rank's report. After the first error the others get their deadline to end, no longer."""
        results: dict[int, Any] = {}
        errors: list[tuple[int, BaseException, str]] = []
        waiting = set(self._connections)
        until: float | None = None
        while waiting and (until is None or time.monotonic() < until):
            ranks = {self._connections[rank]: rank for rank in waiting}
            for ready in wait(list(ranks), timeout=_LOOK):
                rank = ranks[cast("Connection", ready)]
                try:
                    outcome, value, report = _unpacked(self._connections[rank].recv_bytes(), rank)
                except (EOFError, OSError):  # before it reported, or in the midst of it
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
                    errors.append((rank, value, report))
                    until = until or time.monotonic() + self._deadline + _GRACE
        if errors:
            rank, error = _first_error([(r, e) for r, e, _ in errors])
            report = next(text for r, _, text in errors if r == rank)
            raise _rank_error(rank, error, report) from error
        return [results[rank] for rank in range(len(self._devices))]

    def _replace(self, rank: int) -> None:
        self._connections[rank].close()
        # Now, not in the end: in a night of losses the descriptors would run out.
        _end([self._processes.pop(rank)])
        self.start(rank, fresh=True)

    def end(self) -> None:
        """Let every process leave, and see it off."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(b"leave")
            connection.close()
        _end(list(self._processes.values()))
        self._store = None  # the traceback of an error holds this object, and must not hold its sockets


def _end(processes: list[Any]) -> None:
    """See every process off: it leaves by itself, or it is ended."""
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
    devices: list[torch.device],
    port: int,
    rejoins: str | None,
    deadline: float,
    intra_op: int,
    parent: Connection,
    job: bytes,
    environment: dict[str, str],
) -> None:
    """The life of one rank's process."""
    # The forkserver has that of the first launch.
    os.environ.clear()
    os.environ.update(environment)
    released = threading.Event()
    threading.Thread(target=_watch_parent, args=(parent, released), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its ranks
    torch.set_num_threads(intra_op)
    if (interface := loopback_interface()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        if devices[rank].type == "cuda":
            prepare_process()
            if len(set(devices)) < len(devices):
                let_ranks_share_a_gpu()
            torch.cuda.set_device(devices[rank])
        fn, args = pickle.loads(job)
        if rejoins is None:
            group = _find_each_other(rank, devices, port, deadline)
        else:
            group = rejoin(rejoins, rank=rank, device=devices[rank], seconds=max(deadline, READMISSION))
        outcome, report = "result", _packed(fn(group, *args), rank)
    except BaseException as error:
        outcome, report = "error", pickle.dumps(("error", _picklable(error), traceback.format_exc()))
    with contextlib.suppress(OSError):  # who launched this may have given up on it
        parent.send_bytes(report)
    if outcome == "result":
        released.wait()  # others may still read from this rank's connections: it stays until all have reported
    os._exit(0)


def _find_each_other(rank: int, devices: list[torch.device], port: int, deadline: float) -> Group:
    """The group of all ranks. Processes start one after the other: this may take longer than any wait later on."""
    timeout = timedelta(seconds=max(deadline, FINDING_EACH_OTHER))
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    here = [f"tokenyard/here/{other}" for other in range(len(devices))]
    store.set(here[rank], "")
    started = time.monotonic()
    try:
        store.wait(here)
    except RuntimeError as error:  # torch would say how many are missing, and not who
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
    """What a rank has reported: whether it is a result, that or its error, and the traceback."""
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
    """The error, or where it cannot travel to the parent, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _watch_parent(parent: Connection, released: threading.Event) -> None:
    """End this process when the parent is gone: its end of the pipe closes, however it ended.

    (The forkserver does not help: it lives as long as any of its children.)
    """
    try:
        parent.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    released.set()
