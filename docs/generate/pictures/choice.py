"""Which exchange, which wire and which weights to take: questions with yes and no."""

from __future__ import annotations

from dataclasses import dataclass

from docs.generate.pictures.svg import Drawing


@dataclass(frozen=True)
class Question:
    """A question, and what to take if the answer is yes; if it is no, the next one is asked."""

    lines: tuple[str, ...]
    answer: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Questions about one argument, and what is left in the end."""

    title: str
    color: str
    questions: tuple[Question, ...]
    otherwise: tuple[str, ...]


CHOICES = (
    Choice(
        "exchange=",
        "blue",
        (
            Question(("Do experts route by themselves", "(router logits travel)?"), ("allgather",)),
            Question(("Do all ranks run on one host,", "on x86 CPUs or on its GPUs?"), ("one_sided",)),
            Question(("Do some of them share a host,", "on x86 CPUs or on its GPUs?"), ("hierarchical",)),
        ),
        ("two_sided",),
    ),
    Choice(
        "wire=",
        "green",
        (
            Question(("Is the time for moving rows small", "beside that of the experts?"), ("leave it out",)),
            Question(("Are half the bytes enough?",), ("mxfp8", "fp8_block128")),
        ),
        ("nvfp4, if accuracy allows",),
    ),
    Choice(
        "weights=",
        "amber",
        (
            Question(("Is the checkpoint quantized?",), ("its own format",)),
            Question(("Do the experts fit into memory?",), ("leave it out",)),
            Question(("Do they fit in half the bytes?",), ("mxfp8", "fp8_block128")),
        ),
        ("mxint4, mxfp4", "or nvfp4"),
    ),
)

_QUESTION, _ANSWER = 292, 186
_LEFT, _STEP, _HIGH = 16, 66, 46


def draw() -> str:
    """The picture."""
    steps = sum(len(choice.questions) + 1 for choice in CHOICES)
    drawing = Drawing(28 + steps * _STEP + len(CHOICES) * 26 + 10, "Which exchange, wire and weights to take")
    y = 28.0
    for choice in CHOICES:
        drawing.text(_LEFT, y, choice.title, size=16, font="mono", bold=True)
        y += 14
        for question in choice.questions:
            _ask(drawing, y, question, choice.color)
            y += _STEP
        drawing.boxed(_LEFT, y, _QUESTION, 40, list(choice.otherwise), choice.color, font="mono", size=13)
        y += _STEP + 12
    drawing.text(
        _LEFT,
        y - 6,
        "On one host, all exchanges give the same bits. tokenyard eval measures formats.",
        size=13,
        color="muted",
    )
    return str(drawing)


def _ask(drawing: Drawing, y: float, question: Question, color: str) -> None:
    drawing.boxed(_LEFT, y, _QUESTION, _HIGH, list(question.lines), "gray")
    answer = _LEFT + _QUESTION + 110
    drawing.arrow((_LEFT + _QUESTION, y + _HIGH / 2), (answer, y + _HIGH / 2))
    drawing.text(_LEFT + _QUESTION + 40, y + _HIGH / 2 - 6, "yes", size=13, color="muted")
    drawing.boxed(answer, y + 3, _ANSWER, _HIGH - 6, list(question.answer), color, font="mono", size=13)
    drawing.arrow((_LEFT + 40, y + _HIGH), (_LEFT + 40, y + _STEP))
    drawing.text(_LEFT + 50, y + _HIGH + 14, "no", size=13, color="muted")
