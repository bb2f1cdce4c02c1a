"""How much memory `one_sided` needs, and on which groups it can run, for CPUs and GPUs."""

from __future__ import annotations

import importlib.util
import platform
from collections import Counter
from collections.abc import Sequence

import torch

from tokenyard.errors import Reason
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transports.one_sided.cuda.control import MOST_RANKS
from tokenyard.exchange.workspace import LayerBytes, WorkspaceLayout
from tokenyard.group.base import Group

# CPUs on which plain aligned stores become visible in the order in which they were made.
_ORDERED_CPUS = ("x86_64", "AMD64", "i686")


def slot_bytes(spec: ExchangeSpec) -> LayerBytes:
    """The memory of a layer whose rows lie in slots, payload by payload."""
    return spec.slot_nbytes


def layout_for(
    needs: Sequence[LayerBytes], *, control: int, in_flight: int, guard: int = 0
) -> WorkspaceLayout:
    """The smallest layout that serves layers with these needs: each region is as large as the largest need."""
    return WorkspaceLayout(
        control=control,
        dispatch=max(need.dispatch for need in needs),
        combine=max(need.combine for need in needs),
        in_flight=in_flight,
        guard=guard,
    )


def watches(group: Group) -> Reason | None:
    """None, or why a plan on this group cannot be paranoid, that is check the memory that its ranks share."""
    if group.device.type != "cuda":
        return None
    why = "the kernels that move rows between GPUs leave no checksums, guards and poison"
    return Reason(field="paranoid", value=True, why=why)


def reaches(group: Group, hosts: Sequence[str], *, in_each: bool = False) -> Reason | None:
    """None, or why the ranks of a group cannot share memory; `in_each`: those of each host."""
    why, most = None, max(Counter(hosts).values())
    if group.device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            why = "one_sided on GPUs needs Triton, which comes with torch for CUDA"
        elif torch.cuda.get_device_capability(group.device) < (8, 9):
            why = "one_sided on GPUs needs one that knows fp8: compute capability 8.9 or higher"
        elif most > MOST_RANKS:
            why = f"one_sided on GPUs serves up to {MOST_RANKS} ranks, not {most}"
    elif platform.machine() not in _ORDERED_CPUS:
        why = f"one_sided needs stores that stay in order, as on x86, not {platform.machine()}"
    if why is None and len(set(hosts)) > 1 and not in_each:
        why = f"one_sided shares memory, and the ranks run on {len(set(hosts))} hosts"
    return None if why is None else Reason(field="exchange", value="one_sided", why=why)
