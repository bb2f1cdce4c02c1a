"""How often a checked call on a GPU waits for it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.gpu.test_moves_cuda import load_kernels
from tests.gpu.test_overlap_cuda import on_gpu
from tests.models import build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import InputError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Counts the waits of each thread for streams and events."""
    counts = threading.local()
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        wait = kind.synchronize

        def counted(self, wait=wait):
            counts.number = getattr(counts, "number", 0) + 1
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                return wait(self)
            finally:
                torch.cuda.set_sync_debug_mode(mode)

        monkeypatch.setattr(kind, "synchronize", counted)
    return counts


def calls(group, layer, waits):
    """Waits in each of some calls, whether their bits are those of calls that check nothing, and rows are counted."""
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    load_kernels(group, moe, layer)
    found, same, sent = [], [], []
    for seed in range(4):
        x_TH, routes = on_gpu(layer, 9 - group.rank, seed=10 * seed + group.rank)
        moe(x_TH, routes)
        torch.cuda.synchronize()
        group.barrier()
        before = list(plan.stats()[layer.name].rows_sent)
        waits.number = 0
        torch.cuda.set_sync_debug_mode("error")  # whatever else waits raises
        y_TH = moe(x_TH, routes)
        group.barrier()  # the mode is one of the process
        torch.cuda.set_sync_debug_mode("default")
        found.append(waits.number)
        group.barrier()
        with plan.fixed_shapes():  # nothing is read there: the same kernels, without the checks
            wanted_TH = moe(x_TH, routes)
            plan.synchronize()
        same.append(same_bits(y_TH, wanted_TH))
        rank_TK, _ = moe.wiring.exchange_spec.placement.resolve(routes.topk_ids_TK.cpu(), group.rank)
        rows = [int((rank_TK == rank).any(1).sum()) for rank in range(group.size)]
        counted = plan.stats()[layer.name].rows_sent
        sent.append([a - b for a, b in zip(counted, before, strict=True)] == rows)
    plan.close()
    return found, same, sent


@pytest.mark.parametrize("combine_wire", [None, "mxfp8"])
def test_a_checked_call_waits_once(waits, combine_wire):
    layer = spec(
        hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, max_tokens=16, experts="fused",
        combine_wire=combine_wire,
    )  # fmt: skip
    for found, same, sent in on_ranks(3, calls, layer, waits, device="cuda", deadline=60.0):
        assert found == [1] * 4
        assert all(same)
        assert all(sent)


def failing(group, layer):
    """Each kind of error on one rank: its own there, PeerFailed elsewhere, in the same call; the next one is fine."""
    plan = ty.plan([layer], group, exchange="one_sided")
    moe = build(plan, layer.name).to(group.device)
    load_kernels(group, moe, layer)
    x_TH, routes = on_gpu(layer, 4, seed=group.rank)
    wanted_TH = moe(x_TH, routes)
    found, words = [], []
    for what in ("too wide", "fine", "bad id", "fine", "experts", "fine", "bad id", "fine"):
        x, ids_TK = x_TH, routes.topk_ids_TK.clone()
        if group.rank == 1 and what == "too wide":
            x = torch.cat([x_TH, x_TH], dim=1)
        if group.rank == 1 and what == "bad id":
            ids_TK[2, 0] = 99
        compute = moe.experts.compute
        if group.rank == 1 and what == "experts":
            moe.experts.compute = None  # whatever calls it raises
        error = raised(call, moe, x, replace(routes, topk_ids_TK=ids_TK))
        moe.experts.compute = compute
        found.append(type(error).__name__)
        words.append(str(error))
    same = same_bits(moe(x_TH, routes), wanted_TH)
    plan.close()
    return found, words, same


def call(moe, x_TH, routes):
    """A call whose errors of Python become ours, for `raised`."""
    try:
        moe(x_TH, routes)
    except TypeError as error:
        raise InputError(str(error), expected="", fix="") from error


def test_errors_of_one_rank_reach_all_in_the_same_call():
    layer = spec(
        hidden_size=256, intermediate_size=128, num_experts=8, top_k=3, max_tokens=16, experts="fused"
    )
    answers = on_ranks(3, failing, layer, device="cuda", deadline=60.0)
    for rank, (found, words, same) in enumerate(answers):
        error = "InputError" if rank == 1 else "PeerFailed"
        assert found == [error, "NoneType"] * 4
        assert same
        assert ("holds id 99 (token 2)" if rank == 1 else "an id that no expert has") in words[2]
