"""The versions of vLLM that the plugin takes: what it uses of each is there, and differs in nothing that matters.

Engines are run with the first version. The others are compared with it, as read from the files of their wheels.
"""

import ast
import json
from pathlib import Path

import pytest

import tokenyard
from tests.integrations.vllm_signatures import CLASSES, USED, stub_of
from tokenyard.integrations.vllm.refusals import VERSIONS

PLUGIN = Path(tokenyard.__file__).parent / "integrations" / "vllm"
_FUSED = "model_executor/layers/fused_moe"
# What has changed in what the plugin uses, and why that does not matter to it.
CHANGED = {
    # A further base, which pads weights of sizes that its kernel cannot hold. It overrides no method of ours.
    "0.33": {f"{_FUSED}/experts/cpu_moe.py: CPUUnquantizedExperts"},
}


def used(version):
    stored = json.loads(stub_of(version, "json").read_text())
    assert stored["version"].startswith(f"{version}.")
    return stored["used"]


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_the_plugin_uses_is_there(version):
    assert [name for name, text in used(version).items() if text == "absent"] == []


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_it_is_as_in_the_version_that_was_run(version):
    run, compared = used(VERSIONS[0]), used(version)
    assert run.keys() == compared.keys()
    assert {name for name in run if run[name] != compared[name]} == CHANGED[version]


def imported():
    """The names that the plugin imports from vLLM, each with the module that has it."""
    for file in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names if alias.name.startswith("vllm"))


def test_every_name_that_the_plugin_imports_is_compared():
    compared = {name for names in USED.values() for name in names} | set(CLASSES) | {"FusedMoEQuantConfig"}
    files = {f"vllm/{file}" for file in USED}
    found = list(imported())
    assert len(found) > 20
    for module, name in found:
        if name is None:  # a whole module
            assert module == "vllm" or f"{module.replace('.', '/')}.py" in files
        elif name != "current_platform":  # made of the class Platform
            assert name in compared, f"{name} of {module}"


def test_every_method_that_the_plugin_overrides_is_compared():
    """Methods of our subclasses whose names vLLM's own classes have."""
    compared = {member for names in USED.values() for members in names.values() for member in members}
    ours_alone = {"held_weights", "_register", "_load", "_fill", "_loaded_weights", "declared"}
    for file in ("method.py", "quantized.py"):
        for node in ast.parse((PLUGIN / file).read_text()).body:
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef):
                    assert member.name in compared | ours_alone, f"{node.name}.{member.name}"
