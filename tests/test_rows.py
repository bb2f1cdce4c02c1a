"""The types between the parts: what each takes, how a value is described, and where routes and placements end."""

import dataclasses
import math

import pytest
import torch

import tokenyard as ty
from tokenyard.duties import Duty, Ledger, Party
from tokenyard.errors import ContractError, InputError
from tokenyard.formats import Bf16
from tokenyard.formats.base import check_device
from tokenyard.routing import Placement
from tokenyard.rows import (
    ChoiceRows,
    CombineBuffer,
    ExpertRows,
    LocalRoutes,
    RankRows,
    ReceivedRows,
    UnfinalizedRows,
    check_choice_rows,
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
    rows = ExpertRows(rows_RH=torch.zeros(3, 4))
    assert check_result(rows, arrived) is rows
    for wrong, batch in ((other.placed(), arrived), (buffer.placed(), received())):
        with pytest.raises(ContractError, match="combine was given a PlacedRows"):
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
    with pytest.raises(ContractError, match=r"expected a floating-point tensor \[3, 4\]") as caught:
        check_expert_rows(ExpertRows(rows_RH=rows), received())
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
    with pytest.raises(InputError, match=f"x_TH is on {found}; expected {wanted}"):
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
    whole = Placement.contiguous(4, 2)
    one, two = Placement.replicated(whole, {0: [1]}), Placement.replicated(whole, {0: [1], 1: [1]})
    assert [placement.has_replicas for placement in (whole, one, two, whole.without([0]))] == [
        False,
        True,
        True,
        False,
    ]
    assert list(
        map(str, (whole, one, two, whole.without([0]), one.without([0]), Placement.contiguous(3, 1)))
    ) == [
        "4 experts on 2 ranks, contiguous",
        "4 experts on 2 ranks, 1 replica",
        "4 experts on 2 ranks, 2 replicas",
        "4 experts on 1 rank, explicit, 2 lost",
        "4 experts on 1 rank, explicit, 1 lost",
        "3 experts on 1 rank, contiguous",
    ]
    assert str(Placement.explicit(3, [[2], [0, 1]])) == "3 experts on 2 ranks, explicit"


LARGE = 2.0**24  # beside it, float32 has no odd numbers


def unfinalized(dtype: torch.dtype = torch.bfloat16) -> UnfinalizedRows:
    """Of three rows with three choices each: all of row 0, the last of row 1, none of row 2; in any order."""
    return UnfinalizedRows(
        rows_NH=torch.tensor([[2.0, 4.0], [-LARGE, 32.0], [LARGE, 8.0], [1.0, 16.0]], dtype=dtype),
        weights_N=torch.tensor([0.5, 1.0, 1.0, 3.0]),
        index_N=torch.tensor([5, 2, 0, 1]),
        num_rows=3,
        top_k=3,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_weighted_and_summed_in_the_order_of_rows_and_choices(dtype):
    with Ledger().open() as ledger:
        weighted = unfinalized(dtype).weighted()
    assert weighted.rows_NH.tolist() == [[LARGE, 8.0], [3.0, 48.0], [-LARGE, 32.0], [1.0, 2.0]]
    assert weighted.rows_NH.dtype == torch.float32
    assert ledger.done == {Duty.WEIGHT: {Party.CALLER: 2}}  # a weight of 1 changes nothing
    with Ledger().open() as ledger:
        finished = unfinalized(dtype).finish()
    assert finished.rows_RH.tolist() == [[4.0, 88.0], [1.0, 2.0], [0.0, 0.0]]  # 3 in another order
    assert finished.rows_RH.dtype == torch.float32
    assert ledger.done == {Duty.WEIGHT: {Party.CALLER: 2}, Duty.REDUCE_EXPERTS: {Party.CALLER: 4}}


def test_results_of_ranks_are_summed_in_the_order_of_ranks_and_rounded_once():
    came = RankRows(
        rows_by_rank=(
            torch.tensor([[LARGE, 1.0], [3.0, 4.0]]),
            torch.tensor([[1.0, 2.0**-9]]),
            torch.tensor([[-LARGE, 2.0**-9]]),
        ),
        tokens_by_rank=(torch.tensor([2, 0]), torch.tensor([2]), torch.tensor([2])),
        num_tokens=3,
        dtype=torch.bfloat16,
    )
    with Ledger().open() as ledger:
        sums_TH = came.sum()
    assert sums_TH.tolist() == [[3.0, 4.0], [0.0, 0.0], [0.0, 1.0 + 2.0**-8]]
    assert ledger.done == {Duty.REDUCE_RANKS: {Party.CALLER: 4}}
    combined = came.reduce()
    assert combined.y_TH.dtype == torch.bfloat16
    assert torch.equal(combined.y_TH, sums_TH.bfloat16())
    alone = dataclasses.replace(
        came, rows_by_rank=came.rows_by_rank[:1], tokens_by_rank=came.tokens_by_rank[:1]
    )
    assert alone.sum().tolist() == [[3.0, 4.0], [0.0, 0.0], [LARGE, 1.0]]


@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3, 5)], ids=str)
def test_rows_of_choices_have_a_row_for_each_choice_of_an_expert_here(shape):
    with pytest.raises(
        ContractError, match=r"ChoiceRows holds .*; expected a floating-point tensor \[3, 4\]"
    ):
        check_choice_rows(ChoiceRows(rows_NH=torch.zeros(shape)), received())
    fitting = ChoiceRows(rows_NH=torch.zeros(3, 4))
    assert check_choice_rows(fitting, received()) is fitting


@pytest.mark.parametrize("slots", [None, [4, 0, 2, 5]])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_results_are_written_to_their_slots_and_saturate(slots, block, monkeypatch):
    monkeypatch.setattr("tokenyard.rows.WRITE_BLOCK", block)  # elements at a time
    slots_R = None if slots is None else torch.tensor(slots)
    rows_SH = torch.full((6, 2), torch.nan, dtype=torch.float16)
    place = CombineBuffer(rows_SH=rows_SH, slots_R=slots_R)
    assert place.write(torch.tensor([[1e6, 1.0]])).buffer is place
    assert place.write(torch.tensor([[2.0, -1e6], [3.0, math.inf], [4.0, 5.0]]), first=1).buffer is place
    written = rows_SH[[0, 1, 2, 3] if slots is None else slots]
    assert written.tolist() == [[65504.0, 1.0], [2.0, -65504.0], [3.0, 65504.0], [4.0, 5.0]]
    assert rows_SH.isnan().all(1).sum() == 2


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
