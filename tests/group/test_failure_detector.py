"""Who is lost: found out together, and all say the same."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tokenyard.group import failure_detector
from tokenyard.group.attendance import Evidence, Gap, this_clock
from tokenyard.group.failure_detector import FailureDetector

HERE = "this host"


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is, the store answers."""
    monkeypatch.setattr(failure_detector, "_STORE", 60.0)


@pytest.fixture
def all_answer(monkeypatch):
    """However busy the machine is, all are waited for."""
    monkeypatch.setattr(failure_detector, "ANSWERING", 1000.0)


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def roll(store, world):
    return [FailureDetector(store, "place", rank, world, HERE) for rank in range(world)]


def who(store, rank, *, host=HERE, pid):
    """Put a process behind a rank's number."""
    store.set(f"tokenyard/place/failures/who/{rank}", json.dumps([host, pid]))


def says(rank, now=None, **evidence):
    """Put what a rank says of itself into the store."""
    fields = {"phase": "", "clock": this_clock(), "began": time.monotonic(), "now": now or time.monotonic()}
    rank._set(Evidence(**(fields | evidence)).encode(), "here", rank._rank)


def together(ranks):
    """What each of these ranks says, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(FailureDetector.lost, ranks))


def answered(ranks):
    """These ranks, each of which has answered in time; others are silent."""
    for rank in ranks:
        says(rank)
    return ranks


@pytest.mark.usefixtures("all_answer")
def test_all_that_wait_answer_and_nobody_is_lost(store):
    assert together(roll(store, 3)) == [[], [], []]


@pytest.mark.usefixtures("all_answer")
def test_who_answers_a_little_later_is_waited_for(store):
    first, second = roll(store, 2)
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(first.lost, phase="barrier")
        while not store.check(["tokenyard/place/failures/here/0"]):
            time.sleep(0.01)
        time.sleep(0.1)
        assert not asks.done()
        assert second.lost(phase="barrier") == []
        assert asks.result() == []


@pytest.mark.usefixtures("all_answer")
@pytest.mark.parametrize("ahead", [0.0, 1e6])  # seconds that the clock of rank 1 is ahead
def test_who_kept_the_others_waiting_is_lost(store, ahead, monkeypatch):
    """Rank 1 was stopped in a wait in which it was from the beginning."""
    monkeypatch.setattr(failure_detector, "ANSWERING", 0.5 if ahead else 1000.0)
    ranks, now = roll(store, 3), time.monotonic()
    gap = Gap(now - 9.9 + ahead, now - 0.1 + ahead, sent=None)
    clock = {"clock": "another"} if ahead else {}
    says(ranks[1], now + ahead, began=now - 10.0 + ahead, deadline=5.0, gaps=(gap,), **clock)
    says(ranks[2], began=now - 10.0, deadline=5.0)
    assert ranks[0].lost(phase="barrier", waited=10.0, deadline=5.0) == [1]


def test_who_was_late_is_named_and_who_does_not_answer_may_only_compute(monkeypatch, store):
    monkeypatch.setattr(failure_detector, "ANSWERING", 0.3)
    ranks, now = roll(store, 3), time.monotonic()
    says(ranks[1], gaps=(Gap(now - 9.9, now - 0.1, sent=None),))
    assert ranks[0].lost(waited=10.0, deadline=5.0) == [1]


def test_a_rank_that_was_stopped_blames_nobody_who_has_gone_on_meanwhile(monkeypatch, store):
    monkeypatch.setattr(failure_detector, "ANSWERING", 0.3)
    ranks, now = roll(store, 3), time.monotonic()
    ranks[1].attendance._gaps.append(Gap(now - 9.9, now, sent=None))
    assert ranks[1].lost(waited=10.0, deadline=5.0) == [1]


@pytest.mark.usefixtures("all_answer")
def test_if_no_time_tells_who_is_late_those_are_that_were_missed_in_shared_memory(store):
    ranks = roll(store, 3)
    says(ranks[1], missing=(2,))
    says(ranks[2], missing=(2,))
    assert ranks[0].lost(waited=1.0, deadline=1.0) == [2]


# -- Ranks that have left because of another one -------------------------------------------------------------------


def test_who_has_left_because_of_a_lost_rank_is_not_the_cause(store, dead):
    ranks, left = roll(store, 4), subprocess.Popen(["true"])
    left.wait()
    who(store, 1, pid=dead)  # killed
    who(store, 2, pid=left.pid)  # has raised, and ended
    ranks[0].read()
    note = f"tokenyard/has given up/{HERE}/{left.pid}"
    assert ranks[0].causes([1, 2]) == [1, 2]
    store.set(note, json.dumps([[HERE, dead]]))
    assert ranks[0].causes([1, 2]) == ranks[0].causes([2]) == [1]
    assert ranks[0].causes([2], among=[0, 2, 3]) == [2]  # the one that it has given up does not belong there
    assert together([ranks[0], ranks[3]]) == [[1], [1]]


def test_a_late_rank_that_was_given_up_and_has_left_stays_the_cause(store):
    ranks = roll(store, 2)
    ranks[1].leave_note([1])
    assert ranks[0].causes([1]) == [1]


def test_two_ranks_that_gave_up_each_other_are_both_named(store, dead):
    (first, _, _), other = roll(store, 3), subprocess.Popen(["true"])
    other.wait()
    for rank, pid, given_up in (1, dead, other.pid), (2, other.pid, dead):
        who(store, rank, pid=pid)
        store.set(f"tokenyard/has given up/{HERE}/{pid}", json.dumps([[HERE, given_up]]))
    first.read()
    assert first.causes([1, 2]) == [1, 2]


def test_a_note_is_taken_back_when_its_rank_makes_another_group(store):
    prefixed = dist.PrefixStore("world", store)  # the note is one for all groups of the process
    first, other = (FailureDetector(prefixed, "place", rank, 2, HERE) for rank in range(2))
    who(prefixed, 1, pid=1)
    first.leave_note([1])
    note = f"tokenyard/has given up/{HERE}/{os.getpid()}"
    assert json.loads(store.get(note)) == [[HERE, 1]]
    FailureDetector(store, "another place", 0, 2, HERE)
    assert not store.check([note])
    assert other.causes([0]) == [0]


def test_the_first_that_settles_a_verdict_decides_for_all(store):
    first, second = roll(store, 2)
    assert first.settle([1]) == [1]
    assert second.called()
    assert second.settle([0]) == [1]
    assert second.lost() == [1]


def test_who_does_not_answer_is_lost_and_all_say_the_same(store):
    ranks = roll(store, 4)
    assert together(answered([ranks[0], ranks[2]])) == [[1, 3], [1, 3]]


@pytest.mark.usefixtures("all_answer")
def test_nobody_has_called_before_somebody_does(store):
    ranks = roll(store, 2)
    assert not ranks[1].called()
    together(ranks)
    assert ranks[1].called()


@pytest.mark.usefixtures("all_answer")
def test_whose_process_is_gone_is_lost_at_once_and_who_computes_is_not(store, dead):
    ranks = roll(store, 4)
    who(store, 1, pid=dead)
    started = time.monotonic()
    assert together([ranks[0], ranks[2]]) == [[1], [1]]  # rank 3 computes
    assert time.monotonic() - started < 500
    assert ranks[3].lost() == [1]


def test_a_process_that_waits_to_be_looked_at_has_ended(store):
    """Its number is taken until its parent has asked how it ended."""
    ranks = roll(store, 2)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        who(store, 1, pid=process.pid)
        assert ranks[0].gone() == {1: "its process has ended"}


def test_the_first_verdict_stands_for_a_rank_that_wakes_up(store):
    ranks = roll(store, 3)
    assert together(answered(ranks[:2])) == [[2], [2]]
    assert ranks[2].lost() == [2]


@pytest.mark.usefixtures("all_answer")
def test_processes_of_another_host_are_not_looked_for_here(store, dead):
    ranks = roll(store, 3)
    who(store, 1, host="another", pid=dead)
    assert together(ranks) == [[], [], []]


def test_whose_process_ends_is_missed_though_it_took_its_name_back(store, dead):
    ranks = roll(store, 2)
    who(store, 1, pid=dead)
    ranks[0].read()
    ranks[1].leave()
    assert list(ranks[0].gone()) == [1]


class LeavesMeanwhile(dist.HashStore):
    """A store out of which rank 1 takes its name back just after somebody has looked whether it is there."""

    def check(self, keys):
        there = super().check(keys)
        if there and "who/1" in keys[0]:
            self.delete_key(keys[0])
        return there


def test_nobody_waits_for_the_name_of_a_rank_that_leaves_meanwhile(monkeypatch):
    monkeypatch.setattr(failure_detector, "_STORE", 5.0)
    ranks = roll(LeavesMeanwhile(), 2)
    assert ranks[0].gone() == {}
    assert ranks[0].silent == ""


def test_groups_in_other_places_have_rolls_of_their_own(store):
    roll(store, 2)[0].lost()
    assert not FailureDetector(store, "another place", 0, 2, HERE).called()


class Mended(dist.HashStore):
    """A store that fails until its link is mended."""

    broken = False

    def check(self, keys):
        if self.broken:
            raise ConnectionError("no route")
        return super().check(keys)


def test_a_store_that_answers_again_is_asked_again_at_once(monkeypatch):
    store = Mended()
    rank = FailureDetector(store, "place", 0, 2, HERE)
    store.broken = True
    assert not rank.called()
    assert "does not answer" in rank.silent
    store.broken = False
    rank.ask_again()
    assert rank.silent == ""


class Silent(dist.HashStore):
    """A store whose host is gone."""

    def set(self, *arguments):
        time.sleep(3600)


def test_a_store_that_does_not_answer_tells_nothing_and_holds_nobody(monkeypatch):
    monkeypatch.setattr(failure_detector, "_STORE", 0.05)
    rank = FailureDetector(Silent(), "place", 0, 2, HERE)
    assert rank.lost() == []
    assert not rank.called()


class Counting(dist.HashStore):
    """A store that counts how often it is asked what stands there."""

    asked = 0

    def compare_set(self, *arguments):
        self.asked += 1
        return super().compare_set(*arguments)


def test_there_is_a_pause_between_two_looks_for_answers(monkeypatch):
    """0.3 s at 0.05 s each are seven looks at most, of three questions: the verdict, one process, one answer."""
    monkeypatch.setattr(failure_detector, "ANSWERING", 0.3)
    monkeypatch.setattr(failure_detector, "_PAUSE", 0.05)
    store = Counting()
    assert FailureDetector(store, "place", 0, 2, HERE).lost() == [1]
    assert store.asked <= 30


def test_what_an_earlier_run_left_in_the_store_is_taken_out():
    """Its question, the answer of this rank, and its verdict: torchrun starts ranks anew on the same store."""
    store = dist.HashStore()
    keys = [f"tokenyard/place/failures/{key}" for key in ("called", "verdict", "here/0")]
    assert FailureDetector(store, "place", 0, 1, "host").lost() == []
    assert [store.check([key]) for key in keys] == [True] * 3
    again = FailureDetector(store, "place", 0, 1, "host")
    assert [store.check([key]) for key in keys] == [False] * 3
    assert not again.called()
