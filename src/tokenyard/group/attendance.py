"""Attendance: when a rank was awake in its waits, as it can prove, and which ranks have kept others waiting.

A rank that was stopped inside a wait, and continued, looks like one that has waited all the time. Therefore a rank that
waits looks at the clock at least every 0.1 s. Time between two looks that is much longer is a *gap*: the rank was
stopped, or got no core. Between two waits a rank computes, or is stopped: that is a gap, too, up to the moment when it
has sent its part of a collective, and the others no longer wait for it.

When a wait has failed, every rank gives its *evidence*: since when it waits, for which collective, and its last gaps.
From all of it follows for how long a rank has kept another one waiting that was awake. Only a rank that did so
for a whole deadline is late; if there is none, as on a busy machine, one that did so for half of it. Ranks that are
not to blame have gaps, too, but shorter ones: a rank whose gap is shorter than the longest by more than a tenth is not
blamed. The time for which a rank was ready to run and got no core, as the kernel counts it, does not count.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

# Seconds between two looks of a rank that waits.
LOOK = 0.1
# Seconds between two looks from which on it is a gap: in a wait, and between two waits.
_GAP_IN_WAIT, _GAP_BETWEEN = 2 * LOOK, 0.02
# Gaps that a rank remembers: evidence is given soon after the wait that failed.
_REMEMBERED = 32
# Seconds by which the times of evidence may be wrong; for short deadlines, at most a third of the deadline.
_UNSURE = 0.1
# Part of the deadline for which a rank must have kept others waiting to be blamed, if none did so for all of it.
_LEAST = 0.5
# Part of the longest gap that another one must have for its rank to be blamed, too.
_ALIKE = 0.9


class Gap(NamedTuple):
    """Time in which a rank has not looked."""

    start: float
    end: float
    sent: int | None  # collectives that it had sent its part of; None for a gap in a wait
    starved: float = 0.0  # seconds of it in which it was ready to run, and got no core

    def since(self, moment: float) -> float:
        """Seconds of the gap, less those without a core; of a gap between waits, those after a moment."""
        start = self.start if self.sent is None else max(self.start, moment)
        return self.end - start - self.starved


class Attendance:
    """The looks of one rank in a group. Looks in its subgroups count in it, too: their `parent` is this object."""

    def __init__(self, parent: Attendance | None = None) -> None:
        self.sent = 0  # collectives that this rank has sent its part of
        self._parent = parent
        self._last, self._waits = time.monotonic(), False
        self._gaps: deque[Gap] = deque(maxlen=_REMEMBERED)
        # The thread that asked the kernel last, when, and how long it had waited for a core until then.
        self._thread, self._asked, self._starved = 0, -math.inf, 0.0

    def look(self, *, waits: bool | None = None) -> None:
        """Note that this rank is awake, and whether it waits for others from now on; left out, that stays as it is."""
        now = time.monotonic()
        is_gap = now - self._last > (_GAP_IN_WAIT if self._waits else _GAP_BETWEEN)
        if is_gap or now - self._asked > LOOK:
            thread, before = self._thread, self._starved
            self._thread, self._asked, self._starved = threading.get_ident(), now, _waited_for_a_core()
            if is_gap:
                starved = self._starved - before if thread == self._thread else 0.0
                self._gaps.append(Gap(self._last, now, None if self._waits else self.sent, starved))
        self._last = now
        if waits is not None:
            self._waits = waits
        if self._parent is not None:
            self._parent.look(waits=waits)

    def was_awake(self, seconds: float) -> None:
        """Note that this rank was awake for these seconds until now, in a wait without looks, such as one on a GPU."""
        now = time.monotonic()
        if now - seconds - self._last > _GAP_BETWEEN:
            self._gaps.append(Gap(self._last, now - seconds, self.sent))
        self._last = now

    @property
    def longest_gap(self) -> float:
        """Seconds of the longest gap in a wait that is remembered; 0.0, if there is none."""
        return max((gap.end - gap.start for gap in self._gaps if gap.sent is None), default=0.0)

    def evidence(
        self,
        *,
        phase: str,
        waited: float,
        deadline: float = math.inf,
        number: int | None = None,
        missing: Sequence[int] = (),
    ) -> Evidence:
        """The evidence of this rank, which has waited for `waited` seconds; the other arguments are fields of it."""
        now = time.monotonic()
        return Evidence(
            phase=phase,
            deadline=deadline,
            number=number,
            clock=this_clock(),
            began=now - waited,
            now=now,
            gaps=tuple(self._gaps),
            missing=tuple(missing),
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a rank says of itself when a wait has failed. Times are those of a monotonic clock."""

    phase: str  # that it waits in
    deadline: float = math.inf  # seconds that it may wait
    number: int | None = None  # of the collective that it waits for, from 1; None if it is none
    clock: str = ""  # the name of its clock: times by clocks with one name can be compared
    began: float  # when its wait began
    now: float  # when it gave this evidence
    gaps: tuple[Gap, ...] = ()
    missing: tuple[int, ...] = ()  # ranks that it has missed outside of collectives, as in shared memory

    def encode(self) -> str:
        """The text that is written into the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, encoded: bytes) -> Evidence:
        """The evidence that a text from the store holds."""
        found = json.loads(encoded)
        found["gaps"] = tuple(Gap(*gap) for gap in found["gaps"])
        return cls(**(found | {"missing": tuple(found["missing"])}))

    def later(self, seconds: float) -> Evidence:
        """The same evidence by another clock, which is `seconds` ahead of this one."""
        gaps = tuple(gap._replace(start=gap.start + seconds, end=gap.end + seconds) for gap in self.gaps)
        return replace(self, began=self.began + seconds, now=self.now + seconds, gaps=gaps)

    @property
    def stopped(self) -> float:
        """Seconds of its wait in which this rank was stopped, without those in which it had no core."""
        in_wait = [gap for gap in self.gaps if gap.sent is None]
        return sum(max(0.0, _overlap(gap, self.began, self.now) - gap.starved) for gap in in_wait)

    def waited_for(self, other: Evidence, *, strictly: bool = True) -> tuple[float, float]:
        """Seconds that this rank was in its wait during a gap of the other one, and the length of that gap.

        It is the longest such gap; while the other computed, from when this rank began to wait. `strictly`: gaps
        between two waits do not count once the other had sent what this rank waits for, and this one must have been
        awake.
        """
        found = [(0.0, 0.0)]
        for gap in other.gaps:
            if gap.sent is None or self.number is None or gap.sent < self.number or not strictly:
                awake = _overlap(gap, self.began, self.now) - gap.starved
                for own in self.gaps if strictly else ():
                    if own.starved < (own.end - own.start) / 2:
                        awake -= _overlap(gap, max(own.start, self.began), min(own.end, self.now))
                found.append((awake, gap.since(self.began)))
        return max(found)


def _overlap(gap: Gap, start: float, end: float) -> float:
    """Seconds of a gap that are between two moments."""
    return max(0.0, min(gap.end, end) - max(gap.start, start))


def surely_late(by_rank: Mapping[int, Evidence]) -> list[int]:
    """The ranks that have kept another rank waiting for that one's deadline.

    >>> waits = Evidence(phase="dispatch", deadline=1.0, number=7, began=10.0, now=11.0)
    >>> stopped = replace(waits, now=11.5, gaps=(Gap(10.01, 11.5, sent=None),))
    >>> computed = replace(waits, began=11.0, now=11.5, gaps=(Gap(10.05, 11.0, sent=6),))
    >>> surely_late({0: waits, 1: stopped, 2: computed, 3: waits})
    [1]
    """
    return _longest(by_rank, lambda deadline: deadline - min(_UNSURE, deadline / 3), strictly=True)


def late(by_rank: Mapping[int, Evidence]) -> list[int]:
    """The ranks that are surely late; if there are none, those that kept another one waiting for half its deadline.

    >>> waits = Evidence(phase="dispatch", deadline=1.0, number=7, began=10.0, now=11.0)
    >>> stopped = replace(waits, now=11.5, gaps=(Gap(10.3, 11.5, sent=None),))
    >>> late({0: waits, 1: stopped, 2: waits}), late({0: waits, 1: waits})
    ([1], [])
    """
    return surely_late(by_rank) or _longest(by_rank, lambda deadline: _LEAST * deadline, strictly=False)


def only_stopped(by_rank: Mapping[int, Evidence]) -> list[int]:
    """The ranks that were stopped for half their deadline in their wait, if no rank was awake for as long in its own.

    What such ranks say of others that do not answer is worth nothing: these may have gone on meanwhile.

    >>> stopped = Evidence(phase="barrier", deadline=1.0, began=10.0, now=11.5, gaps=(Gap(10.01, 11.5, sent=None),))
    >>> only_stopped({1: stopped}), only_stopped({1: stopped, 2: replace(stopped, gaps=())})
    ([1], [])
    """
    awake = {rank: one.now - one.began - one.stopped for rank, one in by_rank.items()}
    if any(seconds > _LEAST * by_rank[rank].deadline for rank, seconds in awake.items()):
        return []
    return sorted(rank for rank, one in by_rank.items() if one.stopped > _LEAST * one.deadline)


def _longest(
    by_rank: Mapping[int, Evidence], least: Callable[[float], float], *, strictly: bool
) -> list[int]:
    """The ranks that kept another one waiting for longer than the least time, and whose gaps are about the longest."""
    gaps: dict[int, float] = {}
    for rank, suspect in by_rank.items():
        for one, waiter in by_rank.items():
            awake, gap = waiter.waited_for(suspect, strictly=strictly)
            if one != rank and awake > least(waiter.deadline):
                gaps[rank] = max(gap, gaps.get(rank, 0.0))
    return sorted(rank for rank, gap in gaps.items() if gap >= _ALIKE * max(gaps.values()))


def _waited_for_a_core() -> float:
    """Seconds for which this thread has been ready to run and got no core; 0.0 where the kernel does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def this_clock() -> str:
    """The name of this process's monotonic clock: that of the machine since it was started, in a time namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return f"{os.uname().nodename}/{os.getpid()}"
