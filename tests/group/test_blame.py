"""Who is named when a wait fails: the rank that is late, or gone, and nobody else."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from tests.models import raised
from tests.products import product
from tokenyard.errors import ConcurrentUse, GroupError, PeerLost, RankError
from tokenyard.exchange import EXCHANGES
from tokenyard.group import readmission
from tokenyard.group.failure_detector import FailureDetector
from tokenyard.group.readmission import meet

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])


def late_to_a_barrier(group, late, deadline):
    group.barrier()
    group.deadline = deadline
    if group.rank == 1:
        time.sleep(deadline + late)
    error = raised(group.barrier, phase="loading weights")
    return type(error).__name__, error.peers, str(error)


# Late within the second in which ranks answer.
@pytest.mark.parametrize(("ranks", "late"), product(["threads", "processes"], [0.3, 0.6]))
def test_a_rank_that_is_late_by_less_than_a_second_is_named_by_all(ranks, late):
    for name, peers, text in ty.launch(3, late_to_a_barrier, late, 0.6, ranks=ranks, deadline=20):
        assert (name, peers) == ("PeerLost", (1,)), text
        assert "raise the group's deadline if it was only slow" in text


def stopped_in_a_barrier(group, deadline):
    """Rank 1 comes first, and is stopped in its wait; another process continues it after the deadline of the others."""
    group.barrier()
    group.deadline = deadline
    if group.rank == 1:
        me = os.getpid()
        again = f"sleep 0.3; kill -STOP {me}; sleep {1.5 * deadline + 0.6}; kill -CONT {me}"
        subprocess.Popen(["sh", "-c", again])
    else:
        time.sleep(0.5 * deadline)
    error = raised(group.barrier)
    return error.peers, str(error)


def test_a_rank_that_is_stopped_in_its_wait_and_comes_back_is_named_by_all():
    """It has waited longer than the others. That it was not awake is what it says itself."""
    found = ty.launch(3, stopped_in_a_barrier, 1.5, ranks="processes", deadline=20)
    assert [peers for peers, _ in found] == [(1,)] * 3, found
    assert "this rank was stopped, or got no core, for " in found[1][1]
    assert "the others have given this rank up; it can come back as a fresh one" in found[1][1]


def called_once(group, exchange):
    spec = ty.LayerSpec(name="moe", hidden_size=8, intermediate_size=4, num_experts=3, top_k=1)
    weights = ty.ExpertWeights(w13=torch.ones(3, 8, 8).bfloat16(), w2=torch.ones(3, 8, 4).bfloat16())
    plan = ty.plan([spec], group, exchange=exchange, max_tokens=2)
    layer = ty.MoELayer(plan, "moe", weights.select(plan.local_experts("moe")))
    routes = ty.Routes(topk_ids_TK=torch.tensor([[group.rank]]), topk_weights_TK=torch.ones(1, 1))
    x_TH = torch.ones(1, 8).bfloat16()
    layer(x_TH, routes)
    group.barrier()
    return layer, x_TH, routes


def killed_in_a_call(group, exchange, folder):
    layer, x_TH, routes = called_once(group, exchange)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(layer, x_TH, routes)
    (folder / str(group.rank)).write_text(json.dumps([error.peers, str(error)]))


@pytest.mark.parametrize(
    "exchange",
    [name if name == "one_sided" else pytest.param(name, marks=pytest.mark.long) for name in EXCHANGES],
)
def test_a_killed_process_is_said_to_have_ended(exchange, tmp_path):
    with pytest.raises(RankError, match="exit code -9"):
        ty.launch(3, killed_in_a_call, exchange, tmp_path, ranks="processes", deadline=20)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {"0", "2"}
    for peers, text in found.values():
        assert peers == [1]
        assert "its process has ended)" in text
        assert "go on without it: `plan.go_on_without([1])`" in text
        assert "deadline if it was only slow" not in text


def leaves(group):
    if group.rank == 1:
        return None
    return str(raised(group.barrier))


def test_a_thread_that_has_returned_is_not_said_to_be_slow():
    text = ty.launch(2, leaves, deadline=20)[0]
    assert "it has returned" in text
    assert "deadline if it was only slow" not in text


# -- Ranks that die while a group is made --------------------------------------------------------------------


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_who_connects_while_another_is_dead_is_not_blamed_by_who_has_connected(monkeypatch, dead):
    """Rank 0 has come and died. Rank 1 is connected and waits for the others already; 2 and 3 still connect."""
    store, meeting, world = dist.HashStore(), "a meeting", 4
    over = threading.Event()

    def connect(place, rank, size, timeout):
        if rank == 1:
            return "connected"
        over.wait(30)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(readmission, "_connect", connect)
    store.set(f"tokenyard/{meeting}/failures/who/0", json.dumps(["a host", dead]))
    store.set(f"tokenyard/{meeting}/here/0", "")

    def come(rank):
        detector = FailureDetector(store, meeting, rank, world, "a host")
        found = []
        try:
            options = {"phase": "finding each other", "seconds": 20, "connecting": 20, "timeout": 20}
            meet(store, meeting, rank, world, detector=detector, gone=dict, **options)
            found = detector.lost(phase="dispatch", waited=0.1, deadline=20)
        except PeerLost as error:
            found = list(error.peers)
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(come, [1, 2, 3])) == [[0], [0], [0]]
    over.set()


def dies_while_subgroups_are_made(group, folder, delay):
    group.barrier()
    if group.rank == 0:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    until = time.monotonic() + 30
    try:
        while time.monotonic() < until:
            group.subgroup([0, 1, 2, 3]).barrier()
    except GroupError as error:
        (folder / str(group.rank)).write_text(json.dumps(error.peers))
        time.sleep(1.5)  # it lives on: nobody may blame it


@pytest.mark.parametrize(
    "delay", [0.11, *(pytest.param(delay, marks=pytest.mark.long) for delay in (0.05, 0.2))]
)
def test_only_who_was_killed_while_subgroups_are_made_is_named(delay, tmp_path):
    with pytest.raises(RankError, match="exit code -9"):
        ty.launch(4, dies_while_subgroups_are_made, tmp_path, delay, ranks="processes", deadline=20)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found == {rank: [0] for rank in "123"}


# -- Interrupted, and shared by threads ----------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def interrupted_in_a_wait(group, interrupted):
    group.barrier()
    if group.rank == 0:

        def interrupt(number, frame):
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            group.barrier()
        interrupted.touch()
        return str(raised(group.barrier))
    until = time.monotonic() + 15
    while not interrupted.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return str(raised(group.barrier))


def test_a_group_that_was_interrupted_in_a_wait_is_broken(tmp_path):
    """The others may have finished that collective: its next one would meet their next but one."""
    first = ty.launch(2, interrupted_in_a_wait, tmp_path / "interrupted", ranks="processes", deadline=20)[0]
    assert "is broken: Interrupted while this rank waited in barrier" in first


def two_threads(group, folder):
    tried = folder / "tried"
    if group.rank == 1:
        until = time.monotonic() + 20
        while not tried.exists() and time.monotonic() < until:
            time.sleep(0.01)
        group.barrier()
        return None
    with ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        first = pool.submit(group.barrier)
        while not first.done() and not group._one_thread.user.startswith("first"):
            time.sleep(0.001)  # not in it yet
        error = raised(group.barrier)
        tried.touch()
        first.result()
    return type(error), str(error)


@both_kinds
def test_a_second_thread_in_a_group_is_refused_and_the_first_goes_on(ranks, tmp_path):
    kind, text = ty.launch(2, two_threads, tmp_path, ranks=ranks, deadline=30)[0]
    assert kind is ConcurrentUse
    assert "which thread 'first_0' uses" in text
