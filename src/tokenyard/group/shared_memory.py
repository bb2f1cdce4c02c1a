"""Memory that the processes of one host share: anonymous files, which nobody can find and nothing has to remove.

Each rank makes a memfd (an anonymous file in memory), really allocates it (`posix_fallocate`: memory that is not
there is an error now, not a SIGBUS later), and tells the others its process and descriptor. They open it through
`/proc/<pid>/fd/<fd>`, which the kernel grants to the same user only, and map it. Then every descriptor is closed:
the memory lives as long as a mapping does, and is gone after `kill -9`, too. It has no name in /dev/shm, so nothing
can be squatted, and no limit of /dev/shm applies.

Traps of Python: `mmap.mmap` keeps a descriptor of its own, and `mmap.close()` under a live tensor is a crash, so the
kernel is asked directly, and a mapping goes with its last tensor; `multiprocessing.shared_memory` unlinks a segment
when an unrelated process exits, so it is not used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard.group.memory import too_much

if TYPE_CHECKING:
    from tokenyard.group.base import Group


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def share_between_processes(group: Group, nbytes: int) -> list[Tensor]:
    """One zeroed buffer per rank, mapped by all ranks. All or nothing."""
    group.all_or_none("sharing memory", too_much(nbytes, group.size))  # before any rank allocates
    mine, error = -1, None
    try:
        mine = os.memfd_create("tokenyard", os.MFD_CLOEXEC)
        os.fchmod(mine, 0o600)
        os.posix_fallocate(mine, 0, nbytes)
    except OSError as raised:
        error = f"{nbytes} bytes cannot be allocated ({raised.strerror or raised})"
    try:
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
        group.all_or_none("sharing memory", error)  # also: nobody closes before everybody has opened
        return buffers
    finally:
        if mine >= 0:
            os.close(mine)


def _map(pid: int, descriptor: int, inode: int, nbytes: int) -> Tensor:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if found.st_ino != inode or found.st_size < nbytes:  # beyond its end, a file cannot be mapped
            raise OSError(0, "another file stands there")
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, opened, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        mapped = (ctypes.c_ubyte * nbytes).from_address(address)
        # A tensor made of it keeps it alive. Not at exit: what still uses the memory then goes with it.
        weakref.finalize(mapped, _libc.munmap, address, nbytes).atexit = False
        return torch.frombuffer(mapped, dtype=torch.uint8)
    finally:
        os.close(opened)
