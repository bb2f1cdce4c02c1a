"""The failure detector: when a wait of a group has failed, the ranks find out together which ranks are lost.

torch.distributed reports at most that a connection closed, and often only to some of the ranks; the others wait on,
or are in another call already. A rank whose wait fails therefore asks all ranks to answer, through the store that the
group was made with. The others look there while they wait, and answer. Lost are

1. ranks whose process has ended, as a rank on the same host can see for itself; if there are none,
2. ranks that have kept the others waiting: that came too late to the wait, or were stopped in it. An answer says when
   its rank came, and when it was not awake (`attendance`). All ranks have a second to answer; if none was late,
3. ranks that have not answered within that second.

The first verdict in the store is final. Every rank raises the same error, and a stopped rank that wakes up reads there
that it was given up. A rank that computes for long while another one dies is not blamed, if a rank on the host of the
dead one waits. The store may be lost, too, with its host: a question to it takes two seconds at most, and without an
answer it is not known who is lost.

A rank that has given up others may end, and ranks that wait for it in another group then see the end of its process. It
therefore leaves a *note* in the store, which says whom it has given up, until it makes its next group. If one of these
belongs to the group that waits, that one is the cause, and not the rank that has left.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tokenyard.group.attendance import LOOK, Attendance, Evidence, late, only_stopped, surely_late, this_clock

Answer = TypeVar("Answer")

# torch does not declare its stores as exported.
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
# Seconds in which the other waiting ranks answer. They look for the question every `LOOK` seconds.
ANSWERING = 1.0
# Seconds that one look into the store may take: a round trip, on a busy machine. The store's own limit is that of
# finding each other, which is longer.
_STORE = 2.0
# Seconds after which ranks that wait ask a silent store again: its link may work again.
_AGAIN = 60.0
_PAUSE = 0.02
# A word that is never written into the store: `compare_set` returns it if the key does not exist.
_ABSENT = "absent"


def within(
    seconds: float, question: Callable[[], Answer], *, look: Callable[[], None] = lambda: None
) -> Answer:
    """The result of a question to a store; `TimeoutError` if it has not answered after this time.

    The client of a store waits without limit, even if the link is cut. Therefore a thread asks the question, and is
    abandoned if no answer comes. Meanwhile `look` is called repeatedly, and may raise. Time in which this process was
    stopped does not count: the thread that asks was stopped, too.
    """
    answers: queue.SimpleQueue[tuple[Answer, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="question", daemon=True).start()
    left = max(0.0, seconds)
    while True:
        started = time.monotonic()
        try:
            answer, error = answers.get(timeout=min(LOOK, left))
            break
        except queue.Empty:
            if left <= LOOK:
                raise TimeoutError(f"no answer within {seconds:.1f} s") from None
        look()
        left = max(0.0, left - min(time.monotonic() - started, 2 * LOOK))
    if error is not None:
        try:
            raise error
        finally:
            del error  # otherwise its traceback would keep the objects of these frames alive
    return cast("Answer", answer)


class FailureDetector:
    """Finds out with the other ranks of one group which ranks are lost, under keys of the store that only they use."""

    def __init__(
        self, store: Any, place: str, rank: int, size: int, host: str, attendance: Attendance | None = None
    ) -> None:
        self._store, self._answers, self._again = store, True, 0.0
        self._place = f"tokenyard/{place}/failures"
        self._rank, self._size, self._host = rank, size, host
        self._who: dict[int, tuple[str, int]] = {}
        self.attendance = attendance or Attendance()
        self.detail = ""  # what the verdict says besides the lost ranks: ranks that wait in different calls
        self._ask(self._register)

    def _register(self) -> None:
        # Keys of an earlier run may be there: torchrun restarts ranks on the same store.
        for stale in (self._key("called"), self._key("verdict"), self._key("here", self._rank)):
            self._store.delete_key(stale)
        underlying(self._store).delete_key(_note_of(self._host, os.getpid()))
        # Ranks on the same host look at this process to see whether it lives.
        self._store.set(self._key("who", self._rank), json.dumps([self._host, os.getpid()]))

    def called(self) -> bool:
        """Whether a rank has asked all ranks to answer: then no wait of this group will succeed any more."""
        return bool(self._ask(lambda: self._store.check([self._key("called")])))

    @property
    def silent(self) -> str:
        """What is wrong with the store, if it has not answered."""
        if self._answers:
            return ""
        return "the group's store does not answer: its process has ended, or the link to its host is cut"

    def ask_again(self) -> None:
        """Find out whether the store answers now: its link may work again."""
        self._again = 0.0
        self.called()

    def lost(
        self,
        *,
        phase: str = "",
        waited: float = 0.0,
        deadline: float = math.inf,
        number: int | None = None,
        missing: Sequence[int] = (),
    ) -> list[int]:
        """The ranks that are lost, the same on all ranks of the group; empty, if that cannot be found out.

        This rank has waited `waited` seconds in a phase, of `deadline` seconds that it may wait: for a collective, of
        that number, or elsewhere, where it has missed the ranks `missing`.
        """
        self.attendance.look(waits=True)
        until, self._again = time.monotonic() + ANSWERING, 0.0
        by_rank: dict[int, Evidence] = {}
        mine = self.attendance.evidence(
            phase=phase, waited=waited, deadline=deadline, number=number, missing=missing
        )
        self._set("yes", "called")
        self._set(mine.encode(), "here", self._rank)
        self.attendance.look(waits=False)  # every rank says the same from here on: none is waited for
        at_once = True  # whether this rank has seen all evidence as soon as it was given
        while self._answers:
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            is_first = not by_rank
            gone, (silent, foreign) = self.gone(), self._silent(by_rank)
            # When evidence by another clock was given is known only to a rank that saw it come.
            at_once = at_once and not (is_first and foreign)
            if gone:
                self._judge(self.causes(gone))
            elif time.monotonic() > until and silent:
                # Where there is proof against ranks that answer, the silent ones may only compute, or wait elsewhere.
                self._judge(self.causes(surely_late(by_rank) or only_stopped(by_rank) or silent))
            elif not silent and (at_once or time.monotonic() > until):
                missed = {rank for one in by_rank.values() for rank in one.missing}
                phases = {rank: one.phase for rank, one in by_rank.items()}
                self._judge(late(by_rank) or sorted(missed), _different_phases(phases))
            time.sleep(_PAUSE)
        return []

    def settle(self, lost: Sequence[int]) -> list[int]:
        """Say which ranks are lost, unless there is a verdict already; return the final one."""
        self._set("yes", "called")
        self._judge(lost)
        return self._verdict() or list(lost)

    def causes(self, lost: Iterable[int], among: Container[int] | None = None) -> list[int]:
        """Of ranks that do not come, those that are the cause: a rank may have left because of another one.

        In place of a rank that has given up other ranks of this group, these are returned; `among`: only if they are
        in it.
        """
        causes = set()
        for rank in set(lost):
            causes |= self._noted(rank, range(self._size) if among is None else among) or {rank}
        return sorted(causes)

    def _noted(self, rank: int, among: Container[int]) -> set[int]:
        """The other ranks of this group that a rank has given up, as its note says."""
        who = self._who.get(rank)
        note = who and self._ask(lambda: _value(underlying(self._store), _note_of(*who)))
        given_up = [tuple(process) for process in json.loads(note)] if note else []
        named = {
            other for other, process in self._who.items() if tuple(process) in given_up and other in among
        }
        return named - {rank}

    def leave_note(self, lost: Iterable[int]) -> None:
        """Leave a note that this rank has given up these ranks, until it makes its next group."""
        self.read()
        processes = [self._who[rank] for rank in lost if rank in self._who]
        if processes:
            key, note = _note_of(self._host, os.getpid()), json.dumps(processes)
            self._ask(lambda: underlying(self._store).set(key, note))

    def read(self) -> None:
        """Read from the store the host and process of each rank that has registered, and keep them.

        Called once all have registered: a rank that leaves deletes its entry, and the others still watch its process.
        """
        for rank in range(self._size):
            if rank not in self._who and (who := self._ask(partial(self._get, "who", rank))):
                self._who[rank] = json.loads(who)

    def gone(self) -> dict[int, str]:
        """The ranks on this host whose process has ended, each with the reason for error messages."""
        self.read()
        return self.ended()

    def ended(self) -> dict[int, str]:
        """The same as `gone`, for ranks whose process is already known: this does not ask the store."""
        return {
            rank: "its process has ended"
            for rank, (host, pid) in self._who.items()
            if host == self._host and not _lives(pid)
        }

    def leave(self, *written: str) -> None:
        """Delete what this rank has written into the store, and the keys `written`. A verdict stays.

        The store outlives the groups that are made with it: their keys would pile up there.
        """
        keys = [*written, self._key("who", self._rank), self._key("here", self._rank)]
        self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def _verdict(self) -> list[int] | None:
        found = self._ask(lambda: self._get("verdict"))
        if found is None:
            return None
        verdict = json.loads(found)
        self.detail = str(verdict["detail"])
        return list(verdict["lost"])

    def _judge(self, lost: Sequence[int], detail: str = "") -> None:
        """Put a verdict into the store, unless there is one."""
        verdict = json.dumps({"lost": list(lost), "detail": detail})
        self._ask(lambda: self._store.compare_set(self._key("verdict"), "", verdict))

    def _silent(self, by_rank: dict[int, Evidence]) -> tuple[list[int], bool]:
        """Add new answers to `by_rank`. Returns the ranks without one, and whether a new one is by another clock."""
        foreign = False
        for rank in range(self._size):
            if rank not in by_rank and (answer := self._ask(partial(self._get, "here", rank))):
                evidence = Evidence.decode(answer)
                if evidence.clock != this_clock():
                    evidence, foreign = evidence.later(time.monotonic() - evidence.now), True
                by_rank[rank] = evidence
        return [rank for rank in range(self._size) if rank not in by_rank], foreign

    def _get(self, *parts: object) -> bytes | None:
        return _value(self._store, self._key(*parts))

    def _set(self, value: str, *parts: object) -> None:
        self._ask(lambda: self._store.set(self._key(*parts), value))

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """The answer of the store, or None. After a question without an answer, the store is not asked for a while."""
        if not self._answers and time.monotonic() < self._again:
            return None
        try:
            answer = within(_STORE, question, look=self.attendance.look)
        except Exception:  # its host may be the one that died, or be cut off
            self._answers, self._again = False, time.monotonic() + _AGAIN
            return None
        self._answers = True
        return answer

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._place, *parts)))


def _different_phases(phases: dict[int, str]) -> str:
    """A sentence that says in which phases the ranks wait; empty, if all wait in the same phase.

    >>> _different_phases({1: "combine", 0: "barrier"})
    'the ranks wait in different calls: rank 0 in barrier, rank 1 in combine'
    """
    if len(set(phases.values())) == 1:
        return ""
    where = ", ".join(f"rank {rank} in {phase}" for rank, phase in sorted(phases.items()))
    return f"the ranks wait in different calls: {where}"


def underlying(store: Any) -> Any:
    """The store itself, under the prefixes that torch gave it."""
    while isinstance(store, _PrefixStore):
        store = store.underlying_store
    return store


def _note_of(host: str, pid: int) -> str:
    """The key of the note that a process leaves."""
    return f"tokenyard/has given up/{host}/{pid}"


def _value(store: Any, key: str) -> bytes | None:
    """The value of a key in a store, or None. The store's own `get` would wait for a key that does not exist."""
    found = store.compare_set(key, _ABSENT, _ABSENT)  # writes nothing
    return None if found == _ABSENT.encode() else bytes(found)


def _lives(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The state follows the name of the program, which is in parentheses and may hold any characters.
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
