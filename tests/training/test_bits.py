"""Bits of gradients: on any number of ranks, through every exchange, on processes, whatever a rank keeps."""

from dataclasses import replace

import pytest
import torch

from tests.training.batches import Training, differing, errors, trained

EXCHANGES = ["one_sided", "two_sided", "allgather"]
CHOICES = trained(sum="choices", top_k=4, bias=True)


@pytest.mark.parametrize("experts", ["grouped", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_the_same_bits_on_any_number_of_ranks(experts, dtype):
    """Results, and gradients of rows, routing weights, matrices and biases, where ranks have consecutive tokens."""
    case = Training(trained(dtype=dtype, sum="choices", top_k=4, bias=True, experts=experts))
    alone = case.on(1)
    for world in (2, 4, 8):
        assert differing(alone, case.on(world)) == [], world


@pytest.mark.parametrize("experts", ["grouped", "reference"])
def test_with_numbers_of_tokens_these_bits_hold_however_tokens_are_dealt_out(experts):
    spec = trained(
        dtype=torch.float32, sum="choices", top_k=4, bias=True, experts=experts, token_numbers=True
    )
    alone, dealt = Training(spec).on(1), Training(spec, dealt_out=True)
    for world in (2, 4):
        assert differing(alone, dealt.on(world)) == [], world


def test_without_these_numbers_tokens_that_are_dealt_out_are_summed_in_another_order():
    spec = trained(dtype=torch.float32, sum="choices", top_k=4)
    alone = Training(spec).on(1)
    assert differing(alone, Training(spec, dealt_out=True).on(4)) == ["w13", "w2"]


@pytest.mark.parametrize("order", ["ranks", "choices"])
def test_gradients_have_the_same_bits_through_every_exchange_and_on_processes(order):
    case = Training(replace(CHOICES, sum=order))
    one_sided = case.on(2, exchange="one_sided")
    for exchange in EXCHANGES[1:]:
        assert differing(one_sided, case.on(2, exchange=exchange)) == [], exchange
    assert differing(one_sided, case.on(2, exchange="one_sided", ranks="processes")) == []


@pytest.mark.long
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_on_processes_have_the_bits_of_one_rank(exchange):
    case = Training(CHOICES)
    assert differing(case.on(1), case.on(4, exchange=exchange, ranks="processes")) == []


@pytest.mark.parametrize("paranoid", [False, True])
@pytest.mark.parametrize("hosts", [1, 2])
def test_gradients_go_through_relays(hosts, paranoid):
    """Each relay places the gradients of routing weights, as it sums those of rows. On one host, bits are the same."""
    case = Training(replace(CHOICES, sum="ranks"))
    plain = case.on(4, exchange="two_sided")
    found = case.on(4, exchange="hierarchical", hosts=hosts, paranoid=paranoid)
    assert differing(plain, found) == ([] if hosts == 1 else ["y", "x"])
    assert max(errors(found, case.oracle).values()) < 2e-2


@pytest.mark.parametrize("wire", [None, "mxfp8"])
@pytest.mark.parametrize("order", ["ranks", "choices"])
def test_what_a_rank_keeps_changes_no_bit(wire, order):
    case = Training(replace(CHOICES, wire=wire, sum=order))
    products = case.on(2)
    for keep in ("rows", "nothing"):
        assert differing(products, Training(replace(case.spec, keep=keep)).on(2)) == [], keep


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_passes_change_no_bit_of_what_comes_home(exchange):
    """Sums over the rows of an expert are made pass by pass."""
    case = Training(replace(CHOICES, sum="ranks"))
    whole, cut = case.on(2, exchange=exchange), case.on(2, exchange=exchange, max_rows=16)
    assert set(differing(whole, cut)) <= {"w13", "w2", "b13", "b2"}
    assert all(torch.allclose(whole[name].float(), cut[name].float(), atol=0.05, rtol=0.02) for name in whole)


def test_a_watched_plan_has_the_bits_of_another():
    case = Training(CHOICES)
    assert differing(case.on(2), case.on(2, paranoid=True)) == []
    by_ranks = Training(replace(CHOICES, sum="ranks", gradient_wire="mxfp8"))
    for exchange in EXCHANGES:
        watched = by_ranks.on(2, paranoid=True, exchange=exchange)
        assert differing(by_ranks.on(2, exchange=exchange), watched) == []
