"""Options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# More ranks than any group has: commands make a table of all ranks.
MOST_RANKS = 65536
# `output.reported` looks for this parameter: a command that has it is called `as_json`.
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
]
OutFile = Annotated[
    Path | None, typer.Option("--out", help="Save the figures, with date, hardware, versions and commit.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw the figures into this file (needs matplotlib).")
]
ModelFolder = Annotated[
    Path | None, typer.Option(help="Folder of a checkpoint.", show_default="the model that ships")
]
RankCount = Annotated[int, typer.Option(min=1, max=64, help="How many ranks.")]
RankKind = Annotated[str, typer.Option(help="Ranks as `processes` or `threads`.")]
StartedDevice = Annotated[
    str,
    typer.Option(help="Where the started ranks live: `cpu` or `cuda`; those of torchrun take their GPU."),
]
RowsDevice = Annotated[
    str, typer.Option(help="Where the rows of the ranks live: `cpu`, `cuda`, or `cuda:0`.")
]
Exchanges = Annotated[
    list[str] | None, typer.Option(help="Only this exchange; may be given several times.", show_default="all")
]
# Exchanges that may be anybody's own.
LoadedExchanges = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this exchange: a name, or package.module:Class. May be given several times.",
        show_default="all",
    ),
]
LongestAnswer = Annotated[int, typer.Option(min=1, help="The longest answer.")]
