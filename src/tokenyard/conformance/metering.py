"""A meter counts what this rank sends through a group, and the memory it shares, independently of the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tokenyard.group import Group
from tokenyard.group.base import Pending

_METERED = ("start_messages", "start_all_to_all_rows", "start_all_gather_rows", "share_memory", "subgroup")


class Meter:
    """Inside the `with`, counts what passes through the calls of a group that carry rows or share memory.

    Memory that is shared in its subgroups counts, too.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sent = [0] * group.size  # bytes of rows for each rank
        self.received = 0  # bytes of rows from all ranks
        self.shared = 0  # bytes of shared memory, on this rank
        self._inside = 0  # depth of calls of `start_messages`, which may send messages as rows
        self._memory: list[StorageWeakRef] = []
        self._subgroups: list[Any] = []

    def __enter__(self) -> Self:
        for name in _METERED:
            setattr(self.group, name, getattr(self, f"_{name}"))  # hides the method of the class
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in _METERED:
            delattr(self.group, name)
        for subgroup in self._subgroups:
            del subgroup.share_memory

    @property
    def carried_rows(self) -> bool:
        """Whether any row travelled by a call of the group. An exchange may move rows in other ways."""
        return any(self.sent) or self.received > 0

    def held(self) -> int:
        """How many of the shared buffers are not freed yet."""
        return sum(not memory.expired() for memory in self._memory)

    def _start_all_to_all_rows(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], **options: Any
    ) -> Pending[Tensor]:
        if not self._inside:
            for rank, count in enumerate(send):
                self.sent[rank] += count * rows.shape[1]
        return self._metered(
            type(self.group).start_all_to_all_rows(self.group, rows, send, receive, **options)
        )

    def _start_messages(
        self, content: Tensor, send: Sequence[int], *given: Any, **options: Any
    ) -> Pending[list[int]]:
        self.sent = [before + nbytes for before, nbytes in zip(self.sent, send, strict=True)]
        call = type(self.group).start_messages
        self._inside += 1
        try:
            return call(self.group, content, send, *given, **options)
        finally:
            self._inside -= 1

    def _start_all_gather_rows(self, mine: Tensor, counts: Sequence[int], **options: Any) -> Pending[Tensor]:
        self.sent = [nbytes + mine.nbytes for nbytes in self.sent]
        return self._metered(type(self.group).start_all_gather_rows(self.group, mine, counts, **options))

    def _metered(self, pending: Pending[Tensor]) -> Pending[Tensor]:
        def wait() -> Tensor:
            arrived = pending.wait()
            self.received += arrived.nbytes
            return arrived

        return Pending(wait)

    def _subgroup(self, ranks: Sequence[int], **options: Any) -> Group:
        made: Any = type(self.group).subgroup(self.group, ranks, **options)
        made.share_memory = partial(self._share_memory, group=made)
        self._subgroups.append(made)
        return cast("Group", made)

    def _share_memory(self, nbytes: int, group: Group | None = None) -> list[Tensor]:
        group = group or self.group
        self.shared += nbytes
        buffers = type(group).share_memory(group, nbytes)
        self._memory += [StorageWeakRef(buffer.untyped_storage()) for buffer in buffers]
        return buffers
