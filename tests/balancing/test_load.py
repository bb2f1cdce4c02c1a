"""Choices are counted by expert while layers run, and gathered over ranks."""

import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.errors import HandleError
from tokenyard.routing import SoftmaxRouter

LAYERS = [
    spec("a", num_experts=4),
    spec("b", num_experts=6, top_k=3),
    spec("c", experts="self_routing", router=SoftmaxRouter(2, renormalize=True)),
]


def counted(group):
    plan = ty.plan(LAYERS, group, exchange="allgather")
    given = {layer.name: batch(layer, 3 + group.rank, seed=group.rank) for layer in LAYERS}
    for layer in LAYERS:
        x_TH, routes = given[layer.name]
        build(plan, layer.name)(x_TH, torch.randn(len(x_TH), 5) if layer.name == "c" else routes)
    ids_TK = given["b"][1].topk_ids_TK.clone()
    ids_TK[0] = -1
    routes = ty.Routes(topk_ids_TK=ids_TK.int(), topk_weights_TK=torch.ones(ids_TK.shape))
    with torch.inference_mode():
        build(plan, "b")(given["b"][0], routes)
    found, again, after = plan.load(), plan.load(reset=True), plan.load()
    due = {
        "a": given["a"][1].topk_ids_TK.flatten().bincount(minlength=4),
        "b": torch.cat([given["b"][1].topk_ids_TK, ids_TK[1:]]).flatten().bincount(minlength=6),
    }
    return found, again, after, {name: counts.tolist() for name, counts in due.items()}


def test_choices_of_all_ranks_are_counted_by_expert():
    by_rank = on_ranks(2, counted)
    due = {
        name: [sum(counts) for counts in zip(*(rank[3][name] for rank in by_rank), strict=True)]
        for name in ("a", "b")
    }
    for found, again, after, _ in by_rank:
        assert found == again == due
        assert after == {"a": [0] * 4, "b": [0] * 6}


def without_values(group):
    """A transport that neither reads ids nor counts them: one beyond the last expert would be counted out of bounds."""
    plan = ty.plan(LAYERS[:1], group, exchange="two_sided")
    plan.exchange.transport.reads_values = False
    error = raised(plan.load)
    return type(error), str(error)


def test_what_reads_no_ids_counts_none_and_says_so():
    for kind, message in on_ranks(2, without_values):
        assert kind is HandleError
        assert "the load of two_sided on cpu was asked for" in message
        assert "record routes" in message
