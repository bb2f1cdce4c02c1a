"""Compiles Triton kernels side by side, in processes of their own, into Triton's cache on disk.

To compile a kernel takes one to six seconds, half of them in Python, so that threads would wait for each other. The
processes (`python -m tokenyard.kernel_compiler`) import no user code and never use a GPU: a driver without a device
tells Triton for which kind of GPU to compile. Each compiles the kernels that it is told on its standard input.

A file in Triton's cache notes that a set of kernels was compiled. Where it exists, no process is started.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenyard.gpu_kernels import RecordedLaunch

# The most processes. Each takes about 1 GB, and 4 s to start.
MOST_PROCESSES = 16
# Seconds after which progress is shown, and between two lines of a log.
SHOWN_AFTER, LOGGED_EVERY = 2.0, 10.0


def compile_side_by_side(launches: Sequence[RecordedLaunch], capability: tuple[int, int]) -> int:
    """Compile the kernels of these launches into Triton's cache; return how many, 0 if all of them were there."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    with _one_process_compiles(folder):
        note = folder / f"tokenyard-{_digest(launches, capability)}"
        if note.exists():
            return 0
        at_a_time = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(launches))
        jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for launch in launches:
            jobs.put(_pickled(launch))
        done = threading.Semaphore(0)
        threads = [
            threading.Thread(target=_feed, args=(jobs, done, capability), daemon=True)
            for _ in range(at_a_time)
        ]
        for thread in threads:
            thread.start()
        _show_progress(threads, done, len(launches))
        with suppress(OSError):
            note.touch()
    return len(launches)


def _feed(jobs: queue.SimpleQueue[bytes], done: threading.Semaphore, capability: tuple[int, int]) -> None:
    """Start a process, and let it compile one kernel after the other. What it cannot compile is left to the caller."""
    command = [sys.executable, "-m", "tokenyard.kernel_compiler", *map(str, capability)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, suppress(queue.Empty, OSError):
        while True:
            job = jobs.get_nowait()
            process.stdin.write(len(job).to_bytes(8, "little") + job)
            process.stdin.flush()
            if not process.stdout.readline():
                process.kill()
                return
            done.release()


def _show_progress(threads: Sequence[threading.Thread], done: threading.Semaphore, count: int) -> None:
    """Wait for the threads; say on a terminal, or else in the log, how many kernels are compiled."""
    start = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, start + SHOWN_AFTER - time.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return
    with _reporter(count) as report:
        finished = 0
        while any(thread.is_alive() for thread in threads):
            if done.acquire(timeout=0.5):
                finished += 1
                report(finished)


@contextmanager
def _reporter(count: int) -> Iterator[Callable[[int], None]]:
    text = "compiling GPU kernels (once, they are kept on disk)"
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(text, total=count)
            yield lambda finished: progress.update(task, completed=finished)
        return
    from tokenyard.gpu_kernels import _log

    last = [time.monotonic()]

    def log(finished: int) -> None:
        if time.monotonic() - last[0] >= LOGGED_EVERY:
            last[0] = time.monotonic()
            _log.info("%s: %d of %d", text, finished, count)

    yield log


@contextmanager
def _one_process_compiles(folder: Path) -> Iterator[None]:
    """A context that the first process of a host enters alone; the others enter it together once that one has left.

    They share a lock on a file in Triton's cache. Without such a file each process compiles for itself.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "tokenyard.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


def _digest(launches: Sequence[RecordedLaunch], capability: tuple[int, int]) -> str:
    """What tells a set of compiled kernels from every other one: sources, versions, constants and types."""
    from tokenyard.gpu_kernels import launch_key

    keys = sorted(
        repr(
            [(name, value.__name__ if hasattr(value, "arg_names") else value) for name, value in described]
            + [kernel.__module__, kernel.__name__]
        )
        for kernel, described in (launch_key(one.kernel, one.args, one.options) for one in launches)
    )
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("TRITON_"))
    digest = hashlib.sha256(repr((_sources(), torch.__version__, capability, settings, keys)).encode())
    return digest.hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """A digest of the sources of all kernels, with Triton's version."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for file in sorted(Path(__file__).parent.rglob("kernels/*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# -- From one process to the other -----------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles launches: kernels by name, and tensors without their numbers."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_aligned = value.data_ptr() % 16 == 0
            return _tensor, (value.dtype, tuple(value.shape), value.stride(), is_aligned)
        if hasattr(value, "arg_names") and hasattr(value, "warmup"):
            return _kernel, (value.__module__, value.__name__)
        return NotImplemented


def _pickled(launch: RecordedLaunch) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(launch)
    return file.getvalue()


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], is_aligned: bool) -> Tensor:
    """A tensor on the meta device, whose address is a multiple of 16 or not."""
    whole = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return whole if is_aligned else torch.empty(2, dtype=dtype, device="meta")[1:]


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class _NoGpu:
    """A driver for Triton that knows for which GPU to compile, and has none."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main() -> None:
    """Compile kernels for a GPU of the capability in the arguments, until the input ends; answer with a line each."""
    from triton.runtime import driver

    driver.set_active(_NoGpu((int(sys.argv[1]), int(sys.argv[2]))))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Triton prints
    while size := sys.stdin.buffer.read(8):
        job = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "little")))
        with suppress(Exception):  # the caller compiles it again, and raises the error
            job.compiled()
        answers.write(b"\n")
    os._exit(0)  # without looking for leaks


if __name__ == "__main__":
    main()
