"""Process groups of torch.distributed: their collectives of bytes, and the store through which they connected."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


def gather(process_group: Any, timeout: timedelta | None, gathered: Tensor, mine: Tensor) -> Any:
    """Start an all-gather of equal parts; return torch's work object."""
    # torch 2.13 renames it.
    renamed = hasattr(process_group, "all_gather_single")
    start = process_group.all_gather_single if renamed else process_group._allgather_base
    return start(gathered, mine, _options("AllgatherOptions", timeout))


def exchange(
    process_group: Any,
    timeout: timedelta | None,
    received: Tensor,
    rows: Tensor,
    receive: list[int],
    send: list[int],
) -> Any:
    """Start an all-to-all, with `send[w]` rows to rank w and `receive[w]` from it; return torch's work object."""
    options = _options("AllToAllOptions", timeout)
    return process_group.alltoall_base(received, rows, receive, send, options)


def _options(kind: str, timeout: timedelta | None) -> Any:
    """The options of an asynchronous collective. With a timeout of None, that of the process group applies."""
    options = getattr(dist.distributed_c10d, kind)()
    options.asyncOp = True
    if timeout is not None:
        options.timeout = timeout
    return options


# How many `DistributedGroup`s were made of each process group.
_uses: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_use(process_group: dist.ProcessGroup) -> str:
    """A name that distinguishes this group from other groups of the same process group, or of the same ranks.

    It is the same on all ranks, which make their groups in one order. It is empty for the first group of torch's world,
    which a fresh process must be able to find.
    """
    _uses[process_group] = number = _uses.get(process_group, 0) + 1
    made_by_torch = "" if process_group is dist.group.WORLD else f"group {process_group.group_name}"
    return "/".join(filter(None, [made_by_torch, f"use {number}" if number > 1 else ""]))


def store_of(process_group: dist.ProcessGroup) -> Any:
    """The store through which the processes of a group connected."""
    return dist.distributed_c10d._world.pg_map[process_group][1]
