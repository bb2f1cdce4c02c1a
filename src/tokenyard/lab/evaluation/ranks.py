"""Where a job is done: on ranks that this command starts, or on the ranks that `torchrun` has started.

    started = StartedRanks(4, "processes")
    results = started.call(job, argument, hear=print)

`job(group, argument, tell)` runs on every rank and returns what JSON can hold. What a rank tells while it works, the
one who called hears at once: lines of JSON through a socket in a folder that nobody else can enter. Under `torchrun`
there is nobody above the ranks: rank 0 hears itself.
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

Tell = Callable[[dict[str, Any]], None]
Job = Callable[..., Any]

# Seconds: a rank may load a large checkpoint, or answer with the whole model, while another waits for it.
DEADLINE = 300.0
# Seconds in which a rank that has returned hangs up: at once, but for a machine that is very busy.
_HANGING_UP = 10.0


class Ranks(Protocol):
    """Ranks that do jobs together."""

    size: int
    leads: bool  # whether this process is the one that reports

    def call(self, job: Job, *args: Any, hear: Tell | None = None) -> list[Any]:
        """Do a job on every rank; the results in rank order."""
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

    def call(self, job: Job, *args: Any, hear: Tell | None = None) -> list[Any]:
        with _listening(hear, self.size) as address:
            return launch(
                self.size,
                _do,
                job,
                args,
                address,
                ranks=self.kind,
                device=self.device,
                deadline=DEADLINE,
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

    def call(self, job: Job, *args: Any, hear: Tell | None = None) -> list[Any]:
        tell = hear if hear is not None and self.leads else _drop
        return self.group.gather_json(job(self.group, *args, tell), phase="results")


def under_torchrun() -> bool:
    """Whether this process is a rank that `torchrun` has started."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def _drop(message: dict[str, Any]) -> None:
    """Drop a message."""


def _do(group: Group, job: Job, args: tuple[Any, ...], address: str | None) -> Any:
    """Run a job on one rank; its messages go to the socket at `address`, if there is one."""
    if address is None:
        return job(group, *args, _drop)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(address)

        def tell(message: dict[str, Any]) -> None:
            line.sendall(json.dumps({"rank": group.rank, **message}).encode() + b"\n")

        return job(group, *args, tell)


@contextmanager
def _listening(hear: Tell | None, lines: int) -> Iterator[str | None]:
    """The address of a socket to which so many ranks send messages; all were heard when this ends."""
    if hear is None:
        yield None
        return
    one_at_a_time = threading.Lock()
    heard: Tell = hear
    read_to_the_end = threading.Semaphore(0)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                for line in self.rfile:
                    with one_at_a_time:
                        heard(json.loads(line))
            finally:
                read_to_the_end.release()

    class Server(socketserver.ThreadingUnixStreamServer):
        request_queue_size = 64  # all ranks may call at once

    with temporary_folder("tokenyard-") as folder:
        address = str(folder / "told")
        with Server(address, Handler) as server:
            serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            serving.start()
            try:
                yield address
            finally:  # also after an error: what was told before it is heard
                until = time.monotonic() + _HANGING_UP
                for _ in range(lines):  # a rank may have called and hung up before it was answered
                    read_to_the_end.acquire(timeout=max(0.0, until - time.monotonic()))
                server.shutdown()
                serving.join()
