"""Writes docs/known-bugs.md from the declared bugs: `python -m tests.known_bugs.page`.

The stories are those of the declarations, where the mutants are, too. What the checks say is what they say now.
"""

import re
from pathlib import Path

import pytest

from tests.known_bugs.catalog import KINDS, KNOWN_BUGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "known-bugs.md"

_INTRODUCTION = """\
# Known bugs, and what catches them

{count} bugs of expert-parallel layers. Some have a report, with a number ([five of them](reports.md) in detail);
the others are mistakes that are easy to make. With each of them a plain layer on two ranks runs as if nothing were
wrong.

Each bug is put into tokenyard's own code as a *mutant*, a patch of a function that every layer runs through
(`tests/known_bugs/kinds` has the patches). A mutant must first be **alive**: a bf16 layer runs with it on two
ranks, through `two_sided` and `one_sided`, without an error, and returns finite numbers. Then one named check must
**kill** it: an error that is always raised, or a check of the [suites](guide/check.md) that hold for parts of your
own, too. Without the mutant the same check finds nothing. `tokenyard check` finds all of them by name, except one
that needs a GPU, and those in what trainers compute beside the layer, which tests find. A mutant that survives is a
failing test.

`python -m tests.known_bugs.page` writes this page.
"""


def caught(bug):
    """What the check says under the mutant."""
    with pytest.MonkeyPatch.context() as patch:
        bug.mutate(patch)
        return bug.caught_by.finding()


def frame(sections):
    """The page with these sections, by bug."""
    parts = [_INTRODUCTION.format(count=len(KNOWN_BUGS))]
    for kind in KINDS:
        parts.append(f"## {kind.name}\n\n{kind.about}\n")
        parts += [sections[bug.id] for bug in kind.bugs]
    return "\n".join(parts)


def section(bug, finding):
    """What the page says of one bug."""
    said = re.sub(r"; (expected|fix:) .*", "", str(finding), flags=re.DOTALL)  # only what was found
    seen = f" Seen in {bug.seen}." if bug.seen else ""
    return f"""\
### {bug.name}

{bug.story}{seen}

Caught by {bug.caught_by}: “{said}”
"""


def comparable(text):
    """What may differ from run to run: how products round, and the phase and the round in which a late rank is late."""
    text = re.sub(r"round \d+", "round 0", re.sub(r"\d+\.\d+(e[-+]?\d+)?", "0.0", text))
    return re.sub(r"(dispatch|combine) of layer", "a phase of layer", text)


def main():
    """Write the page."""
    PAGE.write_text(frame({bug.id: section(bug, caught(bug)) for bug in KNOWN_BUGS}))


if __name__ == "__main__":
    main()
