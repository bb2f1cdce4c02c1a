"""Tables that stand between marks on pages: of figures, of errors, of what is supported.

Nobody copies a figure or a message by hand, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate.combine_tables import COMBINE_TABLES
from docs.generate.error_table import classes_in_markdown, troubles_in_markdown
from docs.generate.figures import FIGURES
from docs.generate.vllm_tables import refusals_in_markdown, settings_in_markdown
from tokenyard.lab.support import between_marks, marks, to_markdown

PAGES = (
    "README.md",
    "docs/figures.md",
    "docs/support.md",
    "docs/guide/choosing-formats.md",
    "docs/guide/errors.md",
    "docs/guide/vllm.md",
)
TABLES: dict[str, Callable[[], str]] = {
    **FIGURES,
    **COMBINE_TABLES,
    "support": to_markdown,
    "troubles": troubles_in_markdown,
    "error-classes": classes_in_markdown,
    "vllm-settings": settings_in_markdown,
    "vllm-refusals": refusals_in_markdown,
}


def rewrite(page: Path) -> bool:
    """Renew the tables of a page; whether anything changed."""
    text = written = page.read_text()
    for name, make in TABLES.items():
        if marks(name)[0] in text:
            written = between_marks(page, written, name, make())
    if written != text:
        page.write_text(written)
    return written != text
