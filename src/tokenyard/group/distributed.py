"""Ranks of torch.distributed: gloo between CPU processes and hosts, NCCL between GPUs.

All traps of the library underneath are dealt with here, once:

- float8 and friends are refused by gloo ("Invalid scalar type"): only bytes travel.
- The deadline is given to each wait, so that a group made by somebody else, with a timeout of half an hour,
  is bounded too.
- gloo gets the deadline, too. If only the waiting rank gave up, gloo's threads would wait on, and the process could
  not end before they do: with torch's default of half an hour, that looks like a hang.
- gloo says only "Timed out" (or "Connection closed by peer", when a process died), never who, and not to everybody:
  the ranks find out together who is lost (`failure_detector`).
- After such an error the connections are in an unknown state: the group is broken for good and says so.
- torch 2.13 renames `_allgather_base`; it is called here only.
- NCCL refuses two ranks on one GPU, and gloo takes no GPU's bytes: between ranks on GPUs, gloo's bytes pass through
  the CPU's memory.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import GroupError, PeerLost
from tokenyard.group.base import DEFAULT_DEADLINE, Group, Pending, check_deadline
from tokenyard.group.devices import resolve_device
from tokenyard.group.failure_detector import LOOK, FailureDetector, within
from tokenyard.group.hosts import this_host
from tokenyard.group.one_thread import OneThread, by_one_thread
from tokenyard.group.readmission import (
    PHASE,
    READMISSION,
    Invitation,
    RejoinStore,
    address_of,
    check_count,
    check_lost,
    group_key_of,
    invited_at,
    meet,
    name_again,
    underlying,
    written_to_meet,
)
from tokenyard.group.shared_memory import share_between_processes
from tokenyard.group.symmetric_memory import share_between_gpus

# Seconds in which the processes of a new group must have connected, whatever the deadline of their later waits.
FINDING_EACH_OTHER = 30.0
# Seconds more for the store's answers meanwhile.
_STORE = 2.0


class DistributedGroup(Group):
    """A process group of torch.distributed, as tokenyard uses it. Without `process_group`, it is the default group.

    `device` is where this rank's rows live. Left out, it is the current GPU under NCCL, and the CPU under gloo.
    `deadline` is the seconds that any single wait may take; `name` stands in errors.
    """

    # Whether torch made the process group, for ranks of its world, or they met without it.
    _known_to_torch = True
    # The keys that this rank wrote into the store to be found.
    _written: Sequence[str] = ()

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: str | torch.device | None = None,
        name: str = "world",
        deadline: float = DEFAULT_DEADLINE,
    ) -> None:
        if not dist.is_initialized():
            raise GroupError(
                "torch.distributed is not initialized",
                expected="a process group",
                fix="call torch.distributed.init_process_group first, or use tokenyard.launch",
            )
        deadline = check_deadline(deadline)
        resolved = process_group if process_group is not None else dist.group.WORLD
        assert resolved is not None
        on_gpu = "nccl" in dist.get_backend(resolved)
        # Where the library takes bytes from and puts them.
        self._carrier = resolve_device("cuda") if on_gpu else torch.device("cpu")
        use = _next_use(resolved)
        group_key = group_key_of(name, dist.get_process_group_ranks(resolved), use)
        rejoin_store = RejoinStore(underlying(_store_of(resolved)), group_key)
        self._detector = FailureDetector(
            _store_of(resolved), use, resolved.rank(), resolved.size(), this_host()
        )
        self._set_up(
            resolved, rejoin_store, resolve_device(device or ("cuda" if on_gpu else "cpu")), name, deadline
        )

    def _set_up(
        self,
        process_group: dist.ProcessGroup,
        rejoin_store: RejoinStore,
        device: torch.device,
        name: str,
        deadline: float,
    ) -> None:
        self._process_group: dist.ProcessGroup | None = process_group
        self.rank, self.size = process_group.rank(), process_group.size()
        self.name, self.deadline, self.device = name, deadline, device
        if self._carrier.type == device.type:
            self._carrier = device
        self._rejoin_store = rejoin_store
        self._broken: str | None = None
        self._one_thread = OneThread(f"group {name!r}")
        self._readmissions = 0
        self._all_met = False
        self._splits: dict[tuple[tuple[int, ...], str], int] = {}

    @classmethod
    def _met(
        cls,
        rejoin_store: RejoinStore,
        rank: int,
        invitation: Invitation,
        *,
        device: torch.device,
        seconds: float,
        phase: str = PHASE,
        gone: Callable[[], dict[int, str]] = dict,
        check: Callable[[], None] | None = None,
    ) -> DistributedGroup:
        """The group of the ranks that meet as an invitation says, made without torch's world group.

        `gone` says which of them will not come, as far as this rank sees; `check` raises where they need not.
        """
        # Before this rank is seen at the meeting: who is there has enrolled.
        detector = FailureDetector(rejoin_store.store, invitation.meeting, rank, invitation.size, this_host())
        try:
            process_group = within(
                seconds + FINDING_EACH_OTHER + _STORE,
                lambda: meet(
                    rejoin_store.store,
                    invitation.meeting,
                    rank,
                    invitation.size,
                    phase=phase,
                    seconds=seconds,
                    connecting=FINDING_EACH_OTHER,
                    timeout=max(invitation.deadline, FINDING_EACH_OTHER),
                    detector=detector,
                    gone=gone,
                    check=check or (lambda: None),
                ),
            )
        except TimeoutError as silent:
            raise _lost_store(invitation.name, str(silent), rank) from silent
        group = cls.__new__(cls)
        group._carrier, group._known_to_torch = torch.device("cpu"), False
        group._written = written_to_meet(invitation.meeting, rank)
        group._detector = detector
        group._set_up(process_group, rejoin_store, device, invitation.name, invitation.deadline)
        return group

    def start_all_gather(self, mine: Tensor, *, phase: str) -> Pending[Tensor]:
        mine = self._check_bytes(mine, 1).to(self._carrier)
        gathered = mine.new_empty(self.size * mine.numel())
        wait = self._start(_gather, gathered, mine, phase=phase)

        def finish() -> Tensor:
            wait()
            if not self._all_met:  # every rank has sent a value, so every rank is connected
                self._all_met = True
                self._detector.read()
            return gathered.view(self.size, -1).to(self.device)

        return Pending(finish)

    def start_all_gather_rows(self, mine: Tensor, counts: Sequence[int], *, phase: str) -> Pending[Tensor]:
        mine = self._check_bytes(mine, 2, counts[self.rank])
        most, width = max(counts), mine.shape[1]
        if most == 0:
            return Pending(lambda: mine)
        # The library gathers equal shapes only: everybody pads to the longest.
        padded = torch.empty(most, width, dtype=torch.uint8, device=self._carrier)
        padded[: counts[self.rank]] = mine
        gathered = padded.new_empty(self.size * most, width)
        wait = self._start(_gather, gathered, padded, phase=phase)

        def finish() -> Tensor:
            wait()
            parts = gathered.view(self.size, most, width)
            return torch.cat([parts[w, :count] for w, count in enumerate(counts)]).to(self.device)

        return Pending(finish)

    def start_all_to_all_rows(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, phase: str
    ) -> Pending[Tensor]:
        rows = self._check_bytes(rows, 2, sum(send)).to(self._carrier)
        received = rows.new_empty(sum(receive), rows.shape[1])
        if rows.shape[1] == 0:
            return Pending(lambda: received.to(self.device))
        wait = self._start(_exchange, received, rows, list(receive), list(send), phase=phase)

        def finish() -> Tensor:
            wait()
            return received.to(self.device)

        return Pending(finish)

    def start_messages(
        self, content: Tensor, send: Sequence[int], most: int, room: Tensor, *, phase: str
    ) -> Pending[list[int]]:
        if self.longest_message == 0:
            return super().start_messages(content, send, most, room, phase=phase)
        content = self._check_bytes(content, 1, sum(send))
        # gloo takes a message that is shorter than the room for it; one that is longer would end the process.
        receive = [most] * self.size
        receive[self.rank] = send[self.rank]  # what stays here is copied, and must be as long
        *starts, end = accumulate(receive, initial=0)
        wait = self._start(_exchange, room[:end], content, receive, list(send), phase=phase)

        def finish() -> list[int]:
            wait()
            return starts

        return Pending(finish)

    def _start(self, collective: Callable[..., Any], *arguments: Any, phase: str) -> Callable[[], None]:
        """Start a collective; return the call that waits for it, no longer than the deadline."""
        if self._broken is not None:
            raise self._is_broken()
        # NCCL's own watchdog would end the process: there, this rank alone gives up.
        own = timedelta(seconds=self.deadline) if self._carrier.type == "cpu" else None
        with self._one_thread, self._attending(phase, time.monotonic()):
            work = collective(self._process_group, own, *arguments)
        return partial(self._finish, work, phase)

    @by_one_thread
    def _finish(self, work: Any, phase: str) -> None:
        if self._broken is not None:
            raise self._is_broken()
        started = time.monotonic()
        with self._attending(phase, started):
            self._wait(work, started + self.deadline)

    @contextmanager
    def _attending(self, phase: str, started: float) -> Iterator[None]:
        """A part of a collective. If it fails, or is interrupted, the group is broken."""
        try:
            yield
        except RuntimeError as error:
            lost = self._lost_in(phase, time.monotonic() - started, error)
            self._broken = lost.found
            try:
                raise lost from error
            finally:
                # Or it would hold, by way of its traceback, the connections until garbage is collected.
                del lost
        except BaseException as error:
            # Other ranks may have finished this collective, and be waiting in the next one.
            self._broken = f"{type(error).__name__} while this rank waited in {phase}"
            raise

    def _lost_in(self, phase: str, waited: float, error: RuntimeError) -> PeerLost:
        """The error of a wait that failed: the ranks find out together who is lost."""
        missing = self._detector.lost(phase=phase, waited=waited, deadline=self.deadline)
        # What the library says of a connection is of use only where nobody is named.
        said = "" if missing or "timed out" in str(error).lower() else str(error).splitlines()[0][:200]
        detail = "; ".join(filter(None, [self._detector.detail or said, self._detector.silent]))
        return self.lost(missing, phase=phase, waited=waited, detail=detail)

    def lost_elsewhere(self, ranks: Sequence[int], *, phase: str, waited: float) -> PeerLost:
        found = self._detector.lost(phase=phase, waited=waited, deadline=self.deadline) or list(ranks)
        detail = "; ".join(filter(None, [self._detector.detail, self._detector.silent]))
        lost = self.lost(found, phase=phase, waited=waited, detail=detail)
        self._broken = self._broken or lost.found
        return lost

    def _wait(self, work: Any, until: float) -> None:
        """Wait for a collective. It ends early once another rank has found out that somebody is lost."""
        while True:
            left = max(until - time.monotonic(), 0.001)  # no time at all would be no limit
            on_gpu = self._carrier.type != "cpu"  # there, a wait that times out takes everything down
            try:
                work.wait(timedelta(seconds=left if on_gpu else min(left, LOOK)))
                return
            except RuntimeError:
                if not on_gpu and work.is_completed():
                    work.wait()  # raises what went wrong; or it was done just after it was given up
                    return
                if on_gpu or time.monotonic() >= until or self._detector.called():
                    raise

    def _is_broken(self) -> GroupError:
        return GroupError(
            f"group {self.name!r} is broken: {self._broken}",
            expected="a group all of whose ranks are there",
            fix="make a new group of the ranks that are left",
            rank=self.rank,
        )

    def share_memory(self, nbytes: int) -> list[Tensor]:
        if self.device.type == "cpu":
            return share_between_processes(self, nbytes)
        if self._process_group is None:
            raise self._is_broken()
        return share_between_gpus(self, self._rejoin_store.store, nbytes)

    def gone(self) -> dict[int, str]:
        return self._detector.gone()

    def host(self) -> str:
        return f"{this_host()} on {self.device.type}"

    def subgroup(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        purpose: str = "",
        check: Callable[[], None] | None = None,
    ) -> DistributedGroup:
        members = self._check_members(ranks)
        if self._process_group is None:
            raise self._is_broken()
        self._check_store()
        name = name or f"{self.name}/{'-'.join(map(str, members))}"
        if not self._known_to_torch or (self.device.type == "cpu" and self._carrier.type == "cpu"):
            return self._split(members, name, purpose, check)
        global_ranks = [dist.get_global_rank(self._process_group, r) for r in members]
        # Local synchronization: only the members take part, other stages are not waited for.
        process_group = dist.new_group(
            global_ranks,
            timeout=timedelta(seconds=max(self.deadline, FINDING_EACH_OTHER)),
            use_local_synchronization=True,
        )
        return DistributedGroup(process_group, device=self.device, name=name, deadline=self.deadline)

    def _split(
        self, members: tuple[int, ...], name: str, purpose: str, check: Callable[[], None] | None
    ) -> DistributedGroup:
        """A group of some of these ranks, made without torch's `new_group`: it is freed with its last reference."""
        # The n-th subgroup of the same ranks is the same one on all of them.
        self._splits[members, purpose] = number = self._splits.get((members, purpose), 0) + 1
        ranks = "-".join(filter(None, [*map(str, members), purpose]))
        meeting = f"{self._rejoin_store.group_key}/{self.name}/subgroup/{ranks}/{number}"
        invitation = Invitation(meeting=meeting, size=len(members), name=name, deadline=self.deadline)
        rejoin_store = RejoinStore(
            self._rejoin_store.store,
            f"{self._rejoin_store.group_key}/{name}/{'-'.join(map(str, members))}/{number}",
        )
        self._detector.read()
        return DistributedGroup._met(
            rejoin_store,
            members.index(self.rank),
            invitation,
            device=self.device,
            seconds=max(self.deadline, FINDING_EACH_OTHER),
            phase="finding each other",
            gone=lambda: {
                members.index(rank): why for rank, why in self._detector.ended().items() if rank in members
            },
            check=check,
        )

    @property
    def address(self) -> str:
        return address_of(self._rejoin_store.store, self._rejoin_store.group_key)

    def readmit(self, lost: Sequence[int], *, seconds: float = READMISSION) -> DistributedGroup:
        return self._fill(check_lost(lost, self.rank, self.size), seconds)

    def admit(
        self, count: int, *, seconds: float = READMISSION, check: Callable[[], None] | None = None
    ) -> DistributedGroup:
        check_count(count, self.rank)
        return self._fill(range(self.size, self.size + count), seconds, check)

    def decide(self, question: str, answer: str) -> str:
        key = self._key_of(question)
        return str(self._ask_store(lambda store: store.compare_set(key, "", answer).decode()))

    def decided(self, question: str) -> str | None:
        key = self._key_of(question)
        answer: str | None = self._ask_store(
            lambda store: store.get(key).decode() if store.check([key]) else None
        )
        return answer

    def _key_of(self, question: str) -> str:
        return f"tokenyard/{self._rejoin_store.group_key}/decided/{question}"

    def _ask_store(self, ask: Callable[[Any], Any]) -> Any:
        try:
            return within(_STORE, lambda: ask(self._rejoin_store.store))
        except (RuntimeError, TimeoutError) as silent:
            raise _lost_store(self.name, str(silent).splitlines()[0][:200], self.rank) from silent

    def _fill(
        self, empty: Sequence[int], seconds: float, check: Callable[[], None] | None = None
    ) -> DistributedGroup:
        """This group once more, with fresh ranks in these places: some of its own, or further ones."""
        self._check_store()
        if self._carrier.type != "cpu":
            raise GroupError(
                f"group {self.name!r} is one of NCCL",
                expected="a group over gloo: NCCL has no way to take in a process",
                fix="make a new process group of all ranks, and pass it: DistributedGroup(…)",
                rank=self.rank,
            )
        self._readmissions += 1
        name = name_again(self.name, self._readmissions)
        meeting = f"{self._rejoin_store.group_key}/{name}/{'-'.join(map(str, empty))}"
        size = max(self.size, *(rank + 1 for rank in empty))
        invitation = Invitation(meeting=meeting, size=size, name=name, deadline=self.deadline)
        first = min(rank for rank in range(self.size) if rank not in empty)
        self._detector.read()
        with self._rejoin_store.invited(empty if self.rank == first else [], invitation):
            return DistributedGroup._met(
                self._rejoin_store,
                self.rank,
                invitation,
                device=self.device,
                seconds=seconds,
                gone=lambda: {rank: why for rank, why in self._detector.ended().items() if rank not in empty},
                check=check,
            )

    def _check_store(self) -> None:
        """Raise where ranks cannot find each other, because their store does not answer."""
        self._detector.ask_again()
        if self._detector.silent:
            raise _lost_store(self.name, self._detector.silent, self.rank)

    def close(self) -> None:
        """Close this group. The process group belongs to whoever made it, and can be destroyed now."""
        if self._process_group is not None:
            self._detector.leave(*(self._written if self._all_met else ()))
        self._broken = self._broken or "it was closed"
        self._process_group = None  # torch's own destructor aborts where a reference outlives the library


def rejoin_processes(
    address: str, rank: int, *, device: str | torch.device | None, seconds: float
) -> DistributedGroup:
    """Take the place of a lost rank, in this process."""
    rejoin_store, invitation = invited_at(address, rank, seconds)
    return DistributedGroup._met(
        rejoin_store, rank, invitation, device=resolve_device(device), seconds=seconds
    )


def _gather(process_group: Any, timeout: timedelta | None, gathered: Tensor, mine: Tensor) -> Any:
    """Start to gather equal parts."""
    renamed = hasattr(process_group, "all_gather_single")
    start = process_group.all_gather_single if renamed else process_group._allgather_base
    return start(gathered, mine, _options("AllgatherOptions", timeout))


def _exchange(
    process_group: Any,
    timeout: timedelta | None,
    received: Tensor,
    rows: Tensor,
    receive: list[int],
    send: list[int],
) -> Any:
    """Start to exchange rows, so many with each rank."""
    options = _options("AllToAllOptions", timeout)
    return process_group.alltoall_base(received, rows, receive, send, options)


def _options(kind: str, timeout: timedelta | None) -> Any:
    """The options of a collective that is waited for later. A timeout of None is that of the process group."""
    options = getattr(dist.distributed_c10d, kind)()
    options.asyncOp = True
    if timeout is not None:
        options.timeout = timeout
    return options


def _lost_store(name: str, why: str, rank: int) -> GroupError:
    return GroupError(
        f"the ranks of group {name!r} cannot find each other: {why}",
        expected="a store that answers: it is where the ranks of a new group meet",
        fix="go on with the ranks that still reach the store's host, and start the others anew",
        rank=rank,
    )


# How many groups were made of each process group.
_uses: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _next_use(process_group: dist.ProcessGroup) -> str:
    """Tells this group of a process group from others of it, and from those of other process groups of the same ranks.

    All ranks make them in one order. Nothing, for the first of torch's world: a fresh process looks for that one.
    """
    _uses[process_group] = number = _uses.get(process_group, 0) + 1
    made_by_torch = "" if process_group is dist.group.WORLD else f"group {process_group.group_name}"
    return "/".join(filter(None, [made_by_torch, f"use {number}" if number > 1 else ""]))


def _store_of(process_group: dist.ProcessGroup) -> Any:
    """The store through which the processes of a group found each other."""
    return dist.distributed_c10d._world.pg_map[process_group][1]


def loopback_interface() -> str | None:
    """The name of the loopback interface, which local ranks talk over."""
    return next((name for name in ("lo", "lo0") if os.path.exists(f"/sys/class/net/{name}")), None)
