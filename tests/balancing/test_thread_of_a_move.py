"""The thread of a move by hand: what it waits for, what it gives back, and what it says, on old and on fresh ranks."""

import errno
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

import tokenyard as ty
from tests.models import raised, spec
from tokenyard.elastic import joining, resizing
from tokenyard.elastic.joining import Joining
from tokenyard.elastic.moving import not_held
from tokenyard.elastic.rebalancing import Progress, Rebalance
from tokenyard.elastic.resizing import GO, STAY, NextGroup, StayCheck, check_grown
from tokenyard.errors import InputError, PeerFailed
from tokenyard.group import thread_groups

LOST = ty.PeerLost([1], phase="moving experts", waited=1.0)


class Waited(Exception):
    """Instead of a wait."""


class Condition:
    """A condition that nobody waits for."""

    def __init__(self):
        self.notified = 0

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass

    def notify_all(self):
        self.notified += 1

    def wait(self, seconds=None):
        raise Waited


def called(*names, result=None, **others):
    """Something whose methods of these names note that they were called; and the notes."""
    calls = []

    def method(name):
        return lambda *arguments, **options: calls.append((name, *arguments)) or result

    return SimpleNamespace(**{name: method(name) for name in names}, **others), calls


def a_move(steps=({"moe": None},), carrier=None, next_ranks=None):
    group, finished = thread_groups(1)[0], []
    move = Rebalance(
        group, carrier, {"moe": None}, {}, {}, steps, finish=finished.append, next_ranks=next_ranks
    )
    move._changed = Condition()
    return move, finished


def test_whoever_waits_is_told_of_every_change():
    move, _ = a_move()
    assert (move.nbytes, move.seconds, move.pause_ms) == (0, 0.0, 0.0)
    move._report(Progress.READY)
    assert (move.progress, move._changed.notified) == (Progress.READY, 1)
    move.switched()
    assert (move.progress, move.decision, move._number, move._changed.notified) == (0, 0, 1, 2)
    assert move._present == {"moe": None}
    first, second = OSError("first"), OSError("second")
    move.give_up(first)
    move.give_up(second)
    assert (move.error, move._cancelled, move._changed.notified) == (first, True, 4)


def waits(fn):
    try:
        fn()
    except Waited:
        return True
    return False


def test_the_thread_waits_for_a_switch_as_long_as_it_is_ready_and_nobody_gives_up():
    move, _ = a_move()
    found = []
    for progress in (Progress.READY, Progress.PREPARING):
        for cancelled in (False, True):
            move.progress, move._cancelled = progress, cancelled
            found.append(waits(move._await_switch))
    assert found == [True, False, False, False]


def test_ranks_wait_for_the_thread_as_long_as_it_prepares_and_has_no_error():
    move, _ = a_move()
    found = []
    for progress in (Progress.PREPARING, Progress.READY):
        for error in (None, LOST):
            move.progress, move.error = progress, error
            found.append(waits(move.wait_for_thread))
    assert found == [True, False, False, False]
    assert move.wait_for_thread() is Progress.READY


def test_a_rank_lets_go_when_all_have_agreed_on_the_last_switch():
    states = itertools.product([None, False, True], Progress, [None, LOST], [0, 1], [True, False])
    for leaves, decision, error, number, taken in states:
        next_ranks, asked = called("take", result=taken, leaves=leaves)
        move, _ = a_move([{}, {}], next_ranks=None if leaves is None else next_ranks)
        move.decision, move.error, move._number = decision, error, number
        assert move.is_last_step == (number == 1)
        due = bool(leaves) and decision is Progress.READY and error is None and number == 1
        assert move.leaves_now == move.is_done == (due and taken)
        assert bool(asked) == due


def test_when_a_thread_has_ended_and_when_a_rank_is_ready():
    move, _ = a_move()
    assert move.has_ended  # it was not started
    assert not move.ready
    for alive in (True, False):
        move._thread = SimpleNamespace(is_alive=lambda alive=alive: alive)
        assert move.has_ended == (not alive)
    move.progress = Progress.READY
    assert move.ready
    move.switched()
    move._thread = SimpleNamespace(is_alive=lambda: True)
    assert move.ready
    assert move.has_ended


@pytest.mark.parametrize("leaves", [None, False, True])
@pytest.mark.parametrize("started", [True, False])
def test_who_leaves_waits_for_the_thread(leaves, started):
    joined = []
    next_ranks = None if leaves is None else SimpleNamespace(leaves=leaves)
    move, finished = a_move(next_ranks=next_ranks)
    if started:
        move._thread = SimpleNamespace(join=lambda: joined.append(1))
    move.wait()
    assert finished == [move]
    due = 1 if leaves and started else 0
    assert len(joined) == due
    move.error = LOST
    assert raised(move.wait) is LOST
    assert len(joined) == due


def test_a_thread_ends_with_the_process_and_is_not_started_where_nothing_moves():
    begun = threading.Event()
    move, _ = a_move()
    move._run = begun.set
    move.start()
    assert begun.wait(5)
    assert move._thread.daemon
    nothing, _ = a_move([])
    nothing.start()
    assert nothing._thread is None
    assert nothing.is_done


@pytest.mark.parametrize("error", [LOST, PeerFailed(1, "full", phase="moving experts"), OSError("full")])
@pytest.mark.parametrize("grows", [True, False])
def test_a_thread_that_fails_gives_back_what_it_shared_and_says_so(error, grows):
    carrier, carried = called("abandon", "close")
    next_ranks, asked = called("close", "prepare", carrier=carrier, held={}, leaves=False)

    def keep(held):
        raise error

    carrier.keep = keep
    move, _ = a_move(carrier=carrier, next_ranks=next_ranks if grows else None)
    move._run()
    assert move.error is error
    assert move.progress is Progress.FAILED
    assert carried == [("abandon",), ("close",)][0 if isinstance(error, OSError) else 1 :]
    assert asked == ([("prepare",), ("close",)] if grows else [])
    assert move.holders == {}
    assert move._changed.notified == 1


def test_a_move_that_was_given_up_makes_no_group():
    carrier, _ = called("abandon", "close")
    next_ranks, asked = called("close", "prepare")
    move, _ = a_move(carrier=carrier, next_ranks=next_ranks)
    move.give_up(LOST)
    move._run()
    assert asked == [("close",)]
    assert move.error is LOST
    carrier, _ = called("abandon", "close", "keep")
    move, _ = a_move(carrier=carrier)
    copied, move.copy = [], lambda: copied.append(1)
    move.give_up(LOST)
    move._run()
    assert copied == []  # nor does it copy anything


def test_a_thread_frees_the_old_group_when_all_have_switched():
    carrier, _ = called("keep")
    next_ranks, asked = called("prepare", "free_old_group", carrier=carrier, held={"moe": "theirs"})
    move, _ = a_move([], carrier=SimpleNamespace(), next_ranks=next_ranks)
    move._run()
    assert asked == [("prepare",), ("free_old_group",)]
    assert move._carrier is carrier
    assert move._held == {"moe": "theirs"}


# -- The next group ------------------------------------------------------------------------------------------


def present(said=None):
    """The present group of a rank that says something where all ranks look for the decision."""
    decided = {} if said is None else said
    return SimpleNamespace(rank=0, deadline=60.0, decide=decided.setdefault, decided=decided.get)


def next_group(*, meets=True, patience=None):
    calls = []

    def method(name, error=None):
        def call(*arguments, **options):
            calls.append(name)
            if error is not None:
                raise error

        return call

    following = NextGroup(present(), "plan 1", [0], lambda: None, None, layers={}, patience=patience)
    following.carrier = SimpleNamespace(
        meet=method("meet", None if meets else LOST), close=method("carrier closed")
    )
    following.group = SimpleNamespace(
        lost_elsewhere=method("told", None if meets else LOST), close=method("group closed")
    )
    following.exchange = SimpleNamespace(close=method("exchange closed"))
    following.left_behind = [method("exchange before"), method("group before")]
    return following, calls


@pytest.mark.parametrize("meets", [True, False])
def test_what_was_shared_is_given_back_after_all_have_met_or_one_was_lost(meets):
    following, calls = next_group(meets=meets)
    following.free_old_group()
    assert calls == ["meet", "carrier closed", "exchange before", "group before"]


@pytest.mark.parametrize("meets", [True, False])
def test_a_group_that_is_not_taken_is_given_back_as_far_as_it_was_made(meets):
    following, calls = next_group(meets=meets)
    following.close()
    assert calls == ["told", "carrier closed", "exchange closed", "group closed"]
    following, calls = next_group()
    following.group = following.exchange = None
    following.close()
    assert calls == ["carrier closed"]
    NextGroup(present(), "plan 1", [0], None, None, layers={}).close()


@pytest.mark.parametrize(("patience", "due"), [(None, []), (0.0, ["meet"]), (3.0, ["meet"])])
def test_fresh_ranks_are_waited_for_where_there_are_any(patience, due):
    following, calls = next_group(patience=patience)
    following.all_have_copied()
    assert calls == due


def test_who_fails_says_so_and_the_others_stop_waiting_for_it_to_come(monkeypatch):
    monkeypatch.setattr(resizing, "_LOOK", 0.0)
    pair = thread_groups(2)
    for change, answer in enumerate([None, GO, STAY, "failed", LOST]):
        question = f"plan 1, change {change}"
        check = StayCheck(pair[0], question)
        assert raised(check) is None
        if answer in ("failed", LOST):
            error = answer if answer is LOST else OSError("full")
            NextGroup(pair[1], question, [0, 1], None, None, layers={}, patience=1.0).close(error=error)
        elif answer is not None:
            pair[1].decide(question, answer)
        lost = raised(check)
        assert (lost is not None) == (answer in (STAY, "failed", LOST))
        if lost is not None:
            who = "a rank" if answer == STAY else "rank 1"
            assert f"{who} has given the change of ranks up" in str(lost)
            assert (type(lost), lost.peers) == (ty.PeerLost, (1,) if answer is LOST else ())


@pytest.mark.parametrize(("meets", "named"), [(True, 2), (False, 1)])
def test_ranks_that_are_lost_are_named_as_the_present_group_numbers_them(meets, named):
    """Rank 0 leaves. Those that stay are renumbered where they make the next group, and not in what carries experts."""
    said = {}
    following = NextGroup(present(said), "plan 1", [1, 2], None, None, layers={})
    if not meets:
        following.carrier = SimpleNamespace(close=lambda: None)
    following.close(error=LOST)
    assert said["plan 1, given up by"] == f'["rank 0", [{named}]]'


def test_a_word_that_others_took_the_next_group_stands_when_a_rank_fails():
    said = {"plan 1": GO}
    NextGroup(present(said), "plan 1", [0], None, None, layers={}).close()
    assert said["plan 1"] == GO


def test_where_nobody_answers_the_wait_goes_on_and_it_is_not_asked_all_the_time():
    asked = []

    def decided(question):
        asked.append(question)
        raise LOST

    check = StayCheck(SimpleNamespace(decided=decided), "plan 1")
    for _ in range(100):
        check()
    assert 1 <= len(asked) < 50


def test_others_are_waited_for_a_deadline_at_most_when_this_rank_has_switched():
    """A rank that never comes to the farewell, as one whose store did not answer, is not waited for half a minute."""
    group = present()
    group.deadline, group.lost = 0.2, ty.PeerLost
    following = NextGroup(group, "plan 1", [0], None, None, layers={})
    following.prepare()
    given_back, started = [], time.monotonic()
    following.left_behind = [lambda: given_back.append(1)]
    following._check()  # before the switch there is no such limit
    ended = threading.Event()

    def subgroup(ranks, *, name, purpose, check):
        while not ended.wait(0.01):
            check()

    group.subgroup, group.size, group.name = subgroup, 2, "world"
    over = threading.Timer(20, ended.set)
    over.start()
    following.free_old_group()
    over.cancel()
    assert given_back == [1]
    assert 0.2 <= time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("number", "is_lost"), [(errno.ENOENT, True), (errno.ESRCH, True), (0, True), (errno.EACCES, False)]
)
def test_a_rank_that_no_longer_holds_its_experts_is_lost(number, is_lost):
    """Its process has ended, or it is another file; where it may not be opened, it is there."""
    group = thread_groups(3)[2]
    lost = not_held(group, 1, OSError(number, "the reason"))
    assert isinstance(lost, ty.PeerLost) == is_lost
    if is_lost:
        assert (lost.peers, lost.rank) == ((1,), 2)
        assert "its memory cannot be mapped: the reason" in str(lost)
        group._meeting_point.leave(1, "its process has ended")
        assert "its process has ended" in str(not_held(group, 1, OSError(number, "the reason")))


def test_the_first_word_stands_and_is_asked_for_once():
    asked = []
    present = SimpleNamespace(decide=lambda question, answer: asked.append(answer) or answer)
    for ask, other in (("take", "refuse"), ("refuse", "take")):
        following = NextGroup(present, "plan 1", [0], None, None, layers={})
        assert [getattr(following, ask)(), getattr(following, other)(), getattr(following, ask)()] == [
            True,
            False,
            True,
        ]
    assert asked == ["switch", "stay"]


def test_a_group_to_grow_into_begins_with_the_present_ranks():
    pair = thread_groups(2)
    (alone,) = thread_groups(1)
    assert check_grown(pair[0], alone) == 1
    assert check_grown(3, alone) == 3
    for wrong in (alone, pair[1], 0, True, 1.0):  # as many ranks, another rank, no number of ranks
        assert isinstance(raised(check_grown, wrong, alone), InputError), wrong
    assert isinstance(raised(check_grown, alone, pair[0]), InputError)


# -- Fresh ranks ---------------------------------------------------------------------------------------------


def asks(answers, gone=None, seconds=0.0):
    """What a fresh rank finds decided, and what it decides."""
    told, answers = [], iter(answers)

    def decided(question):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    group = SimpleNamespace(
        decided=decided,
        decide=lambda question, answer: told.append(answer) or f"{answer} by all",
        gone=lambda: gone or {},
    )
    return Joining(group, "plan 1", {}, {})._answer(seconds), told


def test_a_fresh_rank_waits_for_the_word_of_the_others(monkeypatch):
    slept = []
    monkeypatch.setattr(joining.time, "sleep", slept.append)
    assert asks([None, None, "switch"], seconds=60.0) == ("switch", [])
    assert len(slept) == 2
    # A store that is too busy to answer in time decides nothing.
    assert asks([LOST, None, "switch"], seconds=60.0) == ("switch", [])
    assert asks([LOST], seconds=-1.0) == ("stay by all", ["stay"])
    assert asks([None], seconds=-1.0) == ("stay by all", ["stay"])
    assert asks([None], gone={0: "it has ended"}, seconds=60.0) == ("stay by all", ["stay"])
    assert asks(["stay"], gone={0: "it has ended"}, seconds=-1.0) == ("stay", [])


class Copied:
    """Instead of a move, of which fresh ranks only make the copies."""

    made = ()

    def __init__(self, *arguments, finish):
        Copied.made = arguments

    def copy(self):
        pass


@pytest.mark.parametrize("answer", ["switch", "stay"])
def test_a_fresh_rank_serves_if_the_others_take_it_in(answer, monkeypatch):
    carrier, carried = called("meet", "close")
    threads = []
    monkeypatch.setattr(joining, "Carrier", lambda group, name, check: carrier)
    monkeypatch.setattr(joining, "Rebalance", Copied)
    monkeypatch.setattr(joining, "held_by_all", lambda *arguments, seconds: (arguments[2:], seconds))
    monkeypatch.setattr(
        joining.threading,
        "Thread",
        lambda **options: threads.append(options) or SimpleNamespace(start=lambda: threads.append("started")),
    )
    group = SimpleNamespace(rank=2, decided=lambda question: answer, decide=lambda question, said: answer)
    present = {"same": "a", "moves": "b"}
    taking = Joining(group, "plan 1", present, {"same": "a", "moves": "c"})
    error = raised(taking.take_over, {"moves": None}, 7.0)
    assert Copied.made[3] == ((["same", "moves"], ["same", "moves"]), 7.0)
    assert Copied.made[4:] == ({"moves": "b"}, [{"moves": "c"}])
    if answer == "stay":
        assert "the other ranks go on without this one" in str(error)
        assert carried == [("meet",), ("close",)]
        assert threads == []
    else:
        assert error is None
        assert carried == [("meet",)]
        assert threads[1:] == ["started"]
        assert threads[0]["daemon"]
        threads[0]["target"](*threads[0]["args"])
        assert carried[1:] == [("meet",), ("close",)]


def test_a_fresh_rank_that_fails_lets_the_others_go_on(monkeypatch):
    carrier, carried = called("close")
    said, group = {}, thread_groups(3)[2]
    group.decide = said.setdefault

    class Fails(Copied):
        def copy(self):
            raise LOST

    monkeypatch.setattr(joining, "Carrier", lambda group, name, check: carrier)
    monkeypatch.setattr(joining, "Rebalance", Fails)
    monkeypatch.setattr(joining, "held_by_all", lambda *arguments, seconds: {})
    assert raised(Joining(group, "plan 1", {}, {}).take_over, {}, 7.0) is LOST
    assert said == {"plan 1": STAY, "plan 1, given up by": '["rank 2", [1]]'}
    assert carried == [("close",)]


def test_a_fresh_rank_gives_back_what_it_shared_even_if_another_is_lost():
    carrier, carried = called("close")

    def meet():
        raise LOST

    carrier.meet = meet
    joining._confirm_switch(carrier)
    assert carried == [("close",)]


@pytest.mark.parametrize(("own", "told", "due"), [(None, 7, 7), (5, 7, 5), (5, 5, 5)])
def test_a_fresh_rank_takes_the_limits_of_the_others_where_it_has_none(own, told, due):
    layer = spec(num_experts=4, max_tokens=own)
    tables = {"moe": {"goal": [[0, 1], [2, 3]], "max_tokens": told}}
    known = joining._as_planned(layer, tables)
    assert known.max_tokens == due
    assert known.placement.table == ((0, 1), (2, 3))
    assert joining._as_planned(layer, {}) is layer
