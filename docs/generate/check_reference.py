"""The page of all named checks, from the docstrings of the checks."""

from __future__ import annotations

import inspect

from tokenyard.conformance.suites import EXCHANGE_CHECKS, EXPERTS_CHECKS, FORMAT_CHECKS
from tokenyard_lab.markdown import markdown_table

_ABOUT = """\
# Named checks

What `tokenyard check` and the suites of `tokenyard.conformance.suites` ask of a part, by name. The guide is
[Checking parts](../guide/check.md)."""

_SUITES = {"Exchanges": EXCHANGE_CHECKS, "Formats": FORMAT_CHECKS, "Experts": EXPERTS_CHECKS}


def page() -> str:
    """The page, in Markdown: a table for each kind of part."""
    parts = [_ABOUT]
    for title, checks in _SUITES.items():
        rows = [(f"`{name}`", _summary(check)) for name, check in checks.items()]
        parts.append(f"## {title}\n\n{markdown_table(('check', 'what it asks'), rows)}")
    return "\n\n".join(parts) + "\n"


def _summary(check: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(check) or "").split("\n\n")[0].split())
