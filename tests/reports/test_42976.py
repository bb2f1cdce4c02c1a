"""#42976: all layers were taken to look like the first one, and all ranks to be in one barrier.

Here layers of one plan may differ in every field, the bytes are those of the union, and every wait belongs to the
group that exchanges.
"""

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, spec
from tests.products import on_threads_and_processes, product
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.exchange import EXCHANGES

every_exchange_on_both_kinds = pytest.mark.parametrize(
    ("exchange", "ranks"), on_threads_and_processes(EXCHANGES)
)

# A 4-bit body and an unquantized prediction head is the ordinary case; the rest is harder.
LAYERS = [
    spec("body", wire="nvfp4", hidden_size=128, top_k=4, num_experts=8, experts="reference"),
    spec("head", wire="bf16", hidden_size=200, top_k=2, num_experts=3, experts="reference", max_tokens=64),
    spec("tiny", wire="mxfp8(alignment=256)", hidden_size=1, top_k=1, num_experts=1, experts="reference"),
    spec(
        "wide",
        wire="fp8_block128",
        hidden_size=300,
        top_k=9,
        num_experts=11,
        combine_wire="mxfp8",
        experts="reference",
    ),
    spec("half", dtype=torch.float16, hidden_size=64, activation="relu2", bias=True, experts="reference"),
]


def all_layers(group, exchange):
    plan = ty.plan(LAYERS, group, exchange=exchange)
    right = []
    for turn in range(2):
        for layer in LAYERS if turn == 0 else LAYERS[::-1]:
            x_TH, routes = batch(layer, 1 + group.rank * 5, seed=turn + group.rank)
            y_TH = build(plan, layer.name)(x_TH, routes)
            expected = twin(plan.wiring(layer.name), random_weights(layer, 0), x_TH, routes, group.rank)
            right.append(same_bits(y_TH, expected))
    return right, plan.draft.dispatch_bytes, plan.draft.combine_bytes


@every_exchange_on_both_kinds
def test_42976_layers_of_different_formats_shapes_top_k_and_experts_in_one_plan(ranks, exchange):
    each = [ty.draft([layer], 3, exchange=exchange) for layer in LAYERS]
    for right, dispatch_bytes, combine_bytes in on_ranks(3, all_layers, exchange, ranks=ranks):
        assert all(right)
        assert dispatch_bytes == max(alone.dispatch_bytes for alone in each)
        assert combine_bytes == max(alone.combine_bytes for alone in each)


def pipeline_stages(group, exchange):
    first_stage = group.rank < 2
    stage = group.subgroup([0, 1] if first_stage else [2, 3])
    layers = [spec(f"layer {n}", experts="reference") for n in range(2 if first_stage else 5)]
    # One stage plans once and runs 2 layers twice; the other plans 3 times and runs 5 layers 4 times.
    for _ in range(1 if first_stage else 3):
        plan = ty.plan(layers, stage, exchange=exchange)
    rounds = 2 if first_stage else 4
    right = []
    for _ in range(rounds):
        for layer in layers:
            x_TH, routes = batch(layer, 3, seed=group.rank)
            y_TH = build(plan, layer.name)(x_TH, routes)
            expected = twin(plan.wiring(layer.name), random_weights(layer, 0), x_TH, routes, stage.rank)
            right.append(same_bits(y_TH, expected))
    return len(right), all(right)


@every_exchange_on_both_kinds
def test_42976_two_groups_with_different_numbers_of_layers_and_plans_do_not_deadlock(ranks, exchange):
    results = on_ranks(4, pipeline_stages, exchange, ranks=ranks)
    assert results == [(4, True), (4, True), (20, True), (20, True)]


# The growth test of the report, with its numbers: 1024 tokens, top-k 2, 8 experts a rank, hidden size 4096.
def growth_layer(name, world, wire):
    return spec(name, max_tokens=1024, top_k=2, num_experts=8 * world, hidden_size=4096, wire=wire)


def grow_like_the_report(group):
    plan = ty.plan([growth_layer("nvfp4", group.size, "nvfp4")], group, exchange="one_sided")
    first = plan.exchange.transport.workspace
    needed = plan.exchange.transport.layout_for([plan.wiring("nvfp4").exchange_spec]).nbytes
    plan.extend([growth_layer("bf16", group.size, "bf16")])  # larger payloads: grows, is rebuilt
    second = plan.exchange.transport.workspace
    plan.extend([growth_layer("nvfp4 again", group.size, "nvfp4")])  # it suffices: is kept
    third = plan.exchange.transport.workspace
    runs = []
    for name in ("nvfp4", "bf16", "nvfp4 again"):
        layer = plan.wiring(name).spec
        x_TH, routes = batch(layer, 3, seed=group.rank)
        runs.append(bool(torch.isfinite(build(plan, name)(x_TH, routes)).all()))
    plan.close()
    return (
        first.nbytes == needed,
        second.nbytes > first.nbytes,
        second is not first,
        third is second,
        all(runs),
    )


@pytest.mark.parametrize(
    ("world", "ranks"), [(2, "threads"), (2, "processes"), (8, "threads"), (8, "processes")]
)
def test_42976_the_workspace_grows_is_rebuilt_and_is_kept(world, ranks):
    results = on_ranks(world, grow_like_the_report, ranks=ranks, deadline=60)
    assert results == [(True, True, True, True, True)] * world


def stages_that_grow(group):
    first_stage = group.rank < group.size // 2
    half = group.size // 2
    stage = group.subgroup(list(range(half)) if first_stage else list(range(half, group.size)))
    plan = ty.plan([spec("0", experts="reference")], stage, exchange="one_sided")
    # One stage grows once, the other five times, each time for a wider layer.
    for n in range(1, 2 if first_stage else 6):
        plan.extend([spec(str(n), hidden_size=32 * (n + 1), experts="reference")])
    right = []
    for name in plan.stats():
        layer = plan.wiring(name).spec
        x_TH, routes = batch(layer, 3, seed=group.rank)
        expected = twin(plan.wiring(name), random_weights(layer, 0), x_TH, routes, stage.rank)
        right.append(same_bits(build(plan, name)(x_TH, routes), expected))
    return len(right), all(right)


@pytest.mark.parametrize(("ranks", "world"), product(["threads", "processes"], [8, 4]))
def test_42976_pipeline_stages_that_grow_a_different_number_of_times_do_not_wait_for_each_other(ranks, world):
    results = on_ranks(world, stages_that_grow, ranks=ranks, deadline=60)
    assert results == [(2, True)] * (world // 2) + [(6, True)] * (world // 2)
