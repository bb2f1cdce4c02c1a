"""The kernel of a MoE layer in vLLM: its own `FusedMoEKernel`, of our two classes. Imported where the plugin is on."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from tokenyard.integrations.vllm.experts import TokenyardExperts
from tokenyard.integrations.vllm.layers import held_weights
from tokenyard.integrations.vllm.prepare_finalize import TokenyardPrepareAndFinalize
from tokenyard.integrations.vllm.settings import Settings, settings
from tokenyard.integrations.vllm.worker_plan import plan_of_worker, token_slices


def load_kernel(method: Any, layer: Any) -> None:
    """Make the kernel of a layer's method; or, if weights were loaded anew, compute with these."""
    if method.moe_kernel is None:
        method.moe_quant_config = method.get_fused_moe_quant_config(layer)
        method.moe_kernel = kernel_of(layer, method.moe, method.moe_quant_config)
    else:
        method.moe_kernel.fused_experts.load(held_weights(layer).read())


def kernel_of(layer: Any, moe: Any, quant_config: Any) -> Any:
    """vLLM's kernel for a layer whose weights are loaded, of our exchange and our experts."""
    mover = mover_of(layer, moe)
    experts = TokenyardExperts(
        mover.plan,
        layer.layer_name,
        moe_config=moe,
        quant_config=quant_config,
        weights=held_weights(layer).read(),
    )
    return mk.FusedMoEKernel(mover, experts)


def mover_of(layer: Any, moe: Any) -> TokenyardPrepareAndFinalize:
    """What moves the rows of a layer. Collective: it makes the plan, if this is the first one."""
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
