"""Tables that stand between marks on pages: of figures, of errors, of what is supported.

Nobody copies a figure or a message by hand, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate.combine_tables import COMBINE_TABLES
from docs.generate.figures import FIGURES
from docs.generate.inf_tables import inf_in_markdown
from docs.generate.path_tables import paths_in_markdown
from docs.generate.vllm_tables import refusals_in_markdown, settings_in_markdown
from tokenyard.errors import InputError
from tokenyard.support import SupportTable, support_tables
from tokenyard_lab.markdown import markdown_table

PAGES = (
    "README.md",
    "bench/notes/combine-wire.md",
    "bench/notes/gpu-experts.md",
    "bench/notes/gpu-kernel-paths.md",
    "docs/figures.md",
    "docs/support.md",
    "docs/guide/numerics.md",
    "docs/guide/vllm.md",
)
TABLES: dict[str, Callable[[], str]] = {
    **FIGURES,
    **COMBINE_TABLES,
    "support": lambda: "\n\n".join(map(_in_markdown, support_tables())),
    "inf": inf_in_markdown,
    "paths": paths_in_markdown,
    "vllm-settings": settings_in_markdown,
    "vllm-refusals": refusals_in_markdown,
}


def _in_markdown(table: SupportTable) -> str:
    """A table under its title in bold: pages choose their own headings."""
    return f"**{table.title}.** {table.note}\n\n{markdown_table(table.columns, table.rows)}"


def rewrite(page: Path) -> bool:
    """Renew the tables of a page; whether anything changed."""
    text = written = page.read_text()
    for name, make in TABLES.items():
        if marks(name)[0] in text:
            written = between_marks(page, written, name, make())
    if written != text:
        page.write_text(written)
    return written != text


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind the tables of this name.

    >>> marks("support")
    ('<!-- support:begin -->', '<!-- support:end -->')
    """
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def between_marks(path: Path, text: str, name: str, tables: str) -> str:
    """A page's text with these tables between the marks of that name."""
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise InputError(
            f"{path} has {text.count(begin)} × {begin} and {text.count(end)} × {end}",
            expected="each of them once, in this order",
            fix="write both marks, on lines of their own, where the tables shall stand",
        )
    before, after = text[: text.index(begin)], text[text.index(end) :]
    # Markdown sees a table only behind an empty line.
    return f"{before}{begin}\n\n{tables}\n\n{after}"
