"""Which captured CUDA graphs are still alive: they use the addresses of a workspace, which must outlive them.

CUDA lets a graph hold a reference to a user object, and calls a function when the graph, and all that was
instantiated from it, is destroyed. The function here is the C library's `sem_post`: it may be called on any thread,
and does not need Python. So a semaphore counts the graphs that are gone. A graph may outlive the workspace and its
transport, so the memory of a semaphore that graphs refer to is never freed.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import torch

_SEMAPHORE_BYTES = 64  # more than any C library's sem_t
_MOVE = 1  # cudaGraphUserObjectMove: the graph takes over our reference
_NO_SYNC = 1  # cudaUserObjectNoDestructorSync

# The semaphores that graphs refer to, or did.
_semaphores: list[ctypes.Array[ctypes.c_byte]] = []


class CapturedGraphs:
    """Counts the graphs that were captured, and those that are gone."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._count = 0
        self._gone = (ctypes.c_byte * _SEMAPHORE_BYTES)()
        self._libc = ctypes.CDLL(None)
        self._libc.sem_init(self._gone, 0, 0)

    def note(self) -> None:
        """Count the graph into which the current stream is being captured, once."""
        runtime = _runtime()
        status, number, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        info = _capture_info(runtime)
        _check(
            info(stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None, None)
        )
        if number.value in self._noted:
            return
        self._noted.add(number.value)
        kept = ctypes.c_void_p()
        post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        _check(runtime.cudaUserObjectCreate(ctypes.byref(kept), self._gone, post, 1, _NO_SYNC))
        _check(runtime.cudaGraphRetainUserObject(graph, kept, 1, _MOVE))
        if self._count == 0:
            _semaphores.append(self._gone)
        self._count += 1

    def alive(self) -> int:
        """The number of graphs that can still be replayed."""
        gone = ctypes.c_int()
        self._libc.sem_getvalue(self._gone, ctypes.byref(gone))
        return self._count - gone.value


def _capture_info(runtime: ctypes.CDLL) -> Any:
    """`cudaStreamGetCaptureInfo` in its third version: CUDA 13 has it under the plain name, CUDA 12 as `_v3`."""
    try:
        return runtime.cudaStreamGetCaptureInfo_v3
    except AttributeError:
        return runtime.cudaStreamGetCaptureInfo


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found = re.search(r"\S*/libcudart\.so\S*", maps.read())
    if found is None:
        raise RuntimeError("torch has loaded no CUDA runtime")
    return ctypes.CDLL(found.group())


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the CUDA runtime answered with error {code}")
