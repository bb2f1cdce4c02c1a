"""Kernels are compiled and loaded before a call needs them: what is prepared, and how it is compiled."""

import fcntl
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from tokenyard.gpu_kernels import (
    Readiness,
    ReadyKernels,
    aligned,
    is_aligned,
    kernel_device,
    launch,
    recorded,
)
from tokenyard.kernel_compiler import _one_process_compiles

GPU = torch.device("cuda", 0)


def run(*arguments, **variables):
    """A program of its own, in which Triton compiles its kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment | variables,
        check=False,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("weights", "wire", "inner"),
    [
        ("bf16", "bf16", "exact"),
        pytest.param("fp8_block128", "fp8_block128", "fp8_block128", marks=pytest.mark.long),
        pytest.param("mxfp8", "mxfp8", "exact", marks=pytest.mark.long),
        ("mxfp4", "mxfp8", "fp8_block128"),
        pytest.param("nvfp4", "nvfp4", "exact", marks=pytest.mark.long),
        pytest.param("mxint4", "bf16", "exact", marks=pytest.mark.long),
    ],
)
def test_what_batches_of_any_size_launch_is_prepared(weights, wire, inner):
    found = run("-m", "tests.experts.recorded_launches", weights, wire, inner)
    assert found["unknown"] == []
    assert found["sizes"] > 100
    assert found["used"] >= 10
    # Neither fewer keys than Triton has, which would leave kernels out, nor more, which would compile some twice.
    assert found["keys of Triton"] == found["keys"]
    assert found["same again"]


COMPILE = """
import json, os, sys
from tests.experts import recorded_launches
recorded_launches.pretend_hopper()
import torch, triton
from tokenyard.experts.fused import launch
from tokenyard.gpu_kernels import recorded
from tokenyard.kernel_compiler import compile_side_by_side
ids_RK = torch.empty(4, 2, dtype=torch.int32, device="meta")
with recorded(torch.device("cuda", 0)) as recorder:
    for tile in (16, 32):
        launch.sort_on_device(ids_RK, 4, tile, early=True)
launches = list(recorder.launches.values())
first = compile_side_by_side(launches, (9, 0))
hits = []
triton.knobs.compilation.listener = lambda **given: hits.append(given["cache_hit"])
for one in launches:
    one.compiled()
again = compile_side_by_side(launches, (9, 0))
other = compile_side_by_side(launches[:1], (8, 9))
print(json.dumps([len(launches), first, hits, again, other]))
sys.stdout.flush()
os._exit(0)
"""


def test_kernels_are_compiled_side_by_side_into_tritons_cache(tmp_path):
    count, first, hits, again, other = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert count == first == 2
    assert hits == [True, True]
    assert again == 0
    assert other == 1  # for another GPU


def test_one_process_compiles_and_the_others_enter_together(tmp_path, monkeypatch):
    entered, leave, together = [], threading.Event(), threading.Barrier(2)
    waiting, flock = threading.Semaphore(0), fcntl.flock

    def noting(file, kind):
        if kind == fcntl.LOCK_SH:
            waiting.release()
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", noting)

    def rank(number):
        with _one_process_compiles(tmp_path):
            entered.append(number)
            if number == 0:
                leave.wait(20)
            else:
                together.wait(20)  # both others are inside

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    threads[0].start()
    while not entered:
        pass
    for thread in threads[1:]:
        thread.start()
        assert waiting.acquire(timeout=20)
    with open(tmp_path / "tokenyard.lock", "rb") as file, pytest.raises(BlockingIOError):
        flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert entered == [0]
    leave.set()
    for thread in threads:
        thread.join(20)
    assert sorted(entered) == [0, 1, 2]
    assert not together.broken


def test_without_a_folder_to_write_to_each_process_compiles(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with _one_process_compiles(blocked / "cache"):
        pass


def test_ready_kernels_do_nothing_on_cpus_and_nothing_twice(monkeypatch):
    from tokenyard import gpu_kernels

    ReadyKernels(torch.device("cpu")).add(lambda: pytest.fail("recorded on a CPU"))

    made, calls = [], []

    def make_ready(launches, device):
        made.append(list(launches))
        return Readiness(kernels=len(made[-1]))

    monkeypatch.setattr(gpu_kernels, "make_ready", make_ready)

    class Kernel:
        params = ()

    kernels, kernel = ReadyKernels(GPU), Kernel()

    def record(constant):
        calls.append(constant)
        launch(kernel, (1,), num_warps=constant)

    kernels.add(lambda: record(4), of="a layer")
    kernels.add(lambda: record(4), of="a layer")  # an equal one is not recorded again
    kernels.add(lambda: record(4))  # what is ready already is not made ready again
    kernels.add(lambda: record(8))
    assert calls == [4, 4, 8]
    assert [len(launches) for launches in made] == [1, 0, 1]
    assert str(kernels.readiness) == "2 kernels, ready in 0.0 s"


def test_tensors_on_meta_stand_for_the_gpu_while_launches_are_recorded():
    meta = torch.device("meta")
    assert kernel_device(meta) == meta
    with recorded(GPU):
        assert kernel_device(meta) == GPU
        assert kernel_device(torch.device("cpu")) == torch.device("cpu")


def test_tensors_that_start_elsewhere_are_copied():
    whole = torch.arange(64, dtype=torch.int32)
    assert aligned(whole) is whole
    for part in (whole[1:9], whole.view(8, 8)[:, :4]):
        assert not is_aligned(part)
        assert is_aligned(aligned(part))
        assert torch.equal(aligned(part), part)
