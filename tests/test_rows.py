"""The types between the parts: what each takes, how a value is described, and where routes and placements end."""

import dataclasses
import math

import pytest
import torch

import tokenyard as ty
from tokenyard.exchange.checks import check_device
from tokenyard.formats import Bf16
from tokenyard.rows import (
    CombineBuffer,
    LocalRoutes,
    RankRows,
    ReceivedRows,
    check_expert_rows,
    check_result,
    describe,
)


def received(rows=3, width=4, results=None):
    """So many rows that came from one rank."""
    return ReceivedRows(
        rows=Bf16().encode(torch.ones(rows, width).bfloat16()),
        routes=LocalRoutes(ids_RK=torch.zeros(rows, 1, dtype=torch.int32), weights_RK=torch.ones(rows, 1)),
        counts_W=(rows,),
        results=results,
    )


def test_results_in_the_buffer_of_another_batch_are_no_results():
    buffer, other = (CombineBuffer(rows_SH=torch.zeros(3, 4), slots_R=None) for _ in range(2))
    arrived = received(results=buffer)
    assert check_result(placed := buffer.placed(), arrived) is placed
    rows = ty.ExpertRows(rows_RH=torch.zeros(3, 4))
    assert check_result(rows, arrived) is rows
    for wrong, batch in ((other.placed(), arrived), (buffer.placed(), received())):
        with pytest.raises(ty.ContractError, match="combine was given a PlacedRows"):
            check_result(wrong, batch)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(2, 4), "float32[2, 4]"),
        (torch.zeros(3, 5), "float32[3, 5]"),
        (torch.zeros(3, 4, dtype=torch.int32), "int32[3, 4]"),
        (None, "ExpertRows holds None"),
    ],
)
def test_rows_of_experts_have_the_shape_of_what_arrived(rows, words):
    with pytest.raises(ty.ContractError, match=r"expected a floating-point tensor \[3, 4\]") as caught:
        check_expert_rows(ty.ExpertRows(rows_RH=rows), received())
    assert words in str(caught.value)


def test_how_values_are_described():
    values = [torch.zeros(2, 3), torch.zeros(2, 3).to_sparse(), (1, 2), [1], None, 4.5]
    assert [describe(value) for value in values] == [
        "a tensor float32[2, 3]",
        "a tensor float32[2, 3], sparse_coo",
        "a tuple of 2",
        "a list of 1",
        "None",
        "a float",
    ]


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        ("cpu", "cpu", True),
        ("meta", "cpu", False),
        ("cuda:1", "cuda", True),
        ("cuda:1", "cuda:1", True),
        ("cuda:1", "cuda:0", False),
        ("cpu", "cuda:0", False),
    ],
)
def test_where_rows_must_be(found, wanted, fits):
    if fits:
        check_device("x_TH", torch.device(found), torch.device(wanted))
        return
    with pytest.raises(ty.InputError, match=f"x_TH is on {found}; expected {wanted}"):
        check_device("x_TH", torch.device(found), torch.device(wanted))


def test_a_token_all_of_whose_experts_are_lost_keeps_its_weights():
    routes = ty.Routes(
        topk_ids_TK=torch.tensor([[0, 1], [1, 2], [0, -1]]),
        topk_weights_TK=torch.tensor([[0.25, 0.5], [0.25, 0.5], [1.0, math.nan]]),
    )
    lost = (routes.topk_ids_TK == 0) | (routes.topk_ids_TK == 1)
    left = routes.without(lost, renormalize=True)
    assert left.topk_ids_TK.tolist() == [[-1, -1], [-1, 2], [-1, -1]]
    assert left.topk_weights_TK[0].tolist() == [0.25, 0.5]
    assert left.topk_weights_TK[1, 1] == 0.75
    assert left.topk_weights_TK[2, 0] == 1.0
    same = routes.without(lost, renormalize=False)
    assert same.topk_weights_TK is routes.topk_weights_TK


def test_placements_in_words():
    whole = ty.Placement.contiguous(4, 2)
    one, two = ty.Placement.replicated(whole, {0: [1]}), ty.Placement.replicated(whole, {0: [1], 1: [1]})
    assert [placement.has_replicas for placement in (whole, one, two, whole.without([0]))] == [
        False,
        True,
        True,
        False,
    ]
    assert list(
        map(str, (whole, one, two, whole.without([0]), one.without([0]), ty.Placement.contiguous(3, 1)))
    ) == [
        "4 experts on 2 ranks, contiguous",
        "4 experts on 2 ranks, 1 replica",
        "4 experts on 2 ranks, 2 replicas",
        "4 experts on 1 rank, explicit, 2 lost",
        "4 experts on 1 rank, explicit, 1 lost",
        "3 experts on 1 rank, contiguous",
    ]
    assert str(ty.Placement.explicit(3, [[2], [0, 1]])) == "3 experts on 2 ranks, explicit"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_results_of_passes_are_joined_rank_by_rank(number):
    passes = [
        RankRows(
            rows_by_rank=(torch.full((1, 2), float(token)), torch.empty(0, 2)),
            tokens_by_rank=(torch.tensor([token]), torch.empty(0, dtype=torch.int64)),
            num_tokens=number,
            dtype=torch.bfloat16,
        )
        for token in range(number)
    ]
    joined = RankRows.joined(passes)
    assert [tokens.tolist() for tokens in joined.tokens_by_rank] == [list(range(number)), []]
    assert [rows.tolist() for rows in joined.rows_by_rank] == [[[token] * 2 for token in range(number)], []]


def test_the_pairs_of_a_batch_are_found_once():
    ids_RK = torch.tensor([[1, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    routes = LocalRoutes(ids_RK=ids_RK, weights_RK=torch.ones(3, 2))
    assert routes.pairs.tolist() == [0, 4, 5]
    assert routes.pairs is routes.pairs
    assert dataclasses.replace(routes, ids_RK=ids_RK + ids_RK.sign(), renumbered=routes).pairs is routes.pairs
