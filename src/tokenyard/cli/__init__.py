"""The command line: `tokenyard` and its commands.

`check`, `plan`, `balance`, `inspect`, `convert`, `doctor` and `support`: a command is a function in a module of its
name. Other distributions add commands by entry points (`plugins`): tokenyard-lab has `run`, `eval`, `bench` and `soak`.
Modules import typer and nothing heavier at their top; torch and the rest of the package are imported inside the
functions, so that `--help` answers at once. An error of the package gives one readable message on stderr and exit code
2 (`output.reported`); `--json` prints exactly one JSON document on stdout, and nothing else there, also where an option
is wrong (`output.Commands`). Ctrl-C ends a command within a second, with exit code 130 (`interrupts`).
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """The console script."""
    from tokenyard.cli.interrupts import end_on_interrupt

    end_on_interrupt()  # before typer is imported, which takes a while
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an encoding without ✓ must not end a command
    from tokenyard.cli.commands import app

    app(prog_name="tokenyard")
