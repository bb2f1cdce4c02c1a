"""`hierarchical` on a GPU: ranks stand for several hosts, and kernels move rows inside each of them."""

import time

import pytest
import torch

import tokenyard as ty
from tests.gpu.test_one_sided_cuda import there
from tests.gpu.test_overlap_cuda import doubled, on_gpu, parts_of
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.metering import Meter
from tokenyard.conformance.twin import twin
from tokenyard.errors import ContractError
from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport
from tokenyard.layer import overlapped
from tokenyard.planning.draft_text import links
from tokenyard.routing import Placement
from tokenyard.rows import ExpertRows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HOSTS = ([2, 2], [3, 1], [1, 2, 1])


def planned(group, *layers, **options):
    plan = ty.plan(list(layers), group, exchange="hierarchical", **options)
    assert isinstance(plan.exchange.transport.inside, CudaTransport)
    return plan


def one_layer(group, layer, tokens):
    """Whether each of some calls has the bits of the twin, which runs on the CPU."""
    plan = planned(group, layer)
    built = build(plan, layer.name).to(group.device)
    same = []
    for seed in range(3):
        x_TH, routes = batch(layer, tokens[group.rank], seed=7 * group.rank + seed)
        y_TH = built(x_TH.cuda(), there(routes))
        expected = twin(plan.wiring(layer.name), random_weights(layer, 0), x_TH, routes, group.rank)
        same.append(same_bits(y_TH.cpu(), expected))
    plan.close()
    return same


def layer_of(**changes):
    sizes = {"hidden_size": 200, "num_experts": 7, "top_k": 4, "max_tokens": 90, "experts": "reference"}
    return spec(**(sizes | changes))


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("wire", ["bf16", "mxfp8", "nvfp4", "fp8_block128"])
def test_a_layer_has_the_bits_of_its_twin(wire, hosts):
    """A rank without tokens, long and short batches, experts on all ranks."""
    found = on_ranks(4, one_layer, layer_of(wire=wire), (5, 0, 90, 2), device="cuda", hosts=hosts)
    assert found == [[True] * 3] * 4


@pytest.mark.parametrize("hosts", [[2, 2], [2, 1]])
@pytest.mark.parametrize("combine_wire", ["bf16", "fp16", "mxfp8", "nvfp4", "fp8_block128"])
def test_sums_cross_in_every_wire(combine_wire, hosts):
    layer = layer_of(combine_wire=combine_wire)
    tokens = (16, 3, 70, 0)[: sum(hosts)]
    found = on_ranks(sum(hosts), one_layer, layer, tokens, device="cuda", hosts=hosts)
    assert found == [[True] * 3] * sum(hosts)


COPIES = Placement.replicated(Placement.contiguous(7, 4), {0: [2, 3], 5: [0], 6: [1]})


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": COPIES, "wire": "nvfp4"},  # which copy a row meets depends on its source
        {"num_experts": 1, "top_k": 1},  # most ranks, and a host, have no expert
        {"dtype": torch.float32, "combine_wire": "bf16"},
        {"dtype": torch.float16, "wire": "mxfp8"},
        {"hidden_size": 7168, "num_experts": 32, "top_k": 8, "wire": "mxfp8"},
    ],
)
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_layers_of_all_kinds_have_the_bits_of_their_twins(changes, ranks):
    found = on_ranks(
        4,
        one_layer,
        layer_of(**changes),
        (5, 0, 90, 2),
        device="cuda",
        hosts=2,
        ranks=ranks,
        deadline=60.0,
    )
    assert found == [[True] * 3] * 4


# -- What crosses ------------------------------------------------------------------------------------------


def everywhere(group):
    """Full batches of tokens that have experts on every host: bytes that this rank has sent elsewhere, and the plan."""
    layer = layer_of(num_experts=6, top_k=6, max_tokens=4, wire="mxfp8")
    plan = planned(group, layer)
    exchange_spec = plan.wiring("moe").exchange_spec
    routes = there(ty.Routes(topk_ids_TK=torch.arange(6).expand(4, 6), topk_weights_TK=torch.ones(4, 6)))
    x_TH = torch.ones(4, layer.hidden_size).bfloat16().cuda()
    with Meter(group) as out:
        arrival = plan.exchange.dispatch(exchange_spec, plan.exchange.encode(exchange_spec, x_TH), routes)
    rows_RH = torch.zeros(arrival.received.num_rows, layer.hidden_size, device=group.device)
    with Meter(group) as back:
        arrival.combine(ExpertRows(rows_RH=rows_RH))
    (here,) = [ranks for ranks in group.hosts() if group.rank in ranks]
    elsewhere = [rank for rank in range(group.size) if rank not in here]
    head = plan.exchange.transport.mailbox.head_bytes
    plan.close()
    return [sum(way.sent[rank] - head for rank in elsewhere) for way in (out, back)], links(exchange_spec)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_row_crosses_once_to_each_host_in_the_bytes_that_the_plan_says(hosts):
    found = on_ranks(4, everywhere, device="cuda", hosts=hosts)
    planned_links = found[0][1]
    assert sum(out for (out, _), _ in found) == sum(link["dispatch"] for link in planned_links)
    assert sum(back for (_, back), _ in found) == sum(link["combine"] for link in planned_links)


def chosen(group, **options):
    return str(ty.plan([layer_of()], group, **options))


def refused(group):
    bounded = raised(planned, group, layer_of(), max_rows=8)
    fixed = raised(planned(group, layer_of()).fixed_shapes)
    return str(bounded), str(fixed)


def test_auto_takes_it_where_ranks_on_gpus_span_hosts():
    text = on_ranks(3, chosen, device="cuda", hosts=[2, 1])[0]
    assert "exchange hierarchical (auto: one_sided shares memory, and the ranks run on 2 hosts)" in text
    assert "from host 0 to host 1: at most 180 rows out (" in text


def test_what_it_cannot_do_on_gpus_is_refused():
    for bounded, fixed in on_ranks(2, refused, device="cuda", hosts=2):
        assert "leave max_rows out" in bounded
        assert "hierarchical on cuda was asked for fixed shapes; expected one_sided on GPUs" in fixed


# -- Several in flight -------------------------------------------------------------------------------------


def started(group, layer):
    """Batches that are started, two of them in flight, beside the same ones in calls of another plan."""
    plain = build(planned(group, layer), layer.name).to(group.device)
    built = build(planned(group, layer, in_flight=2), layer.name, shared=doubled).to(group.device)
    same = []
    for seed in range(4):
        batches = [on_gpu(layer, tokens, seed=10 * seed + group.rank) for tokens in (9 - 2 * group.rank, 70)]
        wanted = [plain(x_TH, routes, add=x_TH * 2) for x_TH, routes in batches]
        same.append(same_bits(built(*batches[0]), wanted[0]))
        pending = [built.start(x_TH, routes) for x_TH, routes in batches]
        if seed % 2:
            for one in pending:
                one.compute()
        found = [one.finish() for one in pending]
        same += [same_bits(y_TH, want_TH) for y_TH, want_TH in zip(found, wanted, strict=True)]
        x_TH, routes = batches[1]
        halves = torch.cat([built(*part) for part in parts_of(x_TH, routes)])
        same.append(same_bits(overlapped(built, x_TH, routes), halves))
    return same


@pytest.mark.parametrize("hosts", [[2, 2], [2, 1]])
def test_what_is_started_has_the_bits_of_a_call(hosts):
    layer = layer_of(wire="mxfp8", combine_wire="fp8_block128")
    for same in on_ranks(sum(hosts), started, layer, device="cuda", hosts=hosts):
        assert all(same), same


# -- Errors, late ranks and losses -------------------------------------------------------------------------


def fails_at(group, rank, phase):
    """A rank fails in a phase; all hear of it, and the next call has the bits of the one before."""
    layer = layer_of(max_tokens=16)
    plan = planned(group, layer)
    built = build(plan, layer.name).to(group.device)
    x_TH, routes = on_gpu(layer, 9, seed=group.rank)
    before_TH = built(x_TH, routes)
    compute = built.experts.compute

    def broken(*arguments, **options):
        raise ContractError("the expert is broken", expected="one that works", fix="mend it")

    if group.rank == rank and phase == "dispatch":
        error = raised(built, x_TH, None)
    else:
        if group.rank == rank:
            built.experts.compute = broken
        error = raised(built, x_TH, routes)
        built.experts.compute = compute
    return type(error).__name__, str(error), same_bits(built(x_TH, routes), before_TH)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_on_one_rank_reaches_all_hosts_and_the_next_call_works(rank, phase):
    found = on_ranks(4, fails_at, rank, phase, device="cuda", hosts=2)
    for other, (kind, message, worked) in enumerate(found):
        assert (kind != "PeerFailed") == (other == rank), message
        assert f"rank {rank} failed in {phase}" in message or other == rank
        assert worked


def late(group, rank):
    """A rank comes late to a dispatch, and late to a combine."""
    layer = layer_of(max_tokens=16)
    built = build(planned(group, layer), layer.name).to(group.device)
    x_TH, routes = on_gpu(layer, 9, seed=group.rank)
    before_TH, compute, same = built(x_TH, routes), built.experts.compute, []

    def slow(*arguments, **options):
        time.sleep(0.4)
        return compute(*arguments, **options)

    for place in ("dispatch", "combine"):
        if group.rank == rank and place == "dispatch":
            time.sleep(0.4)
        built.experts.compute = slow if group.rank == rank and place == "combine" else compute
        same.append(same_bits(built(x_TH, routes), before_TH))
    return same


@pytest.mark.parametrize("rank", [1, 2])
def test_a_late_rank_costs_time_alone(rank):
    assert on_ranks(4, late, rank, device="cuda", hosts=[3, 1]) == [[True, True]] * 4


class _Ended(BaseException):
    """Ends a rank, as a crash would."""


def dies(group, level, rank):
    """A rank ends in the middle of a call: between the two levels of a dispatch, or before its results are told."""
    layer = layer_of(max_tokens=16)
    plan = planned(group, layer)
    built = build(plan, layer.name).to(group.device)
    x_TH, routes = on_gpu(layer, 3, seed=group.rank)
    built(x_TH, routes)
    transport = plan.exchange.transport

    def end(*_):
        raise _Ended

    if group.rank == rank:
        if level == "inside":
            transport.inside.send = end
        elif level == "sum":
            transport.inside.at_home = end
        else:
            transport.send_back = end
    try:
        error = raised(built, x_TH, routes)
    except _Ended:
        group.leave("it has crashed")
        return None
    with plan.group.patience(30.0):
        plan.go_on_without(error.peers)
        y_TH = built(x_TH, routes)
    return list(error.peers), str(error), plan.group.size, bool(y_TH.any())


@pytest.mark.parametrize("level", ["inside", "between", "sum"])
def test_all_ranks_of_all_hosts_name_a_rank_that_is_lost_and_go_on(level):
    found = on_ranks(4, dies, level, 1, device="cuda", hosts=2, deadline=5.0)
    assert found[1] is None
    for rank in (0, 2, 3):
        peers, message, left, worked = found[rank]
        assert peers == [1], message
        assert (left, worked) == (3, True)
