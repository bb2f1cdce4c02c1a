"""torchtitan on CPUs. No file of it is changed; this is imported before anything else of torchtitan.

torchtitan looks for accelerators only, so the CPU is named as its device here, with the few functions of `torch.cuda`
that `torch.cpu` lacks. Version 0.3.0 calls `torch.distributed.set_timeout`, which torch 2.13 does not have, and lets
FSDP divide gradients by a reduction that gloo does not have, even where it divides by 1.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as tools
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule


class CpuModule(ModuleType):
    """`torch.cpu`, and what torchtitan calls beside it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    get_device_name = staticmethod(lambda device=None: "cpu")
    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda device=None: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


tools.device_type, tools.device_module = "cpu", CpuModule("cpu")
_divide = FSDPModule.set_gradient_divide_factor


def use_gloo() -> None:
    """Supply what torchtitan misses of torch and of gloo, in a process that runs nothing else."""
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = distributed_c10d._set_pg_timeout
    FSDPModule.set_gradient_divide_factor = _divide_on_gloo


def _divide_on_gloo(module: FSDPModule, factor: float) -> None:
    _divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)
