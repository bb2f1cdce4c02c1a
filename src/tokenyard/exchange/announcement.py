"""What a rank tells the others at the start of each phase: where it is, what it brings, or that it failed.

An announcement has a fixed number of bytes, so that it can be gathered without asking for its size first, or
stand in front of rows in one message. The text of an error is cut to what is left. What arrives is not believed: bytes
that are no announcement, and more rows than the layer was planned for, are an error before anything is made of them.

    int64 × 8:  protocol  plan  layer  phase  round  tokens  length of counts  length of error
    int64 × n:  counts
    bytes:      error, UTF-8, at the end
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tokenyard.errors import Drifted, GroupError, PeerFailed, shown
from tokenyard.group.base import Group
from tokenyard.version import PROTOCOL

# Bytes, the counts not included: 64 for the numbers, the rest for the text of an error.
ANNOUNCEMENT_BYTES = 512


class Phase(Enum):
    """The two halves of a round trip."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


_PHASES = list(Phase)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """One rank's word at the start of a phase."""

    plan: int
    layer: int
    phase: Phase
    round: int
    tokens: int
    counts: tuple[int, ...]  # rows for each rank, where the phase has to say so
    error: str = ""
    protocol: int = PROTOCOL

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
        text = self.error.encode(errors="replace")[: size - 64 - 8 * len(self.counts)]
        numbers = [*self.place, self.tokens, len(self.counts), len(text), *self.counts]
        return struct.pack(f"<{len(numbers)}q", *numbers).ljust(size - len(text), b"\0") + text

    @classmethod
    def decode(cls, encoded: bytes, source: int) -> Announcement:
        """Read what `encode` wrote on rank `source`, or raise if it is something else."""
        numbers = memoryview(encoded[: len(encoded) // 8 * 8]).cast("q")
        left = len(encoded) - 64
        if left < 0:
            raise _unreadable(source, f"{len(encoded)} bytes")
        protocol, plan, layer, phase, round, tokens, num_counts, num_text = numbers[:8]
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
            counts=tuple(numbers[8 : 8 + num_counts]),
            error=encoded[len(encoded) - num_text :].decode(errors="replace"),
        )


def check_places(
    group: Group, mine: Announcement, heard: Sequence[Announcement], layers: Sequence[str]
) -> None:
    """Raise if a rank is somewhere else."""
    if any(other.place != mine.place for other in heard):
        raise Drifted(
            "the ranks are in different places: "
            + ", ".join(f"rank {rank}: {other.where(mine, layers)}" for rank, other in enumerate(heard)),
            expected="every rank of the group to call the same layers in the same order",
            fix="an idle rank calls every layer too, with T = 0",
            rank=group.rank,
        )


def _unreadable(source: int, found: str) -> GroupError:
    return GroupError(
        f"rank {source} sent what is no announcement: {found}",
        expected=f"the announcements of protocol {PROTOCOL}",
        fix=f"run the same version of tokenyard on rank {source}; let nobody else use this group's connections",
    )


def check_counts(group: Group, mine: Announcement, heard: Sequence[Announcement], most: int) -> None:
    """Raise if a rank announces more rows than it may bring, or other counts than this one: memory follows."""
    for rank, other in enumerate(heard):
        rows = (other.tokens, *other.counts)
        if len(other.counts) != len(mine.counts) or not all(0 <= count <= most for count in rows):
            raise GroupError(
                f"rank {rank} announces {other.tokens} tokens, and rows {shown(list(other.counts))}",
                expected=f"{len(mine.counts)} counts, and from 0 to max_tokens={most} each",
                fix=f"look for what wrote into the announcements of rank {rank}",
                rank=group.rank,
            )


def check_failures(group: Group, mine: Announcement, heard: Sequence[Announcement]) -> None:
    """Raise if another rank failed. A rank that failed itself raises its own error instead."""
    failed = [(rank, other) for rank, other in enumerate(heard) if other.error]
    if failed and not mine.error:
        peer, other = failed[0]
        raise PeerFailed(peer, other.error, phase=mine.phase.value, rank=group.rank)
