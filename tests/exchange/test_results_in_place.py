"""Experts on CPUs write their results where an exchange reads them: fewer copies, the same bits."""

import dataclasses

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, spec
from tokenyard import rows
from tokenyard.experts import EXPERTS
from tokenyard.rows import ExpertRows, PlacedRows

EXCHANGES = [("two_sided", 1), ("one_sided", 1), ("hierarchical", 2)]


def outputs(group, exchange, layers):
    """What layers give for the same rows, when their experts may write in place and when not; and what they wrote."""
    plan = ty.plan(layers, group, exchange=exchange)
    found = []
    for layer_spec in layers:
        layer, kinds = build(plan, layer_spec.name), []
        layer.experts.register_forward_hook(
            lambda module, args, result, kinds=kinds: kinds.append(type(result))
        )
        for tokens in (16, 1, 0):
            x_TH, routes = batch(layer_spec, tokens, seed=group.rank)
            in_place = layer(x_TH, routes)
            returned = _returned(layer, x_TH, routes)
            found.append(torch.equal(in_place, returned))
        assert kinds[0] is PlacedRows  # messages without rows have no place for them
        assert kinds[1::2] == [ExpertRows] * 3, kinds
    plan.close()
    return found


def _returned(layer, x_TH, routes):
    """The same call, with experts that do not see where results are read."""
    hidden = layer.experts.register_forward_pre_hook(_hide_place, with_kwargs=True)
    try:
        return layer(x_TH, routes)
    finally:
        hidden.remove()


def _hide_place(module, args, kwargs):
    (received,) = args
    return (dataclasses.replace(received, place=None),), kwargs


@pytest.mark.parametrize(("exchange", "hosts"), EXCHANGES)
def test_results_in_place_have_the_bits_of_those_that_are_returned(exchange, hosts):
    plain = [
        spec(name=f"{experts}, {dtype}, {weight_on}", experts=experts, dtype=dtype, weight_on=weight_on)
        for experts in ("grouped", "reference")
        for dtype in (torch.bfloat16, torch.float32)
        for weight_on in ("output", "input")
    ]
    narrow = spec(name="narrow", dtype=torch.float32, combine_wire="bf16")
    quantized = spec(name="mxfp4", weights="mxfp4", hidden_size=64, intermediate_size=64)
    results = on_ranks(4, outputs, exchange, [*plain, narrow, quantized], hosts=hosts)
    assert all(map(all, results)), results


def too_large(group, exchange):
    """A layer whose results are beyond the range of its way back."""
    layer_spec = spec(dtype=torch.float32, combine_wire="fp16")
    plan = ty.plan([layer_spec], group, exchange=exchange)
    layer = build(plan, "moe")
    layer.experts.w2.mul_(1e30)
    x_TH, routes = batch(layer_spec, 5, seed=group.rank)
    y_TH, due_TH = layer(x_TH, routes), _returned(layer, x_TH, routes)
    plan.close()
    return torch.equal(y_TH, due_TH), bool(y_TH.isfinite().all()), y_TH.abs().max().item() >= 65504


@pytest.mark.parametrize(("exchange", "hosts"), EXCHANGES[:2])
def test_results_in_place_saturate_as_on_a_wire(exchange, hosts):
    assert on_ranks(2, too_large, exchange, hosts=hosts) == [(True, True, True)] * 2


class Doubled(EXPERTS["reference"]):
    """Experts that do something with what another kernel returns."""

    name = "doubled"

    def compute(self, received, *, finalize):
        return ExpertRows(rows_RH=super().compute(received, finalize=finalize).rows_RH * 2)


def twice(group):
    layer_spec = spec(experts=Doubled, dtype=torch.float32)
    plan = ty.plan([layer_spec], group, exchange="one_sided")
    x_TH, routes = batch(layer_spec, 5, seed=group.rank)
    y_TH = build(plan, "moe")(x_TH, routes)
    plan.close()
    single = ty.plan([spec(experts="reference", dtype=torch.float32)], group, exchange="one_sided")
    same = torch.equal(y_TH, build(single, "moe")(x_TH, routes) * 2)
    single.close()
    return same


def test_a_kernel_on_top_of_another_gets_what_it_returns():
    assert not Doubled.places_results
    assert on_ranks(2, twice) == [True, True]


@pytest.mark.parametrize("in_slots", [True, False])
def test_long_results_are_written_block_by_block_where_they_belong(in_slots, monkeypatch):
    monkeypatch.setattr(rows, "WRITE_BLOCK", 3 * 8)  # three rows at a time
    results_RH, order_R = torch.randn(11, 8), torch.randperm(14)[:11]
    buffer = rows.CombineBuffer(
        rows_SH=torch.full((14, 8), torch.nan, dtype=torch.bfloat16), slots_R=order_R if in_slots else None
    )
    buffer.write(results_RH[:4])
    buffer.write(results_RH[4:], first=4)
    written = order_R if in_slots else torch.arange(11)
    assert torch.equal(buffer.rows_SH[written], results_RH.bfloat16())
    others = [slot for slot in range(14) if slot not in written.tolist()]
    assert buffer.rows_SH[others].isnan().all()
