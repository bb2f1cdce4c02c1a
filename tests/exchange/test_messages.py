"""One message to each rank: rows leave at once, however long they are, and a group's calls keep their order."""

import threading
import time
from dataclasses import replace

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import Drifted, GroupError, InputError, PeerFailed
from tokenyard.exchange import EXCHANGES, RoundTrip
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports.messages import Mailbox, Outgoing
from tokenyard.group import base, thread_groups
from tokenyard.rows import ExpertRows

by_messages = pytest.mark.parametrize("exchange", ["two_sided", "allgather", "hierarchical"])


# -- Rows leave before anybody waits -------------------------------------------------------------------------


def rank_zero_waits_last(group, exchange, arrived, home):
    """Rank 0 starts each phase, and waits for its end only when all others have come to theirs."""
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange)
    exchange_spec = plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 6, seed=group.rank)
    trip = RoundTrip(plan.exchange, exchange_spec)
    trip.send(plan.exchange.encode(exchange_spec, x_TH), routes, ahead=True)
    in_time = group.rank > 0 or arrived.wait(20)
    received = trip.receive()
    if group.rank > 0:
        arrived.set()
    rows_RH = torch.ones(received.num_rows, layer.hidden_size)
    trip.send_back(ExpertRows(rows_RH=rows_RH), ahead=True)
    in_time = in_time and (group.rank > 0 or home.wait(20))
    trip.result()
    if group.rank > 0:
        home.set()
    return in_time


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_waits_late_lets_the_others_go_on(exchange):
    """Rows, results, and what relays make of them, leave when a phase is started."""
    hosts = [1, 1] if exchange == "hierarchical" else 1
    found = on_ranks(2, rank_zero_waits_last, exchange, threading.Event(), threading.Event(), hosts=hosts)
    assert found == [True, True]


# -- Long messages -------------------------------------------------------------------------------------------


def of_any_length(group, exchange):
    layer = spec(max_tokens=24)
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, "moe")
    cases = [batch(layer, tokens, seed=group.rank) for tokens in (24, 1, 3 * group.rank, 24)]
    return group.longest_message, [built(*case) for case in cases]


@by_messages
@pytest.mark.parametrize("most", [0, 3000, 8000])
def test_rows_that_do_not_fit_into_a_message_follow(exchange, most, monkeypatch):
    whole = on_ranks(3, of_any_length, exchange, hosts=[2, 1])
    monkeypatch.setattr(base, "MESSAGE_BYTES", most)
    cut = on_ranks(3, of_any_length, exchange, hosts=[2, 1])
    assert {longest for longest, _ in cut} == {most // 3}
    assert min(longest for longest, _ in whole) > most // 3
    for (_, found), (_, due) in zip(cut, whole, strict=True):
        assert all(map(same_bits, found, due))


def placed_among_late_rows(group):
    """Rank 1 has no place for results where they do not fit into a message, and where a rank gets none."""
    layer = spec(experts="reference", max_tokens=24)
    plan = ty.plan([layer], group, exchange="two_sided")
    built = build(plan, "moe")
    found, offered = [], []
    for tokens in (2, 24 if group.rank == 0 else 2, 0 if group.rank == 0 else 2):
        x_TH, routes = batch(layer, tokens, seed=group.rank)
        due = built(x_TH, routes)
        arrival = plan.exchange.dispatch(built.wiring.exchange_spec, built.wiring.wire.encode(x_TH), routes)
        result, buffer = built.experts(arrival.received), arrival.received.results
        offered.append(buffer is not None)
        if buffer is not None:
            buffer.rows_SH[buffer.slots_R] = result.rows_RH.to(buffer.rows_SH.dtype)
            result = buffer.placed()
        found.append(same_bits(arrival.combine(result).y_TH, due))
    return found, offered


def test_results_are_written_into_messages_where_all_ranks_get_some_that_fit(monkeypatch):
    monkeypatch.setattr(base, "MESSAGE_BYTES", 3000)
    found = on_ranks(2, placed_among_late_rows)
    assert [bits for bits, _ in found] == [[True] * 3] * 2
    assert [offered for _, offered in found] == [[True, True, True], [True, False, False]]


def test_rows_that_follow_have_their_place_where_an_announcement_takes_whole_rows():
    mailbox = Mailbox(thread_groups(2)[0])
    outgoing = Outgoing(mailbox, mailbox.head_bytes // 2, [0, 3], "in", bounded=True)
    assert [len(packets) for packets in outgoing.packets_by_rank] == [0, 3]


def test_a_message_is_what_it_was_when_it_was_sent():
    groups = thread_groups(2)
    contents = [torch.full((8,), rank, dtype=torch.uint8) for rank in range(2)]
    rooms = [torch.empty(8, dtype=torch.uint8) for _ in groups]
    for group in groups:
        group.allow_messages(4)
        group.allow_messages(2)  # for a smaller layer: what was allowed stays so
    sent = [
        group.start_messages(content, [4, 4], 4, room, phase="dispatch")
        for group, content, room in zip(groups, contents, rooms, strict=True)
    ]
    for content in contents:
        content.fill_(9)  # the next messages are written where these were
    assert [coming.wait() for coming in sent] == [[0, 4]] * 2
    assert [room.tolist() for room in rooms] == [[0] * 4 + [1] * 4] * 2
    assert [group.longest_message for group in groups] == [4, 4]


def test_a_rank_that_failed_sends_its_word_and_no_rows():
    """Nobody would read them."""
    sizes = []

    def failing(group):
        start = group.start_messages

        def noting(content, sent, *rest, **options):
            sizes.append((group.rank, sent))
            return start(content, sent, *rest, **options)

        plan = ty.plan([spec()], group, exchange="two_sided")
        built = build(plan, "moe")
        group.start_messages = noting
        return type(raised(built, *batch(spec(), 17 if group.rank else 4)))

    assert on_ranks(2, failing) == [PeerFailed, InputError]
    assert [sent for rank, sent in sizes if rank == 1] == [[528, 0]]


# -- Ranks in different places -------------------------------------------------------------------------------


def in_different_places(group, exchange):
    """Rank 0 calls the small layer, the others the large one; then all call the large one."""
    layers = [spec(name="small", max_tokens=2), spec(name="large", hidden_size=256, max_tokens=64)]
    plan = ty.plan(layers, group, exchange=exchange)
    built = {layer.name: (build(plan, layer.name), layer) for layer in layers}

    def call(name, tokens):
        layer, made = built[name]
        return layer(*batch(made, tokens, seed=group.rank))

    first = raised(call, "small", 2) if group.rank == 0 else raised(call, "large", 64)
    right = call("large", 64).shape == (64, 256)
    return type(first), right


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_ranks_in_different_layers_drift_and_no_message_is_too_long(ranks):
    found = ty.launch(2, in_different_places, "two_sided", ranks=ranks, deadline=30.0)
    assert found == [(Drifted, True)] * 2


@pytest.mark.parametrize("exchange", ["two_sided", "allgather"])
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((2,), "rank 0 announces 2 results; expected 3, as it was sent"),
        ((), "rank 0 announces 0 counts of results; expected 1, one for each rank"),
        ((3, 0), "rank 0 announces 2 counts of results; expected 1, one for each rank"),
    ],
)
def test_a_rank_that_announces_other_results_than_it_was_sent_is_found(exchange, counts, words, monkeypatch):
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=exchange)
    built, read = build(plan, "moe"), Mailbox.read

    def other(self, heads):
        (word,) = read(self, heads)
        return [replace(word, counts=counts) if word.phase is Phase.COMBINE else word]

    monkeypatch.setattr(Mailbox, "read", other)
    error = raised(built, *batch(spec(), 3))
    assert isinstance(error, GroupError)
    assert words in str(error)
    assert "look for what wrote into the announcements of rank 0" in str(error)
    assert error.layer == "moe"


# -- Calls in the background ---------------------------------------------------------------------------------


def beside_a_job(group):
    def job():
        time.sleep(0.05 * (1 + group.rank))  # the ranks come to it at different moments
        return group.gather_json(["background", group.rank])

    pending = group.in_background(job)
    mine = group.gather_json(["caller", group.rank])
    return mine, pending.wait()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_call_waits_for_the_end_of_a_job_in_the_background(ranks):
    due = [[what, rank] for what in ("caller", "background") for rank in range(2)]
    assert ty.launch(2, beside_a_job, ranks=ranks) == [(due[:2], due[2:])] * 2


def test_a_call_of_one_rank_waits_for_its_own_job_too():
    group, order, goes_on = thread_groups(1)[0], [], threading.Event()

    def job():
        goes_on.wait(0.3)  # longer than a call takes that does not wait for this
        order.append("job")

    pending = group.in_background(job)
    group.barrier()
    order.append("caller")
    pending.wait()
    assert order == ["job", "caller"]


def test_an_error_in_the_background_is_raised_where_it_is_waited_for():
    group = thread_groups(1)[0]
    pending = group.in_background(lambda: 1 // 0)
    group.barrier()
    with pytest.raises(ZeroDivisionError):
        pending.wait()


@by_messages
@pytest.mark.parametrize("max_rows", [None, 7])
@pytest.mark.parametrize(("dtype", "way"), [(torch.bfloat16, "dispatch"), (torch.float32, "combine")])
def test_messages_have_room_for_the_longest_batch_of_any_layer(exchange, max_rows, dtype, way):
    """With the counts of all ranks in front of the rows: twice as many where rows have a bound."""
    layers = [spec("small", max_tokens=3), spec("large", dtype=dtype, wire="bf16", max_tokens=16)]
    group = thread_groups(1)[0]
    plan = ty.plan(layers, group, exchange=exchange, max_rows=max_rows)
    transport, large = plan.exchange.transport, plan.wiring("large").exchange_spec
    assert large.max_rows == max_rows
    counts = transport.num_counts(large) * (1 if max_rows is None else 2)
    assert transport.mailbox.head_bytes == -(-(512 + 8 * counts) // 16) * 16
    strides = {"dispatch": large.dispatch_layout.stride, "combine": large.combine_layout.stride}
    assert max(strides, key=strides.get) == way
    heads = -(-transport.mailbox.head_bytes // strides[way])
    assert group.longest_message == (heads + 16) * strides[way]


def closed(group, exchange):
    """The rooms for messages before and after a plan is closed."""
    plan = ty.plan([spec()], group, exchange=exchange)
    build(plan, "moe")(*batch(spec(), 4, seed=group.rank))
    mailbox = plan.exchange.transport.mailbox
    before = len(mailbox._rooms)
    plan.close()
    return before, len(mailbox._rooms)


@by_messages
def test_memory_for_messages_is_given_back_when_a_plan_is_closed(exchange):
    for before, after in on_ranks(2, closed, exchange):
        assert before > 0
        assert after == 0
