"""Batches that are started now and finished later: bits, turns, errors, and what runs while rows travel."""

import threading
import time
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.models import WATCHED, batch, build, on_ranks, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.errors import HandleError, InputError, PeerFailed
from tokenyard.exchange import EXCHANGES, Pending
from tokenyard.experts import ReferenceExperts
from tokenyard.group import thread_groups
from tokenyard.layer import overlapped
from tokenyard.layer.call import SharedExpertsCall
from tokenyard.routing import SoftmaxRouter

every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)
everything_watched = pytest.mark.parametrize(
    ("exchange", "paranoid"), [*((name, False) for name in EXCHANGES), *((name, True) for name in WATCHED)]
)


def slice_of(x_TH, routes, start, end):
    ids_TK, weights_TK = routes.topk_ids_TK[start:end], routes.topk_weights_TK[start:end]
    return x_TH[start:end], ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)


# -- Bits ----------------------------------------------------------------------------------------------------


def same_as_calls(group, exchange, paranoid):
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange, in_flight=3, paranoid=paranoid)
    built = build(plan, "moe", shared=lambda x_TH: x_TH * 2)
    cases = [(*batch(layer, tokens, seed=group.rank + tokens), tokens) for tokens in (5 - group.rank, 0, 7)]
    alone = [built(x_TH, routes, add=x_TH) for x_TH, routes, _ in cases]
    into = [torch.full_like(x_TH, torch.nan) for x_TH, _, _ in cases]
    pending = [
        built.start(x_TH, routes, out=y_TH, add=x_TH)
        for (x_TH, routes, _), y_TH in zip(cases, into, strict=True)
    ]
    pending[0].compute()
    pending[0].compute()  # once more is nothing
    found = [one.finish() for one in pending]
    x_TH, routes, tokens = cases[0]
    half = -(-tokens // 2)
    parts = torch.cat([built(*slice_of(x_TH, routes, 0, half)), built(*slice_of(x_TH, routes, half, tokens))])
    return (
        all(map(same_bits, found, alone)),
        all(y_TH.data_ptr() == out.data_ptr() for y_TH, out in zip(found, into, strict=True)),
        same_bits(overlapped(built, x_TH, routes), parts),
        same_bits(overlapped(built, x_TH, routes, parts=3, add=x_TH, out=into[0]), into[0]),
    )


@everything_watched
def test_what_is_started_has_the_bits_of_a_call_and_parts_those_of_parts(exchange, paranoid):
    assert on_ranks(2, same_as_calls, exchange, paranoid) == [(True,) * 4] * 2


def few_tokens(group, exchange):
    layer = spec()
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, group.rank, seed=group.rank)  # 0, 1 and 2 tokens
    parts = [
        slice_of(x_TH, routes, *bounds) for bounds in ((0, (group.rank + 1) // 2), ((group.rank + 1) // 2, 2))
    ]
    alone = torch.cat([built(*part) for part in parts])
    before = plan.stats()["moe"].rounds
    same = same_bits(overlapped(built, x_TH, routes), alone)
    return same, plan.stats()["moe"].rounds - before


@every_exchange
def test_ranks_with_no_token_or_one_take_part_in_every_part(exchange):
    assert on_ranks(3, few_tokens, exchange) == [(True, 2)] * 3


def longer_than_max_tokens(group):
    layer = spec(router=SoftmaxRouter(top_k=2, renormalize=True), max_tokens=4)
    plan = ty.plan([layer], group, in_flight=2)
    built = build(plan, "moe")
    x_TH = torch.randn(8, 32).bfloat16()
    logits_TE = torch.randn(8, 5)
    alone = torch.cat([built(x_TH[:4], logits_TE[:4]), built(x_TH[4:], logits_TE[4:])])
    whole = raised(built, x_TH, logits_TE)
    return same_bits(overlapped(built, x_TH, logits_TE), alone), type(whole)


def test_each_part_may_have_as_many_tokens_as_a_call():
    assert on_ranks(2, longer_than_max_tokens) == [(True, InputError)] * 2


# -- What runs while rows travel -----------------------------------------------------------------------------


def recording(base, events):
    """A transport that writes down when it sends and when it waits."""

    class Recording(base):
        name = "recording"
        works_ahead = False  # what waits, and when, is to be seen

        def send(self, batch):
            return self.noted("out", super().send(batch))

        def send_back(self, results):
            return self.noted("back", super().send_back(results))

        def noted(self, way, pending):
            events.append(f"sent {way}")

            def wait():
                events.append(f"waits {way}")
                return pending.wait()

            return Pending(wait)

    return Recording


@every_exchange
def test_shared_experts_run_while_rows_travel(exchange):
    events = []
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=recording(EXCHANGES[exchange], events))
    built = build(plan, "moe", shared=lambda x_TH: events.append("shared") or x_TH)
    built(*batch(spec(), 3))
    assert events == ["sent out", "shared", "waits out", "sent back", "waits back"]


@every_exchange
def test_one_phase_travels_at_a_time_and_the_next_one_goes_out_before_experts_compute(exchange):
    events = []
    plan = ty.plan(
        [spec()], thread_groups(1)[0], exchange=recording(EXCHANGES[exchange], events), in_flight=2
    )
    built = build(plan, "moe")
    overlapped(built, *batch(spec(), 4))
    assert events == [
        *("sent out", "waits out", "sent out"),  # the second part goes out when the first has arrived
        *("waits out", "sent back"),  # the experts have computed the first
        *("waits back", "sent back"),  # and the second
        "waits back",
    ]


class Clock:
    """The time of a rank on which nothing takes time but links and experts: a busy machine does not change it."""

    def __init__(self):
        self.now = 0.0

    def seconds(self, call, *arguments):
        started = self.now
        call(*arguments)
        return self.now - started


def delayed(base, clock, seconds):
    """A transport on whose links everything arrives so many seconds after it was sent."""

    class Delayed(base):
        name = "delayed"
        works_ahead = False  # the clock knows one thread

        def send(self, batch):
            return self.later(super().send(batch))

        def send_back(self, results):
            return self.later(super().send_back(results))

        def later(self, pending):
            arrives = clock.now + seconds

            def wait():
                clock.now = max(clock.now, arrives)
                return pending.wait()

            return Pending(wait)

    return Delayed


def slow(clock, seconds):
    class Slow(ReferenceExperts):
        name = "slow"

        def compute(self, received, *, finalize):
            clock.now += seconds
            return super().compute(received, finalize=finalize)

    return Slow


@every_exchange
@pytest.mark.parametrize(("link", "compute"), [(20, 20), (20, 40), (30, 5)])
def test_parts_take_the_longer_of_travel_and_computation_and_calls_their_sum(exchange, link, compute):
    """Milliseconds of each way, and of the experts of each of two parts."""
    clock = Clock()
    layer = spec(experts=slow(clock, compute))
    transport = delayed(EXCHANGES[exchange], clock, link)
    plan = ty.plan([layer], thread_groups(1)[0], exchange=transport, in_flight=2)
    built = build(plan, "moe")
    part, whole = batch(layer, 4), batch(layer, 8)
    travel, computation = 2 * 2 * link, 2 * compute
    assert 2 * clock.seconds(built, *part) == travel + computation
    # The first part goes out and the last one comes back while nothing is left to compute.
    assert clock.seconds(overlapped, built, *whole) == max(travel, computation + 2 * link)


@every_exchange
def test_shared_experts_no_longer_than_the_way_out_take_no_time(exchange):
    clock = Clock()
    layer = spec(experts=slow(clock, 7))
    plan = ty.plan([layer], thread_groups(1)[0], exchange=delayed(EXCHANGES[exchange], clock, 20))
    alone = build(plan, "moe")

    def shared(x_TH):
        clock.now += 20
        return x_TH

    beside = build(plan, "moe", shared=shared)
    assert clock.seconds(alone, *batch(layer, 4)) == 47
    assert clock.seconds(beside, *batch(layer, 4)) == 47


# -- Shared experts between hosts ----------------------------------------------------------------------------


def two_hosts(fn, *args):
    return on_ranks(2, fn, *args, hosts=2)


def waiting_experts(event):
    """Experts that compute when an event is set."""

    class Waiting(ReferenceExperts):
        name = "waiting"

        def compute(self, received, *, finalize):
            assert event.wait(20)
            return super().compute(received, finalize=finalize)

    return Waiting


def beside_the_round_trip(group, exchange, max_rows):
    """Shared experts that end only when this rank's own results were sent back."""
    layer, sent_back = spec(), threading.Event()
    plan = ty.plan([layer], group, exchange=exchange, max_rows=max_rows)
    x_TH, routes = batch(layer, 6, seed=group.rank)
    callers = threading.current_thread()

    def shared(x_TH):
        assert sent_back.wait(20)
        assert threading.current_thread() is not callers
        return x_TH * 3

    alone = build(plan, "moe")(x_TH, routes, add=x_TH * 3)
    built = build(plan, "moe", shared=shared)
    send_back = plan.exchange.transport.send_back
    plan.exchange.transport.send_back = lambda results: [send_back(results), sent_back.set()][0]
    return same_bits(built(x_TH, routes), alone), plan.stats()["moe"].rounds


@pytest.mark.parametrize("max_rows", [None, 4])
@pytest.mark.parametrize("exchange", ["two_sided", "hierarchical"])
def test_between_hosts_shared_experts_run_beside_the_whole_round_trip(exchange, max_rows):
    assert {same for same, _ in two_hosts(beside_the_round_trip, exchange, max_rows)} == {True}


def seen_by_shared_experts(group):
    seen = []

    def shared(x_TH):
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_num_threads(),
            )
        )
        return x_TH

    layer = spec()
    built = build(ty.plan([layer], group, exchange="two_sided"), "moe", shared=shared)
    rows_and_routes = batch(layer, 2)
    built(*rows_and_routes)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        built(*rows_and_routes)
    return seen


def test_shared_experts_in_a_thread_see_the_settings_of_the_caller():
    cores = torch.get_num_threads()
    default = torch.get_autocast_dtype("cpu")
    due = [
        (True, False, False, default, cores),
        (False, True, True, torch.float16, cores),
    ]
    assert two_hosts(seen_by_shared_experts) == [due] * 2


def failing_shared_experts(group, kind):
    """Rank 1's shared experts fail: before its results are sent, after that, or with a result that does not fit."""
    go_on, sent_back = threading.Event(), threading.Event()
    layer = spec(experts=waiting_experts(go_on))
    plan = ty.plan([layer], group, exchange="two_sided")

    def shared(x_TH):
        if group.rank == 0:
            go_on.set()
            return x_TH
        if kind == "before":
            try:
                raise ValueError("no memory")
            finally:
                threading.Timer(0.1, go_on.set).start()  # when the thread has ended
        go_on.set()
        assert sent_back.wait(20)
        if kind == "after":
            raise ValueError("no memory")
        return x_TH[:1]

    built = build(plan, "moe", shared=shared)
    send_back = plan.exchange.transport.send_back
    plan.exchange.transport.send_back = lambda results: [send_back(results), sent_back.set()][0]
    x_TH, routes = batch(layer, 4, seed=group.rank)
    message = ""
    try:
        built(x_TH, routes)
    except (ValueError, ty.TokenyardError) as error:
        message = f"{type(error).__name__}: {error}"
    left = [thread.name for thread in threading.enumerate() if thread.name == "shared experts of moe"]
    built.shared = None
    return message, left, same_bits(built(x_TH, routes), built(x_TH, routes))


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("before", "ValueError: no memory", "PeerFailed: layer 'moe', rank 0: rank 1 failed in combine"),
        ("after", "ValueError: no memory", ""),
        ("other rows", "InputError: layer 'moe', rank 1: a tensor to write into or to add is", ""),
    ],
)
def test_shared_experts_that_fail_in_a_thread_do_so_on_this_rank_and_on_all_if_in_time(kind, own, other):
    (told, _, works), (message, left, works_too) = two_hosts(failing_shared_experts, kind)
    assert message.startswith(own), message
    assert told.startswith(other) if other else told == "", told
    assert (left, works, works_too) == ([], True, True)


def calls_its_layer(group):
    layer = spec()
    plan = ty.plan([layer], group, exchange="two_sided")
    x_TH, routes = batch(layer, 4, seed=group.rank)
    built = build(plan, "moe", shared=lambda rows_TH: built(rows_TH, routes))
    return str(raised(built, x_TH, routes))


def test_shared_experts_have_ended_at_the_end_of_a_call_that_fails():
    ended = []

    def shared(x_TH):
        time.sleep(0.2)
        ended.append(True)

    two_hosts_here = SimpleNamespace(num_hosts=2, device=torch.device("cpu"))
    with suppress(ValueError), SharedExpertsCall(shared, two_hosts_here, "moe") as call:
        call(torch.zeros(1))
        raise ValueError
    assert ended == [True]


def test_shared_experts_in_a_thread_that_call_their_layer_are_refused():
    for message in two_hosts(calls_its_layer):
        assert "thread 'shared experts of moe' calls the plan, which thread" in message


# -- Errors --------------------------------------------------------------------------------------------------


@every_exchange
def test_a_batch_out_of_turn_is_refused(exchange):
    layer = spec(experts="reference")
    plan = ty.plan([layer], thread_groups(1)[0], exchange=exchange, in_flight=2)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5)
    expected = built(x_TH, routes)
    first, second = built.start(x_TH, routes), built.start(x_TH, routes)
    for early in (second.compute, second.finish):
        assert str(raised(early)) == (
            "layer 'moe', rank 0: a batch of layer 'moe' was started before, and is not finished; "
            "expected batches to be finished in the order in which they were started; "
            "fix: finish the batch of 'moe' first"
        )
    assert "a dispatch of layer 'moe' is in flight" in str(raised(built, x_TH, routes))
    assert same_bits(first.finish(), expected)
    assert same_bits(second.finish(), expected)
    assert str(raised(first.finish)) == (
        "layer 'moe', rank 0: this batch was finished before; "
        "expected `finish` to be called once for each `start`; fix: keep what it returned"
    )
    assert same_bits(built(x_TH, routes), expected)


def one_too_many(group, exchange, in_flight):
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=in_flight)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    started = [built.start(x_TH, routes) for _ in range(in_flight)]
    error = raised(built.start, x_TH, routes)
    ended = [str(raised(pending.finish)) for pending in started]
    return str(error), ended, same_bits(built(x_TH, routes), expected)


@every_exchange
def test_one_batch_too_many_ends_all_of_them(exchange):
    for error, ended, works in on_ranks(2, one_too_many, exchange, 2):
        assert "2 dispatch in flight already (of 'moe', 'moe')" in error
        for message in ended:
            assert "this batch was given up: HandleError: layer 'moe'" in message
            assert message.endswith("expected no error in any batch that was under way; fix: start it again")
        assert works


def dropped(group, exchange, in_flight, who):
    """Some ranks forget a batch that they started; all start another one, or finish theirs."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=in_flight)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = built(x_TH, routes)
    pending = built.start(x_TH, routes)
    if group.rank in who:
        del pending
        error = raised(built.start if in_flight > 1 else built, x_TH, routes)
    elif in_flight > 1:
        second = built.start(x_TH, routes)
        error = raised(pending.finish)
        assert second is not None
    else:
        error = raised(pending.finish)
    return type(error), str(error), same_bits(built(x_TH, routes), expected)


@every_exchange
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("who", [(0,), (0, 1)])
def test_a_batch_that_is_dropped_is_an_error_on_all_ranks(exchange, in_flight, who):
    for rank, (kind, message, works) in enumerate(on_ranks(2, dropped, exchange, in_flight, who)):
        assert kind is (HandleError if rank in who else PeerFailed)
        assert "a batch was started, and what `start` returned is gone" in message
        assert "layer 'moe', rank 0" in message or rank
        assert "keep what `start` returns, and call its `finish`" in message
        assert works


class Fails(ReferenceExperts):
    """Experts that raise in one of their calls."""

    name = "fails"
    calls = 0
    fails_in = 0

    def compute(self, received, *, finalize):
        self.calls += 1
        if self.calls == self.fails_in:
            raise ValueError(f"call {self.calls} broke")
        return super().compute(received, finalize=finalize)


def broken_part(group, exchange, paranoid, where):
    layer = spec(experts=Fails)
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2, paranoid=paranoid)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = overlapped(built, x_TH, routes)
    bad = routes
    if group.rank == 0 and where.startswith("experts"):
        built.experts.calls, built.experts.fails_in = 0, int(where[-1])
    elif group.rank == 0:
        ids_TK = routes.topk_ids_TK.clone()
        ids_TK[int(where[-1])] = 99
        bad = ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=routes.topk_weights_TK)
    try:
        overlapped(built, x_TH, bad)
        seen = None, ""
    except (ValueError, ty.TokenyardError) as error:
        seen = type(error), str(error)
    return *seen, same_bits(overlapped(built, x_TH, routes), expected)


@everything_watched
@pytest.mark.parametrize("where", ["experts 1", "experts 2", "token 0", "token 4"])
def test_an_error_in_one_part_reaches_all_ranks_and_the_next_batch_works(exchange, paranoid, where):
    (kind, own, first_works), (other, told, second_works) = on_ranks(
        2, broken_part, exchange, paranoid, where
    )
    assert kind is (ValueError if where.startswith("experts") else InputError)
    assert ("broke" if where.startswith("experts") else "id 99") in own
    assert other is PeerFailed
    assert "rank 0" in told
    assert first_works
    assert second_works


def wrong_shapes(group, exchange):
    """Rank 0 brings what cannot be cut; all ranks hear of it."""
    layer = spec(experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    expected = overlapped(built, x_TH, routes)
    said = []
    for wrong in ({"x_TH": x_TH[:4]}, {"x_TH": None}, {"add": x_TH[0]}, {"routes_or_logits": 3}):
        given = {"x_TH": x_TH, "routes_or_logits": routes, **(wrong if group.rank == 0 else {})}
        error = raised(overlapped, built, **given)
        said.append((type(error), str(error)))
    return said, same_bits(overlapped(built, x_TH, routes), expected)


@every_exchange
def test_what_cannot_be_cut_is_an_error_on_all_ranks(exchange):
    (own, first_works), (told, second_works) = on_ranks(2, wrong_shapes, exchange)
    assert [kind for kind, _ in own] == [InputError] * 4
    assert [kind for kind, _ in told] == [PeerFailed] * 4
    assert [message.split(";")[0] for _, message in own] == [
        "layer 'moe', rank 0: of a batch that is cut into parts, routes is a tensor int64[5, 2]",
        "layer 'moe', rank 0: of a batch that is cut into parts, x_TH is None",
        "layer 'moe', rank 0: of a batch that is cut into parts, add is a tensor bfloat16[32]",
        "layer 'moe', rank 0: of a batch that is cut into parts, routes is a int",
    ]
    assert (
        "expected a matrix with a row for each token, 4; fix: pass what the layer itself takes" in own[0][1]
    )
    assert first_works
    assert second_works


def test_more_parts_than_may_be_in_flight_are_refused():
    plan = ty.plan([spec()], thread_groups(1)[0], in_flight=2)
    built = build(plan, "moe")
    x_TH, routes = batch(spec(), 5)
    assert str(raised(overlapped, built, x_TH, routes, parts=3)) == (
        "layer 'moe', rank 0: 3 parts of a batch overlap; expected at most 2, which the plan lets be in flight; "
        "fix: plan(..., in_flight=3)"
    )
    assert "parts is 0; expected a number of parts, from 1" in str(
        raised(overlapped, built, x_TH, routes, parts=0)
    )


def test_a_batch_may_be_one_part_and_may_be_written_where_a_gradient_is_wanted():
    built = build(ty.plan([spec()], thread_groups(1)[0], in_flight=2), "moe")
    x_TH, routes = batch(spec(), 5)
    due = built(x_TH, routes)
    for parts in (1, 2):
        out = torch.zeros_like(x_TH).requires_grad_()
        overlapped(built, x_TH, routes, parts=parts, out=out)
        assert out.requires_grad
        assert same_bits(out.detach(), due)
        assert same_bits(overlapped(built, x_TH, routes, parts=parts), due)
    for wrong in (0, -1, 1.0, "2", None):
        assert f"parts is {wrong!r}; expected a number" in str(
            raised(overlapped, built, x_TH, routes, parts=wrong)
        )


@every_exchange
def test_a_batch_of_layers_that_have_changed_and_of_a_closed_plan_says_so(exchange):
    plan = ty.plan([spec()], thread_groups(1)[0], exchange=exchange)
    built = build(plan, "moe")
    pending = built.start(*batch(spec(), 3))
    plan.extend([spec("more")])
    assert "this batch was given up: the layers of the plan have changed" in str(raised(pending.finish))
    pending = built.start(*batch(spec(), 3))
    plan.close()
    assert "the plan is closed" in str(raised(pending.finish))


@every_exchange
def test_of_a_batch_that_was_finished_nothing_is_kept(exchange):
    built = build(ty.plan([spec()], thread_groups(1)[0], exchange=exchange), "moe")
    for finish in (lambda pending: pending.finish(), computed):
        x_TH, routes = batch(spec(), 3)
        kept = weakref.ref(x_TH)
        finish(built.start(x_TH, routes, add=x_TH))
        del x_TH
        assert kept() is None


def threads_of_its_own(group, shared):
    """How many jobs a layer gives to threads that wait for rows: in a call, and of a batch that was started."""
    layer = spec()
    plan = ty.plan([layer], group, exchange="hierarchical")
    built = build(plan, "moe", shared=(lambda x_TH: x_TH) if shared else None)
    given, jobs, found = batch(layer, 4, seed=group.rank), [], []
    in_background = group.in_background
    group.in_background = lambda job: jobs.append(job) or in_background(job)
    calls = [
        lambda: built(*given),
        lambda: built.start(*given).finish(),
        lambda: computed(built.start(*given)),
    ]
    for call in calls:
        jobs.clear()
        call()
        found.append(len(jobs))
    return found


def computed(pending):
    pending.compute()
    return pending.finish()


@pytest.mark.parametrize(("hosts", "shared", "jobs"), [(2, False, 0), (2, True, 0), (1, True, 1)])
def test_threads_wait_for_rows_only_where_something_is_computed_meanwhile(hosts, shared, jobs):
    """Where ranks are on several hosts, shared experts have a thread of their own, and the call waits itself."""
    for found in on_ranks(4, threads_of_its_own, shared, hosts=hosts):
        assert found == [jobs, 1, 2]
