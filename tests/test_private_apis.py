"""Names of other libraries that these do not promise to keep: where each is used, why, and that it is still there.

A new version of a library may take one away. The test of that name then fails, and says what breaks.
"""

import ast
import inspect
import multiprocessing
import threading
from collections.abc import Callable, MutableMapping
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tokenyard
from tokenyard.exchange.transports.one_sided.cuda import graphs

SOURCE = Path(tokenyard.__file__).parent
LAB = Path(__file__).parents[1] / "lab" / "src"


def forkserver_is_held_in_one_object() -> bool:
    server = forkserver._forkserver
    type(server).__init__(fresh := object.__new__(type(server)))  # what a forked process does with it
    return (
        isinstance(server._lock, type(threading.Lock()))
        and fresh._forkserver_pid is None
        and fresh._forkserver_alive_fd is None
    )


def process_group_is_found_by_a_name() -> bool:
    from torch._C._distributed_c10d import (
        _register_process_group,
        _resolve_process_group,
        _unregister_process_group,
    )

    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    _register_process_group("tokenyard test", group)
    found = _resolve_process_group("tokenyard test") == group
    _unregister_process_group("tokenyard test")
    return found


def symmetric_memory_is_there() -> bool:
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    return (
        callable(_SymmetricMemory.empty_strided_p2p) and "tensor" in inspect.signature(rendezvous).parameters
    )


def gloo_can_be_put_into_a_process_group() -> bool:
    wanted = [getattr(dist.ProcessGroup, name) for name in ("_set_default_backend", "_register_backend")]
    return all(map(callable, [*wanted, dist.ProcessGroupGloo._set_sequence_number_for_group]))


def effects_are_ordered() -> bool:
    from torch._library.effects import EffectType

    return EffectType.ORDERED is not None and callable(torch.library.CustomOpDef.register_effect)


def a_backward_has_a_number() -> bool:
    """By which a forward that runs inside of one is recognized."""
    seen = [torch._C._current_graph_task_id()]
    tensor = torch.ones((), requires_grad=True)
    tensor.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    (tensor * 2).backward()
    return seen[0] == -1 != seen[1]


def modules_are_moved_by_one_method() -> bool:
    """`to`, `half` and `cuda` must go through it."""
    calls = []

    class Module(nn.Module):
        def _apply(self, fn, recurse=True):
            calls.append(recurse)
            return super()._apply(fn, recurse)

    Module().half().to("cpu")
    return calls == [True, True]


def transformers_asks_every_model() -> bool:
    transformers = pytest.importorskip("transformers")
    return hasattr(transformers.PreTrainedModel, "_keys_to_ignore_on_load_unexpected")


def transformers_knows_which_models_ask_for_experts() -> bool:
    transformers = pytest.importorskip("transformers")
    asked = [transformers.MixtralForCausalLM, transformers.Llama4ForCausalLM]
    return [kind._can_set_experts_implementation() for kind in asked] == [True, False]


def state_dicts_are_made_and_read_by_two_methods() -> bool:
    """With these names, and these arguments."""
    seen = []

    class Module(nn.Module):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            seen.append(("save", prefix, keep_vars))

        def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
            seen.append(
                ("load", prefix, metadata["assign_to_params_buffers"], [*missing, *unexpected, *errors])
            )

    model = nn.ModuleDict({"one": Module()})
    model.load_state_dict(model.state_dict(), assign=True)
    return seen == [("save", "one.", False), ("load", "one.", True, [])]


# The private name, the one file that uses it, a check that it is there, and what breaks without it.
USES: list[tuple[tuple[str, ...], str, Callable[[], object], str]] = [
    (
        ("_forkserver", "_forkserver_pid", "_forkserver_alive_fd"),
        "group/forkserver.py",
        forkserver_is_held_in_one_object,
        "Ctrl-C leaves the forkserver and its ranks running; a forked process takes its parent's ranks for its own",
    ),
    (
        ("_config",),
        "group/forkserver.py",
        lambda: isinstance(multiprocessing.current_process()._config, dict),
        "the folder with the forkserver's socket stays behind when a command is interrupted",
    ),
    (
        ("_C", "_current_graph_task_id"),
        "layer/training.py",
        a_backward_has_a_number,
        "tokens that activation checkpointing computes again are counted twice as load of the experts",
    ),
    (
        ("_world",),
        "group/torch_groups.py",
        lambda: isinstance(dist.distributed_c10d._world.pg_map, MutableMapping),
        "groups of torch.distributed find no store: no subgroup, no lost rank that is replaced, no shared GPU memory",
    ),
    (
        ("_allgather_base",),
        "group/torch_groups.py",
        lambda: (
            hasattr(dist.ProcessGroup, "all_gather_single") or hasattr(dist.ProcessGroup, "_allgather_base")
        ),
        "ranks of torch.distributed cannot gather with a deadline",
    ),
    (
        ("_set_default_backend", "_register_backend", "_set_sequence_number_for_group"),
        "group/readmission.py",
        gloo_can_be_put_into_a_process_group,
        "processes cannot make a new process group after ranks were lost or replaced",
    ),
    (
        ("torch._C._distributed_c10d", "_register_process_group", "_unregister_process_group"),
        "group/symmetric_memory.py",
        process_group_is_found_by_a_name,
        "ranks on GPUs cannot share memory: no one_sided exchange there",
    ),
    (
        ("_SymmetricMemory", "torch.distributed._symmetric_memory"),
        "group/symmetric_memory.py",
        symmetric_memory_is_there,
        "ranks on GPUs cannot share memory: no one_sided exchange there",
    ),
    (
        ("torch._library.effects",),
        "layer/compiled.py",
        effects_are_ordered,
        "a compiler may drop, merge or swap the calls of layers, and ranks wait for each other in vain",
    ),
    (
        ("_can_set_experts_implementation",),
        "integrations/transformers/registry_backend.py",
        transformers_knows_which_models_ask_for_experts,
        "experts_implementation='tokenyard' is accepted by models that ignore it, or refused by ones that use it",
    ),
    (
        ("_scaled_mm",),
        "tokenyard_lab/bench/machine_rates.py",
        lambda: callable(torch._scaled_mm),
        "the fp8 rate of a GPU cannot be measured",
    ),
    (
        ("_scaled_grouped_mm",),
        "tokenyard_lab/bench/experts_peers.py",
        lambda: callable(torch._scaled_grouped_mm),
        "fp8 experts are not compared with torch's own",
    ),
]
# Private methods of a base class that ours override: the base must still call them.
OVERRIDDEN: list[tuple[str, Callable[[], object], str]] = [
    ("_apply", modules_are_moved_by_one_method, "model.half() casts the bytes of quantized experts"),
    (
        "_save_to_state_dict, _load_from_state_dict",
        state_dicts_are_made_and_read_by_two_methods,
        "what a GPU saves loads on no other device",
    ),
    (
        "_keys_to_ignore_on_load_unexpected",
        transformers_asks_every_model,
        "Transformers warns of every expert that a rank leaves out",
    ),
]


@pytest.mark.parametrize(("names", "_", "is_there", "breaks"), USES, ids=[use[0][0] for use in USES])
def test_a_private_name_is_still_there(names, _, is_there, breaks):
    try:
        found = is_there()
    except (AttributeError, ImportError, TypeError) as error:
        found = False
        breaks = f"{breaks} ({error})"
    assert found, f"{', '.join(names)}: {breaks}"


@pytest.mark.parametrize(("name", "is_there", "breaks"), OVERRIDDEN, ids=[use[0] for use in OVERRIDDEN])
def test_a_private_method_is_still_called(name, is_there, breaks):
    assert is_there(), f"{name}: {breaks}"


@pytest.mark.gpu
def test_the_cuda_runtime_that_torch_has_loaded_says_when_graphs_are_gone():
    """Without it, a captured graph could outlive the workspace whose addresses it holds."""
    torch.cuda.init()
    runtime = graphs._runtime()
    assert graphs._capture_info(runtime)
    assert runtime.cudaUserObjectCreate
    assert runtime.cudaGraphRetainUserObject


def test_the_cuda_runtime_is_opened_in_one_file():
    using = [path.name for path in SOURCE.rglob("*.py") if "libcudart" in path.read_text()]
    assert using == [Path(graphs.__file__).name]


def test_each_private_name_is_used_in_one_file_and_listed_here():
    listed = {(name, file) for names, file, *_ in USES for name in names}
    assert private_names() == listed


def private_names() -> set[tuple[str, str]]:
    """Private names in the library and the lab that neither defines, and the files that use them."""
    trees = {
        str(path.relative_to(folder)): ast.parse(path.read_text())
        for folder in (SOURCE, LAB)
        for path in folder.rglob("*.py")
    }
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in defined(node)} | {
        "_exit"
    }  # os._exit
    return {
        (name, file)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        for name in used(node)
        if any(map(is_private, name.split("."))) and name not in own
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def used(node: ast.AST) -> list[str]:
    """Attributes that a node reads, and modules and names that it imports from elsewhere."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if (
        isinstance(node, ast.ImportFrom)
        and node.module is not None
        and not node.module.startswith("tokenyard")
    ):
        return [node.module, *(alias.name for alias in node.names)]
    return []
