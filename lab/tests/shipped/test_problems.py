"""Word problems: solved right, always the same, and none that is held out is told as a training problem is."""

import re
from functools import cache
from itertools import islice

import pytest

from tokenyard.errors import InputError
from tokenyard_lab.evaluation.questions import held_out_questions
from tokenyard_lab.shipped import held_out_problems
from tokenyard_lab.training.arithmetic import LARGEST, result, step
from tokenyard_lab.training.problems import (
    MOST_STEPS,
    SHIPPED,
    held_out,
    is_held_out,
    read_answer,
    shipped_lines,
    skeleton,
    stream,
)
from tokenyard_lab.training.stories import EVENTS, MEN, OPENINGS, QUESTIONS, THINGS, WOMEN

# Some name tests, in every process that collects them; all take seconds to make.
SOME = [*held_out(100), *islice(stream("training", seed=3), 100)]
STEP = re.compile(r"(\d+) ([-+×÷]) (\d+) : ([\d ,]+) = (\d+) ;")


@cache
def every_held_out():
    return held_out(2000)


@cache
def many_for_training():
    return list(islice(stream("training", seed=3), 6000))


def test_two_thousand_different_problems_are_held_out():
    assert len({problem.question for problem in every_held_out()}) == 2000
    assert held_out(50) == every_held_out()[:50]


def test_training_and_held_out_problems_have_no_skeleton_in_common():
    """A skeleton is what is left without numbers, names and things."""
    ours, theirs = (
        {skeleton(p.question) for p in problems} for problems in (every_held_out(), many_for_training())
    )
    assert len(ours) > 500
    assert len(theirs) > 2000
    assert not ours & theirs
    assert all(is_held_out(problem.question) for problem in every_held_out())
    assert not any(is_held_out(problem.question) for problem in many_for_training())


def test_a_skeleton_holds_no_number_no_name_and_no_thing():
    words = {name.lower() for name in WOMEN + MEN} | set(THINGS)
    for problem in every_held_out()[:300]:
        assert not words & set(skeleton(problem.question).split())
        assert not re.search(r"\d", skeleton(problem.question))


def test_a_seed_gives_the_same_problems_and_another_seed_others():
    first, again, other = (list(islice(stream("training", seed), 20)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("problem", SOME, ids=lambda p: str(p.answer))
def test_every_step_is_right_and_leads_to_the_answer(problem):
    steps = STEP.findall(problem.solution)
    assert 2 <= len(steps) == problem.steps <= MOST_STEPS
    for left, sign, right, columns, value in steps:
        exact = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__, "÷": int.__floordiv__}[sign]
        assert int(value) == exact(int(left), int(right)) <= LARGEST
        assert sign != "÷" or int(left) % int(right) == 0
        assert len(columns.split(" , ")) == max(len(left), 1 if sign in "×÷" else len(right))
    assert int(steps[-1][4]) == problem.answer == read_answer(problem.solution)


@pytest.mark.parametrize("sign", ["+", "-", "×", "÷"])
def test_columns_hold_the_digits_of_both_numbers_and_of_the_result(sign):
    """Read on their own: downwards the columns give left, right and the result (but for a last carry in front)."""
    for left in range(1, 1000, 7):
        for right in (2, 3, 7, 9) if sign in "×÷" else (1, 26, 350, 999):
            whole = sign != "÷" or left % right == 0
            if not whole or not 0 <= result(left, sign, right) <= LARGEST:
                continue
            worked = step(left, sign, right).split(" : ")[1].split(" = ")[0]
            columns = [column.split() for column in worked.split(" , ")]
            if sign != "÷":
                columns.reverse()
            read = [int("".join(digits)) for digits in zip(*columns, strict=True)]
            assert read[0] == left
            assert read[1] == (right if sign in "+-" else int(str(right) * len(str(left))))
            assert read[2] == result(left, sign, right) % 10 ** len(columns)


def test_every_sentence_is_told():
    told = " ".join(skeleton(problem.question) for problem in many_for_training())
    for sentence in OPENINGS + EVENTS + QUESTIONS:
        filled = sentence.text.format(
            who="Mia", other="Tom", She="She", she="she", her="her", things="pens", box="box", boxes="boxes",
            place="shop", n=5, m=5,
        )  # fmt: skip
        assert skeleton(filled) in told


def test_the_file_that_ships_has_the_held_out_problems():
    assert held_out_problems().read_text().splitlines() == shipped_lines()
    assert len(held_out_questions(SHIPPED)) == SHIPPED == 2000
    with pytest.raises(InputError, match="2001 word problems; expected at most 2000"):
        held_out_questions(SHIPPED + 1)
