"""Commands that other distributions add to `tokenyard`.

An entry point of the group `tokenyard.commands` names a table of commands by name: functions whose parameters declare
options, or applications of typer with commands of their own.

    [project.entry-points."tokenyard.commands"]
    lab = "tokenyard_lab.commands:COMMANDS"

Every call of `tokenyard` imports these modules: they import typer and nothing heavier at their top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

import typer

from tokenyard.cli.options import JSON_FLAG
from tokenyard.cli.output import EXIT_ERROR, Command, reported
from tokenyard.errors import InputError

GROUP = "tokenyard.commands"
# tokenyard-lab is found without its metadata, too: in a checkout, with PYTHONPATH=src:lab/src and no installation.
LAB = EntryPoint(name="lab", value="tokenyard_lab.commands:COMMANDS", group=GROUP)
LAB_COMMANDS = ("run", "eval", "bench", "soak")


def add_plugins(app: typer.Typer, taken: Mapping[str, Any]) -> None:
    """Add the commands of other distributions to an application that has the commands `taken`.

    The commands of tokenyard-lab that are not installed say how to get them.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if find_spec("tokenyard_lab") is not None:
        points.setdefault(LAB.name, LAB)
    added: dict[str, Any] = dict(taken)
    for point in points.values():
        for name, command in _table(point).items():
            if name in added:
                typer.echo(f"warning: the command {name} of {point.value} exists already: left out", err=True)
                continue
            added[name] = command
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name, cls=Command)(reported(command))
    for name in LAB_COMMANDS:
        if name not in added:
            _add_missing(app, name)


def _table(point: EntryPoint) -> Mapping[str, Any]:
    """The commands of an entry point; none, with a warning, if it cannot be loaded: the other commands still work."""
    try:
        table: Mapping[str, Any] = point.load()
    except Exception as error:
        typer.echo(f"warning: no commands of {point.value}: {type(error).__name__}: {error}", err=True)
        return {}
    return table


def _add_missing(app: typer.Typer, name: str) -> None:
    """Add a command that takes any arguments and says how to install tokenyard-lab."""

    def missing(as_json: bool = JSON_FLAG) -> None:
        error = InputError(
            f"`tokenyard {name}` is a command of tokenyard-lab, which is not installed",
            expected="tokenyard-lab, which measures and demonstrates the layer",
            fix="`pip install ./lab` in a checkout",
        )
        if as_json:
            raise error
        typer.echo(f"error: {error.found}: {error.fix}", err=True)
        raise typer.Exit(EXIT_ERROR)

    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    command: Callable[..., Any] = reported(missing)
    app.command(name, cls=Command, hidden=True, context_settings=any_arguments)(command)
