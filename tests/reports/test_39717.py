"""#39717: the workspace was sized for nvfp4, and any other format was silently corrupted.

Here bytes come from the format's own declaration, and a batch in a format that the layer was not sized for is
refused before a byte moves, whatever the exchange.
"""

from dataclasses import dataclass

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.workspace import round_up
from tokenyard.formats import FORMATS, EncodedRows, Payload

TRAVEL = ["bf16", "fp16", "fp8_block128", "mxfp8", "nvfp4"]
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def planned_for_one_format(group, exchange, planned):
    layer = spec(wire=planned, hidden_size=100)
    plan = ty.plan([layer], group, exchange=exchange)
    x_TH, routes = batch(layer, 4, seed=group.rank)
    before = build(plan, "moe")(x_TH, routes)
    refused = {}
    for other in TRAVEL:
        if other != planned:
            rows = FORMATS[other]().encode(x_TH)
            refused[other] = str(
                raised(plan.exchange.dispatch, plan.wiring("moe").exchange_spec, rows, routes)
            )
    return refused, same_bits(build(plan, "moe")(x_TH, routes), before)


@every_exchange
@pytest.mark.parametrize("planned", TRAVEL)
def test_39717_no_exchange_accepts_a_format_that_it_has_not_sized_for(exchange, planned):
    for refused, unharmed in on_ranks(2, planned_for_one_format, exchange, planned):
        assert unharmed
        assert set(refused) == set(TRAVEL) - {planned}
        for other, message in refused.items():
            assert f"the rows are {other} of width 100; expected {planned} of width 100" in message
            assert "the bytes that this layer was sized for" in message


@pytest.mark.parametrize("hidden_size", [1, 100, 2880, 7168])
@pytest.mark.parametrize("wire", [*TRAVEL, "mxfp8(alignment=256)", "nvfp4(global_scale=2.0)"])
def test_39717_a_packet_holds_exactly_what_the_format_declares(wire, hidden_size):
    (wiring,) = ty.draft([spec(wire=wire, hidden_size=hidden_size, top_k=3)], 4).wirings
    rows = wiring.wire.encode(torch.randn(2, hidden_size).bfloat16())
    declared = [payload[0].numel() * payload.element_size() for payload in rows.payloads.values()]
    assert sum(declared) == wiring.wire.bytes_per_row(hidden_size)
    # Payloads, 3 ids of 4 bytes, 3 weights of 4 bytes, each rounded up to 16.
    assert wiring.exchange_spec.nbytes.dispatch_row == sum(map(round_up, [*declared, 12, 12]))
    assert wiring.exchange_spec.nbytes.dispatch == 4 * 16 * wiring.exchange_spec.nbytes.dispatch_row


@dataclass(frozen=True)
class Doubled(FORMATS["bf16"]):
    """Somebody else's format, twice as wide as bf16."""

    name = "doubled"

    def payloads(self, hidden_size):
        return (Payload(name="data", dtype=torch.bfloat16, width=2 * hidden_size),)

    def encode(self, x_TH):
        data = torch.cat([x_TH, x_TH], dim=1)
        return EncodedRows(format=self, hidden_size=x_TH.shape[1], payloads={"data": data})

    def decode(self, rows, dtype=torch.float32):
        return rows.payloads["data"][:, : rows.hidden_size].to(dtype)


def own_format(group, exchange):
    layers = [spec("theirs", wire=Doubled(), experts="reference"), spec("ours", experts="reference")]
    plan = ty.plan(layers, group, exchange=exchange)
    x_TH, routes = batch(layers[0], 5, seed=group.rank)
    return same_bits(build(plan, "theirs")(x_TH, routes), build(plan, "ours")(x_TH, routes))


@every_exchange
def test_39717_a_format_that_nobody_here_knows_is_sized_by_its_own_declaration(exchange):
    assert on_ranks(2, own_format, exchange, ranks="processes") == [True, True]
