"""What a transport of one's own is given to send: packets of rows and of results, and routes of some tokens."""

import torch

import tokenyard as ty
from tests.models import batch, build, spec
from tokenyard.exchange.batch import BatchRoutes
from tokenyard.group import thread_groups
from tokenyard.routing import Placement
from tokenyard.rows import RoutingLogits


def test_packets_have_the_rows_that_go_out_and_the_results_that_go_back():
    layer = spec(wire="mxfp8", combine_wire="mxfp8", placement=Placement.round_robin(5, 1))
    plan = ty.plan([layer], thread_groups(1)[0], exchange="two_sided")
    transport, given = plan.exchange.transport, []
    send, send_back = transport.send, transport.send_back
    transport.send = lambda sent: given.append(sent) or send(sent)
    transport.send_back = lambda results: given.append(results) or send_back(results)
    x_TH, routes = batch(layer, 4)
    build(plan, "moe")(x_TH, routes)
    sent, results = given
    found = sent.spec.dispatch_layout.unpack(sent.packets())
    assert torch.equal(found["ids"], routes.topk_ids_TK.int())
    assert torch.equal(found["weights"], routes.topk_weights_TK)
    for name, payload in sent.rows.payloads.items():
        assert torch.equal(found[name].view(torch.uint8), payload.view(torch.uint8)), name
    (back,) = results.packets_by_rank()
    found = sent.spec.combine_layout.unpack(back)
    for name, payload in results.encoded.payloads.items():
        assert torch.equal(found[name].view(torch.uint8), payload.view(torch.uint8)), name


def test_logits_of_some_tokens_are_theirs():
    logits_RE = torch.arange(20.0).view(4, 5)
    (wiring,) = ty.draft([spec()], 1).wirings
    routes = BatchRoutes(
        spec=wiring.exchange_spec, routes=RoutingLogits(logits_RE=logits_RE), num_tokens=4, rank=0
    )
    part = routes.of_tokens(1, 3)
    assert part.num_tokens == 2
    assert torch.equal(part.routes.logits_RE, logits_RE[1:3])
