"""A rank is killed or stopped at any moment: every survivor says who, in time, and can go on without it.

`make test` runs every moment once; TOKENYARD_FAULTS=20 (`make test-faults`) runs each twenty times.
"""

import json
import os
import signal
import time

import psutil
import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.oracle import oracle, relative_error
from tokenyard.exchange import OneSidedExchange
from tokenyard.exchange.announcement import Phase

TIMES = int(os.environ.get("TOKENYARD_FAULTS", "1"))
DEADLINE = 0.6
LOST = 1  # the rank that is killed or stopped
MOMENTS = [
    "before dispatch",
    "inside dispatch",
    "after dispatch",
    "before combine",
    "inside combine",
    "after combine",
]


class Mortal(OneSidedExchange):
    """An exchange whose rank 1 is struck when its moment comes."""

    name = "mortal"
    moment = ""
    signal = 0

    def strike(self, moment):
        if self.group.rank == LOST and moment == self.moment:
            os.kill(os.getpid(), self.signal)

    def _load_out(self, cargo, round, outgoing):
        self.strike("before dispatch")
        return super()._load_out(cargo, round, outgoing)

    def _send_out(self, cargo, round, outgoing, loaded):
        arrived = super()._send_out(cargo, round, outgoing, loaded)
        self.strike("after dispatch")
        return arrived

    def _send_back(self, dispatched, loaded):
        self.strike("before combine")
        return super()._send_back(dispatched, loaded)

    def _tell_and_hear(self, by_rank):
        signals, phase = self.workspace.signals, by_rank[0].phase
        if self.group.rank == LOST and self.moment == f"inside {phase.value}":
            signals.tell(0, by_rank[0])  # rank 0 has heard of it, the others have not
            self.strike(self.moment)
        return super()._tell_and_hear(by_rank)

    def combine(self, dispatched, result, **options):
        combined = super().combine(dispatched, result, **options)
        self.strike("after combine")
        return combined


def live_through(group, directory, moment, number):
    layer = spec("moe", experts="reference", num_experts=6)
    Mortal.moment, Mortal.signal = "", number
    plan = ty.plan([layer], group, exchange=Mortal)
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    pids = group.gather_json(os.getpid())
    built(x_TH, routes)  # a good round first
    plan.exchange.workspace.signals.deadline = DEADLINE
    Mortal.moment = moment
    started = time.monotonic()
    error = None
    while error is None and time.monotonic() - started < 10:
        error = raised(built, x_TH, routes)
    if group.rank == LOST:  # stopped, and awake again: it may only raise
        return type(error).__name__
    found = {
        "error": type(error).__name__,
        "peers": list(getattr(error, "peers", [])),
        "layer": error.layer,
        "waited": time.monotonic() - started,
    }
    # Go on without it, in a workspace of our own.
    Mortal.moment = ""
    plan.go_on_without([LOST])
    y_TH = built(x_TH, routes)
    local = [e for e in range(6) if e not in (2, 3)]  # rank 1 owned experts 2 and 3
    kept = torch.isin(routes.topk_ids_TK, torch.tensor(local))
    left = ty.Routes(
        topk_ids_TK=routes.topk_ids_TK.masked_fill(~kept, -1), topk_weights_TK=routes.topk_weights_TK
    )
    found["went_on"] = relative_error(y_TH, oracle(layer, random_weights(layer, 0), x_TH, left)) < 2**-7
    found["dropped"] = plan.stats()["moe"].dropped == int((~kept).sum())
    if group.rank == 0:
        if number == signal.SIGSTOP:
            os.kill(pids[LOST], signal.SIGCONT)
            time.sleep(0.3)
        found["unharmed"] = same_bits(built(x_TH, routes), y_TH)
    else:
        built(x_TH, routes)
    with open(os.path.join(directory, f"{group.rank}.json"), "w") as file:
        json.dump(found, file)
    return "survived"


def rank_of(group):
    return group.rank


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("time_", range(TIMES))
def test_every_survivor_names_the_lost_rank_in_time_and_goes_on(moment, number, time_, tmp_path):
    ty.launch(1, rank_of, ranks="processes")  # the forkserver, which stays, is there from now on
    descriptors = len(os.listdir("/proc/self/fd"))
    arguments = (live_through, str(tmp_path), moment, number)
    if number == signal.SIGKILL:
        with pytest.raises(ty.RankError) as caught:
            ty.launch(4, *arguments, ranks="processes", deadline=30)
        assert caught.value.rank == LOST
    else:
        outcomes = ty.launch(4, *arguments, ranks="processes", deadline=30)
        assert outcomes == ["survived", "PeerLost", "survived", "survived"]
    for rank in (0, 2, 3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["error"] == "PeerLost"
        assert found["peers"] == [LOST]
        assert found["layer"] == "moe"
        assert found["waited"] < DEADLINE + 1
        assert found["went_on"]
        assert found["dropped"]
        assert found.get("unharmed", True)
    left = [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_STOPPED]
    assert not left
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def message_exchange(group, directory, exchange):
    plan = ty.plan([spec()], group, exchange=exchange)
    built = build(plan, "moe")
    x_TH, routes = batch(spec(), 4)
    built(x_TH, routes)
    if group.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    error = raised(built, x_TH, routes)
    with open(os.path.join(directory, f"{group.rank}.json"), "w") as file:
        json.dump([type(error).__name__, list(error.peers), time.monotonic() - started], file)


@pytest.mark.parametrize("exchange", ["two_sided", "allgather"])
def test_exchanges_over_gloo_end_in_time_too_and_name_the_rank(exchange, tmp_path):
    with pytest.raises(ty.RankError):
        ty.launch(3, message_exchange, str(tmp_path), exchange, ranks="processes", deadline=5.0)
    for rank in (0, 2):
        kind, peers, waited = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind == "PeerLost"
        assert peers == [LOST]
        assert waited < 5.0 + 2.0


def replicas(group):
    placement = ty.Placement.replicated(ty.Placement.contiguous(4, 4), {1: [3]})
    layer = spec("moe", num_experts=4, experts="reference", placement=placement, top_k=2)
    plan = ty.plan([layer], group, exchange="one_sided")
    built = build(plan, "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    whole = built(x_TH, routes)
    if group.rank == LOST:
        return None
    plan.go_on_without([LOST])
    served = relative_error(built(x_TH, routes), whole.double()) < 2**-7
    return served, plan.stats()["moe"].dropped, str(plan).splitlines()[0]


def test_replicas_serve_the_experts_of_a_lost_rank():
    for rank, outcome in enumerate(ty.launch(4, replicas, deadline=20)):
        if rank != LOST:
            served, dropped, title = outcome
            assert served
            assert dropped == 0
            assert "on 3 ranks" in title


def renormalized(group):
    layer = spec("moe", num_experts=2, top_k=2, experts="reference")
    plan = ty.plan([layer], group)
    if group.rank == LOST:
        return None
    x_TH, _ = batch(layer, 3)
    both = ty.Routes(topk_ids_TK=torch.tensor([[0, 1]] * 3), topk_weights_TK=torch.tensor([[0.25, 0.75]] * 3))
    only = ty.Routes(topk_ids_TK=torch.tensor([[0, -1]] * 3), topk_weights_TK=torch.tensor([[1.0, 9.0]] * 3))
    built = build(plan, "moe")
    plan.go_on_without([LOST], renormalize=True)
    return same_bits(built(x_TH, both), built(x_TH, only)), plan.stats()["moe"].dropped


def test_weights_can_make_up_for_what_was_dropped():
    assert ty.launch(2, renormalized, deadline=20)[0] == (True, 3)


def waits_for_a_third(group):
    """Rank 1 never comes; rank 2 waits for it; rank 0 waits for rank 2, and must not blame it."""
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer], group, exchange="one_sided")
    signals = plan.exchange.workspace.signals
    if group.rank == 1:
        return None
    words = plan.exchange._announcement(plan.wiring("moe").cargo, Phase.DISPATCH, 1, 0, [0], None)
    if group.rank == 2:
        signals.tell(2, words)
        error = raised(signals.hear, words)
    else:
        signals.tell(0, words)
        signals.deadline = 0.5  # gives up first, and sees that rank 2 is only waiting
        error = raised(signals.hear, words)
    return error.peers


def test_a_rank_that_only_waits_is_not_blamed():
    assert ty.launch(3, waits_for_a_third, deadline=3) == [(1,), None, (1,)]
