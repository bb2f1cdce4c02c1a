"""What a rank tells the others at the start of each phase: where it is, what it brings, or that it failed.

`Announcements` is what a transport is given: it says what to tell each rank, and takes the answers. An announcement
has a fixed number of bytes, so that it can be gathered without asking for its size first, or
stand in front of rows in one message. The text of an error is cut to what is left. What arrives is not believed: bytes
that are no announcement, and more rows than the layer was planned for, are an error before anything is made of them.

    int64 × 9:  protocol  plan  layer  phase  round  tokens  length of counts  length of error  notice
    int64 × n:  counts
    bytes:      error, UTF-8, at the end
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from tokenyard.errors import Drifted, GroupError, PeerFailed, PlanBroken, shown
from tokenyard.exchange.passes import RowBound
from tokenyard.group.base import Group
from tokenyard.version import PROTOCOL

# Bytes, the counts not included: 72 for the numbers, the rest for the text of an error.
ANNOUNCEMENT_BYTES = 512
_NUMBERS = 9


class Phase(Enum):
    """The two halves of a round trip."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


_PHASES = list(Phase)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """One rank's word at the start of a phase."""

    plan: int  # the number of the plan
    layer: int  # the number of the layer in it
    phase: Phase  # dispatch or combine
    round: int  # the number of the round trip
    tokens: int  # the tokens of this rank
    counts: tuple[int, ...]  # rows for each rank, where the phase has to say so
    error: str = ""  # why this rank failed; empty, if it did not
    notice: int = 0  # what the plan tells beside it (`Exchange.notice`)
    protocol: int = PROTOCOL  # the version of what ranks tell each other

    @property
    def place(self) -> tuple[int, ...]:
        """What must be the same on every rank."""
        return (self.protocol, self.plan, self.layer, _PHASES.index(self.phase), self.round)

    def where(self, mine: Announcement, layers: Sequence[str]) -> str:
        """The place in words, for a rank whose plan has these layers."""
        known = self.plan == mine.plan and 0 <= self.layer < len(layers)
        layer = repr(layers[self.layer]) if known else f"{self.layer} of another plan"
        protocol = (
            "" if self.protocol == mine.protocol else f", protocol {self.protocol}, not {mine.protocol}"
        )
        return f"{self.phase.value} of layer {layer}, round {self.round}{protocol}"

    def encode(self, size: int) -> bytes:
        """`size` bytes."""
        text = self.error.encode(errors="replace")[: size - 8 * (_NUMBERS + len(self.counts))]
        numbers = [*self.place, self.tokens, len(self.counts), len(text), self.notice, *self.counts]
        return struct.pack(f"<{len(numbers)}q", *numbers).ljust(size - len(text), b"\0") + text

    @classmethod
    def decode(cls, encoded: bytes, source: int) -> Announcement:
        """Read what `encode` wrote on rank `source`, or raise if it is something else."""
        numbers = memoryview(encoded[: len(encoded) // 8 * 8]).cast("q")
        left = len(encoded) - 8 * _NUMBERS
        if left < 0:
            raise _unreadable(source, f"{len(encoded)} bytes")
        protocol, plan, layer, phase, round, tokens, num_counts, num_text, notice = numbers[:_NUMBERS]
        if not 0 <= phase < len(_PHASES):
            raise _unreadable(source, f"phase {phase}")
        if not 0 <= num_counts <= left // 8 or not 0 <= num_text <= left - 8 * num_counts:
            raise _unreadable(source, f"{num_counts} counts and {num_text} bytes of text in {left} bytes")
        return cls(
            protocol=protocol,
            plan=plan,
            layer=layer,
            phase=_PHASES[phase],
            round=round,
            tokens=tokens,
            counts=tuple(numbers[_NUMBERS : _NUMBERS + num_counts]),
            notice=notice,
            error=encoded[len(encoded) - num_text :].decode(errors="replace"),
        )


def ignore_notices(notices: Sequence[int]) -> None:
    """What is done with the notices of all ranks where nobody agrees on anything by them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Announcements:
    """What this rank tells the others in one phase of a round, and what it makes of their answers."""

    group: Group  # the ranks that are told
    layers: Sequence[str]  # the names of the plan's layers
    say: Callable[[], Announcement]  # makes this rank's announcement
    most: int  # rows that a rank may announce
    room: int  # counts that an announcement for all has room for, the same on every rank
    all_met: Callable[[], None]  # called when every rank was heard to be in this round, whatever comes of it
    # Called by a transport that has told some ranks of this plan and others of another: no later call is let in. It
    # returns the error of those.
    ranks_parted: Callable[[], PlanBroken]
    notice: Callable[[], int] = int  # what the plan of this rank tells in a dispatch
    # Called in each dispatch with the notices of all ranks.
    noticed: Callable[[Sequence[int]], None] = ignore_notices
    bound: RowBound | None = None  # of the rows of a pass, in a dispatch of a layer that has one

    @cached_property
    def mine(self) -> Announcement:
        """This rank's announcement, with the counts for all ranks. One rank alone makes none."""
        return self.say()

    def for_all(self) -> Announcement:
        """One announcement that every rank may read: the counts of all."""
        return self.mine

    def for_rank(self, rank: int) -> Announcement:
        """The announcement for one rank: its own count."""
        return replace(self.mine, counts=self.mine.counts[rank : rank + 1])

    def heard(self, answers: Sequence[Announcement]) -> Sequence[Announcement]:
        """The announcements of all ranks; raises if one is elsewhere, or failed, or announces what cannot be.

        Where a pass has a bound, the announcements are those for all ranks, and too many rows raise, too.
        A rank that failed itself is told of no other's failure: it raises its own error.
        """
        self._check_places(answers)
        self.all_met()
        if self.mine.phase is Phase.DISPATCH:
            self.noticed([other.notice for other in answers])
        for peer, other in enumerate(answers):
            if other.error and not self.mine.error:
                raise PeerFailed(peer, other.error, phase=self.mine.phase.value, rank=self.group.rank)
        if self.mine.phase is Phase.DISPATCH and not self.mine.error:
            self._check_counts(answers)
            if self.bound is not None:
                self.bound.hear([other.counts for other in answers])
        return answers

    def _check_places(self, answers: Sequence[Announcement]) -> None:
        mine = self.mine.place
        if any(other.place != mine for other in answers):
            raise Drifted(
                "the ranks are in different places: "
                + ", ".join(
                    f"rank {rank}: {other.where(self.mine, self.layers)}"
                    for rank, other in enumerate(answers)
                ),
                expected="every rank of the group to call the same layers in the same order",
                fix="an idle rank calls every layer too, with T = 0",
                rank=self.group.rank,
            )

    def _check_counts(self, answers: Sequence[Announcement]) -> None:
        """Raise if a rank announces more rows than it may bring, or not one count for each rank: memory follows."""
        counts = len(answers[self.group.rank].counts)
        for rank, other in enumerate(answers):
            rows = (other.tokens, *other.counts)
            if len(other.counts) != counts or not all(0 <= count <= self.most for count in rows):
                raise GroupError(
                    f"rank {rank} announces {other.tokens} tokens, and rows {shown(list(other.counts))}",
                    expected=f"{counts} counts, and from 0 to max_tokens={self.most} each",
                    fix=f"look for what wrote into the announcements of rank {rank}",
                    rank=self.group.rank,
                )


def _unreadable(source: int, found: str) -> GroupError:
    return GroupError(
        f"rank {source} sent what is no announcement: {found}",
        expected=f"the announcements of protocol {PROTOCOL}",
        fix=f"run the same version of tokenyard on rank {source}; let nobody else use this group's connections",
    )
