"""Plans that move their experts by themselves: even afterwards, the same outputs, and loud where they cannot."""

import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec


def hot_routes(tokens, seed):
    """Most tokens choose experts 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(0, 8, (tokens, 1), generator=draw)
    ids_TK[: tokens // 2] %= 2
    return ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(tokens, 1))


def served(group, every):
    layer = spec(num_experts=8, top_k=1, sum="choices", spare_experts=3, max_tokens=64)
    plan = ty.plan([layer], group)
    built = build(plan, "moe")
    if every:
        plan.autobalance(every=every, threshold=1.1)
    results = []
    for step in range(60):
        x_TH, _ = batch(layer, 64, seed=step + 100 * group.rank)
        results.append(built(x_TH, hot_routes(64, seed=step + 100 * group.rank)))
    if every:
        plan.autobalance(every=None)
        looks = plan.stats()["moe"].moves.looks
        for _ in range(2 * every):
            built(x_TH, hot_routes(64, seed=1))
        assert plan.stats()["moe"].moves.looks == looks
    return results, plan.stats()["moe"].moves


def test_an_uneven_layer_becomes_even_and_says_so():
    for (before, _), (after, stats) in zip(on_ranks(2, served, None), on_ranks(2, served, 10), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert stats.looks == 5
        assert stats.switches >= 1
        assert stats.experts > 0
        assert stats.imbalance_expected < 1.1
        assert stats.imbalance < 1.15
        assert stats.refused == ""


def refused(group, layers, **options):
    plan = ty.plan(layers, group, **options)
    return str(raised(plan.autobalance, every=10)), str(raised(plan.autobalance, every=0))


def test_what_could_never_move_is_refused():
    (alone, wrong), *_ = on_ranks(1, refused, [spec(spare_experts=1)])
    assert "autobalance has nothing to move: one rank has all experts" in alone
    assert "every is 0; expected a number of calls, from 1; or None, to end it" in wrong
    for without, _ in on_ranks(2, refused, [spec()]):
        assert "no layer that takes routes has memory for further experts" in without
        assert "declare LayerSpec(spare_experts=2), on several ranks" in without


def disagreed(group):
    plan = ty.plan([spec(spare_experts=1)], group)
    try:
        plan.autobalance(every=10 + group.rank)
    except ty.TokenyardError as error:
        return str(error)
    return ""


def test_all_ranks_look_at_the_same_time():
    for error in on_ranks(2, disagreed):
        assert "ranks disagree on autobalance: rank 0 has [10, 1.1], rank 1 has [11, 1.1]" in error


def cannot_go_on(group):
    plan = ty.plan([spec(num_experts=8, top_k=1, spare_experts=1, max_tokens=64)], group)
    built = build(plan, "moe")
    plan.autobalance(every=3, threshold=1.1)
    built.slots.count = 1  # as if there were no memory at all
    x_TH, _ = batch(built.wiring.spec, 64)
    for _ in range(8):
        built(x_TH, hot_routes(64, seed=1))
    return plan.stats()["moe"].moves


def test_what_cannot_be_moved_is_logged_and_the_layer_serves_on(caplog):
    for stats in on_ranks(2, cannot_go_on):
        assert "memory for" in stats.refused
        assert stats.switches == 0
    assert "autobalance moves nothing" in caplog.text
