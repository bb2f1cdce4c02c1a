"""#40960: who quantizes, how wide a padded row is, and which slots are empty were left implicit.

Here each is a duty with one party, the true width is part of the rows' type, and a row that nobody takes does not
exist on the receiving rank.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.duties import Duty, Party
from tokenyard.errors import PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.formats import FORMATS

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)

ENCODES = Counter()


@dataclass(frozen=True)
class CountedMxfp8(FORMATS["mxfp8"]):
    """mxfp8 that counts how often rows are encoded, and by which rank."""

    name = "counted_mxfp8"

    def encode(self, x_TH):
        if x_TH.shape[0]:
            ENCODES[tuple(x_TH.shape)] += 1
        return super().encode(x_TH)


def quantized_where(group, exchange, wire, expert_rows):
    layer = spec(
        hidden_size=100, wire=wire, expert_rows=expert_rows, experts="reference", num_experts=4, top_k=4
    )
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, _ = batch(layer, 5, seed=group.rank)
    # Every token goes to every expert, so that each rank receives all 10 rows.
    everybody = ty.Routes(
        topk_ids_TK=torch.arange(4).expand(5, 4).contiguous(), topk_weights_TK=torch.full((5, 4), 0.25)
    )
    return build(plan, "moe")(x_TH, everybody), plan.wiring("moe").duties


@every_exchange
def test_40960_quantize_before_and_quantize_after_give_the_duty_once_and_the_same_bits(exchange):
    quantized = CountedMxfp8(alignment=256)
    ENCODES.clear()
    before = on_ranks(2, quantized_where, exchange, quantized, None)
    assert ENCODES == {(5, 100): 2}  # each rank once, its own 5 rows
    ENCODES.clear()
    both_say = on_ranks(2, quantized_where, exchange, quantized, quantized)
    assert ENCODES == {(5, 100): 2}  # the experts take the rows as they arrived
    ENCODES.clear()
    after = on_ranks(2, quantized_where, exchange, "bf16", quantized)
    assert ENCODES == {(10, 100): 2}  # each rank once, the 10 rows that it received
    for (y_before, duties_before), (y_both, _), (y_after, duties_after) in zip(
        before, both_say, after, strict=True
    ):
        assert duties_before[Duty.QUANTIZE] is duties_before[Duty.PAD] is Party.SENDER
        assert duties_after[Duty.QUANTIZE] is duties_after[Duty.PAD] is Party.EXPERTS
        assert same_bits(y_before, y_both)
        assert same_bits(y_before, y_after)
    plain = on_ranks(2, quantized_where, exchange, "bf16", None)
    assert not same_bits(plain[0][0], before[0][0])  # the comparison can fail


def test_40960_quantizing_twice_cannot_be_planned():
    for wire, rows in [
        ("mxfp8", "nvfp4"),
        ("nvfp4", "mxfp8"),
        ("mxfp8", "mxfp8(alignment=256)"),
        ("fp8_block128", "mxfp8"),
    ]:
        with pytest.raises(PlanError, match="would be quantized a second time"):
            ty.draft([spec(wire=wire, expert_rows=rows)], 2)


def aligned(group, exchange, wire, ranks_with_experts):
    layer = spec(
        hidden_size=2880,
        intermediate_size=4,
        num_experts=ranks_with_experts,
        top_k=1,
        wire=wire,
        experts="reference",
    )
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, 3, seed=group.rank)
    dispatched = plan.exchange.dispatch(
        plan.wiring("moe").exchange_spec, plan.wiring("moe").wire.encode(x_TH), routes
    )
    received = dispatched.received
    built = build(plan, "moe")
    result = built.experts(received)
    y_TH = dispatched.combine(result).y_TH
    exact = oracle(layer, random_weights(layer, 0), received_exactly(plan, x_TH), routes)
    return (
        received.rows.payloads["data"].shape[1],
        result.rows_RH.shape[1],
        y_TH.shape,
        relative_error(y_TH, exact),
    )


def received_exactly(plan, x_TH):
    return plan.wiring("moe").wire.encode(x_TH).decode()


@every_exchange
def test_40960_an_aligned_width_never_leaks_into_the_output(exchange):
    for travels, computed, came_back, error in on_ranks(3, aligned, exchange, "mxfp8(alignment=256)", 2):
        assert travels == 3072  # 2880 rounded up to 256
        assert computed == 2880
        assert came_back == (3, 2880)
        assert error < 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_40960_no_format_at_all_means_the_inputs_dtype(dtype):
    (wiring,) = ty.draft([spec(dtype=dtype)], 2).wirings
    (payload,) = wiring.wire.payloads(32)
    assert payload.dtype == dtype
    assert wiring.wire.quantized is False
    assert wiring.exchange_spec.combine_wire == wiring.wire
    assert wiring.duties[Duty.QUANTIZE] is Party.NOBODY
    assert [y.dtype for y in on_ranks(2, in_own_dtype, dtype)] == [dtype] * 2


def in_own_dtype(group, dtype):
    layer = spec(dtype=dtype, weights="fp32")
    x_TH, routes = batch(layer, 3)
    return build(ty.plan([layer], group), "moe")(x_TH, routes)


def travels(group, exchange, wire):
    layer = spec(hidden_size=100, wire=wire, experts="reference")
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, 8, seed=group.rank)
    y_TH = build(plan, "moe")(x_TH, routes)
    return relative_error(y_TH, oracle(layer, random_weights(layer, 0), received_exactly(plan, x_TH), routes))


@every_exchange
@pytest.mark.parametrize("wire", ["bf16", "mxfp8", "nvfp4"])
def test_40960_all_formats_travel(exchange, wire):
    assert max(on_ranks(2, travels, exchange, wire)) < 2**-8


def garbage_in_padding(group, exchange):
    layer = spec(wire="mxfp8", experts="reference")
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, 4, seed=group.rank)
    clean = build(plan, "moe")(x_TH, routes)
    padded_TH = torch.cat([x_TH, torch.full((3, 32), float("nan"), dtype=x_TH.dtype)])
    padded = ty.Routes(
        topk_ids_TK=torch.cat([routes.topk_ids_TK, torch.full((3, 2), -1)]),
        topk_weights_TK=torch.cat([routes.topk_weights_TK, torch.full((3, 2), float("nan"))]),
    )
    y_TH = build(plan, "moe")(padded_TH, padded)
    return same_bits(y_TH[:4], clean), bool((y_TH[4:] == 0).all())


@every_exchange
def test_40960_padding_tokens_are_sent_to_nobody_and_come_back_zero(exchange):
    assert on_ranks(3, garbage_in_padding, exchange) == [(True, True)] * 3
