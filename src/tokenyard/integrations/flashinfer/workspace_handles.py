"""What stands for FlashInfer's workspace tensor and its metainfo tensor, which callers only pass on; and their sizes.

Memory of ours is not one tensor of bytes that a caller could cut: it is made, and grows, when ranks bring something.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenyard.exchange.workspace import REGION_ALIGNMENT, round_up
from tokenyard.group.base import Group
from tokenyard.integrations.flashinfer.manifest import check_backend

if TYPE_CHECKING:
    from tokenyard.integrations.flashinfer.all_to_all import MoeAlltoAll


@dataclass(eq=False)
class Workspace:
    """The ranks that share a workspace, and the dispatch that is in flight in it."""

    group: Group
    in_flight: MoeAlltoAll | None = None


@dataclass(eq=False)
class Metainfo:
    """The sizes of a workspace, and what was made for the layers that use it."""

    workspace: Workspace
    max_num_tokens: int
    eplb_stats_num_experts: int
    # By top_k, num_experts and enable_rank_mask.
    made: dict[tuple[int, int, bool], MoeAlltoAll] = field(default_factory=dict)


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
    eplb_stats_num_experts: int = 0,
    *,
    backend: str = "trtllm",
) -> int:
    """Bytes that payloads of these sizes take in a rank's workspace. Nobody has to ask: it grows by itself.

    >>> moe_a2a_get_workspace_size_per_rank(4, 10, 100, 64)  # 4000 and 2560, each rounded up to 128
    6656
    """
    check_backend(backend)
    slots = ep_size * max_num_tokens
    sizes = (
        slots * total_dispatch_payload_size_per_token,
        slots * combine_payload_size_per_token,
        4 * eplb_stats_num_experts,
    )
    return sum(round_up(size, REGION_ALIGNMENT) for size in sizes)
