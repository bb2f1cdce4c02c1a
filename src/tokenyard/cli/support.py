"""`tokenyard support`: the tables of what is supported, shown or written into Markdown files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenyard.cli.options import JsonFlag, option
from tokenyard.cli.output import console, print_json
from tokenyard.cli.tables import show_table
from tokenyard.errors import InputError


def support(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Markdown files, with --write.")
    ] = None,
    write: Annotated[
        bool, option("Write the tables between the support marks of the files.", "--write")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what is supported, as formats, exchanges and experts declare it."""
    from tokenyard.lab.support import rewrite, support_tables
    from tokenyard.planning.drafting import count

    files = files or []
    if write != bool(files):
        raise InputError(
            f"{count(len(files), 'file')} {'with' if write else 'without'} --write",
            expected="--write and at least one file, or neither",
            fix="tokenyard support --write docs/support.md",
        )
    if write:
        changed = {str(path): rewrite(path) for path in files}
        if as_json:
            print_json({"written": [{"file": path, "changed": new} for path, new in changed.items()]})
        else:
            for path, new in changed.items():
                console().print(f"{path}: {'written' if new else 'up to date'}", markup=False, soft_wrap=True)
        return
    tables = support_tables()
    if as_json:
        print_json({"tables": [table.as_dict() for table in tables]})
        return
    for table in tables:
        rows = [[_cell(cell) for cell in row] for row in table.rows]
        about = {"title": table.title, "caption": _cell(table.note), "caption_justify": "left"}
        show_table([_cell(column) for column in table.columns], rows, **about)
        console().print()


def _cell(text: str) -> str:
    """Marks of Markdown are for pages, and a bracket is no markup of the console's."""
    from tokenyard.lab.support import plain

    return plain(text).replace("[", r"\[")
