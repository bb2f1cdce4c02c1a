"""Counting captured graphs, with a CUDA runtime that is a stand-in: a graph may go long after whoever counts it."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from tokenyard.exchange.transports.one_sided.cuda import graphs
from tokenyard.exchange.transports.one_sided.cuda.graphs import CapturedGraphs

_libc = ctypes.CDLL(None)


class Runtime:
    """What `CapturedGraphs` asks of CUDA. A graph that goes calls what it was given."""

    def __init__(self):
        self.capturing = 1
        self.kept = []

    def cudaStreamGetCaptureInfo_v3(self, stream, status, number, graph, *_):  # noqa: N802
        number._obj.value = self.capturing
        return 0

    def cudaUserObjectCreate(self, kept, argument, destroy, references, flags):  # noqa: N802
        self.kept.append((ctypes.addressof(argument), destroy.value))
        return 0

    def cudaGraphRetainUserObject(self, graph, kept, references, flags):  # noqa: N802
        return 0

    def destroy(self, place):
        address, function = self.kept[place]
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(function)(address)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(graphs, "_runtime", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=1))
    return made


def test_graphs_are_counted_once_each_and_until_they_are_gone(runtime):
    counted = CapturedGraphs()
    assert counted.alive() == 0
    counted.note()
    counted.note()
    assert counted.alive() == 1
    runtime.capturing = 2
    counted.note()
    assert counted.alive() == 2
    runtime.destroy(0)
    assert counted.alive() == 1
    runtime.destroy(1)
    assert counted.alive() == 0


def test_a_graph_that_outlives_its_workspace_posts_to_memory_that_is_still_there(runtime):
    counted = CapturedGraphs()
    counted.note()
    del counted
    gc.collect()
    address, _ = runtime.kept[0]
    assert address in [ctypes.addressof(semaphore) for semaphore in graphs._semaphores]
    runtime.destroy(0)
    posted = ctypes.c_int()
    _libc.sem_getvalue(ctypes.c_void_p(address), ctypes.byref(posted))
    assert posted.value == 1
