"""What every exchange must do when a rank fails: all ranks raise, in the same call, and the next round is right."""

from __future__ import annotations

import torch

from tokenyard.conformance.exchange_layers import CheckedLayers, before_compute, failing, must_raise
from tokenyard.conformance.exchange_suite import Batch, Trial, layer
from tokenyard.conformance.runner import expect
from tokenyard.errors import Drifted, InputError, PeerFailed


def over_capacity(trial: Trial) -> None:
    """Too many tokens on one rank is an error on every rank, and the next round is right again."""
    spec = layer(max_tokens=4, payloads=())
    stack = CheckedLayers(trial, (spec,))
    _fails_on_one_rank(stack, trial.batch(spec, 5), "5 tokens of at most 4")


def bad_input_reaches_all(trial: Trial) -> None:
    """An id that no expert has, on one rank, is an error on every rank, and the next round is right again."""
    spec = layer(payloads=())
    stack = CheckedLayers(trial, (spec,))
    mine = trial.batch(spec, 3)
    bad = mine.with_ids(torch.full_like(mine.routes.topk_ids_TK, spec.num_experts))
    _fails_on_one_rank(stack, bad, f"expert id {spec.num_experts} of {spec.num_experts}")


def _fails_on_one_rank(stack: CheckedLayers, bad: Batch, what: str) -> None:
    """The last rank brings a bad batch: it raises `InputError`, the others `PeerFailed`; then all goes on."""
    failing_rank = stack.plan.group.size - 1
    fails_here = stack.plan.group.rank == failing_rank
    good = stack.batch("moe")
    mine = bad if fails_here else good
    when = f"{what} on {'this rank' if fails_here else f'rank {failing_rank}'}"
    kind = InputError if fails_here else PeerFailed
    error = must_raise(kind, stack.layers["moe"], mine.x_TH, mine.routes, when=when)
    _check_peer_named(error, failing_rank)
    stack.check("moe", "after an error")


def _check_peer_named(error: Exception, failing_rank: int) -> None:
    if isinstance(error, PeerFailed):
        fine = error.peer == failing_rank
        expect(fine, f"PeerFailed names rank {error.peer}", f"rank {failing_rank}, which failed")


def errors_come_in_their_phase(trial: Trial) -> None:
    """An error in a batch is raised in its dispatch, before any rank computes; one of experts, in the combine."""
    stack = CheckedLayers(trial, (layer(payloads=()),))
    last = trial.group.size - 1
    fails_here, experts, mine = trial.group.rank == last, stack.layers["moe"].experts, stack.batch("moe")
    bad = mine.with_ids(mine.routes.topk_ids_TK + 6) if fails_here else mine
    computed: list[int] = []
    with before_compute(experts, lambda received: computed.append(received.num_rows)):
        kind: type[Exception] = InputError if fails_here else PeerFailed
        _fails_in("dispatch", kind, stack, bad)
        expect(
            not computed, f"experts computed {computed} rows of a batch that failed", "an error before them"
        )
    with failing(experts, fails_here) as kind:
        _fails_in("combine", kind, stack, mine)
    stack.check("moe", "after two errors")


def _fails_in(phase: str, kind: type[Exception], stack: CheckedLayers, given: Batch) -> None:
    error = must_raise(kind, stack.run, "moe", given, when=f"an error in {phase}")
    if isinstance(error, PeerFailed):
        expect(error.phase == phase, f"PeerFailed was raised in {error.phase!r}", repr(phase))


def failing_experts_reach_all(trial: Trial) -> None:
    """Experts that raise on one rank, after dispatch, are an error on every rank, and the next round is right."""
    stack = CheckedLayers(trial, (layer(payloads=()),))
    with failing(stack.layers["moe"].experts, trial.group.rank == 0) as kind:
        mine = stack.batch("moe")
        error = must_raise(kind, stack.run, "moe", mine, when="experts that fail on rank 0")
    _check_peer_named(error, 0)
    stack.check("moe", "after an error")


def drifted_ranks(trial: Trial) -> None:
    """Ranks that call different layers all raise, and the next round is right again."""
    if trial.group.size == 1:
        return
    stack = CheckedLayers(trial, (layer("moe", payloads=()), layer("other", payloads=())))
    called = "other" if trial.group.rank == 1 else "moe"
    must_raise(Drifted, stack.run, called, stack.batch(called), when="rank 1 in another layer")
    stack.check("moe", "after a drift")
