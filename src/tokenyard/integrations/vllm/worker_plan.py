"""One plan for all MoE layers of a vLLM worker, and their kernels. Imported where the plugin is on.

The plan is made with the other workers when weights are loaded. A kernel is vLLM's own `FusedMoEKernel`, with
our two classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from tokenyard.group import DistributedGroup, Group
from tokenyard.integrations.vllm.experts import TokenyardExperts
from tokenyard.integrations.vllm.layers import held_weights, owned_experts, spec_of
from tokenyard.integrations.vllm.prepare_finalize import TokenSlices, TokenyardPrepareAndFinalize
from tokenyard.integrations.vllm.refusals import check_supported
from tokenyard.integrations.vllm.settings import Settings, settings
from tokenyard.planning.planner import Plan, plan
from tokenyard.planning.spec import LayerSpec

# Under vLLM's name, vLLM's own configuration of logging applies.
_log = init_logger("vllm.tokenyard")


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The plan of a worker, and the layers of vLLM's that it was made for."""

    layers: dict[str, Any]  # vLLM's own registry of the model's layers, by name
    plan: Plan


_made: WorkerPlan | None = None


def plan_of_worker(layer: str, asked: Settings) -> Plan:
    """The plan of this worker, with this layer in it. Collective over the ranks that share experts.

    The first call plans all layers of the model. A layer that is not planned yet (of a draft model, say) extends the
    plan, together with all others that are not.
    """
    global _made  # noqa: PLW0603 - a worker is a process
    layers = get_current_vllm_config().compilation_config.static_forward_context
    if _made is None or _made.layers is not layers:
        group = own_group(asked.deadline)
        _made = WorkerPlan(
            layers=layers, plan=plan(_specs(layers, group, asked), group, exchange=asked.exchange)
        )
        _log_plan(_made.plan, asked)
    elif layer not in (spec.name for spec in _made.plan.draft.specs):
        _made.plan.extend(_specs(layers, _made.plan.group, asked, known=_made.plan))
        _log_plan(_made.plan, asked)
    return _made.plan


def own_group(deadline: float) -> Group:
    """The ranks that share experts, with a process group of their own."""
    process_group = dist.new_group(
        get_ep_group().ranks, timeout=timedelta(seconds=deadline), use_local_synchronization=True
    )
    device = torch.device("cpu") if "gloo" in dist.get_backend(process_group) else None
    return DistributedGroup(process_group, device=device, name="vllm.ep", deadline=deadline)


def token_slices(moe: Any) -> TokenSlices | None:
    """How the tensor-parallel ranks of a layer share tokens; None where each has its own."""
    ranks = get_tp_group()
    if ranks.world_size == 1 or moe.moe_parallel_config.is_sequence_parallel:
        return None
    return TokenSlices(
        rank=ranks.rank_in_group, size=ranks.world_size, all_gather=lambda part: ranks.all_gather(part, dim=0)
    )


def _specs(
    layers: dict[str, Any], group: Group, asked: Settings, known: Plan | None = None
) -> list[LayerSpec]:
    """The specs of all MoE layers that are not planned yet. Collective: ranks gather which experts each owns."""
    planned = () if known is None else [spec.name for spec in known.draft.specs]
    runners = {
        name: runner
        for name, runner in layers.items()
        if isinstance(runner, MoERunner) and runner.layer_name not in planned
    }
    ranks = get_current_vllm_config().parallel_config
    for name, runner in runners.items():
        check_supported(runner.moe_config, ranks, layer=name)  # models may change it after the layer is made
    owned = group.gather_json({name: owned_experts(runner) for name, runner in runners.items()})
    return [
        spec_of(
            runner, [by_layer.get(name, []) for by_layer in owned], _most_tokens(runner.moe_config), asked
        )
        for name, runner in runners.items()
    ]


def _most_tokens(moe: Any) -> int:
    """The most tokens of a layer that a rank sends."""
    slices, most = token_slices(moe), int(moe.max_num_tokens)
    return most if slices is None else slices.longest(most)


def _log_plan(made: Plan, asked: Settings) -> None:
    if made.group.rank == 0:
        _log.info("tokenyard: %s\n%s", asked, made)


# --- Kernels ----------------------------------------------------------------------------------------------


def load_kernel(method: Any, layer: Any) -> None:
    """Make the kernel of a layer's method or, if weights are loaded once more, give it the new ones."""
    if method.moe_kernel is None:
        config, mover = method.get_fused_moe_quant_config(layer), mover_of(layer, method.moe)
        experts = TokenyardExperts(
            mover.plan,
            layer.layer_name,
            moe_config=method.moe,
            quant_config=config,
            weights=held_weights(layer).read(),
        )
        method.moe_quant_config, method.moe_kernel = config, mk.FusedMoEKernel(mover, experts)
    else:
        method.moe_kernel.fused_experts.load(held_weights(layer).read())


def mover_of(layer: Any, moe: Any) -> TokenyardPrepareAndFinalize:
    """The object that moves the rows of a layer. Collective: the call for the first layer makes the plan."""
    name, asked = layer.layer_name, asked_for()
    planned = plan_of_worker(name, asked)
    hide_from_dynamo(name)
    return TokenyardPrepareAndFinalize(planned, name, slices=token_slices(moe))


def asked_for() -> Settings:
    """The settings, where the plugin is on."""
    asked = settings()
    assert asked is not None  # `plugin.register` has looked
    return asked


def hide_from_dynamo(layer: str) -> None:
    """Make a layer one opaque operator, as it is on GPUs.

    On CPUs, vLLM lets Dynamo trace into MoE layers. An exchange cannot be traced.
    """
    compilation = get_current_vllm_config().compilation_config
    if current_platform.is_cpu() and compilation.mode:  # not CompilationMode.NONE
        runner = compilation.static_forward_context[layer]
        shared = runner.shared_experts is not None
        runner._forward_entry = torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward
