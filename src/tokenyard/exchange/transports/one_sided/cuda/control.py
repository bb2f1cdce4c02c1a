"""The layout of a rank's control region on a GPU.

    words (64 bits)   STATE … STATUS, then for each turn, phase and source rank a flag
    counts            for each dispatch in flight and source rank: rows that come from it, and its `max_tokens`
    texts             for each phase, why this rank failed in it last, for the others to read

The words are explained in `kernels.flags`. Their places are defined here, because the host uses them as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.workspace import Region, round_up

STATE, VERDICT, ROUND, COMBINED, ARRIVED, PLACED, LEFT = range(7)
STATUS = 8
STATUS_WORDS = 4  # kind, flag, ranks or value, nanoseconds
FLAGS = 16


def phase_number(phase: Phase) -> int:
    """The number of a phase in flags and words: 0 for a dispatch, 1 for a combine."""
    return int(phase is Phase.COMBINE)


class Trouble(IntEnum):
    """The kinds of trouble that a status reports. From `FAILED` on, the round has no result on any rank."""

    BAD_IDS = 1
    FAILED = 2
    DRIFTED = 3
    LOST = 4


WORD = 8  # bytes
TEXT_BYTES = 512
# Where rows begin. From an odd multiple of 128 bytes on, long dispatches of bf16 rows took 5 to 6% longer on an H200.
ROWS_ALIGNMENT = 1024
# A verdict is one word, a bit for each rank.
MOST_RANKS = 63
# The bit of a verdict that names no rank: the ranks that it names have left, and are not lost (`hierarchical`).
DEPARTURE = -(1 << 63)


@dataclass(frozen=True)
class ControlLayout:
    """The places in a control region, in bytes from its start.

    >>> layout = ControlLayout(world=4, in_flight=2)
    >>> layout.counts(0), layout.counts(1), layout.text(0), layout.nbytes
    (320, 352, Region(offset=384, nbytes=512), 2048)
    """

    world: int
    in_flight: int

    @property
    def turns(self) -> int:
        """The rounds that have flags of their own: a rank can be so far ahead of one that still reads them."""
        return self.in_flight + 1

    def flags(self, phase: int, round: int) -> slice:
        """The words in which ranks publish a phase (0: dispatch, 1: combine) of a round, one for each source rank."""
        first = FLAGS + ((round % self.turns) * 2 + phase) * self.world
        return slice(first, first + self.world)

    def counts(self, region: int) -> int:
        """The counts of the rows of one dispatch in flight: two 32-bit numbers per source rank."""
        return (FLAGS + 2 * self.turns * self.world + region * self.world) * WORD

    def text(self, phase: int) -> Region:
        """Why this rank failed in a phase (0: dispatch, 1: combine), if it did.

        A rank may fail in a combine before others have read why it failed in the dispatch behind it.
        """
        return Region(
            offset=round_up(self.counts(self.in_flight)) + phase * TEXT_BYTES,
            nbytes=TEXT_BYTES,
        )

    @property
    def nbytes(self) -> int:
        """The whole region; rows begin behind it."""
        return round_up(self.text(1).end, ROWS_ALIGNMENT)
