"""Run a job on ranks that this command starts, or on the ranks that `torchrun` has started.

    started = StartedRanks(4, "processes")
    results = started.call(job, argument, on_message=print)

`job(group, argument, send)` runs on every rank and returns what JSON can hold. The messages that a rank sends while it
works reach `on_message` of the caller at once: they are lines of JSON through a socket in a private folder.
Under `torchrun` there is no process above the ranks, and `on_message` gets the messages of rank 0 only.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from tokenyard.errors import InputError
from tokenyard.group import DistributedGroup, Group, launch, thread_groups
from tokenyard.temporary_folders import temporary_folder

# Sends a message.
Send = Callable[[dict[str, Any]], None]
Job = Callable[..., Any]

# Seconds: a rank may load a large checkpoint, or answer with the whole model, while another waits for it.
DEADLINE = 300.0
# Seconds in which a rank that has returned closes its connection: at once, but for a machine that is very busy.
_CLOSING = 10.0


class Ranks(Protocol):
    """Ranks that do jobs together."""

    size: int
    leads: bool  # whether this process is the one that reports

    def call(self, job: Job, *args: Any, on_message: Send | None = None) -> list[Any]:
        """Run a job on every rank; return the results in rank order."""
        ...


class StartedRanks:
    """Processes or threads of this machine, started for each job."""

    leads = True

    def __init__(self, size: int, kind: str, *, device: str | None = None) -> None:
        if kind not in ("processes", "threads"):
            raise InputError(f"--kind {kind}", expected="processes or threads", fix="choose one of them")
        (group,) = thread_groups(1, device=device)  # raises where there is no such device
        if kind == "threads" and group.device.type != "cpu":
            raise InputError(
                f"--kind threads with --device {device}",
                expected="processes on a GPU: a thread whose model needs more memory waits for all kernels, and a "
                "kernel that waits for its rows waits for that thread",
                fix="use --kind processes; several of them may share a GPU",
            )
        self.size, self.device = size, device
        self.kind: Literal["processes", "threads"] = "threads" if kind == "threads" else "processes"

    def call(self, job: Job, *args: Any, on_message: Send | None = None) -> list[Any]:
        with _message_server(on_message, self.size) as address:
            return launch(
                self.size, _do, job, args, address, ranks=self.kind, device=self.device, deadline=DEADLINE
            )


class TorchrunRanks:
    """The ranks of `torchrun`, of which this process is one."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        gpus = torch.cuda.device_count()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        if not dist.is_initialized():
            # NCCL refuses two ranks on one GPU.
            dist.init_process_group("nccl" if gpus >= here else "gloo")
        self.group = DistributedGroup(device="cuda" if gpus else "cpu", deadline=DEADLINE)
        self.size, self.leads = self.group.size, self.group.rank == 0

    def call(self, job: Job, *args: Any, on_message: Send | None = None) -> list[Any]:
        send = on_message if on_message is not None and self.leads else _drop
        return self.group.gather_json(job(self.group, *args, send), phase="results")


def _drop(message: dict[str, Any]) -> None:
    """Drop a message."""


def _do(group: Group, job: Job, args: tuple[Any, ...], address: str | None) -> Any:
    """Run a job on one rank; its messages go to the socket at `address`, if there is one."""
    if address is None:
        return job(group, *args, _drop)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(address)

        def send(message: dict[str, Any]) -> None:
            line.sendall(json.dumps({"rank": group.rank, **message}).encode() + b"\n")

        return job(group, *args, send)


@contextmanager
def _message_server(on_message: Send | None, ranks: int) -> Iterator[str | None]:
    """The address of a socket for the messages of this number of ranks. When this ends, all messages were handled."""
    if on_message is None:
        yield None
        return
    one_at_a_time = threading.Lock()
    handle_message: Send = on_message
    read_to_the_end = threading.Semaphore(0)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                for line in self.rfile:
                    with one_at_a_time:
                        handle_message(json.loads(line))
            finally:
                read_to_the_end.release()

    class Server(socketserver.ThreadingUnixStreamServer):
        request_queue_size = 64  # all ranks may connect at once

    with temporary_folder("tokenyard-") as folder:
        address = str(folder / "messages")
        with Server(address, Handler) as server:
            serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            serving.start()
            try:
                yield address
            finally:  # also after an error: messages from before it are handled
                until = time.monotonic() + _CLOSING
                for _ in range(ranks):  # a rank may have connected and closed before it was accepted
                    read_to_the_end.acquire(timeout=max(0.0, until - time.monotonic()))
                server.shutdown()
                serving.join()
