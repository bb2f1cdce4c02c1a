"""All cells of an evaluation, beside the whole model.

Exchanges that give the same bits give the same answers. The first exchange of each wire × weights therefore answers all
questions, and the others only the probes. If an exchange has the same tokens there, and bitwise the same logits, it
takes over the first exchange's other answers, and its row says so (`same_bits_as`). An exchange that gives other bits
answers all questions by itself. With `every`, all exchanges do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenyard.experts.spec import EXACT
from tokenyard.formats import get, weight_format
from tokenyard_lab.evaluation.cells import OWN_DTYPE, PROBES, Cell, Wiring, measure
from tokenyard_lab.evaluation.intervals import Interval, paired_difference, wilson
from tokenyard_lab.evaluation.questions import Question, is_right
from tokenyard_lab.evaluation.ranks import Ranks, Send

WHOLE_MODEL = "whole model"


@dataclass(frozen=True, kw_only=True)
class Row(Wiring):
    """A wiring and its figures. The whole model has no exchange, and nothing to compare with."""

    accuracy: Interval
    difference: Interval | None = None  # to the whole model, on the same questions
    logit_error: float | None = None  # relative, over the probes
    tokens_per_s: float  # of all ranks together, over the probes
    bytes_per_token: float = 0.0  # moved by all layers, out and back
    expert_bytes: int  # of all ranks
    same_bits_as: str | None = None  # the exchange that gave the answers beyond the probes
    right: list[bool]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; of the answers only how many were wrong."""
        found = asdict(self) | {"questions": len(self.right), "wrong": self.right.count(False)}
        del found["right"]
        return found


# A row, and the tokens and logits that another exchange must reproduce to count as giving the same bits.
_Measured = tuple[Row, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which questions are asked, and of which wirings."""

    ranks: Ranks
    folder: Path
    questions: Sequence[Question]
    exchanges: Sequence[str]
    wires: Sequence[str]
    weights: Sequence[str]
    inners: Sequence[str] = (EXACT,)  # inner formats; each is tried with the weights that allow it
    combine_wires: Sequence[str] = (OWN_DTYPE,)
    batch: int = 128
    most: int = 128
    every: bool = False

    @property
    def answers_expected(self) -> int:
        """How many answers will be made, if exchanges give the same bits."""
        wirings, others = len(self.formats), len(self.exchanges) - 1
        each = len(self.questions) if self.every else min(PROBES, len(self.questions))
        return len(self.questions) * (1 + wirings) + each * wirings * others

    @property
    def formats(self) -> list[tuple[str, str, str, str]]:
        """All valid combinations of wire, weights, inner format and combine wire."""
        return [
            (wire, weights, inner, back)
            for wire in self.wires
            for weights in self.weights
            for inner in self.inners
            for back in self.combine_wires
            if inner == EXACT or get(inner).name in weight_format(weights).inner_formats
        ]

    def rows(self, on_message: Send | None = None) -> Iterator[Row]:
        """The rows as they are measured: first the whole model, last the wirings that differ in both wire and weights.

        `on_message` gets messages with `what` is being run, and how many more questions were `answered`.
        """
        whole, drafts = self._whole(on_message)
        yield whole
        for formats in sorted(self.formats, key=self._differs_in_both):
            first: _Measured | None = None
            for exchange in self.exchanges:
                found = self._sharded(Wiring(exchange, *formats), whole, drafts, first, on_message)
                first = first or found
                yield found[0]

    def _differs_in_both(self, formats: tuple[str, str, str, str]) -> bool:
        return formats[0] != self.wires[0] and formats[1] != self.weights[0]

    def in_order(self, rows: Sequence[Row]) -> list[Row]:
        """Rows sorted by wire, then by weights, inner format, combine wire, and exchange."""

        def place(row: Row) -> tuple[int, ...]:
            if row.exchange == WHOLE_MODEL:
                return (-1,)
            return (
                self.wires.index(row.wire),
                self.weights.index(row.weights),
                self.inners.index(row.inner),
                self.combine_wires.index(row.combine_wire),
                self.exchanges.index(row.exchange),
            )

        return sorted(rows, key=place)

    def _whole(self, on_message: Send | None) -> tuple[Row, list[list[int]]]:
        by_rank = self._call(self._cell(None, []), WHOLE_MODEL, on_message)
        answers = _answers(by_rank)
        right = self._right(answers)
        row = Row(
            **asdict(Wiring(WHOLE_MODEL, "", "", "", "")),
            **_shared(right, by_rank),
            expert_bytes=by_rank[0]["expert_bytes"],
        )
        return row, [answers[number][0] for number in range(len(self.questions))]

    def _sharded(
        self,
        wiring: Wiring,
        whole: Row,
        drafts: list[list[int]],
        first: _Measured | None,
        on_message: Send | None,
    ) -> _Measured:
        only_probes = first is not None and not self.every
        by_rank = self._call(self._cell(wiring, drafts, only_probes=only_probes), str(wiring), on_message)
        bits = _bits(by_rank)
        if only_probes and first is not None and bits != first[1]:
            only_probes = False
            by_rank = self._call(self._cell(wiring, drafts), str(wiring), on_message)
        same_as = first[0] if only_probes and first is not None else None
        right = self._right(_answers(by_rank)) if same_as is None else same_as.right
        size = sum(rank["squared_size"] for rank in by_rank)
        row = Row(
            **asdict(wiring),
            **_shared(right, by_rank),
            difference=paired_difference(right, whole.right),
            logit_error=(sum(rank["squared_error"] for rank in by_rank) / size) ** 0.5 if size else None,
            bytes_per_token=by_rank[0]["bytes_per_token"],
            expert_bytes=sum(rank["expert_bytes"] for rank in by_rank),
            same_bits_as=None if same_as is None else same_as.exchange,
        )
        return row, bits

    def _cell(self, wiring: Wiring | None, drafts: list[list[int]], *, only_probes: bool = False) -> Cell:
        return Cell(
            folder=str(self.folder),
            prompts=[question.prompt for question in self.questions],
            wiring=wiring,
            batch=self.batch,
            most=self.most,
            drafts=drafts,
            only_probes=only_probes,
        )

    def _call(self, cell: Cell, what: str, on_message: Send | None) -> list[dict[str, Any]]:
        if on_message is None:
            return self.ranks.call(measure, cell)
        on_message({"what": what})
        return self.ranks.call(
            measure, cell, on_message=lambda message: on_message({**message, "what": what})
        )

    def _right(self, answers: dict[int, tuple[list[int], str]]) -> list[bool]:
        return [
            is_right(answers[number][1], question.answer) for number, question in enumerate(self.questions)
        ]


def _answers(by_rank: list[dict[str, Any]]) -> dict[int, tuple[list[int], str]]:
    """Tokens and text of all answers, by the number of their question."""
    return {number: (ids, text) for rank in by_rank for number, ids, text in rank["answers"]}


def _bits(by_rank: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What two exchanges must have in common to give the same answers: logits, and tokens of the probes."""
    probes = {number: tuple(ids) for number, (ids, _) in _answers(by_rank).items() if number < PROBES}
    return tuple(rank["digest"] for rank in by_rank), tuple(sorted(probes.items()))


def _shared(right: list[bool], by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of every row: right answers, accuracy, and tokens per second of all ranks, timed by the slowest."""
    tokens = sum(rank["probe_tokens"] for rank in by_rank)
    seconds = max(rank["probe_seconds"] for rank in by_rank)
    return {"right": right, "accuracy": wilson(sum(right), len(right)), "tokens_per_s": tokens / seconds}
