"""Arithmetic word problems: what the shipped model was trained on, and what it is measured with.

A problem is an opening, one to three sentences of what happens, and a question (`stories`); its solution is two to
four steps, worked out digit by digit (`arithmetic`). Everything follows from a seed.

**What is held out.** Put `#` for every number, one name for all names, one word for all things, boxes and places,
and what is left of a problem is its skeleton: the sequence of its sentences. A hash of the skeleton says on which
side the problem is: one skeleton in sixteen is held out, and no training problem has it, with whatever numbers, names
and things. So the held-out problems are not only new, they are told in a way that the model has never seen.

    python3 -m tokenyard_lab.training.problems > lab/src/tokenyard_lab/shipped/held_out.jsonl

writes those that ship.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tokenyard_lab.training.arithmetic import DIVIDED, LARGEST, result, step
from tokenyard_lab.training.stories import (
    BOXES,
    EVENTS,
    MEN,
    OPENINGS,
    PLACES,
    QUESTIONS,
    THINGS,
    WOMEN,
    Sentence,
)

Split = Literal["training", "held_out"]

HELD_OUT_SEED = 20_260
SHIPPED = 2000  # held-out problems
FEWEST_STEPS, MOST_STEPS = 2, 4
MOST_EVENTS = 3
# One of so many skeletons is held out.
_BUCKETS = 16
# Numbers are drawn so often for one outline before another outline is drawn: long stories work out more rarely.
_TRIES = 8
# Before the answer, at the end of a solution.
ANSWER = "answer"


@dataclass(frozen=True)
class Problem:
    """A question, its solution as the model should write it, and the answer.

    >>> problem = held_out(1)[0]
    >>> problem.solution.endswith(f"answer {problem.answer}")
    True
    """

    question: str
    solution: str
    answer: int
    steps: int


def held_out(count: int, *, seed: int = HELD_OUT_SEED) -> list[Problem]:
    """The first `count` held-out problems: always the same ones, all different.

    >>> held_out(20) == held_out(30)[:20]
    True
    """
    found: dict[str, Problem] = {}
    for problem in stream("held_out", seed):
        if len(found) == count:
            break
        found.setdefault(problem.question, problem)
    return list(found.values())


def stream(split: Split, seed: int) -> Iterator[Problem]:
    """Problems of one side, without end.

    >>> problem = next(stream("training", seed=4))
    >>> is_held_out(problem.question)
    False
    """
    rng = random.Random(seed)
    while True:
        outline = _draw_outline(rng)
        if outline is None or _outline_is_held_out(outline) != (split == "held_out"):
            continue
        for _ in range(_TRIES):
            problem = _fill_in(outline, rng)
            if problem is not None:
                yield problem
                break


def is_held_out(question: str) -> bool:
    """Whether a problem belongs to the held-out side. Its numbers, names and things do not matter.

    >>> is_held_out("Mia has 3 pens. Tom gives her 5 more. What is the number of pens now?") == is_held_out(
    ...     "Raj has 12 eggs. Ada gives him 88 more. What is the number of eggs now?")
    True
    """
    return _bucket(skeleton(question)) == 0


def skeleton(question: str) -> str:
    """The problem without its numbers, names and things.

    >>> skeleton("Mia has 3 pens. Tom gives her 5 more. She sells 2 bags with 2 pens each.")
    '@ has # things . @ gives her # more . she sells # boxes with # things each .'
    """
    words = re.findall(r"[a-z]+|\d+|[^\w\s]", question.lower())
    return " ".join("#" if word.isdigit() else _PLAIN.get(word, word) for word in words)


def read_answer(text: str) -> int | None:
    """The number after the last `answer`, however its digits are spaced, or nothing.

    >>> read_answer("3 + 4 : 3 4 7 = 7 ; answer 7"), read_answer("answer 1 2 8"), read_answer("12 pens")
    (7, 128, None)
    """
    found = re.findall(rf"{ANSWER}\s*((?:\d\s*)+)", text)
    return int(re.sub(r"\s", "", found[-1])) if found else None


_PLAIN = (
    dict.fromkeys((name.lower() for name in WOMEN + MEN), "@")
    | dict.fromkeys(THINGS, "things")
    | {word: plain for pair in BOXES for word, plain in zip(pair, ("box", "boxes"), strict=True)}
    | dict.fromkeys(PLACES, "place")
    | {"he": "she", "him": "her"}
)
_PLACEHOLDERS = {
    "who": "Mia", "other": "Tom", "She": "She", "she": "she", "her": "her", "things": "pens", "box": "box",
    "boxes": "boxes", "place": "shop", "n": 5, "m": 5,
}  # fmt: skip

Outline = tuple[Sentence, ...]


def _draw_outline(rng: random.Random) -> Outline | None:
    opening = rng.choice(OPENINGS)
    events = tuple(rng.sample(EVENTS, rng.randint(1, MOST_EVENTS)))
    outline = (opening, *events, rng.choice(QUESTIONS))
    steps = sum(len(sentence.steps) for sentence in outline)
    idle = sum(not event.steps for event in events)
    return outline if FEWEST_STEPS <= steps <= MOST_STEPS and idle <= 1 else None


@lru_cache(maxsize=200_000)
def _outline_is_held_out(outline: Outline) -> bool:
    return is_held_out(" ".join(sentence.text.format(**_PLACEHOLDERS) for sentence in outline))


def _bucket(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % _BUCKETS


def _fill_in(outline: Outline, rng: random.Random) -> Problem | None:
    """Numbers, names and things for an outline; nothing where the numbers drawn do not work out."""
    who, other = rng.sample(WOMEN + MEN, 2)
    she, her = ("she", "her") if who in WOMEN else ("he", "him")
    box, boxes = rng.choice(BOXES)
    words = {
        "who": who, "other": other, "She": she.capitalize(), "she": she, "her": her,
        "things": rng.choice(THINGS), "box": box, "boxes": boxes, "place": rng.choice(PLACES),
    }  # fmt: skip
    pile, told, worked = 0, [], []
    for position, sentence in enumerate(outline):
        known = {"pile": pile, "n": _draw_number(rng), "m": rng.randint(2, 9), "last": 0}
        if sentence.steps and sentence.steps[0][1] == DIVIDED:
            divisors = [m for m in range(2, 10) if pile % m == 0]
            if not divisors:
                return None
            known["m"] = rng.choice(divisors)
        for left, sign, right in sentence.steps:
            numbers = known[left], sign, known[right]
            known["last"] = result(*numbers)
            if not 2 <= known["last"] <= LARGEST:
                return None
            worked.append(step(*numbers))
        told.append(sentence.text.format(**words, n=known["n"], m=known["m"]))
        if sentence.steps:
            pile = known["last"]
        elif position == 0:
            pile = known["n"]
    solution = " ".join([*worked, ANSWER, str(pile)])
    return Problem(" ".join(told), solution, pile, len(worked))


def _draw_number(rng: random.Random) -> int:
    """Small numbers as often as large ones: one, two or three digits."""
    digits = rng.choices((1, 2, 3), (2, 4, 3))[0]
    return rng.randint(max(2, 10 ** (digits - 1)), 10**digits - 1)


def shipped_lines() -> list[str]:
    """The lines of the file of held-out problems that ships."""
    return [json.dumps({"prompt": p.question, "answer": str(p.answer)}) for p in held_out(SHIPPED)]


if __name__ == "__main__":
    print("\n".join(shipped_lines()))
