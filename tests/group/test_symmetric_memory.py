"""How ranks on GPUs find each other to share memory; nothing here needs one."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from tokenyard.group.symmetric_memory import Meeting, met_as


def all_gather(store, rank, size, sequence, value):
    """As torch's rendezvous does it: what it says is under the number of its own sequence."""
    store.set(f"Memory/{sequence}/{rank}", value)
    for peer in range(size):
        store.wait([f"Memory/{sequence}/{peer}"])
    return [store.get(f"Memory/{sequence}/{peer}") for peer in range(size)]


def meets(store, name, rank, first):
    """Three rounds of one rank, whose sequence begins at `first`."""
    meeting = Meeting(store, name, deadline=5.0)
    found = [all_gather(meeting, rank, 2, first + n, f"{rank}{n}") for n in range(3)]
    return meeting, found


def test_ranks_meet_whatever_they_did_in_other_groups_before():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        for name, starts in (("a", (0, 7)), ("b", (3, 2))):
            runs = [pool.submit(meets, store, name, rank, starts[rank]) for rank in range(2)]
            meetings, found = zip(*(run.result() for run in runs), strict=True)
            assert found[0] == found[1] == [[f"0{n}".encode(), f"1{n}".encode()] for n in range(3)]
            assert store.num_keys() == 6
            for meeting in meetings:
                meeting.forget()
            assert store.num_keys() == 0


def test_who_does_not_come_is_not_waited_for_without_end():
    meeting = Meeting(dist.HashStore(), "alone", deadline=0.2)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        all_gather(meeting, 0, 2, 0, "here")
    assert time.monotonic() - started < 5


def test_torch_finds_the_ranks_by_name_and_only_within():
    meeting = Meeting(dist.HashStore(), "a name", deadline=1.0)
    with met_as("a name", meeting, 1, 3):
        found = _resolve_process_group("a name")
        assert (found.rank(), found.size()) == (1, 3)
    with pytest.raises(RuntimeError):
        _resolve_process_group("a name")
