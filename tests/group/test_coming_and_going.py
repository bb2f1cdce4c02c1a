"""Groups that come and go leave nothing behind: not in the store, not in the process that launched, not in memory."""

import gc
import math
import os
import signal
import time

import tokenyard as ty
from tests.models import on_ranks
from tokenyard.group.threads import _MeetingPoint

LOSSES = 3


def keys_left_behind(group):
    store = group._rejoin_store.store
    group.barrier()
    before = store.num_keys()
    group.barrier()
    for _ in range(3):
        if group.rank < 2:
            part = group.subgroup([0, 1])
            part.barrier()
            part.close()
    group.barrier()
    return store.num_keys() - before


def test_subgroups_of_processes_leave_no_keys_in_the_store():
    assert on_ranks(3, keys_left_behind, ranks="processes") == [0, 0, 0]


def meeting_points(group):
    def there():
        gc.collect()
        return sum(type(one) is _MeetingPoint for one in gc.get_objects())

    group.barrier()
    before = there()
    group.barrier()
    for _ in range(5):
        part = group.subgroup([0, 1])
        part.barrier()
        part.close()
        del part
    group.barrier()
    return there() - before


def test_subgroups_of_threads_are_forgotten():
    assert on_ranks(2, meeting_points) == [0, 0]


def descriptors(pid, most):
    """How many a process has open. It takes a moment to close what it gave away: then no more than `most`."""
    until = time.monotonic() + 10
    while (count := len(os.listdir(f"/proc/{pid}/fd"))) > most and time.monotonic() < until:
        time.sleep(0.02)
    return count


def lose_rank_1(group, launcher):
    """Rank 1 dies again and again; rank 0 counts the descriptors of the process that launched, after each loss."""
    if group.rank == 1 and group.name != f"world/again-{LOSSES}":
        group.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    counts = []
    for _ in range(LOSSES if group.rank == 0 else 0):
        group.barrier()
        try:
            group.barrier()
        except ty.PeerLost:
            old, group = group, group.readmit([1])
            old.close()
        counts.append(descriptors(launcher, counts[0] if counts else math.inf))
    group.barrier()
    return group.name, counts


def test_ranks_that_are_replaced_leave_no_descriptors_with_who_launched():
    (name, counts), (other, _) = on_ranks(2, lose_rank_1, os.getpid(), ranks="processes", replacements=LOSSES)
    assert name == other == f"world/again-{LOSSES}"
    assert len(counts) == LOSSES
    assert max(counts) <= counts[0]
