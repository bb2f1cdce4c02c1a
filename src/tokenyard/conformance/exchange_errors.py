"""What every exchange must do when a rank fails: all ranks raise, in the same call, and the next round is right."""

from __future__ import annotations

import torch

from tokenyard.conformance.exchange_layers import CheckedLayers, must_raise
from tokenyard.conformance.exchange_suite import Batch, Trial, layer
from tokenyard.conformance.runner import expect
from tokenyard.errors import Drifted, InputError, PeerFailed
from tokenyard.rows import ExpertRows, ReceivedRows


def over_capacity(trial: Trial) -> None:
    """Too many tokens on one rank is an error on every rank, and the next round is right again."""
    spec = layer(max_tokens=4, payloads=())
    stack = CheckedLayers(trial, (spec,))
    _fails_on_one_rank(trial, stack, trial.batch(spec, 5), InputError, "5 tokens of at most 4")


def bad_input_reaches_all(trial: Trial) -> None:
    """An id that no expert has, on one rank, is an error on every rank, and the next round is right again."""
    spec = layer(payloads=())
    stack = CheckedLayers(trial, (spec,))
    mine = trial.batch(spec, 3)
    bad = mine.with_ids(torch.full_like(mine.routes.topk_ids_TK, spec.num_experts))
    _fails_on_one_rank(trial, stack, bad, InputError, f"expert id {spec.num_experts} of {spec.num_experts}")


def _fails_on_one_rank(
    trial: Trial, stack: CheckedLayers, bad: Batch, kind: type[Exception], what: str
) -> None:
    """The last rank brings a bad batch: it raises `kind`, the others `PeerFailed`; then all goes on."""
    culprit = trial.group.size - 1
    guilty = trial.group.rank == culprit
    good = stack.batch("moe")
    mine = bad if guilty else good
    when = f"{what} on {'this rank' if guilty else f'rank {culprit}'}"
    error = must_raise(kind if guilty else PeerFailed, stack.layers["moe"], mine.x_TH, mine.routes, when=when)
    _names(error, culprit)
    stack.check("moe", "after an error")


def _names(error: Exception, culprit: int) -> None:
    if isinstance(error, PeerFailed):
        expect(error.peer == culprit, f"PeerFailed names rank {error.peer}", f"rank {culprit}, which failed")


def failing_experts_reach_all(trial: Trial) -> None:
    """Experts that raise on one rank, after dispatch, are an error on every rank, and the next round is right."""
    stack = CheckedLayers(trial, (layer(payloads=()),))
    guilty = trial.group.rank == 0
    experts = stack.layers["moe"].experts
    compute = experts.compute

    def fail(received: ReceivedRows, *, finalize: bool) -> ExpertRows:
        raise ZeroDivisionError("these experts fail")

    if guilty:
        object.__setattr__(experts, "compute", fail)
    kind = ZeroDivisionError if guilty else PeerFailed
    _names(must_raise(kind, stack.run, "moe", stack.batch("moe"), when="experts that fail on rank 0"), 0)
    if guilty:
        object.__setattr__(experts, "compute", compute)
    stack.check("moe", "after an error")


def drifted_ranks(trial: Trial) -> None:
    """Ranks that call different layers all raise, and the next round is right again."""
    if trial.group.size == 1:
        return
    stack = CheckedLayers(trial, (layer("moe", payloads=()), layer("other", payloads=())))
    astray = "other" if trial.group.rank == 1 else "moe"
    must_raise(Drifted, stack.run, astray, stack.batch(astray), when="rank 1 in another layer")
    stack.check("moe", "after a drift")
