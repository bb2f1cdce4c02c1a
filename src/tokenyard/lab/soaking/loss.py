"""A rank goes, and a fresh one comes: killed at a random moment under load, gone on without, and replaced.

    survivors   round trips … PeerLost ─► go_on_without ─► round trips ─► readmit ─┬─► the bits of before
    fresh rank                             (a process starts)    the same plan ────┘

A thread cannot be killed: it leaves in the middle of its work, and comes back as a stranger.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NoReturn

from torch import Tensor

from tokenyard.conformance.cases import same_bits
from tokenyard.errors import PeerLost
from tokenyard.group import Group, ThreadGroup, rejoin
from tokenyard.lab.soaking.episodes import Episode, Tally, any_batch, draw_layers, go
from tokenyard.lab.soaking.run_folder import RunFolder
from tokenyard.lab.soaking.serving import Batch, Served, named
from tokenyard.lab.soaking.settings import Settings
from tokenyard.planning.planner import Plan, plan

# Seconds. Where nothing but the clock tells that a rank is gone, the others wait so long; nobody computes for as long.
_LOSS_DEADLINE = 10.0
# Seconds under load before a rank is killed, at most: some hundred round trips.
_LONGEST_LIFE = 0.5
_LAYERS = 2


class _Stage:
    """The layers under load, with a batch each whose result is known."""

    def __init__(self, group: Group, episode: Episode, tally: Tally) -> None:
        cases = draw_layers(episode, group.size, _LAYERS)
        specs = [named(case, f"layer {place}") for place, case in enumerate(cases)]
        self.plan: Plan = plan(specs, group, exchange=episode.exchange)
        self.tally = tally
        self.served = [Served(self.plan, case, spec.name) for case, spec in zip(cases, specs, strict=True)]
        self.batches: list[Batch] = [one.batch(one.case.tokens, one.case.seed) for one in self.served]
        self.results: list[Tensor] = []
        for served, batch in zip(self.served, self.batches, strict=True):
            self.results.append(served(batch))
            tally.round_trips += 1
            tally.check(served.complaint(batch, self.results[-1]))

    def go(self) -> None:
        """A round trip of each layer, with the bits of the first."""
        for served, batch, known in zip(self.served, self.batches, self.results, strict=True):
            y_TH = served(batch)
            self.tally.round_trips += 1
            same = same_bits(y_TH, known)
            self.tally.check(None if same else f"layer {served.name!r}, {batch.case}: other bits than before")


def lose_a_rank(
    group: Group, settings: Settings, episode: Episode, run_folder: RunFolder, tally: Tally
) -> Group:
    """Live through a loss; return the group that is whole again."""
    chance = episode.chance
    lost = chance.randrange(1, group.size)
    group.deadline = min(_LOSS_DEADLINE, settings.deadline)
    stage = _Stage(group, episode, tally)
    if group.rank == 0:
        run_folder.expect(episode.number)
    group.barrier(phase="before a loss")
    moment = time.monotonic() + chance.uniform(0, _LONGEST_LIFE)
    if group.rank == lost:
        if isinstance(group, ThreadGroup):
            return _leave(group, stage, moment, settings, episode, tally)
        _die(stage, moment)
    error = _go_until_lost(stage, settings.deadline)
    if error is None or lost not in error.peers:
        tally.check(f"rank {lost} was killed, and the error of this rank is: {error}")
    stage.plan.go_on_without([lost])
    for served in stage.served:
        go(served, any_batch(served, chance), tally)
    stage.plan.readmit()
    stage.go()
    return _whole_again(group, stage, settings)


def join(group: Group, settings: Settings, episode: Episode, tally: Tally) -> Group:
    """Take the place of the rank that was lost. In its first round trips the others see their old bits."""
    return _whole_again(group, _Stage(group, episode, tally), settings)


def _whole_again(old: Group, stage: _Stage, settings: Settings) -> Group:
    """Back to work, with nothing left of the group that was broken."""
    group = stage.plan.group
    stage.plan.close()
    if group is not old:
        old.close()
    group.deadline = settings.deadline
    return group


def _go_until_lost(stage: _Stage, seconds: float) -> PeerLost | None:
    """Round trips, until one of them ends with a loss."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            stage.go()
        except PeerLost as error:
            return error
    return None


def _die(stage: _Stage, moment: float) -> NoReturn:
    """Work until killed, wherever this process is then."""
    timer = threading.Timer(max(0.0, moment - time.monotonic()), os.kill, args=(os.getpid(), signal.SIGKILL))
    timer.start()
    while True:
        stage.go()


def _leave(
    group: ThreadGroup, stage: _Stage, moment: float, settings: Settings, episode: Episode, tally: Tally
) -> Group:
    """Work for a while, go without a word, and come back as somebody else."""
    while time.monotonic() < moment:
        stage.go()
    stage.plan.close()
    group.leave("it was told to")
    fresh = rejoin(group.address, rank=group.rank)
    return join(fresh, settings, episode, tally)
