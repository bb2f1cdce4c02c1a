"""A plan that moves to another group closes the groups that it made itself, and no other; each has its own number."""

from types import SimpleNamespace

import pytest

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.elastic import take_over
from tokenyard.elastic.expert_moves import ExpertMoves
from tokenyard.elastic.joining import expect_experts
from tokenyard.errors import InputError, UnknownName
from tokenyard.exchange.stats import LayerStats
from tokenyard.exchange.transports.local import LocalTransport
from tokenyard.group import thread_groups
from tokenyard.planning.agreement import make_plan_id
from tokenyard.planning.draft_text import ranks_per_token
from tokenyard.routing import Placement


def alone():
    """A group of one rank."""
    return thread_groups(1)[0]


def is_closed(group):
    return "is closed" in str(raised(group.barrier))


def test_groups_that_the_caller_made_stay_open_and_those_of_the_plan_are_closed():
    first, second, third = (alone() for _ in range(3))
    plan = ty.plan([spec()], first)
    exchange = plan.exchange
    plan.readmit(group=second)
    # What it shared with the old group is given back.
    assert "the plan is closed" in str(raised(exchange.usability.check_open))
    plan.readmit(group=third)
    assert plan.group is third
    assert [is_closed(group) for group in (first, second, third)] == [False] * 3
    made = alone()
    third.readmit = lambda lost, *, seconds: made
    plan.readmit()
    assert plan.group is made
    assert not is_closed(third)
    last = alone()
    plan.readmit(group=last)
    assert is_closed(made)
    x_TH, routes = batch(spec(), 3)
    assert build(plan, "moe")(x_TH, routes).shape == (3, 32)
    plan.close()
    assert not is_closed(last)


def test_a_plan_on_another_group_still_hears_whether_ranks_have_switched():
    plan = ty.plan([spec()], alone())
    plan.readmit(group=alone())
    assert "have switched placements [1] times" in str(raised(plan.exchange.announcer.noticed, [1 << 2]))


def test_all_layers_are_made_ready_when_a_plan_is_made_and_whenever_it_changes(monkeypatch):
    warm = []
    monkeypatch.setattr(
        LocalTransport, "warmup", lambda self, specs: warm.append([each.layer for each in specs])
    )
    plan = ty.plan([spec()], alone())
    plan.extend([spec("more")])
    plan.trim(keep=["more"])
    plan.readmit(group=alone())
    assert warm == [["moe"], ["moe", "more"], ["more"], ["more"]]


class OwnTransport(LocalTransport):
    """A transport that fresh ranks do not know."""

    name = "own"


def test_a_plan_with_a_transport_that_fresh_ranks_do_not_know_takes_in_none():
    plan = ty.plan([spec()], alone(), exchange=OwnTransport)
    error = str(raised(plan.grow, 1))
    assert "the plan's exchange is 'own'; expected one that a fresh rank finds by its name: " in error


def test_a_fresh_rank_serves_once_its_experts_have_come():
    plan = ty.plan([spec()], alone())
    built, given, took = build(plan, "moe"), batch(spec(), 3), []
    assert "take_over was called on a rank whose experts are there" in str(raised(take_over, plan))
    expect_experts(
        plan, SimpleNamespace(take_over=lambda layers, seconds: took.append((list(layers), seconds)))
    )
    assert "this rank's experts have not come yet; expected a call of `tokenyard.elastic.take_over`" in str(
        raised(built, *given)
    )
    take_over(plan, seconds=3.0)
    assert took == [(["moe"], 3.0)]
    assert built(*given).shape == (3, 32)

    def not_taken_in(layers, seconds):
        raise KeyboardInterrupt

    expect_experts(plan, SimpleNamespace(take_over=not_taken_in))
    with pytest.raises(KeyboardInterrupt):
        take_over(plan)
    assert "the plan is closed" in str(raised(built, *given))


TWICE = Placement.explicit(4, [[0, 1, 2, 3], [0, 1, 2, 3]])


def cannot_be_resized(group):
    surviving = ty.plan([spec(num_experts=4, sum="choices", placement=TWICE)], group, survive=True)
    errors = [raised(surviving.shrink, [1]), raised(surviving.grow, 1)]
    plan = ty.plan([spec(num_experts=4)], group)
    if group.rank == 0:
        plan.go_on_without([1])
        errors.append(raised(plan.grow, 1))
    return [str(error) for error in errors]


def test_plans_that_survive_losses_or_have_lost_experts_keep_their_ranks():
    (shrink, grow, lost), _ = on_ranks(2, cannot_be_resized)
    assert "shrink was called on a plan with survive=True; expected a plan that has all its experts" in shrink
    assert "grow was called on a plan with survive=True" in grow
    assert "grow was called on a plan that has lost experts with their ranks" in lost


def test_a_layer_that_the_plan_does_not_have_cannot_be_moved():
    assert isinstance(raised(ty.plan([spec()], alone()).rebalance, {"mo": "contiguous"}), UnknownName)


def loses_twice(group):
    plan = ty.plan([spec("moe", experts="reference")], group)
    if group.rank == 2:
        return None
    x_TH, routes = batch(spec(), 3)
    layer = build(plan, "moe")
    assert isinstance(raised(layer, x_TH, routes), ty.PeerLost)
    plan.go_on_without([2])
    smaller = plan.group
    layer(x_TH, routes)
    if group.rank == 1:
        return None
    assert isinstance(raised(layer, x_TH, routes), ty.PeerLost)
    plan.go_on_without([1])
    rounds = plan.stats()["moe"].rounds
    layer(x_TH, routes)
    return smaller.size, is_closed(smaller), is_closed(plan.group), plan.stats()["moe"].rounds - rounds


def test_the_group_of_the_ranks_that_were_left_goes_with_the_next_loss():
    assert on_ranks(3, loses_twice)[0] == (2, True, False, 1)


@pytest.mark.parametrize("fingerprint", [0, 1, 2, 2**63 - 2, 2**63 - 1])
def test_plans_of_a_group_have_different_numbers_of_63_bits(fingerprint):
    drafted = SimpleNamespace(fingerprint=lambda: fingerprint)
    numbers = [make_plan_id(drafted, number) for number in range(1, 9)]
    assert len(set(numbers)) == 8
    assert all(0 <= number < 2**63 for number in numbers)


def test_the_first_rank_writes_the_plan_into_the_log(caplog):
    with caplog.at_level("INFO", logger="tokenyard"):
        plans = on_ranks(2, lambda group: str(ty.plan([spec()], group)))
    assert [record.getMessage() for record in caplog.records] == plans[:1]
    assert [record.threadName for record in caplog.records] == ["rank 0"]


@pytest.mark.parametrize("layers", [7, None, spec()])
def test_what_is_no_list_of_layers_is_refused(layers):
    with pytest.raises(InputError, match=r"layers is .*expected at least one LayerSpec"):
        ty.draft(layers, 2)


def test_a_fingerprint_has_63_bits():
    prints = [ty.draft([spec(top_k=k)], 2).fingerprint() for k in range(1, 5)]
    assert len(set(prints)) == 4
    assert all(0 <= one < 2**63 for one in prints)
    assert max(prints) > 2**56


def exchange_spec(placement, top_k):
    layer = spec(num_experts=placement.num_experts, top_k=top_k, placement=placement, sum="choices")
    (wiring,) = ty.draft([layer], placement.world).wirings
    return wiring.exchange_spec


@pytest.mark.parametrize(
    ("table", "top_k", "ranks"),
    [
        ([[0, 1], [2, 3]], 1, 1.0),
        ([[0, 1], [2, 3]], 2, 2 * (1 - 2 / 4 * 1 / 3)),  # both choices are on one rank, or not
        ([[0, 1], [2, 3]], 4, 2.0),
        ([[0, 1], [1]], 2, 1.5),  # rank 0 has both experts, and rank 1 sends one of its two rows away
        # Rank 2 sends half of its rows for expert 0 to each copy: 0.625, 0.625 and 1; the others meet two ranks.
        ([[0], [0], [1]], 2, (2 + 2 + 2.25) / 3),
    ],
)
def test_the_ranks_that_a_token_meets_on_average(table, top_k, ranks):
    placement = Placement.explicit(1 + max(map(max, table)), table)
    assert ranks_per_token(exchange_spec(placement, top_k)) == pytest.approx(ranks)


def test_the_rows_that_come_home_for_each_choice_are_told_with_two_digits():
    layer = spec(num_experts=256, top_k=8, sum="choices")
    drafted = ty.draft([layer, spec("ranks")], 8)
    assert [row["rows_home"] for row in drafted.rows()] == [1.51, 1.0]
    assert "the result of each choice comes home: 1.51 times the rows" in str(drafted)


@pytest.mark.parametrize(
    ("load_E", "threshold", "moves"),
    [
        ([3, 1, 0, 0], 2.0, False),  # as uneven as it may be
        ([3, 1, 0, 0], 1.99, True),
        ([4, 0, 0, 0], 1.1, False),  # no placement is better
        ([1, 1, 1, 1], 1.0, False),
        ([0, 0, 0, 0], 1.0, False),
    ],
)
def test_a_layer_moves_if_it_is_too_uneven_and_another_placement_is_better(load_E, threshold, moves):
    placement = Placement.contiguous(4, 2)
    exchange_spec = SimpleNamespace(placement=placement, num_experts=4)
    asked = []
    moves_of_plan = ExpertMoves.__new__(ExpertMoves)
    moves_of_plan._state = SimpleNamespace(
        wiring={"moe": SimpleNamespace(exchange_spec=exchange_spec, spec=spec(spare_experts=1))}.get,
        exchange=SimpleNamespace(stats={"moe": LayerStats(2)}),
        load=lambda *, reset: asked.append(reset) or {"moe": load_E},
    )
    assert list(moves_of_plan._balanced(threshold, {"moe": [3, 3]})) == (["moe"] if moves else [])
    assert asked == [True]  # the next time counts what comes after this


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_an_exchange_is_told_whether_experts_may_move(spare):
    """Tables of kernels then have room for copies of an expert on every rank."""
    made = ty.plan([spec(spare_experts=spare)], alone())
    assert made.wiring("moe").exchange_spec.movable is (spare > 0)
