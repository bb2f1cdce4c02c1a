"""Two levels: what crosses between hosts, in which order sums are made, and how errors and losses pass through both."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import Case, run_case
from tokenyard.conformance.metering import Meter
from tokenyard.errors import Drifted, GroupError, InputError
from tokenyard.exchange import ExchangeSpec, HierarchicalTransport, HostMap
from tokenyard.exchange.transports import hierarchical
from tokenyard.exchange.transports.forwarding import Forwarding
from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport
from tokenyard.group import thread_groups
from tokenyard.planning.draft_text import links
from tokenyard.routing import Placement
from tokenyard.rows import CombineBuffer, ExpertRows, LocalRoutes, ReceivedRows

HOSTS = ([2, 2], [3, 1], [1, 3], [1, 2, 1])


def drawn_cases(world):
    """Small layers of all kinds that matter to the way of a row, and to its sums."""
    tokens = (5, 0, 9, 2)[:world]
    kinds = [
        {},
        {"wire": "nvfp4", "placement": "replicas", "payloads": True},
        {"combine_wire": "mxfp8", "routes": "gaps"},
        {"wire": "mxfp8(alignment=256)", "dtype": "float16", "placement": "round_robin", "id_dtype": "int32"},
        {"dtype": "float32", "combine_wire": "bf16", "routes": "duplicates", "top_k": 7},
        {"num_experts": 2, "routes": "one_rank"},  # most ranks, and a host, have no expert
        {"routes": "nobody", "weight_dtype": "bfloat16"},
    ]
    fields = {"hidden_size": 48, "num_experts": 6, "top_k": 3, "exchange": "hierarchical"}
    return [Case(**(fields | kind), tokens=tokens, seed=seed) for seed, kind in enumerate(kinds)]


def outcomes(group, cases):
    return [str(outcome) for case in cases if not (outcome := run_case(group, case)).passed]


@pytest.mark.parametrize("hosts", HOSTS)
def test_any_layer_has_the_bits_of_the_twin_on_any_hosts(hosts):
    assert on_ranks(4, outcomes, drawn_cases(4), hosts=hosts) == [[]] * 4


@pytest.mark.parametrize("late", [{0}, {1, 2}, {0, 1, 2, 3}])
def test_sums_that_follow_their_announcements_have_the_bits_of_the_twin(late, monkeypatch):
    all_marked = SharedMemoryTransport.all_marked

    def marked(self, round, seconds):
        here = self.group.name[-1] + str(self.group.rank)  # the number of the host, and the rank there
        is_late = ["00", "01", "10", "11"].index(here) in late
        return all_marked(self, round, 20.0) and not is_late

    monkeypatch.setattr(SharedMemoryTransport, "all_marked", marked)
    assert on_ranks(4, outcomes, drawn_cases(4), hosts=[2, 2]) == [[]] * 4


@pytest.mark.parametrize("counts", [(3, 3, 0), (3, 3)])
def test_a_rank_that_announces_other_sums_than_are_due_is_found(counts):
    transport = SimpleNamespace(group=SimpleNamespace(rank=1, size=2))
    heard = [SimpleNamespace(counts=(0, 0, 1)), SimpleNamespace(counts=counts)]
    with pytest.raises(
        GroupError, match=r"rank 1 announces sums .*; expected 2 for rank 1, or that they follow"
    ):
        HierarchicalTransport._announced(transport, [5, 2], heard)
    heard[1].counts = (9, 2, 0)
    assert HierarchicalTransport._announced(transport, [5, 2], heard) == [0, 2]


def test_processes_have_the_bits_of_the_twin_too():
    assert on_ranks(3, outcomes, drawn_cases(3), hosts=[1, 2], ranks="processes") == [[]] * 3


def by_hand(group):
    """One token whose experts are on all four ranks; each returns 1 + its rank times a little."""
    plan = ty.plan(
        [spec(num_experts=4, top_k=4, dtype=torch.float32, combine_wire="bf16")],
        group,
        exchange="hierarchical",
    )
    exchange_spec = plan.wiring("moe").exchange_spec
    routes = ty.Routes(topk_ids_TK=torch.tensor([[3, 0, 2, 1]]), topk_weights_TK=torch.ones(1, 4))
    arrival = plan.exchange.dispatch(exchange_spec, exchange_spec.wire.encode(torch.ones(1, 32)), routes)
    rows_RH = torch.full((4, 32), 1 + 2.0**-8 * (group.rank + 1))
    y_TH = arrival.combine(ExpertRows(rows_RH=rows_RH)).y_TH
    plan.close()
    return y_TH[0, 0].item()


def test_a_host_sums_in_float32_and_rounds_once_to_the_combine_wire():
    def bf16(value):
        return torch.tensor(value).bfloat16().item()

    first, second = bf16(2 + 3 * 2.0**-8), bf16(2 + 7 * 2.0**-8)
    assert on_ranks(4, by_hand, hosts=2) == [first + second] * 4
    assert on_ranks(4, by_hand, hosts=1) == [bf16(4 + 10 * 2.0**-8)] * 4


# -- What crosses ------------------------------------------------------------------------------------------


def crossed(group, exchange, layer, routes):
    """Bytes of rows that this rank has sent to ranks of another host, out and back."""
    with Meter(group) as planning:
        plan = ty.plan([layer], group, exchange=exchange)
    exchange_spec = plan.wiring("moe").exchange_spec
    x_TH = torch.ones(routes.num_tokens, layer.hidden_size).bfloat16()
    with Meter(group) as out:
        arrival = plan.exchange.dispatch(exchange_spec, exchange_spec.wire.encode(x_TH), routes)
    with Meter(group) as back:
        rows_RH = torch.zeros(arrival.received.num_rows, layer.hidden_size)
        arrival.combine(ExpertRows(rows_RH=rows_RH))
    stats, hosts = plan.stats()["moe"], group.hosts()
    (here,) = [ranks for ranks in hosts if group.rank in ranks]
    there = [rank for rank in range(group.size) if rank not in here]
    mailbox = plan.exchange.transport.mailbox

    def rows(nbytes, stride):
        """Bytes of rows in a message. Where there are any, an announcement takes as many bytes as some of them."""
        return 0 if nbytes == mailbox.head_bytes else nbytes - mailbox.head_rows(stride) * stride

    ways = exchange_spec.dispatch_layout.stride, exchange_spec.combine_layout.stride
    plan.close()
    return {
        "out": sum(rows(out.sent[rank], ways[0]) for rank in there),
        "back": sum(rows(back.sent[rank], ways[1]) for rank in there),
        "counted": sum(stats.dispatch_bytes[rank] for rank in there),
        "counted back": sum(stats.combine_bytes[rank] for rank in there),
        "links": links(exchange_spec),
        "shared": planning.shared,
    }


def uniform(group, exchange):
    layer = spec(num_experts=64, top_k=8, max_tokens=64)
    draw = torch.Generator().manual_seed(group.rank)
    ids_TK = torch.rand(64, 64, generator=draw).topk(8).indices
    return crossed(group, exchange, layer, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(64, 8)))


def test_a_row_crosses_once_to_each_host(monkeypatch):
    monkeypatch.setattr(hierarchical, "_LONGEST_WAIT", 20.0)  # however busy the machine is, no sums follow
    by_exchange = {name: on_ranks(8, uniform, name, hosts=2) for name in ("two_sided", "hierarchical")}
    for way in ("out", "counted back"):
        once, often = (sum(rank[way] for rank in by_exchange[name]) for name in ("hierarchical", "two_sided"))
        assert 2.5 < often / once < 2.9  # ranks of the other host that have one of 8 of 64 experts
    for rank in by_exchange["hierarchical"]:
        assert rank["out"] == rank["counted"]
        assert rank["back"] == rank["counted back"]


def everywhere(group):
    """Full batches, of tokens that have experts on every host."""
    layer = spec(num_experts=6, top_k=6, max_tokens=4, wire="mxfp8")
    ids_TK = torch.arange(6).expand(4, 6)
    return crossed(
        group, "hierarchical", layer, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(4, 6))
    )


@pytest.mark.parametrize("hosts", [[2, 2], [3, 1], [1, 2, 1]])
def test_full_batches_take_the_bytes_that_the_plan_says_of_each_link(hosts):
    found = on_ranks(4, everywhere, hosts=hosts)
    planned = found[0]["links"]
    assert len(planned) == len(hosts) * (len(hosts) - 1)
    assert sum(rank["out"] for rank in found) == sum(link["dispatch"] for link in planned)
    assert sum(rank["back"] for rank in found) == sum(link["combine"] for link in planned)
    assert {link["from"]: link["rows"] for link in planned} == {h: 4 * n for h, n in enumerate(hosts)}


def test_places_are_counted_through_again_where_a_host_has_fewer_ranks():
    hosts = HostMap((0, 0, 0, 0, 1, 1))
    assert [hosts.relay(source, 1) for source in range(6)] == [4, 5, 4, 5, 4, 5]
    assert [hosts.relay(source, 0) for source in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [hosts.sources(relay) for relay in (0, 2, 4)] == [(0, 4), (2,), (0, 2, 4)]
    assert (hosts.most_sources(0), hosts.most_sources(1)) == (2, 3)


# -- Choosing and refusing ---------------------------------------------------------------------------------


def chosen(group, **options):
    plan = ty.plan([spec()], group, **options)
    text = str(plan)
    plan.close()
    return text


def test_auto_takes_it_where_ranks_share_memory_inside_hosts():
    text = on_ranks(4, chosen, hosts=[3, 1])[2]
    assert "exchange hierarchical (auto: one_sided shares memory, and the ranks run on 2 hosts)" in text
    assert "from host 0 to host 1: at most 48 rows out (" in text
    assert "from host 1 to host 0: at most 16 rows out (" in text
    for options in ({"hosts": 1}, {"hosts": 3}):
        assert "hierarchical" not in on_ranks(3, chosen, **options)[0]


def test_links_of_many_hosts_are_counted_not_listed():
    text = on_ranks(8, chosen, hosts=4)[0]
    assert text.count("from host") == 6
    assert "and 6 more links between hosts" in text


def test_as_many_links_as_three_hosts_have_are_all_listed():
    text = on_ranks(3, partial(chosen, exchange="hierarchical"), hosts=3)[0]
    assert text.count("from host") == 6
    assert "more links" not in text


def refusals(group):
    return str(raised(ty.plan, [spec(reduce_ranks="caller")], group, exchange="hierarchical"))


def test_what_it_cannot_do_is_refused_by_the_plan():
    unreduced = on_ranks(2, refusals, hosts=2)[1]
    assert (
        "reduce_ranks=caller: hierarchical sums the results of a host's ranks before they come home"
        in unreduced
    )
    assert "exchange=two_sided" in unreduced


def test_as_many_ranks_of_each_host_are_reached_as_share_a_gpus_memory(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), size=128)
    assert HierarchicalTransport.reaches(on_gpu, ["a"] * 63 + ["b"] * 63) is None
    assert "the kernels that move rows between GPUs leave no checksums" in str(
        HierarchicalTransport.watches(on_gpu)
    )
    reason = HierarchicalTransport.reaches(on_gpu, ["a"] * 64 + ["b"])
    assert str(reason) == "exchange=hierarchical: one_sided on GPUs serves up to 63 ranks, not 64"


def test_without_known_hosts_memory_is_that_of_one():
    (wiring,) = ty.draft([spec()], 4, exchange="hierarchical").wirings
    assert isinstance(wiring.exchange_spec, ExchangeSpec)
    assert links(wiring.exchange_spec) == []
    alone = ty.draft([spec()], 4, exchange="one_sided")
    assert ty.draft([spec()], 4, exchange="hierarchical").workspace_bytes == alone.workspace_bytes


# -- Errors and losses -------------------------------------------------------------------------------------


def grows_too_large(group):
    """A layer for which one rank of the second host has no memory."""
    plan = ty.plan([spec()], group, exchange="hierarchical")
    moe = build(plan, "moe")
    inside = plan.exchange.transport.inside.group
    if group.rank == 3:
        own = type(inside).share_memory

        def no_memory(nbytes):
            inside.all_or_none("sharing memory", "no memory is left")
            return own(inside, nbytes)

        inside.share_memory = no_memory
    elif group.rank == 2:
        inside.share_memory = lambda nbytes: inside.all_or_none("sharing memory", None)
    error = raised(plan.extend, [spec("large", max_tokens=4096)])
    y_TH = moe(*batch(spec(), 3, seed=group.rank))
    return type(error).__name__, str(error), bool(y_TH.any())


def test_memory_that_one_host_lacks_is_an_error_on_all_and_the_old_layers_go_on():
    found = on_ranks(4, grows_too_large, hosts=2)
    assert [kind for kind, _, _ in found] == ["PeerFailed", "PeerFailed", "PeerFailed", "GroupError"]
    assert all("no memory is left" in message for _, message, _ in found)
    assert all("rank 3 failed in sharing memory" in message for _, message, _ in found[:3])
    assert all(worked for _, _, worked in found)


def cannot_be_trimmed(group):
    """The second host has no memory for a smaller workspace, when the first has its own already."""
    plan = ty.plan([spec(), spec("large", max_tokens=64)], group, exchange="hierarchical")
    large = build(plan, "large")
    inside = plan.exchange.transport.inside.group
    given = batch(spec("large", max_tokens=64), 40, seed=group.rank)
    before_TH = large(*given)
    if group.rank > 1:
        inside.share_memory = lambda nbytes: inside.all_or_none("sharing memory", "no memory is left")
    error = raised(plan.trim, ["moe"])
    return "no memory is left" in str(error), torch.equal(large(*given), before_TH)


def test_layers_that_were_to_go_are_served_where_a_host_could_not_be_trimmed():
    assert on_ranks(4, cannot_be_trimmed, hosts=2) == [(True, True)] * 4


def refuses(group):
    """Rank 1 says in the combine that it failed."""
    plan = ty.plan([spec(experts="reference")], group, exchange="hierarchical")
    layer, wiring = build(plan, "moe"), plan.wiring("moe")
    x_TH, routes = batch(spec(), 3, seed=group.rank)
    arrival = plan.exchange.dispatch(wiring.exchange_spec, wiring.wire.encode(x_TH), routes)
    if group.rank == 1:
        return str(raised(arrival.refuse, InputError("odd", expected="even", fix="wait")))
    return str(raised(arrival.combine, layer.experts(arrival.received)))


def test_nobody_waits_for_the_results_of_a_rank_that_failed(monkeypatch):
    seen, waits = [], SharedMemoryTransport.all_marked

    def noted(self, round, seconds):
        seen.append(waits(self, round, seconds))
        return seen[-1]

    monkeypatch.setattr(SharedMemoryTransport, "all_marked", noted)
    monkeypatch.setattr(hierarchical, "_LONGEST_WAIT", 10.0)
    assert all("odd" in error for error in on_ranks(2, refuses))
    assert seen == [True]


def test_rows_are_counted_for_each_rank_and_for_its_relay_on_each_other_host():
    transport = HierarchicalTransport(thread_groups(3)[0])
    transport.hosts = HostMap((0, 0, 1))
    assert transport.num_counts(None) == 5
    counts = [4, 5, 6, 7, 8]  # for three ranks, and across to two hosts
    assert transport.loads(2, counts) == [4, 5, 6, 7, 0, 0]
    assert transport.loads(1, counts) == [4, 5, 6, 0, 0, 8]


class _Ended(BaseException):
    """Ends a rank, as a crash would."""


def dies(group, level, rank):
    """A rank ends in the middle of a call: between the two levels of a dispatch, or before its results are told."""
    plan = ty.plan([spec(num_experts=8, top_k=4)], group, exchange="hierarchical")
    moe = build(plan, "moe")
    moe(*batch(moe.wiring.spec, 3))
    transport = plan.exchange.transport

    def end(*_):
        raise _Ended

    if group.rank == rank:
        if level == "inside":
            transport.inside.send = end
        else:
            transport.send_back = end
    try:
        error = raised(moe, *batch(moe.wiring.spec, 3))
    except _Ended:
        group.leave("it has crashed")
        return None
    plan.go_on_without(error.peers)
    y_TH = moe(*batch(moe.wiring.spec, 3))
    return (
        list(error.peers),
        str(error),
        plan.group.size,
        bool(y_TH.any()),
        len(plan.wiring("moe").exchange_spec.hosts),
    )


@pytest.mark.parametrize("level", ["inside", "between"])
@pytest.mark.parametrize("hosts", [[2, 2], [3, 1]])
def test_all_ranks_of_all_hosts_name_a_rank_that_is_lost_on_either_level_and_go_on(level, hosts):
    found = on_ranks(4, dies, level, 1, hosts=hosts, deadline=30.0)
    assert found[1] is None
    for rank in (0, 2, 3):
        peers, message, left, worked, known = found[rank]
        assert peers == [1], message
        assert "it has crashed" in message or "it has returned" in message
        assert (left, worked, known) == (3, True, 3)


def loses_a_host(group):
    plan = ty.plan([spec()], group, exchange="hierarchical")
    moe = build(plan, "moe")
    moe(*batch(spec(), 3))
    if group.rank >= 2:
        return None
    error = raised(moe, *batch(spec(), 3))
    plan.go_on_without([2, 3])
    return list(error.peers), bool(moe(*batch(spec(), 3)).any()), plan.wiring("moe").exchange_spec.hosts


def test_a_plan_goes_on_when_a_whole_host_is_gone():
    found = on_ranks(4, loses_a_host, hosts=2)
    for peers, worked, hosts in found[:2]:
        assert set(peers) <= {2, 3}
        assert peers
        assert (worked, hosts) == (True, (0, 0))


def two_levels(departed):
    """A transport of rank 2, on the second of two hosts with two ranks; what it asks of both levels is noted."""
    asked = []

    def lost_elsewhere(ranks, *, phase, waited):
        asked.append((ranks, phase, waited))
        return ty.PeerLost([9], phase=phase, waited=waited)

    group = SimpleNamespace(
        rank=2, size=4, device=torch.device("cpu"), deadline=7.0, lost_elsewhere=lost_elsewhere
    )
    transport = HierarchicalTransport(group)
    transport.hosts, transport.host = HostMap((0, 0, 1, 1)), 1
    transport._inside = SimpleNamespace(
        group=SimpleNamespace(deadline=1.0), departed=lambda: departed, leave=lambda: asked.append("left")
    )
    return transport, asked


@pytest.mark.parametrize(("departed", "missed"), [(False, [3]), (True, [])])
def test_a_rank_that_is_missed_inside_a_host_is_looked_for_in_the_whole_group(departed, missed):
    """By its number there; one that has only left, because it heard of a loss, is not accused."""
    transport, asked = two_levels(departed)
    with pytest.raises(ty.PeerLost) as caught, transport._waiting_in_host():
        raise ty.PeerLost([1], phase="dispatch", waited=0.5)
    assert caught.value.peers == (9,)
    assert transport.inside.group.deadline == 7.0
    assert asked == [(missed, "dispatch", 0.5)]


def test_a_rank_that_hears_of_a_loss_in_the_group_leaves_the_memory_of_its_host():
    transport, asked = two_levels(departed=False)
    with transport._waiting_in_group():
        pass
    with pytest.raises(Drifted), transport._waiting_in_group():
        raise Drifted("elsewhere", expected="here", fix="none")
    assert asked == []
    with pytest.raises(ty.PeerLost, match="combine"), transport._waiting_in_group():
        raise ty.PeerLost([0], phase="combine", waited=0.5)
    assert asked == ["left"]


@pytest.mark.parametrize(
    ("came", "order", "counts"),
    [
        ((3, 3), [0, 1, 3, 2, 4, 5], (2, 1, 1, 2)),
        ((2, 3), [2, 3, 4], (0, 1, 0, 2)),  # the first relay has lost a row of rank 0 or 2
        ((3, 4), [0, 1, 2], (2, 0, 1, 0)),
    ],
)
def test_rows_of_relays_are_put_in_the_order_of_sources_and_none_are_where_some_are_missing(
    came, order, counts
):
    """On the first of two hosts with two ranks: rank 0 relays its own rows and those of rank 2, rank 1 of rank 3."""
    transport, _ = two_levels(departed=False)
    transport.host = 0
    number_R = torch.arange(sum(came))
    received = ReceivedRows(
        rows="all rows",
        routes=LocalRoutes(ids_RK=number_R.unsqueeze(1), weights_RK=-number_R.unsqueeze(1)),
        counts_W=came,
        extra={"tag": 10 + number_R},
        slots_R=100 + number_R,
        results=CombineBuffer(rows_SH="all results", slots_R=100 + number_R),
    )
    found = transport._received(SimpleNamespace(received=received, counts_W=came), [2, 1, 1, 2])
    assert found.counts_W == counts
    assert found.routes.ids_RK.squeeze(1).tolist() == order
    assert found.routes.weights_RK.squeeze(1).tolist() == [-row for row in order]
    assert found.extra["tag"].tolist() == [10 + row for row in order]
    assert found.slots_R.tolist() == found.results.slots_R.tolist() == [100 + row for row in order]
    assert (found.rows, found.results.rows_SH) == ("all rows", "all results")


def test_what_trimmed_layers_took_inside_a_host_is_given_back():
    plan = ty.plan([spec()], thread_groups(1)[0], exchange="hierarchical")
    transport = plan.exchange.transport
    small = transport.inside.workspace.nbytes
    plan.extend([spec("large", max_tokens=512)])
    large = transport.inside.workspace.nbytes
    plan.trim()
    assert transport.inside.workspace.nbytes == large > small
    plan.trim(keep=["moe"])
    assert transport.inside.workspace.nbytes == small


def test_what_is_shared_inside_a_host_is_closed_with_the_plan():
    plan = ty.plan([spec()], thread_groups(1)[0], exchange="hierarchical")
    inside = plan.exchange.transport.inside
    plan.close()
    assert "is closed" in str(raised(inside.group.barrier))
    assert "the exchange has no workspace" in str(raised(lambda: inside.workspace))
    HierarchicalTransport(thread_groups(1)[0]).close()  # one that has served no layer


def counted(group):
    plan = ty.plan([spec(num_experts=4, top_k=4)], group, exchange="hierarchical")
    routes = ty.Routes(topk_ids_TK=torch.tensor([[0, 1, 2, 3]]), topk_weights_TK=torch.ones(1, 4))
    build(plan, "moe")(torch.ones(1, 32).bfloat16(), routes)
    stats = plan.stats()["moe"]
    return [bool(n) for n in stats.dispatch_bytes], [bool(n) for n in stats.combine_bytes]


def test_bytes_are_counted_for_relays_and_the_own_host_alone():
    """Ranks 0 and 2 relay for each other, and so do ranks 1 and 3."""
    for rank, (out, back) in enumerate(on_ranks(4, counted, hosts=2)):
        elsewhere = [rank < 2, rank < 2, rank >= 2, rank >= 2]
        elsewhere[(rank + 2) % 4] = True
        assert out == back == elsewhere


def damaged(group, exchange, wrong):
    """An id is damaged on its way to rank 0: its row is missed there, and both ranks hear of it."""
    plan = ty.plan([spec(num_experts=4, top_k=1)], group, exchange=exchange)
    built = build(plan, "moe")
    layout = plan.wiring("moe").exchange_spec.dispatch_layout
    transport = plan.exchange.transport

    def damage_gathered(*given, phase, move=group.all_gather_rows):
        arrived = move(*given, phase=phase)
        layout.unpack(arrived)["ids"][-1] = wrong
        return arrived

    def damage_crossed(batch, packets_by_rank, heard):
        layout.unpack(packets_by_rank[1])["ids"][-1] = wrong
        return type(transport)._forwarded(transport, batch, packets_by_rank, heard)

    if group.rank == 0:
        group.all_gather_rows, transport._forwarded = damage_gathered, damage_crossed
    routes = ty.Routes(topk_ids_TK=torch.tensor([[0], [1]]), topk_weights_TK=torch.ones(2, 1))
    return str(raised(built, torch.ones(2, 32).bfloat16(), routes))


@pytest.mark.parametrize("exchange", ["hierarchical", "allgather"])
@pytest.mark.parametrize("wrong", [4, 9, -7])
def test_an_id_that_no_expert_has_is_missed_and_not_looked_up(exchange, wrong):
    own, other = on_ranks(2, damaged, exchange, wrong, hosts=2)
    # Of a relay whose rows are not all there, none is taken.
    missed = "0 rows from rank 0" if exchange == "hierarchical" else "1 rows from rank 1"
    assert f"{missed} have an expert here, and it announced 2" in own
    assert "rank 0 failed in combine: Corrupted" in other


def sent_elsewhere(group):
    """On their way from rank 0 to the other host, an id becomes that of another expert there."""
    plan = ty.plan([spec(num_experts=3, top_k=1)], group, exchange="hierarchical", max_rows=8)
    built, transport = build(plan, "moe"), plan.exchange.transport
    layout = plan.wiring("moe").exchange_spec.dispatch_layout
    forwarded = []

    def forward(batch, packets_by_rank, heard):
        layout.unpack(packets_by_rank[0])["ids"].fill_(2)  # two rows for rank 2, and one was announced
        sent, counts = type(transport)._forwarded(transport, batch, packets_by_rank, heard)
        forwarded.extend(sent.routes.resolved[0][:2].flatten().tolist())
        return sent, counts

    if group.rank == 1:  # the relay
        transport._forwarded = forward
    routes = ty.Routes(topk_ids_TK=torch.tensor([[1], [2]]), topk_weights_TK=torch.ones(2, 1))
    return str(raised(built, torch.ones(2, 32).bfloat16(), routes)), forwarded


def test_rows_that_would_go_elsewhere_than_announced_are_not_forwarded_where_room_is_bounded():
    (first, _), (relay, forwarded), (third, _) = on_ranks(3, sent_elsewhere, hosts=[1, 2])
    assert forwarded == [-1, -1]
    for error in (relay, third):
        assert "0 rows from rank 0 have an expert here, and it announced 1" in error
    assert "failed in combine: Corrupted" in first


# -- Ranks in different places -----------------------------------------------------------------------------------


def drifts_from_a_combine(group):
    """Rank 1 dispatches a larger layer, while the others combine what came."""
    layers = [spec("small"), spec("large", hidden_size=256, max_tokens=64)]
    plan = ty.plan(layers, group, exchange="hierarchical", in_flight=2)
    small, large = (plan.wiring(layer.name).exchange_spec for layer in layers)
    x_TH, routes = batch(layers[0], 6, seed=group.rank)
    arrival = plan.exchange.dispatch(small, small.wire.encode(x_TH), routes)
    if group.rank == 1:
        x_TH, routes = batch(layers[1], 64)
        return raised(plan.exchange.dispatch, large, large.wire.encode(x_TH), routes)
    rows_RH = torch.ones(arrival.received.num_rows, layers[0].hidden_size)
    return raised(arrival.combine, ExpertRows(rows_RH=rows_RH))


def drifts_into_another_plan(group):
    """Rank 1 calls a plan whose announcements are shorter, and whose rows are more, than those of the others' plan."""
    layers = [spec("bounded"), spec("large", hidden_size=512, max_tokens=128)]
    plans = [
        ty.plan(layers[:1], group, exchange="hierarchical", max_rows=8),
        ty.plan(layers[1:], group, exchange="hierarchical"),
    ]
    heads = [plan.exchange.transport.mailbox.head_bytes for plan in plans]
    assert heads[0] > heads[1]
    built = [build(plan, layer.name) for plan, layer in zip(plans, layers, strict=True)]
    mine = int(group.rank == 1)
    return raised(built[mine], *batch(layers[mine], (4, 128)[mine], seed=group.rank))


def both_drifts(group):
    return [str(drifts_from_a_combine(group)), str(drifts_into_another_plan(group))]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_rank_that_drifts_from_a_combine_or_into_another_plan_is_named_on_all_hosts(ranks):
    for rank, (combining, elsewhere) in enumerate(on_ranks(4, both_drifts, hosts=[2, 2], ranks=ranks)):
        assert (
            "rank 0: combine of layer 'small', round 1, rank 1: dispatch of layer 'large', round 2"
            in combining
        )
        stray = "rank 1: dispatch of layer 0 of another plan, round 1, rank 2: dispatch of layer 'bounded', round 1"
        assert (stray in elsewhere) == (rank != 1), elsewhere
        assert "rank 0: dispatch of layer 0 of another plan" in elsewhere or rank != 1


def warmed(group):
    """What the inside of this rank's host makes ready when a plan is made."""
    seen = []
    warmup = SharedMemoryTransport.warmup

    def recorded(transport, specs):
        seen.append([(spec.layer, spec.placement.world) for spec in specs])
        return warmup(transport, specs)

    SharedMemoryTransport.warmup = recorded
    try:
        plan = ty.plan([spec("first"), spec("second")], group, exchange="hierarchical")
        inside = plan.exchange.transport.inside.group.size
    finally:
        SharedMemoryTransport.warmup = warmup
    return seen, inside


def test_the_inside_of_each_host_is_made_ready_for_all_layers():
    """On GPUs kernels are loaded there, before one of them waits."""
    ((seen, inside),) = on_ranks(1, warmed)
    assert seen == [[("first", inside), ("second", inside)]]


def test_experts_have_ids_of_their_own_inside_a_host():
    """They count on from rank to rank; what goes nowhere stays nowhere, whatever stands beside it."""
    placement = Placement(num_experts=5, table=((1,), (0, 3), (2, 4)))
    plan = ty.plan([spec()], thread_groups(1)[0])
    layer = replace(plan.wiring("moe").exchange_spec, placement=placement)
    forwarding = Forwarding.of(layer, HostMap((1, 0, 0)), 0, torch.device("cpu"))
    assert forwarding.inside_rank.tolist() == [-1, 0, 1, -1]
    assert forwarding.spec.placement.table == ((0, 1), (2, 3))
    assert forwarding.spec.num_experts == 4
    assert forwarding.first_id.tolist() == [0, 2]
    assert forwarding.choice_counts.tolist() == [0] * 5  # four experts, and nobody
    rank_TK, local_TK = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[1, 0], [1, 1]], dtype=torch.int32)
    assert forwarding._ids(rank_TK, local_TK).tolist() == [[1, 2], [3, -1]]
