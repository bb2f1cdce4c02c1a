"""How a fresh process takes the place of a rank that was lost, or a further place.

The ranks that are left call `group.readmit(lost)`. It puts an *invitation* for each lost rank into the store with which
the group was made. The fresh process calls `rejoin(address, rank=…)` with the `group.address` of any rank. It waits for
its invitation, takes it, and meets the other ranks. An invitation is for one process: if two come, one gets an error.
The new group has the size, the ranks and the deadline of the old one.
`group.admit(count)` makes invitations for further ranks, behind those of the group.

Of the old group only the store is used again. Its connections are in an unknown state, and a rank that was taken for
dead might still write into its memory.

Every wait is bounded. If no fresh rank comes, the ranks that are left raise an error that names the missing ranks,
withdraw the invitations, and go on as before.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import torch
import torch.distributed as dist

from tokenyard.errors import GroupError, InputError, PeerLost, TokenyardError, shown
from tokenyard.group.failure_detector import FailureDetector, within

# Seconds for which ranks wait for a fresh rank, and for which it waits for its invitation. A fresh rank is slow: it
# starts a process, loads libraries and finds a device.
READMISSION = 60.0
PHASE = "readmission"
# torch does not declare its stores as exported.
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_PAUSE = 0.02  # seconds between two looks for an invitation
_NEXT_LOOK = 0.5  # seconds between two looks why ranks do not come to a meeting
_ANSWER = 1.0  # seconds that the last of these looks may take
_TAKEN = b"taken"


def check_lost(lost: Sequence[int], rank: int, size: int) -> list[int]:
    """The lost ranks in ascending order; raise unless they are other ranks of the group."""
    if not lost or len(set(lost)) < len(lost) or not all(0 <= r < size and r != rank for r in lost):
        raise InputError(
            f"rank {rank} readmits ranks {list(lost)}",
            expected=f"at least one other rank of the group's {size}, each once",
            fix="pass the ranks that were lost (`PeerLost.peers`), as this group counts them",
            rank=rank,
        )
    return sorted(lost)


def not_invited(rank: int, address: str, waited: float) -> GroupError:
    """The error of a fresh rank that got no invitation, or whose invitation another process took."""
    return GroupError(
        f"rank {rank} of {address} was not invited within {waited:.1f} s",
        expected="the other ranks to call `readmit` or `grow`, and no other process to have come first",
        fix="start one process for each place, and call `readmit` or `grow` on all ranks that are there",
        rank=rank,
    )


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a fresh rank must know to join the group."""

    meeting: str  # the prefix of the keys under which the ranks meet in the store
    size: int
    name: str
    deadline: float

    def encode(self) -> bytes:
        """The text that is written into the store."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> Invitation:
        """The invitation that a text from the store holds."""
        return cls(**json.loads(encoded))


class RejoinStore:
    """The invitations of a group, in a store that its ranks and fresh processes can reach."""

    def __init__(self, store: Any, group_key: str) -> None:
        self.store, self.group_key = store, group_key

    def _key(self, rank: int) -> str:
        return f"tokenyard/{self.group_key}/place/{rank}"

    @contextmanager
    def invited(self, ranks: Sequence[int], invitation: Invitation) -> Iterator[None]:
        """Inside the block, these ranks are invited. If it raises, invitations that were not taken are withdrawn."""
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
        # A value that only this process writes. The store keeps the first one, so that a process sees if it was first.
        taken = _TAKEN + f" by {secrets.token_hex(8)}".encode()
        while (waited := time.monotonic() - started) < seconds:
            if self.store.check([self._key(rank)]):
                found = self.store.get(self._key(rank))
                free = not found.startswith(_TAKEN)
                if free and self.store.compare_set(self._key(rank), found, taken) == taken:
                    return Invitation.decode(found)
            time.sleep(_PAUSE)
        raise not_invited(rank, address, waited)


def meet(
    store: Any,
    meeting: str,
    rank: int,
    size: int,
    *,
    phase: str = PHASE,
    seconds: float,
    connecting: float,
    timeout: float,
    detector: FailureDetector,
    gone: Callable[[], dict[int, str]] = dict,
    causes: Callable[[Sequence[int]], list[int]] = list,
    check: Callable[[], None] = lambda: None,
) -> dist.ProcessGroup:
    """Make a gloo process group of the ranks that come to this meeting in the store, without torch's world group.

    All ranks must come within `seconds`, and then connect within `connecting` seconds. A rank that is known to have
    ended is an error at once: `gone` says so before all have come, and afterwards the `detector` of the new group.
    `causes` says which ones, of ranks that have not come, are the cause: others may have given them up in another
    group, and then never come. `check` is called meanwhile, and may raise to end the wait of this rank. `timeout` is
    that of gloo.

    Torch's own `new_group` serves ranks of one world only, and a fresh process belongs to none.
    """
    started = time.monotonic()

    def lost(who: Sequence[int], detail: str = "") -> PeerLost:
        ended = {**gone(), **detector.ended()}
        have_ended = bool(who) and all(one in ended for one in who)
        return PeerLost(
            who,
            phase=phase,
            waited=time.monotonic() - started,
            rank=rank,
            detail=ended[who[0]] if have_ended else detail,
            ended=have_ended,
        )

    def all_lost(detail: str) -> PeerLost:
        """The error that all ranks of the meeting raise, also those that are connected and wait for the others."""
        return lost(detector.lost(phase=phase, waited=time.monotonic() - started), detail)

    def absent() -> list[int]:
        return [other for other, key in enumerate(here) if not place.check([key])]

    # The meeting has its own connection to the store: gloo waits in it, while this process asks the store other things.
    place = _PrefixStore(f"tokenyard/{meeting}", store.clone())
    here = [f"here/{other}" for other in range(size)]
    place.set(here[rank], "")
    next_look = started + _NEXT_LOOK
    while not place.check(here):
        if ended := list(gone()):
            raise lost(detector.settle(causes(ended)))
        check()
        now = time.monotonic()
        if (too_long := now - started > seconds) or now > next_look:
            next_look, missing = now + _NEXT_LOOK, absent()
            found = causes(missing)
            if missing and (too_long or found != missing):
                raise lost(detector.settle(found))
        time.sleep(_PAUSE)
    detector.read()

    def look() -> None:
        if detector.ended() or detector.called():
            raise all_lost("")
        check()

    try:
        return within(connecting, lambda: _connect(place, rank, size, timeout), look=look)
    except TokenyardError:
        raise
    except (RuntimeError, TimeoutError) as error:  # torch says what went wrong, not with which rank
        raise all_lost(str(error).splitlines()[0][:200]) from error


def _connect(place: Any, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
    process_group: Any = dist.ProcessGroup(place, rank, size)
    gloo: Any = dist.ProcessGroupGloo(place, rank, size, timedelta(seconds=timeout))
    kind = dist.ProcessGroup.BackendType.GLOO
    gloo._set_sequence_number_for_group()
    process_group._set_default_backend(kind)
    process_group._register_backend(torch.device("cpu"), kind, gloo)
    met: dist.ProcessGroup = process_group
    return met


def written_to_meet(meeting: str, rank: int) -> list[str]:
    """The keys that a rank writes into the store for a meeting: that it has come, and its gloo address."""
    return [f"tokenyard/{meeting}/here/{rank}", f"tokenyard/{meeting}/0/{rank}"]


def name_again(name: str, times: int) -> str:
    """The name of a group whose lost ranks were replaced a number of times. It stays short, however often that happens.

    >>> name_again("world", 1), name_again("world/again-9", 1), name_again("world/again-9/0-2", 1)
    ('world/again-1', 'world/again-10', 'world/again-9/0-2/again-1')
    """
    first, again, before = name.rpartition("/again-")
    if again and before.isdigit():
        return f"{first}/again-{int(before) + times}"
    return f"{name}/again-{times}"


def group_key_of(name: str, global_ranks: Sequence[int], use: str = "") -> str:
    """The key, in the store, of a group and of the groups that replace it after losses.

    >>> group_key_of("world", [0, 1]), group_key_of("world", [0, 1], "use 2")
    ('world/0-1', 'world/0-1/use 2')
    """
    return "/".join(filter(None, [name, "-".join(map(str, global_ranks)), use]))


def address_of(store: Any, group_key: str) -> str:
    """Where a fresh process finds the store, and in it the invitations of a group.

    >>> from types import SimpleNamespace
    >>> address_of(SimpleNamespace(path="/tmp/found/together"), "world/0-1")  # as a FileStore has it
    'file:///tmp/found/together#world/0-1'
    """
    if hasattr(store, "port"):
        host = f"[{store.host}]" if ":" in store.host else store.host  # as an address of IPv6 is written
        return f"tcp://{host}:{store.port}#{quote(group_key)}"
    if hasattr(store, "path"):
        return f"file://{quote(store.path)}#{quote(group_key)}"
    raise GroupError(
        f"the ranks found each other through a {type(store).__name__}",
        expected="a store that a fresh process can reach: a TCPStore or a FileStore",
        fix="initialize torch.distributed over tcp:// or file://, or make a whole new process group and pass it to "
        "`plan.readmit(group=…)`",
    )


def rejoin_store_at(address: str, seconds: float) -> RejoinStore:
    """Connect to the store that an address names, within `seconds`."""
    try:
        parts = urlsplit(address)
        group_key, port = unquote(parts.fragment), parts.port
    except ValueError as error:
        raise no_address(address) from error
    timeout = timedelta(seconds=seconds)
    if parts.scheme == "tcp" and parts.hostname and port and group_key:
        return RejoinStore(TCPStore(parts.hostname, port, is_master=False, timeout=timeout), group_key)
    if parts.scheme == "file" and parts.path and group_key:
        path = unquote(parts.path)
        if not os.path.isfile(path):  # torch would wait for it
            raise FileNotFoundError(f"there is no file {path}")
        store = _FileStore(path, -1)
        store.set_timeout(timeout)
        return RejoinStore(store, group_key)
    raise no_address(address)


def no_address(address: object) -> InputError:
    """The error of a fresh rank that was given something else as an address."""
    return InputError(
        f"address is {shown(address)}",
        expected="the `group.address` of a rank of the group",
        fix="pass that string to the process that replaces the lost rank",
    )


def invited_at(address: str, rank: int, seconds: float) -> tuple[RejoinStore, Invitation]:
    """Connect to the store that an address names, and take the invitation for rank `rank` there.

    This takes little more than `seconds`, even if the store does not answer.
    """
    until = time.monotonic() + seconds

    def come() -> tuple[RejoinStore, Invitation]:
        rejoin_store = rejoin_store_at(address, seconds)
        return rejoin_store, rejoin_store.take(rank, address, until - time.monotonic())

    try:
        return within(seconds + _ANSWER, come)
    except TokenyardError:
        raise
    except (RuntimeError, OSError) as error:  # torch's own errors; and that of no answer
        raise GroupError(
            f"the store of {address} does not answer: {str(error).splitlines()[0][:200]}",
            expected="the store through which the group connected: its host is up, and can be reached from here",
            fix="pass the `group.address` of a rank that is left, and check the network to that host",
            rank=rank,
        ) from error
