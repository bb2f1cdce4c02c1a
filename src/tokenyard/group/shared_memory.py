"""Memory that the processes of one host share: anonymous files, which have no name and need no cleanup.

Each rank makes a memfd (an anonymous file in memory), allocates its pages (`posix_fallocate`: if memory is short, this
is an error now, and not a SIGBUS later), and sends the others its process and descriptor. They open it through
`/proc/<pid>/fd/<fd>`, which the kernel grants to the same user only, and map it. Then every descriptor is closed:
the memory lives as long as a mapping does, and is freed even after `kill -9`. It has no name in /dev/shm that another
process could take first, and no limit of /dev/shm applies.

Memory that one rank fills and others may map later (`mappable_memory`, for weights) keeps its descriptor as long as
it is in use in the rank's process. Then its pages are freed, even if others still map them.

A process that is forked from a rank would share all of this. It gets memory of its own instead, at the same addresses:
for weights a copy that is made as it is written, for the rest zeros. What it writes or frees there reaches no rank.

Pitfalls of Python: `mmap.mmap` keeps a descriptor of its own, and `mmap.close()` under a live tensor is a crash. This
module therefore calls `mmap` of libc, and unmaps memory with its last tensor. `multiprocessing.shared_memory` is not
used, because it unlinks a segment when an unrelated process exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.group.hosts import lacking_for_processes
from tokenyard.group.memory import too_much

if TYPE_CHECKING:
    from tokenyard.group.base import Group


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
# Values of Linux on x86 and Arm, which Python 3.11 does not name.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def share_between_processes(group: Group, nbytes: int) -> list[Tensor]:
    """One zeroed buffer per rank, mapped by all ranks. If one rank fails, all raise."""
    group.all_or_none("sharing memory", too_much(nbytes, group.size))  # before any rank allocates
    error = None
    with contextlib.ExitStack() as closing:
        try:
            mine = _allocate(nbytes)
            closing.callback(os.close, mine)
        except OSError as raised:
            error = f"{nbytes} bytes cannot be allocated ({raised.strerror or raised})"
        group.all_or_none("sharing memory", error)
        where = {"pid": os.getpid(), "descriptor": mine, "inode": os.fstat(mine).st_ino}
        buffers: list[Tensor] = []
        for other in group.gather_json(where, phase="sharing memory"):
            try:
                buffers.append(_map(other["pid"], other["descriptor"], other["inode"], nbytes))
            except OSError as raised:
                error = (
                    error
                    or f"the memory of process {other['pid']} cannot be mapped ({raised.strerror or raised})"
                )
        group.all_or_none("sharing memory", error)  # also a barrier: all have opened before one closes
        return buffers


Address = dict[str, int]  # where other processes find the memory of a tensor

_descriptors: dict[int, int] = {}  # of mappable memory, by the address that it has in this process
_mapped: dict[int, int] = {}  # bytes of each mapping of this process, by its address


def mappable_memory(nbytes: int) -> Tensor:
    """Zeroed bytes that other processes of this host can map, too: see `address_of`.

    Where ranks cannot be processes, it is ordinary memory, which has no address.
    """
    if lacking_for_processes():
        return torch.zeros(nbytes, dtype=torch.uint8)
    descriptor = _allocate(nbytes)
    try:
        mapped = _mapping(descriptor, nbytes, mmap.MAP_POPULATE)  # page faults now, not during a move
    except OSError:
        os.close(descriptor)
        raise
    start = ctypes.addressof(mapped)
    _descriptors[start] = descriptor
    # It runs before the finalizer that unmaps the memory: the one that was registered last runs first.
    weakref.finalize(mapped, _give_back, start, nbytes).atexit = False
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _give_back(start: int, nbytes: int) -> None:
    """Free the pages. Processes that still map them read zeros from then on."""
    descriptor = _descriptors.pop(start, None)
    if descriptor is not None:  # in a forked process, the pages are those of its parent
        os.close(descriptor)
        _libc.madvise(start, nbytes, mmap.MADV_REMOVE)


def address_of(tensor: Tensor) -> Address | None:
    """The address by which other processes map a tensor; None if it is not in mappable memory, or not contiguous."""
    storage = tensor.untyped_storage()
    descriptor = _descriptors.get(storage.data_ptr())
    if descriptor is None or not tensor.is_contiguous():
        return None
    return {
        "pid": os.getpid(),
        "descriptor": descriptor,
        "inode": os.fstat(descriptor).st_ino,
        "size": storage.nbytes(),
        "start": tensor.data_ptr() - storage.data_ptr(),
    }


def map_memory(address: Address) -> Tensor:
    """Map the whole memory of which an address of another process (`address_of`) names a part, for reading only."""
    return _map(*(address[key] for key in ("pid", "descriptor", "inode", "size")))


def _allocate(nbytes: int) -> int:
    """The file descriptor of a new memfd with `nbytes` of zeroed memory."""
    descriptor = os.memfd_create("tokenyard", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(pid: int, descriptor: int, inode: int, nbytes: int) -> Tensor:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if found.st_ino != inode or found.st_size < nbytes:  # beyond its end, a file cannot be mapped
            raise OSError(0, "it is another file")
        return torch.frombuffer(_mapping(opened, nbytes), dtype=torch.uint8)
    finally:
        os.close(opened)


def _mapping(descriptor: int, nbytes: int, flags: int = 0) -> Any:
    """The bytes of a file in memory, mapped as long as this object lives. A tensor made of it keeps it alive."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, access, mmap.MAP_SHARED | flags, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapped = (ctypes.c_ubyte * nbytes).from_address(address)
    _mapped[address] = nbytes
    # Not at exit: something may still use the memory then, and the end of the process unmaps it anyway.
    weakref.finalize(mapped, _unmap, address, nbytes).atexit = False
    return mapped


def _unmap(address: int, nbytes: int) -> None:
    del _mapped[address]  # before: another thread may map memory at that address at once
    _libc.munmap(address, nbytes)


def _part_from_parent() -> None:
    """In a forked process, put memory of its own in the place of all that its parent shares with other ranks."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for address, nbytes in _mapped.items():
        descriptor = _descriptors.pop(address, None)
        if descriptor is None:
            _libc.mmap(address, nbytes, access, flags | mmap.MAP_ANONYMOUS, -1, 0)
        else:
            _libc.mmap(address, nbytes, access, flags, descriptor, 0)
            os.close(descriptor)


os.register_at_fork(after_in_child=_part_from_parent)
