"""Nothing that comes from a file or from another rank is ever run: no pickle, no eval, in the library and the lab."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokenyard
from tokenyard.checkpoints import open_checkpoint
from tokenyard.errors import CheckpointError

PACKAGE = Path(tokenyard.__file__).parent
LAB = Path(__file__).parents[2] / "lab" / "src" / "tokenyard_lab"

# Modules whose readers run what they read, and functions that do.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("dist", "all_gather_object"),
    ("dist", "gather_object"),
    ("dist", "scatter_object_list"),
    ("dist", "broadcast_object_list"),
    ("dist", "recv_object_list"),
    ("dist", "send_object_list"),
    ("os", "system"),
    ("subprocess", "getoutput"),
}
# Parent and child talk over a pipe that nobody else has an end of: ranks of one launch, and processes that compile.
ALLOWED = {"group/process_ranks.py": {"pickle"}, "kernel_compiler.py": {"pickle"}}


def runs_what_it_reads(source: str) -> set[str]:
    """The names in a module that could run what they are given."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
            found |= {
                f"{node.module}.{alias.name}" for alias in node.names if (node.module, alias.name) in CALLS
            }
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in BUILTINS:
                found.add(called.id)
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                pair = (called.value.id, called.attr)
                found |= {".".join(pair)} if pair in CALLS else set()
            for keyword in node.keywords:
                trusting = keyword.arg in ("allow_pickle", "trust_remote_code", "shell")
                if trusting and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    found.add(str(keyword.arg))
    return found


def test_no_module_runs_what_it_reads():
    files = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    files |= {str(file.relative_to(LAB.parent)): file for file in LAB.rglob("*.py")}
    assert len(files) > 300, "both packages are looked at"
    found = {name: runs_what_it_reads(file.read_text()) for name, file in files.items()}
    assert {name: names for name, names in found.items() if names} == ALLOWED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("eval('1')", "eval"),
        ("import yaml", "yaml"),
        ("dist.all_gather_object(a, b)", "dist.all_gather_object"),
        ("np.load(file, allow_pickle=True)", "allow_pickle"),
        ("subprocess.run(line, shell=True)", "shell"),
    ],
)
def test_the_search_finds_what_it_is_for(source, name):
    assert name in runs_what_it_reads(source)
    assert not runs_what_it_reads("import json, struct\njson.loads(x)\nast.literal_eval(x)\nre.compile(x)")


@pytest.mark.parametrize("ending", [".bin", ".pt", ".pth", ".pkl", ".ckpt"])
def test_a_checkpoint_that_is_a_pickle_by_name_is_refused_unread(tmp_path, ending):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"model{ending}").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(tmp_path)
