"""A fresh rank takes the place of one that was lost, and everything is bitwise as it was."""

import gc
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch.distributed as dist

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import GroupError, HandleError, InputError, RankError
from tokenyard.group import readmission, rejoin, thread_groups
from tokenyard.group.readmission import Invitation, RejoinStore, address_of, meet, rejoin_store_at

LAYERS = [
    spec("body", hidden_size=64, num_experts=6, experts="reference", wire="mxfp8"),
    spec("head", num_experts=5, experts="reference"),
]
EXCHANGES = ["one_sided", "two_sided", "allgather"]


def round_trips(plan, layers, seed):
    """What this rank gets from a round trip of each layer."""
    return [layers[s.name](*batch(s, 3 + seed, seed=seed)) for s in LAYERS if s.name in layers]


def built(plan):
    return {s.name: build(plan, s.name) for s in LAYERS}


def all_same(ours, theirs):
    return all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


# -- Processes -------------------------------------------------------------------------------------------------------


def open_descriptors(before):
    """How many there are; connections close in the background, so no more than before may take a moment."""
    until = time.monotonic() + 10
    while (count := len(os.listdir("/proc/self/fd"))) > (before or count) and time.monotonic() < until:
        time.sleep(0.05)
    return count


def lives(group, exchange, losses):
    """Every loss strikes one rank; the others go on without it, then with a fresh one.

    Returns, for each loss, whether the results are what they were, how many rows were dropped meanwhile, and the
    descriptors that are open afterwards.
    """
    plan = ty.plan(LAYERS, group, exchange=exchange)
    layers = built(plan)
    chapter = max(plan.group.gather_json(0))  # a fresh rank enters the story where the others are
    before = round_trips(plan, layers, group.rank)
    outcomes = []
    for number, lost in enumerate(losses[chapter:], chapter):
        if group.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        error = raised(round_trips, plan, layers, group.rank)
        assert isinstance(error, ty.PeerLost), error
        assert error.peers == (lost,)
        plan.go_on_without(error.peers)
        round_trips(plan, layers, group.rank)
        dropped = plan.stats()["body"].dropped
        plan.readmit()
        plan.group.gather_json(number + 1)
        after = round_trips(plan, layers, group.rank)
        error = None  # its traceback holds what it passed through
        gc.collect()
        descriptors = open_descriptors(outcomes[-1][2] if outcomes else None)
        outcomes.append((all_same(before, after), dropped, descriptors))
    return outcomes


@pytest.mark.parametrize(
    "exchange",
    [
        name if name in ("one_sided", "hierarchical") else pytest.param(name, marks=pytest.mark.long)
        for name in EXCHANGES
    ],
)
def test_killed_replaced_and_bitwise_as_before(exchange):
    losses = [1, 0, 1]
    results = ty.launch(3, lives, exchange, losses, ranks="processes", deadline=20, replacements=len(losses))
    assert [len(outcomes) for outcomes in results] == [1, 0, 3]  # rank 2 saw all; rank 1 was replaced last
    assert all(same and dropped > 0 for outcomes in results for same, dropped, _ in outcomes)
    descriptors = [left_open for _, _, left_open in results[2]]
    assert descriptors[2] <= descriptors[1]


def replaced_at_once(group):
    """No going on in between."""
    plan = ty.plan(LAYERS, group, exchange="one_sided")
    layers = built(plan)
    if "again" in group.name:
        return all(t.isfinite().all() for t in round_trips(plan, layers, group.rank))
    before = round_trips(plan, layers, group.rank)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    plan.readmit(raised(round_trips, plan, layers, group.rank).peers)
    return all_same(before, round_trips(plan, layers, group.rank))


def test_a_rank_can_be_replaced_at_once():
    assert ty.launch(2, replaced_at_once, ranks="processes", deadline=30.0, replacements=1) == [True, True]


def with_another_plan(group):
    fresh = "again" in group.name
    layers = [LAYERS[0], spec("head", num_experts=5, experts="reference", top_k=3 if fresh else 2)]
    if fresh:
        return type(raised(ty.plan, layers, group)).__name__
    plan = ty.plan(layers, group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(plan.readmit, [1])
    return type(error).__name__, sorted(error.differences)


def test_a_fresh_rank_with_another_plan_is_found_out_on_all_ranks():
    kept, fresh = ty.launch(2, with_another_plan, ranks="processes", deadline=30.0, replacements=1)
    assert fresh == "PlanMismatch"
    assert kept == ("PlanMismatch", ["layers[1].top_k"])


def nobody_comes(group):
    plan = ty.plan(LAYERS, group, exchange="one_sided")
    layers = built(plan)
    if group.rank == 1:
        return None
    plan.go_on_without([1])
    before = round_trips(plan, layers, group.rank)
    started = time.monotonic()
    error = raised(plan.readmit, seconds=0.5)
    waited = time.monotonic() - started
    return error.peers, error.phase, waited, all_same(before, round_trips(plan, layers, group.rank))


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_if_nobody_comes_the_others_say_so_and_are_as_they_were(ranks):
    outcomes = ty.launch(3, nobody_comes, ranks=ranks, deadline=20)[::2]
    for peers, phase, waited, same in outcomes:
        assert peers == (1,)
        assert phase == "readmission"
        assert waited < 15
        assert same
    # Threads that came later are told at once. A clock may round.
    assert max(waited for _, _, waited, _ in outcomes) > 0.4


# -- Threads ---------------------------------------------------------------------------------------------------------


def with_a_fresh_thread(group, exchange):
    """Rank 1 goes away; rank 0 starts a thread that takes its place."""
    plan = ty.plan(LAYERS, group, exchange=exchange)
    layers = built(plan)
    before = round_trips(plan, layers, group.rank)
    plan.group.barrier()
    if group.rank == 1:
        return before

    def fresh():
        again = rejoin(group.address, rank=1, seconds=20)
        new_plan = ty.plan(LAYERS, again, exchange=exchange)
        return round_trips(new_plan, built(new_plan), 1)

    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(fresh) if group.rank == 0 else None
        plan.readmit([1], seconds=20)
        same = all_same(before, round_trips(plan, layers, group.rank))
        return same, newcomer and newcomer.result()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_thread_takes_the_place_of_a_rank(exchange):
    (same, newcomer), left, (also, _) = ty.launch(3, with_a_fresh_thread, exchange, deadline=20)
    assert same
    assert also
    assert all_same(newcomer, left)


def raises_after_a_readmission(group, readmitted, returned):
    """Rank 1 is replaced, and returns only then; rank 2 raises in the new group, which rank 0 must be told."""
    if group.rank == 1:
        readmitted.acquire(timeout=30)
        return None
    pool = ThreadPoolExecutor(1)
    fresh = pool.submit(lambda: rejoin(group.address, rank=1, seconds=20)) if group.rank == 0 else None
    again = group.readmit([1], seconds=20)
    if group.rank == 2:
        returned.wait(30)
        raise ValueError("broken")
    readmitted.release()
    until = time.monotonic() + 30
    while not group.gone() and time.monotonic() < until:
        time.sleep(0.01)
    seen = (
        list(group.gone()),
        list(again.gone()),
    )  # the place of rank 1 is not its own any more in the new group
    returned.set()
    pool.shutdown()
    return seen, raised(again.barrier), fresh.result().size


def test_a_group_that_was_made_whole_is_told_when_a_rank_raises():
    found = []

    def body(group, *marks):
        found.append(raises_after_a_readmission(group, *marks))

    with pytest.raises(RankError, match="rank 2 raised ValueError: broken"):
        ty.launch(3, body, threading.Semaphore(0), threading.Event(), deadline=60)
    ((seen, error, size),) = [outcome for outcome in found if outcome]
    assert seen == ([1], [])
    assert error.peers == (2,)
    assert "it raised ValueError: broken" in str(error)
    assert size == 3


def test_who_is_gone_as_well_is_not_waited_for():
    """Ranks 1 and 2 are gone; a place is offered to one of them only."""
    first, _, third = thread_groups(3, deadline=60)
    third.leave("it went home")
    began = time.monotonic()
    error = raised(first.readmit, [1], seconds=60)
    assert time.monotonic() - began < 30
    assert error.peers == (2,)
    assert "it went home" in str(error)


@pytest.mark.parametrize("before", [False, True])
def test_a_subgroup_is_told_who_is_gone_whether_it_was_made_before_or_after(before):
    first, _, third = thread_groups(3, deadline=60)
    some = first.subgroup([0, 2]) if before else None
    third.leave("it went home")
    began = time.monotonic()
    error = raised((some or first.subgroup([0, 2])).barrier)
    assert time.monotonic() - began < 30
    assert error.peers == (1,)
    assert "it went home" in str(error)


def in_threads(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_an_invitation_is_for_one():
    first, _ = thread_groups(2, deadline=20)
    again, one, other = in_threads(
        lambda: first.readmit([1], seconds=20),
        lambda: _rejoins(first, 1.0),
        lambda: _rejoins(first, 1.0),
    )
    assert again.size == 2
    errors = [found for found in (one, other) if isinstance(found, ty.TokenyardError)]
    assert len(errors) == 1
    assert "was not invited within" in str(errors[0])


def _rejoins(group, seconds):
    try:
        return rejoin(group.address, rank=1, seconds=seconds)
    except ty.TokenyardError as error:
        return error


class ComesSecond:
    """A store in which somebody else takes a place, between a process's look at it and its own taking."""

    def __init__(self):
        self.store, self.first = dist.HashStore(), None

    def __getattr__(self, name):
        return getattr(self.store, name)

    def compare_set(self, *arguments):
        self.first = self.first or RejoinStore(self.store, "group_key").take(1, "address", 20)
        return self.store.compare_set(*arguments)


def test_an_invitation_that_two_processes_see_is_for_one():
    rejoin_store = RejoinStore(ComesSecond(), "group_key")
    invitation = Invitation(meeting="here", size=2, name="again", deadline=20.0)
    with rejoin_store.invited([1], invitation):
        error = raised(rejoin_store.take, 1, "address", 0.1)
    assert rejoin_store.store.first == invitation
    assert "was not invited" in str(error)


class Counting(dist.HashStore):
    """A store that counts how often somebody looks whether a key is there."""

    looks = 0

    def check(self, keys):
        self.looks += 1
        return super().check(keys)


def test_there_is_a_pause_between_two_looks_for_an_invitation_and_for_others(monkeypatch):
    """A store serves all ranks: 0.3 s at 0.05 s each are seven looks, at most."""
    monkeypatch.setattr(readmission, "_PAUSE", 0.05)
    store, asked = Counting(), []
    assert "was not invited" in str(raised(RejoinStore(store, "key").take, 1, "address", 0.3))
    assert 1 <= store.looks <= 7
    lost = raised(
        readmission.meet,
        dist.HashStore(),
        "a meeting",
        0,
        2,
        phase="a phase",
        seconds=0.3,
        connecting=20,
        timeout=20,
        detector=SimpleNamespace(ended=dict, settle=list),
        gone=lambda: asked.append(1) or {},
    )
    assert lost.peers == (1,)
    assert 1 <= len(asked) <= 8


def test_who_comes_too_late_finds_the_seat_closed():
    first, _ = thread_groups(2)
    assert isinstance(raised(first.readmit, [1], seconds=0.1), ty.PeerLost)
    assert "was not invited" in str(raised(rejoin, first.address, rank=1, seconds=0.1))


@pytest.mark.parametrize("lost", [[], [0], [1, 1], [7], [-1]])
def test_only_ranks_that_can_be_lost_are_readmitted(lost):
    error = raised(thread_groups(3)[0].readmit, lost)
    assert isinstance(error, InputError)
    assert str(lost) in str(error)


@pytest.mark.parametrize(
    "address",
    [
        "",
        None,
        "threads:0",
        "tcp://here",
        "http://a/b",
        "tcp://127.0.0.1:1",
        "tcp://here:99999#world",
        "tcp://[::1:7#world",
    ],
)
def test_an_address_that_is_none(address):
    assert isinstance(raised(rejoin, address, rank=1, seconds=0.1), InputError)


def test_a_store_that_is_not_there_any_more(tmp_path):
    error = raised(rejoin, f"file://{tmp_path}/store#world/0-1", rank=1, seconds=20)
    assert isinstance(error, GroupError)
    assert f"there is no file {tmp_path}/store" in str(error)


def test_a_store_that_does_not_answer_holds_no_fresh_rank():
    with socket.create_server(("127.0.0.1", 0)) as nobody_accepts:
        address = f"tcp://127.0.0.1:{nobody_accepts.getsockname()[1]}#world/0-1"
        error = raised(rejoin, address, rank=1, seconds=0.2)
    assert isinstance(error, GroupError)
    assert f"the store of {address} does not answer" in str(error)
    assert error.rank == 1


def test_an_address_of_ipv6_can_be_read_again():
    address = address_of(SimpleNamespace(host="::1", port=7), "world/0-1")
    assert address == "tcp://[::1]:7#world/0-1"
    assert (urlsplit(address).hostname, urlsplit(address).port) == ("::1", 7)


def layer_added_meanwhile(group):
    plan = ty.plan(LAYERS, group)
    if group.rank == 1:
        return None
    plan.go_on_without([1])
    plan.extend([spec("tail")])
    return str(raised(plan.readmit, seconds=0.1))


def test_a_layer_that_was_placed_on_the_ranks_that_were_left_cannot_stay():
    message = ty.launch(2, layer_added_meanwhile, deadline=20)[0]
    assert "layer 'tail' was added while ranks [1] were lost" in message
    assert "plan.trim" in message


def lost_one_after_the_other(group):
    """Ranks 1 and then 2 of four are lost, by the numbers of the ranks that are left; both are replaced."""
    plan = ty.plan(LAYERS, group, exchange="one_sided")
    layers = built(plan)
    before = round_trips(plan, layers, group.rank)
    plan.group.barrier()
    if group.rank == 1:
        return None
    plan.go_on_without([1])
    round_trips(plan, layers, group.rank)
    if group.rank == 2:
        return None
    plan.go_on_without([1])  # rank 2, as those that are left count
    round_trips(plan, layers, group.rank)

    def fresh(rank):
        new_plan = ty.plan(LAYERS, rejoin(group.address, rank=rank, seconds=20), exchange="one_sided")
        round_trips(new_plan, built(new_plan), rank)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fresh, rank) for rank in (1, 2)] if group.rank == 0 else []
        plan.readmit(seconds=20)
        same = all_same(before, round_trips(plan, layers, group.rank))
        for future in futures:
            future.result()
    return same


def test_two_that_were_lost_one_after_the_other_are_replaced_together():
    assert ty.launch(4, lost_one_after_the_other, deadline=20) == [True, None, None, True]


def test_the_address_says_how_the_ranks_found_each_other():
    addresses = ty.launch(2, address_of_group, ranks="processes")
    assert addresses[0] == addresses[1]
    assert addresses[0].startswith("tcp://127.0.0.1:")
    assert addresses[0].endswith("#world/0-1")


def address_of_group(group):
    return group.address


def test_an_address_leads_to_a_store_that_a_fresh_process_can_reach(tmp_path):
    (tmp_path / "met").touch()
    place = rejoin_store_at(f"file://{tmp_path}/met#world/0%201", 7.0)
    assert place.group_key == "world/0 1"
    assert place.store.timeout == timedelta(seconds=7)
    assert address_of(place.store, place.group_key) == f"file://{tmp_path}/met#world/0%201"
    error = raised(address_of, dist.HashStore(), "world/0-1")
    assert "the ranks found each other through a HashStore" in str(error)


LATE, GONE = "raise the group's deadline if it was only slow", "a plan can"


def met(
    comes=(0, 1),
    connects=lambda: "connected",
    gone=dict,
    ended=None,
    called=False,
    lost=(),
    seconds=20.0,
    **others,
):
    """What a meeting of two ranks gives to rank 0, and with whom the detector was asked to look for the lost."""
    store, asked = dist.HashStore(), []
    for rank in comes:
        store.set(f"tokenyard/a meeting/here/{rank}", "")
    detector = SimpleNamespace(
        read=lambda: asked.append("read"),
        ended=lambda: ended or {},
        called=lambda: called,
        settle=list,
        lost=lambda **told: asked.append((told["phase"], 0 <= told["waited"] < 10)) or list(lost),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readmission, "_connect", lambda *_: connects())
        options = {"seconds": seconds, "connecting": 0.3, "timeout": 20.0, "detector": detector, "gone": gone}
        options |= others
        made = []
        error = raised(lambda: made.append(meet(store, "a meeting", 0, 2, phase="regrouping", **options)))
    return (made[0] if made else error), asked


def fails(words="Connection closed by peer\nat line 7"):
    raise RuntimeError(words)


@pytest.mark.parametrize("comes", [(0,), (0, 1)])
def test_who_need_not_wait_for_the_others_any_more_leaves_the_meeting(comes):
    """Before they have come, and while they connect."""
    looks, connected = [], threading.Event()

    def check():
        looks.append(1)
        if len(looks) == 3:
            raise HandleError("it is over", expected="nothing", fix="go")

    started = time.monotonic()
    error, asked = met(comes, lambda: connected.wait(60), check=check, seconds=60.0, connecting=60.0)
    connected.set()
    assert "it is over" in str(error)
    assert time.monotonic() - started < 30
    assert len(looks) == 3
    assert asked == ([] if comes == (0,) else ["read"])  # nobody is blamed


def test_ranks_that_come_to_a_meeting_are_connected():
    assert met() == ("connected", ["read"])


SLOW = {"connects": lambda: time.sleep(1), "connecting": 60.0}  # who looks on sees it before


@pytest.mark.parametrize(
    ("arguments", "peers", "words", "fix"),
    [
        # One is seen to be gone before all have come: nobody is asked.
        ({"comes": (0,), "gone": lambda: {1: "its process has ended"}}, (1,), "its process has ended", GONE),
        ({"comes": (0,), "seconds": 0.1}, (1,), "", LATE),
        # All have come, and one is gone, or all ask who is there, or connecting fails or takes too long.
        (SLOW | {"ended": {1: "it ended"}, "lost": [1]}, (1,), "it ended", GONE),
        (SLOW | {"called": True, "lost": [1]}, (1,), "", LATE),
        ({"connects": fails, "ended": {1: "it ended"}, "lost": [1]}, (1,), "it ended", GONE),
        ({"connects": fails, "lost": [1]}, (1,), "Connection closed by peer)", LATE),
        ({"connects": fails, "lost": []}, (), "Connection closed by peer)", LATE),
        ({"connects": lambda: fails("x" * 300), "lost": [1]}, (1,), "; " + "x" * 200 + ")", LATE),
        ({"connects": lambda: time.sleep(1), "lost": [1]}, (1,), "no answer within 0.3 s", LATE),
    ],
)
def test_who_is_missing_at_a_meeting_is_named_with_what_is_known_of_it(arguments, peers, words, fix):
    lost, asked = met(**arguments)
    assert (lost.peers, lost.phase, lost.rank) == (peers, "regrouping", 0)
    assert words in str(lost)
    assert fix in str(lost)
    assert 0 <= lost.waited < 10
    assert asked == ([] if arguments.get("comes") else ["read", ("regrouping", True)])
