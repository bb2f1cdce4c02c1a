"""Experts that move while a plan is in use: no output changes, and an error or a loss leaves the old placement."""

import random

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.planning import moving
from tokenyard.routing import imbalance, rank_loads


def drawn_placement(seed, num_experts, world):
    """Any table: uneven, some experts on several ranks, some ranks without any."""
    chance = random.Random(seed)
    table = [[] for _ in range(world)]
    for expert in chance.sample(range(num_experts), num_experts):
        for rank in chance.sample(range(world), chance.choice([1, 1, 2])):
            table[rank].append(expert)
    return ty.Placement.explicit(num_experts, table)


def outputs(group, layers, exchange, steps, moves_every_step):
    plan = ty.plan(layers, group, exchange=exchange)
    built = [build(plan, layer.name) for layer in layers]
    results = []
    for step in range(steps):
        if moves_every_step:
            layer = layers[step % len(layers)]
            wanted = drawn_placement(step, layer.num_experts, group.size)
            assert plan.rebalance({layer.name: wanted}).keys() <= {layer.name}
            served = plan.wiring(layer.name).exchange_spec.placement
            assert [set(row) for row in served.table] == [set(row) for row in wanted.table]
        for layer, module in zip(layers, built, strict=True):
            results.append(module(*batch(layer, (step + group.rank) % 5, seed=step)))
    return results, plan.stats()[layers[0].name].as_dict()


# Every step another placement; together: all ways to hold weights, experts that stay in place and that are built anew.
@pytest.mark.parametrize(
    ("exchange", "steps", "kinds"),
    [
        ("one_sided", 60, [{}, {"weights": "mxfp4", "bias": True}]),
        ("two_sided", 16, [{"weights": "nvfp4", "experts": "reference"}, {"weights": "mxint4"}]),
        ("allgather", 16, [{"weights": "fp8_block128"}, {"weights": "fp32", "top_k": 4}]),
    ],
)
def test_a_move_in_every_step_changes_no_output(exchange, steps, kinds):
    layers = [spec(f"moe.{n}", sum="choices", num_experts=6, **kind) for n, kind in enumerate(kinds)]
    still = on_ranks(3, outputs, layers, exchange, steps, False)
    moved = on_ranks(3, outputs, layers, exchange, steps, True)
    for (before, _), (after, stats) in zip(still, moved, strict=True):
        assert len(before) == steps * len(layers)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert stats["switch_s"] > 0
    assert sum(stats["moved"] for _, stats in moved) > steps


def test_processes_move_experts_in_small_pieces():
    layers = [spec(sum="choices", num_experts=6, weights="mxfp8")]
    still, moved = (on_ranks(2, small_pieces, layers, moves, ranks="processes") for moves in (False, True))
    for (before, _), (after, _) in zip(still, moved, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def small_pieces(group, layers, moves_every_step):
    moving.PIECE = 300
    return outputs(group, layers, "two_sided", 4, moves_every_step)


def uneven(group):
    layer = spec("hot", num_experts=8, top_k=1, experts="reference", sum="choices")
    even = spec("even", num_experts=8, top_k=1)
    plan = ty.plan([layer, even], group)
    built = {s.name: build(plan, s.name) for s in (layer, even)}
    x_TH, _ = batch(layer, 12, seed=group.rank)
    hot_TK = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6]).unsqueeze(1)
    routes = ty.Routes(topk_ids_TK=hot_TK, topk_weights_TK=torch.ones(12, 1))
    before_TH = built["hot"](x_TH, routes)
    evenly = ty.Routes(topk_ids_TK=torch.arange(8).unsqueeze(1), topk_weights_TK=torch.ones(8, 1))
    built["even"](x_TH[:8], evenly)
    load = plan.load()["hot"]
    moved = plan.rebalance(threshold=1.2)
    after_TH = built["hot"](x_TH, routes)
    again = plan.rebalance(threshold=1.2)
    return load, moved, again, torch.equal(before_TH, after_TH)


def test_without_placements_uneven_layers_are_balanced_by_their_counts():
    for load, moved, again, same in on_ranks(2, uneven):
        assert list(moved) == ["hot"]
        assert imbalance(rank_loads(load, ty.Placement.contiguous(8, 2))) == 1.5
        assert imbalance(rank_loads(load, moved["hot"])) < 1.2
        assert again == {}
        assert same


def test_experts_that_stay_keep_their_places():
    present = ty.Placement.explicit(5, [[0, 1, 2], [3, 4]])
    wanted = ty.Placement.explicit(5, [[4, 2], [0, 3, 1]])
    assert moving.in_their_places(present, wanted).table == ((4, 2), (3, 0, 1))


# -- Errors and losses -------------------------------------------------------------------------------------


def fails_on_one_rank(group):
    plan = ty.plan([spec(sum="choices", num_experts=6)], group)
    built = build(plan, "moe")
    given = batch(built.wiring.spec, 5, seed=group.rank)
    before_TH = built(*given)
    if group.rank == 1:
        plan.layers.clear()
    error = raised(plan.rebalance, {"moe": "round_robin"})
    mismatch = raised(plan.rebalance, {"moe": "round_robin" if group.rank else "contiguous"})
    wrong = raised(plan.rebalance, {"moe": ty.Placement.contiguous(7, 2)})
    return str(error), type(mismatch), str(wrong), torch.equal(before_TH, built(*given))


def test_an_error_on_one_rank_leaves_all_on_the_old_placement():
    (peer, *first), (own, *second) = on_ranks(2, fails_on_one_rank)
    assert "layer 'moe', rank 1: no MoELayer of this rank has the experts of this layer" in own
    assert "no MoELayer of this rank" in peer
    for mismatch, wrong, same in (first, second):
        assert mismatch is ty.PlanMismatch
        assert "placement" in wrong
        assert same


class Gone(BaseException):
    """This rank ends here."""


def dies_on_the_way(group, stage):
    everywhere = ty.Placement.replicated(ty.Placement.round_robin(6, 3), {e: [(e + 1) % 3] for e in range(6)})
    plan = ty.plan([spec(sum="choices", num_experts=6, placement=everywhere)], group)
    built = build(plan, "moe")
    given = batch(built.wiring.spec, 5, seed=group.rank)
    before_TH = built(*given)
    wanted = ty.Placement.replicated(ty.Placement.contiguous(6, 3), {e: [(e // 2 + 1) % 3] for e in range(6)})
    if group.rank == 2:
        calls = {"gather_json": group.gather_json, "all_to_all_rows": group.all_to_all_rows}
        seen = []

        def counted(name):
            def call(*arguments, **options):
                seen.append(name)
                if len(seen) > stage:
                    raise Gone
                return calls[name](*arguments, **options)

            return call

        for name in calls:
            setattr(group, name, counted(name))
        try:
            plan.rebalance({"moe": wanted})
        except Gone:
            return None
    lost = raised(plan.rebalance, {"moe": wanted})
    table = plan.wiring("moe").exchange_spec.placement.table
    plan.go_on_without([2])
    return type(lost), table == everywhere.table, torch.equal(before_TH, built(*given))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_dies_on_the_way_leaves_the_others_on_the_old_placement(stage):
    """In the agreement, when room is made, when weights travel, when all are ready."""
    for outcome in on_ranks(3, dies_on_the_way, stage, deadline=2.0)[:2]:
        assert outcome == (ty.PeerLost, True, True)


def on_a_gpu(group):
    plan = ty.plan([spec()], group)
    plan.group.device = torch.device("cuda")
    return str(raised(plan.rebalance))


def test_captured_graphs_would_keep_the_old_placement():
    (error,) = on_ranks(1, on_a_gpu)
    assert (
        "rebalance on cuda; expected ranks on CPUs: captured CUDA graphs would keep the old placement"
        in error
    )


def after_a_loss(group):
    plan = ty.plan([spec(num_experts=4)], group)
    build(plan, "moe")
    if group.rank == 1:
        return None
    plan.go_on_without([1])
    return str(raised(plan.rebalance, {"moe": ty.Placement.contiguous(4, 1)}))


def test_experts_that_were_lost_cannot_be_moved():
    assert "experts [2, 3] were lost with their ranks" in on_ranks(2, after_a_loss)[0]
