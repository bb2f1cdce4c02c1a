"""All commands, under one name."""

from __future__ import annotations

import typer

from tokenyard.cli import bench
from tokenyard.cli.balance import balance
from tokenyard.cli.check import check
from tokenyard.cli.convert import convert
from tokenyard.cli.doctor import doctor
from tokenyard.cli.eval import evaluate
from tokenyard.cli.inspect import inspect
from tokenyard.cli.options import option
from tokenyard.cli.output import Command, Commands, reported
from tokenyard.cli.plan import plan
from tokenyard.cli.run import run
from tokenyard.cli.soak import soak
from tokenyard.cli.support import support
from tokenyard.version import __version__

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


app.command(cls=Command)(reported(run))
app.command("eval", cls=Command)(reported(evaluate))
for _command in (check, soak, plan, balance, inspect, convert, doctor, support):
    app.command(cls=Command)(reported(_command))
app.add_typer(bench.app, name="bench")
