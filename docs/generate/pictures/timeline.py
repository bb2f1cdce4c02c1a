"""One layer after another on three ranks: who sends how many rows, who waits, and who is already ahead.

Rows are counted by the package (`Placement.resolve`, `tokens_by_rank`). Time is a model: sending, computing and reading
take a time for each row, and waits follow from the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from docs.generate.pictures.svg import Drawing
from tokenyard.exchange.batch import tokens_by_rank
from tokenyard.routing import Placement

WORLD = 3
PLACEMENT = Placement.contiguous(6, WORLD)
# For each rank, the experts of its tokens.
ROUTES = (
    torch.tensor([[0, 2], [3, 5], [2, 3]]),
    torch.tensor([[1, 2], [2, 4], [3, 0]]),
    torch.tensor([[2, 3], [5, 4], [0, 3]]),
)

# Units of time: for each row that is sent, computed and read, and until each rank is ready.
_SEND, _COMPUTE, _READ = 0.5, 0.9, 0.5
_READY = (0.0, 0.4, 1.2)
_AHEAD = 1.6  # of the next layer, that is still drawn

_LEFT, _TOP, _UNIT = 40, 132, 38
_COLUMN, _GAP = 150, 48


@dataclass(frozen=True)
class Span:
    """What one rank does for some time."""

    rank: int
    start: float
    end: float
    text: tuple[str, ...]
    color: str


def rows() -> list[list[int]]:
    """Rows that each rank sends to each rank."""
    resolved = [PLACEMENT.resolve(ids_TK, rank)[0] for rank, ids_TK in enumerate(ROUTES)]
    return [[tokens.numel() for tokens in tokens_by_rank(rank_TK, WORLD)] for rank_TK in resolved]


def spans() -> list[Span]:
    """What happens, rank by rank. A phase begins when the slowest rank has announced its rows, or results."""
    sent = rows()
    out = [sum(counts) for counts in sent]
    received = [sum(counts[rank] for counts in sent) for rank in range(WORLD)]
    ready = [start + _SEND * out[rank] for rank, start in enumerate(_READY)]
    arrived = max(ready)
    computed = [arrived + _COMPUTE * received[rank] for rank in range(WORLD)]
    results = max(computed)
    home = [results + _READ * out[rank] for rank in range(WORLD)]
    end = max(home) + _AHEAD
    found = []
    for rank, start in enumerate(_READY):
        found += [
            Span(rank, start, ready[rank], ("dispatch", f"sends {out[rank]} rows"), "blue"),
            Span(rank, ready[rank], arrived, ("waits",), "wait"),
            Span(rank, arrived, computed[rank], ("experts", f"compute {received[rank]} rows"), "amber"),
            Span(rank, computed[rank], results, ("waits",), "wait"),
            Span(rank, results, home[rank], ("combine", f"adds {out[rank]} rows"), "green"),
            Span(rank, home[rank], end, ("next layer:", "dispatch"), "blue"),
        ]
    return [span for span in found if span.end - span.start > 0.01]


def draw() -> str:
    """The picture."""
    found = spans()
    bottom = _TOP + max(span.end for span in found) * _UNIT
    drawing = Drawing(bottom + 84, "Dispatch, experts and combine of one layer on three ranks, over time")
    drawing.text(16, 28, "One layer on three ranks", size=17, bold=True)
    drawing.text(16, 50, "three tokens a rank, two experts each; time runs downwards", color="muted")
    for rank in range(WORLD):
        x = _LEFT + rank * (_COLUMN + _GAP)
        experts = ", ".join(map(str, PLACEMENT.local_experts(rank)))
        drawing.text(x + _COLUMN / 2, 92, f"rank {rank}", anchor="middle", bold=True)
        drawing.text(
            x + _COLUMN / 2, 110, f"owns experts {experts}", size=12.5, anchor="middle", color="muted"
        )
    for span in found:
        x, height = _LEFT + span.rank * (_COLUMN + _GAP), (span.end - span.start) * _UNIT
        lines = list(span.text) if height >= 38 else [" ".join(span.text)] if height >= 18 else []
        waits = span.color == "wait"
        drawing.boxed(
            x,
            _TOP + span.start * _UNIT,
            _COLUMN,
            height,
            lines,
            "page" if waits else span.color,
            size=13,
            dashed=waits,
        )
    _arrows(drawing, found)
    drawing.arrow((18, _TOP), (18, bottom))
    for number, line in enumerate(
        (
            "Arrows: the rows of rank 0, and their results. A row goes once to each rank that owns",
            "one of its experts. Experts start when the rows of all ranks are there; a rank that has",
            "added up its results goes on, while others still read theirs.",
        )
    ):
        drawing.text(16, bottom + 32 + number * 19, line, size=12.5, color="muted")
    return str(drawing)


def _arrows(drawing: Drawing, found: list[Span]) -> None:
    """The rows of rank 0 on their way out, and back."""
    counts = rows()[0]
    first = {(span.rank, span.text[0]): span for span in found}
    edge = _LEFT + _COLUMN
    for rank in (1, 2):
        target = _LEFT + rank * (_COLUMN + _GAP)
        out = _TOP + first[0, "dispatch"].end * _UNIT - 30 + rank * 12
        there = _TOP + first[rank, "experts"].start * _UNIT + 14
        drawing.arrow((edge, out), (edge + 12, out), (target - 14, there), (target, there))
        done = _TOP + first[rank, "experts"].end * _UNIT - 8
        back = _TOP + first[0, "combine"].start * _UNIT + 2 + rank * 12
        drawing.arrow((target, done), (target - 14, done), (edge + 14, back), (edge, back))
        drawing.text(target - 8, there + 18, str(counts[rank]), size=12.5, anchor="end", bold=True)
        drawing.text(target - 8, done - 5, str(counts[rank]), size=12.5, anchor="end", bold=True)
