"""The stub that `make test` runs with has the signatures of the vLLM that is installed here."""

import ast

from tests.integrations.vllm_signatures import STUB, written


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
    """If it fails: see what changed upstream, then run `python -m tests.integrations.vllm_signatures`."""
    kept, now = methods(STUB.read_text()), methods(written())
    changed = [name for name in kept.keys() | now.keys() if kept.get(name) != now.get(name)]
    assert sorted(changed) == []
