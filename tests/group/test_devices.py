"""Where the rows of a group live: devices that are there, those that are not, and memory that outlives its tensor."""

import gc
import os
import warnings
import weakref

import pytest
import torch

import tokenyard as ty
from tokenyard.errors import GroupError, InputError, PeerFailed, PeerLost
from tokenyard.group import process_ranks, thread_groups, threads
from tokenyard.group.devices import (
    OVERLAPPING_DEVICES,
    devices_of_ranks,
    prepare_process,
    prepare_threads,
    resolve_device,
    warn_if_threads_may_wait_forever,
    why_none_may_start,
)
from tokenyard.group.symmetric_memory import _check_devices, keep_with

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def device_of(group):
    half = group.subgroup([group.rank])
    buffers = group.share_memory(3)
    return str(group.device), str(half.device), [str(buffer.device) for buffer in buffers]


@both_kinds
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_on_the_cpu(ranks, device):
    assert ty.launch(2, device_of, ranks=ranks, device=device) == [("cpu", "cpu", ["cpu", "cpu"])] * 2


@no_gpu
@both_kinds
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 3)])
def test_a_gpu_that_is_not_there(ranks, device):
    with pytest.raises(InputError, match=r"device is 'cuda.*sees no GPU; expected a GPU .*device='cpu'"):
        ty.launch(2, device_of, ranks=ranks, device=device)
    with pytest.raises(InputError, match="sees no GPU"):
        thread_groups(2, device=device)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x", 1.5])
def test_what_is_no_device_of_a_group(device):
    with pytest.raises(InputError, match=r"device is '.*'; expected 'cpu', 'cuda' or 'cuda:0'"):
        ty.launch(2, device_of, device=device)


def test_gpus_are_dealt_out_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [device.index for device in devices_of_ranks("cuda", 5)] == [0, 1, 2, 0, 1]
    assert devices_of_ranks("cuda:2", 2) == [torch.device("cuda", 2)] * 2
    assert devices_of_ranks(None, 2) == [torch.device("cpu")] * 2
    assert resolve_device("cuda") == torch.device("cuda", 1)
    with pytest.raises(InputError, match=r"'cuda:3', and torch .* sees 3 GPUs"):
        resolve_device("cuda:3")


def test_one_gpu_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for named in ("cuda", "cuda:0", torch.device("cuda")):
        assert resolve_device(named) == torch.device("cuda", 0)
    with pytest.raises(InputError, match=r"'cuda:1', and torch .* sees 1 GPUs"):
        resolve_device("cuda:1")


def one_cannot(group):
    try:
        error = "no memory" if group.rank == 1 else None
        group.all_or_none("sharing memory", error, expected="memory", fix="buy some")
    except (GroupError, PeerFailed) as raised:
        return type(raised).__name__, str(raised)
    return None


def test_all_or_none_says_what_was_expected_and_what_helps():
    (kind, message), (own_kind, own) = ty.launch(2, one_cannot)
    assert (kind, own_kind) == ("PeerFailed", "GroupError")
    assert "no memory" in message
    assert own == "rank 1: no memory; expected memory; fix: buy some"


class FakeGroup:
    """One rank of three, on GPU 0 as the last one is."""

    rank, device = 0, torch.device("cuda", 0)

    def __init__(self, told_by_others):
        self.told_by_others = told_by_others

    def gather_json(self, value, *, phase):
        host = value[0]
        return [value, [host, 1, self.told_by_others, "1"], [host, 0, self.told_by_others, "2"]]


def test_ranks_that_share_a_gpu_must_have_said_so(monkeypatch):
    monkeypatch.delenv(OVERLAPPING_DEVICES, raising=False)
    with pytest.raises(
        GroupError, match=rf"ranks 0, 2 are on cuda:0 .*{OVERLAPPING_DEVICES}=1 on every rank"
    ):
        _check_devices(FakeGroup(told_by_others=True))
    monkeypatch.setenv(OVERLAPPING_DEVICES, "1")
    words = {_check_devices(FakeGroup(told_by_others=True)) for _ in range(3)}
    assert len(words) == 3  # new each time
    with pytest.raises(GroupError, match="is not 1 on rank 1"):
        _check_devices(FakeGroup(told_by_others=False))


class Handle:
    pass


def test_what_is_kept_with_a_tensor_goes_with_its_last_view():
    handle = Handle()
    gone = weakref.ref(handle)
    tensor = torch.zeros(64, dtype=torch.uint8)
    keep_with(tensor, handle)
    view = tensor[8:16].view(torch.int64).detach()
    del tensor, handle
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


QUEUES, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"


def settings():
    """All that is set for CUDA now, and about it."""
    return {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "TOKENYARD_"))}


@pytest.fixture
def unprepared(monkeypatch):
    """A process in which CUDA has not started, and nobody has set anything for it."""
    before = settings()
    for name in before:
        del os.environ[name]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    yield
    for name in settings():
        del os.environ[name]
    os.environ.update(before)


def test_what_threads_need_is_taken_back_in_a_process(unprepared):
    prepare_threads("cuda")
    assert (os.environ[QUEUES], os.environ[LOADING]) == ("32", "EAGER")
    prepare_threads("cuda")  # of a second launch
    prepare_process()
    assert settings() == {}


def test_what_the_user_set_stays(unprepared):
    os.environ[QUEUES] = "16"
    prepare_threads("cuda")
    assert (os.environ[QUEUES], os.environ[LOADING]) == ("16", "EAGER")
    prepare_process()
    assert settings() == {QUEUES: "16"}


def test_nothing_is_set_for_ranks_on_the_cpu_or_too_late(unprepared, monkeypatch):
    prepare_threads("cpu")
    assert settings() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_threads("cuda")
    assert settings() == {}


def makes_groups(gpu):
    warn_if_threads_may_wait_forever(gpu)


def test_threads_are_warned_where_cuda_has_started_without_what_they_need(unprepared, monkeypatch):
    gpu = torch.device("cuda", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_threads_may_wait_forever(gpu)  # it has not started
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        warn_if_threads_may_wait_forever(torch.device("cpu"))
        os.environ |= {QUEUES: "32", LOADING: "EAGER"}
        warn_if_threads_may_wait_forever(gpu)
    os.environ[LOADING] = "LAZY"
    with pytest.warns(RuntimeWarning, match=f"without {LOADING}=EAGER: threads") as warned:
        makes_groups(gpu)
    assert "CUDA was started before the ranks" in str(warned[0].message)
    assert warned[0].filename == __file__  # who makes the groups


@pytest.mark.parametrize("world", [1, 3])
def test_a_group_of_several_threads_asks_whether_they_may_wait_forever(world, monkeypatch):
    asked = []
    monkeypatch.setattr(threads, "warn_if_threads_may_wait_forever", asked.append)
    thread_groups(world)
    assert asked == ([torch.device("cpu")] if world > 1 else [])


def test_a_setting_that_may_keep_ranks_from_starting_is_named(unprepared):
    gpu = torch.device("cuda", 0)
    assert why_none_may_start(gpu) is None
    os.environ[QUEUES] = "32"
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 32: under MPS" in why_none_may_start(gpu)
    assert why_none_may_start(torch.device("cpu")) is None


def test_ranks_that_do_not_find_each_other_hear_of_it(unprepared, monkeypatch):
    monkeypatch.setattr(process_ranks, "FINDING_EACH_OTHER", 2.0)
    os.environ[QUEUES] = "32"
    store = process_ranks._meeting_store(30.0)
    with pytest.raises(PeerLost) as caught:
        process_ranks._find_each_other(0, [torch.device("cuda", 0)] * 2, store.port, 2.0)
    assert caught.value.peers == (1,)
    assert caught.value.phase == "finding each other"
    assert "leave it unset there" in caught.value.__notes__[0]
