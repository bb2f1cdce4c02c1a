"""Call the command line inside this process, and read its JSON."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from tokenyard.cli.commands import app
from tokenyard.conformance import suites

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def leave_few_checks(monkeypatch) -> None:
    """`tokenyard check` in this process runs a few of the checks of an exchange.

    All checks of all exchanges run, through the same function, in tests/conformance/test_suites.py.
    """
    few = ("bitwise_movement", "many_rounds", "several_in_flight", "bad_input_reaches_all")
    monkeypatch.setattr(suites, "EXCHANGE_CHECKS", {name: suites.EXCHANGE_CHECKS[name] for name in few})


def call(*arguments: object):
    """The result of `tokenyard arguments…`; an exception that is no exit is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def call_json(*arguments: object, exit_code: int = 0) -> Any:
    """The one document on stdout: anything else there makes this fail."""
    result = call(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)
