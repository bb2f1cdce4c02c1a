"""GPU memory that the processes of one host share: torch's symmetric memory, one zeroed buffer per rank.

Each rank allocates, zeroes and waits for that; the ranks meet; then each maps the buffers of all. Nobody has a pointer
into a buffer before it is zeroed.

What torch hands out for a peer's buffer is a bare pointer: the mapping behind it goes with the handle of the
rendezvous. So the handle is tied to the *storage* of each buffer, which lives as long as any view of it does.

Traps: `symm_mem.empty` takes memory from a pool that keeps it, reuses it, and has an open report of corruption, so the
memory is asked for directly and goes back when its last view does. Torch counts ranks of one host and device index as
ranks on one GPU, and refuses them unless a variable says so: this is asked before, on all ranks at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import GroupError
from tokenyard.group.devices import OVERLAPPING_DEVICES

if TYPE_CHECKING:
    from tokenyard.group.base import Group

_PHASE = "sharing memory"


def share_between_gpus(group: Group, process_group: dist.ProcessGroup, nbytes: int) -> list[Tensor]:
    """One zeroed buffer per rank on the ranks' GPUs, mapped by all ranks. All or nothing."""
    import torch.distributed._symmetric_memory as symmetric_memory

    _check_devices(group)
    mine, error = torch.empty(0, dtype=torch.uint8), None
    try:
        mine = _allocate(nbytes, group.device)
        group.wait_for_device()
    except RuntimeError as raised:
        error = f"{nbytes} bytes cannot be allocated on {group.device} ({_first_line(raised)})"
    group.all_or_none(_PHASE, error)  # also: nobody maps a buffer that is yet to be zeroed
    buffers: list[Tensor] = []
    try:
        # By name: a process group itself is taken by some versions of torch only.
        handle = symmetric_memory.rendezvous(mine, process_group.group_name)
        buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size)]
        for buffer in buffers:
            keep_with(buffer, (handle, mine))
    except RuntimeError as raised:
        error = f"the memory of the other ranks cannot be mapped ({_first_line(raised)})"
    group.all_or_none(
        _PHASE,
        error,
        expected="GPUs that reach each other's memory",
        fix="see `nvidia-smi topo -m`; or use two_sided, which shares no memory",
    )
    return buffers


def keep_with(tensor: Tensor, kept: Any) -> None:
    """Keep an object alive as long as the memory behind a tensor is in use, by this tensor or any view of it."""
    tensor.untyped_storage().kept_by_tokenyard = kept  # type: ignore[attr-defined]


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device).zero_()


def _check_devices(group: Group) -> None:
    """Raise on every rank where two share a GPU and torch was not told that they may."""
    place = [os.uname().nodename, group.device.index, os.environ.get(OVERLAPPING_DEVICES) == "1"]
    places = group.gather_json(place, phase=_PHASE)
    ranks_on: dict[tuple[str, int], list[int]] = {}
    for rank, (host, index, _) in enumerate(places):
        ranks_on.setdefault((host, index), []).append(rank)
    shared = next((item for item in ranks_on.items() if len(item[1]) > 1), None)
    untold = [rank for rank, (_, _, told) in enumerate(places) if not told]
    if shared and untold:
        (host, index), ranks = shared
        raise GroupError(
            f"ranks {', '.join(map(str, ranks))} are on cuda:{index} of {host}, and {OVERLAPPING_DEVICES} is not 1 "
            f"on rank {untold[0]}",
            expected=f"a GPU for each rank, or {OVERLAPPING_DEVICES}=1 on every rank",
            fix="set it before the ranks start (tokenyard.launch does), or give each rank its own GPU",
            rank=group.rank,
        )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]
