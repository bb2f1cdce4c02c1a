"""Parts named on the command line: registered ones by name, and any class as `package.module:Class`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from tokenyard.errors import InputError


def load_part(name: str, resolve: Callable[[Any], Any]) -> Any:
    """A registered class by its name, or the class that `package.module:Class` names."""
    return resolve(load_object(name) if ":" in name else name)


def load_object(path: str) -> Any:
    """The object that `package.module:Class` names, looked for in the current folder, too."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # process ranks inherit it
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{path} cannot be loaded ({error})",
            expected="package.module:Class, importable from here",
            fix=f"run in the folder that holds it, and try: python -c 'import {module_name}'",
        ) from error
    return found


def refuse_override() -> None:
    """Raise if an environment variable overrides the exchange of every plan: results would be those of another one."""
    from tokenyard.planning.drafting import EXCHANGE_VARIABLE

    if name := os.environ.get(EXCHANGE_VARIABLE):
        raise InputError(
            f"{EXCHANGE_VARIABLE}={name}, which overrides the exchange of every plan",
            expected="no override: each exchange is tried under its own name",
            fix=f"unset {EXCHANGE_VARIABLE}; --exchange chooses, where there is a choice",
        )
