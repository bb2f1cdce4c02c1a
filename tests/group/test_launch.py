"""What `launch` is given, what it brings back, and how it ends when it is interrupted."""

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.errors import GroupError, InputError, PlanError, RankError
from tokenyard.group import process_ranks
from tokenyard.group.devices import MOST_THREADS_ON_CUDA

both_kinds = pytest.mark.parametrize("ranks", ["threads", "processes"])


def nothing(group):
    return None


@both_kinds
@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": math.inf},
        {"deadline": math.nan},
        {"deadline": 1e12},
        {"deadline": None},
        {"threads_per_rank": 0},
        {"threads_per_rank": "2"},
        {"replacements": -1},
        {"replacements": "one"},
    ],
    ids=str,
)
def test_an_argument_that_makes_no_sense_is_refused_before_anything_starts(ranks, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{name} is {value!r}"):
        ty.launch(2, nothing, ranks=ranks, **wrong)


def test_threads_are_not_replaced():
    with pytest.raises(InputError, match="2 replacements for ranks that are threads"):
        ty.launch(2, nothing, replacements=2)


def returns_a_lambda(group):
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_the_error_of_its_rank():
    with pytest.raises(RankError, match=r"returned <function returns_a_lambda.*be pickled") as caught:
        ty.launch(2, returns_a_lambda, ranks="processes", replacements=1)
    assert isinstance(caught.value.__cause__, InputError)


def open_sockets(expected):
    """The sockets of this process. Some are closed in the background, so those expected may take a moment."""
    until = time.monotonic() + 10
    while True:
        links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        found = sorted(os.readlink(link) for link in links if os.path.lexists(link))
        found = [name for name in found if name.startswith("socket:")]
        if found == (expected or found) or time.monotonic() > until:
            return found
        time.sleep(0.05)


class Unreadable:
    """Is pickled, and cannot be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def returns_what_cannot_be_read(group):
    return Unreadable()


def test_a_result_that_cannot_be_unpickled_is_the_error_of_its_rank():
    """And the error, while somebody keeps it, keeps no connection open."""
    errors, sockets = [], []
    for _ in range(2):
        with pytest.raises(
            RankError, match=r"returned what cannot be unpickled here \(ValueError: invalid literal"
        ) as caught:
            ty.launch(1, returns_what_cannot_be_read, ranks="processes")
        errors.append(caught.value)
        sockets.append(open_sockets(sockets[-1] if sockets else None))
    assert sockets[0] == sockets[1]


def dies_while_it_reports(group):
    if group.rank == 1:

        def send_half(connection, report):
            os.write(connection.fileno(), len(report).to_bytes(4, "big") + report[: len(report) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        Connection.send_bytes = send_half


def test_a_rank_that_dies_while_it_reports_has_died():
    with pytest.raises(RankError, match=r"rank 1 raised ProcessLookupError.*exit code -9"):
        ty.launch(2, dies_while_it_reports, ranks="processes")


@pytest.mark.parametrize(
    ("fn", "args", "found"),
    [
        (lambda group: None, (), r"fn is <function <lambda> at"),
        (nothing, (1, lambda: None), r"argument 2 of fn is <function <lambda> at"),
        (nothing, (threading.Lock(),), r"argument 1 of fn is <unlocked _thread.lock"),
    ],
    ids=["lambda", "argument", "lock"],
)
def test_what_cannot_travel_to_a_process_is_refused_before_anything_starts(fn, args, found, monkeypatch):
    monkeypatch.setattr(process_ranks, "start_forkserver", lambda: pytest.fail("the forkserver is started"))
    with pytest.raises(
        InputError, match=found + r".*cannot be pickled.*fix: define it at the top level of a"
    ):
        ty.launch(2, fn, *args, ranks="processes")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["-"], "the program comes from <stdin>"),
        (["-c", "{}"], "fn is <function rank .* an interactive session"),
    ],
    ids=["stdin", "command"],
)
def test_a_function_that_processes_cannot_import_is_refused(options, found):
    program = "import tokenyard as ty\ndef rank(group): pass\nty.launch(2, rank, ranks='processes')"
    command = [sys.executable, *(option.format(program) for option in options)]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(rf"InputError: {found}.*fix: write it into a file", done.stderr)
    assert "RankError" not in done.stderr


def cannot_be_planned(group):
    spec = ty.LayerSpec(
        name="moe",
        hidden_size=32,
        intermediate_size=32,
        num_experts=4,
        top_k=1,
        wire="fp32",
        experts="reference",
    )
    ty.plan([spec], group, max_tokens=4)


@both_kinds
def test_the_error_of_a_rank_is_told_once_with_its_own_fix_and_alternatives(ranks):
    with pytest.raises(RankError) as caught:
        ty.launch(2, cannot_be_planned, ranks=ranks)
    error = caught.value
    cause = error.__cause__
    assert isinstance(cause, PlanError)
    assert str(error) == (
        f"rank {error.rank} raised PlanError: layer 'moe': {cause.found}; expected {cause.expected}; fix: {cause.fix}"
    )
    assert error.alternatives == cause.alternatives != ()


class InASubgroup(GroupError):
    """Raised by a rank that has another number there."""


def test_a_rank_that_has_another_number_in_a_subgroup_keeps_it():
    error = InASubgroup("it is closed", expected="an open one", fix="make one", rank=0)
    assert str(RankError(2, error)).startswith("rank 2 raised InASubgroup: rank 0: it is closed; expected")


def is_interrupted(group, stop):
    """As by Ctrl-C, which reaches the thread that launched."""
    group.barrier()
    if group.rank == 0:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    until = time.monotonic() + 60
    while not stop.is_set() and time.monotonic() < until:
        group.barrier()


def test_threads_end_when_launch_is_interrupted():
    stop, intra_op, before = threading.Event(), torch.get_num_threads(), set(threading.enumerate())
    # Where tests run unseen, it may be ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ty.launch(3, is_interrupted, stop, threads_per_rank=intra_op + 1, deadline=20)
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not any(name.startswith("rank") for name in left)
        assert torch.get_num_threads() == intra_op
    finally:
        stop.set()
        torch.set_num_threads(intra_op)
        signal.signal(signal.SIGINT, handler)


def computes_for_long(group, launcher, file):
    group.barrier()
    if group.rank == 0:
        file.write_text(str(time.monotonic()))
        os.kill(launcher, signal.SIGINT)
    until = time.monotonic() + 60
    while time.monotonic() < until:  # and makes no call in which it would hear that the others are gone
        pass


@both_kinds
def test_ranks_that_compute_end_soon_when_launch_is_interrupted(ranks, tmp_path, capfd):
    before, file = set(threading.enumerate()), tmp_path / "interrupted"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ty.launch(3, computes_for_long, os.getpid(), file, ranks=ranks, deadline=60)
    finally:
        signal.signal(signal.SIGINT, handler)
    # The ranks compute for 60 s, and the deadline is as long; threads are left 0.5 s.
    assert time.monotonic() - float(file.read_text()) < 30
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not any(name.startswith("rank") for name in left)
    assert capfd.readouterr().err == ""


def leaves_a_thread(group):
    threading.Thread(target=time.sleep, args=(600,)).start()


def test_processes_that_have_reported_end_by_themselves_whatever_their_threads_do(monkeypatch):
    codes, end = [], process_ranks._end

    def noting(processes):
        for process in processes:
            process.join(20)
            codes.append(process.exitcode)
        end(processes)

    monkeypatch.setattr(process_ranks, "_end", noting)
    ty.launch(2, leaves_a_thread, ranks="processes")
    assert codes == [0, 0]


class FakeProcess:
    """Ends while it is waited for, or only when it is killed."""

    def __init__(self, ends):
        self.ends, self.lives, self.calls, self.waited = ends, True, [], []

    def join(self, seconds=None):
        self.calls.append("join")
        self.waited += [] if seconds is None else [seconds]
        self.lives = self.lives and not (self.ends and seconds != 0)

    def is_alive(self):
        return self.lives

    def kill(self):
        self.calls.append("kill")
        self.lives = False

    def close(self):
        assert not self.lives
        self.calls.append("close")


def test_only_a_process_that_does_not_end_is_killed_and_all_are_waited_for():
    good, stubborn = FakeProcess(ends=True), FakeProcess(ends=False)
    process_ranks._end([good, stubborn])
    assert all(seconds <= process_ranks._GRACE for seconds in good.waited + stubborn.waited)
    assert good.calls == ["join", "join", "close"]
    assert stubborn.calls == ["join", "kill", "join", "close"]


def test_ranks_that_never_start_are_named_with_the_time_that_was_waited(monkeypatch):
    monkeypatch.setattr(process_ranks, "FINDING_EACH_OTHER", 0.3)
    store = process_ranks._meeting_store(20.0)
    lost = raised(process_ranks._find_each_other, 1, [torch.device("cpu")] * 3, store.port, 0.3)
    assert (lost.peers, lost.phase, lost.rank) == ((0, 2), "finding each other", 1)
    assert 0.2 < lost.waited < 20


def environment(group, name):
    return os.environ.get(name)


def test_process_ranks_have_the_environment_of_their_launch(monkeypatch):
    name = "TOKENYARD_OF_THIS_LAUNCH"
    for value in ("one", "another", None):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert ty.launch(1, environment, name, ranks="processes") == [value]
    monkeypatch.delenv("PATH")  # with which the forkserver was started, whenever that was
    assert ty.launch(1, environment, "PATH", ranks="processes") == [None]


def loaded_when_planned(group):
    before = set(sys.modules)
    plan = ty.plan([spec()], group)
    build(plan, "moe")(*batch(spec(), 4))
    after = set(sys.modules)
    return sorted(name for name in after - before if name.startswith("tokenyard")), after


def test_a_process_rank_starts_with_the_layer_loaded_and_never_loads_the_compiler():
    """To load torch's compiler takes a second of every rank."""
    ((new, modules),) = ty.launch(1, loaded_when_planned, ranks="processes")
    assert new == []
    assert "torch._dynamo" not in modules


_FORKED = """
import os
import tokenyard as ty

def rank(group):
    return group.rank

if __name__ == "__main__":
    ty.launch(1, rank, ranks="processes")
    if child := os.fork():
        os.waitpid(child, 0)
    print(ty.launch(2, rank, ranks="processes"), flush=True)
    os._exit(0)
"""


def test_a_process_that_was_forked_launches_too_and_so_does_its_parent(tmp_path):
    script = tmp_path / "forked.py"
    script.write_text(_FORKED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 1]\n[0, 1]\n", done.stderr


_INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
from multiprocessing import forkserver
import tokenyard as ty

def goes_on(group):
    os.kill(os.getpid(), signal.SIGINT)
    return group.gather_json(group.rank)

def stays(group, path):
    path.touch()
    time.sleep(60)

if __name__ == "__main__":
    forkserver.ensure_running()  # started by somebody else, who does not block the signal as we do
    print(ty.launch(1, goes_on, ranks="processes"), flush=True)
    path = pathlib.Path(sys.argv[1])
    threading.Thread(target=ty.launch, args=(1, stays, path), kwargs={"ranks": "processes"}, daemon=True).start()
    while not path.exists():
        time.sleep(0.02)
"""


def test_ctrl_c_is_for_who_launched_and_ranks_end_with_it(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(_INTERRUPTED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "started")],
        check=False,
        capture_output=True,
        text=True,
        timeout=45,  # less than the second launch would last
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.stdout == "[[0]]\n", done.stderr


def test_a_thread_that_never_ends_does_not_keep_its_process_from_ending():
    assert ty.launch(2, lambda group: threading.current_thread().daemon) == [True, True]


def test_the_threads_of_ranks_have_ended_when_launch_returns():
    before = set(threading.enumerate())
    for _ in range(20):
        ty.launch(3, lambda group: group.rank)
        assert not [t for t in threading.enumerate() if t.name.startswith("rank ") and t not in before]


@pytest.mark.parametrize("world", [1, MOST_THREADS_ON_CUDA, MOST_THREADS_ON_CUDA + 1])
def test_a_gpu_has_streams_for_so_many_threads(world, monkeypatch):
    groups = [
        SimpleNamespace(rank=rank, device=torch.device("cuda"), leave=lambda why: None)
        for rank in range(world)
    ]
    module = sys.modules["tokenyard.group.launch"]
    monkeypatch.setattr(module, "thread_groups", lambda *_, **__: groups)
    monkeypatch.setattr(module, "rank_on", lambda device: nullcontext())
    if world <= 32:
        assert ty.launch(world, lambda group: group.rank) == [*range(world)]
    else:
        with pytest.raises(InputError, match="33 threads on one GPU; expected at most 32"):
            ty.launch(world, lambda group: group.rank)


def test_launches_at_the_same_time_meet_at_ports_of_their_own_on_loopback():
    stores = [process_ranks._meeting_store(seconds) for seconds in (5.0, 7.0)]
    assert len({store.port for store in stores}) == 2
    assert all(store.port > 1023 for store in stores)  # any that is free, none that is known
    assert [store.host for store in stores] == ["127.0.0.1"] * 2
    assert [store.timeout.total_seconds() for store in stores] == [5.0, 7.0]


def is_daemon(group):
    return multiprocessing.current_process().daemon


def test_ranks_that_are_processes_do_not_keep_their_parent_from_ending():
    assert ty.launch(1, is_daemon, ranks="processes") == [True]


def test_threads_are_waited_for_look_by_look_until_they_are_done(monkeypatch):
    """Not by `join`, which has no limit: a signal that came just before it would be seen only after its end."""
    monkeypatch.setattr(sys.modules["tokenyard.group.launch"], "_LOOK", 0.01)
    done, joined, join = threading.Event(), [], threading.Thread.join

    def noted(self, *arguments):
        joined.append(done.is_set())
        join(self, *arguments)

    def takes_several_looks(group):
        time.sleep(0.1)
        done.set()

    monkeypatch.setattr(threading.Thread, "join", noted)
    ty.launch(1, takes_several_looks)
    assert joined == [True]


class TwoArguments(Exception):
    """Can be pickled, and cannot be made again of what was pickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_travel_becomes_one_that_says_the_same():
    own = ValueError("odd")
    assert process_ranks._picklable(own) is own
    held = ValueError("locked", threading.Lock())
    for error in (TwoArguments("one", "two"), held):
        told = process_ranks._picklable(error)
        assert type(told) is RuntimeError
        assert str(told) == f"{type(error).__name__}: {error}"
