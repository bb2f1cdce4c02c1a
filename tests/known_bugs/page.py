"""Writes docs/known-bugs.md from the declared bugs: `python -m tests.known_bugs.page`.

The stories and the mutants are those of the declarations. What the checks say is what they say now.
"""

import inspect
import re
from pathlib import Path

import pytest

from tests.known_bugs.catalog import KINDS, KNOWN_BUGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "known-bugs.md"

_REPORTS = {
    "#39717": "39717-a-workspace-for-one-format",
    "#42976": "42976-a-workspace-for-the-first-layer",
    "#39315": "39315-a-kernel-that-returns-something-else",
    "#40960": "40960-who-quantizes-and-how-wide-is-a-row",
    "#41382": "41382-reduced-twice",
}

_INTRODUCTION = """\
# Known bugs, and what catches them

{count} bugs of expert-parallel layers. Some have a report, with a number; the others are mistakes that everybody makes
once. They have one thing in common: a plain layer on two ranks runs as if nothing were wrong.

Each is put into tokenyard's own code: a *mutant*, a patch of a function that every layer runs through. A mutant must
first be **alive**: a bf16 layer runs with it on two ranks, through `two_sided` and `one_sided`, without an error, and
returns finite numbers. It would ship. Then it must be **killed**, by the one check that is named for it: an error
that is always raised, or a check of the [suites](guide/check.md) that hold for parts of your own as well. What an error
catches, a check of the suites catches, too, but for one bug that needs a GPU: `tokenyard check` finds all others, by
name, and tests find those in what trainers compute beside the layer. The same check finds nothing without the mutant.
`tests/known_bugs` does all of this in every run of the tests, and a mutant that survives is a failing test.

| bug | caught by |
| --- | --- |
{table}

What stands below is written by `python -m tests.known_bugs.page`: the patch as it is applied, and what the check says.
"""


def caught(bug):
    """What the check says under the mutant."""
    with pytest.MonkeyPatch.context() as patch:
        bug.mutate(patch)
        return bug.caught_by.finding()


def frame(sections):
    """The page with these sections, by bug."""
    table = "\n".join(f"| [{one.name}](#{anchor(one.name)}) | {_catchers(one)} |" for one in KNOWN_BUGS)
    parts = [_INTRODUCTION.format(count=len(KNOWN_BUGS), table=table)]
    for kind in KINDS:
        parts.append(f"## {kind.name}\n\n{kind.about}\n")
        parts += [sections[bug.id] for bug in kind.bugs]
    return "\n".join(parts)


def _catchers(bug):
    return f"{bug.caught_by}; and {bug.in_check}" if bug.in_check else str(bug.caught_by)


def section(bug, finding):
    """What the page says of one bug."""
    source = inspect.getsource(bug.mutate)
    said = re.sub(r"; (?=expected |fix: )", ";\n  ", str(finding))
    seen = f"\nSeen in {_linked(bug.seen)}.\n" if bug.seen else ""
    return f"""\
### {bug.name}

{bug.story}
{seen}
<!-- not run: a patch of the package itself -->
```python
{source.rstrip()}
```

Caught by {bug.caught_by}:

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
    return re.sub(r"round \d+", "round 0", re.sub(r"\d+\.\d+(e[-+]?\d+)?", "0.0", text))


def main():
    """Write the page."""
    PAGE.write_text(frame({bug.id: section(bug, caught(bug)) for bug in KNOWN_BUGS}))


if __name__ == "__main__":
    main()
