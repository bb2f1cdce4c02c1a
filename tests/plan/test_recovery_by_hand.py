"""What a plan does after a loss, by hand: which losses calls survive, who serves a call again, what is closed."""

from types import SimpleNamespace

import pytest

import tokenyard as ty
from tests.models import raised, spec
from tokenyard.elastic.recovery import Recovery
from tokenyard.errors import PlanBroken
from tokenyard.group import thread_groups
from tokenyard.planning.state import WholePlan
from tokenyard.routing import Placement

TWICE = Placement.explicit(2, [[0, 1], [0, 1], [0]])


def lost(*peers, kind=ty.PeerLost):
    loss = ty.PeerLost(list(peers), phase="combine", waited=1.0)
    return loss if kind is ty.PeerLost else kind(loss)


def recovery(*, survive=True, rank=0, told=(), calls=0, placement=TWICE):
    """The recovery of a plan of three ranks, and what it calls."""
    done = []
    group = SimpleNamespace(rank=rank, size=3, gather_json=lambda value, phase: [value, *told])
    wiring = SimpleNamespace(exchange_spec=SimpleNamespace(placement=placement))
    layers = {
        name: SimpleNamespace(take_part=lambda name=name: done.append(name)) for name in ("first", "second")
    }
    state = SimpleNamespace(
        survive=survive, calls=calls, group=group, draft=SimpleNamespace(wirings=[wiring]), layers=layers
    )
    made = Recovery(state, None)
    made.go_on_without = lambda peers: done.append(list(peers))
    return made, done


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"survive": False}, lost(1)),
        ({}, lost(1, kind=PlanBroken)),
        ({}, lost()),
        ({"rank": 1}, lost(1)),
        ({}, lost(1, 2, 0)),
        ({"placement": Placement.explicit(2, [[0], [1], [0]])}, lost(1)),  # with expert 1
    ],
)
def test_losses_that_a_call_does_not_survive_are_raised(options, loss):
    made, done = recovery(**options)
    assert raised(made.go_on_after, loss, "first") is loss
    assert done == []


@pytest.mark.parametrize(
    ("calls", "told", "served"),
    [
        (4, [[4, "first"]], []),  # all are in the same call
        (5, [[4, "second"]], ["second"]),  # the other one makes a call again that this one has finished
        (4, [[5, "second"]], []),
        (5, [[4, "second"], [5, "first"]], ["second"]),
    ],
)
def test_who_has_finished_a_call_takes_part_in_it_for_the_others(calls, told, served):
    made, done = recovery(calls=calls, told=told)
    made.go_on_after(lost(2), "first")
    assert done == [[2], *served]


@pytest.mark.parametrize("wrong", [[0], [-1], [3], [1, 3]])
def test_lost_ranks_are_others_of_the_present_group(wrong):
    made, _ = recovery()
    assert made._check_lost((1, 2)) == [1, 2]
    error = str(raised(made._check_lost, wrong))
    assert f"rank {wrong[-1]} among those that are lost; expected ranks from 0 to 2, other than 0" in error


@pytest.mark.parametrize("made_here", [True, False])
@pytest.mark.parametrize("smaller", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_groups_that_the_plan_made_are_closed_if_it_leaves_them(made_here, smaller, stays):
    """`smaller`: ranks were lost before; `stays`: the whole group is that of the plan again."""
    closed = []

    def group(name):
        return SimpleNamespace(close=lambda: closed.append(name))

    whole, left, fresh = group("whole"), group("left"), group("fresh")
    state = SimpleNamespace(
        group=left if smaller else whole,
        whole=WholePlan(group=whole, specs={}, made_here=made_here),
        exchange=SimpleNamespace(close=lambda: closed.append("exchange")),
        start=lambda agreed, group, number: closed.append("started"),
    )
    moves = SimpleNamespace(
        close_carrier=lambda: closed.append("carrier"), start=lambda: closed.append("moves")
    )
    after = WholePlan(group=whole if stays else fresh, specs={})
    Recovery(state, moves)._restart(SimpleNamespace(fingerprint=lambda: 1), fresh, 1, after)
    due = ["left"] * smaller + ["whole"] * (made_here and not stays)
    assert closed == ["carrier", "exchange", *due, "started", "moves"]
    assert state.whole is after


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("left", [[], [1], [0, 2]])
def test_a_plan_goes_on_unless_those_that_were_lost_had_left_it(followed, left):
    """`followed`: the ranks have taken the next group first, and number the lost ones as it does."""
    done = []
    placements = [SimpleNamespace(without=lambda lost: f"without {lost}")]
    state = SimpleNamespace(
        exchange=SimpleNamespace(usability=SimpleNamespace(check_open=lambda: done.append("open"))),
        group=SimpleNamespace(rank=3, size=4, subgroup=lambda ranks: done.append(ranks) or "smaller"),
        draft=SimpleNamespace(
            specs=[spec()],
            wirings=[SimpleNamespace(exchange_spec=SimpleNamespace(placement=p)) for p in placements],
        ),
        redraft=lambda group, specs, **terms: (
            done.append((group, specs()[0].placement, terms)) or ("draft", 7)
        ),
        whole=WholePlan(group=SimpleNamespace(size=4), specs={}),
    )
    moves = SimpleNamespace(follow=lambda lost: (left, followed), settle=done.append)
    made = Recovery(state, moves)
    made._restart = lambda *terms: done.append(terms)
    made.go_on_without([1], renormalize=True)
    if followed and not left:
        assert done == ["open"]
    else:
        staying = [rank for rank in range(4) if rank not in left]
        terms = {"renormalize_dropped": True}
        whole = WholePlan(group=state.whole.group, specs={}, lost=tuple(left))
        redrafted = ("smaller", f"without {left}", terms)
        assert done == ["open", staying, "smaller", redrafted, ("draft", "smaller", 7, whole)]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("gone", [[], [1]])
def test_fresh_ranks_come_after_those_that_are_left_have_settled(gone, given):
    done, whole_group, fresh = [], SimpleNamespace(size=3), thread_groups(1)[0]
    whole_group.readmit = lambda lost, *, seconds: done.append((lost, seconds)) or fresh
    left = SimpleNamespace(close=lambda: done.append("left closed"))
    state = SimpleNamespace(
        exchange=SimpleNamespace(usability=SimpleNamespace(check_open=lambda: done.append("open"))),
        group=SimpleNamespace(rank=0, size=2, subgroup=lambda ranks: done.append(ranks) or left),
        draft=SimpleNamespace(specs=[spec()]),
        redraft=lambda group, specs: (specs(), 7) if group.deadline == 90.0 else None,
        whole=WholePlan(group=whole_group, specs={"moe": "as it was"}, lost=(1,)),
    )
    moves = SimpleNamespace(follow=lambda lost: (lost, False), settle=lambda group: done.append("settled"))
    made = Recovery(state, moves)
    made._restart = lambda *terms: done.append(terms)
    made.readmit(gone, group=fresh if given else None, seconds=90.0)
    lost = (1, 2) if gone else (1,)
    restored = WholePlan(group=fresh, specs={"moe": "as it was"}, made_here=not given)
    assert done == [
        "open",
        *([[0], "settled", "left closed"] if gone else []),
        *([] if given else [(lost, 90.0)]),
        (["as it was"], fresh, 7, restored),
    ]
    assert fresh.deadline < 90.0
