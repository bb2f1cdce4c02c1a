"""How a fresh process takes the place of a rank that was lost.

The ranks that are left call `group.readmit(lost)`. It puts an *invitation* for each lost rank's seat into the store
through which the group found together. The fresh process calls `rejoin(address, rank=…)` with the address that
`group.address` tells on any rank: it waits for its invitation, takes it (an invitation is for one: of two that come,
one gets an error), and meets the others. The new group has the size, the ranks and the deadline of the old one.

Nothing of the old group is used again but the store: not its connections, which are in an unknown state, nor its
memory, which a rank that is not as dead as it seemed might still write into.

Every wait is bounded. If nobody comes, the ranks that are left say who is missing, take the invitation back, and go on
as they were.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import torch
import torch.distributed as dist

from tokenyard.errors import GroupError, InputError, PeerLost

# Seconds in which a fresh rank must have come, and in which it must have been invited: it starts a process, loads
# libraries and finds a device.
READMISSION = 60.0
PHASE = "readmission"
# Torch says of none of its stores that it exports them.
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_PAUSE = 0.02  # seconds between two looks for an invitation
_TAKEN = b"taken"


def check_lost(lost: Sequence[int], rank: int, size: int) -> list[int]:
    """The ranks whose seats are empty, in their order; raise unless they can be."""
    if not lost or len(set(lost)) < len(lost) or not all(0 <= r < size and r != rank for r in lost):
        raise InputError(
            f"rank {rank} readmits ranks {list(lost)}",
            expected=f"at least one other rank of the group's {size}, each once",
            fix="pass the ranks that were lost (`PeerLost.peers`), as this group counts them",
            rank=rank,
        )
    return sorted(lost)


def nobody_invited(rank: int, address: str, waited: float) -> GroupError:
    """The error of a fresh rank whose seat is not free, or not any more."""
    return GroupError(
        f"rank {rank} of {address} was not invited within {waited:.1f} s",
        expected="the other ranks to call `readmit` for this rank, and no other process to have come first",
        fix="start one process for a lost rank, and call `readmit` on all that are left",
        rank=rank,
    )


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a fresh rank must know to be one of the group."""

    meeting: str  # where the ranks meet in the store
    size: int
    name: str
    deadline: float

    def encode(self) -> bytes:
        """As it stands in the store."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> Invitation:
        """As a fresh rank reads it."""
        return cls(**json.loads(encoded))


class Seats:
    """The seats of a group's ranks, in a store that all of them reach, and that a fresh process can find."""

    def __init__(self, store: Any, lineage: str) -> None:
        self.store, self.lineage = store, lineage

    def _key(self, rank: int) -> str:
        return f"tokenyard/{self.lineage}/seat/{rank}"

    @contextmanager
    def invited(self, ranks: Sequence[int], invitation: Invitation) -> Iterator[None]:
        """Inside, these ranks are invited. Whoever has not come when it raises finds the seat closed."""
        for rank in ranks:
            self.store.set(self._key(rank), invitation.encode())
        try:
            yield
        except BaseException:
            for rank in ranks:
                self.store.compare_set(self._key(rank), invitation.encode(), _TAKEN)
            raise

    def take(self, rank: int, address: str, seconds: float) -> Invitation:
        """Wait for an invitation, and take it."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < seconds:
            if self.store.check([self._key(rank)]):
                found = self.store.get(self._key(rank))
                if found != _TAKEN and self.store.compare_set(self._key(rank), found, _TAKEN) == _TAKEN:
                    return Invitation.decode(found)
            time.sleep(_PAUSE)
        raise nobody_invited(rank, address, waited)


def meet(
    store: Any, meeting: str, rank: int, size: int, *, seconds: float, timeout: float
) -> dist.ProcessGroup:
    """A gloo process group of whoever comes to this meeting in the store, though torch knows no world of them.

    Torch's own `new_group` serves ranks of one world only, and a fresh process is of no world.
    """
    started = time.monotonic()
    place = _PrefixStore(f"tokenyard/{meeting}", store)
    here = [f"here/{other}" for other in range(size)]
    place.set(here[rank], "")
    while not place.check(here):
        if (waited := time.monotonic() - started) > seconds:
            missing = [other for other, key in enumerate(here) if not place.check([key])]
            raise PeerLost(missing, phase=PHASE, waited=waited, rank=rank)
        time.sleep(_PAUSE)
    process_group: Any = dist.ProcessGroup(place, rank, size)
    gloo: Any = dist.ProcessGroupGloo(place, rank, size, timedelta(seconds=max(timeout, seconds)))
    kind = dist.ProcessGroup.BackendType.GLOO
    gloo._set_sequence_number_for_group()
    process_group._set_default_backend(kind)
    process_group._register_backend(torch.device("cpu"), kind, gloo)
    met: dist.ProcessGroup = process_group
    return met


def written_to_meet(meeting: str, rank: int) -> list[str]:
    """The keys that a rank writes into the store to be found at a meeting: it is there, and gloo's address of it."""
    return [f"tokenyard/{meeting}/here/{rank}", f"tokenyard/{meeting}/0/{rank}"]


def name_again(name: str, times: int) -> str:
    """The name of a group that was made whole so many times more. It stays short, however often that happens.

    >>> name_again("world", 1), name_again("world/again-9", 1), name_again("world/again-9/0-2", 1)
    ('world/again-1', 'world/again-10', 'world/again-9/0-2/again-1')
    """
    first, again, before = name.rpartition("/again-")
    if again and before.isdigit():
        return f"{first}/again-{int(before) + times}"
    return f"{name}/again-{times}"


def lineage_of(name: str, global_ranks: Sequence[int]) -> str:
    """What a group and all that come after it are called in the store."""
    return f"{name}/{'-'.join(map(str, global_ranks))}"


def address_of(store: Any, lineage: str) -> str:
    """Where a fresh process finds the store, and in it the seats of a group.

    >>> from types import SimpleNamespace
    >>> address_of(SimpleNamespace(path="/tmp/found/together"), "world/0-1")  # as a FileStore has it
    'file:///tmp/found/together#world/0-1'
    """
    if hasattr(store, "port"):
        return f"tcp://{store.host}:{store.port}#{quote(lineage)}"
    if hasattr(store, "path"):
        return f"file://{quote(store.path)}#{quote(lineage)}"
    raise GroupError(
        f"the ranks found each other through a {type(store).__name__}",
        expected="a store that a fresh process can reach: a TCPStore or a FileStore",
        fix="initialize torch.distributed over tcp:// or file://, or make a whole new process group and pass it to "
        "`plan.readmit(group=…)`",
    )


def seats_at(address: str, seconds: float) -> Seats:
    """The seats behind an address."""
    parts = urlsplit(address)
    lineage = unquote(parts.fragment)
    if parts.scheme == "tcp" and parts.hostname and parts.port and lineage:
        timeout = timedelta(seconds=seconds)
        return Seats(TCPStore(parts.hostname, parts.port, is_master=False, timeout=timeout), lineage)
    if parts.scheme == "file" and parts.path and lineage:
        return Seats(_FileStore(unquote(parts.path), -1), lineage)
    raise InputError(
        f"address is {address!r}",
        expected="what `group.address` says on a rank of the group",
        fix="hand that string to the process that takes the lost rank's place",
    )


def underlying(store: Any) -> Any:
    """The store itself, under the prefixes that torch gave it."""
    while isinstance(store, _PrefixStore):
        store = store.underlying_store
    return store
