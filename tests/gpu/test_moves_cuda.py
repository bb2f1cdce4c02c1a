"""Experts that move between ranks on a GPU: no bit changes, and graphs that were captured before serve on."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.gpu.test_one_sided_cuda import there
from tests.gpu.test_overlap_cuda import capture, on_gpu
from tests.models import batch, build, on_ranks, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.routing import Placement
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

_COMPILING = threading.Lock()


PLACEMENTS = [
    Placement.round_robin(8, 3),
    Placement.replicated(Placement.contiguous(8, 3), {0: [1], 7: [0, 1]}),
    Placement.explicit(8, [[7, 1, 2], [3, 5, 4], [6, 0]]),
    Placement.contiguous(8, 3),
]


def load_kernels(group, moe, layer):
    """Let experts compile and load their kernels before a kernel waits: rows of all ranks in slots, as they arrive."""
    slots, spec = layer.max_tokens * group.size, moe.wiring.exchange_spec
    in_place = (
        layer.sum == "ranks" and not spec.combine_wire.quantized
    )  # experts write where results are read
    rows_SH = torch.zeros(slots, layer.hidden_size, device="cuda", dtype=layer.dtype)
    ids_RK = torch.randint(-1, 2, (slots, layer.top_k), device="cuda", dtype=torch.int32)
    arrival = ReceivedRows(
        rows=spec.wire.encode(torch.randn_like(rows_SH)),
        routes=LocalRoutes(ids_RK=ids_RK, weights_RK=torch.rand(slots, layer.top_k, device="cuda")),
        counts_W=(slots,),
        may_be_empty=True,
        results=CombineBuffer(rows_SH=rows_SH, slots_R=None) if in_place else None,
    )
    arrivals = [arrival]
    for count in sorted({1, 5, 9, 16, 24, slots // 2, slots} & set(range(slots + 1))):  # tiles depend on it
        slots_R = torch.arange(count, device="cuda")
        routes = LocalRoutes(ids_RK=ids_RK[:count], weights_RK=arrival.routes.weights_RK[:count])
        results = CombineBuffer(rows_SH=rows_SH, slots_R=slots_R) if in_place else None
        rows = replace(arrival, routes=routes, counts_W=(count,), slots_R=slots_R, results=results)
        arrivals.append(replace(rows, may_be_empty=False))
    with _COMPILING:
        for rows in arrivals:
            moe.experts(rows, finalize=layer.sum == "ranks")
        torch.cuda.synchronize()
    group.barrier()


def moving(group, layer):
    """Results before and after each of some moves, of the same batch."""
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    load_kernels(group, moe, layer)
    x_TH, routes = on_gpu(layer, 13 - 4 * group.rank, seed=group.rank)
    before_TH = moe(x_TH, routes)
    held = {name: tensor.data_ptr() for name, tensor in moe.experts.movable().items()}
    same = []
    for placement in PLACEMENTS:
        plan.rebalance({layer.name: placement})
        same.append(plan.wiring(layer.name).exchange_spec.placement == placement)
        same.append(same_bits(moe(x_TH, routes), before_TH))
    background = plan.rebalance({layer.name: PLACEMENTS[0]}, wait=False)
    same += [same_bits(moe(x_TH, routes), before_TH) for _ in range(3)]
    background.wait()
    same.append(same_bits(moe(x_TH, routes), before_TH))
    same.append(held == {name: tensor.data_ptr() for name, tensor in moe.experts.movable().items()})
    moves = plan.stats()[layer.name].moves
    plan.close()
    return same, moves.switches, float(before_TH.float().norm())


@pytest.mark.parametrize(
    ("weights", "wire", "experts"),
    [
        ("bf16", None, "fused"),
        ("fp8_block128", "fp8_block128", "fused"),
        ("mxfp4", "mxfp8", "fused"),
        ("nvfp4", None, "fused"),
        ("mxfp8", "mxfp8", "fused"),
        ("bf16", "mxfp8", "reference"),
    ],
)
def test_no_bit_changes_when_experts_move(weights, wire, experts):
    layer = spec(
        sum="choices", hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, max_tokens=16,
        weights=weights, wire=wire, experts=experts, spare_experts=2,
    )  # fmt: skip
    for same, switches, norm in on_ranks(3, moving, layer, device="cuda", deadline=60.0):
        assert all(same), same
        assert switches >= 5
        assert norm > 1


def captured_before(group, layer):
    """A graph of a layer, replayed before and after moves, beside the same layer of a plan with that placement."""
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    load_kernels(group, moe, layer)
    x_TH, routes = on_gpu(layer, 11, seed=group.rank)
    with plan.fixed_shapes():
        moe(x_TH, routes)
        plan.synchronize()
        group.barrier()
        graph, y_TH = capture(group, lambda: moe(x_TH, routes))
    same = []
    for number, placement in enumerate([layer.placement, *PLACEMENTS]):
        if number:
            plan.rebalance({layer.name: placement})
        fresh_TH, other = batch(layer, 11, seed=100 * number + group.rank)
        x_TH.copy_(fresh_TH)
        routes.topk_ids_TK.copy_(other.topk_ids_TK)
        graph.replay()
        plan.synchronize()
        found_TH = y_TH.clone()
        with plan.fixed_shapes():
            eager_TH = moe(x_TH, routes)
            plan.synchronize()
        other_plan = ty.plan(
            [replace(layer, placement=placement, spare_experts=0)], group, exchange="one_sided"
        )
        anew = build(other_plan, layer.name).to(group.device)
        load_kernels(group, anew, layer)
        with other_plan.fixed_shapes():
            wanted_TH = anew(x_TH, routes)
            other_plan.synchronize()
        other_plan.close()
        same.append((same_bits(found_TH, eager_TH), same_bits(found_TH, wanted_TH)))
    del graph
    plan.close()
    return same


@pytest.mark.parametrize(
    ("weights", "wire", "experts"), [("bf16", "mxfp8", "fused"), ("mxfp4", "mxfp8", "fused")]
)
def test_a_captured_graph_serves_the_placement_that_experts_moved_to(weights, wire, experts):
    layer = spec(
        hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, max_tokens=12, weights=weights, wire=wire,
        experts=experts, spare_experts=2, placement=Placement.contiguous(8, 3),
    )  # fmt: skip
    for same in on_ranks(3, captured_before, layer, device="cuda", deadline=60.0):
        assert same == [(True, True)] * len(same)


def with_a_hot_expert(group, layer):
    """A plan, its layer, and a batch whose tokens all choose expert 0."""
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    load_kernels(group, moe, layer)
    x_TH, routes = batch(layer, 12, seed=group.rank)
    routes.topk_ids_TK[:, 0] = 0
    return plan, moe, x_TH.cuda(), there(routes)


def hot(group, layer):
    """Experts that most choices fall on are copied, by the counts of the kernels."""
    plan, moe, x_TH, routes = with_a_hot_expert(group, layer)
    before_TH = moe(x_TH, routes)
    move = plan.rebalance()
    same = same_bits(moe(x_TH, routes), before_TH)
    placement = plan.wiring(layer.name).exchange_spec.placement
    plan.close()
    return same, len(placement.owners(0)), bool(move.placements)


def test_hot_experts_are_copied_by_the_counts_of_the_kernels():
    layer = spec(
        sum="choices", hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, max_tokens=16, experts="fused",
        spare_experts=2,
    )  # fmt: skip
    for same, copies, moved in on_ranks(3, hot, layer, device="cuda", deadline=60.0):
        assert same
        assert moved
        assert copies > 1


def left_on(group, layer):
    """Calls with a hot expert in a plan that balances by itself."""
    plan, moe, x_TH, routes = with_a_hot_expert(group, layer)
    before_TH = moe(x_TH, routes)
    plan.autobalance(every=20, threshold=1.05)
    same = [same_bits(moe(x_TH, routes), before_TH) for _ in range(200)]
    moves = plan.stats()[layer.name].moves
    placement = plan.wiring(layer.name).exchange_spec.placement
    plan.close()
    return all(same), moves.looks, moves.switches, placement.table


def test_a_plan_balances_by_itself():
    layer = spec(
        sum="choices", hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, max_tokens=16, experts="fused",
        spare_experts=2,
    )  # fmt: skip
    answers = on_ranks(3, left_on, layer, device="cuda", deadline=60.0)
    for same, looks, switches, table in answers:
        assert same
        assert looks >= 2
        assert switches >= 1
        assert table == answers[0][-1]
