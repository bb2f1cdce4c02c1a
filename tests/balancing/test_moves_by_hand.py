"""Moves by hand: in which steps experts come, how their bytes travel, what ranks tell each other of them, and when."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import raised
from tokenyard.elastic import expert_moves, move_under_way, moving
from tokenyard.elastic.expert_moves import ExpertMoves, _Autobalance, _together
from tokenyard.elastic.move_under_way import CALLS_BETWEEN_QUESTIONS
from tokenyard.elastic.moving import HeldExperts, Parcel, steps, streams, width
from tokenyard.elastic.rebalancing import Progress, Rebalance, failure_of
from tokenyard.errors import Drifted, GroupError, HandleError, PeerFailed, PlanBroken, PlanError
from tokenyard.exchange.stats import LayerStats
from tokenyard.experts.slots import ExpertSlots
from tokenyard.group import thread_groups
from tokenyard.planning.state import WholePlan
from tokenyard.routing import Move, Placement


def placed(*table):
    return Placement.explicit(1 + max(max(row, default=0) for row in table), table)


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
    with pytest.raises(PlanError, match=r"ranks \[0, 1\] have no spare slot"):
        steps(placed([0, 1], [2, 3], [4]), placed([2, 1], [0, 3], [4]), [2, 2, 1])
    with pytest.raises(PlanError, match="rank 1 is to hold 2 experts, and has memory for 1"):
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
    carrier = moving.Carrier(thread_groups(1)[0])
    paths = {"a": [Move(expert=0, source=0, target=1), Move(expert=1, source=1, target=0)]}
    for widths, pieces in (({}, 0), ({"w": 8, "scales": 8}, 1), ({"w": 17, "scales": 15}, 2)):
        moved.clear()
        carrier.carry(streams(2, paths, {"a": widths}), None, None, lambda: checks.append(1))
        assert moved == list(range(pieces))
    assert len(checks) == 3
    carrier.close()


def test_who_makes_the_group_that_carries_looks_after_the_move_and_after_who_stays():
    looks = []

    def subgroup(ranks, *, name, purpose, check):
        check()
        return SimpleNamespace(members=[*ranks, name, purpose])

    of = SimpleNamespace(name="world", size=3, subgroup=subgroup)
    carrier = moving.Carrier(of, "a question", check=lambda: looks.append("who stays"))
    carried = streams(3, {"a": [Move(expert=0, source=0, target=1)]}, {"a": {"w": 8}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "_move_piece", lambda group, *_: looks.append(group.members))
        carrier.carry(carried, None, None, lambda: looks.append("the move"))
    assert looks == ["who stays", "the move", "the move", [0, 1, 2, "world/a question", "a question"]]


def test_ranks_meet_in_the_group_that_carries():
    met, carrier = [], moving.Carrier(SimpleNamespace())
    carrier._group = SimpleNamespace(barrier=lambda *, phase: met.append(phase))
    carrier.meet()
    assert met == ["moving experts"]


def test_a_rank_that_takes_part_no_more_ends_the_waits_of_the_others():
    told, carrier = [], moving.Carrier(SimpleNamespace())
    carrier.abandon()  # there is no group yet
    carrier._group = SimpleNamespace(rank=2, lost_elsewhere=lambda ranks, **how: told.append((ranks, how)))
    carrier.abandon()
    assert told == [([2], {"phase": "moving experts", "waited": 0.0})]


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
    assert error is due or (isinstance(error, PeerFailed) and due in str(error))


# -- What ranks tell each other, and when --------------------------------------------------------------------


def moves_of_a_plan(rounds=0, between=True):
    exchange = SimpleNamespace(
        rounds=rounds,
        is_between_calls=lambda: between,
        hears_notices=True,
        in_use=contextlib.nullcontext,
        announcer=SimpleNamespace(),
    )
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
    moves = moves_of_a_plan().under_way
    moves._switches = 3
    notices = []
    for progress in told:
        moves.move = SimpleNamespace(progress=progress, decision=None)
        notices.append(moves._notice())
    moves._noticed(notices)
    assert moves.move.decision is decision


def test_ranks_that_have_not_switched_alike_have_drifted_and_a_plan_that_is_gone_tells_nothing():
    moves = moves_of_a_plan().under_way
    announcer = moves._state.exchange.announcer
    notices = []
    for moves._switches in (3, 2):
        notices.append(announcer.notice())
    error = raised(announcer.noticed, notices)
    assert isinstance(error, Drifted)
    assert "switched placements [3, 2] times" in str(error)
    moves._noticed([notices[1]] * 2)
    del moves, error  # whose traceback holds it
    assert announcer.notice() == 0
    announcer.noticed(notices)


@pytest.mark.parametrize(
    ("rounds", "between", "looks"), [(11, True, 0), (12, True, 1), (13, True, 1), (12, False, 0)]
)
def test_the_load_is_looked_at_after_so_many_calls_between_two_of_them(rounds, between, looks):
    moves, looked = moves_of_a_plan(rounds, between), []
    moves._look = looked.append
    moves.between_calls("moe")
    moves._auto, moves.under_way.looked = _Autobalance(every=5, threshold=1.1), 7
    moves.between_calls("moe")
    assert len(looked) == looks


def test_all_ranks_switch_between_two_calls_and_change_before_the_first_layer():
    states = itertools.product([True, False], ["first", "second"], Progress, [True, False])
    for changes_ranks, layer, decision, between in states:
        moves, concluded = moves_of_a_plan(between=between), []
        moves._state.draft = SimpleNamespace(wirings=[SimpleNamespace(spec=SimpleNamespace(name="first"))])
        moves.under_way._conclude = concluded.append
        next_ranks = SimpleNamespace() if changes_ranks else None
        moves.under_way.move = SimpleNamespace(decision=decision, next_ranks=next_ranks)
        moves.between_calls(layer)
        due = between and decision is not Progress.PREPARING and (layer == "first" or not changes_ranks)
        assert len(concluded) == due


def test_ranks_that_hear_nothing_in_dispatches_ask_each_other_from_time_to_time():
    states = [(15, True, False), (16, True, True), (17, True, True), (16, False, False)]
    for rounds, between, asks in states:
        moves, asked = moves_of_a_plan(rounds + 5, between), []
        moves.under_way._asked, moves._state.exchange.hears_notices = 5, False
        moves._state.draft = SimpleNamespace(wirings=[])
        moves._state.group.gather_json = lambda told, phase, asked=asked: asked.append(told) or [told] * 2
        moves.under_way.move = SimpleNamespace(
            decision=Progress.PREPARING, progress=Progress.FAILED, error=FULL, next_ranks=None
        )
        moves.under_way._conclude = lambda move: None
        moves.between_calls("moe")
        assert asked == ([[Progress.FAILED, "OSError: full"]] if asks else [])
        assert moves.under_way._asked == (rounds + 5 if asks else 5)
        assert moves.under_way.move.decision is (Progress.FAILED if asks else Progress.PREPARING)
        moves._state.exchange.hears_notices = True
        moves.between_calls("moe")
        assert len(asked) == asks


def test_the_first_question_of_a_group_comes_after_as_many_calls_as_the_others():
    for rounds in (CALLS_BETWEEN_QUESTIONS - 1, CALLS_BETWEEN_QUESTIONS):
        moves, asked = moves_of_a_plan(rounds), []
        moves._state.exchange.hears_notices = False
        moves.under_way._decide = lambda move, progress, asked=asked: asked.append(progress)
        moves.under_way.move = SimpleNamespace(decision=Progress.PREPARING, progress=Progress.READY)
        moves.between_calls("moe")
        assert asked == [Progress.READY] * (rounds == CALLS_BETWEEN_QUESTIONS)


def test_nothing_is_switched_while_a_graph_is_captured(monkeypatch):
    moves, concluded = moves_of_a_plan(), []
    moves.under_way._conclude = concluded.append
    moves.under_way.move = SimpleNamespace(decision=Progress.READY, next_ranks=None)
    monkeypatch.setattr(expert_moves.torch.cuda, "is_available", lambda: True)
    for capturing in (True, False):
        monkeypatch.setattr(
            expert_moves.torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing
        )
        moves.between_calls("moe")
        assert len(concluded) == (not capturing)


def test_calls_are_counted_anew_when_a_plan_has_another_exchange():
    moves = moves_of_a_plan()
    moves.under_way.looked = 7
    moves.under_way.start()
    assert moves.under_way.looked == 0


@pytest.mark.parametrize(("last", "closes"), [(None, 1), (True, 1), (False, 0)])
def test_what_moves_share_is_left_to_a_thread_that_still_uses_it(last, closes):
    moves, closed = moves_of_a_plan().under_way, []
    moves.carrier = SimpleNamespace(close=lambda: closed.append(1))
    moves.last_move = None if last is None else SimpleNamespace(has_ended=last)
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
    move = Rebalance(thread_groups(1)[0], carrier, {}, {}, {}, [], finish=None, after=before)
    move._run()
    assert (joined, move.error) == ([1] if started else [], None)


def test_layers_that_need_fewer_steps_switch_in_the_first_ones():
    assert _together({}) == []
    assert _together({"a": [1, 2, 3], "b": [4], "c": []}) == [{"a": 1, "b": 4}, {"a": 2}, {"a": 3}]


def test_a_switch_is_counted_with_its_pause_and_what_came_for_it(monkeypatch):
    clock = iter([10.0, 10.25])
    monkeypatch.setattr(move_under_way, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    moves, stats = moves_of_a_plan().under_way, LayerStats(2)
    moves._state.exchange.stats, moves._switch = {"moe": stats}, lambda move: None
    move = SimpleNamespace(
        step={"moe": None},
        came={"moe": {3: 0, 5: 1}},
        is_last_step=False,
        next_ranks=None,
        decision=Progress.READY,
        nbytes=70,
        seconds=2.5,
    )
    moves._conclude(move)
    assert move.pause_ms == 250.0
    found = stats.moves
    assert (found.switches, found.experts, found.nbytes) == (1, 2, 70)
    assert (found.switch_s, found.copy_s) == (0.25, 2.5)


def test_a_look_by_itself_does_not_wait_for_the_move():
    moves, asked = moves_of_a_plan(rounds=4), []
    moves.rebalance = lambda **options: asked.append(options)
    moves._look(_Autobalance(every=5, threshold=1.3))
    assert asked == [{"threshold": 1.3, "wait": False}]
    assert moves.under_way.looked == 4


@pytest.mark.parametrize(
    ("counts", "usable"), [([4, 3], [3, 2]), ([3, 2], [2, 2]), ([2, 2], [2, 2]), ([5, 2], [4, 2])]
)
def test_one_slot_of_each_rank_stays_free_for_the_next_move(counts, usable, monkeypatch):
    present, asked = placed([0, 1], [2, 3]), []
    monkeypatch.setattr(
        expert_moves, "balance", lambda load_E, now, **terms: asked.append((load_E, now, terms)) or now
    )
    stats, even = LayerStats(2), LayerStats(2)
    moves = moves_of_a_plan()
    wiring = SimpleNamespace(
        exchange_spec=SimpleNamespace(placement=present, num_experts=4), spec=SimpleNamespace(spare_experts=1)
    )
    moves._state.wiring = {"even": wiring, "moe": wiring}.get
    moves._state.exchange.stats = {"even": even, "moe": stats}
    moves._state.load = lambda *, reset: {"even": [1, 1, 1, 1], "moe": [5, 1, 1, 1]}
    assert moves._balanced(1.1, {"even": counts, "moe": counts}) == {}  # what was found is not better
    assert asked == [([5, 1, 1, 1], present, {"copies": sum(usable) - 4, "slots": usable})]
    assert (stats.moves.looks, stats.moves.imbalance, stats.moves.imbalance_expected) == (1, 1.5, 0.0)
    assert (even.moves.looks, even.moves.imbalance) == (1, 1.0)


# -- What becomes of a change of ranks after a loss ----------------------------------------------------------


def change_under_way(is_last_step=True, refused=False, members=(0, 2, 3), closed=False):
    """A move to the next group, as rank 0 has it, and what is called of it."""
    calls = []
    moves = moves_of_a_plan().under_way

    def check_open():
        calls.append("checked")
        if closed:
            raise HandleError("the plan is closed", expected="", fix="")

    moves._state.exchange.usability = SimpleNamespace(check_open=check_open)
    next_ranks = SimpleNamespace(refuse=lambda: calls.append("asked") or refused, members=list(members))
    moves.move = SimpleNamespace(is_last_step=is_last_step, next_ranks=next_ranks)
    moves._switch = lambda move: calls.append("switched")
    return moves, calls


def test_ranks_follow_into_the_next_group_where_one_has_taken_it():
    moves, calls = change_under_way()
    assert moves.follow([1, 3]) == ([2], True)  # rank 1 has left the plan, and rank 3 is its rank 2 now
    assert calls == ["asked", "switched", "checked"]
    assert change_under_way()[0].follow([]) == ([], True)
    moves, calls = change_under_way(closed=True)
    assert "the plan is closed" in str(raised(moves.follow, [1]))


def test_ranks_stay_where_nobody_has_taken_the_next_group():
    for options, asked in (({"refused": True}, ["asked"]), ({"is_last_step": False}, [])):
        moves, calls = change_under_way(**options)
        assert moves.follow([1]) == ([1], False)
        assert calls == asked
    for moves_experts in (False, True):
        moves, calls = change_under_way()
        moves.move = SimpleNamespace(is_last_step=True, next_ranks=None) if moves_experts else None
        assert moves.follow([1]) == ([1], False)
        assert calls == []


@pytest.mark.parametrize("made_here", [True, False])
@pytest.mark.parametrize("smaller", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_takes_the_next_group_leaves_behind_what_the_plan_made(made_here, smaller, leaves):
    """`smaller`: ranks were lost before, and the plan made a group of those that were left."""
    calls = []

    def closing(name, **others):
        return SimpleNamespace(close=lambda **how: calls.append((name, how)), **others)

    moves, counted = moves_of_a_plan().under_way, object()
    state = moves._state
    state.exchange = closing(
        "exchange", usability=closing("usability"), stats={"moe": SimpleNamespace(moves=counted)}
    )
    moves.carrier = closing("carrier")
    whole, left = closing("whole"), closing("left")
    state.whole = WholePlan(group=whole, specs={"moe": None}, made_here=made_here)
    state.group = left if smaller else whole
    stats = SimpleNamespace(moves=None)
    following = SimpleNamespace(
        exchange=None if leaves else SimpleNamespace(stats={"moe": stats}), group="next", draft="draft"
    )
    state.take = lambda exchange, draft: calls.append((exchange, draft))
    state.wirings = {"moe": "wiring", "more": "wiring of more"}
    state.layers = {
        name: SimpleNamespace(switch=lambda wiring, came: calls.append((wiring, came)))
        for name in state.wirings
    }
    moves.start = lambda: calls.append("started")
    moves._take(following, SimpleNamespace(came={"moe": {3: 1}}))
    if leaves:
        assert calls == [("usability", {"left": True})]
    else:
        taken = [(following.exchange, "draft"), ("wiring", {3: 1}), ("wiring of more", {}), "started"]
        assert calls == taken
        assert stats.moves is counted
        assert state.whole == WholePlan(group="next", specs={"moe": None}, made_here=True)
    calls.clear()
    for give_back in following.left_behind:
        give_back()
    due = ["exchange", "carrier", *["left"] * smaller, *["whole"] * made_here]
    assert calls == [(name, {}) for name in due]


@pytest.mark.parametrize(
    ("switches", "is_done", "due"),
    [
        ([3, 3], False, ["given up"]),  # nobody has switched
        ([3, 4], False, ["step", "switched", "given up"]),  # one of several steps
        ([3, 4], True, ["step", "switched"]),
    ],
)
def test_after_a_loss_the_ranks_that_are_left_have_made_equally_many_steps(switches, is_done, due):
    moves, calls = moves_of_a_plan().under_way, []
    moves._switches = 3
    loss = ty.PeerLost([2], phase="combine", waited=1.0)
    moves._state.exchange.usability = SimpleNamespace(broken_by=loss)
    moves._take_step = lambda move: calls.append("step")
    moves.give_up = lambda error: calls.append("given up") or errors.append(error)
    move, errors = SimpleNamespace(is_done=is_done, switched=lambda: calls.append("switched")), []
    moves.move = move
    moves.settle(SimpleNamespace(gather_json=lambda value, phase: switches))
    assert calls == due
    assert moves.move is None
    assert [type(error) for error in errors] == [PlanBroken] * due.count("given up")
    moves.settle(SimpleNamespace(gather_json=lambda value, phase: [9]))  # where nothing moves
    assert calls == due


@pytest.mark.parametrize("leaves_now", [None, True, False])
def test_a_rank_that_leaves_waits_for_the_others_before_its_plan_is_closed(leaves_now):
    moves, calls = moves_of_a_plan().under_way, []
    moves.give_up = lambda error: calls.append(str(error))
    moves.close_carrier = lambda: calls.append("closed")
    if leaves_now is not None:
        moves.move = SimpleNamespace(leaves_now=leaves_now, wait=lambda: calls.append("waited"))
    moves.close()
    assert calls[:-2] == (["waited"] if leaves_now else [])
    assert "the plan was closed" in calls[-2]
    assert calls[-1] == "closed"


def test_a_change_that_is_given_up_is_refused_counted_and_logged(caplog):
    moves, calls = moves_of_a_plan().under_way, []
    stats = {"moe": LayerStats(2), "more": LayerStats(2)}
    moves._state.exchange.stats = stats

    def refuse():
        calls.append("refused")
        raise GroupError("nobody answers", expected="", fix="")

    error = ValueError("no room")
    moves.move = SimpleNamespace(
        give_up=calls.append,
        error="no room",
        placements={"moe": None},
        next_ranks=SimpleNamespace(refuse=refuse),
    )
    moves.give_up(error)
    assert calls == ["refused", error]
    assert moves.move is None
    assert [each.moves.given_up for each in stats.values()] == [1, 0]
    assert "experts stay where they are: no room" in caplog.text
    moves.give_up(error)  # where nothing moves
    assert calls == ["refused", error]


def test_local_ids_are_looked_up_only_where_experts_stand_elsewhere():
    cpu, before = torch.device("cpu"), torch.zeros(3, dtype=torch.int32)
    slots = ExpertSlots([7, 8], 4)
    assert slots.lookup(cpu) is slots.lookup(cpu, before) is None  # also with spare slots
    slots.switch([8, 7], {})
    assert slots.lookup(cpu).tolist() == [1, 0, -1, -1, -1]
    slots.switch([7, 9], {9: 3})
    assert slots.lookup(cpu, before).tolist() == [0, 3, -1, -1, -1]
    assert before.tolist() == [0, 0, 0]
