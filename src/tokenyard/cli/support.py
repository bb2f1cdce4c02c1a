"""`tokenyard support`: the tables of what is supported."""

from __future__ import annotations

from tokenyard.cli.options import JSON_FLAG
from tokenyard.cli.output import Output, console
from tokenyard.cli.tables import show_table


def support(as_json: bool = JSON_FLAG) -> None:
    """Show what is supported, as formats, exchanges and experts declare it."""
    from tokenyard.support import support_tables

    tables = support_tables()

    def show() -> None:
        for table in tables:
            rows = [[_cell(cell) for cell in row] for row in table.rows]
            about = {"title": table.title, "caption": _cell(table.note), "caption_justify": "left"}
            show_table([_cell(column) for column in table.columns], rows, **about)
            console().print()

    Output(as_json).deliver({"tables": [table.as_dict() for table in tables]}, show)


def _cell(text: str) -> str:
    """A text without its Markdown marks, and with brackets escaped, which rich would read as markup."""
    from tokenyard.support import plain

    return plain(text).replace("[", r"\[")
