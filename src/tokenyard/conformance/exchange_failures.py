"""What every exchange must do when a rank fails or is lost.

If a rank fails, all ranks raise, in the same call, and the next round is right. After a rank was lost, no call gives a
result until the plan goes on without the rank.

A rank that is late by more than the deadline may still answer. Its rows of one batch must never be mistaken for rows of
its next batch. To test this, ranks keep calling after the loss: some at once, some after the late rank has come. A
result that is returned must be right, and after `PeerLost` no call may return one.

Each check of a loss has a group of its own, of all ranks, with a short deadline, so that it does not break the group of
the other checks. They run on CPUs only: on a GPU, kernels wait for the deadline of their plan, which is too long here.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from tokenyard.conformance.exchange_layers import CheckedLayers, before_compute, failing, must_raise
from tokenyard.conformance.exchange_suite import Batch, Trial, layer, send
from tokenyard.conformance.runner import Finding, expect
from tokenyard.errors import Drifted, InputError, PeerFailed, PeerLost, PlanBroken
from tokenyard.planning import gather_stats
from tokenyard.rows import ReceivedRows

# Seconds. Short, since the ranks do nothing but wait.
DEADLINE = 0.4
BEYOND = 0.3  # by which a rank comes after the deadline
LATENESS = DEADLINE + BEYOND
PATIENCE = 20.0  # for steps that are not under test
_CALLS = 1000  # at most, until a rank is stopped; each takes milliseconds


# -- A rank that fails ---------------------------------------------------------------------------------------


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


# -- A rank that is lost -------------------------------------------------------------------------------------


class _Losing:
    """One layer on a group of all ranks, of which the last one will be late."""

    def __init__(self, trial: Trial) -> None:
        self.group = trial.group.subgroup(range(trial.group.size))
        self.is_late = self.group.rank == self.group.size - 1
        with self.group.patience(PATIENCE):
            self.stack = CheckedLayers(replace(trial, group=self.group), (layer(payloads=()),))
            self.stack.check("moe", "before a rank is lost")
            self.group.barrier()
        self.group.deadline = DEADLINE

    def call(self, when: str) -> PeerLost | None:
        """Call the layer once; return the loss that it raised, or None if its result was right."""
        try:
            self.stack.check("moe", when)
        except PeerLost as error:
            return error
        return None

    def first_loss(self, calls: int) -> PeerLost:
        """Call the layer up to `calls` times; return the first loss, which must come within the deadline."""
        for _ in range(calls):
            started = time.monotonic()
            loss = self.call(f"with a rank that is {BEYOND} s later than the deadline")
            waited = time.monotonic() - started
            if loss is not None:
                # The deadline, a second to find out which rank is lost, and more for a machine that is busy.
                fine = waited < LATENESS + PATIENCE / 2
                expect(fine, f"PeerLost came after {waited:.1f} s", f"the deadline, {DEADLINE} s")
                return loss
        raise Finding(f"a rank was {BEYOND} s later than the deadline, and no call raised", "PeerLost")

    def stays_broken(self) -> None:
        """Check that every call after the loss raises `PlanBroken`, also if it is made later."""
        if self.group.rank % 2:
            time.sleep(2 * BEYOND)
        spec, made = self.stack.plan.wiring("moe").spec, self.stack.plan
        for _ in range(2):
            self._must_be_broken(self.stack.check, "moe", "after PeerLost", what="a call of a layer")
        self._must_be_broken(send, made, spec, self.stack.batch("moe"), what="a dispatch")
        self._must_be_broken(made.extend, [layer("more")], what="plan.extend")
        self._must_be_broken(gather_stats, made, what="gather_stats")

    def _must_be_broken(self, fn: Callable[..., Any], *arguments: Any, what: str) -> None:
        must_raise(PlanBroken, fn, *arguments, when=f"{what} after PeerLost")

    def goes_on(self, loss: PeerLost) -> None:
        """Check that the other ranks can go on without the late one, and get right results."""
        if loss.peers == (self.group.size - 1,) and not self.is_late:
            with self.group.patience(PATIENCE):
                self.stack.plan.go_on_without(loss.peers)
                self.stack.check("moe", "after the plan has gone on without the late rank")

    def close(self) -> None:
        self.stack.plan.close()
        self.group.close()


def late_in_dispatch(trial: Trial) -> None:
    """A rank that comes too late to a dispatch is lost. The plan is broken, until it goes on without that rank."""
    if trial.group.size == 1 or trial.group.device.type != "cpu":
        return
    with closing(_Losing(trial)) as losing:
        if losing.is_late:
            time.sleep(LATENESS)
        # The late rank's first call may succeed: others may have sent all that it needs before they gave it up.
        loss = losing.first_loss(calls=2 if losing.is_late else 1)
        losing.stays_broken()
        losing.goes_on(loss)


def late_in_combine(trial: Trial) -> None:
    """A rank whose experts take too long is lost in the combine, and the plan is broken."""
    if trial.group.size == 1 or trial.group.device.type != "cpu":
        return
    with closing(_Losing(trial)) as losing:
        seconds = [LATENESS] if losing.is_late else []

        def be_late(received: ReceivedRows) -> None:
            time.sleep(seconds.pop() if seconds else 0.0)  # once

        with before_compute(losing.stack.layers["moe"].experts, be_late):
            losing.first_loss(calls=2 if losing.is_late else 1)
            losing.stays_broken()


def stopped_and_continued(trial: Trial) -> None:
    """A process that is stopped at any moment, and continued when the deadline is over, gives no rank a wrong row."""
    pids = trial.group.gather_json(os.getpid(), phase="looking for processes")
    if len(set(pids)) < max(2, trial.group.size) or trial.group.device.type != "cpu":
        return  # threads cannot be stopped; kernels go on without their process
    with closing(_Losing(trial)) as losing:
        if losing.is_late:
            pid = os.getpid()
            words = f"sleep 0.02; kill -STOP {pid}; sleep {LATENESS}; kill -CONT {pid}"
            with subprocess.Popen(["/bin/sh", "-c", words]):  # waits for it in the end
                losing.first_loss(calls=_CALLS)
        else:
            losing.first_loss(calls=_CALLS)
        losing.stays_broken()
