"""Routes are recorded on all ranks, and come back step by step."""

import torch

from tokenyard import ExpertWeights, LayerSpec, MoELayer, Routes, launch, plan
from tokenyard.balancing.recorded_routes import read_routes, write_routes
from tokenyard.routing import Placement
from tokenyard_lab.evaluation.route_recorder import RouteRecorder

SPEC = LayerSpec(name="moe", hidden_size=4, intermediate_size=8, num_experts=5, top_k=2, experts="reference")


def drawn(rank: int, step: int) -> Routes:
    draw = torch.Generator().manual_seed(10 * rank + step)
    tokens = (rank + step) % 3  # a rank may have none
    return Routes(
        topk_ids_TK=torch.randint(-1, 5, (tokens, 2), generator=draw),
        topk_weights_TK=torch.rand(tokens, 2, generator=draw),
    )


def record(group):
    weights = ExpertWeights(w13=torch.zeros(5, 16, 4).bfloat16(), w2=torch.zeros(5, 4, 8).bfloat16())
    agreed = plan([SPEC], group, max_tokens=4)
    layer = MoELayer(agreed, "moe", weights.select(agreed.local_experts("moe")))
    recorder = RouteRecorder([layer])
    for step in range(4):
        if step == 3:
            recorder.remove()
        routes = drawn(group.rank, step)
        layer(torch.zeros(routes.num_tokens, 4).bfloat16(), routes)
    (found,) = recorder.gather(group)
    return found


def test_what_every_rank_brought_comes_back_step_by_step(tmp_path):
    by_rank = launch(3, record)
    write_routes(tmp_path / "routes.safetensors", [by_rank[1]])
    (read,) = read_routes(tmp_path / "routes.safetensors")
    assert (read.layer, read.num_steps, read.world, read.num_experts) == ("moe", 3, 3, 5)
    assert (read.hidden_size, read.intermediate_size, read.expert_bytes) == (4, 8, 2 * (16 * 4 + 4 * 8))
    for rank in range(3):
        for step, routes in enumerate(read.replay(rank)):
            assert torch.equal(routes.topk_ids_TK.long(), drawn(rank, step).topk_ids_TK)
            assert torch.equal(routes.topk_weights_TK, drawn(rank, step).topk_weights_TK)
    assert torch.equal(by_rank[0].ids_NK, read.ids_NK)  # every rank knows all of them


def test_rows_by_rank_are_those_that_a_layer_would_send():
    (found, *_) = launch(3, record)
    placement = Placement.replicated(Placement.contiguous(5, 3), {0: [2]})
    expected = torch.zeros(3, dtype=torch.int64)
    for rank in range(3):
        for routes in found.replay(rank):
            rank_TK, _ = placement.resolve(routes.topk_ids_TK, rank)
            expected += rank_TK[rank_TK >= 0].bincount(minlength=3)
    assert found.rows_by_rank(placement) == expected.tolist()
    chosen = found.ids_NK[found.ids_NK >= 0]
    assert found.load() == [int((chosen == expert).sum()) for expert in range(5)]
