"""The devices of the ranks of a group: the CPU, or GPUs, shared by several ranks where there are fewer GPUs than ranks.

Kernels of thread ranks that wait for each other on one GPU must be able to run there at the same time. This needs two
settings. CUDA reads them when it starts, so they are made before anything uses a GPU:

- `CUDA_DEVICE_MAX_CONNECTIONS=32`: with the default of 8 hardware queues, streams of different ranks share a queue,
  and one waits behind the other.
- `CUDA_MODULE_LOADING=EAGER`: to load a kernel at its first use, CUDA may wait for all running kernels. A kernel that
  waits for the rank that is loading would then wait forever.

Ranks that are processes need neither, and are better off without: loading all kernels takes seconds, and under MPS all
processes share one supply of queues. With 32 for each, the fourth process does not get past its first call.

Allocating GPU memory may wait for all running kernels, too. Each thread rank therefore reserves some memory for its
stream when it starts.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenyard.errors import InputError

# Each thread rank has a stream, and torch has a pool of 32 streams per device: the 33rd would be the first one again.
MOST_THREADS_ON_CUDA = 32

# Bytes of the pieces to reserve: torch's allocator keeps blocks of up to 1 MiB, and larger ones, in separate pools.
_SMALL_PIECE, _LARGE_PIECE = 1 << 19, 1 << 24

# Lets ranks share a GPU in torch's symmetric memory, which reads it in each process.
OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_FOR_THREADS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
# Holds the names of the variables above that `prepare_threads` has set, and not the user.
_SET_FOR_THREADS = "TOKENYARD_SET_FOR_THREADS"
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device with its index; raise if torch does not see it. None is the CPU, `cuda` the current GPU.

    >>> resolve_device(None)
    device(type='cpu')
    """
    found = _read(device)
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        gpus = f"{count} GPUs" if count else "no GPU"
        raise InputError(
            f"device is {str(device)!r}, and torch {torch.__version__} sees {gpus}",
            expected="a GPU that torch sees",
            fix="pass device='cpu', or see what `tokenyard doctor` says about CUDA",
        )
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def _read(device: str | torch.device | None) -> torch.device:
    """The device that an argument names, whether torch sees it or not; raise unless it is a CPU or a GPU."""
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise InputError(
            f"device is {str(device)!r}", expected="'cpu', 'cuda' or 'cuda:0'", fix="pass one of them"
        )
    return found


def devices_of_ranks(device: str | torch.device | None, world: int) -> list[torch.device]:
    """The device of each process of a host: `cuda` assigns the GPUs in turn, `cuda:0` is that one for all."""
    found = resolve_device(device)
    if found.type == "cpu" or _read(device).index is not None:
        return [found] * world
    return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(world)]


def prepare_threads(device: str | torch.device | None) -> None:
    """Make the settings with which kernels of several threads run at the same time, unless the user has set them."""
    if _read(device).type == "cuda" and not torch.cuda.is_initialized():
        missing = {name: value for name, value in _FOR_THREADS.items() if name not in os.environ}
        if missing:
            os.environ |= {**missing, _SET_FOR_THREADS: " ".join(missing)}


def warn_if_threads_may_wait_forever(device: torch.device) -> None:
    """Warn if something used a GPU, and so started CUDA, before `prepare_threads` could make its settings."""
    others = [f"{name}={value}" for name, value in _FOR_THREADS.items() if os.environ.get(name) != value]
    if device.type == "cuda" and torch.cuda.is_initialized() and others:
        warnings.warn(
            f"CUDA was started before the ranks, without {' and '.join(others)}: threads that share a GPU may wait for "
            "each other until the deadline; set that in the environment, or call `launch` before anything uses the GPU",
            RuntimeWarning,
            stacklevel=3,
        )


def prepare_process() -> None:
    """Undo the settings for threads in a process that serves one rank."""
    for name in os.environ.pop(_SET_FOR_THREADS, "").split():
        os.environ.pop(name, None)


def why_none_may_start(device: torch.device) -> str | None:
    """A hint that the user's `CUDA_DEVICE_MAX_CONNECTIONS` may keep processes from starting CUDA; None if unset."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device.type != "cuda" or name not in os.environ:
        return None
    return f"{name} is {os.environ[name]}: under MPS all processes share one supply of queues; leave it unset there"


def let_ranks_share_a_gpu() -> None:
    """Let torch's symmetric memory put several ranks on one GPU, without multicast, which such ranks do not have."""
    os.environ[OVERLAPPING_DEVICES] = "1"
    os.environ.setdefault(_NO_MULTICAST, "1")


def reserve_memory(device: torch.device, *, large_pieces: int = 4) -> None:
    """Fill torch's memory cache for this stream: a later allocation may wait for kernels that wait for this rank."""
    sizes = [*[_SMALL_PIECE] * 16, *[_LARGE_PIECE] * large_pieces]
    pieces = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    del pieces


# By GPU: how many threads of this process are ranks on it, those that act as ranks of other hosts included.
_threads: Counter[torch.device] = Counter()
_counting = threading.Lock()


def threads_on(device: torch.device) -> int:
    """How many threads of this process are ranks on a GPU now."""
    return _threads[device]


@contextmanager
def rank_on(device: torch.device) -> Iterator[None]:
    """Run a thread rank on its device, and there on its own stream."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        reserve_memory(device)
        with _counting:
            _threads[device] += 1
        try:
            yield
        finally:
            with _counting:
                _threads[device] -= 1
    stream.synchronize()  # the result is read on another stream
