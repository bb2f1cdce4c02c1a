"""What the processes of a soak hold, as the kernel counts it in /proc (Linux only).

Memory is each process's anonymous memory (without a file behind it), plus its proportional share of shared memory.
Libraries are left out, because the share of a library changes when other processes of the machine load it. Pages that a
rank shares with the forkserver count for both: with proportional shares, memory would seem to grow for hours, while
ranks write to one page after the other and get copies of their own. It is measured while all ranks rest between two
episodes, after garbage is collected and the allocator's free memory is returned. What is left is in use.

Left to itself, glibc's allocator keeps freed memory between what is still in use, in a heap for each thread, and the
random sizes of a soak fragment them for an hour. So ranks set it to map every larger block by itself, and to use one
heap: freed memory then goes back to the machine. oneDNN, underneath torch, keeps what it has prepared for each shape of
a product: with random shapes that is half a megabyte for a hundred episodes. Ranks that are processes do without it.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from tokenyard.errors import InputError

_PROC = Path("/proc")
# Parameters of mallopt; and the bytes from which on a block is mapped by itself.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_SMALLEST_MAPPED = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All measured values at one moment. Memory in bytes."""

    seconds: float  # since the soak began
    episode: int
    memory: int  # of all processes
    lasting_memory: int  # of processes that live all along: launcher, forkserver, rank 0
    shared_memory: int  # anonymous files and /dev/shm, proportional shares
    descriptors: int
    sockets: int  # of the descriptors
    threads: int
    processes: int
    round_trips_per_s: float  # of the layers that are served all along
    device_memory: int | None  # in use on rank 0's GPU, by all processes


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one process holds."""

    memory: int
    shared_memory: int
    descriptors: int
    sockets: int
    threads: int


def check_measurable() -> None:
    """Raise if the kernel does not report the memory of a process."""
    rollup = _PROC / "self/smaps_rollup"
    if not rollup.exists() or "Pss_Shmem:" not in rollup.read_text():
        raise InputError(
            f"{rollup} does not say what a process holds",
            expected="Linux 5.4 or newer, where it does",
            fix="run the soak on such a machine",
        )


def let_freed_memory_go() -> None:
    """Make the allocator return freed memory to the machine, and turn off oneDNN, which caches by shape."""
    torch.backends.mkldnn.set_flags(_enabled=False)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED)
        libc.mallopt(_M_ARENA_MAX, 1)


def settle() -> None:
    """Collect garbage, and return the allocator's free memory to the machine."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def measure(
    root: int, *, seconds: float, episode: int, round_trips_per_s: float, device: torch.device
) -> Sample:
    """A sample of the process `root` and all its descendants. Called by rank 0, while the others rest."""
    parents = _parents()
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    tree, unseen = [], [root]
    while unseen:
        pid = unseen.pop()
        tree.append(pid)
        unseen += children[pid]
    lasting = {root, os.getpid(), *children[root]}
    held = {pid: one for pid in tree if (one := _held(pid)) is not None}
    return Sample(
        seconds=round(seconds, 3),
        episode=episode,
        **{field.name: sum(getattr(one, field.name) for one in held.values()) for field in fields(Held)},
        lasting_memory=sum(one.memory for pid, one in held.items() if pid in lasting),
        processes=len(held),
        round_trips_per_s=round(round_trips_per_s, 2),
        device_memory=_device_memory(device),
    )


def _parents() -> dict[int, int]:
    """The parent of every process of the machine."""
    found = {}
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            try:
                stat = (_PROC / entry.name / "stat").read_text()
            except OSError:
                continue  # it has just ended
            # The name is in parentheses, and may contain some itself.
            found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def _held(pid: int) -> Held | None:
    """What a process holds; None if it has just ended."""
    here = _PROC / str(pid)
    try:
        links = [_link(entry.path) for entry in os.scandir(here / "fd")]
        sizes = _sizes((here / "smaps_rollup").read_text())
        threads = len(os.listdir(here / "task"))
    except OSError:
        return None
    return Held(
        memory=sizes["Anonymous"] + sizes["Pss_Shmem"] + sizes["Swap"],
        shared_memory=sizes["Pss_Shmem"],
        descriptors=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        threads=threads,
    )


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed in this very moment
        return ""


def _sizes(rollup: str) -> defaultdict[str, int]:
    """The lines of a smaps_rollup, in bytes. A kernel without swap has no line of it."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for line in rollup.splitlines()[1:]:
        name, _, size = line.partition(":")
        sizes[name] = int(size.split()[0]) * 1024
    return sizes


def _device_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free
