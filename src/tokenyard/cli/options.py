"""The declaration of options, and the options that several commands share."""

from __future__ import annotations

from typing import Any

import typer


def option(
    default: Any, help: str | None = None, *names: str, shown: str | bool = True, **limits: Any
) -> Any:
    """An option of a command. With the default `...` it must be given; `shown` is the default as `--help` has it."""
    return typer.Option(default, *names, help=help, show_default=shown, **limits)


# More ranks than any group has. Commands make a table of all ranks, which must not fill the memory.
MOST_RANKS = 65536
# `output.reported` looks for this parameter: a command that has it is called `as_json`.
JSON_FLAG = option(False, "Print one JSON document on stdout, and nothing else there.", "--json")
ROWS_DEVICE = option("cpu", "Where the rows of the ranks live: `cpu`, `cuda`, or `cuda:0`.")
# Exchanges, registered or loaded from a module of the user's.
LOADED_EXCHANGES = option(
    None, "Only this exchange: a name, or package.module:Class. May be given several times.", shown="all"
)
