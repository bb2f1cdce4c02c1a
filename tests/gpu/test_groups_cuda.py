"""Groups whose ranks share one GPU, as threads and as processes: collectives, and memory that all of them map."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch

import tokenyard as ty
from tokenyard.errors import GroupError, InputError, PeerFailed
from tokenyard.group.devices import MOST_THREADS_ON_CUDA, OVERLAPPING_DEVICES

pytestmark = pytest.mark.gpu

RANKS = 4
both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])


def on_gpu(fn, *args, ranks, world=RANKS, deadline=30.0):
    return ty.launch(world, fn, *args, ranks=ranks, device="cuda", deadline=deadline)


def _bytes(group, *shape, value):
    return torch.full(shape, value, dtype=torch.uint8, device=group.device)


def collectives(group):
    W, r = group.size, group.rank
    for _ in range(20):  # memory that is given away too early would show
        gathered = group.all_gather(_bytes(group, 50_000, value=r), phase="test")
        rows = group.all_gather_rows(_bytes(group, r, 3, value=r), list(range(W)), phase="test")
        outgoing = [torch.tensor([[r, w]] * w, dtype=torch.uint8).view(-1, 2) for w in range(W)]
        sent = torch.cat(outgoing).to(group.device)
        arrived = group.all_to_all_rows(sent, list(range(W)), [r] * W, phase="test")
        sent.fill_(99)
        assert gathered.cpu().tolist() == [[w] * 50_000 for w in range(W)]
        assert rows.tolist() == [[w] * 3 for w in range(W) for _ in range(w)]
        assert arrived.tolist() == [[w, r] for w in range(W) for _ in range(r)]
    none = _bytes(group, 0, 7, value=0)
    assert group.all_gather_rows(none, [0] * W, phase="test").shape == (0, 7)
    assert group.all_to_all_rows(none, [0] * W, [0] * W, phase="test").shape == (0, 7)
    group.barrier()
    values = group.gather_json({"rank": r})
    return {str(tensor.device.type) for tensor in (gathered, rows, arrived)}, values


@both_kinds
def test_collectives_bring_every_byte_to_the_gpu(ranks):
    expected = {"cuda"}, [{"rank": w} for w in range(RANKS)]
    assert on_gpu(collectives, ranks=ranks) == [expected] * RANKS


def bytes_of_the_cpu(group):
    with pytest.raises(InputError, match=r"on cpu; expected a vector of uint8 on cuda:0"):
        group.all_gather(torch.zeros(3, dtype=torch.uint8), phase="test")
    return group.gather_json("still here")


@both_kinds
def test_bytes_of_the_cpu_are_refused(ranks):
    assert on_gpu(bytes_of_the_cpu, ranks=ranks, world=2) == [["still here"] * 2] * 2


def write_into_every_buffer(group, nbytes):
    buffers = group.share_memory(nbytes)
    assert [(b.device.type, b.dtype, b.numel()) for b in buffers] == [
        ("cuda", torch.uint8, nbytes)
    ] * group.size
    zeroed = all(not bool(buffer.any()) for buffer in buffers)
    group.barrier()  # everybody has looked
    share = nbytes // group.size
    mine = slice(group.rank * share, (group.rank + 1) * share)
    for owner, buffer in enumerate(buffers):
        buffer[mine] = 16 * owner + group.rank + 1
    group.barrier()
    own = buffers[group.rank][: share * group.size].view(group.size, share).cpu()
    group.barrier()
    return zeroed, [sorted(set(part.tolist())) for part in own]


@both_kinds
@pytest.mark.parametrize("nbytes", [1 << 12, 10_000_001])
def test_ranks_write_into_each_others_memory(ranks, nbytes):
    for rank, (zeroed, found) in enumerate(on_gpu(write_into_every_buffer, nbytes, ranks=ranks)):
        assert zeroed
        assert found == [[16 * rank + writer + 1] for writer in range(RANKS)]


def share_again_and_again(group, nbytes):
    for cycle in range(9):
        group.barrier()
        if cycle == 1:  # by now, every rank's part of the GPU's memory for itself is taken
            torch.cuda.empty_cache()
            group.barrier()
            before = torch.cuda.mem_get_info(group.device)[0]
            group.barrier()
        view = group.share_memory(nbytes)[group.rank][: nbytes // 2].view(torch.int64)
        group.barrier()
        gc.collect()
        view.fill_(7)  # the view is all that is left of the buffers
        assert int(view.sum()) == 7 * view.numel()
        del view
    group.barrier()
    torch.cuda.empty_cache()
    group.barrier()
    return before - torch.cuda.mem_get_info(group.device)[0]


@both_kinds
def test_memory_lives_as_long_as_a_view_of_it_and_no_longer(ranks):
    nbytes = 256 << 20
    lost = on_gpu(share_again_and_again, nbytes, ranks=ranks)
    assert max(lost) < nbytes


def too_much(group):
    for nbytes in (1 << 50, 1 << 12):
        try:
            group.share_memory(nbytes if group.rank == 1 else 1 << 12)
            outcome = "shared"
        except (GroupError, PeerFailed) as error:
            outcome = f"{type(error).__name__}: {error}"
        if nbytes == 1 << 50:
            failed = outcome
    return failed, outcome


@both_kinds
def test_a_rank_without_memory_is_an_error_on_all_and_the_group_stays_usable(ranks):
    for rank, (failed, after) in enumerate(on_gpu(too_much, ranks=ranks)):
        kind = "GroupError" if rank == 1 else "PeerFailed"
        assert failed.startswith(f"{kind}: ")
        assert "cannot be allocated" in failed
        assert after == "shared"


def two_stages(group):
    stage = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
    buffers = stage.share_memory(64)
    buffers[1 - stage.rank].fill_(group.rank + 1)
    stage.barrier()
    return str(stage.device), buffers[stage.rank].unique().tolist(), stage.gather_json(group.rank)


@both_kinds
def test_a_subgroup_is_on_the_same_device_and_shares_memory_of_its_own(ranks):
    for rank, (device, found, members) in enumerate(on_gpu(two_stages, ranks=ranks)):
        partner = rank ^ 1
        assert device.startswith("cuda:")
        assert found == [partner + 1]
        assert members == sorted([rank, partner])


def streams(group):
    stream = torch.cuda.current_stream(group.device)
    return torch.cuda.current_device() == group.device.index, stream.cuda_stream


def test_each_thread_has_a_stream_of_its_own():
    found = on_gpu(streams, ranks="threads", world=MOST_THREADS_ON_CUDA)
    assert all(on_device for on_device, _ in found)
    assert len({stream for _, stream in found}) == MOST_THREADS_ON_CUDA
    with pytest.raises(InputError, match="at most 32"):
        on_gpu(streams, ranks="threads", world=MOST_THREADS_ON_CUDA + 1)


def result_on_the_gpu(group):
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    return torch.full((1000,), group.rank, device=group.device)


def test_a_thread_returns_when_its_stream_is_done():
    for rank, result in enumerate(on_gpu(result_on_the_gpu, ranks="threads")):
        assert bool((result == rank).all())


# NVIDIA's own default. A client that leaves in the middle of a kernel takes the MPS server's other clients with it.
mps_runs = (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def leaves_a_kernel_running(group):
    torch.cuda._sleep(60 * 2_000_000_000)  # about a minute
    return group.rank


@pytest.mark.skipif(mps_runs, reason="MPS runs")
def test_a_process_leaves_though_a_kernel_of_its_own_still_runs():
    started = time.monotonic()
    assert on_gpu(leaves_a_kernel_running, ranks="processes", world=2) == [0, 1]
    assert time.monotonic() - started < 30


def shares_untold(group):
    del os.environ[OVERLAPPING_DEVICES]
    try:
        group.share_memory(64)
    except GroupError as error:
        return str(error)
    return None


def test_ranks_on_one_gpu_are_told_which_variable_is_missing():
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank has its own GPU")
    for message in on_gpu(shares_untold, ranks="processes", world=2):
        assert f"expected a GPU for each rank, or {OVERLAPPING_DEVICES}=1 on every rank" in message


def shared_elsewhere_before(group):
    """Memory of all ranks, after one half shared more often among itself than the other did."""
    half = [0, 1] if group.rank < 2 else [2, 3]
    part = group.subgroup(half)
    for _ in range(1 if group.rank < 2 else 3):
        part.share_memory(256)
    buffers = group.share_memory(1024)
    buffers[group.rank].fill_(group.rank + 1)
    torch.cuda.synchronize()
    group.barrier()
    return [int(buffer.sum()) // 1024 for buffer in buffers]


def test_ranks_share_memory_whatever_they_shared_in_other_groups():
    assert on_gpu(shared_elsewhere_before, ranks="processes") == [[1, 2, 3, 4]] * RANKS
