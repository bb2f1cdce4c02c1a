"""Moves by hand: in which steps experts come, how their bytes travel, what ranks tell each other of them, and when."""

from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import raised
from tokenyard.experts.slots import ExpertSlots
from tokenyard.planning import moving
from tokenyard.planning.expert_moves import ExpertMoves, _Autobalance
from tokenyard.planning.moving import HeldExperts, Parcel, steps, streams, width
from tokenyard.planning.rebalancing import Progress, Rebalance, failure_of
from tokenyard.planning.state import WholePlan
from tokenyard.routing import Move


def placed(*table):
    return ty.Placement.explicit(1 + max(max(row, default=0) for row in table), table)


def tables(present, wanted, slots):
    return [step.table for step in steps(placed(*present), placed(*wanted), slots)]


def test_a_rank_is_filled_to_its_last_slot():
    assert tables([[0], [1]], [[0, 1], [1]], [2, 1]) == [((0, 1), (1,))]


def test_a_full_rank_waits_until_what_leaves_it_is_elsewhere():
    found = tables([[0, 1], [2]], [[0, 2], [1]], [2, 2])
    assert found == [((0,), (2, 1)), ((0, 2), (1,))]


def test_what_frees_a_slot_of_a_full_rank_comes_first():
    """Rank 1 is full, and waits for expert 0. Took rank 0 expert 3 into its one spare slot, both would wait forever."""
    found = tables([[0], [1, 2], [3]], [[3, 2], [1, 0], []], [2, 2, 2])
    assert found == [((0, 2), (1,), (3,)), ((2,), (1, 0), (3,)), ((3, 2), (1, 0), ())]


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(ty.PlanError, match=r"ranks \[0, 1\] have no spare slot"):
        steps(placed([0, 1], [2, 3], [4]), placed([2, 1], [0, 3], [4]), [2, 2, 1])
    with pytest.raises(ty.PlanError, match="rank 1 is to hold 2 experts, and has memory for 1"):
        steps(placed([0], [1]), placed([0], [1, 0]), [1, 1])


def test_a_stream_has_each_expert_once_one_behind_the_other():
    paths = {
        "a": [Move(expert=5, source=1, target=0), Move(expert=5, source=1, target=2)],
        "b": [Move(expert=7, source=1, target=2), Move(expert=0, source=2, target=1)],
    }
    sent = streams(3, paths, {"a": {"w": 10, "scales": 3}, "b": {"w": 6}})
    found = [[(p.layer, p.tensor, p.expert, p.targets, p.start, p.nbytes) for p in parts] for parts in sent]
    assert found == [
        [],
        [("a", "w", 5, (0, 2), 0, 10), ("a", "scales", 5, (0, 2), 10, 3), ("b", "w", 7, (2,), 13, 6)],
        [("b", "w", 0, (1,), 0, 6)],
    ]
    assert width(torch.zeros(7, 2, 3, dtype=torch.bfloat16)) == 12


@pytest.mark.parametrize(
    ("start", "nbytes", "parts"),
    [
        (10, 20, [(0, 6), (6, 20), None]),
        (10, 6, [(0, 6), None, None]),  # up to the end of a piece
        (16, 16, [None, (0, 16), None]),  # a whole one
        (0, 40, [(0, 16), (16, 32), (32, 40)]),
    ],
)
def test_pieces_of_sixteen_bytes_have_these_bytes_of_a_part(start, nbytes, parts):
    names = {"layer": "a", "tensor": "w", "expert": 0, "source": 0, "targets": (1,)}
    parcel = Parcel(**names, start=start, nbytes=nbytes)
    assert [parcel.in_piece(number, 16) for number in range(3)] == parts


def held(host="a", address=(1, 2, 5)):
    """Experts 7 and 8 in the first of four slots."""
    memory = None if address is None else dict(zip(("pid", "inode", "start"), address, strict=True))
    return HeldExperts(slots=ExpertSlots([7, 8], 4), host=host, memory={"w": memory})


def test_experts_are_read_out_of_memory_that_a_rank_of_the_same_host_shares():
    assert held().is_mapped_by(held())
    assert not held("b").is_mapped_by(held())
    assert not held(address=None).is_mapped_by(held())
    path = [Move(expert=e, source=1, target=target) for e, target in ((3, 0), (4, 2), (5, 0))]
    assert held().arrivals(path, 0) == {3: 2, 5: 3}


def test_an_expert_is_fetched_from_its_slot_piece_by_piece_and_memory_is_mapped_once(monkeypatch):
    mapped, checks, into = [], [], torch.zeros(4, dtype=torch.uint8)
    monkeypatch.setattr(moving, "PIECE", 3)
    monkeypatch.setattr(
        moving, "map_memory", lambda address: mapped.append(address) or torch.arange(20).byte()
    )
    carrier = moving.Carrier(SimpleNamespace())

    def fetch(expert):
        carrier.fetch(held(), "w", expert, into, lambda: checks.append(expert))
        return into.tolist()

    assert [fetch(8), fetch(7)] == [[9, 10, 11, 12], [5, 6, 7, 8]]
    assert checks == [8, 8, 7, 7]
    carrier.keep([held(), held(address=None)])
    fetch(7)
    assert len(mapped) == 1
    carrier.keep([held(address=(1, 3, 5))])  # another file of the same process
    fetch(7)
    carrier.close()
    fetch(7)
    assert len(mapped) == 3


def test_all_pieces_of_the_longest_stream_travel(monkeypatch):
    moved, checks = [], []
    monkeypatch.setattr(moving, "PIECE", 16)
    monkeypatch.setattr(moving, "_move_piece", lambda group, piece, read, write: moved.append(piece.number))
    carrier = moving.Carrier(ty.thread_groups(1)[0])
    paths = {"a": [Move(expert=0, source=0, target=1), Move(expert=1, source=1, target=0)]}
    for widths, pieces in (({}, 0), ({"w": 8, "scales": 8}, 1), ({"w": 17, "scales": 15}, 2)):
        moved.clear()
        carrier.carry(streams(2, paths, {"a": widths}), None, None, lambda: checks.append(1))
        assert moved == list(range(pieces))
    assert len(checks) == 3
    carrier.close()


LOST = ty.PeerLost([1], phase="moving experts", waited=1.0)
FULL = OSError("full")


@pytest.mark.parametrize(
    ("rank", "told", "own", "due"),
    [
        (0, [None, "OSError: full"], None, "rank 1 failed in moving experts: OSError: full"),
        (1, [None, "OSError: full"], FULL, FULL),
        (1, ["ValueError: first", "OSError: full"], FULL, FULL),
        # A rank that has lost another one tells of its error, if it had one.
        (0, ["PeerLost: 1", "OSError: full"], LOST, "rank 1 failed in moving experts: OSError: full"),
        (0, ["PeerLost: 1", "PeerLost: 0"], LOST, LOST),
        (0, [None, "PeerLost: 0"], None, "rank 1 failed in moving experts: PeerLost: 0"),
    ],
)
def test_who_gave_a_move_up_is_told(rank, told, own, due):
    error = failure_of(rank, told, own)
    assert error is due or (isinstance(error, ty.PeerFailed) and due in str(error))


# -- What ranks tell each other, and when --------------------------------------------------------------------


def moves_of_a_plan(rounds=0, between=True):
    exchange = SimpleNamespace(rounds=rounds, is_between_calls=lambda: between)
    return ExpertMoves(SimpleNamespace(group=SimpleNamespace(rank=1), exchange=exchange))


@pytest.mark.parametrize(
    ("told", "decision"),
    [
        ([Progress.READY, Progress.READY], Progress.READY),
        ([Progress.READY, Progress.PREPARING], Progress.PREPARING),
        ([Progress.PREPARING, Progress.FAILED], Progress.FAILED),
        ([Progress.READY, Progress.FAILED], Progress.FAILED),
    ],
)
def test_all_ranks_decide_the_same_of_what_they_hear(told, decision):
    moves = moves_of_a_plan()
    moves._switches = 3
    notices = []
    for progress in told:
        moves._move = SimpleNamespace(progress=progress, decision=None)
        notices.append(moves._notice())
    moves._noticed(notices)
    assert moves._move.decision is decision


def test_ranks_that_have_not_switched_alike_have_drifted_and_a_plan_that_is_gone_tells_nothing():
    moves = moves_of_a_plan()
    exchange = moves._state.exchange
    notices = []
    for moves._switches in (3, 2):
        notices.append(exchange.notice())
    error = raised(exchange.noticed, notices)
    assert isinstance(error, ty.Drifted)
    assert "switched placements [3, 2] times" in str(error)
    moves._noticed([notices[1]] * 2)
    del moves, error  # whose traceback holds it
    assert exchange.notice() == 0
    exchange.noticed(notices)


@pytest.mark.parametrize(
    ("rounds", "between", "looks"), [(11, True, 0), (12, True, 1), (13, True, 1), (12, False, 0)]
)
def test_the_load_is_looked_at_after_so_many_calls_between_two_of_them(rounds, between, looks):
    moves, looked = moves_of_a_plan(rounds, between), []
    moves._look = looked.append
    moves.between_calls("moe")
    moves._auto = _Autobalance(every=5, threshold=1.1, seen=7)
    moves.between_calls("moe")
    assert len(looked) == looks


def test_calls_are_counted_anew_when_a_plan_has_another_exchange():
    moves = moves_of_a_plan()
    moves._auto = _Autobalance(every=5, threshold=1.1, seen=7)
    moves.start()
    assert moves._auto.seen == 0


@pytest.mark.parametrize(("last", "closes"), [(None, 1), (True, 1), (False, 0)])
def test_what_moves_share_is_left_to_a_thread_that_still_uses_it(last, closes):
    moves, closed = moves_of_a_plan(), []
    moves._carrier = SimpleNamespace(close=lambda: closed.append(1))
    moves._last_move = None if last is None else SimpleNamespace(has_ended=last)
    moves.close_carrier()
    assert len(closed) == closes


def test_further_losses_are_counted_as_the_whole_group_numbers_ranks():
    whole = WholePlan(group=SimpleNamespace(size=5), specs={}, lost=(1,))
    assert whole.without([]).lost == (1,)
    assert whole.without([3, 1]).lost == (1, 2, 4)


def test_a_thread_whose_move_was_given_up_copies_no_further():
    move = Rebalance.__new__(Rebalance)
    move._group, move._cancelled = SimpleNamespace(rank=1), False
    move._check()
    move._cancelled = True
    assert "the move of experts was given up" in str(raised(move._check))


@pytest.mark.parametrize("started", [True, False])
def test_a_move_waits_for_the_thread_of_the_one_before(started):
    """One that was given up may still write into spare slots."""
    joined, before = [], Rebalance.__new__(Rebalance)
    before._thread = SimpleNamespace(join=lambda: joined.append(1)) if started else None
    carrier = SimpleNamespace(keep=list)
    move = Rebalance(ty.thread_groups(1)[0], carrier, {}, {}, {}, [], finish=None, after=before)
    move._run()
    assert (joined, move.error) == ([1] if started else [], None)
