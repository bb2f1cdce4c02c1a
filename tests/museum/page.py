"""Writes docs/museum.md from the exhibits: `python -m tests.museum.page`.

The stories and the mutants are taken from the exhibits' declarations, and what the checks say is what they say now.
"""

import inspect
import re
from pathlib import Path

import pytest

from tests.museum.catalog import EXHIBITS, ROOMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "museum.md"

_REPORTS = {
    "#39717": "39717-a-workspace-for-one-format",
    "#42976": "42976-a-workspace-for-the-first-layer",
    "#39315": "39315-a-kernel-that-returns-something-else",
    "#40960": "40960-who-quantizes-and-how-wide-is-a-row",
    "#41382": "41382-reduced-twice",
}

_INTRODUCTION = """\
# The museum of bugs

{count} bugs of expert-parallel layers. Some have a report, with a number; the others are mistakes that everybody makes
once. They have one thing in common: a plain layer on two ranks runs as if nothing were wrong.

Each is put into tokenyard's own code: a *mutant*, a patch of a function that every layer runs through. A mutant must
first be **alive**: a bf16 layer runs with it on two ranks, through `two_sided` and `one_sided`, without an error, and
returns finite numbers. It would ship. Then it must be **killed**, by the one check that is named for it: an error
that is always raised, or a check of the [suites](guide/check.md) that hold for parts of your own as well. What an error
catches, a check of the suites catches, too, but for one bug that needs a GPU: `tokenyard check` finds all others, by
name. The same check finds nothing without the mutant. `tests/museum` does all of this in every run of the tests, and a
mutant that survives is a failing test.

| exhibit | caught by |
| --- | --- |
{table}

What stands below is written by `python -m tests.museum.page`: the patch as it is applied, and what the check says.
"""


def caught(exhibit):
    """What the check says under the mutant."""
    with pytest.MonkeyPatch.context() as patch:
        exhibit.mutate(patch)
        return exhibit.caught_by.finding()


def frame(sections):
    """The page with these sections, by exhibit."""
    table = "\n".join(f"| [{one.name}](#{anchor(one.name)}) | {_catchers(one)} |" for one in EXHIBITS)
    parts = [_INTRODUCTION.format(count=len(EXHIBITS), table=table)]
    for room in ROOMS:
        parts.append(f"## {room.name}\n\n{room.about}\n")
        parts += [sections[exhibit.id] for exhibit in room.exhibits]
    return "\n".join(parts)


def _catchers(exhibit):
    return f"{exhibit.caught_by}; and {exhibit.in_check}" if exhibit.in_check else str(exhibit.caught_by)


def section(exhibit, finding):
    """What the page says of one exhibit."""
    source = inspect.getsource(exhibit.mutate)
    said = re.sub(r"; (?=expected |fix: )", ";\n  ", str(finding))
    seen = f"\nSeen in {_linked(exhibit.seen)}.\n" if exhibit.seen else ""
    return f"""\
### {exhibit.name}

{exhibit.story}
{seen}
<!-- not run: a patch of the package itself -->
```python
{source.rstrip()}
```

Caught by {exhibit.caught_by}:

```text title="finding"
{said}
```
"""


def anchor(heading):
    """Where a heading is linked to."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _linked(seen):
    def link(found):
        return f"[{found[0]}](reports.md#{_REPORTS[found[1]]})"

    return re.sub(r"vLLM (#\d+)", link, seen)


def comparable(text):
    """What may differ from run to run: how products of matrices round, and the round in which a late rank is late."""
    return re.sub(r"round \d+", "round 0", re.sub(r"\d+\.\d+(e-?\d+)?", "0.0", text))


def main():
    """Write the page."""
    PAGE.write_text(frame({exhibit.id: section(exhibit, caught(exhibit)) for exhibit in EXHIBITS}))


if __name__ == "__main__":
    main()
