"""What a rank can prove of its waits, and which ranks have kept others waiting."""

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tokenyard.group import attendance
from tokenyard.group.attendance import Attendance, Evidence, Gap, late, surely_late


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, and a kernel that says how long a thread waited for a core."""
    clock = SimpleNamespace(now=100.0, starved=0.0)
    monkeypatch.setattr(attendance, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(attendance, "_waited_for_a_core", lambda: clock.starved)
    return clock


def gaps(rank):
    return [tuple(gap) for gap in rank.evidence(phase="barrier", waited=0.0).gaps]


def test_time_between_looks_of_a_wait_is_a_gap_if_it_is_much_longer_than_they_are_apart(clock):
    rank = Attendance()
    rank.look(waits=True)
    for step in (0.1, 0.19, 0.21):
        clock.now += step
        rank.look()
    assert gaps(rank) == [(pytest.approx(100.29), pytest.approx(100.5), None, 0.0)]
    assert rank.longest_gap == pytest.approx(0.21)


def test_time_between_waits_is_a_gap_with_what_was_sent_before(clock):
    rank = Attendance()
    rank.sent = 3
    clock.now += 0.5
    rank.look(waits=True)
    clock.now += 0.1
    rank.look(waits=False)
    clock.now += 0.01
    rank.look(waits=True)
    assert gaps(rank) == [(100.0, 100.5, 3, 0.0)]
    assert rank.longest_gap == 0.0  # in a wait


def test_a_gap_knows_how_long_its_rank_was_ready_and_got_no_core(clock):
    rank = Attendance()
    rank.look(waits=True)
    for _ in range(3):  # the kernel is asked in looks that are far enough apart
        clock.now, clock.starved = clock.now + 0.15, clock.starved + 0.05
        rank.look()
    clock.now, clock.starved = clock.now + 2.0, clock.starved + 1.5
    rank.look()
    assert gaps(rank) == [(pytest.approx(100.45), pytest.approx(102.45), None, pytest.approx(1.5))]


def test_looks_in_a_subgroup_are_looks_in_the_group(clock):
    group = Attendance()
    group.look(waits=True)
    subgroup = Attendance(group)
    for _ in range(20):
        clock.now += 0.1
        subgroup.look(waits=True)
    assert gaps(group) == []
    clock.now += 2.0
    subgroup.look(waits=False)
    assert gaps(group) == gaps(subgroup)[-1:] == [(pytest.approx(102.0), pytest.approx(104.0), None, 0.0)]


def test_a_wait_on_a_gpu_makes_no_looks_and_is_no_gap(clock):
    rank = Attendance()
    clock.now += 5.0
    rank.was_awake(4.0)
    rank.look()
    assert gaps(rank) == [(100.0, 101.0, 0, 0.0)]


def test_evidence_travels_as_it_is():
    said = Evidence(
        phase="barrier", began=1.0, now=2.0, gaps=(Gap(1.0, 1.5, 3), Gap(1.6, 1.7, None, 0.1)), missing=(2,)
    )
    assert Evidence.decode(said.encode().encode()) == said
    assert said.later(2.0) == Evidence(
        phase="barrier", began=3.0, now=4.0, gaps=(Gap(3.0, 3.5, 3), Gap(3.6, 3.7, None, 0.1)), missing=(2,)
    )


def waits(*its_gaps, began=0.0, now=1.0, deadline=1.0, number=7):
    return Evidence(
        phase="dispatch",
        deadline=deadline,
        number=number,
        began=began,
        now=now,
        gaps=tuple(gap if isinstance(gap, Gap) else Gap(*gap) for gap in its_gaps),
    )


@pytest.mark.parametrize(
    ("deadline", "came", "expected"),
    [
        (3.0, 2.9, []),  # a tenth of a second is not sure
        (3.0, 2.91, [1]),
        (0.15, 0.1, []),  # of a short deadline, a third is not
        (0.15, 0.105, [1]),
        (0.15, 0.07, []),
        (math.inf, 1e6, []),
    ],
)
def test_who_came_a_deadline_after_the_first_kept_it_waiting(deadline, came, expected):
    first = waits(now=came, deadline=deadline)
    assert surely_late({0: first, 1: waits((-5.0, came, 6), began=came, now=came)}) == expected


@pytest.mark.parametrize("number", [7, None])  # a collective, or a wait outside of them
def test_a_rank_that_computes_after_it_has_sent_its_part_keeps_nobody_waiting(number):
    computes, stopped = waits((0.0, 3.0, 7), now=3.1), waits((0.05, 1.5, None), now=1.6)
    told = {0: waits(number=number), 1: computes, 2: stopped}
    assert surely_late(told) == ([2] if number else [1])


def test_the_rank_that_was_stopped_is_late_and_not_one_that_it_waited_for():
    """Rank 0 came first, and was stopped at once. The others computed for nearly a deadline before they came."""
    stopped = waits((0.01, 1.6, None), now=1.6)
    others = waits((-1.0, 0.95, 6), began=0.95, now=1.65)
    assert late({0: stopped, 1: others, 2: others}) == [0]


def test_ranks_that_were_late_alike_are_all_named_and_others_are_not():
    told = {0: waits(), 1: waits((0.0, 1.5, None)), 2: waits((0.05, 1.5, None)), 3: waits((0.0, 0.95, None))}
    assert late(told) == [1, 2]


def test_a_rank_without_a_core_is_not_late():
    starved, stopped = Gap(0.0, 1.9, None, starved=1.8), Gap(0.0, 1.4, None, starved=0.1)
    assert late({0: waits(), 1: waits(starved), 2: waits(stopped)}) == [2]
    assert late({0: waits(), 1: waits(starved)}) == []
    # Nor is its own wait worth less: it was awake as far as the others know.
    assert late({1: waits(starved), 2: waits(stopped)}) == [2]


def test_who_waits_need_not_have_been_awake_all_the_time_if_nobody_is_surely_late():
    told = {0: waits((0.1, 0.5, None), (0.5, 0.9, None)), 1: waits((0.0, 2.0, None))}
    assert (surely_late(told), late(told)) == ([], [1])


@pytest.mark.parametrize(("begins", "expected"), [(0.45, [1]), (0.55, [])])
def test_on_a_busy_machine_half_a_deadline_suffices_and_less_does_not(begins, expected):
    told = {0: waits(), 1: waits((begins, 2.0, None))}
    assert (surely_late(told), late(told)) == ([], expected)


def test_if_nobody_is_surely_late_a_stop_just_after_sending_counts():
    """What a process has sent leaves it a moment later: it can be stopped in between."""
    assert late({0: waits(), 1: waits((0.0, 1.5, 7)), 2: waits()}) == [1]


_STOPPED = """
import sys, time
from tokenyard.group.attendance import Attendance
rank = Attendance()
rank.look(waits=True)
print("begun", flush=True)
until = time.monotonic() + 30
while rank.longest_gap < 0.9 and time.monotonic() < until:
    time.sleep(0.05)
    rank.look()
(gap,) = [gap for gap in rank.evidence(phase="", waited=0.0).gaps if gap.end - gap.start > 0.9]
print(gap.end - gap.start - gap.starved)
"""


def test_a_stopped_process_is_not_taken_for_one_that_got_no_core():
    with subprocess.Popen([sys.executable, "-c", _STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGCONT)
        assert float(process.stdout.readline()) > 0.8
