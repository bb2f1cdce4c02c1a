"""GPU memory that the processes of one host share: torch's symmetric memory, one zeroed buffer per rank.

Each rank allocates and zeroes its buffer, and waits until that is done. Then the ranks meet, and each maps the buffers
of all ranks. No rank has a pointer into a buffer before it is zeroed.

For a peer's buffer torch returns a bare pointer; its mapping is freed with the handle of the rendezvous. The handle is
therefore tied to the *storage* of each buffer, which lives as long as any view of it does.

Pitfalls of torch:

- `symm_mem.empty` takes memory from a pool that keeps and reuses it, and for which a corruption bug is open. The memory
  is therefore allocated directly, and freed with its last view.
- Torch treats ranks with the same host and device index as ranks on one GPU, and refuses them unless a variable allows
  it. This is checked before, on all ranks at once.
- Torch numbers the rounds of all rendezvous of a process in one sequence, whatever their groups. Ranks that shared
  memory in other groups before, one more often than another, would wait for keys that never come. They therefore meet
  under a name that is new each time, in a store that numbers the rounds of this rendezvous alone (`Meeting`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group, _unregister_process_group

from tokenyard.errors import GroupError
from tokenyard.group.devices import OVERLAPPING_DEVICES
from tokenyard.group.own_process import keep_in_children

if TYPE_CHECKING:
    from tokenyard.group.base import Group

_PHASE = "sharing memory"


class Meeting(Store):
    """The store of one rendezvous, which numbers its rounds in the order in which this rank begins them.

    Torch's keys end in the rank. What precedes it names a round, and may differ between ranks: it is replaced by the
    number of the round.
    """

    def __init__(self, store: Store, name: str, deadline: float) -> None:
        super().__init__()
        self._store, self._name, self._deadline = store, name, deadline
        self._rounds: dict[str, int] = {}
        self._said: list[str] = []

    def _here(self, key: str) -> str:
        heading, _, rank = key.rpartition("/")
        return f"tokenyard/{self._name}/{self._rounds.setdefault(heading, len(self._rounds))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._said.append(self._here(key))
        self._store.set(self._said[-1], value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._here(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._here(key) for key in keys], timeout or timedelta(seconds=self._deadline))

    def forget(self) -> None:
        """Delete the keys of this rank: no rank reads them any more."""
        for key in self._said:
            self._store.delete_key(key)


@contextmanager
def met_as(name: str, meeting: Meeting, rank: int, size: int) -> Iterator[None]:
    """Inside the block, torch knows a process group of this name, with these ranks and their store."""
    process_group = ProcessGroup(meeting, rank, size)
    called = cast(Any, name)  # newer versions of torch have a type for it
    _register_process_group(called, process_group)  # by a weak reference
    try:
        yield
    finally:
        _unregister_process_group(called)


def share_between_gpus(group: Group, store: Store, nbytes: int) -> list[Tensor]:
    """One zeroed buffer per rank on the ranks' GPUs, mapped by all ranks, which find each other in `store`.

    If one rank fails, all raise.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    name = f"symmetric memory {_check_devices(group)}"
    meeting = Meeting(store, name, group.deadline)
    mine, error = torch.empty(0, dtype=torch.uint8), None
    try:
        mine = _allocate(nbytes, group.device)
        group.wait_for_device()
    except RuntimeError as raised:
        error = f"{nbytes} bytes cannot be allocated on {group.device} ({_first_line(raised)})"
    group.all_or_none(_PHASE, error)  # also a barrier: all buffers are zeroed before one is mapped
    buffers: list[Tensor] = []
    try:
        with met_as(name, meeting, group.rank, group.size):
            handle = symmetric_memory.rendezvous(mine, cast(Any, name))
        buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size)]
        for buffer in buffers:
            keep_with(buffer, (handle, mine))
            keep_in_children(buffer)  # there is no CUDA context that could unmap it
    except RuntimeError as raised:
        error = f"the memory of the other ranks cannot be mapped ({_first_line(raised)})"
    group.all_or_none(
        _PHASE,
        error,
        expected="GPUs that reach each other's memory",
        fix="see `nvidia-smi topo -m`; or use two_sided, which shares no memory",
    )
    meeting.forget()
    return buffers


def keep_with(tensor: Tensor, kept: Any) -> None:
    """Keep an object alive as long as the memory behind a tensor is in use, by this tensor or any view of it."""
    tensor.untyped_storage().kept_by_tokenyard = kept  # type: ignore[attr-defined]


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device).zero_()


def _check_devices(group: Group) -> str:
    """A random token that is the same on all ranks; all raise if two share a GPU and torch does not allow it."""
    allowed = os.environ.get(OVERLAPPING_DEVICES) == "1"
    place = [os.uname().nodename, group.device.index, allowed, secrets.token_hex(8)]
    places = group.gather_json(place, phase=_PHASE)
    ranks_on: dict[tuple[str, int], list[int]] = {}
    for rank, (host, index, *_) in enumerate(places):
        ranks_on.setdefault((host, index), []).append(rank)
    shared = next((item for item in ranks_on.items() if len(item[1]) > 1), None)
    refusing = [rank for rank, (_, _, allowed, _) in enumerate(places) if not allowed]
    if shared and refusing:
        (host, index), ranks = shared
        raise GroupError(
            f"ranks {', '.join(map(str, ranks))} are on cuda:{index} of {host}, and {OVERLAPPING_DEVICES} is not 1 "
            f"on rank {refusing[0]}",
            expected=f"a GPU for each rank, or {OVERLAPPING_DEVICES}=1 on every rank",
            fix="set it before the ranks start (tokenyard.launch does), or give each rank its own GPU",
            rank=group.rank,
        )
    return str(places[0][3])


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]
