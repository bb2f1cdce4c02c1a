"""What a rank tells the others at the start of each phase: where it is, what it brings, or that it failed.

`Announcements` is what a transport is given: it says what to tell each rank, and takes the answers. The `Announcer` of
a plan makes it. An announcement has a fixed number of bytes, so that it can be gathered without asking for its size
first, or stand in front of rows in one message. The text of an error is cut to the bytes that are left. A received
announcement is checked before it is used: bytes that are no announcement, and more rows than the layer was planned for,
raise.

    int64 × 10: protocol  plan  layer  phase  round  forward  tokens  length of counts  length of error  notice
    int64 × n:  counts
    bytes:      error, UTF-8, at the end
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING

from tokenyard.errors import Drifted, GroupError, PeerFailed, TokenyardError, shown
from tokenyard.exchange.passes import RowBound
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.group.base import Group
from tokenyard.version import PROTOCOL

if TYPE_CHECKING:
    from tokenyard.exchange.open_trips import Usability
    from tokenyard.exchange.transport import Transport

# Bytes, the counts not included: 80 for the numbers, the rest for the text of an error.
ANNOUNCEMENT_BYTES = 512
_NUMBERS = 10


class Phase(Enum):
    """The two halves of a round trip."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


_PHASES = list(Phase)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What one rank tells the others at the start of a phase."""

    plan: int  # the number of the plan
    layer: int  # the number of the layer in it
    phase: Phase  # dispatch or combine
    round: int  # the number of the round trip
    tokens: int  # the tokens of this rank
    counts: tuple[int, ...]  # rows for each rank, if this phase announces them; else empty
    # In a backward: the round of the forward whose gradients travel. 0: a forward.
    forward: int = 0
    error: str = ""  # why this rank failed; empty, if it did not
    notice: int = 0  # a number that the plan adds (`Announcer.notice`)
    protocol: int = PROTOCOL  # the version of the announcements' protocol

    @property
    def place(self) -> tuple[int, ...]:
        """Protocol, plan, layer, phase, round and the round of the forward: they must be the same on every rank."""
        return (self.protocol, self.plan, self.layer, _PHASES.index(self.phase), self.round, self.forward)

    def where(self, mine: Announcement, layers: Sequence[str]) -> str:
        """The place in words, for the error of a rank that announced `mine` and whose plan has these layers."""
        known = self.plan == mine.plan and 0 <= self.layer < len(layers)
        layer = repr(layers[self.layer]) if known else f"{self.layer} of another plan"
        protocol = (
            "" if self.protocol == mine.protocol else f", protocol {self.protocol}, not {mine.protocol}"
        )
        gradients = f"the gradients of round {self.forward} of " if self.forward else ""
        return f"{self.phase.value} of {gradients}layer {layer}, round {self.round}{protocol}"

    def encode(self, size: int) -> bytes:
        """The announcement in `size` bytes; the text of an error is cut to fit."""
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
        protocol, plan, layer, phase, round, forward, tokens, num_counts, num_text, notice = numbers[
            :_NUMBERS
        ]
        if not 0 <= phase < len(_PHASES):
            raise _unreadable(source, f"phase {phase}")
        if num_counts < 0 or not 0 <= num_text <= left - 8 * num_counts:
            raise _unreadable(source, f"{num_counts} counts and {num_text} bytes of text in {left} bytes")
        return cls(
            protocol=protocol,
            plan=plan,
            layer=layer,
            phase=_PHASES[phase],
            round=round,
            forward=forward,
            tokens=tokens,
            counts=tuple(numbers[_NUMBERS : _NUMBERS + num_counts]),
            notice=notice,
            error=encoded[len(encoded) - num_text :].decode(errors="replace"),
        )


def ignore_notices(notices: Sequence[int]) -> None:
    """Do nothing with the notices of all ranks: the default, for plans that agree on nothing by notices."""


class Announcer:
    """Makes one rank's announcements in each phase of each round of a plan, and counts the rounds."""

    def __init__(self, transport: Transport, usability: Usability, plan_id: int) -> None:
        self.group = transport.group  # the ranks that receive the announcements
        self.plan_id = plan_id  # the same on all ranks, and different for each plan of a group
        self.layers: list[str] = []  # the names of the plan's layers
        self.round = 0  # the number of the last dispatch that all ranks took part in
        # Returns the number that this rank adds to its announcement of a dispatch.
        self.notice: Callable[[], int] = int
        # Called with the numbers of all ranks, in the same dispatch on each: ranks can agree without further messages.
        self.noticed: Callable[[Sequence[int]], None] = ignore_notices
        self.usability = usability  # whether the plan can be used
        self._transport = transport

    def of_dispatch(
        self,
        spec: ExchangeSpec,
        tokens: int,
        counts: Sequence[int],
        error: BaseException | None = None,
        *,
        forward: int = 0,
    ) -> Announcements:
        """What this rank announces in the dispatch of the next round: its tokens and rows, or that it failed.

        `forward`: in a backward, the round of the forward.
        """
        bound = None
        if spec.max_rows is not None:
            bound = RowBound(max_rows=spec.max_rows, loads=self._transport.loads)
        say = partial(self._say, spec, Phase.DISPATCH, self.round + 1, forward, tokens, counts, error)
        return Announcements(self, say, self.round + 1, spec, bound)

    def of_failed_dispatch(
        self, spec: ExchangeSpec, error: BaseException, *, forward: int = 0
    ) -> Announcements:
        """What this rank announces in the dispatch of the next round if it failed before it had a batch."""
        return self.of_dispatch(spec, 0, [0] * self.num_counts(spec), error, forward=forward)

    def of_combine(
        self,
        spec: ExchangeSpec,
        round: int,
        tokens: int,
        error: BaseException | None = None,
        *,
        forward: int = 0,
    ) -> Announcements:
        """What this rank announces in the combine of a round: that its results follow, or that it failed."""
        say = partial(self._say, spec, Phase.COMBINE, round, forward, tokens, (), error)
        return Announcements(self, say, round, spec, None)

    def _say(
        self,
        spec: ExchangeSpec,
        phase: Phase,
        round: int,
        forward: int,
        tokens: int,
        counts: Sequence[int],
        error: BaseException | None,
    ) -> Announcement:
        told = error.announced_as if isinstance(error, TokenyardError) else error
        return Announcement(
            plan=self.plan_id,
            layer=spec.index,
            phase=phase,
            round=round,
            forward=forward,
            tokens=tokens,
            counts=tuple(counts),
            error="" if told is None else f"{type(told).__name__}: {told}",
            notice=self.notice() if phase is Phase.DISPATCH else 0,
        )

    def num_counts(self, spec: ExchangeSpec) -> int:
        """The number of counts in an announcement: those of this pass, and with `max_rows` those of later passes."""
        return self._transport.num_counts(spec) * (1 if spec.max_rows is None else 2)

    def meet(self, round: int) -> None:
        """Note that all ranks take part in a round."""
        self.round = max(self.round, round)

    def once_more(self, group: Group) -> Announcer:
        """An announcer for a second exchange of announcements in one phase, within `group`; it ignores notices."""
        again = copy(self)
        again.group, again.noticed = group, ignore_notices
        return again


@dataclass(frozen=True, eq=False)
class Announcements:
    """What this rank announces in one phase of a round, and the check of what the others announce."""

    announcer: Announcer  # counts the rounds of this rank's plan
    say: Callable[[], Announcement]  # makes this rank's announcement
    round: int  # the number of the round trip
    spec: ExchangeSpec  # the layer: it says how many rows a rank may announce
    bound: RowBound | None = None  # checks the rows of a pass, in a dispatch of a layer with `max_rows`

    @cached_property
    def mine(self) -> Announcement:
        """This rank's announcement, with the counts for all ranks; made when it is first needed."""
        return self.say()

    def all_met(self) -> None:
        """Note that every rank takes part in this round, even if the phase fails."""
        self.announcer.meet(self.round)

    def for_all(self) -> Announcement:
        """The announcement that is the same for every rank, with the counts for all ranks."""
        return self.mine

    def for_rank(self, rank: int) -> Announcement:
        """The announcement for one rank, with the count for that rank only."""
        return replace(self.mine, counts=self.mine.counts[rank : rank + 1])

    def heard(self, answers: Sequence[Announcement]) -> Sequence[Announcement]:
        """Check the announcements of all ranks and return them; raise if one is elsewhere, failed or is not valid.

        If `max_rows` bounds the pass, `answers` must hold the counts for all ranks, and too many rows raise
        `TooManyRows`. If this rank itself failed, failures of others are not raised: the caller raises its own error.
        """
        self._check_places(answers)
        self.all_met()
        rank = self.announcer.group.rank
        if self.mine.phase is Phase.DISPATCH:
            self.announcer.noticed([other.notice for other in answers])
        for peer, other in enumerate(answers):
            if other.error and not self.mine.error:
                raise PeerFailed(peer, other.error, phase=self.mine.phase.value, rank=rank)
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
                    f"rank {rank}: {other.where(self.mine, self.announcer.layers)}"
                    for rank, other in enumerate(answers)
                ),
                expected="every rank of the group to call the same layers in the same order",
                fix="an idle rank calls every layer too, with T = 0",
                rank=self.announcer.group.rank,
            )

    def _check_counts(self, answers: Sequence[Announcement]) -> None:
        """Raise if a rank announces another number of counts, or more rows than the layer was planned for."""
        counts, most = len(answers[self.announcer.group.rank].counts), self.spec.max_tokens
        for rank, other in enumerate(answers):
            rows = (other.tokens, *other.counts)
            if len(other.counts) != counts or not all(0 <= count <= most for count in rows):
                raise not_due(
                    rank,
                    f"{other.tokens} tokens, and rows {shown(list(other.counts))}",
                    expected=f"{counts} counts, and from 0 to max_tokens={most} each",
                    rank=self.announcer.group.rank,
                )


def not_due(source: int, announced: str, *, expected: str, rank: int) -> GroupError:
    """The error for an announcement of rank `source` whose values are impossible."""
    return GroupError(
        f"rank {source} announces {announced}",
        expected=expected,
        fix=f"look for what wrote into the announcements of rank {source}",
        rank=rank,
    )


def _unreadable(source: int, found: str) -> GroupError:
    return GroupError(
        f"rank {source} sent what is no announcement: {found}",
        expected=f"the announcements of protocol {PROTOCOL}",
        fix=f"run the same version of tokenyard on rank {source}; let nobody else use this group's connections",
    )
