"""All commands, under one name: the library's, and those of other distributions (`plugins`)."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tokenyard.cli.balance import balance
from tokenyard.cli.check import check
from tokenyard.cli.convert import convert
from tokenyard.cli.doctor import doctor
from tokenyard.cli.inspect import inspect
from tokenyard.cli.options import option
from tokenyard.cli.output import Command, Commands, reported
from tokenyard.cli.plan import plan
from tokenyard.cli.plugins import add_plugins
from tokenyard.cli.support import support
from tokenyard.version import __version__

COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (check, plan, balance, inspect, convert, doctor, support)
}

app = typer.Typer(
    name="tokenyard",
    cls=Commands,
    help="Expert-parallel MoE layers that cannot be wired wrong.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = option(False, "Print the version.", "--version", callback=_print_version, is_eager=True),
) -> None:
    """Expert-parallel MoE layers that cannot be wired wrong."""


for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(reported(_command))
add_plugins(app, COMMANDS)
