"""Choices summed at home on a GPU: a row's bits depend on neither its batch, nor on ranks and placement."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.experts.fused_cases import FusedCase
from tests.gpu.test_one_sided_cuda import there
from tests.models import batch, build, on_ranks, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.exchange.transports.one_sided.cuda.results import choice_places
from tokenyard.experts import FusedExperts
from tokenyard.routing import Placement
from tokenyard.rows import LocalRoutes, ReceivedRows, UnfinalizedRows, check_choice_rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Weights, rows, and what stands between the products.
FORMATS = [
    ("bf16", "bf16", None),
    ("fp16", "fp16", None),
    ("fp32", "fp32", None),
    ("fp8_block128", "fp8_block128", "fp8_block128"),
    ("fp8_block128", "fp8_block128", None),
    ("mxfp8", "mxfp8", None),
    ("nvfp4", "bf16", None),
    ("mxfp4", "mxfp8", "fp8_block128"),
    ("mxint4", "bf16", None),
]


@pytest.mark.parametrize(("weights", "rows", "inner"), FORMATS)
def test_rows_of_fused_experts_do_not_depend_on_their_batch(weights, rows, inner):
    case = FusedCase(weights=weights, rows=rows, inner=inner, H=256, I=256, L=4, R=700, device="cuda")
    experts = FusedExperts(replace(case.spec, batch_invariant=True), case.held)

    def results(rows_N):
        chosen = ReceivedRows(
            rows=case.x.select(rows_N),
            routes=LocalRoutes(ids_RK=case.routes.ids_RK[rows_N], weights_RK=case.routes.weights_RK[rows_N]),
            counts_W=(len(rows_N),),
        )
        found = experts(chosen, finalize=False)
        assert isinstance(found, UnfinalizedRows)
        by_pair = torch.zeros(len(rows_N) * case.K, case.H, dtype=found.rows_NH.dtype, device="cuda")
        by_pair[found.index_N] = found.rows_NH
        return by_pair.view(len(rows_N), case.K, case.H)

    everything = results(torch.arange(case.R, device="cuda"))
    assert not everything.isnan().any()
    assert everything.float().norm() > 1
    draw = torch.Generator().manual_seed(1)
    for count in (1, 2, 7, 33, 65, 130, 257, 400):
        rows_N = torch.randperm(case.R, generator=draw)[:count].cuda()
        assert same_bits(results(rows_N), everything[rows_N]), count


def test_the_host_waits_once_for_the_choices_of_a_batch():
    """For which pairs there are: not for the products, nor to check and place results."""
    case = FusedCase(weights="bf16", rows="bf16", H=256, I=256, L=4, R=60, device="cuda")
    experts = FusedExperts(replace(case.spec, batch_invariant=True), case.held)
    slots_R = torch.arange(60, device="cuda").flip(0)

    def received():
        routes = LocalRoutes(ids_RK=case.routes.ids_RK, weights_RK=case.routes.weights_RK)
        return ReceivedRows(rows=case.x, routes=routes, counts_W=(60,), slots_R=slots_R)

    def call(arrival):
        result = check_choice_rows(experts(arrival, finalize=False).weighted(), arrival)
        return result.rows_NH, choice_places(arrival)

    before = call(received())  # kernels are compiled and loaded
    arrival = received()
    there_RK = arrival.routes.ids_RK >= 0
    assert torch.equal(arrival.routes.pairs, there_RK.flatten().nonzero().squeeze(1))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = call(arrival)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    row_N, choice_N = there_RK.nonzero().unbind(1)
    assert torch.equal(after[1], slots_R[row_N] * case.K + choice_N)


_COMPILING = threading.Lock()


def run_choices(group, layer, batches):
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    x_TH, routes = batches[group.rank]
    # Kernels of experts are loaded before a kernel waits: rows of all ranks in slots, as they arrive.
    local = moe.experts.spec.num_local_experts
    slots = layer.max_tokens * group.size
    ids_RK = torch.randint(-1, local, (9, layer.top_k), device="cuda", dtype=torch.int32)
    arrival = ReceivedRows(
        rows=moe.plan.wiring(layer.name).exchange_spec.wire.encode(
            torch.randn(slots, layer.hidden_size, device="cuda").to(layer.dtype)
        ),
        routes=LocalRoutes(ids_RK=ids_RK, weights_RK=torch.rand(9, layer.top_k, device="cuda")),
        counts_W=(9,),
        slots_R=torch.arange(9, device="cuda"),
    )
    with _COMPILING:
        moe.experts(arrival, finalize=False).weighted()
        torch.cuda.synchronize()
    group.barrier()
    y_TH = moe(x_TH.cuda(), there(routes))
    again_TH = moe(x_TH.cuda(), there(routes))
    counted = [routes.topk_ids_TK[routes.topk_ids_TK >= 0] for _, routes in batches]
    assert plan.load()[layer.name] == (2 * torch.cat(counted).bincount(minlength=8)).tolist()
    plan.close()
    return y_TH.cpu(), again_TH.cpu()


@pytest.mark.parametrize(
    ("weights", "wire", "combine_wire"),
    [("bf16", None, None), ("fp8_block128", "fp8_block128", "mxfp8"), ("mxfp4", "mxfp8", "nvfp4")],
)
def test_bits_depend_on_neither_ranks_nor_placement(weights, wire, combine_wire):
    layer = spec(
        sum="choices",
        hidden_size=256,
        intermediate_size=128,
        num_experts=8,
        top_k=4,
        weights=weights,
        wire=wire,
        combine_wire=combine_wire,
        max_tokens=40,
        experts="fused",
    )
    tokens = (13, 0, 20, 7)
    batches = [batch(layer, count, seed=rank) for rank, count in enumerate(tokens)]
    for _, routes in batches:
        routes.topk_ids_TK[1::3, 0] = -1
    x_TH = torch.cat([rows for rows, _ in batches])
    together = ty.Routes(
        topk_ids_TK=torch.cat([routes.topk_ids_TK for _, routes in batches]),
        topk_weights_TK=torch.cat([routes.topk_weights_TK for _, routes in batches]),
    )
    ((alone_TH, _),) = on_ranks(1, run_choices, layer, [(x_TH, together)], device="cuda", deadline=120.0)
    assert alone_TH.float().norm() > 1
    copied = Placement.replicated(Placement.round_robin(8, 4), {0: [1], 5: [2, 3], 7: [0]})
    for placement in ("contiguous", copied):
        by_rank = on_ranks(
            4, run_choices, replace(layer, placement=placement), batches, device="cuda", deadline=120.0
        )
        assert same_bits(torch.cat([first for first, _ in by_rank]), alone_TH), placement
        assert same_bits(torch.cat([second for _, second in by_rank]), alone_TH), placement
