"""Writes down what the plugin uses of vLLM, for tests where there is none. Files are read, and nothing is imported.

    python -m tests.integrations.vllm_signatures WHEEL_OR_FOLDER

takes a wheel of vLLM's, or the folder in which a package `vllm` is installed, and writes into `stubs` for its version
`vllm_0_32.py`, the classes that ours derive from, and `vllm_0_32.json`, the signature of whatever else the plugin uses.
`tests/vllm_engines` compares both with the vLLM that is installed, and with the wheel of a version that was not run: a
change upstream is a failing test that names what has changed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
_FUSED = "model_executor/layers/fused_moe"
_QUANTIZATION = "model_executor/layers/quantization"
# The classes that ours derive from, and the base of each.
CLASSES = {
    "FusedMoEPrepareAndFinalizeModular": "FusedMoEPrepareAndFinalize",
    "FusedMoEExpertsModular": "FusedMoEExperts",
}
# What else the plugin uses, by file: functions and constants, and of classes the members that it calls, reads, sets or
# overrides.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "config/compilation.py": {"CompilationConfig": ("mode", "static_forward_context")},
    "config/parallel.py": {"ParallelConfig": ("enable_eplb", "enable_elastic_ep", "use_ubatching")},
    "config/vllm.py": {
        "VllmConfig": ("parallel_config", "compilation_config", "load_config"),
        "get_current_vllm_config": (),
    },
    "distributed/parallel_state.py": {
        "GroupCoordinator": ("ranks", "world_size", "rank_in_group", "all_gather"),
        "get_ep_group": (),
        "get_tp_group": (),
    },
    "logger.py": {"init_logger": ()},
    "model_executor/custom_op.py": {
        "CustomOp": ("register_oot",),
        "PluggableLayer": ("register_oot",),
        "op_registry_oot": (),
    },
    "model_executor/utils.py": {"set_weight_attrs": ()},
    "platforms/interface.py": {"Platform": ("is_cpu",)},
    "plugins/__init__.py": {"DEFAULT_PLUGINS_GROUP": (), "load_general_plugins": ()},
    f"{_FUSED}/activation.py": {"MoEActivation": ("SILU", "GELU", "GELU_TANH", "SWIGLUOAI")},
    f"{_FUSED}/config.py": {
        "FusedMoEConfig": (
            "num_experts",
            "num_logical_experts",
            "experts_per_token",
            "hidden_dim",
            "intermediate_size_per_partition",
            "in_dtype",
            "has_bias",
            "activation",
            "max_num_tokens",
            "is_act_and_mul",
            "is_lora_enabled",
            "skip_final_all_reduce",
            "moe_parallel_config",
        ),
        "FusedMoEParallelConfig": ("tp_size", "all2all_backend", "is_sequence_parallel"),
    },
    f"{_FUSED}/expert_map_manager.py": {"ExpertMapManager": ("map_global_to_local",)},
    f"{_FUSED}/experts/cpu_moe.py": {"CPUUnquantizedExperts": ("apply",)},
    f"{_FUSED}/fused_moe_method_base.py": {
        "FusedMoEMethodBase": (
            "__init__",
            "moe",
            "moe_kernel",
            "moe_quant_config",
            "maybe_roundup_sizes",
            "create_weights",
            "get_fused_moe_quant_config",
            "apply",
        )
    },
    f"{_FUSED}/modular_kernel.py": {"FusedMoEKernel": ("__init__", "apply", "fused_experts")},
    f"{_FUSED}/routed_experts.py": {
        "RoutedExperts": (
            "_get_quant_method",
            "quant_method",
            "layer_name",
            "moe_config",
            "expert_map",
            "expert_map_manager",
            "global_num_experts",
            "activation",
            "apply_router_weight_on_input",
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "ckpt_gate_proj_name",
            "ckpt_up_proj_name",
            "ckpt_down_proj_name",
        )
    },
    f"{_FUSED}/runner/moe_runner.py": {
        "MoERunner": (
            "layer_name",
            "moe_config",
            "routed_experts",
            "shared_experts",
            "_forward_entry",
        ),
        "_moe_forward": (),
        "_moe_forward_shared": (),
    },
    f"{_FUSED}/topk_weight_and_reduce.py": {
        "TopKWeightAndReduceContiguous": ("apply",),
        "TopKWeightAndReduceDelegate": ("apply",),
        "TopKWeightAndReduceNoOP": ("apply",),
    },
    f"{_FUSED}/unquantized_fused_moe_method.py": {
        "UnquantizedFusedMoEMethod": (
            "__init__",
            "experts_cls",
            "supports_pre_processed_weights",
            "maybe_roundup_sizes",
            "process_weights_after_loading",
            "_init_moe_kernel",
            "get_fused_moe_quant_config",
        )
    },
    f"{_QUANTIZATION}/__init__.py": {"register_quantization_config": ()},
    f"{_QUANTIZATION}/base_config.py": {
        "QuantizationConfig": ("get_quant_method", "packed_modules_mapping"),
        "QuantizeMethodBase": ("process_weights_after_loading",),
    },
    f"{_QUANTIZATION}/compressed_tensors/compressed_tensors.py": {
        "CompressedTensorsConfig": ("get_quant_method", "target_scheme_map", "get_scheme_dict"),
    },
    f"{_QUANTIZATION}/fp8.py": {
        "Fp8Config": ("get_quant_method", "from_config", "ignored_layers", "weight_block_size"),
    },
    f"{_QUANTIZATION}/modelopt.py": {
        "ModelOptNvFp4Config": ("quant_method",),
        "ModelOptQuantConfigBase": ("is_layer_excluded", "get_quant_method"),
    },
    f"{_QUANTIZATION}/mxfp4.py": {"GptOssMxfp4Config": ("get_quant_method",)},
    f"{_QUANTIZATION}/utils/quant_utils.py": {"is_layer_skipped": ()},
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

Read = Callable[[str], str]


def files_of(place: Path) -> Read:
    """A function that reads a file of the package `vllm`, in a wheel or in a folder where it is installed."""
    if place.is_dir():
        return lambda name: (place / "vllm" / name).read_text()
    wheel = zipfile.ZipFile(place)
    return lambda name: wheel.read(f"vllm/{name}").decode()


def stub_of(version: str, suffix: str = "py") -> Path:
    """The stub of a version."""
    return STUBS / f"vllm_{'_'.join(version.split('.')[:2])}.{suffix}"


def version_of(read: Read) -> str:
    """The version that a package names."""
    for node in ast.walk(ast.parse(read("_version.py"))):
        if isinstance(node, ast.Assign) and "__version__" in map(ast.unparse, node.targets):
            return str(ast.literal_eval(node.value)).partition("+")[0]
    raise ValueError("vllm/_version.py names no version")


# -- The classes that ours derive from -------------------------------------------------------------------------


def written(read: Read) -> str:
    """The stub of the classes that ours derive from."""
    kernel, config = (_definitions(read(f"{_FUSED}/{name}.py")) for name in ("modular_kernel", "config"))
    parts = [
        _HEADER.format(version=version_of(read)),
        _dataclass(kernel["ExpertTokensMetadata"]),
        _make(config["FusedMoEQuantConfig"]),
        *(_class(kernel[name], kernel[base]) for name, base in CLASSES.items()),
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _definitions(source: str) -> dict[str, ast.stmt]:
    """The classes, functions and variables of a module, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found[ast.unparse(target)] = node
    return found


def _members(theirs: ast.stmt) -> dict[str, ast.stmt]:
    assert isinstance(theirs, ast.ClassDef)
    return _definitions(ast.unparse(ast.Module(theirs.body, [])))


def _dataclass(theirs: ast.stmt) -> str:
    fields = [
        f"    {name}: object" + (" = None" if field.value is not None else "")
        for name, field in _members(theirs).items()
        if isinstance(field, ast.AnnAssign)
    ]
    return "\n".join(["@dataclass", f"class {theirs.name}:", *fields])  # type: ignore[attr-defined]


def _make(theirs: ast.stmt) -> str:
    """What makes a quantization config: here, of the same arguments, something that holds them."""
    make = _members(theirs)["make"]
    head = f"class {theirs.name}:\n    @staticmethod\n    def make({_parameters(make)}):"  # type: ignore[attr-defined]
    return f"{head}\n        return SimpleNamespace(**locals())"


def _class(theirs: ast.stmt, base: ast.stmt) -> str:
    """A class and its base in one: what is abstract in both, and every method's parameters."""
    members = _members(base) | _members(theirs)
    methods = [text for name, member in sorted(members.items()) if (text := _member(name, member))]
    return f"class {theirs.name}(ABC):\n" + "\n\n".join(methods)  # type: ignore[attr-defined]


def _member(name: str, member: ast.stmt) -> str | None:
    if name.startswith("__") and name != "__init__":
        return None
    if isinstance(member, ast.AnnAssign | ast.Assign):
        value = None if member.value is None else ast.unparse(member.value)
        return f"    {name} = {value}" if value in ("True", "False", "None") else None
    assert isinstance(member, ast.FunctionDef)
    decorators = {ast.unparse(one) for one in member.decorator_list}
    kept = [one for one in ("property", "staticmethod", "abstractmethod") if one in decorators]
    # Our classes call it, and read what it keeps.
    keeps = "\n        self.moe_config, self.quant_config = moe_config, quant_config"
    head = f"    def {name}({_parameters(member)}):{keeps if name == '__init__' else ' ...'}"
    return "\n".join([*(f"    @{one}" for one in kept), head])


def _parameters(function: ast.stmt) -> str:
    """A function's parameters and their defaults, without types."""
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if one is not None:
            one.annotation = None
    return ast.unparse(given)


# -- Whatever else the plugin uses -----------------------------------------------------------------------------


def used(read: Read) -> dict[str, str]:
    """What `USED` names, as text: a function's parameters, a field's default, or that it is an attribute."""
    found = {}
    for file, names in USED.items():
        definitions = _definitions(read(file))
        for name, members in names.items():
            found[f"{file}: {name}"] = _text(definitions.get(name))
            for member in members:
                found[f"{file}: {name}.{member}"] = _text_of_member(definitions, name, member)
    return found


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.FunctionDef):
        decorators = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
        return f"{decorators}({_parameters(node)})"
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(map(ast.unparse, node.bases))})"
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return "a value" if node.value is None else f"= {ast.unparse(node.value)}"
    return "absent"


def _text_of_member(definitions: dict[str, ast.stmt], name: str, member: str) -> str:
    """A member of a class, or of a base of it in the same file; else whether a method sets it."""
    theirs = definitions.get(name)
    if not isinstance(theirs, ast.ClassDef):
        return "absent"
    if (found := _members(theirs).get(member)) is not None:
        return _text(found)
    if any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == member
        for node in ast.walk(theirs)
    ):
        return "an attribute"
    texts = [_text_of_member(definitions, ast.unparse(base), member) for base in theirs.bases]
    return next((text for text in texts if text != "absent"), "absent")


def write(place: Path) -> None:
    """Write both stubs of the version that is found there."""
    read = files_of(place)
    version = version_of(read)
    stub_of(version).write_text(written(read))
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(stub_of(version))], check=True)
    stub_of(version, "json").write_text(json.dumps({"version": version, "used": used(read)}, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
