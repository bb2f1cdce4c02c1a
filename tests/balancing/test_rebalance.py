"""Experts that move while a plan is in use: no output changes, and an error or a loss leaves the old placement."""

import random

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.elastic import moving
from tokenyard.elastic.move_under_way import CALLS_BETWEEN_QUESTIONS, MoveUnderWay
from tokenyard.elastic.rebalancing import Progress
from tokenyard.errors import PlanMismatch
from tokenyard.exchange.announcement import ignore_notices
from tokenyard.experts import ReferenceExperts
from tokenyard.experts.slots import with_spare_slots
from tokenyard.planning.planner import state_of
from tokenyard.routing import Placement, SoftmaxRouter, balance, imbalance, rank_loads


def drawn_placement(seed, num_experts, world):
    """Any table: uneven, some experts on several ranks, some ranks without any."""
    chance = random.Random(seed)
    table = [[] for _ in range(world)]
    for expert in chance.sample(range(num_experts), num_experts):
        for rank in chance.sample(range(world), chance.choice([1, 1, 2])):
            table[rank].append(expert)
    return Placement.explicit(num_experts, table)


def outputs(group, layers, exchange, steps, moves, piece=None):
    """Outputs of some steps; with a move in each: before the call, or beside it, while the layers run."""
    moving.PIECE = piece or moving.PIECE  # of a process that is this rank's own
    plan = ty.plan(layers, group, exchange=exchange)
    built = [build(plan, layer.name) for layer in layers]
    results, under_way = [], None
    for step in range(steps):
        layer = layers[step % len(layers)]
        wanted = drawn_placement(step, layer.num_experts, group.size)
        if moves == "before":
            assert plan.rebalance({layer.name: wanted}).placements.keys() <= {layer.name}
            assert plan.wiring(layer.name).exchange_spec.placement == wanted
        elif moves == "beside" and all(group.gather_json(under_way is None or under_way.is_done)):
            under_way = plan.rebalance({layer.name: wanted}, wait=False)
        for layer, module in zip(layers, built, strict=True):
            results.append(module(*batch(layer, (step + group.rank) % 5, seed=step)))
        if under_way is not None:
            under_way.wait_for_thread() if not under_way.is_done else None  # so that there are many
    counted = plan.stats()[layers[0].name].as_dict()["moves"]
    per_expert = sum(moving.width(tensor) for tensor in built[0].experts.movable().values())
    assert counted["nbytes"] == counted["experts"] * per_expert
    return results, counted


def assert_same(still, moved):
    for (before, _), (after, _) in zip(still, moved, strict=True):
        assert len(before) == len(after) > 0
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# Every step another placement; together: all ways to hold weights, experts that keep their slots and that come.
@pytest.mark.parametrize(
    ("exchange", "steps", "kinds"),
    [
        ("one_sided", 200, [{}]),
        ("one_sided", 12, [{"weights": "mxfp4", "bias": True}, {"weights": "mxfp8"}]),
        ("two_sided", 8, [{"weights": "nvfp4", "experts": "reference"}, {"weights": "mxint4"}]),
        ("allgather", 8, [{"weights": "fp8_block128"}, {"weights": "fp32", "top_k": 4}]),
    ],
)
def test_a_move_in_every_step_changes_no_output(exchange, steps, kinds):
    layers = [
        spec(f"moe.{n}", sum="choices", num_experts=6, spare_experts=6, **kind)
        for n, kind in enumerate(kinds)
    ]
    still = on_ranks(3, outputs, layers, exchange, steps, None)
    moved = on_ranks(3, outputs, layers, exchange, steps, "before")
    beside = on_ranks(3, outputs, layers, exchange, min(steps, 40), "beside")
    assert_same(still, moved)
    assert_same([(results[: 40 * len(layers)], stats) for results, stats in still], beside)
    for _, stats in moved:
        assert 0 < stats["switch_s"] < 60
        assert 0 < stats["copy_s"] < 60
        assert stats["switches"] >= steps // len(layers) - 1
    assert sum(stats["experts"] for _, stats in moved) > steps
    assert all(stats["switches"] > 0 for _, stats in beside)


@pytest.mark.parametrize("moves", ["before", "beside"])
def test_processes_move_experts_in_small_pieces(moves):
    layers = [spec(sum="choices", num_experts=6, weights="mxfp8", spare_experts=6)]
    still = on_ranks(2, outputs, layers, "one_sided", 20, None, ranks="processes")
    moved = on_ranks(2, outputs, layers, "one_sided", 20, moves, 300, ranks="processes")
    assert_same(still, moved)
    assert all(stats["switches"] > 2 for _, stats in moved)


def test_hosts_move_experts_through_their_group(monkeypatch):
    monkeypatch.setattr(moving, "PIECE", 300)
    layers = [spec(sum="choices", num_experts=6, spare_experts=6)]
    still = on_ranks(4, outputs, layers, "two_sided", 8, None)
    moved = on_ranks(4, outputs, layers, "two_sided", 8, "before", hosts=2)
    assert_same(still, moved)


def in_other_memory(group):
    """The weights of rank 1 leave the memory that they were loaded into: nobody can map them."""
    layer = spec(sum="choices", num_experts=6, spare_experts=2)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    given = batch(layer, 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 1:
        built.experts._apply(torch.clone)
    fetched, fetch = [], plan._changing().moves.under_way.carrier.fetch
    plan._changing().moves.under_way.carrier.fetch = lambda held, *rest: (
        fetched.append(held.memory) or fetch(held, *rest)
    )
    plan.rebalance({"moe": "round_robin"})
    return (
        torch.equal(built(*given), before_TH),
        bool(fetched),
        plan._changing().moves.under_way.carrier._group is not None,
    )


def test_weights_that_cannot_be_mapped_move_through_the_group():
    assert on_ranks(2, in_other_memory) == [(True, False, True), (True, True, True)]


def memory_of_others(group):
    plan = ty.plan([spec(sum="choices", num_experts=6, spare_experts=2)], group)
    mapped = []
    for placement in ("round_robin", "contiguous"):
        built = build(plan, "moe")
        plan.rebalance({"moe": placement})
        mapped.append(set(plan._changing().moves.under_way.carrier._mapped))
        group.barrier()
        del built
    plan.close()
    return mapped, plan._changing().moves.under_way.carrier._mapped


def test_memory_of_others_is_mapped_as_long_as_their_layers_are_there():
    for (first, second), closed in on_ranks(2, memory_of_others):
        assert len(first) == len(second) == 1
        assert first != second
        assert closed == {}


IN_FP32 = {"dtype": torch.float32, "weights": "fp32"}


def self_routed(group, moves):
    layer = spec(
        num_experts=6,
        experts="self_routing",
        router=SoftmaxRouter(top_k=2, renormalize=True),
        spare_experts=4,
        **IN_FP32,
    )
    plan = ty.plan([layer], group, exchange="allgather")
    built = build(plan, "moe")
    results = []
    for step in range(5):
        if moves:
            plan.rebalance({"moe": ["round_robin", "contiguous"][step % 2]})
        draw = torch.Generator().manual_seed(step)
        results.append(built(torch.randn(4, 32, generator=draw), torch.randn(4, 6, generator=draw)))
    return results


def test_experts_that_route_by_themselves_move():
    """Sums over ranks depend on the placement in their last bits; the experts do not."""
    for still, moved in zip(on_ranks(2, self_routed, False), on_ranks(2, self_routed, True), strict=True):
        for before, after in zip(still, moved, strict=True):
            torch.testing.assert_close(after, before)


def test_little_memory_takes_several_steps():
    layers = [spec(sum="choices", num_experts=6, spare_experts=1)]
    still, moved = on_ranks(3, swapped, layers, False), on_ranks(3, swapped, layers, True)
    for (before, _), (after, switches) in zip(still, moved, strict=True):
        assert torch.equal(before, after)
        assert switches == 2  # two experts come to each rank, one at a time


def swapped(group, layers, moves):
    plan = ty.plan(layers, group)
    built = build(plan, "moe")
    if moves:
        plan.rebalance({"moe": Placement.explicit(6, [[2, 3], [4, 5], [0, 1]])})
    return built(*batch(layers[0], 5, seed=1)), plan.stats()["moe"].moves.switches


def test_steps_never_lose_an_expert_nor_take_more_memory_than_there_is():
    for seed in range(60):
        chance = random.Random(seed)
        world = chance.choice([2, 3, 8])
        num_experts = chance.choice([8, 16, 24])
        spare = chance.choice([1, 2, 3])
        present = Placement.contiguous(num_experts, world)
        slots = [len(row) + spare for row in present.table]
        for _ in range(2):
            load = [1 / (1 + n) ** 1.2 for n in chance.sample(range(num_experts), num_experts)]
            usable = [count - 1 for count in slots]
            wanted = balance(load, present, copies=sum(usable) - num_experts, slots=usable)
            for step in moving.steps(present, wanted, slots):
                assert step.lost_experts == []
                for rank, row in enumerate(step.table):
                    assert len({*row, *present.table[rank]}) <= slots[rank]
                present = step
            assert present == wanted


def uneven(group):
    layer = spec("hot", num_experts=8, top_k=1, experts="reference", sum="choices", spare_experts=2)
    even = spec("even", num_experts=8, top_k=1, spare_experts=2)
    plan = ty.plan([layer, even], group)
    built = {s.name: build(plan, s.name) for s in (layer, even)}
    x_TH, _ = batch(layer, 12, seed=group.rank)
    hot_TK = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6]).unsqueeze(1)
    routes = ty.Routes(topk_ids_TK=hot_TK, topk_weights_TK=torch.ones(12, 1))
    before_TH = built["hot"](x_TH, routes)
    evenly = ty.Routes(topk_ids_TK=torch.arange(8).unsqueeze(1), topk_weights_TK=torch.ones(8, 1))
    built["even"](x_TH[:8], evenly)
    load = plan.load()["hot"]
    moved = plan.rebalance(threshold=1.2).placements
    after_TH = built["hot"](x_TH, routes)
    again = plan.rebalance(threshold=1.2).placements
    return load, moved, again, torch.equal(before_TH, after_TH)


def test_without_placements_uneven_layers_are_balanced_by_their_counts():
    for load, moved, again, same in on_ranks(2, uneven):
        assert list(moved) == ["hot"]
        assert imbalance(rank_loads(load, Placement.contiguous(8, 2))) == 1.5
        assert imbalance(rank_loads(load, moved["hot"])) < 1.2
        assert again == {}
        assert same


# -- Errors and losses -------------------------------------------------------------------------------------


def fails_on_one_rank(group):
    plan = ty.plan([spec(sum="choices", num_experts=6, spare_experts=2)], group)
    built = build(plan, "moe")
    given = batch(built.wiring.spec, 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 1:
        state_of(plan).layers.clear()
    error = raised(plan.rebalance, {"moe": "round_robin"})
    state_of(plan).layers["moe"] = built
    mismatch = raised(plan.rebalance, {"moe": "round_robin" if group.rank else "contiguous"})
    wrong = raised(plan.rebalance, {"moe": Placement.contiguous(7, 2)})
    return str(error), type(mismatch), str(wrong), torch.equal(before_TH, built(*given))


def test_an_error_on_one_rank_leaves_all_on_the_old_placement():
    (peer, *first), (own, *second) = on_ranks(2, fails_on_one_rank)
    assert "layer 'moe', rank 1: no MoELayer of this rank has the experts of this layer" in own
    assert "no MoELayer of this rank" in peer
    for mismatch, wrong, same in (first, second):
        assert mismatch is PlanMismatch
        assert "placement" in wrong
        assert same


def fails_in_a_thread(group, wait):
    plan = ty.plan([spec(sum="choices", num_experts=6, spare_experts=2)], group)
    built = build(plan, "moe")
    given = batch(built.wiring.spec, 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 1:

        def broken(*_):
            raise OSError("no memory to map")

        plan._changing().moves.under_way.carrier.fetch = broken
    move = plan.rebalance({"moe": "round_robin"}, wait=False)
    during = [str(raised(plan.extend, [])), str(raised(plan.trim)), str(raised(plan.rebalance))]
    errors = []
    while not wait and not plan.stats()["moe"].moves.given_up:
        assert torch.equal(built(*given), before_TH)
    try:
        move.wait()
    except (OSError, ty.TokenyardError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    same = torch.equal(built(*given), before_TH)
    table = plan.wiring("moe").exchange_spec.placement.table
    return errors, during, same, table, plan.stats()["moe"].moves.given_up


@pytest.mark.parametrize("wait", [True, False])
def test_an_error_in_the_thread_of_one_rank_leaves_all_on_the_old_placement(wait):
    for rank, (errors, during, same, table, given_up) in enumerate(on_ranks(2, fails_in_a_thread, wait)):
        (error,) = errors
        if rank == 1 or wait:
            assert "no memory to map" in error
            assert error.startswith("OSError" if rank == 1 else "PeerFailed")
        for call, words in zip(("extend", "trim", "rebalance"), during, strict=True):
            assert f"{call} was called while experts move" in words
        assert same
        assert table == ((0, 1, 2), (3, 4, 5))
        assert given_up == 1


def without_memory(group):
    plan = ty.plan([spec(num_experts=6), spec("more", num_experts=6, spare_experts=1)], group)
    built = [build(plan, name) for name in ("moe", "more")]
    wanted = Placement.explicit(6, [[0, 1, 2, 3, 4], [5]])
    return [str(raised(plan.rebalance, {layer.name: wanted})) for layer in built]


def test_experts_that_there_is_no_memory_for_are_refused():
    for moe, more in on_ranks(2, without_memory):
        assert (
            "rank 0 is to hold 5 experts, and has memory for 3; expected memory for the experts that arrive"
            in moe
        )
        assert "rank 0 is to hold 5 experts, and has memory for 4" in more
        assert "declare more of it: LayerSpec(spare_experts=…)" in more


class Gone(BaseException):
    """This rank ends here."""


EVERYWHERE = Placement.replicated(Placement.round_robin(6, 3), {e: [(e + 1) % 3] for e in range(6)})
WANTED = Placement.replicated(Placement.contiguous(6, 3), {e: [(e // 2 + 1) % 3] for e in range(6)})


def dies_on_the_way(group, stage, wait):
    plan = ty.plan([spec(sum="choices", num_experts=6, placement=EVERYWHERE, spare_experts=4)], group)
    built = build(plan, "moe")
    given = batch(built.wiring.spec, 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 2:
        dies_in(group, plan, stage)
    lost = None
    try:
        move = plan.rebalance({"moe": WANTED}, wait=False)
        if group.rank == 2 and stage == "copying":
            return None
        if wait:
            move.wait()
        for _ in range(500):
            assert torch.equal(built(*given), before_TH)
    except Gone:
        return None
    except ty.PeerLost as error:
        lost = error
    if group.rank == 2:
        return None
    plan.go_on_without([2])
    placement = plan.wiring("moe").exchange_spec.placement
    return type(lost), placement.table, torch.equal(before_TH, built(*given))


def dies_in(group, plan, stage):
    """End this rank in the agreement, in the thread that copies, or after all have heard that it is ready."""

    def end(*arguments, **options):
        group.leave("the test has ended it")
        raise Gone

    if stage == "agreement":
        group.gather_json = end
    elif stage == "copying":
        plan._changing().moves.under_way.carrier.fetch = end
    elif stage == "ready":
        conclude = MoveUnderWay._conclude

        def or_end(moves, move):
            return end() if moves._state.group is group else conclude(moves, move)

        MoveUnderWay._conclude = or_end


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("stage", ["agreement", "copying", "ready"])
def test_a_rank_that_dies_on_the_way_leaves_the_others_on_one_placement(stage, wait, monkeypatch):
    monkeypatch.setattr(MoveUnderWay, "_conclude", MoveUnderWay._conclude)  # put back what a rank replaces
    first, second, _ = on_ranks(3, dies_on_the_way, stage, wait, deadline=3.0)
    old, new = (placement.without([2]).table for placement in (EVERYWHERE, WANTED))
    assert first == second
    assert issubclass(first[0], ty.PeerLost)
    assert first[1] == (new if stage == "ready" else old)
    assert first[2]


def hearing_nothing(group):
    """Calls up to a switch, and whether bits stay, where calls hear nothing of the other ranks, as on GPUs."""
    layer = spec(spare_experts=2, sum="choices", experts="reference")
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, "moe")
    x_TH, routes = batch(layer, 6, seed=group.rank)
    before_TH = moe(x_TH, routes)
    plan.exchange.hears_notices, plan.exchange.announcer.noticed = False, ignore_notices
    switched = []
    for placement in (Placement.round_robin(5, 2), Placement.contiguous(5, 2)):
        move = plan.rebalance({"moe": placement}, wait=False)
        assert move.wait_for_thread() is Progress.READY
        calls, same = 0, True
        while not move.is_done and calls < 100:
            same, calls = same and torch.equal(moe(x_TH, routes), before_TH), calls + 1
        same = same and torch.equal(moe(x_TH, routes), before_TH)
        switched.append((calls, same, plan.wiring("moe").exchange_spec.placement == placement))
    return switched


def test_ranks_ask_each_other_between_calls_where_calls_do_not_tell_how_far_they_are():
    first, second = on_ranks(2, hearing_nothing)
    assert first == second
    for calls, same, there in first:
        assert 1 <= calls <= 2 * CALLS_BETWEEN_QUESTIONS
        assert same
        assert there


def failing_unheard(group):
    """A move that fails on one rank, of which the calls tell nothing."""
    layer = spec(spare_experts=2, sum="choices", experts="reference")
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, "moe")
    x_TH, routes = batch(layer, 6, seed=group.rank)
    before_TH, placement = moe(x_TH, routes), plan.wiring("moe").exchange_spec.placement
    plan.exchange.hears_notices, plan.exchange.announcer.noticed = False, ignore_notices
    if group.rank == 1:
        plan._changing().moves.under_way.carrier.fetch = lambda *_: 1 / 0
    move = plan.rebalance({"moe": Placement.round_robin(5, 2)}, wait=False)
    move.wait_for_thread()
    same = all(torch.equal(moe(x_TH, routes), before_TH) for _ in range(2 * CALLS_BETWEEN_QUESTIONS))
    stays = plan.wiring("moe").exchange_spec.placement == placement
    return same, stays, plan._changing().moves.under_way.move is None, type(move.error).__name__


def test_all_ranks_give_a_move_up_that_failed_on_one_where_calls_tell_nothing():
    (*first, peer), (*second, own) = on_ranks(2, failing_unheard)
    assert first == second == [True, True, True]
    assert (peer, own) == ("PeerFailed", "ZeroDivisionError")


def in_another_form(group):
    layer = spec(num_experts=4, spare_experts=1)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    if group.rank == 1:
        built.experts.movable = lambda: {"w13_words": torch.zeros(3, 1), "w2_words": torch.zeros(3, 1)}
    error = raised(plan.rebalance, {"moe": Placement.round_robin(4, 2)})
    return str(error), plan.local_experts("moe")


def test_experts_that_ranks_hold_in_different_forms_stay_where_they_are():
    for rank, (error, owned) in enumerate(on_ranks(2, in_another_form)):
        assert "the ranks hold the weights of this layer in different forms" in error
        assert owned == [[0, 1], [2, 3]][rank]


class OwnForm(ReferenceExperts):
    """Experts that hold their weights in a form of their own."""

    name = "own_form"

    @property
    def weights(self):
        held = super().weights
        return ty.ExpertWeights(w13=held.w13.clone(), w2=held.w2)


def in_its_own_form(group):
    plan = ty.plan([spec(experts=OwnForm, spare_experts=1)], group)
    built = build(plan, "moe")
    return str(raised(plan.rebalance, {built.name: "round_robin"}))


def test_experts_that_hold_weights_in_a_form_of_their_own_do_not_move():
    for error in on_ranks(2, in_its_own_form):
        assert "own_form experts hold bf16 weights in a form of their own" in error


def after_a_loss(group):
    plan = ty.plan([spec(num_experts=4)], group)
    built = build(plan, "moe")
    if group.rank == 1:
        return None
    plan.go_on_without([1])
    return str(raised(plan.rebalance, {built.name: Placement.contiguous(4, 1)}))


def test_experts_that_were_lost_cannot_be_moved():
    assert "experts [2, 3] were lost with their ranks" in on_ranks(2, after_a_loss)[0]


def one_has_switched(group):
    plan = ty.plan([spec(sum="choices", num_experts=6, placement=EVERYWHERE, spare_experts=4)], group)
    built = build(plan, "moe")
    given = batch(built.wiring.spec, 5, seed=group.rank)
    before_TH = built(*given)
    move = plan.rebalance({"moe": WANTED}, wait=False)
    while move.decision != 1:  # all have heard that all are ready
        assert torch.equal(built(*given), before_TH)
    if group.rank == 2:
        return None
    lost = raised(built, *given) if group.rank == 0 else None  # rank 1 does not call the layer again
    switched = plan.wiring("moe").exchange_spec.placement.table == WANTED.table
    plan.go_on_without([2])
    same = torch.equal(before_TH, built(*given))
    again = plan.rebalance({"moe": "contiguous"}).placements
    same = same and torch.equal(before_TH, built(*given))
    return type(lost), switched, list(again), same


def test_after_a_loss_all_follow_a_rank_that_has_switched():
    first, second, _ = on_ranks(3, one_has_switched, deadline=3.0)
    assert first == (ty.PeerLost, True, ["moe"], True)
    assert second == (type(None), False, ["moe"], True)


def overlapping(group, moves):
    """Batches of two layers in flight while experts of both move; rank 0 finishes in another order than the others."""
    layers = [spec(name, sum="choices", num_experts=6, spare_experts=6) for name in ("first", "second")]
    plan = ty.plan(layers, group, in_flight=2)
    first, second = (build(plan, layer.name) for layer in layers)
    results, move = [], None
    for step in range(20):
        given = batch(layers[0], 6, seed=step + group.rank)
        if moves and (move is None or move.is_done):  # all ranks see the end of a move in the same call
            wanted = ["round_robin", "contiguous"][step % 2]
            move = plan.rebalance({"first": wanted, "second": wanted}, wait=False)
        a = first.start(*given)
        b = second.start(*given)
        a.compute()
        if group.rank > 0:
            results.append(a.finish())
        b.compute()
        c = first.start(*given)
        results += [b.finish(), c.finish()] if group.rank > 0 else [a.finish(), b.finish(), c.finish()]
    return results, plan.stats()["first"].moves.switches


def test_batches_in_flight_end_on_the_placement_that_they_began_with():
    still, moved = on_ranks(3, overlapping, False), on_ranks(3, overlapping, True)
    assert_same(still, moved)
    assert len({switches for _, switches in moved}) == 1
    assert moved[0][1] > 2


def changes_in_flight(group):
    layer = spec(sum="choices", num_experts=6, spare_experts=6)
    plan = ty.plan([layer], group)
    built, given = build(plan, "moe"), batch(layer, 5, seed=group.rank)
    before_TH = built(*given)
    pending = built.start(*given)
    errors = [raised(plan.shrink, [1])]
    move = plan.rebalance({"moe": "round_robin"}, wait=False)
    errors.append(raised(move.wait))
    same = torch.equal(pending.finish(), before_TH)
    move.wait()
    return [str(error) for error in errors], same and torch.equal(built(*given), before_TH)


def test_ranks_do_not_wait_for_a_switch_with_a_batch_in_flight():
    for errors, same in on_ranks(2, changes_in_flight):
        assert same
        for error in errors:
            assert "a dispatch of layer 'moe' is in flight, and is combined only after this call" in error


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided", "allgather", "hierarchical"])
def test_watched_plans_and_hosts_move_experts(exchange):
    def moving_beside(group, moves):
        layer = spec(num_experts=6, top_k=1, spare_experts=6, **IN_FP32)
        plan = ty.plan([layer], group, exchange=exchange, paranoid=exchange != "hierarchical")
        built, results, move = build(plan, "moe"), [], None
        for step in range(12):
            if moves and (move is None or move.is_done):
                move = plan.rebalance({"moe": ["round_robin", "contiguous"][step % 2]}, wait=step % 3 == 0)
            results.append(built(*batch(layer, 5, seed=step + group.rank)))
        return results, plan.stats()["moe"].moves.switches

    hosts = 2 if exchange == "hierarchical" else 1
    still, moved = (on_ranks(4, moving_beside, moves, hosts=hosts) for moves in (False, True))
    for (before, _), (after, switches) in zip(still, moved, strict=True):
        assert switches > 0
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(a, b)


def served_after_a_move(group):
    """The placements that a transport is told of when experts have moved: kernels find rows by their tables."""
    plan = ty.plan([spec(spare_experts=2)], group, exchange="one_sided")
    layer = build(plan, "moe")
    told, serve = [], plan.exchange.transport.serve
    plan.exchange.transport.serve = lambda specs: (told.extend(s.placement for s in specs), serve(specs))
    wanted = Placement.round_robin(5, 2)
    plan.rebalance({"moe": wanted})
    return told == [wanted] and layer.wiring.exchange_spec.placement == wanted


def test_the_transport_is_told_of_the_placement_that_experts_moved_to():
    assert on_ranks(2, served_after_a_move) == [True, True]


def test_memory_with_spare_slots_holds_weights_without_their_gradients():
    w13, w2 = torch.randn(2, 16, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    held = with_spare_slots(
        ty.ExpertWeights(w13=w13, w2=w2), 1, allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    )
    for mine, given in ((held.w13, w13), (held.w2, w2)):
        assert not mine.requires_grad
        assert torch.equal(mine[:2], given)
