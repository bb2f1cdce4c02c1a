"""Where the ranks of a group keep their rows: on the CPU, or on GPUs, several ranks to one GPU where there are more.

Threads that wait for each other on one GPU must be able to run there at the same time. Two settings see to that, and
both are read when CUDA starts, so they are made before anything asks for a GPU:

- `CUDA_DEVICE_MAX_CONNECTIONS=32`: with the 8 queues of old, streams of different ranks stand behind each other.
- `CUDA_MODULE_LOADING=EAGER`: to load a kernel at its first use, CUDA may wait for all kernels that run. One that
  waits for the rank that loads would wait forever.

Ranks that are processes need neither, and are better off without: all kernels take seconds to load, and under MPS the
queues of all processes come out of one supply. With 32 for each, the fourth process does not get past its first call.

The same may happen where a thread needs more memory than torch holds for its stream, so some is set aside at its start.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenyard.errors import InputError

# Thread ranks have a stream each, and torch hands out 32 a device before it starts again with the first.
MOST_THREADS_ON_CUDA = 32

# Bytes: torch gets memory for pieces up to 1 MiB, and for larger ones, in segments of their own.
_SMALL_PIECE, _LARGE_PIECE = 1 << 19, 1 << 24

# Read by torch's symmetric memory, in each process.
OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_FOR_THREADS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
# Names those of them that nobody asked for but `prepare_threads`.
_SET_FOR_THREADS = "TOKENYARD_SET_FOR_THREADS"
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device that is meant, with its index. None is the CPU, `cuda` the current GPU.

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
    """A device as it is written, whether it is there or not."""
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
    """The device of each process of a host: `cuda` deals out the GPUs in turn, `cuda:0` is that one for all."""
    found = resolve_device(device)
    if found.type == "cpu" or _read(device).index is not None:
        return [found] * world
    return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(world)]


def prepare_threads(device: str | torch.device | None) -> None:
    """Make the settings under which kernels of several threads run at the same time, unless others were made."""
    if _read(device).type == "cuda" and not torch.cuda.is_initialized():
        missing = {name: value for name, value in _FOR_THREADS.items() if name not in os.environ}
        if missing:
            os.environ |= {**missing, _SET_FOR_THREADS: " ".join(missing)}


def warn_if_threads_may_wait_forever(device: torch.device) -> None:
    """Warn where CUDA was started before `prepare_threads` could make its settings, by whatever used a GPU before."""
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
    """A setting of the user's that may keep the process of a rank from starting CUDA; None where there is none."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device.type != "cuda" or name not in os.environ:
        return None
    return f"{name} is {os.environ[name]}: under MPS all processes share one supply of queues; leave it unset there"


def let_ranks_share_a_gpu() -> None:
    """Tell torch's symmetric memory that ranks share a GPU: it refuses otherwise, and cannot multicast there."""
    os.environ[OVERLAPPING_DEVICES] = "1"
    os.environ.setdefault(_NO_MULTICAST, "1")


def reserve_memory(device: torch.device, *, large_pieces: int = 4) -> None:
    """Let torch keep some memory for this stream: to get more, CUDA may wait for all kernels, waiting ones too."""
    sizes = [*[_SMALL_PIECE] * 16, *[_LARGE_PIECE] * large_pieces]
    pieces = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    del pieces


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
        yield
    stream.synchronize()  # whoever gets the result reads it on another stream
