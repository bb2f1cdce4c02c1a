"""The commands that the lab adds to `tokenyard`: the entry point `lab` of the group `tokenyard.commands`."""

from __future__ import annotations

from typing import Any

from tokenyard_lab.cli.bench import app as bench
from tokenyard_lab.cli.eval import evaluate
from tokenyard_lab.cli.run import run
from tokenyard_lab.cli.soak import soak

COMMANDS: dict[str, Any] = {"run": run, "eval": evaluate, "bench": bench, "soak": soak}
