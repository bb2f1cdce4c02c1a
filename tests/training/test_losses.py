"""A rank that is lost in a backward: the others raise its loss within the deadline, and train on without it."""

import time

import torch

from tests.models import on_ranks, raised
from tests.training.batches import Training, trained
from tokenyard.errors import ContractError, PeerLost, PlanBroken

CASE = Training(trained(dtype=torch.float32))


def goes_on(group):
    """Rank 2 leaves between its forward and its backward."""
    plan, layer = CASE.make(group)
    x_TH, routes, _, dy_TH = CASE.inputs(group)
    y_TH, older = layer(x_TH, routes), layer(x_TH, routes)
    if group.rank == 2:
        return None
    before = time.monotonic()
    lost = raised(y_TH.backward, dy_TH)
    waited = time.monotonic() - before
    broken = raised(layer, x_TH, routes)
    plan.go_on_without(lost.peers)
    stale = raised(older.backward, dy_TH)  # its experts are gone
    layer(x_TH, routes).backward(dy_TH)
    table = plan.wiring("moe").exchange_spec.placement.table
    there_TK = torch.isin(routes.topk_ids_TK, torch.tensor([expert for row in table for expert in row]))
    gradient_TK = routes.topk_weights_TK.grad
    return {
        "lost": (type(lost), list(lost.peers)),
        "waited": waited,
        "broken": type(broken),
        "stale": type(stale),
        "served": bool((gradient_TK[there_TK] != 0).all()),
        "dropped": bool(gradient_TK[~there_TK].any()),
        "experts": bool(layer.experts.w13.grad.any()),
    }


def test_the_others_raise_the_loss_and_train_on_without_that_rank():
    *left, gone = on_ranks(3, goes_on, deadline=10.0)
    assert gone is None
    for found in left:
        assert found["lost"] == (PeerLost, [2])
        assert found["waited"] < 10
        assert found["broken"] is PlanBroken
        assert found["stale"] is ContractError
        assert found["served"]
        assert not found["dropped"]
        assert found["experts"]
