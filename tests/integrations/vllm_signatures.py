"""Writes down the signatures of the vLLM that is installed, for tests where there is none.

    python -m tests.integrations.vllm_signatures

`tests/vllm_engines/test_signatures.py` compares the file with the vLLM that is installed: a change upstream is a
failing test that names the method.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

STUB = Path(__file__).parent / "stubs" / "vllm_0_32.py"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
# The classes that ours derive from, and the base of each.
CLASSES = {
    "FusedMoEPrepareAndFinalizeModular": "FusedMoEPrepareAndFinalize",
    "FusedMoEExpertsModular": "FusedMoEExperts",
}
_HEADER = '''"""The signatures of vLLM {version}, written by `python -m tests.integrations.vllm_signatures`."""

# ruff: noqa: B027, N802, PLW0211
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


'''


def written() -> str:
    """The stub, from the vLLM that is installed."""
    import vllm

    kernel, config = (import_module(f"{FUSED_MOE}.{name}") for name in ("modular_kernel", "config"))
    parts = [
        _HEADER.format(version=vllm.__version__),
        _dataclass(kernel.ExpertTokensMetadata),
        _make(config.FusedMoEQuantConfig),
        *(_class(getattr(kernel, name), getattr(kernel, base)) for name, base in CLASSES.items()),
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _dataclass(theirs: Any) -> str:
    fields = [
        f"    {name}: object" + (" = None" if parameter.default is None else "")
        for name, parameter in inspect.signature(theirs).parameters.items()
    ]
    return "\n".join(["@dataclass", f"class {theirs.__name__}:", *fields])


def _make(theirs: Any) -> str:
    """What makes a quantization config: here, of the same arguments, something that holds them."""
    head = f"class {theirs.__name__}:\n    @staticmethod\n    def make{_without_types(theirs.make)}:"
    return f"{head}\n        return SimpleNamespace(**locals())"


def _class(theirs: type, base: type) -> str:
    """A class and its base in one: what is abstract in both, and every method's parameters."""
    members = dict(vars(base)) | dict(vars(theirs))
    methods = [text for name, member in sorted(members.items()) if (text := _member(name, member, theirs))]
    return f"class {theirs.__name__}(ABC):\n" + "\n\n".join(methods)


def _member(name: str, member: Any, theirs: Any) -> str | None:
    if name.startswith("__") and name != "__init__":
        return None
    abstract = ["    @abstractmethod"] if name in theirs.__abstractmethods__ else []
    if isinstance(member, property):
        return "\n".join(["    @property", *abstract, f"    def {name}(self): ..."])
    static = isinstance(member, staticmethod)
    function = member.__func__ if static else member
    if not inspect.isfunction(function):
        return f"    {name} = {member!r}" if isinstance(member, bool) else None
    # Our classes call it, and read what it keeps.
    keeps = "\n        self.moe_config, self.quant_config = moe_config, quant_config"
    head = f"    def {name}{_without_types(function)}:{keeps if name == '__init__' else ' ...'}"
    return "\n".join([*(["    @staticmethod"] if static else []), *abstract, head])


def _without_types(function: Any) -> inspect.Signature:
    parameters = inspect.signature(function).parameters.values()
    return inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])


if __name__ == "__main__":
    STUB.write_text(written())
