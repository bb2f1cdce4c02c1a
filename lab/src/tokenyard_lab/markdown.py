"""Tables in Markdown, for pages of the documentation that are generated."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table: a line of names, and a line for each row.

    >>> print(markdown_table(("name", "bytes"), [("bf16", "2"), ("fp8", "1")]))
    | name | bytes |
    | --- | --- |
    | bf16 | 2 |
    | fp8 | 1 |
    """
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
