"""The group of a caller that knows FlashInfer's arguments only: that of its communicator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tokenyard.errors import InputError
from tokenyard.group import DistributedGroup
from tokenyard.group.base import Group


def group_of_config(mnnvl_config: Any) -> Group:
    """The group of `mnnvl_config.comm_backend`; raise if there is none."""
    return group_of_communicator(getattr(mnnvl_config, "comm_backend", None))


def group_of_communicator(comm_backend: Any) -> Group:
    """The ranks of a communicator (FlashInfer's `CommBackend`), as a group. A group comes back as it is.

    vLLM's `CustomCommunicator` and FlashInfer's `TorchDistBackend` keep a process group of torch.distributed in
    `_group`, and None there stands for the default group. Rows are on the current GPU, if there is one.
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
