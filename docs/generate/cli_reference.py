"""The page of all commands and their options, from what `--help` shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from tokenyard.cli.commands import app
from tokenyard_lab.markdown import markdown_table

_ABOUT = """\
# Options of the commands

What `--help` shows, for every command of `tokenyard` and of `tokenyard-lab`. The guide is
[Command line](../guide/cli.md). Every command also has `--help`."""


def commands() -> dict[str, Any]:
    """Every command that does something, by its full name.

    >>> commands()["plan"].name, "bench" in commands()
    ('plan', False)
    """
    return dict(_leaves(typer.main.get_command(app), ""))


def _leaves(group: Any, parent: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{parent}{name} ")
        else:
            yield f"{parent}{name}", command


def page() -> str:
    """The page, in Markdown."""
    return "\n\n".join([_ABOUT, *(_section(name, command) for name, command in commands().items())]) + "\n"


def _section(name: str, command: Any) -> str:
    rows = [_row(option) for option in command.params]
    return (
        f"## {name}\n\n{_sentences(command.help)}\n\n{markdown_table(('option', 'default', 'meaning'), rows)}"
    )


def _row(option: Any) -> tuple[str, str, str]:
    is_argument = option.param_type_name == "argument"
    names = [option.name.upper()] if is_argument else [*option.opts, *option.secondary_opts]
    return " / ".join(f"`{name}`" for name in names), _default(option), _sentences(option.help or "")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    if isinstance(value, bool):  # a flag: its default has a name only where both ways have one
        return f"`{option.opts[0]}`" if value and option.secondary_opts else ""
    if value is None:
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, list | tuple) else value}`"


def _sentences(text: str) -> str:
    """Text on one line, with the pipes escaped that would end the cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))
