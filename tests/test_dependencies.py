"""The package needs what it imports, and says so: no library is missing in pyproject.toml, and none is too many."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import tokenyard

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
# They come with torch, triton where there are GPUs.
WITH_TORCH = {"triton", "typing_extensions"}


def imported() -> set[str]:
    """What the package imports that is neither Python's nor its own."""
    names = set()
    for path in Path(tokenyard.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"tokenyard"}


def test_the_package_declares_what_it_imports_and_nothing_else():
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["torchtitan"], *extras["transformers"], *extras["vllm"]]
    assert imported() == {re.match(r"[\w-]+", library)[0] for library in declared} | WITH_TORCH
