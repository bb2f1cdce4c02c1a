"""How a fresh rank joins a group: in the place of one that was lost, or in a further one."""

from __future__ import annotations

import torch

from tokenyard.group.base import Group
from tokenyard.group.distributed import rejoin_processes
from tokenyard.group.readmission import READMISSION, no_address
from tokenyard.group.threads import rejoin_threads


def rejoin(
    address: str, *, rank: int, device: str | torch.device | None = None, seconds: float = READMISSION
) -> Group:
    """Take the place of rank `rank`, which was lost, in the group behind `address` (`group.address` on any rank).

    Returns the new group when all ranks have come; those that are left call `group.readmit` (or `plan.readmit`). Then
    make the same plan as they did. `rank` may also be a further one, behind those of the group, if the others call
    `plan.grow`; then call `join_plan`. This waits `seconds` for an invitation, and as long again for the other ranks.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from tokenyard.group import thread_groups
    >>> left, lost = thread_groups(2)
    >>> with ThreadPoolExecutor(2) as pool:
    ...     again = pool.submit(left.readmit, [1]), pool.submit(rejoin, left.address, rank=1)
    ...     list(pool.map(lambda ready: ready.result().gather_json(ready.result().rank), again))
    [[0, 1], [0, 1]]
    """
    if not isinstance(address, str):
        raise no_address(address)
    if address.startswith("threads:"):
        return rejoin_threads(address, rank, seconds=seconds)
    return rejoin_processes(address, rank, device=device, seconds=seconds)
