"""`one_sided` on a GPU, with virtual ranks: threads that share it, each on its own stream."""

import dataclasses
import gc

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.rows import ExpertRows

pytestmark = pytest.mark.gpu

WIRES = [
    "bf16",
    "fp16",
    "fp8_block128",
    "mxfp8",
    "mxfp8(alignment=256)",
    "nvfp4",
    "nvfp4(global_scale=448.0)",
]


def there(routes):
    return dataclasses.replace(
        routes, topk_ids_TK=routes.topk_ids_TK.cuda(), topk_weights_TK=routes.topk_weights_TK.cuda()
    )


def one_layer(group, layer, tokens):
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, layer.name).to(group.device)
    same = []
    for seed in range(3):
        x_TH, routes = batch(layer, tokens[group.rank], seed=7 * group.rank + seed)
        y_TH = built(x_TH.cuda(), there(routes))
        expected = twin(plan.wiring(layer.name), random_weights(layer, 0), x_TH, routes, group.rank)
        same.append(same_bits(y_TH.cpu(), expected))
    plan.close()
    return all(same)


@pytest.mark.parametrize("wire", WIRES)
def test_a_layer_has_the_bits_of_its_twin(wire):
    layer = spec(wire=wire, hidden_size=200, num_experts=7, max_tokens=90, experts="reference")
    assert all(on_ranks(4, one_layer, layer, (5, 0, 90, 2), device="cuda"))


@pytest.mark.parametrize("combine_wire", ["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4"])
def test_results_come_home_in_every_wire(combine_wire):
    layer = spec(combine_wire=combine_wire, hidden_size=150, experts="reference")
    assert all(on_ranks(3, one_layer, layer, (16, 3, 9), device="cuda"))


def captured(group, layer, replays):
    """Rounds of dispatch and combine in a graph, with other routes each time."""
    plan = ty.plan([layer], group, exchange="one_sided")
    exchange, exchange_spec = plan.exchange, plan.wiring(layer.name).exchange_spec
    x_TH, routes = batch(layer, 12, seed=group.rank)
    x_TH, routes = x_TH.cuda(), there(routes)
    out_TH = torch.empty_like(x_TH)

    def round_trip():
        dispatched = exchange.dispatch(exchange_spec, exchange.encode(exchange_spec, x_TH), routes)
        buffer = dispatched.received.results
        buffer.rows_SH.copy_(dispatched.received.rows.decode(torch.bfloat16))
        dispatched.combine(buffer.placed(), out=out_TH)

    with exchange.fixed_shapes():
        round_trip()
    exchange.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    for rank in range(group.size):  # threads of one process capture one after the other
        if rank == group.rank:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                round_trip()
        group.barrier()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(replays):
        fresh_TH, other = batch(layer, 12, seed=1000 + replay * group.size + group.rank)
        x_TH.copy_(fresh_TH)
        routes.topk_ids_TK.copy_(other.topk_ids_TK)
        graph.replay()
        rank_TK, _ = exchange_spec.placement.resolve(routes.topk_ids_TK, group.rank)
        ranks_T1 = (
            (rank_TK.unsqueeze(2) == torch.arange(group.size, device="cuda")).any(1).sum(1, keepdim=True)
        )
        rows_TH = exchange_spec.wire.encode(x_TH).decode(torch.bfloat16)
        sums_TH = torch.zeros_like(rows_TH, dtype=torch.float32)
        for rank in range(group.size):
            sums_TH += torch.where(ranks_T1 > rank, rows_TH, 0).float()
        wrong += (out_TH != sums_TH.to(torch.bfloat16)).sum()
    exchange.synchronize()
    larger = dataclasses.replace(layer, name="larger", hidden_size=4 * layer.hidden_size)
    refused = raised(plan.extend, [larger])
    del graph
    gc.collect()
    torch.cuda.synchronize()
    group.barrier()
    grown = raised(plan.extend, [larger])
    plan.close()
    return int(wrong), type(refused).__name__, grown


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_a_captured_round_trip_replays_and_keeps_its_workspace(wire):
    layer = spec(wire=wire, hidden_size=64, num_experts=7, max_tokens=12, experts="grouped")
    for wrong, refused, grown in on_ranks(2, captured, layer, 50, device="cuda"):
        assert wrong == 0
        assert refused in {"HandleError", "PeerFailed"}
        assert grown is None


def failing(group, layer):
    """One rank's bad batches: its own error there, PeerFailed elsewhere; the next round is fine."""
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, layer.name).to(group.device)
    x_TH, routes = batch(layer, 4, seed=group.rank)
    found = []
    for what in ("too wide", "bad id", "fine"):
        x, ids = x_TH.cuda(), routes.topk_ids_TK.clone()
        if group.rank == 1 and what == "too wide":
            x = torch.cat([x, x], dim=1)
        if group.rank == 1 and what == "bad id":
            ids[2, 0] = 99
        mine = dataclasses.replace(there(routes), topk_ids_TK=ids.cuda())
        found.append(type(raised(built, x, mine)).__name__)
    plan.close()
    return found


def test_an_error_on_one_rank_reaches_all_and_the_group_goes_on():
    answers = on_ranks(3, failing, spec(hidden_size=64, experts="grouped"), device="cuda")
    assert answers[1] == ["InputError", "InputError", "NoneType"]
    assert answers[0] == answers[2] == ["PeerFailed", "PeerFailed", "NoneType"]


def late(group, layer):
    """Rank 1 does not come: the others raise PeerLost within their deadline, and their contexts live on."""
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, layer.name).to(group.device)
    x_TH, routes = batch(layer, 4, seed=group.rank)
    error = None if group.rank == 1 else raised(built, x_TH.cuda(), there(routes))
    again = None if group.rank == 1 else raised(built, x_TH.cuda(), there(routes))
    alive = float(torch.ones(3, device="cuda").sum())
    return type(error).__name__, getattr(error, "peers", None), type(again).__name__, alive


def test_a_rank_that_does_not_come_is_named():
    answers = on_ranks(3, late, spec(hidden_size=64, experts="grouped"), device="cuda", deadline=1.5)
    assert answers[0] == answers[2] == ("PeerLost", (1,), "PlanBroken", 3.0)


def drifting(group, first, second):
    plan = ty.plan([first, second], group, exchange="one_sided")
    name = first.name if group.rank == 0 else second.name
    built = build(plan, name).to(group.device)
    x_TH, routes = batch(first, 4, seed=group.rank)
    return type(raised(built, x_TH.cuda(), there(routes))).__name__


def test_ranks_in_different_layers_find_out():
    answers = on_ranks(
        2,
        drifting,
        *(spec(name, hidden_size=64, experts="grouped") for name in ("one", "two")),
        device="cuda",
    )
    assert answers == ["Drifted", "Drifted"]


def many_rounds(group, small, large):
    """Layers of different sizes in turn, two in flight."""
    plan = ty.plan([small, large], group, exchange="one_sided", in_flight=2)
    exchange_specs = {layer.name: plan.wiring(layer.name).exchange_spec for layer in (small, large)}
    fine = True
    for number in range(40):
        flights = []
        for layer in (small, large):
            x_TH, routes = batch(layer, (number + group.rank) % 9, seed=number + group.rank)
            exchange_spec = exchange_specs[layer.name]
            sent = plan.exchange.dispatch(
                exchange_spec, plan.exchange.encode(exchange_spec, x_TH.cuda()), there(routes)
            )
            flights.append((sent, x_TH, routes, exchange_spec))
        for sent, x_TH, routes, exchange_spec in flights:
            rows_RH = sent.received.dense().decode(torch.float32)
            y_TH = sent.combine(ExpertRows(rows_RH=rows_RH)).y_TH.cpu()
            ranks_TK, _ = exchange_spec.placement.resolve(routes.topk_ids_TK, group.rank)
            count_T = torch.tensor([len(set(row)) for row in ranks_TK.tolist()]).unsqueeze(1)
            fine &= same_bits(y_TH, (x_TH.float() * count_T).bfloat16())
    plan.close()
    return fine


def test_layers_share_a_workspace_with_two_in_flight():
    small = spec("small", hidden_size=32, experts="grouped")
    large = spec("large", hidden_size=96, num_experts=9, top_k=3, experts="grouped")
    assert all(on_ranks(3, many_rounds, small, large, device="cuda"))


def captured_layer(group, layer):
    """A whole layer in a graph, experts included, at two batch sizes that share the workspace."""
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, layer.name).to(group.device)
    worst = 0.0
    for tokens in (6, 13):
        x_TH, routes = batch(layer, tokens, seed=group.rank)
        x_TH, routes = x_TH.cuda(), there(routes)
        with plan.fixed_shapes(max_tokens=tokens):
            built(x_TH, routes)
            plan.synchronize()
            group.barrier()
            graph = torch.cuda.CUDAGraph()
            for rank in range(group.size):
                if rank == group.rank:
                    with torch.cuda.graph(
                        graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"
                    ):
                        y_TH = built(x_TH, routes)
                group.barrier()
        for seed in range(5):
            fresh_TH, other = batch(layer, tokens, seed=100 * seed + group.rank)
            x_TH.copy_(fresh_TH)
            routes.topk_ids_TK.copy_(other.topk_ids_TK)
            graph.replay()
            plan.synchronize()
            expected = twin(
                plan.wiring(layer.name), random_weights(layer, 0), fresh_TH, routes_on_cpu(routes), group.rank
            )
            worst = max(
                worst,
                float((y_TH.cpu().float() - expected.float()).abs().max() / expected.float().abs().max()),
            )
        del graph
    plan.close()
    return worst


def routes_on_cpu(routes):
    return dataclasses.replace(
        routes, topk_ids_TK=routes.topk_ids_TK.cpu(), topk_weights_TK=routes.topk_weights_TK.cpu()
    )


def test_a_captured_layer_computes_what_its_twin_does():
    layer = spec(hidden_size=64, intermediate_size=32, num_experts=7, experts="grouped", wire="mxfp8")
    assert max(on_ranks(2, captured_layer, layer, device="cuda")) < 0.02
