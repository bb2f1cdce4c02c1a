"""After a loss: who is blamed, who serves the lost experts, and what makes up for those that nobody serves.

Ranks that are killed and stopped, at every moment, are the campaign's (`test_campaign.py`).
"""

import os
import signal
import threading
import time

import pytest
import torch

import tokenyard as ty
from tests.models import batch, build, raised, spec
from tokenyard.conformance.cases import same_bits
from tokenyard.conformance.oracle import relative_error
from tokenyard.errors import RankError
from tokenyard.routing import Placement

LOST = 1


def replicas(group):
    placement = Placement.replicated(Placement.contiguous(4, 4), {1: [3]})
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


def waits_for_a_third(group, done):
    """Rank 1 lives and never comes; rank 2 waits for it; rank 0 waits for rank 2, and must not blame it."""
    layer = spec("moe", experts="reference")
    plan = ty.plan([layer], group, exchange="one_sided")
    signals = plan.exchange.transport.workspace.signals
    if group.rank == 1:
        return done.acquire(timeout=60) and done.acquire(timeout=60)
    spec_ = plan.wiring("moe").exchange_spec
    words = plan.exchange.announcer.of_dispatch(spec_, 0, [0] * 3).for_rank(0)
    if group.rank == 2:
        signals.tell(2, words)
        error = raised(signals.hear, words)
    else:
        signals.tell(0, words)
        until = time.monotonic() + 60
        while not signals._state(2)[0] and time.monotonic() < until:
            time.sleep(0.005)
        group.deadline = 0.2  # gives up first, and sees that rank 2 is only waiting
        error = raised(signals.hear, words)
    done.release()
    return error.peers


def test_a_rank_that_only_waits_is_not_blamed():
    done = threading.Semaphore(0)
    assert ty.launch(3, waits_for_a_third, done, deadline=60) == [(1,), True, (1,)]


def computes_meanwhile(group):
    """Rank 1 dies, rank 3 computes for longer than the others need to find out; neither of them may blame it."""
    group.barrier()
    if group.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 3:
        time.sleep(2.0)
    return raised(group.barrier).peers


def collected(group, folder):
    """As a rank of `launch` that another one's end does not hide."""
    peers = computes_meanwhile(group)
    (folder / str(group.rank)).write_text(str(peers))


def test_a_rank_that_computes_while_another_dies_is_not_blamed(tmp_path):
    with pytest.raises(RankError):
        ty.launch(4, collected, tmp_path, ranks="processes", deadline=20.0)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("023", "(1,)")


def dies_soon(group, folder):
    layer = spec("moe", experts="reference")
    built = build(ty.plan([layer], group, exchange="one_sided"), "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    built(x_TH, routes)
    if group.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(built, x_TH, routes)
    (folder / f"{group.rank}").write_text(f"{type(error).__name__} {error.peers} {error.waited}")


def test_a_process_that_has_ended_is_missed_long_before_the_deadline(tmp_path):
    with pytest.raises(RankError):
        ty.launch(3, dies_soon, tmp_path, ranks="processes", deadline=300.0)
    for rank in (0, 2):
        kind, peers, waited = (tmp_path / f"{rank}").read_text().split()
        assert (kind, peers) == ("PeerLost", "(1,)")
        assert float(waited) < 60.0


def returns_soon(group):
    layer = spec("moe", experts="reference")
    built = build(ty.plan([layer], group, exchange="one_sided"), "moe")
    x_TH, routes = batch(layer, 5, seed=group.rank)
    built(x_TH, routes)
    return None if group.rank == LOST else raised(built, x_TH, routes)


def test_a_thread_that_has_returned_is_missed_long_before_the_deadline():
    first, _, third = ty.launch(3, returns_soon, deadline=300.0)
    for error in (first, third):
        assert error.peers == (LOST,)
        assert error.waited < 60.0
