"""Rows that travel on a stream of their own: bits, graphs, multiprocessors, and what really runs meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

import tokenyard as ty
from tests.gpu import overlap
from tests.gpu.overlap import capture, on_gpu
from tests.models import build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.layer import overlapped

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def doubled(x_TH):
    return x_TH * 2


# -- Bits ----------------------------------------------------------------------------------------------------


def started(group, layer, sms):
    """Batches that are started, two of them in flight, beside the same ones in calls of a plan without any of this."""
    plain = build(ty.plan([layer], group, exchange="one_sided"), layer.name).to(group.device)
    plan = ty.plan([layer], group, exchange="one_sided", in_flight=2, sms=sms)
    built = build(plan, layer.name, shared=doubled).to(group.device)
    same = []
    for seed in range(4):
        batches = [on_gpu(layer, tokens, seed=10 * seed + group.rank) for tokens in (9 - 3 * group.rank, 70)]
        wanted = [plain(x_TH, routes, add=x_TH * 2) for x_TH, routes in batches]
        out = [torch.full_like(x_TH, torch.nan) for x_TH, _ in batches]
        same.append(same_bits(built(*batches[0]), wanted[0]))
        pending = [
            built.start(x_TH, routes, out=y_TH) for (x_TH, routes), y_TH in zip(batches, out, strict=True)
        ]
        if seed % 2:
            for one in pending:
                one.compute()
        found = [one.finish() for one in pending]
        same += [
            same_bits(y_TH, want_TH) and y_TH.data_ptr() == into.data_ptr()
            for y_TH, want_TH, into in zip(found, wanted, out, strict=True)
        ]
        x_TH, routes = batches[1]
        halves = torch.cat([built(*part) for part in parts_of(x_TH, routes)])
        same.append(same_bits(overlapped(built, x_TH, routes), halves))
    plan.close()
    return same


def parts_of(x_TH, routes):
    half = -(-len(x_TH) // 2)
    for part in (slice(0, half), slice(half, None)):
        ids_TK, weights_TK = routes.topk_ids_TK[part], routes.topk_weights_TK[part]
        yield x_TH[part], ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)


@pytest.mark.parametrize("sms", [None, 1, 5])
@pytest.mark.parametrize(
    "changes", [{}, {"wire": "mxfp8", "combine_wire": "fp8_block128"}, {"wire": "nvfp4"}]
)
def test_what_is_started_has_the_bits_of_a_call(changes, sms):
    layer = spec(hidden_size=200, num_experts=7, max_tokens=70, experts="reference", **changes)
    for same in on_ranks(3, started, layer, sms, device="cuda"):
        assert all(same), same


def test_choices_come_home_on_a_stream_of_their_own():
    layer = spec(hidden_size=128, max_tokens=70, experts="reference", sum="choices")
    for same in on_ranks(3, started, layer, 4, device="cuda"):
        assert all(same), same


# -- What runs meanwhile -------------------------------------------------------------------------------------


def free_while_others_are_late(group, layer, sms, gates):
    """Rank 0 uses its stream while rank 1 has not yet sent rows, then results. Rank 1 goes on when rank 0 has."""
    plan = ty.plan([layer], group, exchange="one_sided", sms=sms)
    built = build(plan, layer.name).to(group.device)
    x_TH, routes = on_gpu(layer, 9, seed=group.rank)
    wanted_TH = built(x_TH, routes)
    group.barrier()

    def use_the_stream(gate):
        if group.rank == 0:
            total = (x_TH.float() + 1).sum()
            done = torch.cuda.Event()
            done.record()
            done.synchronize()  # never, if the caller's stream waited for rank 1
            assert torch.isfinite(total)
            gate.set()

    if group.rank == 1:
        assert gates[0].wait(15)
    pending = built.start(x_TH, routes)
    use_the_stream(gates[0])
    if group.rank == 1:
        pending._trip.receive()
        assert gates[1].wait(15)
    pending.compute()
    use_the_stream(gates[1])
    same = same_bits(pending.finish(), wanted_TH)
    plan.close()
    return same


@pytest.mark.parametrize("sms", [None, 2])
def test_the_stream_of_the_caller_is_free_while_others_are_late(sms):
    layer = spec(hidden_size=64, experts="grouped")
    gates = [threading.Event(), threading.Event()]
    assert on_ranks(2, free_while_others_are_late, layer, sms, gates, device="cuda") == [True, True]


# -- Errors --------------------------------------------------------------------------------------------------


def failing(group, layer):
    plan = ty.plan([layer], group, exchange="one_sided", in_flight=2)
    built = build(plan, layer.name, shared=doubled).to(group.device)
    found = []
    for bad in (True, False):
        x_TH, routes = on_gpu(layer, 4, seed=group.rank)
        wrong = torch.cat([x_TH, x_TH], dim=1) if bad and group.rank == 1 else x_TH

        def two(wrong=wrong, x_TH=x_TH, routes=routes):
            first = built.start(x_TH, routes)
            second = built.start(wrong, routes)
            first.finish()
            second.finish()

        found.append(type(raised(two)).__name__)
    plan.close()
    return found


def test_an_error_in_a_batch_that_was_started_reaches_all_and_the_next_ones_are_fine():
    answers = on_ranks(3, failing, spec(hidden_size=64, experts="grouped"), device="cuda")
    assert answers[1] == ["InputError", "NoneType"]
    assert answers[0] == answers[2] == ["PeerFailed", "NoneType"]


# -- Graphs --------------------------------------------------------------------------------------------------


def captured(group, layer, sms):
    plan = ty.plan([layer], group, exchange="one_sided", in_flight=2, sms=sms)
    built = build(plan, layer.name, shared=doubled).to(group.device)
    given = [on_gpu(layer, tokens, seed=group.rank) for tokens in (6, 13)]

    def run():
        alone = built(*given[0])
        first, second = [built.start(*one) for one in given]
        first.compute()
        second.compute()
        return [alone, first.finish(), second.finish()]

    with plan.fixed_shapes():
        built.plan.exchange.run_overlapped(lambda: doubled(given[0][0]))
        run()
        plan.synchronize()
        group.barrier()
        graph, outputs = capture(group, run)
        wrong = []
        for seed in range(20):
            for (x_TH, routes), tokens in zip(given, (6, 13), strict=True):
                fresh_TH, other = on_gpu(layer, tokens, seed=100 * seed + 7 * group.rank + tokens)
                x_TH.copy_(fresh_TH)
                routes.topk_ids_TK.copy_(other.topk_ids_TK)
            graph.replay()
            plan.synchronize()
            found = [y_TH.clone() for y_TH in outputs]
            wanted = run()
            plan.synchronize()
            wrong.append([not same_bits(a, b) for a, b in zip(found, wanted, strict=True)])
            assert same_bits(found[0], found[1])
    del graph
    plan.close()
    return [any(one) for one in zip(*wrong, strict=True)]


@pytest.mark.parametrize("sms", [None, 3])
def test_streams_fork_and_join_in_a_graph(sms):
    layer = spec(hidden_size=64, intermediate_size=32, num_experts=7, experts="grouped", wire="mxfp8")
    for wrong in on_ranks(2, captured, layer, sms, device="cuda"):
        assert not any(wrong), wrong


# -- How long shared experts take beside the exchange --------------------------------------------------------


@pytest.mark.parametrize(("sms", "most"), [(1, 1.1), (2, 1.1)])
def test_shared_experts_take_as_long_as_the_exchange_beside_it(sms, most):
    """Both together cost at most a tenth more than the longer of them."""
    times = overlap.measured(sms)
    assert times["both"] <= most * max(times["exchange"], times["shared"]), times


def test_an_exchange_without_a_bound_takes_the_whole_gpu():
    """It leaves nothing for what runs beside it, and costs no more than one after the other."""
    times = overlap.measured(None)
    assert times["both"] <= 1.05 * times["one after the other"], times
