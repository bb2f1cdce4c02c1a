"""Questions: prompts with the right answers.

A file of one's own has a JSON object a line:

    {"prompt": "Mia has 3 pens. Tom gives her 5 more. How many pens are there in the end?", "answer": "8"}

An answer is right if it is exactly what was wanted, where spaces and capitals do not count. In a text with
intermediate steps, the answer begins after the last `answer` or `####`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenyard.errors import InputError
from tokenyard_lab.shipped import held_out_problems

_MARK = re.compile(r"answer\s*:?|####", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer that is wanted."""

    prompt: str
    answer: str


def held_out_questions(count: int) -> list[Question]:
    """The first held-out word problems.

    >>> held_out_questions(1)[0].answer
    '42'
    """
    found = read_questions(held_out_problems(), count)
    if len(found) < count:
        raise InputError(
            f"{count} word problems",
            expected=f"at most {len(found)}, the number that ships",
            fix="ask for fewer --problems, or bring questions of your own with --data",
        )
    return found


def read_questions(path: Path, count: int | None = None) -> list[Question]:
    """The questions of a file, at most `count`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error})",
            expected="a file of JSON lines",
            fix="choose another --data",
        ) from error
    found: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if count is not None and len(found) == count:
            break
        found.append(_read_line(path, number, line))
    if not found:
        raise InputError(
            f"{path} holds no question", expected="at least one line", fix="choose another --data"
        )
    return found


def _read_line(path: Path, number: int, line: str) -> Question:
    try:
        entry = json.loads(line)
        prompt, answer = entry["prompt"], entry["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}, line {number}: {line[:80]!r} ({type(error).__name__}: {error})",
            expected='a JSON object with "prompt" and "answer"',
            fix="write one such object a line",
        ) from error
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(answer, (str, int, float)):
        raise InputError(
            f"{path}, line {number}: prompt {prompt!r:.60}, answer {answer!r:.60}",
            expected="a prompt that is text and not empty, and an answer that is text or a number",
            fix="mend that line",
        )
    return Question(prompt, str(answer))


def is_right(text: str, wanted: str) -> bool:
    """Whether a text gives the wanted answer.

    >>> is_right("3 + 5 : 3 5 8 = 8 ; answer 8", "8"), is_right("Paris ", "paris"), is_right("answer 18", "8")
    (True, True, False)
    """
    *_, last = _MARK.split(text)
    return _plain(last) == _plain(wanted)


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text).lower()
