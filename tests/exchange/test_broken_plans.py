"""A plan that has lost a rank, or was interrupted while it waited, gives no result any more, on any exchange."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tokenyard as ty
from tests.faults import late
from tests.models import batch, build, raised, spec
from tests.products import on_threads_and_processes, product
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin
from tokenyard.errors import Drifted, HandleError, PlanBroken
from tokenyard.exchange import AllgatherTransport, Pending, SharedMemoryTransport, TwoSidedTransport
from tokenyard.exchange.open_trips import Usability
from tokenyard.exchange.passes import TooManyRows
from tokenyard.experts import ReferenceExperts
from tokenyard.group import thread_groups
from tokenyard.integrations.flashinfer import MoeAlltoAll
from tokenyard.planning import gather_stats
from tokenyard.rows import ExpertRows

KINDS = ["threads", "processes"]
EXCHANGES = ["one_sided", "two_sided", "allgather"]
both_kinds = pytest.mark.parametrize("ranks", KINDS)
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)

DEADLINE = 0.4
# Seconds: a little more than the deadline, and within the second in which ranks answer.
LATE = DEADLINE + 0.3


class Naps(ReferenceExperts):
    """Experts in whose first call rank 1 takes too long."""

    name = "naps"
    naps = True

    def compute(self, received, *, finalize):
        if self.naps and self.is_late:
            self.naps = False
            time.sleep(LATE)
        return super().compute(received, finalize=finalize)


def late_rank(group, exchange, phase, pause):
    """What four calls give on a rank: whether it is right, or the error."""
    layer = spec("moe", experts=Naps)
    plan = ty.plan([layer], group, exchange=exchange)
    built = build(plan, "moe")
    built.experts.is_late = group.rank == 1 and phase == "combine"
    group.barrier()
    if group.rank == 1 and phase == "dispatch":
        time.sleep(LATE)
    said = []
    for number in range(4):
        x_TH, routes = batch(layer, 5, seed=10 * number + group.rank)
        try:
            y_TH = built(x_TH, routes)
        except ty.PeerLost as error:
            said.append((type(error).__name__, error.peers, error.phase))
            time.sleep(pause)
            continue
        expected = twin(plan.wiring("moe"), random_weights(layer, 0), x_TH, routes, group.rank)
        said.append("right" if same_bits(y_TH, expected) else "wrong")
    return said


@pytest.mark.parametrize(
    ("exchange", "ranks", "phase", "pause"),
    product(EXCHANGES, KINDS, ["dispatch", "combine"], [0.0, 0.5]),
)
def test_a_late_answer_is_never_taken_for_an_answer_to_a_later_call(ranks, exchange, phase, pause):
    for rank, said in enumerate(
        ty.launch(2, late_rank, exchange, phase, pause, ranks=ranks, deadline=DEADLINE)
    ):
        # The late one may have had all that it needs for its own call when the other gave it up.
        results = said[: said.index("right") + 1] if "right" in said else []
        assert results in ([], ["right"] if rank == 1 else [])
        losses = said[len(results) :]
        assert losses[0][:2] == ("PeerLost", (1,))
        assert losses[1:] == [("PlanBroken", (1,), losses[0][2])] * (3 - len(results))


@every_exchange
def test_a_rank_that_is_stopped_and_continued_from_outside_gives_no_wrong_row(exchange):
    (seed,) = (seed for seed in range(3) if late.draw(seed).exchange == exchange)
    assert late.complaints(late.run(late.draw(seed))) == []


def later_calls(group, exchange):
    """What can still be asked of a plan on rank 0 after rank 1 has left."""
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer], group, exchange=exchange, in_flight=2)
    built, exchange_spec = build(plan, "moe"), plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 5)
    flight = plan.exchange.dispatch(exchange_spec, plan.wiring("moe").wire.encode(x_TH), routes)
    if group.rank == 1:
        return None
    result = built.experts(flight.received)
    first = raised(flight.combine, result)
    calls = {
        "layer": lambda: built(x_TH, routes),
        "dispatch": lambda: plan.exchange.dispatch(
            exchange_spec, plan.wiring("moe").wire.encode(x_TH), routes
        ),
        "combine": lambda: flight.combine(result),
        "extend": lambda: plan.extend([spec("more")]),
        "trim": plan.trim,
        "gather_stats": partial(gather_stats, plan),
    }
    errors = {name: raised(call) for name, call in calls.items()}
    plan.go_on_without([1])
    x_TH, routes = batch(layer, 5, seed=3)
    y_TH = built(x_TH, routes)
    right = same_bits(y_TH, twin(plan.wiring("moe"), random_weights(layer, 0), x_TH, routes, 0))
    return first, errors, right


@every_exchange
def test_everything_that_a_broken_plan_is_asked_says_so_until_it_goes_on_without_the_rank(exchange):
    first, errors, right = ty.launch(2, later_calls, exchange, deadline=20)[0]
    assert type(first) is ty.PeerLost
    assert "plan can go on without it: `plan.go_on_without([1])`" in str(first)  # it has returned
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(errors, PlanBroken)
    assert "the plan is broken: rank 1 did not arrive in combine" in str(errors["layer"])
    assert "plan.readmit([1])" in errors["layer"].fix
    assert right


def given_up(group):
    plan = ty.plan([spec("moe", experts="reference")], group, exchange="one_sided")
    built, (x_TH, routes) = build(plan, "moe"), batch(spec("moe"), 3)
    group.barrier()
    if group.rank == 1:
        time.sleep(LATE)
    return [raised(built, x_TH, routes) for _ in range(2)]


def test_a_rank_that_the_others_gave_up_is_told_how_to_come_back():
    _, mine = ty.launch(2, given_up, deadline=DEADLINE)[1]
    assert "the others have given this rank up; it can come back as a fresh one: `rejoin(…, rank=1)`" in str(
        mine
    )


# -- Interrupted waits ---------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """What Ctrl-C, or a watchdog of the caller's, raises in the middle of a wait."""


def _interrupts(exchange):
    class Interrupts(exchange):
        """Rank 0 is interrupted in the first wait of its first dispatch."""

        name = "interrupts"
        done = False

        def send(self, batch):
            pending = super().send(batch)

            def wait():
                arrival = pending.wait()
                if self.group.rank == 0 and not self.done:
                    self.done = True
                    raise Interrupted
                return arrival

            return Pending(wait)

    return Interrupts


@pytest.mark.parametrize("exchange", [SharedMemoryTransport, TwoSidedTransport, AllgatherTransport])
def test_a_plan_that_was_interrupted_in_a_wait_is_broken(exchange):
    def interrupted(group):
        plan = ty.plan([spec("moe", experts="reference")], group, exchange=_interrupts(exchange))
        built, said = build(plan, "moe"), []
        for seed in range(2):
            x_TH, routes = batch(spec("moe"), 3, seed=seed)
            try:
                said.append(built(x_TH, routes).shape)
            except Interrupted:
                said.append("interrupted")
            except ty.PeerLost as error:
                said.append(str(error))
        return said

    first, other = ty.launch(2, interrupted, deadline=20)
    assert first[0] == "interrupted"
    assert "the plan is broken: Interrupted; expected a call" in first[1]
    assert "fix: make a new plan" in first[1]
    assert "rank 0 did not arrive in combine" in other[0]


def _lost(phase):
    return ty.PeerLost([0], phase=phase, waited=1.0, rank=0)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Interrupted(), "the plan is broken: Interrupted"),
        (_lost("combine"), "rank 0 did not arrive in combine"),
    ],
    ids=["interrupted", "lost"],
)
@pytest.mark.parametrize("exchange", [SharedMemoryTransport, TwoSidedTransport, AllgatherTransport])
def test_a_plan_that_cannot_tell_of_what_it_gave_up_is_broken(exchange, error, why):
    """Two dispatches are in flight, the second is given up: the others are told when the first is combined."""

    class Cut(exchange):
        name = "cut"

        def fail(self, failure):
            raise error

    plan = ty.plan([spec("moe", experts="reference")], thread_groups(1)[0], exchange=Cut, in_flight=2)
    built, wiring = build(plan, "moe"), plan.wiring("moe")
    x_TH, routes = batch(spec("moe"), 3)
    flights = []

    def gives_up():
        with plan.exchange.begin(wiring.exchange_spec) as trip:
            flights.append(
                plan.exchange.dispatch(wiring.exchange_spec, plan.exchange.encode(trip.spec, x_TH), routes)
            )
            trip.dispatch(plan.exchange.encode(trip.spec, x_TH), routes)
            raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        gives_up()
    plan.exchange.usability.check()
    with pytest.raises(type(error)):
        flights[0].combine(built.experts(flights[0].received))
    broken = raised(built, x_TH, routes)
    assert isinstance(broken, PlanBroken)
    assert why in str(broken)


# -- Engines that call FlashInfer's class --------------------------------------------------------------------


def through_flashinfer(group):
    a2a = MoeAlltoAll(None, max_num_tokens=4, top_k=1, num_experts=2, group=group)
    rows, ids = torch.ones(2, 3), torch.tensor([[0], [1]])

    def round_trip(value):
        (received,) = a2a.dispatch(ids, [rows * value], 2)
        return a2a.combine(received, 2)[0, 0].item()

    said = [round_trip(1.0)]
    group.barrier()
    if group.rank == 1:
        time.sleep(LATE)
    for value in (2.0, 3.0, 4.0):
        try:
            said.append(round_trip(value))
        except ty.PeerLost as error:
            said.append((type(error).__name__, error.fix))
    said.append(type(raised(a2a.combine, torch.ones(2, 2, 3), 2)).__name__)
    said.append(type(raised(a2a.get_combine_payload_tensor_in_workspace, 2, 3, torch.float32)).__name__)
    return said


@both_kinds
def test_the_class_of_flashinfer_is_broken_after_a_loss_too(ranks):
    for said in ty.launch(2, through_flashinfer, ranks=ranks, deadline=DEADLINE):
        assert said[0] == 1.0
        assert said[1][0] == "PeerLost"
        assert [name for name, _ in said[2:4]] == ["PlanBroken"] * 2
        assert "make a new MoeAlltoAll" in said[2][1]
        assert said[4:] == ["PlanBroken"] * 2


# -- Ranks in different plans --------------------------------------------------------------------------------


def different_plans(group, exchange):
    layer = spec("moe", experts="reference")
    plans = [ty.plan([layer], group, exchange=exchange) for _ in range(2)]
    built = [build(plan, "moe") for plan in plans]
    x_TH, routes = batch(layer, 3, seed=group.rank)
    good = [one(x_TH, routes).shape[0] for one in built]
    group.barrier()
    started = time.monotonic()
    error = raised(built[0 if group.rank == 0 else 1], x_TH, routes)
    waited = time.monotonic() - started
    return good, error, waited, [raised(one, x_TH, routes) for one in built]


@pytest.mark.parametrize(("exchange", "ranks"), on_threads_and_processes(EXCHANGES))
def test_ranks_in_different_plans_have_drifted_and_hear_it_at_once(ranks, exchange):
    for good, error, waited, later in ty.launch(3, different_plans, exchange, ranks=ranks, deadline=30):
        assert good == [3, 3]
        assert type(error) is Drifted, error
        assert "of another plan" in str(error)
        assert waited < 15
        if exchange == "one_sided":  # whose flags stand in the memory of each plan
            assert [type(one) for one in later] == [PlanBroken] * 2
            assert "the ranks were in different plans" in str(later[0])


@pytest.mark.parametrize(
    ("error", "breaks"),
    [
        (ty.PeerLost([1], phase="dispatch", waited=1.0), True),
        (KeyboardInterrupt(), True),
        (Drifted("elsewhere", expected="here", fix="none"), False),  # the others have answered
        (TooManyRows(9), False),
    ],
)
def test_only_a_wait_without_an_answer_breaks_a_plan(error, breaks):
    layer = SimpleNamespace(layer="moe")
    for for_others in (True, False):
        usability = Usability(3)
        usability.end_wait(error, layer, for_others=for_others)
        assert usability.broken_by is (error if breaks and for_others else None)
    usability = Usability(3)
    with pytest.raises(type(error)), usability.waiting(layer):
        raise error
    assert usability.broken_by is (error if breaks else None)
    if isinstance(error, ty.TokenyardError):
        assert (error.layer, error.rank) == ("moe", 3)


def test_the_first_cause_is_kept_and_a_plan_that_is_closed_says_so():
    usability, parted = Usability(3), Usability(3)
    usability.check()
    causes = [ty.PeerLost([rank], phase="dispatch", waited=1.0) for rank in (1, 2)]
    for cause in causes:
        usability.break_by(cause)
    assert isinstance(usability.mark_broken_by_drift(), PlanBroken)
    assert usability.broken_by is causes[0]
    assert isinstance(raised(usability.check), PlanBroken)
    assert raised(usability.check_open) is None
    parted.mark_broken_by_drift()
    assert isinstance(parted.broken_by, Drifted)
    usability.close()
    assert type(raised(usability.check)) is type(raised(usability.check_open)) is HandleError


def test_after_a_loss_nothing_is_sent_by_hand_either():
    layer = spec(top_k=1)
    plan = ty.plan([layer], thread_groups(1)[0], exchange="two_sided", in_flight=2, max_rows=2)
    exchange, wired = plan.exchange, plan.wiring("moe").exchange_spec
    x_TH, routes = batch(layer, 3)
    rows, send = wired.wire.encode(x_TH), exchange.transport.send
    arrival = exchange.dispatch(wired, rows, routes)
    assert arrival.has_more

    def lose():
        raise ty.PeerLost([0], phase="dispatch", waited=1.0)

    exchange.transport.send = lambda batch: Pending(lose)
    assert type(raised(exchange.dispatch, wired, rows, routes)) is ty.PeerLost
    exchange.transport.send = send
    results = ExpertRows(rows_RH=torch.zeros(2, layer.hidden_size))
    for call, *given in (
        (exchange.dispatch, wired, rows, routes),
        (arrival.dispatch_next,),
        (arrival.combine, results),
        (arrival.refuse, ValueError("no")),
    ):
        assert isinstance(raised(call, *given), PlanBroken)
