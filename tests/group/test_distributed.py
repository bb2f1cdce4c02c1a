"""Ranks of torch.distributed, two of them in one process: collectives, deadlines, subgroups, what is left in the store.

Each rank has a connection of its own to the store, and a process group of gloo, as processes have.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from tests.group.test_group import messages_of_any_length, messages_of_one_byte
from tests.models import raised
from tokenyard.errors import GroupError, InputError
from tokenyard.group import distributed, rejoin, thread_groups
from tokenyard.group.distributed import DistributedGroup
from tokenyard.group.process_ranks import _meeting_store
from tokenyard.group.readmission import Invitation, RejoinStore, TCPStore
from tokenyard.group.torch_groups import _options

CPU = torch.device("cpu")


def all_at_once(groups, call):
    """What a call gives on each rank; they make it at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups))


@pytest.fixture
def pair(monkeypatch):
    """Makes groups of two ranks that met in one store, as a fresh rank and one that was left do."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = _meeting_store(20.0)
    made = []

    def make(deadline=20.0, name="pair"):
        invitation = Invitation(meeting=f"meeting {len(made)}", size=2, name=name, deadline=deadline)

        def come(rank):
            client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
            place = RejoinStore(client, f"key/{len(made)}")
            return DistributedGroup._met(place, rank, invitation, device=CPU, seconds=20)

        groups = all_at_once(range(2), come)
        made.extend(groups)
        return groups

    make.store = store
    yield make
    for group in made:
        group.close()


def rows(*values):
    return torch.tensor([[value, value + 100] for value in values], dtype=torch.uint8).view(len(values), 2)


def test_messages_come_where_it_is_said_and_take_no_more_than_they_have(pair):
    found = all_at_once(pair(), messages_of_any_length)
    assert found == [[[other] * (rank + other + 1) for other in range(2)] for rank in range(2)]


def test_a_message_may_have_one_byte_or_none(pair):
    assert all_at_once(pair(), messages_of_one_byte) == [[1], [0]]


def test_collectives_bring_what_each_rank_sent(pair):
    def call(group):
        mine = torch.tensor([group.rank, 7 * group.rank], dtype=torch.uint8)
        gathered = group.all_gather(mine, phase="a")
        spread = group.all_gather(torch.arange(6, dtype=torch.uint8)[::2] + group.rank, phase="b")
        uneven = group.all_gather_rows(rows(1, 2, 3) if group.rank else rows(), [0, 3], phase="c")
        nothing = group.all_gather_rows(rows(), [0, 0], phase="d")
        send = [2, 1] if group.rank == 0 else [0, 3]
        receive = [2, 0] if group.rank == 0 else [1, 3]
        moved = group.all_to_all_rows(
            rows(*range(10 * group.rank, 10 * group.rank + 3)), send, receive, phase="e"
        )
        empty = group.all_to_all_rows(torch.zeros(3, 0, dtype=torch.uint8), send, receive, phase="f")
        return [
            gathered.tolist(),
            spread.tolist(),
            uneven.tolist(),
            nothing.shape,
            moved.tolist(),
            empty.shape,
            group.gather_json({"rank": group.rank}),
        ]

    for rank, found in enumerate(all_at_once(pair(), call)):
        assert found[0] == [[0, 0], [1, 7]]
        assert found[1] == [[0, 2, 4], [1, 3, 5]]
        assert found[2] == rows(1, 2, 3).tolist()
        assert found[3] == (0, 2)
        assert found[4] == (rows(0, 1).tolist() if rank == 0 else rows(2, 10, 11, 12).tolist())
        assert found[5] == ((2, 0) if rank == 0 else (4, 0))
        assert found[6] == [{"rank": 0}, {"rank": 1}]


def test_bytes_may_lie_apart_and_a_row_may_be_one(pair):
    """Every second column of a matrix, and every second byte of a message."""
    wide = torch.arange(12, dtype=torch.uint8).view(2, 6)

    def call(group):
        mine, bytes_apart = wide[:, ::2] + 50 * group.rank, torch.arange(8, dtype=torch.uint8)[::2]
        apart = torch.empty(2, 6, dtype=torch.uint8)[:, ::2]
        apart.copy_(mine)
        group.allow_messages(2)
        room = torch.zeros(4, dtype=torch.uint8)
        group.start_messages(bytes_apart, [2, 2], 2, room, phase="a").wait()
        return [
            group.all_to_all_rows(apart, [1, 1], [1, 1], phase="b").tolist(),
            group.all_gather_rows(apart, [2, 2], phase="c")[:, 0].tolist(),
            group.all_to_all_rows(apart[:, :1], [1, 1], [1, 1], phase="d").tolist(),
            group.all_gather_rows(apart[:, :1], [2, 2], phase="e").tolist(),
            room.tolist(),
        ]

    for groups in (pair(), thread_groups(2)):
        assert all_at_once(groups, call) == [
            [
                [[0, 2, 4], [50, 52, 54]] if rank == 0 else [[6, 8, 10], [56, 58, 60]],
                [0, 6, 50, 56],
                [[0], [50]] if rank == 0 else [[6], [56]],
                [[0], [6], [50], [56]],
                [0, 2] * 2 if rank == 0 else [4, 6] * 2,
            ]
            for rank in range(2)
        ]


def test_who_is_in_which_process_is_read_when_all_have_met_and_once(pair, monkeypatch):
    groups, read = pair(), []
    for group in groups:
        monkeypatch.setattr(group._detector, "read", lambda rank=group.rank: read.append(rank))
    for _ in range(2):
        all_at_once(groups, lambda group: group.gather_json(group.rank))
        assert sorted(read) == [0, 1]


def test_who_leaves_before_all_have_met_can_still_be_found(pair):
    """Others may be connecting: they look for what this rank has written."""
    for number, meets in ((0, False), (2, True)):
        groups = pair()
        here = [f"tokenyard/meeting {number}/here/{rank}" for rank in range(2)]
        if meets:
            all_at_once(groups, lambda group: group.gather_json(group.rank))
        groups[0].close()
        assert [pair.store.check([key]) for key in here] == [not meets, True]


def test_what_was_started_is_free_to_be_waited_for_later_and_once(pair):
    def call(group):
        first = group.start_all_gather(torch.tensor([group.rank], dtype=torch.uint8), phase="a")
        second = group.start_all_gather_rows(rows(group.rank), [1, 1], phase="b")
        third = group.start_all_to_all_rows(rows(1, 2), [1, 1], [1, 1], phase="c")
        waited = [one.wait().tolist() for one in (first, second, third)]
        return waited, first.wait() is first.wait()

    assert all_at_once(pair(), call) == [
        ([[[0], [1]], rows(0, 1).tolist(), rows(rank + 1, rank + 1).tolist()], True) for rank in range(2)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda group: group.all_gather(torch.zeros(2), phase="a"),
        lambda group: group.all_gather(torch.zeros(2, 2, dtype=torch.uint8), phase="a"),
        lambda group: group.all_gather_rows(rows(1, 2), [1, 1], phase="a"),
        lambda group: group.all_to_all_rows(rows(1, 2), [1, 2], [1, 1], phase="a"),
        lambda group: group.all_gather(torch.zeros(2, dtype=torch.uint8, device="meta"), phase="a"),
    ],
)
def test_what_are_no_bytes_is_refused_before_anything_moves(pair, wrong):
    groups = pair()
    for group in groups:
        with pytest.raises(InputError, match="a collective was given"):
            wrong(group)
    assert all_at_once(groups, lambda group: group.gather_json(group.rank)) == [[0, 1]] * 2


def test_who_does_not_come_is_lost_at_the_deadline_and_the_group_is_broken_for_good(pair):
    first, second = pair(deadline=0.3)
    began = time.monotonic()
    lost = raised(first.barrier, phase="agreement")
    assert isinstance(lost, ty.PeerLost)
    assert (lost.peers, lost.phase, lost.rank) == ((1,), "agreement", 0)
    assert 0.3 <= lost.waited < 10
    assert time.monotonic() - began < 20
    later = raised(first.barrier)
    assert type(later) is GroupError
    assert "group 'pair' is broken: rank 1 did not arrive in agreement" in str(later)
    assert raised(second.barrier).peers == (1,)  # it was given up, and reads so
    assert first.gone() == {}  # its process lives


class Interrupted(BaseException):
    pass


def test_a_wait_that_is_interrupted_breaks_the_group(pair, monkeypatch):
    first, _ = pair(deadline=0.5)

    def interrupted(*_):
        raise Interrupted

    started = first.start_all_gather(torch.zeros(1, dtype=torch.uint8), phase="agreement")
    monkeypatch.setattr(first, "_wait", interrupted)
    with pytest.raises(Interrupted):
        started.wait()
    assert "is broken: Interrupted while this rank waited in agreement" in str(raised(first.barrier))


def test_subgroups_are_numbered_named_and_forgotten_in_the_store(pair):
    groups = pair(name="all")
    before = pair.store.num_keys()

    def split(group):
        parts = [group.subgroup([1, 0]), group.subgroup([1, 0]), group.subgroup([group.rank], name="alone")]
        told = [
            (part.name, part.rank, part.size, part.deadline, part.gather_json(group.rank)) for part in parts
        ]
        for part in parts:
            part.close()
        return told

    for rank, told in enumerate(all_at_once(groups, split)):
        assert told == [
            ("all/1-0", 1 - rank, 2, 20.0, [1, 0]),
            ("all/1-0", 1 - rank, 2, 20.0, [1, 0]),
            ("alone", 0, 1, 20.0, [rank]),
        ]
    assert pair.store.num_keys() <= before + 2  # one for each meeting that was held, not one for each rank
    for wrong in ([0, 0], [1], []):
        with pytest.raises(InputError, match="rank 0 asks for a subgroup of ranks"):
            groups[0].subgroup(wrong)


def test_a_group_that_was_closed_says_so_and_takes_its_keys_with_it(pair):
    first, second = pair()
    all_at_once((first, second), lambda group: group.barrier())
    enrolled = pair.store.num_keys()
    first.close()
    assert pair.store.num_keys() < enrolled
    for call in (first.barrier, lambda: first.subgroup([0, 1]), lambda: first.gather_json(1)):
        assert "group 'pair' is broken: it was closed" in str(raised(call))
    first.close()  # a second time


def test_memory_is_shared_between_ranks_and_ranks_of_one_host_know_each_other(pair):
    groups = pair()
    buffers = all_at_once(groups, lambda group: group.share_memory(5000))
    assert [[buffer.numel() for buffer in of_rank] for of_rank in buffers] == [[5000, 5000]] * 2
    buffers[0][1][4999] = 3
    assert buffers[1][1].nonzero().tolist() == [[4999]]
    assert all_at_once(groups, lambda group: group.hosts()) == [[[0, 1]]] * 2
    assert groups[0].host().endswith(" on cpu")
    assert groups[0].address.startswith("tcp://127.0.0.1:")
    assert groups[0].address.endswith("#key/0")


def test_only_other_ranks_are_readmitted(pair):
    first, _ = pair()
    for wrong in ([], [0], [2], [1, 1]):
        with pytest.raises(InputError, match="rank 0 readmits ranks"):
            first.readmit(wrong)


def test_further_ranks_are_taken_in_behind_those_of_the_group(pair):
    first, _ = pair()
    (thread,) = thread_groups(1)
    for group in (first, thread):
        for wrong in (0, -1, True, 1.5, "2", None):
            with pytest.raises(
                InputError, match=r"the number of fresh ranks is .*; expected a number of ranks"
            ):
                group.admit(wrong)
        filled = []
        group._fill = lambda empty, seconds, check=None, filled=filled: filled.append((list(empty), seconds))
        group.admit(1, seconds=5.0)
        group.admit(3, seconds=6.0)
        size = group.size
        assert filled == [([size], 5.0), ([size, size + 1, size + 2], 6.0)]


def test_a_further_rank_that_comes_makes_the_group_larger(pair):
    groups = pair()
    with ThreadPoolExecutor(3) as pool:
        joining = pool.submit(rejoin, groups[0].address, rank=2, seconds=20)
        grown = [*pool.map(lambda group: group.admit(1, seconds=20), groups), joining.result()]
    assert [(group.rank, group.size) for group in grown] == [(0, 3), (1, 3), (2, 3)]
    assert all_at_once(grown, lambda group: group.gather_json(group.rank)) == [[0, 1, 2]] * 3
    for group in grown:
        group.close()


def test_the_first_word_of_a_question_stands_for_all(pair):
    first, second = pair()
    assert first.decided("change 1") is None
    assert second.decide("change 1", "stay") == "stay"
    assert first.decide("change 1", "switch") == "stay"
    assert [group.decided("change 1") for group in (first, second)] == ["stay", "stay"]
    assert first.decided("change 2") is None


def test_a_fresh_rank_takes_the_place_of_a_lost_one_each_time_under_another_name(pair):
    first, second = pair(deadline=11.0)
    second.close()
    for number in (1, 2):
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(rejoin, first.address, rank=1, seconds=20)
            again = first.readmit([1], seconds=20)
            fresh = joining.result()
        assert [(group.name, group.rank, group.size, group.deadline) for group in (again, fresh)] == [
            (f"pair/again-{number}", 0, 2, 11.0),
            (f"pair/again-{number}", 1, 2, 11.0),
        ]
        assert fresh.address == again.address == first.address
        assert all_at_once((again, fresh), lambda group: group.gather_json(group.rank)) == [[0, 1]] * 2
        for group in (again, fresh):
            group.close()


def test_if_nobody_comes_the_invitation_is_taken_back(pair):
    first, second = pair()
    second.close()
    lost = raised(first.readmit, [1], seconds=0.3)
    assert (lost.peers, lost.phase, lost.rank) == ((1,), "readmission", 0)
    assert 0.3 <= lost.waited < 10
    late = raised(rejoin, first.address, rank=1, seconds=0.3)
    assert f"rank 1 of {first.address} was not invited within 0.3 s" in str(late)


def test_collectives_are_waited_for_later_within_a_time():
    for kind in ("AllgatherOptions", "AllToAllOptions"):
        own = _options(kind, timedelta(seconds=3))
        assert own.asyncOp is True
        assert own.timeout == timedelta(seconds=3)
        assert _options(kind, None).timeout != timedelta(seconds=3)


def test_a_rank_whose_process_has_ended_is_not_waited_for_in_a_subgroup(pair):
    """Also where nothing was sent in the group before, so that nobody has looked yet whose processes the ranks are."""
    first, _ = pair()
    detector = first._detector
    detector._who.clear()
    no_process = 1 << 23  # above the largest number that Linux gives to a process
    pair.store.set(detector._key("who", 1), json.dumps([detector._host, no_process]))
    lost = raised(first.subgroup, [0, 1])
    assert (lost.peers, lost.phase) == ((1,), "finding each other")
    assert "its process has ended" in str(lost)
    assert lost.waited < 20  # of 30


def test_what_was_started_before_a_loss_is_not_waited_for_after_it(pair):
    first, _ = pair(deadline=0.3)
    started = [first.start_all_gather(torch.zeros(1, dtype=torch.uint8), phase=phase) for phase in "ab"]
    assert raised(started[0].wait).phase == "a"
    assert "group 'pair' is broken: rank 1 did not arrive in a" in str(raised(started[1].wait))


def test_a_loss_in_shared_memory_is_found_out_by_the_ranks_together_and_breaks_the_group(pair, monkeypatch):
    first, second = pair(deadline=5.0)
    found = iter([[1], [], []])
    asked = []
    monkeypatch.setattr(first._detector, "lost", lambda **told: asked.append(told) or next(found))
    for seen, named in ([0], (1,)), ([1], (1,)), ([], ()):
        lost = first.lost_elsewhere(seen, phase="combine", waited=0.5)
        assert (lost.peers, lost.phase, lost.waited, lost.rank) == (named, "combine", 0.5, 0)
    told = {"phase": "combine", "waited": 0.5, "deadline": 5.0}
    assert asked == [told | {"missing": missing} for missing in ([0], [1], [])]
    assert "is broken: rank 1 did not arrive in combine" in str(raised(first.barrier))  # the first one stands
    second.close()
    second.lost_elsewhere([0], phase="combine", waited=0.5)
    assert "is broken: it was closed" in str(raised(second.barrier))


def test_no_group_is_made_where_the_store_does_not_answer(pair, monkeypatch):
    first, _ = pair()

    def silent(*_, **__):
        raise TimeoutError("no answer within 1.0 s")

    with monkeypatch.context() as patch:
        patch.setattr("tokenyard.group.distributed.within", silent)
        for call in (first.subgroup, first.readmit):
            error = str(raised(call, [1] if call == first.readmit else [0, 1]))
            assert "cannot find each other: no answer within 1.0 s" in error
        for call in (lambda: first.decide("change 1", "stay"), lambda: first.decided("change 1")):
            assert "cannot find each other: no answer within 1.0 s" in str(raised(call))
    monkeypatch.setattr("tokenyard.group.failure_detector.within", silent)
    for call in (first.subgroup, first.readmit):
        error = str(raised(call, [1] if call == first.readmit else [0, 1]))
        assert "rank 0: the ranks of group 'pair' cannot find each other: the group's store does not" in error


def test_nccl_takes_in_nobody_and_a_group_that_was_closed_shares_no_memory_of_a_gpu(pair):
    first, _ = pair()
    first._carrier = torch.device("cuda")
    assert "group 'pair' uses NCCL" in str(raised(first.readmit, [1]))
    first.device = torch.device("cuda")
    first.close()
    assert "is broken: it was closed" in str(raised(first.share_memory, 8))


def test_torch_knows_what_the_ranks_that_met_talk_over(pair):
    first, _ = pair()
    assert first._process_group.name() == "gloo"


def test_each_wait_has_a_limit_and_so_has_the_library_underneath(pair, monkeypatch):
    first, _ = pair(deadline=7.0)
    limits, looked = [], []

    def no_time(seconds, *_, **__):
        limits.append(seconds)
        raise TimeoutError("no answer")

    def gathers(process_group, timeout, *_):
        limits.append(timeout)
        raise Interrupted

    monkeypatch.setattr(first._detector, "read", lambda: looked.append("read"))
    monkeypatch.setattr("tokenyard.group.distributed.within", no_time)
    raised(first.subgroup, [0, 1])
    raised(first.readmit, [1], seconds=3.0)
    monkeypatch.setattr("tokenyard.group.distributed.gather", gathers)
    with pytest.raises(Interrupted):
        first.barrier()
    assert limits == [30 + 30 + 2, 3 + 30 + 2, timedelta(seconds=7)]
    assert looked == ["read", "read"]  # whose processes the ranks are, before they are waited for


class NeverDone:
    """A collective that nobody finishes; how long it was waited for."""

    def __init__(self):
        self.waits = []

    def wait(self, limit):
        self.waits.append(limit.total_seconds())
        time.sleep(limit.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self):
        return False


@pytest.mark.parametrize("seconds", [-1.0, 0.03, 0.25])
def test_a_collective_is_waited_for_until_the_deadline_and_no_longer(pair, seconds):
    first, _ = pair()
    work, started = NeverDone(), time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        first._wait(work, started + seconds)
    assert all(0.001 <= each <= 0.1 for each in work.waits)
    assert work.waits[0] <= max(0.001, seconds)
    assert sum(work.waits[:-1]) <= max(0.0, seconds)
    assert sum(work.waits) <= max(0.0, seconds) + 0.002


# -- Groups of torch's world ---------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    """A world of torch.distributed of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_is_that_of_the_world_unless_another_one_is_given(world):
    made_by_torch = dist.new_group([0])
    own = f"group {made_by_torch.group_name}"
    for number in (1, 2, 3):
        use = [f"use {number}"] * (number > 1)
        whole, given = DistributedGroup(), DistributedGroup(made_by_torch, name="part", deadline=7.0)
        assert (whole.name, whole.deadline, whole.device, whole.rank, whole.size) == (
            "world",
            60.0,
            CPU,
            0,
            1,
        )
        assert (given.name, given.deadline, given.device, given.rank, given.size) == ("part", 7.0, CPU, 0, 1)
        assert whole._rejoin_store.group_key == "/".join(["world/0", *use])
        assert given._rejoin_store.group_key == "/".join(["part/0", own, *use[:1]])
        assert whole.gather_json("here") == given.gather_json("here") == ["here"]


@pytest.mark.parametrize("on_gpu", [(), ("device",), ("_carrier",), ("device", "_carrier")])
def test_torch_makes_subgroups_only_where_a_gpu_takes_part(world, on_gpu, monkeypatch):
    group, asked = DistributedGroup(deadline=90.0), []
    monkeypatch.setattr(distributed, "resolve_device", torch.device)
    monkeypatch.setattr(dist, "new_group", lambda *given, **how: asked.append((given, how)) or world)
    for name in on_gpu:
        setattr(group, name, torch.device("cuda", 0))
    part = group.subgroup([0], name="part")
    how = {"timeout": timedelta(seconds=90.0), "use_local_synchronization": True}
    assert asked == ([(([0],), how)] if on_gpu else [])
    assert (part.name, part.deadline, part.device) == ("part", 90.0, group.device)
