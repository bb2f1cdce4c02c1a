"""An episode that loses a rank: it is killed at a random moment, the others go on, and a new rank replaces it.

    survivors   round trips … PeerLost ─► go_on_without ─► round trips ─► readmit ─┬─► the bits of before
    fresh rank                             (a process starts)    the same plan ────┘

A thread cannot be killed: instead it leaves the group in the middle of its work, and joins again as a new rank.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NoReturn

from tokenyard.errors import PeerLost
from tokenyard.group import Group, ThreadGroup, rejoin
from tokenyard_lab.soaking.episodes import Episode, KnownLayers, Tally, any_batch, draw_layers, go
from tokenyard_lab.soaking.run_folder import RunFolder
from tokenyard_lab.soaking.settings import Settings

# Seconds after which the others notice a loss by the deadline alone. No rank computes for as long.
_LOSS_DEADLINE = 10.0
# Seconds under load before a rank is killed, at most: some hundred round trips.
_LONGEST_LIFE = 0.5
_LAYERS = 2


def _layers(group: Group, episode: Episode, tally: Tally) -> KnownLayers:
    """The layers under load, after their first round trips."""
    layers = KnownLayers(group, episode.exchange, draw_layers(episode, group, _LAYERS), "layer")
    layers.go(tally)
    return layers


def lose_a_rank(
    group: Group, settings: Settings, episode: Episode, run_folder: RunFolder, tally: Tally
) -> Group:
    """Lose a rank, go on without it, and readmit a new one; return the new group."""
    chance = episode.chance
    lost = chance.randrange(1, group.size)
    group.deadline = min(_LOSS_DEADLINE, settings.deadline)
    layers = _layers(group, episode, tally)
    if group.rank == 0:
        run_folder.expect_episode(episode.number)
    group.barrier(phase="before a loss")
    moment = time.monotonic() + chance.uniform(0, _LONGEST_LIFE)
    if group.rank == lost:
        if isinstance(group, ThreadGroup):
            return _leave(group, layers, moment, settings, episode, tally)
        _die(layers, moment, tally)
    error = _go_until_lost(layers, settings.deadline, tally)
    if error is None or lost not in error.peers:
        tally.check(f"rank {lost} was killed, and the error of this rank is: {error}")
    layers.plan.go_on_without([lost])
    for served in layers.served:
        go(served, any_batch(served, chance), tally)
    layers.plan.readmit()
    layers.go(tally)
    return _whole_again(group, layers, settings)


def join(group: Group, settings: Settings, episode: Episode, tally: Tally) -> Group:
    """Take the place of the rank that was lost. Its first round trips must give the other ranks the bits of before."""
    return _whole_again(group, _layers(group, episode, tally), settings)


def _whole_again(old: Group, layers: KnownLayers, settings: Settings) -> Group:
    """Close the plan and the broken group; return the group that has all ranks again."""
    group = layers.plan.group
    layers.plan.close()
    if group is not old:
        old.close()
    group.deadline = settings.deadline
    return group


def _go_until_lost(layers: KnownLayers, seconds: float, tally: Tally) -> PeerLost | None:
    """Make round trips until one raises a loss; return it, or None if none did in these seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            layers.go(tally)
        except PeerLost as error:
            return error
    return None


def _die(layers: KnownLayers, moment: float, tally: Tally) -> NoReturn:
    """Make round trips until this process is killed."""
    timer = threading.Timer(max(0.0, moment - time.monotonic()), os.kill, args=(os.getpid(), signal.SIGKILL))
    timer.start()
    while True:
        layers.go(tally)


def _leave(
    group: ThreadGroup, layers: KnownLayers, moment: float, settings: Settings, episode: Episode, tally: Tally
) -> Group:
    """Make some round trips, leave the group, and join it again as a new rank."""
    while time.monotonic() < moment:
        layers.go(tally)
    layers.plan.close()
    group.leave("the soak lets this rank leave")
    fresh = rejoin(group.address, rank=group.rank)
    return join(fresh, settings, episode, tally)
