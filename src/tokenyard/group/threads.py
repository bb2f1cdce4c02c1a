"""Ranks as threads of one process: the group for tests, notebooks and a first look.

The ranks of a group share one `_MeetingPoint`. A collective is one *call*: each rank posts its value, waits
until all have posted, and then takes its part. Ranks number their calls, so that a rank that is ahead does not
mix them up. If ranks make *different* calls under one number (one gathers, another exchanges rows), every rank
raises `Drifted`.

The first rank whose deadline passes publishes a verdict, which names the missing ranks. Every rank of the group
then raises the same `PeerLost`, the late one included, when it arrives.

On a GPU all ranks share one device, each on a stream of its own. The threads wait for each other, but their streams do
not. A rank therefore waits for its stream before it posts a tensor, and calls `record_stream` on the tensors that it
takes, so that torch does not reuse their memory too early.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import Drifted, GroupError, InputError, PeerLost
from tokenyard.group.base import DEFAULT_DEADLINE, Group, Pending, check_deadline
from tokenyard.group.devices import prepare_threads, resolve_device, warn_if_threads_may_wait_forever
from tokenyard.group.hosts import hosts_of_ranks
from tokenyard.group.memory import too_much
from tokenyard.group.one_thread import OneThread, by_one_thread
from tokenyard.group.own_process import in_own_process
from tokenyard.group.readmission import PHASE, name_again, not_invited


@dataclass
class _Call:
    """One collective call: what each rank brought, and how many have taken their share."""

    brought: dict[int, tuple[str, Any]] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)
    taken: int = 0


@dataclass(frozen=True)
class _Verdict:
    """The ranks that did not arrive, published by the first rank that notices. Every rank raises an error for them."""

    missing: list[int]
    waited: float
    why: str

    def error(self, rank: int, phase: str) -> PeerLost:
        """The error that one rank raises in this phase."""
        return PeerLost(
            self.missing, phase=phase, waited=self.waited, rank=rank, detail=self.why, ended=bool(self.why)
        )


class _MeetingPoint:
    """The object that the threads of one group share: their calls, and who has left.

    `before` belongs to the group that this one replaces: the same ranks, of which those in `fresh` are new.
    """

    def __init__(
        self, hosts: Sequence[str], before: _MeetingPoint | None = None, fresh: Sequence[int] = ()
    ) -> None:
        self.hosts = tuple(hosts)  # by rank: the name of the host that it runs on
        self.size = size = len(self.hosts)
        self.lock = threading.RLock()
        # By rank: how often it was replaced. A rank that leaves one group also leaves all groups of its chain of
        # replacements in which this number is the same, because it is the same thread there.
        taken: tuple[int, ...] = before.places_taken if before else ()
        taken += (0,) * (size - len(taken))
        self.places_taken: tuple[int, ...] = tuple(had + (rank in fresh) for rank, had in enumerate(taken))
        self.successors: _Successors = before.successors if before else _Successors()
        self.successors.add(self)
        self.calls: dict[int, _Call] = {}
        self.invitations = _Invitations()
        # Weak references: the groups hold their meeting points, and those of groups that are freed are forgotten here.
        self.subgroups: weakref.WeakValueDictionary[tuple[tuple[int, ...], str, int], _MeetingPoint] = (
            weakref.WeakValueDictionary()
        )
        self.readmissions: weakref.WeakValueDictionary[int, _MeetingPoint] = weakref.WeakValueDictionary()
        self.gone: dict[int, str] = {}
        self.verdict: _Verdict | None = None

    def bring(self, rank: int, number: int, kind: str, value: Any, phase: str) -> _Call:
        """Post this rank's value for call `number`, without waiting for the others."""
        with self.lock:
            if self.verdict is not None:
                raise self.verdict.error(rank, phase)
            call = self.calls.setdefault(number, _Call())
            call.brought[rank] = (kind, value)
            if len(call.brought) == self.size:
                call.complete.set()
            elif missing := [r for r in self.gone if r not in call.brought]:
                self.give_up(missing, 0.0)
        return call

    def give_up(self, missing: Sequence[int], waited: float) -> _Verdict:
        """Publish a verdict, unless one was published before, and wake all waiting ranks; return the first one."""
        with self.lock:
            if self.verdict is None:
                why = "; ".join(dict.fromkeys(self.gone[r] for r in missing if r in self.gone))
                self.verdict = _Verdict(list(missing), waited, why)
            for call in self.calls.values():
                call.complete.set()
            return self.verdict

    def take(self, rank: int, number: int, call: _Call, deadline: float, phase: str) -> list[Any]:
        """Wait until all ranks have posted their values for a call; return them in rank order."""
        started = time.monotonic()
        if not call.complete.wait(deadline):
            with self.lock:
                if not call.complete.is_set():
                    missing = [r for r in range(self.size) if r not in call.brought]
                    self.give_up(missing, time.monotonic() - started)
        with self.lock:
            if len(call.brought) < self.size:
                assert self.verdict is not None
                raise self.verdict.error(rank, phase)
            call.taken += 1
            if call.taken == self.size:
                del self.calls[number]
        kinds = {r: k for r, (k, _) in sorted(call.brought.items())}
        if len(set(kinds.values())) > 1:
            raise Drifted(
                "the ranks make different calls: " + ", ".join(f"rank {r} {k}" for r, k in kinds.items()),
                expected="every rank of the group to make the same calls in the same order",
                fix="look for a branch that only some ranks take",
                rank=rank,
            )
        return [call.brought[r][1] for r in range(self.size)]

    def leave(self, rank: int, why: str) -> None:
        """Mark a rank as ended: every rank that waits for it, now or later, raises at once."""
        self._leave(rank, why)
        # Groups that replace this one, or were replaced by it, learn it, too, if the rank is the same thread there.
        place = self.places_taken[rank]
        for other in self.successors.all():
            if other is not self and rank < other.size and other.places_taken[rank] == place:
                other._leave(rank, why)

    def _leave(self, rank: int, why: str) -> None:
        with self.lock:
            self.gone[rank] = why
            waiting = [c for c in self.calls.values() if rank not in c.brought and c.brought]
            if waiting:
                self.give_up([rank], 0.0)
            subgroups = list(self.subgroups.items())
        for (ranks, *_), meeting_point in subgroups:
            if rank in ranks:
                meeting_point.leave(ranks.index(rank), why)


class _Successors:
    """The meeting points of a group and of those that replaced it (weak references), and their ranks' decisions."""

    def __init__(self) -> None:
        self.decided: dict[str, str] = {}
        self._lock = threading.Lock()
        self._meeting_points: weakref.WeakSet[_MeetingPoint] = weakref.WeakSet()

    def add(self, meeting_point: _MeetingPoint) -> None:
        with self._lock:
            self._meeting_points.add(meeting_point)

    def all(self) -> list[_MeetingPoint]:
        with self._lock:
            return list(self._meeting_points)


class _Invitations:
    """The invitations to the places of lost ranks, for which fresh threads wait."""

    def __init__(self) -> None:
        self.address = f"threads:{secrets.token_hex(8)}"
        self.changed = threading.Condition()
        self.invited: dict[int, ThreadGroup] = {}  # by rank: the group as the fresh rank will see it
        _open_invitations[self.address] = self

    def take(self, rank: int, seconds: float) -> ThreadGroup:
        """Wait for an invitation, and take it."""
        with self.changed:
            if not self.changed.wait_for(lambda: rank in self.invited, seconds):
                raise not_invited(rank, self.address, seconds)
            return self.invited.pop(rank)


_open_invitations: weakref.WeakValueDictionary[str, _Invitations] = weakref.WeakValueDictionary()


class ThreadGroup(Group):
    """One rank of a group of threads. Make all of them with `thread_groups`, or let `launch` do it."""

    def __init__(
        self,
        rank: int,
        meeting_point: _MeetingPoint,
        name: str,
        deadline: float,
        device: torch.device,
        invitations: _Invitations | None = None,
    ) -> None:
        self.rank, self.size = rank, meeting_point.size
        self.name, self.deadline, self.device = name, deadline, device
        self._meeting_point = meeting_point
        self._invitations = invitations or meeting_point.invitations
        self._calls = self._readmissions = 0
        self._subgroups, self._closed = {}, False
        self._one_thread = OneThread(f"group {name!r}", rank)

    def _meet(self, kind: str, value: Any, phase: str) -> list[Any]:
        return self._start(kind, value, phase).wait()

    @by_one_thread
    def _start(self, kind: str, value: Any, phase: str) -> Pending[list[Any]]:
        if self._closed:
            found = f"group {self.name!r} is closed"
            raise GroupError(found, expected="an open group", fix="make a new one", rank=self.rank)
        self._calls = number = self._calls + 1
        call = self._meeting_point.bring(self.rank, number, kind, value, phase)
        return Pending(lambda: self._take(number, call, phase))

    @by_one_thread
    def _take(self, number: int, call: _Call, phase: str) -> list[Any]:
        return self._meeting_point.take(self.rank, number, call, self.deadline, phase)

    def barrier(self, *, phase: str = "barrier") -> None:
        """Wait until every rank of the group has called this. No GPU is used: kernels of other ranks may wait there."""
        self._meet("waits for all", None, phase)

    def gather_json(self, value: Any, *, phase: str = "gather_json") -> list[Any]:
        """Every rank's value, in rank order, converted through JSON as between processes. No GPU is used."""
        encoded = json.dumps(value, sort_keys=True, allow_nan=True)
        return [json.loads(other) for other in self._meet("gathers json", encoded, phase)]

    def start_all_gather(self, mine: Tensor, *, phase: str) -> Pending[Tensor]:
        posted = self._start("gathers bytes", self._post(self._check_bytes(mine, 1)), phase)
        return Pending(lambda: torch.stack(self._read(posted.wait())))

    def start_all_gather_rows(self, mine: Tensor, counts: Sequence[int], *, phase: str) -> Pending[Tensor]:
        posted = self._start("gathers rows", self._post(self._check_bytes(mine, 2, counts[self.rank])), phase)
        return Pending(lambda: torch.cat(self._read(posted.wait())))

    def start_all_to_all_rows(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, phase: str
    ) -> Pending[Tensor]:
        rows = self._check_bytes(rows, 2, sum(send))
        posted = self._start("exchanges rows", (self._post(rows), list(send)), phase)
        return Pending(lambda: self._pick(posted.wait(), receive, phase))

    def start_messages(
        self, content: Tensor, send: Sequence[int], most: int, room: Tensor, *, phase: str
    ) -> Pending[list[int]]:
        if self.longest_message == 0:
            return super().start_messages(content, send, most, room, phase=phase)
        content = self._check_bytes(content, 1, sum(send))
        posted = self._start("sends messages", content.clone().split(list(send)), phase)

        def take() -> list[int]:
            parts = [theirs[self.rank] for theirs in posted.wait()]
            for number, part in enumerate(parts):
                room[most * number :][: part.numel()] = part
            return [most * rank for rank in range(self.size)]

        return Pending(take)

    def _pick(self, posted: list[Any], receive: Sequence[int], phase: str) -> Tensor:
        """The rows that all ranks have posted for this rank, in rank order."""
        self._read([theirs for theirs, _ in posted])
        parts = []
        for (theirs, sent), expected in zip(posted, receive, strict=True):
            start = sum(sent[: self.rank])
            part = theirs[start : start + sent[self.rank]]
            if part.shape[0] != expected:
                raise Drifted(
                    f"{part.shape[0]} rows came in {phase} where {expected} were announced",
                    expected="the announced number of rows",
                    fix="announce the counts that are sent",
                    rank=self.rank,
                )
            parts.append(part)
        return torch.cat(parts)

    def _post(self, mine: Tensor) -> Tensor:
        """A finished copy of a tensor for other ranks to read: this rank may change its own tensor meanwhile."""
        copy = mine.clone()
        self.wait_for_device()
        return copy

    def _read(self, posted: list[Tensor]) -> list[Tensor]:
        """The posted tensors, marked as in use by this rank's stream."""
        if self.device.type == "cuda":
            for tensor in posted:
                tensor.record_stream(torch.cuda.current_stream(self.device))
        return posted

    @in_own_process
    def share_memory(self, nbytes: int) -> list[Tensor]:
        error = too_much(nbytes, self.size) if self.device.type == "cpu" else None
        mine = torch.empty(0, dtype=torch.uint8)
        try:
            mine = torch.zeros(0 if error else nbytes, dtype=torch.uint8, device=self.device)
            self.wait_for_device()
        except RuntimeError as raised:  # torch's name for a failed allocation
            error = f"{nbytes} bytes cannot be allocated ({str(raised).splitlines()[0][:200]})"
        self.all_or_none("sharing memory", error)
        return self._read(self._meet("shares memory", mine, "sharing memory"))

    @in_own_process
    def gone(self) -> dict[int, str]:
        with self._meeting_point.lock:
            return dict(self._meeting_point.gone)

    @in_own_process
    def lost_elsewhere(self, ranks: Sequence[int], *, phase: str, waited: float) -> PeerLost:
        return self._meeting_point.give_up(ranks, waited).error(self.rank, phase)

    def host(self) -> str:
        return self._meeting_point.hosts[self.rank]

    def _subgroup(
        self, members: tuple[int, ...], name: str, purpose: str, number: int, check: Callable[[], None]
    ) -> ThreadGroup:
        parent = self._meeting_point
        hosts = [parent.hosts[rank] for rank in members]
        with parent.lock:
            meeting_point = parent.subgroups.setdefault((members, purpose, number), _MeetingPoint(hosts))
            gone = [(r, why) for r, why in parent.gone.items() if r in members]
        for rank, why in gone:
            meeting_point.leave(members.index(rank), why)
        return ThreadGroup(members.index(self.rank), meeting_point, name, self.deadline, self.device)

    @property
    def address(self) -> str:
        return self._invitations.address

    @in_own_process
    def decide(self, question: str, answer: str) -> str:
        decided = self._meeting_point.successors.decided
        return decided.setdefault(question, answer)  # atomic

    @in_own_process
    def decided(self, question: str) -> str | None:
        return self._meeting_point.successors.decided.get(question)

    def _fill(self, empty: Sequence[int], seconds: float, check: Callable[[], None]) -> ThreadGroup:
        self._readmissions += 1
        name = name_again(self.name, self._readmissions)
        parent, invitations = self._meeting_point, self._invitations
        with parent.lock:
            found = parent.readmissions.get(self._readmissions)
            size = max(parent.size, *(rank + 1 for rank in empty))
            hosts = [*parent.hosts, *parent.hosts[-1:] * (size - parent.size)]
            meeting_point = found or _MeetingPoint(hosts, parent, empty)
            parent.readmissions[self._readmissions] = meeting_point
            gone = [(rank, why) for rank, why in parent.gone.items() if rank not in empty]
        for rank, why in gone:
            meeting_point.leave(rank, why)

        def invited_group(rank: int) -> ThreadGroup:
            return ThreadGroup(rank, meeting_point, name, self.deadline, self.device, invitations)

        if found is None:
            with invitations.changed:
                invitations.invited |= {rank: invited_group(rank) for rank in empty}
                invitations.changed.notify_all()
        try:
            return invited_group(self.rank)._met(seconds)
        except BaseException:
            with invitations.changed:
                for rank in [r for r, g in invitations.invited.items() if g._meeting_point is meeting_point]:
                    del invitations.invited[rank]
            raise

    def _met(self, seconds: float) -> ThreadGroup:
        """Wait until all ranks of this group have arrived, at most `seconds`; return the group."""
        deadline, self.deadline = self.deadline, seconds
        self.barrier(phase=PHASE)
        self.deadline = deadline
        return self

    @in_own_process
    def leave(self, why: str) -> None:
        """Make it known to the other ranks that this rank has ended."""
        self._meeting_point.leave(self.rank, why)

    @in_own_process
    def close(self) -> None:
        self._closed = True


def rejoin_threads(address: str, rank: int, *, seconds: float) -> ThreadGroup:
    """Join a group of threads as rank `rank`, in this thread: in place of a lost rank, or as a further one."""
    invitations = _open_invitations.get(address)
    if invitations is None:
        raise InputError(
            f"address is {address!r}",
            expected="the address of a group of threads in this process",
            fix="pass the `group.address` of a rank of the group",
        )
    return invitations.take(rank, seconds)._met(seconds)


def thread_groups(
    world: int,
    *,
    device: str | torch.device | None = None,
    name: str = "threads",
    deadline: float = DEFAULT_DEADLINE,
    hosts: int | Sequence[int] = 1,
) -> list[ThreadGroup]:
    """The ranks of one group of threads, one `ThreadGroup` for each thread to use.

    `device` is where their rows live: the CPU, or a GPU that all of them share. There, each thread makes its calls
    on a CUDA stream of its own, as `launch` has it. `hosts` is how many hosts the threads act as, as in `launch`.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(pool.map(lambda group: group.gather_json(group.rank * 10), thread_groups(2)))
    [[0, 10], [0, 10]]
    """
    if world < 1:
        raise InputError(f"world is {world}", expected="at least one rank", fix="pass world ≥ 1")
    deadline = check_deadline(deadline)
    prepare_threads(device)
    names = [f"host {host} of this process" for host in hosts_of_ranks(hosts, world)]
    place, meeting_point = resolve_device(device), _MeetingPoint(names)
    if world > 1:
        warn_if_threads_may_wait_forever(place)
    return [ThreadGroup(rank, meeting_point, name, deadline, place) for rank in range(world)]
