"""Flags and announcements in shared memory, by which ranks tell each other that rows or results are written.

Every rank has a control region in its workspace, which all ranks map:

    state     what this rank waits for now, as a flag, and in which turn; 0 while it does not wait
    mark      behind it: the last round whose results this rank has in their place, if these are not announced here
    verdict   non-zero once a rank is given up, or has left; behind it, a byte for each rank, 1 if it is that rank
    mail      for each turn, phase and source rank: a flag (a cache line of its own) and an announcement
    counts    for each turn: what this rank announces to all in a dispatch whose rows have a bound

**Flags carry epoch, layer and phase.** A flag is one aligned 64-bit word, `round · 2^24 + layer · 4 + phase`. Rounds
only grow, so a flag is never reset, and the flag of an earlier round cannot be taken for this one. A rank whose flag
has the right round and another layer has drifted.

**Turns.** All ranks take part in every dispatch and every combine, even if only to announce that they failed. Each
phase has mail for two rounds, used in turn. Between two rounds of the same turn a rank received announcements from all
others, which they made after they had read its mail of the earlier one. So mail is never overwritten before it was
read, even if rounds fail.

**Order.** Data is written before its flag and read after it. On x86 plain aligned stores become visible in program
order, and plain loads are done in program order, so that is enough; elsewhere it is not, and Python has no fence, so
`declarations.reaches` refuses. A flag must be written in one piece: a store through `memoryview`, ctypes, numpy or
torch is (no torn read in 10 million), `struct.pack_into` is not (9% of reads were torn).

**Waiting** yields the core at once and then sleeps, longer each time, up to a fifth of a millisecond: four ranks on two
cores must not burn each other's time.

**Giving up.** Waits end at the group's deadline, counted from entering the wait, or as soon as the process of a missing
rank is seen to have ended. The first rank whose wait ends in this way decides which ranks are lost, and writes the
verdict into every rank's control region. The others find it there and raise the same error, also a late rank whose mail
is complete by now. A missing rank that itself waits for a third one is not lost: its state says what it waits for, and
its mail whether that has come.

**Ranks in different plans** wait in different control regions. A rank that waits for long looks whether one that it
misses waits for it in another plan of the group, and puts its announcement there. That rank sees the other plan's
number in it, and both raise `Drifted`.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from tokenyard.exchange.announcement import ANNOUNCEMENT_BYTES, Announcement, Phase
from tokenyard.group.base import Group

_LINE = 128  # bytes: a cache line and its neighbor, which x86 fetches together
_MAIL = _LINE + ANNOUNCEMENT_BYTES
_PHASES = list(Phase)
_TURNS = 2
_MARK = 2  # the word of a control region behind the state
# What a verdict says of the ranks that it marks: they are lost, or they have left.
_LOSS, _DEPARTURE = 1, 2
# Tries with the core given away in between, before the first sleep.
_YIELDS = 30
# Seconds between two looks at who is gone for good.
_LOOK = 0.1
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 200e-6  # seconds


def control_bytes(world: int) -> int:
    """Bytes of a rank's control region."""
    return 2 * _LINE + _lost_bytes(world) + _TURNS * (2 * world * _MAIL + _counts_bytes(world))


def _lost_bytes(world: int) -> int:
    return -(-world // _LINE) * _LINE


def _counts_bytes(world: int) -> int:
    """Two counts for each rank: of this pass, and of later ones."""
    return -(-2 * 8 * world // _LINE) * _LINE


def flag(layer: int, phase: Phase, round: int) -> int:
    """The word that says where a rank is.

    >>> flag(3, Phase.COMBINE, 17) == 17 * 2**24 + 3 * 4 + 1
    True
    """
    return (round << 24) | (layer << 2) | _PHASES.index(phase)


# The signals of all plans of a group.
_of_group: WeakKeyDictionary[Group, WeakSet[Signals]] = WeakKeyDictionary()


class Signals:
    """Writes and reads the control regions of all ranks, for one rank."""

    def __init__(self, controls: Sequence[Tensor], group: Group) -> None:
        self.rank, self.world = group.rank, group.size
        self.left = False  # whether this rank has told the others that it is in another plan
        self._group = group
        self._meetings = dict.fromkeys(Phase, 0)  # by phase: how often all ranks were heard
        self._controls = list(controls)
        self._bytes = [memoryview(control.numpy().data) for control in controls]
        # A store through a memoryview of 64-bit words is one store of the machine.
        self._words = [view.cast("q") for view in self._bytes]
        self._heard_at = 2 * _LINE + _lost_bytes(self.world)
        self._all_plans = _of_group.setdefault(group, WeakSet())
        self._all_plans.add(self)

    # -- Words of the control region -----------------------------------------------------------------------

    def _state(self, rank: int) -> tuple[int, int]:
        return self._words[rank][0], self._words[rank][1]

    def _set_state(self, value: int, turn: int = 0) -> None:
        self._words[self.rank][1] = turn
        self._words[self.rank][0] = value

    def _turn(self, phase: Phase) -> int:
        """The turn of a phase's mail that is in use now, or next."""
        return self._meetings[phase] % _TURNS

    def _mail_offset(self, phase: Phase, turn: int, source: int) -> int:
        return self._heard_at + ((turn * 2 + _PHASES.index(phase)) * self.world + source) * _MAIL

    def _flag_of(self, owner: int, phase: Phase, turn: int, source: int) -> int:
        return self._words[owner][self._mail_offset(phase, turn, source) // 8]

    # -- Telling and hearing -------------------------------------------------------------------------------

    def tell(self, target: int, mine: Announcement) -> None:
        """Put an announcement into a rank's mail, then its flag. What it announces must be written before."""
        self._put(target, mine.phase, self._turn(mine.phase), mine, flag(mine.layer, mine.phase, mine.round))

    def _put(self, target: int, phase: Phase, turn: int, mine: Announcement, word: int) -> None:
        offset = self._mail_offset(phase, turn, self.rank)
        self._bytes[target][offset + _LINE : offset + _MAIL] = mine.encode(ANNOUNCEMENT_BYTES)
        self._words[target][offset // 8] = word

    def publish_counts(self, mine: Announcement) -> None:
        """Write the counts of a dispatch into this rank's control region, for all ranks, before it is announced."""
        counts = self._counts_at(self._turn(mine.phase))
        self._words[self.rank][counts : counts + len(mine.counts)] = memoryview(array("q", mine.counts))

    def published_counts(self, phase: Phase, length: int) -> list[tuple[int, ...]]:
        """The counts that each rank published in the last round of a phase that was heard."""
        counts = self._counts_at(self._turn(phase) - 1)
        return [tuple(words[counts : counts + length]) for words in self._words]

    def _counts_at(self, turn: int) -> int:
        """The first word of the counts of a turn."""
        start = self._heard_at + _TURNS * 2 * self.world * _MAIL
        return (start + turn % _TURNS * _counts_bytes(self.world)) // 8

    def hear(self, mine: Announcement) -> list[Announcement]:
        """Wait for every rank's announcement of this phase of this round, and return them."""
        waiting, turn = flag(mine.layer, mine.phase, mine.round), self._turn(mine.phase)
        flags = [self._mail_offset(mine.phase, turn, source) // 8 for source in range(self.world)]
        words = self._words[self.rank]

        def all_there() -> bool:
            return all(words[index] >> 24 >= mine.round for index in flags)

        self._set_state(waiting, turn)
        try:
            self._wait(all_there, mine)
        finally:
            self._set_state(0)
        self._meetings[mine.phase] += 1
        mail = self._bytes[self.rank]
        heard = [
            Announcement.decode(bytes(mail[index * 8 + _LINE : index * 8 + _MAIL]), source)
            for source, index in enumerate(flags)
        ]
        elsewhere = [source for source, other in enumerate(heard) if other.plan != mine.plan]
        self._tell_in_other_plans(mine, elsewhere)
        return heard

    def _wait(self, ready: Callable[[], bool], mine: Announcement) -> None:
        started = looked = time.monotonic()
        pause, tries = _SHORTEST_SLEEP, 0
        self._group.look(waits=True)
        while not ready():
            if (tries := tries + 1) <= _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            half = self._group.deadline / 2
            if now - looked > max(
                half, 2 * _LOOK
            ):  # it was stopped: the others get half a deadline from now on
                started = max(started, now - half)
            waited, lost = now - started, self.lost()
            if not lost and now - looked > _LOOK:
                looked = now
                self._group.look()
                self._tell_in_other_plans(mine, self._missing(mine, range(self.world)))
                lost = self._give_up(mine, self._group.gone())
            if not lost and waited > self._group.deadline:
                lost = self._give_up(mine, range(self.world))
            if lost:
                raise self._group.lost(lost, phase=mine.phase.value, waited=waited)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_SLEEP)
        self._group.look(waits=False)
        # If there is a verdict, other ranks have given up, in this round or before, and take no further part.
        if lost := self.lost():
            raise self._group.lost(lost, phase=mine.phase.value, waited=time.monotonic() - started)

    def mark(self, round: int) -> None:
        """Mark in this rank's control region that its results of a round are in their place."""
        self._words[self.rank][_MARK] = round

    def all_marked(self, round: int, seconds: float) -> bool:
        """Wait until every rank has marked a round, or a later one; False if that takes more than so many seconds."""
        until, pause = time.monotonic() + seconds, _SHORTEST_SLEEP
        while not all(words[_MARK] >= round for words in self._words):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_SLEEP)
        return True

    # -- Giving up -----------------------------------------------------------------------------------------

    def lost(self) -> list[int]:
        """The ranks that the verdict in this rank's control region names; empty if there is no verdict."""
        if not self._words[self.rank][_LINE // 8]:
            return []
        lost = self._controls[self.rank][2 * _LINE : 2 * _LINE + self.world]
        return lost.nonzero().squeeze(1).tolist()

    def leave(self) -> None:
        """Write a verdict that this rank has left, though it is not lost: the waits of the others end."""
        self._publish([self.rank], _DEPARTURE)

    def departed(self) -> bool:
        """Whether the ranks that `lost` names have left, and are not lost."""
        return self._words[self.rank][_LINE // 8] == _DEPARTURE

    def _publish(self, ranks: Sequence[int], kind: int) -> None:
        """Write a verdict into every rank's control region, unless that already holds one."""
        marks = torch.zeros(self.world, dtype=torch.uint8)
        marks[list(ranks)] = 1
        for target in range(self.world):
            if not self._words[target][_LINE // 8]:
                self._controls[target][2 * _LINE : 2 * _LINE + self.world] = marks
                self._words[target][_LINE // 8] = kind

    def _missing(self, mine: Announcement, suspects: Iterable[int]) -> list[int]:
        """Those of the suspects whose announcement of a phase of a round has not come."""
        turn = self._turn(mine.phase)
        return [r for r in suspects if self._flag_of(self.rank, mine.phase, turn, r) >> 24 < mine.round]

    def _give_up(self, mine: Announcement, suspects: Iterable[int]) -> list[int]:
        """Decide which of the suspects are lost, and write the verdict; a rank whose announcement has come is not."""
        missing = self._missing(mine, suspects)
        lost = [r for r in missing if not self._waits_for_another(r)] or missing
        if not lost:
            return []
        self._publish(lost, _LOSS)
        return self.lost()

    def _waits_for_another(self, rank: int) -> bool:
        """Whether a missing rank is itself waiting, in any plan, for another rank that has not come."""
        others = [source for source in range(self.world) if source != rank]
        return any(plan._waits_for(rank, source) for plan in self._all_plans for source in others)

    def _waits_for(self, rank: int, source: int) -> bool:
        """Whether a rank waits in this plan for an announcement of `source` that has not come."""
        waiting, turn = self._state(rank)  # 0 where it does not wait: no flag is below that
        return self._flag_of(rank, _PHASES[waiting & 3], turn % _TURNS, source) >> 24 < waiting >> 24

    def _tell_in_other_plans(self, mine: Announcement, ranks: Sequence[int]) -> None:
        """Put this rank's announcement into the mail of those ranks that wait for it in another plan."""
        for plan in self._all_plans - {self} if ranks else ():
            for rank in ranks:
                if rank != self.rank and plan._waits_for(rank, self.rank):
                    waiting, turn = plan._state(rank)
                    plan._put(rank, _PHASES[waiting & 3], turn % _TURNS, mine, waiting)
                    plan.left = True  # the announcement there belongs to no round of that plan
