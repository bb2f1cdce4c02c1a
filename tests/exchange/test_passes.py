"""Batches that bring more rows than ranks have room for (`max_rows`): several passes, the same bits, no row lost."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenyard as ty
from tests.models import UNREDUCED, WATCHED, batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import InputError, PeerFailed, PlanError
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.passes import RowBound, TooManyRows, more_parts, parts_for
from tokenyard.experts import ReferenceExperts
from tokenyard.formats import Payload
from tokenyard.group import thread_groups
from tokenyard.layer import overlapped
from tokenyard.rows import ExpertRows

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


class CountingExperts(ReferenceExperts):
    """The reference, which remembers how many rows came at a time."""

    name = "counting"
    batch_invariant = ("cpu",)

    def compute(self, received, *, finalize):
        self.came = [*getattr(self, "came", ()), received.num_rows]
        return super().compute(received, finalize=finalize)


def skewed(layer, tokens, seed, hot):
    """A batch, of which a share goes to expert 0 and 1 only, and a tenth of the choices to nobody."""
    x_TH, routes = batch(layer, tokens, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    ids_TK = routes.topk_ids_TK
    hot_T1 = torch.rand(tokens, 1, generator=draw) < hot
    ids_TK = torch.where(hot_T1, torch.arange(layer.top_k) % 2, ids_TK)
    ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=draw) < 0.1, -1)
    return x_TH, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=routes.topk_weights_TK)


def with_and_without(group, layer, max_rows, tokens, hot, options):
    """Whether a bounded plan gives the bits of another one, its passes, and the most rows that came at a time."""
    x_TH, routes = skewed(layer, tokens[group.rank], 10 * group.rank, hot)
    payloads = {p.name: torch.full((len(x_TH), p.width), group.rank).to(p.dtype) for p in layer.payloads}
    found = []
    for bound in (None, max_rows):
        plan = ty.plan([layer], group, max_rows=bound, **options)
        built = build(plan, "moe")
        if layer.reduce_ranks == "caller":
            rows = built.unreduced(x_TH, routes, payloads=payloads)
            found.append([*rows.rows_by_rank, *rows.tokens_by_rank])
        else:
            found.append([built(x_TH, routes, payloads=payloads, add=x_TH)])
            found[-1].append(built(x_TH, routes, payloads=payloads, out=torch.full_like(x_TH, torch.nan)))
        stats = plan.stats()["moe"]
        plan.close()
    assert len(built.experts.came) == stats.passes
    calls = 1 if layer.reduce_ranks == "caller" else 2
    assert (stats.rounds, stats.tokens) == (calls, calls * len(x_TH))
    same = all(map(same_bits, *found)) if len(found[0]) == len(found[1]) else False
    return same, stats.passes, max(built.experts.came)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_passes_have_the_bits_of_one(data):
    world = data.draw(st.sampled_from([1, 2, 3, 5]))
    exchange = data.draw(st.sampled_from([*EXCHANGES, *(["local"] if world == 1 else [])]))
    sums = ["ranks", "choices"] if exchange != "hierarchical" else ["ranks"]
    layer = spec(
        experts=CountingExperts,
        num_experts=data.draw(st.sampled_from([3, 6])),
        top_k=data.draw(st.sampled_from([1, 3])),
        wire=data.draw(st.sampled_from([None, "nvfp4", "mxfp8"])),
        combine_wire=data.draw(st.sampled_from([None, "mxfp8"])),
        sum=data.draw(st.sampled_from(sums)),
        payloads=data.draw(st.sampled_from([(), (Payload(name="tag", dtype=torch.int16, width=3),)])),
    )
    if layer.sum == "ranks" and exchange in UNREDUCED:
        layer = ty.LayerSpec(
            **{**vars(layer), "reduce_ranks": data.draw(st.sampled_from(["exchange", "caller"]))}
        )
    tokens = data.draw(st.lists(st.integers(0, 16), min_size=world, max_size=world))
    options = {"exchange": exchange}
    if exchange in WATCHED and data.draw(st.booleans()):
        options["paranoid"] = True
    hosts = {"hosts": data.draw(st.integers(1, world))} if exchange == "hierarchical" else {}
    max_rows = data.draw(st.integers(world, 16 * world))
    hot = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    found = on_ranks(world, with_and_without, layer, max_rows, tokens, hot, options, **hosts)
    assert [same for same, _, _ in found] == [True] * world
    assert len({passes for _, passes, _ in found}) == 1  # all ranks alike
    assert max(came for _, _, came in found) <= max_rows


def all_to_one(group, exchange):
    layer = spec(experts=CountingExperts, top_k=1)
    return with_and_without(group, layer, 8, [16] * group.size, 1.0, {"exchange": exchange})


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided"])
def test_all_tokens_to_one_rank_between_processes(exchange):
    found = on_ranks(2, all_to_one, exchange, ranks="processes")
    assert [same for same, _, _ in found] == [True, True]
    passes = found[0][1]
    assert passes >= 2 * 3  # two calls of about 29 rows, 8 at a time
    assert [came <= 8 for _, _, came in found] == [True, True]


# -- One pass is enough --------------------------------------------------------------------------------------


def passes_of(group, exchange, max_rows, tokens):
    layer = spec(num_experts=4, top_k=1)
    plan = ty.plan([layer], group, exchange=exchange, max_rows=max_rows)
    x_TH = torch.ones(tokens[group.rank], 32).bfloat16()
    ids_TK = torch.full((len(x_TH), 1), 3 * (1 - group.rank))  # rank 0 sends to 1, and 1 to 0
    routes = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(len(x_TH), 1))
    build(plan, "moe")(x_TH, routes)
    return plan.stats()["moe"].passes


@pytest.mark.parametrize("exchange", ["one_sided", "two_sided", "hierarchical"])
def test_what_has_room_goes_in_one_pass(exchange):
    hosts = 2 if exchange == "hierarchical" else 1
    assert on_ranks(2, passes_of, exchange, 9, [9, 9], hosts=hosts) == [1, 1]
    assert on_ranks(2, passes_of, exchange, 9, [10, 0], hosts=hosts) == [2, 2]
    assert on_ranks(2, passes_of, exchange, 2, [0, 0]) == [1, 1]
    assert on_ranks(2, passes_of, exchange, 2, [7, 1]) == [4, 4]


def test_every_rank_must_see_every_token_of_allgather():
    assert on_ranks(2, passes_of, "allgather", 18, [9, 9]) == [1, 1]
    assert on_ranks(2, passes_of, "allgather", 17, [9, 9]) == [2, 2]


def meetings(group, exchange, max_rows):
    """Collectives of the group in a call that one pass is enough for."""
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange, max_rows=max_rows)
    built, called = build(plan, "moe"), []
    for name in ("start_all_gather", "start_all_gather_rows", "start_all_to_all_rows"):
        original = getattr(group, name)

        def counting(*arguments, original=original, name=name, **options):
            called.append(name)
            return original(*arguments, **options)

        setattr(group, name, counting)
    built(*batch(layer, 4, seed=group.rank))
    return called


@every_exchange
def test_a_bound_that_is_kept_costs_no_collective_but_that_of_rows_that_follow_a_message(exchange):
    """Without a bound, rows leave in the message that announces them."""
    with_bound = on_ranks(2, meetings, exchange, 16)
    follow = ["start_all_to_all_rows"] if exchange in ("two_sided", "hierarchical") else []
    assert with_bound == [follow + called for called in on_ranks(2, meetings, exchange, None)]


# -- Several in flight ---------------------------------------------------------------------------------------


def two_at_a_time(group, exchange, paranoid):
    layer = spec(experts=CountingExperts)
    plans = [
        ty.plan([layer], group, exchange=exchange, in_flight=3, paranoid=paranoid, max_rows=bound)
        for bound in (None, 5)
    ]
    plain, bounded = (build(plan, "moe", shared=lambda x_TH: x_TH * 2) for plan in plans)
    cases = [batch(layer, tokens, seed=group.rank + tokens) for tokens in (3, 15, 16 - group.rank)]
    alone = [plain(*case) for case in cases]
    pending = [bounded.start(*case) for case in cases]
    pending[0].compute()
    first = [one.finish() for one in pending]
    again = bounded.start(*cases[1]), bounded.start(*cases[2])
    second = [again[0].finish(), again[1].finish()]
    came, x_TH = max(bounded.experts.came), cases[1][0]
    parts = overlapped(bounded, *cases[1]), overlapped(plain, *cases[1])
    return (
        all(map(same_bits, [*first, *second], [*alone, *alone[1:]])),
        came <= 5,
        same_bits(*parts),
        len(x_TH),
    )


@pytest.mark.parametrize(
    ("exchange", "paranoid"), [*((name, False) for name in EXCHANGES), *((name, True) for name in WATCHED)]
)
def test_batches_in_flight_take_turns_pass_by_pass(exchange, paranoid):
    assert on_ranks(2, two_at_a_time, exchange, paranoid) == [(True, True, True, 15)] * 2


# -- Errors and losses ---------------------------------------------------------------------------------------


class FailingLater(ReferenceExperts):
    """Experts that raise in the second pass, on the rank that has expert 0."""

    name = "failing_later"
    fails = False

    def compute(self, received, *, finalize):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2 and self.fails:
            raise ValueError("no second pass")
        return super().compute(received, finalize=finalize)


def fail_in_a_later_pass(group, exchange):
    layer = spec(experts=FailingLater)
    plan = ty.plan([layer], group, exchange=exchange, max_rows=6)
    built = build(plan, "moe")
    built.experts.fails = group.rank == 0
    case = batch(layer, 16, seed=group.rank)
    try:
        built(*case)
        error = None
    except (ValueError, PeerFailed) as raised_here:
        error = str(raised_here)
    whole = build(ty.plan([layer], group, exchange=exchange), "moe")
    return error, same_bits(built(*case), whole(*case))


@every_exchange
def test_an_error_in_a_later_pass_reaches_all_and_the_plan_goes_on(exchange):
    (own, first), (other, second) = on_ranks(2, fail_in_a_later_pass, exchange)
    assert own == "no second pass"
    assert "rank 0" in other
    assert "no second pass" in other
    assert first
    assert second


def cannot_send_a_later_pass(group, exchange):
    """The transport of rank 0 fails in its second send."""
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange, max_rows=6)
    built, given, transport, sends = build(plan, "moe"), batch(layer, 16, seed=group.rank), None, []
    before_TH, transport = built(*given), plan.exchange.transport
    send = transport.send

    def fails_later(sent):
        sends.append(sent.num_tokens)
        if len(sends) == 2 and group.rank == 0:
            raise ValueError("no second send")
        return send(sent)

    transport.send = fails_later
    try:
        built(*given)
        error = None
    except (ValueError, PeerFailed) as raised_here:
        error = str(raised_here)
    transport.send = send
    return error, same_bits(built(*given), before_TH)


@every_exchange
def test_a_later_pass_that_cannot_be_sent_is_an_error_on_all_and_the_plan_goes_on(exchange):
    (own, first), (other, second) = on_ranks(2, cannot_send_a_later_pass, exchange)
    assert own == "no second send"
    assert "rank 0" in other
    assert "no second send" in other
    assert first
    assert second


class Dying(ReferenceExperts):
    """Experts whose rank says no more in the second pass."""

    name = "dying"
    dies = False

    def compute(self, received, *, finalize):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2 and self.dies:
            time.sleep(1.5)
        return super().compute(received, finalize=finalize)


def lose_in_a_later_pass(group, exchange):
    layer = spec(experts=Dying)
    plan = ty.plan([layer], group, exchange=exchange, max_rows=6)
    built = build(plan, "moe")
    built.experts.dies = group.rank == 2
    case = batch(layer, 16, seed=group.rank)
    group.deadline = 0.4
    error = raised(built, *case)
    if group.rank == 2:
        return type(error)
    plan.go_on_without(error.peers)
    group.deadline = plan.group.deadline = 20.0
    survivors = plan.local_experts("moe")
    rebuilt = ty.MoELayer(plan, "moe", built.experts.weights)
    y_TH = rebuilt(*case)
    return error.peers, plan.draft.max_rows, bool(survivors), tuple(y_TH.shape)


@every_exchange
def test_a_loss_in_a_later_pass_names_the_rank_and_the_rest_goes_on(exchange):
    first, second, lost = on_ranks(3, lose_in_a_later_pass, exchange)
    assert first == second == ((2,), 6, True, (16, 32))
    assert issubclass(lost, ty.PeerLost)


def call_next_too_often(group):
    layer = spec(top_k=1)
    plan = ty.plan([layer], group, exchange="two_sided", max_rows=4)
    built, exchange = build(plan, "moe"), plan.exchange
    x_TH, routes = batch(layer, 4, seed=group.rank)
    wire = plan.wiring("moe").exchange_spec
    arrival = exchange.dispatch(wire, exchange.encode(wire, x_TH), routes)
    passes, y_TH = 1, arrival.combine(built.experts(arrival.received)).y_TH
    while arrival.has_more:
        arrival.dispatch_next()
        arrival.combine(built.experts(arrival.received), out=y_TH)
        passes += 1
    return passes, same_bits(y_TH, built(x_TH, routes)), str(raised(arrival.dispatch_next))


def test_passes_can_be_made_by_hand_and_end():
    found = on_ranks(2, call_next_too_often)
    assert len({passes for passes, _, _ in found}) == 1
    assert found[0][0] > 1
    for _, same, error in found:
        assert same
        assert "all rows of this batch were dispatched" in error
        assert "dispatch the next batch" in error


@pytest.mark.parametrize(("max_rows", "tokens"), [(None, [slice(0, 3)]), (2, [slice(0, 2), slice(2, 3)])])
def test_an_arrival_says_which_tokens_went_out(max_rows, tokens):
    layer = spec(top_k=1)
    plan = ty.plan([layer], thread_groups(1)[0], exchange="two_sided", max_rows=max_rows)
    exchange, wire = plan.exchange, plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 3)
    trip = exchange.dispatch(wire, exchange.encode(wire, x_TH), routes)
    arrivals = [trip.arrival]
    while trip.has_more:
        trip.combine(ExpertRows(rows_RH=torch.zeros(trip.received.num_rows, 32)))
        trip.dispatch_next()
        arrivals.append(trip.arrival)
    assert [arrival.tokens for arrival in arrivals] == tokens
    assert {arrival.batch_tokens for arrival in arrivals} == {3}
    first = arrivals[0].round
    assert [arrival.round for arrival in arrivals] == [first + turn for turn in range(len(tokens))]
    assert exchange.announcer.round == arrivals[-1].round


@pytest.mark.parametrize("exchange", ["local", *EXCHANGES])
def test_the_next_pass_waits_for_the_combine_of_the_one_before(exchange):
    layer = spec(top_k=1)
    plan = ty.plan([layer], thread_groups(1)[0], exchange=exchange, max_rows=2)
    x_TH, routes = batch(layer, 3)
    wire = plan.wiring("moe").exchange_spec
    arrival = plan.exchange.dispatch(wire, plan.exchange.encode(wire, x_TH), routes)
    assert arrival.has_more
    early = raised(arrival.dispatch_next)
    assert "layer 'moe', rank 0: 1 dispatch in flight already (of 'moe')" in str(early)
    arrival.combine(ExpertRows(rows_RH=torch.zeros(arrival.received.num_rows, 32)))
    arrival.dispatch_next()
    assert not arrival.has_more


# -- Memory --------------------------------------------------------------------------------------------------


def shared_bytes(group, exchange, max_rows):
    plan = ty.plan([spec(max_tokens=512)], group, exchange=exchange, max_rows=max_rows, in_flight=2)
    transport = plan.exchange.transport
    workspace = getattr(transport, "inside", transport).workspace
    return workspace.layout.dispatch + workspace.layout.combine, plan.draft.workspace_bytes


@pytest.mark.parametrize("exchange", ["one_sided", "hierarchical"])
def test_the_workspace_follows_the_rows(exchange):
    whole = on_ranks(4, shared_bytes, exchange, None)
    bounded = on_ranks(4, shared_bytes, exchange, 128)
    assert {nbytes for nbytes, _ in whole} == {16 * nbytes for nbytes, _ in bounded}
    assert {drafted for _, drafted in bounded} == {2 * nbytes for nbytes, _ in bounded}
    assert on_ranks(4, shared_bytes, exchange, 4 * 512) == whole


def test_the_sizes_of_the_issue():
    layer = ty.LayerSpec(
        name="moe",
        hidden_size=7168,
        intermediate_size=2048,
        num_experts=2048,
        top_k=8,
        wire="mxfp8",
        max_tokens=512,
    )
    whole, bounded = (ty.draft([layer], 1024, exchange="one_sided", max_rows=rows) for rows in (None, 8192))
    assert whole.workspace_bytes == 64 * bounded.workspace_bytes
    assert "8192 rows a pass (max_rows)" in str(bounded)
    assert "max_rows" not in str(whole)


@pytest.mark.parametrize("wrong", [0, 3, True, 4.0, "many"])
def test_a_bound_has_room_for_a_row_of_each_rank(wrong):
    with pytest.raises(InputError, match="at least 4, one row of each rank"):
        ty.draft([spec()], 4, max_rows=wrong)
    assert ty.draft([spec()], 4, max_rows=4).max_rows == 4


def test_memory_that_is_not_there_names_the_setting():
    with pytest.raises(PlanError, match="max_rows=…"):
        ty.draft([spec(hidden_size=2**20, max_tokens=2**30)], 4)


def test_transports_without_a_bound_say_so():
    class Unbounded(EXCHANGES["two_sided"]):
        name = "unbounded"
        bounds_rows = False

    with pytest.raises(PlanError, match="before it has heard how many come: leave max_rows out") as refused:
        ty.draft([spec()], 4, exchange=Unbounded, max_rows=8)
    assert refused.value.alternatives
    assert ty.draft([spec()], 4, exchange=Unbounded, max_rows=64)  # as many as may come: no bound


def test_ranks_with_different_bounds_disagree():
    def plan(group):
        return str(raised(ty.plan, [spec()], group, max_rows=8 + group.rank))

    for error in on_ranks(2, plan):
        assert "max_rows" in error


def test_counts_of_a_pass_and_of_later_ones():
    bound = RowBound(max_rows=5, loads=lambda source, counts: counts)
    bound.hear([(2, 1, 0, 9), (3, 0, 1, 0)])
    assert bound.left == 9
    with pytest.raises(TooManyRows) as over:
        bound.hear([(3, 1, 0, 9), (3, 0, 1, 0)])
    assert over.value.most == 6


@pytest.mark.parametrize(
    ("parts", "rows", "more"), [(1, 9, 2), (1, 17, 3), (4, 9, 5), (5, 9, 7), (8, 9, 10), (9, 9, 12)]
)
def test_a_pass_that_is_still_too_large_is_cut_into_a_quarter_more_parts_at_least(parts, rows, more):
    assert more_parts(parts, rows, 8) == more


def test_as_many_parts_as_the_rows_need_and_one_where_there_are_none():
    assert [parts_for(rows, 8) for rows in (0, 1, 8, 9, 16, 17)] == [1, 1, 1, 2, 2, 3]
