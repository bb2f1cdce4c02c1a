"""The sentences that word problems are made of, and the words that fill them.

A story opens with a number of things, goes on with what happens to them, and ends with a question. Every sentence
says by itself which steps of arithmetic it asks for. Places to fill in:

- `{who}`, `{other}`: names; `{She}`, `{she}`, `{her}`: the first person again;
- `{things}`, `{box}`, `{boxes}`, `{place}`: what it is about;
- `{n}`: a number from 2 to 999; `{m}`: a number from 2 to 9.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard_lab.training.arithmetic import DIVIDED, MINUS, PLUS, TIMES

WOMEN = ("Mia", "Ada", "Lena", "Zoe", "Ines", "Nora", "Ruth", "Yuki", "Amara", "Priya", "Sofia", "Hana")
MEN = ("Tom", "Ben", "Omar", "Luis", "Ivan", "Noah", "Kofi", "Raj", "Emil", "Hugo", "Mateo", "Jonas")
THINGS = (
    "apples", "pens", "stamps", "marbles", "cards", "shells", "coins", "books", "cookies", "flowers", "stones",
    "lemons", "candles", "buttons", "tickets", "eggs", "nuts", "balls", "keys", "roses", "plates", "cups",
    "stickers", "pears",
)  # fmt: skip
BOXES = (("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"), ("crate", "crates"))
PLACES = ("garden", "kitchen", "shop", "school", "park", "barn", "market", "library", "cellar", "station")


@dataclass(frozen=True)
class Sentence:
    """A sentence and the steps that it asks for.

    A step is (left, sign, right), where `n` and `m` are the sentence's numbers, `pile` is the number of things so far,
    and `last` is what the step before came to. The last step's result is the new pile. A sentence that opens a story
    without a step makes `n` the pile; any other sentence without a step changes nothing.
    """

    text: str
    steps: tuple[tuple[str, str, str], ...] = ()


_ADD = (("pile", PLUS, "n"),)
_TAKE = (("pile", MINUS, "n"),)
_MULTIPLY = (("pile", TIMES, "m"),)
_DIVIDE = (("pile", DIVIDED, "m"),)
_GROUPS = (("n", TIMES, "m"),)
_ADD_GROUPS = (("n", TIMES, "m"), ("pile", PLUS, "last"))
_TAKE_GROUPS = (("n", TIMES, "m"), ("pile", MINUS, "last"))
_MISSING = (("n", MINUS, "pile"),)
_ADD_LARGER = (("pile", PLUS, "n"), ("pile", PLUS, "last"))

OPENINGS = (
    Sentence("{who} has {n} {things}."),
    Sentence("There are {n} {things} in the {place}, and all of them belong to {who}."),
    Sentence("In the morning {who} counts {n} {things} in the {place}."),
    Sentence("{who} brings {n} {things} to the {place}."),
    Sentence("{who} fills {m} {boxes} with {n} {things} each.", _GROUPS),
    Sentence("Every day {who} collects {n} {things}, for {m} days.", _GROUPS),
    Sentence("{other} has {n} {things}, and {who} has {m} times as many.", _GROUPS),
    Sentence("In the {place} {who} finds {m} rows of {n} {things}.", _GROUPS),
)
EVENTS = (
    Sentence("{other} gives {her} {n} more.", _ADD),
    Sentence("{She} buys {n} more {things}.", _ADD),
    Sentence("Then {she} finds {n} {things} in the {place}.", _ADD),
    Sentence("In the evening {other} brings {n} more {things}.", _ADD),
    Sentence("{n} other {things} come by post.", _ADD),
    Sentence("{She} gives {n} {things} to {other}.", _TAKE),
    Sentence("{She} loses {n} of them on the way.", _TAKE),
    Sentence("{n} of the {things} are too old and thrown away.", _TAKE),
    Sentence("{She} sells {n} of the {things} at the {place}.", _TAKE),
    Sentence("{other} takes {n} of them home.", _TAKE),
    Sentence("{She} buys {m} {boxes} with {n} {things} each.", _ADD_GROUPS),
    Sentence("{m} friends bring {n} {things} each.", _ADD_GROUPS),
    Sentence("Then {she} finds {n} {things} in each of {m} {boxes}.", _ADD_GROUPS),
    Sentence("{She} gives {n} {things} to each of {m} friends.", _TAKE_GROUPS),
    Sentence("{She} sells {m} {boxes} with {n} {things} each.", _TAKE_GROUPS),
    Sentence("A year later {she} has {m} times as many {things}.", _MULTIPLY),
    Sentence("At the {place} {she} gets {m} {things} for each of them.", _MULTIPLY),
    Sentence("{She} divides them into {m} equal parts and keeps one part.", _DIVIDE),
    Sentence("{She} shares them equally between {m} {boxes} and opens one {box}.", _DIVIDE),
    Sentence("{other} has {n} {things} more than {who}, and they put all of them together.", _ADD_LARGER),
    Sentence("{other} is {n} years old."),
    Sentence("This takes {her} {n} minutes."),
)
QUESTIONS = (
    Sentence("How many {things} does {who} have now?"),
    Sentence("How many {things} are there in the end?"),
    Sentence("What is the number of {things} now?"),
    Sentence("{other} has {n} {things}. How many {things} do they have together?", _ADD),
    Sentence("{other} has {n} {things} less. How many {things} does {other} have?", _TAKE),
    Sentence("How many {things} are left after {n} more are sold?", _TAKE),
    Sentence("{She} wants to have {n} {things}. How many are still missing?", _MISSING),
    Sentence("{She} sells all of them for {m} dollars each. How many dollars does {she} get?", _MULTIPLY),
    Sentence("How many {things} are that in {m} weeks, if every week is the same?", _MULTIPLY),
    Sentence("{She} puts all of them into {m} {boxes}. How many {things} are in each {box}?", _DIVIDE),
    Sentence("{m} friends share them equally. How many {things} does each friend get?", _DIVIDE),
)
