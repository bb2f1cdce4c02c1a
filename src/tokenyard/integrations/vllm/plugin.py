"""The plugin of vLLM's group `vllm.general_plugins`: the experts of MoE layers run through a tokenyard plan.

vLLM calls `register` in every process. Where `TOKENYARD_VLLM` is not set it does nothing, and imports nothing of
vLLM's. Else it puts our classes in the place of some of vLLM's, through vLLM's own registries.
"""

from __future__ import annotations

from tokenyard.integrations.vllm.refusals import check_version
from tokenyard.integrations.vllm.settings import settings


def register() -> None:
    """Put our classes in the place of vLLM's, where the environment asks for it."""
    asked = settings()
    if asked is None:
        return
    import vllm
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot

    check_version(vllm.__version__)
    from tokenyard.integrations.vllm import method, quantized

    ours = method.TokenyardMethod if asked.mode == "experts" else method.TokenyardExchangeMethod
    if "UnquantizedFusedMoEMethod" not in op_registry_oot:  # plugins may be loaded more than once
        CustomOp.register_oot(ours, name="UnquantizedFusedMoEMethod")
        PluggableLayer.register_oot(method.TokenyardRoutedExperts, name="RoutedExperts")
        quantized.register()
