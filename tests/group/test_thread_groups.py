"""Groups of threads, call by call: who is named, when, with which words; names and numbers of subgroups."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.models import raised
from tokenyard.errors import InputError
from tokenyard.group import rejoin, thread_groups, threads


def together(groups, call):
    """What a call gives on each rank, all of them at once."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups))


def test_a_group_is_prepared_for_its_device_and_has_what_it_was_asked_for(monkeypatch):
    prepared = []
    monkeypatch.setattr(threads, "prepare_threads", prepared.append)
    first, second = thread_groups(2, device="cpu", name="stage", deadline=7.5)
    assert prepared == ["cpu"]
    assert [(g.rank, g.size, g.name, g.deadline, g.device.type) for g in (first, second)] == [
        (0, 2, "stage", 7.5, "cpu"),
        (1, 2, "stage", 7.5, "cpu"),
    ]
    assert repr(second) == "ThreadGroup('stage', rank 1 of 2)"
    for world in (0, -1):
        with pytest.raises(InputError, match=f"world is {world}; expected at least one rank"):
            thread_groups(world)


def test_ranks_that_have_ended_are_named_at_once_with_their_reasons():
    first, second, third = thread_groups(3)
    second.leave("it has returned")
    third.leave("it raised ValueError: no")
    assert first.gone() == {1: "it has returned", 2: "it raised ValueError: no"}
    lost = raised(first.barrier, phase="agreement")
    assert (lost.peers, lost.phase, lost.waited, lost.rank) == ((1, 2), "agreement", 0.0, 0)
    assert "it has returned; it raised ValueError: no" in str(lost)
    later = raised(first.gather_json, 1, phase="later")
    assert (later.peers, later.phase) == ((1, 2), "later")


def test_who_ends_while_another_waits_ends_that_wait_and_who_came_before_is_not_missed():
    first, second, third = thread_groups(3, deadline=30)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(raised, group.barrier) for group in (first, third)]
        while len(first._meeting_point.calls.get(1, threads._Call()).brought) < 2:
            time.sleep(0.01)
        second.leave("it is gone")
        errors = [one.result() for one in waiting]
    assert [(error.peers, error.waited) for error in errors] == [((1,), 0.0)] * 2
    third.leave("it is gone, too")
    assert raised(first.barrier).peers == (1,)  # the first verdict stands


def test_a_rank_may_leave_what_all_have_come_to():
    """A rank that brought its value and ended is not missed in that call, and is in the next."""
    first, second = thread_groups(2, deadline=30)
    started = second.start_all_gather(torch.full((1,), 2, dtype=torch.uint8), phase="last")
    second.leave("it has returned")
    assert first.all_gather(torch.ones(1, dtype=torch.uint8), phase="last").tolist() == [[1], [2]]
    assert started.wait().tolist() == [[1], [2]]
    assert raised(first.barrier).peers == (1,)


def test_at_the_deadline_those_who_have_not_come_are_named_and_told():
    first, second, third = thread_groups(3, deadline=0.05)
    begun = second.start_all_gather(torch.ones(1, dtype=torch.uint8), phase="gathering")
    lost = raised(first.all_gather, torch.ones(1, dtype=torch.uint8), phase="gathering")
    assert (lost.peers, lost.phase, lost.rank) == ((2,), "gathering", 0)
    assert 0.05 <= lost.waited < 20
    assert raised(begun.wait).peers == (2,)
    own = raised(third.barrier)
    assert (own.peers, own.rank) == ((2,), 2)


def test_subgroups_are_numbered_and_named_and_know_who_is_gone():
    groups = thread_groups(4, name="all")
    groups[3].leave("it is gone")
    first, again = groups[0].subgroup([0, 2]), groups[0].subgroup([0, 2])
    assert (first.name, first.rank, first.size, first.deadline) == ("all/0-2", 0, 2, groups[0].deadline)
    other = groups[2].subgroup([0, 2], name="mine")
    assert (other.name, other.rank) == ("mine", 1)
    assert together([first, other], lambda group: group.gather_json(group.rank)) == [[0, 1]] * 2
    assert first._meeting_point is other._meeting_point is not again._meeting_point
    late = groups[1].subgroup([3, 1])
    assert late.gone() == {0: "it is gone"}
    assert raised(late.barrier).peers == (0,)
    groups[2].leave("it went, too")
    assert first.gone() == {1: "it went, too"}
    assert again.gone() == {1: "it went, too"}


@pytest.mark.parametrize("ranks", [[0, 0], [1], []])
def test_a_subgroup_has_distinct_ranks_with_the_caller_among_them(ranks):
    with pytest.raises(InputError, match="rank 0 asks for a subgroup of ranks"):
        thread_groups(2)[0].subgroup(ranks)


def test_shared_memory_is_zero_and_as_large_as_asked_for():
    buffers = together(thread_groups(2), lambda group: group.share_memory(5))
    assert [[buffer.tolist() for buffer in of_rank] for of_rank in buffers] == [[[0] * 5] * 2] * 2
    buffers[0][1][3] = 9
    assert buffers[1][1].tolist() == [0, 0, 0, 9, 0]


def test_a_fresh_rank_has_the_deadline_of_the_group_and_each_time_another_name():
    left, _ = thread_groups(2, deadline=11.0)
    for number in (1, 2):
        with ThreadPoolExecutor(2) as pool:
            joining = pool.submit(rejoin, left.address, rank=1, seconds=20)
            again = left.readmit([1], seconds=20)
            fresh = joining.result()
        assert [(group.name, group.deadline, group.rank) for group in (again, fresh)] == [
            (f"threads/again-{number}", 11.0, 0),
            (f"threads/again-{number}", 11.0, 1),
        ]
        assert again.address == left.address
        assert together([again, fresh], lambda group: group.gather_json(group.rank)) == [[0, 1]] * 2


def test_a_loss_in_shared_memory_is_told_to_all_ranks_and_the_first_one_stands():
    first, second, third = thread_groups(3)
    second.leave("it has returned")
    lost = first.lost_elsewhere([1, 2], phase="combine", waited=0.5)
    assert (lost.peers, lost.phase, lost.waited, lost.rank) == ((1, 2), "combine", 0.5, 0)
    assert "it has returned" in str(lost)
    again = third.lost_elsewhere([0], phase="dispatch", waited=0.7)
    assert (again.peers, again.phase, again.waited, again.rank) == ((1, 2), "dispatch", 0.5, 2)
    assert raised(third.barrier).peers == (1, 2)


def test_a_rank_that_has_ended_is_told_from_one_that_is_late():
    first, second = thread_groups(2, deadline=0.1)
    late = first.lost([1], phase="combine", waited=0.5, layer="moe", detail="it is slow")
    assert "layer 'moe', rank 0: rank 1 did not arrive in combine (waited 0.5 s; it is slow)" in str(late)
    assert "raise the group's deadline if it was only slow" in str(late)
    assert "raise the group's deadline" in str(first.lost([], phase="combine", waited=0.5))
    second.leave("it has returned")
    gone = first.lost([1], phase="combine", waited=0.5, detail="it is slow")
    assert "(waited 0.5 s; it has returned)" in str(gone)
    for error in (gone, raised(first.barrier)):
        assert "a plan can" in str(error)
    waits, _ = thread_groups(2, deadline=0.1)
    assert "raise the group's deadline" in str(raised(waits.barrier))
