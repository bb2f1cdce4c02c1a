"""Limits of time and of numbers in groups, each from both sides; what ranks are told when they start."""

import math
import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import raised
from tokenyard.errors import InputError, RankError
from tokenyard.group import base, failure_detector, hosts, process_ranks, thread_groups, threads
from tokenyard.group.failure_detector import within
from tokenyard.group.readmission import READMISSION

CPU = torch.device("cpu")


def test_a_question_that_nobody_answers_keeps_no_process_from_ending():
    over, looks = threading.Event(), []
    with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
        within(0.3, over.wait, look=lambda: looks.append(1))
    asking = [thread for thread in threading.enumerate() if thread.name == "question"]
    over.set()
    assert asking
    assert all(thread.daemon for thread in asking)
    assert 1 <= len(looks) <= 3


def test_values_that_are_no_finite_numbers_travel():
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda group: group.gather_json([math.inf, {"b": 1, "a": 2}]), thread_groups(2))
        )
    assert found == [[[math.inf, {"a": 2, "b": 1}]] * 2] * 2
    (alone,) = thread_groups(1)
    assert ty.Group.gather_json(alone, [-math.inf]) == [[-math.inf]]  # as between processes


def threads_of_rank(group):
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("cores", "world", "asked", "each"), [(8, 2, None, 4), (2, 3, None, 1), (None, 1, None, 1), (8, 2, 1, 1)]
)
def test_ranks_share_the_cores_unless_they_are_told_otherwise(cores, world, asked, each, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert ty.launch(world, threads_of_rank, threads_per_rank=asked) == [each] * world


@pytest.mark.parametrize("seconds", [1e-3, 1, 1.5, 1_000_000])
def test_a_deadline_is_above_0_and_at_most_a_million_seconds(seconds):
    assert base.check_deadline(seconds) == seconds
    for wrong in (0, -seconds, 1_000_000 + seconds, math.nan, math.inf, str(seconds), None):
        with pytest.raises(InputError) as caught:
            thread_groups(2, deadline=wrong)
        assert str(caught.value).startswith(
            f"deadline is {wrong!r}; expected seconds, above 0 and at most 1,000,000"
        )


def test_threads_are_asked_for_no_more_memory_than_there_is(monkeypatch):
    monkeypatch.setattr(threads, "too_much", lambda nbytes, ranks: f"{ranks} x {nbytes} are too much")
    (alone,) = thread_groups(1)
    assert "1 x 64 are too much" in str(raised(alone.share_memory, 64))


def name_of_interface(group):
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_processes_of_one_machine_talk_over_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert ty.launch(1, name_of_interface, ranks="processes") == [hosts.loopback_interface()]


def process_launch(world, **changes):
    settings = {"job": b"", "host_of_rank": [0] * world, "deadline": 20.0, "intra_op": 1} | changes
    return process_ranks.ProcessLaunch(devices=[CPU] * world, **settings)


@pytest.mark.parametrize(
    ("host_of_rank", "told"), [([0, 0], ["rack 3", "rack 3"]), ([0, 1, 1], ["host 0", "host 1", "host 1"])]
)
def test_processes_are_told_their_host_where_they_stand_for_several(host_of_rank, told, monkeypatch):
    monkeypatch.setenv("TOKENYARD_HOST", "rack 3")
    monkeypatch.setattr(process_ranks, "start_forkserver", lambda: None)
    launched = process_launch(len(told), host_of_rank=host_of_rank)
    processes = process_ranks._Processes(launched, None)
    for rank, host in enumerate(told):
        assert processes._environment(rank) == {**os.environ, "TOKENYARD_HOST": host}


def is_given(group, value):
    if value is None:
        raise ValueError("nothing is given")
    return group, value


@pytest.fixture
def rank_here(monkeypatch):
    """Runs the main function of a rank's process in this one: what it reports, and what it has done."""

    def run(value, rejoins=None, interface="lo"):
        done, environment = {}, {"OF_THE_FORKSERVER": "1"}
        own_end, its_end = multiprocessing.Pipe()
        watched = []

        def watch(parent, released):
            watched.append(released)
            if value is not None and own_end.poll(60):  # it has reported; a little later, so have the others
                time.sleep(0.02)
                released.set()

        def leave(code):
            done.update(code=code, alone=not watched[0].is_set())

        fakes = {
            "os": SimpleNamespace(environ=environment, _exit=leave, register_at_fork=lambda **_: None),
            "signal": SimpleNamespace(SIGINT=2, SIG_IGN=1, signal=lambda *given: done.update(signals=given)),
            "loopback_interface": lambda: interface,
            "_watch_parent": watch,
            "_find_each_other": lambda *given: done.update(finds=given) or "a group",
            "rejoin": lambda *given, **how: done.update(rejoins=(given, how)) or "a group again",
        }
        with monkeypatch.context() as patch:
            for name, fake in fakes.items():
                patch.setattr(process_ranks, name, fake)
            patch.setattr(torch, "set_num_threads", lambda number: done.update(threads=number))
            launched = process_launch(2, job=pickle.dumps((is_given, (value,))), intra_op=3)
            process_ranks._rank_main(1, launched, {"ASKED": "2"}, 7, rejoins, its_end)
        with own_end, its_end:
            return pickle.loads(own_end.recv_bytes()), done, environment

    return run


def test_a_process_does_what_it_was_started_for_and_reports(rank_here):
    report, done, environment = rank_here(5)
    assert report == ("result", ("a group", 5), "")
    assert done == {
        "signals": (2, 1),
        "threads": 3,
        "finds": (1, [CPU] * 2, 7, 20.0),
        "code": 0,
        "alone": False,
    }
    assert environment == {"ASKED": "2", "GLOO_SOCKET_IFNAME": "lo"}
    assert rank_here(5, interface=None)[2] == {"ASKED": "2"}


def test_a_process_that_takes_the_place_of_another_comes_back_to_its_group(rank_here):
    report, done, _ = rank_here(5, rejoins="an address")
    assert report == ("result", ("a group again", 5), "")
    assert done["rejoins"] == (("an address",), {"rank": 1, "device": CPU, "seconds": READMISSION})
    assert "finds" not in done


def test_a_process_that_fails_reports_where(rank_here):
    (outcome, error, where), done, _ = rank_here(None)
    assert (outcome, type(error), str(error)) == ("error", ValueError, "nothing is given")
    assert "in is_given" in where
    assert where.endswith('raise ValueError("nothing is given")')  # the error itself travels beside
    assert (done["code"], done["alone"]) == (0, True)  # it waits for nobody


def test_after_an_error_the_others_have_their_deadline_to_end_and_no_longer(monkeypatch):
    monkeypatch.setattr(process_ranks, "_GRACE", 0.2)
    monkeypatch.setattr(process_ranks, "_LOOK", 0.02)
    processes = process_ranks._Processes.__new__(process_ranks._Processes)
    ends = [multiprocessing.Pipe() for _ in range(3)]
    processes._connections = {rank: parent for rank, (parent, _) in enumerate(ends)}
    processes._launched, processes._processes = process_launch(3, deadline=0.3), {}
    for rank, error in ((0, ValueError("first")), (2, ValueError("second"))):
        ends[rank][1].send_bytes(pickle.dumps(("error", error, "where it was raised")))
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 raised ValueError: first") as caught:
        processes.collect(0)
    assert 0.45 < time.monotonic() - began < 10
    assert caught.value.__cause__.__notes__ == ["Traceback on rank 0:\nwhere it was raised"]
    for connections in ends:
        for connection in connections:
            connection.close()


def test_a_store_that_was_silent_is_left_alone_for_a_while(monkeypatch):
    asked = []

    class Silent:
        def __getattr__(self, name):
            asked.append(name)
            raise ConnectionError

    clock = [1000.0]
    monkeypatch.setattr(failure_detector.time, "monotonic", lambda: clock[0])
    detector = failure_detector.FailureDetector(Silent(), "place", 0, 2, "host")
    before = len(asked)
    clock[0] += 59.0
    assert (detector.called(), len(asked)) == (False, before)
    clock[0] += 2.0
    assert (detector.called(), len(asked)) == (False, before + 1)


def asks_for_a_gpu(group):
    return str(raised(ty.DistributedGroup, device="cuda")), ty.DistributedGroup().device.type


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_group_of_processes_is_on_the_device_that_it_is_asked_for():
    ((error, device),) = ty.launch(1, asks_for_a_gpu, ranks="processes")
    assert "device is 'cuda'" in error
    assert device == "cpu"
