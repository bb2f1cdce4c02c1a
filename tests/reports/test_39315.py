"""#39315: whether a kernel finalizes, and what it returns, was left to a dependency, which changed it.

Here a kernel returns one type for `finalize=True` and one for `finalize=False`, and anything else is refused where
it is returned.
"""

import pytest
import torch

import tokenyard as ty
from tests.models import batch, on_ranks, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.errors import ContractError
from tokenyard.experts import EXPERTS
from tokenyard.formats import FORMATS
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, UnfinalizedRows

KERNELS = ["reference", "grouped"]


def received_batch(layer, tokens=9):
    x_TH, routes = batch(layer, tokens)
    ids_RK = routes.topk_ids_TK.int()
    ids_RK[0] = -1
    ids_RK[1] = 3  # one expert twice
    return ReceivedRows(
        rows=FORMATS["bf16"]().encode(x_TH),
        routes=LocalRoutes(ids_RK=ids_RK, weights_RK=routes.topk_weights_TK),
        counts_W=(tokens,),
    )


def experts_of(layer, cls):
    (wiring,) = ty.draft([layer], 1).wirings
    return cls(wiring.experts_spec(0), random_weights(layer, 0))


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_39315_finalize_on_and_off_agree(kernel, weight_on):
    layer = spec(weight_on=weight_on)
    experts, received = experts_of(layer, EXPERTS[kernel]), received_batch(layer)
    finished = experts(received, finalize=True)
    unfinished = experts(received, finalize=False)
    assert type(finished) is ExpertRows
    assert type(unfinished) is UnfinalizedRows
    assert same_bits(unfinished.finish().rows_RH.float(), finished.rows_RH.float())
    # By hand: one row per pair, weighted and summed by whoever asked for it.
    by_hand = torch.zeros(9, 32, dtype=torch.float64)
    rows_NH = unfinished.rows_NH.double() * unfinished.weights_N.double().unsqueeze(1)
    by_hand.index_add_(0, (unfinished.index_N // unfinished.top_k).long(), rows_NH)
    assert torch.allclose(by_hand, finished.rows_RH.double(), rtol=2**-7, atol=1e-5)
    assert unfinished.rows_NH.shape[0] == int((received.routes.ids_RK >= 0).sum())
    assert not finished.rows_RH[0].any()


RETURNED = {
    "a tuple": (lambda rows: (rows.rows_RH, None), "returned a tuple of 2"),
    "a list": (lambda rows: [rows.rows_RH], "returned a list of 1"),
    "nothing": (lambda rows: None, "returned None"),
    "a tensor": (lambda rows: rows.rows_RH, "returned a tensor float32"),
    "unfinalized rows": (
        lambda rows: UnfinalizedRows(
            rows_NH=rows.rows_RH, weights_N=torch.ones(9), index_N=torch.arange(9), num_rows=9, top_k=1
        ),
        "returned a UnfinalizedRows",
    ),
}


class Changed(EXPERTS["reference"]):
    """A kernel whose dependency was upgraded underneath."""

    name = "changed"
    wrap = staticmethod(lambda rows: rows)

    def compute(self, received, *, finalize):
        return self.wrap(super().compute(received, finalize=True))


@pytest.mark.parametrize("name", RETURNED)
def test_39315_a_kernel_that_returns_anything_else_is_refused_where_it_returns(name):
    wrap, message = RETURNED[name]
    cls = type("Upgraded", (Changed,), {"wrap": staticmethod(wrap), "name": "upgraded"})
    with pytest.raises(ContractError, match=r"Upgraded\.compute\(finalize=True\) " + message):
        experts_of(spec(), cls)(received_batch(spec()))


def upgraded_on_all_ranks(group, name):
    cls = type("Upgraded", (Changed,), {"wrap": staticmethod(RETURNED[name][0]), "name": "upgraded"})
    plan = ty.plan([spec(experts=cls)], group)
    weights = random_weights(spec(), 0).select(plan.local_experts("moe"))
    x_TH, routes = batch(spec(), 9)
    try:
        ty.MoELayer(plan, "moe", weights)(x_TH, routes)
    except ty.TokenyardError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("name", ["a tuple", "a list", "nothing"])
def test_39315_in_a_layer_the_refusal_names_layer_and_rank(name):
    for rank, (kind, message) in enumerate(on_ranks(2, upgraded_on_all_ranks, name)):
        assert kind == "ContractError"
        assert message.startswith(f"layer 'moe', rank {rank}: Upgraded.compute(finalize=True) returned")


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(8, 32), torch.zeros(9, 31), torch.zeros(9, 32, dtype=torch.int32)],
    ids=["rows", "width", "dtype"],
)
def test_39315_rows_of_the_wrong_shape_are_refused(rows):
    cls = type(
        "Reshaped",
        (Changed,),
        {"wrap": staticmethod(lambda _: ExpertRows(rows_RH=rows)), "name": "reshaped"},
    )
    experts, received = experts_of(spec(), cls), received_batch(spec())
    from tokenyard.rows import check_expert_rows

    with pytest.raises(ContractError, match="one row per received row, without padding"):
        check_expert_rows(experts(received), received)
