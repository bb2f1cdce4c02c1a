"""A store that does not answer, a collective that is done at the last moment: waits end, and say what is wrong."""

import itertools
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard.errors import GroupError
from tokenyard.group import failure_detector
from tokenyard.group.failure_detector import FailureDetector, within


class CutOff:
    """A store, up to the moment when its link is cut: then no call returns, until it is mended."""

    def __init__(self):
        self._store = dist.HashStore()
        self.mended = threading.Event()
        self.mended.set()

    def __getattr__(self, name):
        def call(*arguments):
            self.mended.wait()
            return getattr(self._store, name)(*arguments)

        return call


def test_what_nobody_answers_ends(monkeypatch):
    never, began = threading.Event(), time.monotonic()
    monkeypatch.setattr(failure_detector, "LOOK", 60.0)  # however seldom it looks
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        within(0.2, never.wait)
    assert time.monotonic() - began < 30
    never.set()  # nothing of it is left behind


def test_a_process_that_was_stopped_while_it_asked_gets_its_answer(monkeypatch):
    """Half a minute passes between any two looks at the clock: the process was stopped there."""
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(failure_detector, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert within(2.0, lambda: time.sleep(0.3) or 7) == 7
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):  # and it does not wait forever
        within(0.5, never.wait)
    never.set()


@pytest.mark.parametrize(
    ("seconds", "stopped", "waits"),
    [(0.1, 0.0, [0.1]), (0.25, 0.0, [0.1, 0.1, 0.05]), (0.5, 90.0, [0.1, 0.1, 0.1]), (-1.0, 0.0, [0.0])],
)
def test_a_wait_is_cut_into_looks_and_each_counts_at_most_twice_its_length(
    seconds, stopped, waits, monkeypatch
):
    """Where the process is stopped in each of them, too."""
    clock, waited, looks = [1000.0], [], []

    class Silent:
        def put(self, answer):
            pass

        def get(self, *, timeout):
            waited.append(timeout)
            clock[0] += timeout + stopped
            raise queue.Empty

    monkeypatch.setattr(failure_detector, "queue", SimpleNamespace(SimpleQueue=Silent, Empty=queue.Empty))
    monkeypatch.setattr(failure_detector, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(TimeoutError, match=f"no answer within {seconds:.1f} s"):
        within(seconds, lambda: None, look=lambda: looks.append(1))
    assert waited == pytest.approx(waits)
    assert len(looks) == len(waits) - 1


def test_an_answer_and_an_error_come_as_they_are():
    assert within(20, lambda: 7) == 7
    assert within(20, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(20, lambda: 1 // 0)


def test_the_roll_is_called_in_vain_where_the_store_is_cut_off_and_says_so():
    store = CutOff()
    detector = FailureDetector(store, "a group", 0, 3, "a host")
    assert detector.silent == ""
    store.mended.clear()
    started = time.monotonic()
    assert detector.lost() == []
    assert not detector.called()  # not asked again: that would be two seconds more for each wait
    assert time.monotonic() - started < 20
    assert "the link to its host is cut" in detector.silent
    store.mended.set()
    assert detector.lost() == [1, 2]  # asked again, and now it answers
    assert detector.silent == ""


def test_what_ranks_of_an_earlier_start_wrote_is_forgotten(monkeypatch):
    store = dist.HashStore()
    before = FailureDetector(store, "a group", 0, 2, "a host")
    assert before.lost() == [1]
    monkeypatch.setattr(
        failure_detector, "ANSWERING", 1000.0
    )  # however busy the machine is, both are waited for
    now = FailureDetector(store, "a group", 0, 2, "a host")
    assert not now.called()
    other = FailureDetector(store, "a group", 1, 2, "another host")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(FailureDetector.lost, [now, other])) == [[], []]  # both are here


def test_each_question_may_take_as_long_as_a_look_may_however_many_ranks_there_are():
    class FarAway(CutOff):
        def __getattr__(self, name):
            time.sleep(0.06)
            return super().__getattr__(name)

    detector = FailureDetector(FarAway(), "a group", 0, 40, "a host")  # 40 questions take longer than one may
    assert detector.lost() == list(range(1, 40))


def cut_off(group):
    store = group._detector._store = CutOff()
    store.mended.clear()
    expected = r"cannot find each other: the group's store does not answer.*start the others again"
    with pytest.raises(GroupError, match=expected):
        group.subgroup([0, 1])
    with pytest.raises(GroupError, match=expected):
        group.readmit([1 - group.rank])
    store.mended.set()
    return group.subgroup([0, 1]).gather_json(group.rank)


def test_no_group_is_made_where_the_store_is_cut_off_and_one_is_when_it_is_back():
    assert ty.launch(2, cut_off, ranks="processes", deadline=20) == [[0, 1]] * 2


_LEFT_ALONE = """
import sys, time
import torch.distributed as dist
import tokenyard as ty

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = ty.DistributedGroup(deadline=60.0)
group.barrier()
group.deadline = 1.0
if rank == 1:
    time.sleep(600)  # it lives, and does not come
try:
    group.barrier()
except ty.PeerLost as lost:
    print("lost", *lost.peers)
"""


def test_a_process_that_gave_up_a_peer_can_end_by_itself(tmp_path):
    """Torch's half an hour is for gloo's own threads, and a process that has them ends no sooner."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _LEFT_ALONE, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = started[0].communicate(timeout=120)
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
    assert said == "lost 1\n"
    assert started[0].returncode == 0


class DoneJustAfter:
    """A collective that is done between the end of a wait and the look at whether it is."""

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return True


class FailedJustAfter(DoneJustAfter):
    def wait(self, timeout=None):
        super().wait(timeout)
        raise RuntimeError("Connection closed by peer")


def test_a_collective_that_is_done_just_after_a_look_is_done():
    group = ty.DistributedGroup.__new__(ty.DistributedGroup)
    group._carrier, looks = torch.device("cpu"), []
    group._detector = SimpleNamespace(attendance=SimpleNamespace(look=lambda **_: looks.append(1)))
    group._wait(DoneJustAfter(), time.monotonic() + 20)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        group._wait(FailedJustAfter(), time.monotonic() + 20)
    assert len(looks) == 2


@pytest.mark.parametrize(
    ("missing", "words", "detail"),
    [
        ([], "Connection reset\nby a switch", "Connection reset"),
        ([], "x" * 300, "x" * 200),
        ([], "Timed out waiting 5000ms", ""),
        ([1], "Connection reset", ""),
    ],
)
def test_what_a_library_says_of_a_connection_is_told_where_nobody_is_named(
    missing, words, detail, monkeypatch
):
    group = ty.DistributedGroup.__new__(ty.DistributedGroup)
    group.deadline = 5.0
    group._detector = SimpleNamespace(lost=lambda **_: missing, detail="", silent="")
    monkeypatch.setattr(group, "lost", lambda peers, **found: (peers, found["detail"]), raising=False)
    assert group._lost_in("barrier", 1.0, 7, RuntimeError(words)) == (missing, detail)
