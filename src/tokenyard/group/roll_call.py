"""Who is lost, when a wait of a group has failed: found out together, so that all ranks name the same.

A library underneath says at most that a connection closed, and often only to some of the ranks; the others wait on,
or are in another call already. So a rank whose wait fails *calls the roll* in the store through which the group found
together, and the others, who look there while they wait, answer. Lost is

1. whose process is gone, as a rank on the same host can see for itself; if there is none,
2. who has not answered within a second.

The first verdict stands: every rank raises the same, and a stopped rank that wakes up reads that it was given up. A
rank that computes while another dies is not blamed, however long it computes, where the dead one's host has a rank
that waits. The store may be gone, too, with its host: a look into it takes two seconds at most, and then nobody can
tell.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

Answer = TypeVar("Answer")

# Seconds in which the other waiting ranks answer. They look for a roll call every `LOOK` seconds.
ANSWERING = 1.0
LOOK = 0.1
# Seconds that one look into the store may take: a round trip, on a busy machine. The store's own limit is that of
# finding each other, which is longer.
_STORE = 2.0
# Seconds after which a store that did not answer is asked again by ranks that wait: its link may have been mended.
_AGAIN = 60.0
_PAUSE = 0.02
# What nobody writes into the store: it answers with this word where there is nothing to compare with.
_ABSENT = "absent"


def within(
    seconds: float, question: Callable[[], Answer], *, look: Callable[[], None] = lambda: None
) -> Answer:
    """What a question brings that may be left without an answer; `TimeoutError` after so many seconds.

    The client of a store waits without an end, also where the link is cut and no answer can come. So it is a thread
    that asks, and it is left behind. Meanwhile `look` is called now and then, and may raise.
    """
    answers: queue.SimpleQueue[tuple[Answer, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="question", daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        try:
            answer, error = answers.get(timeout=max(0.0, min(LOOK, until - time.monotonic())))
            break
        except queue.Empty:
            if time.monotonic() >= until:
                raise TimeoutError(f"no answer within {seconds:.1f} s") from None
        look()
    if error is not None:
        try:
            raise error
        finally:
            del error  # or it would hold, by way of its traceback, what it passed through
    return cast("Answer", answer)


class RollCall:
    """The roll of one group, in a place of the store that is this group's alone."""

    def __init__(self, store: Any, place: str, rank: int, size: int, host: str) -> None:
        self._store, self._answers, self._again = store, True, 0.0
        self._place = f"tokenyard/{place}/roll call"
        self._rank, self._size, self._host = rank, size, host
        self._who: dict[int, tuple[str, int]] = {}
        self._ask(self._enroll)

    def _enroll(self) -> None:
        # What is written there is of an earlier life: torchrun starts ranks anew on the same store.
        for stale in (self._key("called"), self._key("verdict"), self._key("here", self._rank)):
            self._store.delete_key(stale)
        # Who stands behind a rank's number, for those that share its host.
        self._store.set(self._key("who", self._rank), json.dumps([self._host, os.getpid()]))

    def called(self) -> bool:
        """Whether a rank has called the roll: then no wait of this group will succeed any more."""
        return bool(self._ask(lambda: self._store.check([self._key("called")])))

    @property
    def silent(self) -> str:
        """What is wrong with the store, if it has not answered."""
        if self._answers:
            return ""
        return "the group's store does not answer: its process has ended, or the link to its host is cut"

    def ask_again(self) -> None:
        """Find out whether the store answers now: a link may be mended."""
        self._again = 0.0
        self.called()

    def lost(self) -> list[int]:
        """Who is lost, as all ranks of the group will say; nobody, if that cannot be told."""
        until, self._again = time.monotonic() + ANSWERING, 0.0
        self._set("called")
        self._set("here", self._rank)
        while self._answers:
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            gone, silent = self.gone(), self._silent()
            if gone:
                self._judge(gone)
            elif not silent or time.monotonic() > until:
                self._judge(silent)
            time.sleep(_PAUSE)
        return []

    def read(self) -> None:
        """Read who stands behind each rank's number, as far as they have enrolled.

        When all have: a rank that leaves takes its name back, and it is its process that others look for.
        """
        for rank in range(self._size):
            if rank not in self._who and (who := self._ask(partial(self._get, "who", rank))):
                self._who[rank] = json.loads(who)

    def gone(self) -> list[int]:
        """Whose process is gone from this host."""
        self.read()
        return self.ended()

    def ended(self) -> list[int]:
        """The same, of those whose names were read: the store is not asked."""
        return [rank for rank, (host, pid) in self._who.items() if host == self._host and not _lives(pid)]

    def leave(self, *written: str) -> None:
        """Take back what this rank has written into the store, these keys among it. A verdict stays.

        Groups come and go, and the store lives as long as all of them: what each leaves behind would pile up in it.
        """
        keys = [*written, self._key("who", self._rank), self._key("here", self._rank)]
        self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def _verdict(self) -> list[int] | None:
        found = self._ask(lambda: self._get("verdict"))
        return None if found is None else list(json.loads(found))

    def _judge(self, lost: list[int]) -> None:
        """Put a verdict into the store, unless there is one."""
        self._ask(lambda: self._store.compare_set(self._key("verdict"), "", json.dumps(lost)))

    def _silent(self) -> list[int]:
        """Who has not answered."""
        names = [self._key("here", rank) for rank in range(self._size)]
        if self._ask(lambda: self._store.check(names)):
            return []
        return [rank for rank, name in enumerate(names) if not self._ask(partial(self._store.check, [name]))]

    def _get(self, *parts: object) -> bytes | None:
        """What stands in the store, or None. Its own `get` waits for a key that is not there."""
        found = self._store.compare_set(self._key(*parts), _ABSENT, _ABSENT)  # writes nothing
        return None if found == _ABSENT.encode() else bytes(found)

    def _set(self, *parts: object) -> None:
        self._ask(lambda: self._store.set(self._key(*parts), "yes"))

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """What the store says, or None; a store that did not answer is left alone for a while."""
        if not self._answers and time.monotonic() < self._again:
            return None
        try:
            answer = within(_STORE, question)
        except Exception:  # its host may be the one that died, or be cut off
            self._answers, self._again = False, time.monotonic() + _AGAIN
            return None
        self._answers = True
        return answer

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._place, *parts)))


def _lives(pid: int) -> bool:
    """Whether a process runs, or could: not one that is there only until its parent has looked at how it ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in front may hold anything, in parentheses.
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
