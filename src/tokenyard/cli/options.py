"""Options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(help: str | None = None, *names: str, shown: str | bool = True, **limits: Any) -> Any:
    """An option of a command: its help, and its default as `--help` shows it, where that is not the value."""
    return typer.Option(*names, help=help, show_default=shown, **limits)


# More ranks than any group has: commands make a table of all ranks.
MOST_RANKS = 65536
# `output.reported` looks for this parameter: a command that has it is called `as_json`.
JsonFlag = Annotated[bool, option("Print one JSON document on stdout, and nothing else there.", "--json")]
OutFile = Annotated[
    Path | None, option("Save the figures, with date, hardware, versions and commit.", "--out")
]
PlotFile = Annotated[Path | None, option("Draw the figures into this file (needs matplotlib).", "--plot")]
ModelFolder = Annotated[Path | None, option("Folder of a checkpoint.", shown="the model that ships")]
RankCount = Annotated[int, option("How many ranks.", min=1, max=64)]
RankKind = Annotated[str, option("Ranks as `processes` or `threads`.")]
StartedDevice = Annotated[
    str, option("Where the started ranks live: `cpu` or `cuda`; those of torchrun take their GPU.")
]
RowsDevice = Annotated[str, option("Where the rows of the ranks live: `cpu`, `cuda`, or `cuda:0`.")]
Exchanges = Annotated[
    list[str] | None, option("Only this exchange; may be given several times.", shown="all")
]
# Exchanges that may be anybody's own.
LoadedExchanges = Annotated[
    list[str] | None,
    option("Only this exchange: a name, or package.module:Class. May be given several times.", shown="all"),
]
LongestAnswer = Annotated[int, option("The longest answer.", min=1)]
