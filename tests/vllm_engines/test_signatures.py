"""The stubs that `make test` runs with are those of the vLLM that is installed here."""

import ast
import json
from pathlib import Path

import vllm

from tests.integrations.vllm_signatures import files_of, stub_of, used, version_of, written

# If one fails: see what changed upstream, then run `python -m tests.integrations.vllm_signatures` on this folder.
INSTALLED = files_of(Path(vllm.__file__).parent.parent)
VERSION = version_of(INSTALLED)


def methods(source):
    """The parts of a module: each class's methods by name, and what else there is."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                name = getattr(member, "name", None) or ast.unparse(member)
                found[f"{node.name}.{name}"] = ast.unparse(member)
        else:
            found[ast.unparse(node)] = ""
    return found


def test_the_stub_has_the_signatures_of_vllm():
    kept, now = methods(stub_of(VERSION).read_text()), methods(written(INSTALLED))
    changed = [name for name in kept.keys() | now.keys() if kept.get(name) != now.get(name)]
    assert sorted(changed) == []


def test_what_else_the_plugin_uses_is_as_it_was_written_down():
    kept = json.loads(stub_of(VERSION, "json").read_text())
    assert kept == {"version": VERSION, "used": used(INSTALLED)}
