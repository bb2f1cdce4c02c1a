"""What callers of FlashInfer's interface pass in: their communicator, a workspace, and its metainfo.

The communicator says which ranks form the group. `Workspace` and `Metainfo` replace FlashInfer's tensors of these
names, which callers only pass on. They are not tensors here: our memory is allocated, and grows, when ranks dispatch
and combine, and is not one tensor of bytes that a caller could slice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tokenyard.errors import HandleError, InputError
from tokenyard.exchange.workspace import REGION_ALIGNMENT, round_up
from tokenyard.group import DistributedGroup
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
    """The sizes of a workspace, and a `MoeAlltoAll` for each kind of layer that uses it."""

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
    """Bytes that payloads of these sizes take in a rank's workspace, which grows to this size by itself.

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


def out_of_turn(found: str, fix: str, rank: int) -> HandleError:
    """The error of a call that is not the next one of a round trip."""
    return HandleError(found, expected="dispatch, then combine", fix=fix, rank=rank)


def group_of_communicator(comm_backend: Any) -> Group:
    """The ranks of a communicator (FlashInfer's `CommBackend`), as a group. A group comes back as it is.

    vLLM's `CustomCommunicator` and FlashInfer's `TorchDistBackend` keep a process group of torch.distributed in
    `_group`, and None there means the default group. Rows are on the current GPU, if there is one.
    """
    if isinstance(comm_backend, Group):
        return comm_backend
    process_group = getattr(comm_backend, "_group", comm_backend)
    if comm_backend is None or not isinstance(process_group, (dist.ProcessGroup, type(None))):
        raise InputError(
            f"there is no group, and mnnvl_config.comm_backend is {type(comm_backend).__name__}",
            expected="a communicator of torch.distributed, such as vLLM's CustomCommunicator",
            fix="pass group=tokenyard.group.DistributedGroup(process_group), of the EP ranks",
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return DistributedGroup(process_group, device=device, name="EP ranks of MoeAlltoAll")
