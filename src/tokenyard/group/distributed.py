"""Ranks of torch.distributed: gloo between CPU processes and hosts, NCCL between GPUs.

This module deals with the pitfalls of torch.distributed:

- float8 and friends are refused by gloo ("Invalid scalar type"): only bytes travel.
- Each wait has the deadline, which therefore also bounds groups that the user made with torch's half an hour.
- gloo gets the deadline, too. If only the waiting rank gave up, gloo's threads would wait on, and the process could
  not end before they do: with torch's default of half an hour, that looks like a hang.
- gloo reports only "Timed out" (or "Connection closed by peer", when a process died). It does not say which rank is
  lost, and not all ranks get the error. The ranks therefore find out together who is lost (`failure_detector`).
- After such an error the connections are in an unknown state: the group is broken for good and says so.
- NCCL refuses two ranks on one GPU, and gloo takes no GPU's bytes: between ranks on GPUs, gloo's bytes pass through
  the CPU's memory.
"""

from __future__ import annotations

import time
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
from tokenyard.group.attendance import LOOK, Attendance
from tokenyard.group.base import DEFAULT_DEADLINE, Group, Pending, check_deadline
from tokenyard.group.devices import resolve_device
from tokenyard.group.failure_detector import FailureDetector, underlying, within
from tokenyard.group.hosts import check_processes, this_host
from tokenyard.group.one_thread import OneThread, by_one_thread
from tokenyard.group.own_process import in_own_process, keep_in_children
from tokenyard.group.readmission import (
    Invitation,
    RejoinStore,
    address_of,
    group_key_of,
    invited_at,
    meet,
    name_again,
    written_to_meet,
)
from tokenyard.group.shared_memory import share_between_processes
from tokenyard.group.symmetric_memory import share_between_gpus
from tokenyard.group.torch_groups import exchange, gather, next_use, store_of

# Seconds in which the processes of a new group must have connected, whatever the deadline of their later waits.
FINDING_EACH_OTHER = 30.0
# Seconds within which the store must answer.
_STORE = 2.0


class DistributedGroup(Group):
    """A process group of torch.distributed, as tokenyard uses it. Without `process_group`, it is the default group.

    `device` is where this rank's rows live. Left out, it is the current GPU under NCCL, and the CPU under gloo.
    `deadline` is the seconds that any single wait may take; errors call it by its `name`.
    """

    # Whether the process group was made by torch, for ranks of its world; else tokenyard made it without torch's world.
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
        check_processes()
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
        # The device on which the backend expects the bytes of a collective.
        self._carrier = resolve_device("cuda") if on_gpu else torch.device("cpu")
        use = next_use(resolved)
        group_key = group_key_of(name, dist.get_process_group_ranks(resolved), use)
        rejoin_store = RejoinStore(underlying(store_of(resolved)), group_key)
        self._detector = FailureDetector(
            store_of(resolved), use, resolved.rank(), resolved.size(), this_host()
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
        self._one_thread = OneThread(f"group {name!r}", self.rank)
        # Freeing the connections, or the store, would end those of the parent: both processes have the same sockets.
        keep_in_children(self)
        keep_in_children(process_group)  # it may outlive this object
        self._readmissions = 0
        self._all_met = False
        self._subgroups = {}

    @classmethod
    def _met(
        cls,
        rejoin_store: RejoinStore,
        rank: int,
        invitation: Invitation,
        *,
        device: torch.device,
        seconds: float,
        attendance: Attendance | None = None,
        **options: Any,
    ) -> DistributedGroup:
        """The group of the ranks that meet under an invitation's key in the store, made without torch's world group.

        `options` are those of `meet`. Looks in the new group count in `attendance`, too.
        """
        # Made before this rank shows up at the meeting: every rank that is there has then registered its process.
        store, own = rejoin_store.store, Attendance(parent=attendance)
        detector = FailureDetector(store, invitation.meeting, rank, invitation.size, this_host(), own)
        options |= {"seconds": seconds, "connecting": FINDING_EACH_OTHER, "detector": detector}
        options["timeout"] = max(invitation.deadline, FINDING_EACH_OTHER)
        own.look(waits=True)
        try:
            process_group = within(
                seconds + FINDING_EACH_OTHER + _STORE,
                lambda: meet(store, invitation.meeting, rank, invitation.size, **options),
                look=own.look,
            )
        except TimeoutError as silent:
            raise _lost_store(invitation.name, str(silent), rank) from silent
        finally:
            own.look(waits=False)
        group = cls.__new__(cls)
        group._carrier, group._known_to_torch = torch.device("cpu"), False
        group._written = written_to_meet(invitation.meeting, rank)
        group._detector = detector
        group._set_up(process_group, rejoin_store, device, invitation.name, invitation.deadline)
        return group

    def start_all_gather(self, mine: Tensor, *, phase: str) -> Pending[Tensor]:
        mine = self._check_bytes(mine, 1).to(self._carrier)
        gathered = mine.new_empty(self.size * mine.numel())
        wait = self._start(gather, gathered, mine, phase=phase)

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
        # torch.distributed gathers equal shapes only: every rank pads to the most rows.
        padded = torch.empty(most, width, dtype=torch.uint8, device=self._carrier)
        padded[: counts[self.rank]] = mine
        gathered = padded.new_empty(self.size * most, width)
        wait = self._start(gather, gathered, padded, phase=phase)

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
        wait = self._start(exchange, received, rows, list(receive), list(send), phase=phase)

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
        receive[self.rank] = send[self.rank]  # gloo copies this rank's own message: lengths must be equal
        *starts, end = accumulate(receive, initial=0)
        wait = self._start(exchange, room[:end], content, receive, list(send), phase=phase)

        def finish() -> list[int]:
            wait()
            return starts

        return Pending(finish)

    def _start(self, collective: Callable[..., Any], *arguments: Any, phase: str) -> Callable[[], None]:
        """Start a collective; return the call that waits for it, no longer than the deadline."""
        if self._broken is not None:
            raise self._is_broken()
        # With a timeout, NCCL's own watchdog would end the process: under NCCL, only `_wait` bounds the wait.
        own = timedelta(seconds=self.deadline) if self._carrier.type == "cpu" else None
        attendance = self._detector.attendance
        with self._one_thread, self._attending(phase, time.monotonic(), attendance.sent + 1):
            attendance.look(waits=False)
            work = collective(self._process_group, own, *arguments)
            attendance.look()  # if this rank is stopped in between, its part may not have left
            attendance.sent = number = attendance.sent + 1
        return partial(self._finish, work, phase, number)

    @by_one_thread
    def _finish(self, work: Any, phase: str, number: int) -> None:
        if self._broken is not None:
            raise self._is_broken()
        started = time.monotonic()
        with self._attending(phase, started, number):
            self.look(waits=True)
            self._wait(work, started + self.deadline)
            self.look(waits=False)

    def look(self, *, waits: bool | None = None) -> None:
        self._detector.attendance.look(waits=waits)

    @contextmanager
    def _attending(self, phase: str, started: float, number: int) -> Iterator[None]:
        """A block that is part of a collective: if it fails, or is interrupted, the group is broken."""
        try:
            yield
        except RuntimeError as error:
            lost = self._lost_in(phase, time.monotonic() - started, number, error)
            self._broken = lost.found
            try:
                raise lost from error
            finally:
                # Otherwise the error's traceback would keep the connections alive until garbage collection.
                del lost
        except BaseException as error:
            # Other ranks may have finished this collective, and be waiting in the next one.
            self._broken = f"{type(error).__name__} while this rank waited in {phase}"
            raise

    def _lost_in(self, phase: str, waited: float, number: int, error: RuntimeError) -> PeerLost:
        """The error of a wait that failed: the ranks find out together who is lost."""
        missing = self._detector.lost(phase=phase, waited=waited, deadline=self.deadline, number=number)
        # The message of torch.distributed is useful only if no lost rank is known.
        said = "" if missing or "timed out" in str(error).lower() else str(error).splitlines()[0][:200]
        return self.lost(missing, phase=phase, waited=waited, detail=self._detail(said))

    def _detail(self, said: str = "") -> str:
        """What the failure detector says besides the lost ranks, or else what torch said."""
        return "; ".join(filter(None, [self._detector.detail or said, self._detector.silent]))

    @in_own_process
    def lost_elsewhere(self, ranks: Sequence[int], *, phase: str, waited: float) -> PeerLost:
        if self.device.type != "cpu":
            self._detector.attendance.was_awake(waited)
        found = self._detector.lost(phase=phase, waited=waited, deadline=self.deadline, missing=ranks)
        lost = self.lost(found or list(ranks), phase=phase, waited=waited, detail=self._detail())
        self._broken = self._broken or lost.found
        return lost

    def lost(
        self, ranks: Sequence[int], *, phase: str, waited: float, layer: str | None = None, detail: str = ""
    ) -> PeerLost:
        self._detector.leave_note(ranks)
        if self.rank in ranks and (gap := self._detector.attendance.longest_gap) >= LOOK:
            slept = f"this rank was stopped, or got no core, for {gap:.1f} s of its wait"
            detail = "; ".join(filter(None, [slept, detail]))
        return super().lost(ranks, phase=phase, waited=waited, layer=layer, detail=detail)

    def _wait(self, work: Any, until: float) -> None:
        """Wait for a collective; end early if another rank has asked which ranks are lost."""
        while True:
            self.look()
            left = max(until - time.monotonic(), 0.001)  # a timeout of 0 would mean no limit
            on_gpu = self._carrier.type != "cpu"  # there, a wait that times out takes everything of NCCL down
            try:
                work.wait(timedelta(seconds=left if on_gpu else min(left, LOOK)))
                return
            except RuntimeError:
                if not on_gpu and work.is_completed():
                    work.wait()  # raises the error of the collective, unless it completed just after the timeout
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

    @in_own_process
    def share_memory(self, nbytes: int) -> list[Tensor]:
        if self.device.type == "cpu":
            return share_between_processes(self, nbytes)
        if self._process_group is None:
            raise self._is_broken()
        return share_between_gpus(self, self._rejoin_store.store, nbytes)

    @in_own_process
    def gone(self) -> dict[int, str]:
        return self._detector.gone()

    def host(self) -> str:
        return f"{this_host()} on {self.device.type}"

    def _subgroup(
        self, members: tuple[int, ...], name: str, purpose: str, number: int, check: Callable[[], None]
    ) -> DistributedGroup:
        if self._process_group is None:
            raise self._is_broken()
        self._check_store()
        if not self._known_to_torch or (self.device.type == "cpu" and self._carrier.type == "cpu"):
            return self._split(members, name, purpose, number, check)
        global_ranks = [dist.get_global_rank(self._process_group, r) for r in members]
        # Local synchronization: only the members take part, other stages are not waited for.
        process_group = dist.new_group(
            global_ranks,
            timeout=timedelta(seconds=max(self.deadline, FINDING_EACH_OTHER)),
            use_local_synchronization=True,
        )
        return DistributedGroup(process_group, device=self.device, name=name, deadline=self.deadline)

    def _split(
        self, members: tuple[int, ...], name: str, purpose: str, number: int, check: Callable[[], None]
    ) -> DistributedGroup:
        """A group of some of these ranks, made without torch's `new_group`: it is freed with its last reference."""
        ranks, group_key = "-".join(map(str, members)), self._rejoin_store.group_key
        meeting = f"{group_key}/{self.name}/subgroup/{'-'.join(filter(None, [ranks, purpose]))}/{number}"
        invitation = Invitation(meeting=meeting, size=len(members), name=name, deadline=self.deadline)
        rejoin_store = RejoinStore(self._rejoin_store.store, f"{group_key}/{name}/{ranks}/{number}")
        places = {rank: place for place, rank in enumerate(members)}
        seconds, phase = max(self.deadline, FINDING_EACH_OTHER), "finding each other"
        return self._meet(places, rejoin_store, invitation, seconds=seconds, phase=phase, check=check)

    def _meet(
        self, places: dict[int, int], rejoin_store: RejoinStore, invitation: Invitation, **options: Any
    ) -> DistributedGroup:
        """A group in which ranks of this one have these places; other places are those of fresh ranks.

        `options` are those of `meet`.
        """
        self._detector.read()
        ranks = {place: rank for rank, place in places.items()}

        def gone() -> dict[int, str]:
            return {places[rank]: why for rank, why in self._detector.ended().items() if rank in places}

        def causes(lost: Sequence[int]) -> list[int]:
            found = self._detector.causes([ranks[place] for place in lost if place in ranks], among=places)
            return sorted([places[rank] for rank in found] + [place for place in lost if place not in ranks])

        try:
            options |= {"device": self.device, "gone": gone, "causes": causes}
            mine, attendance = places[self.rank], self._detector.attendance
            return DistributedGroup._met(rejoin_store, mine, invitation, attendance=attendance, **options)
        except PeerLost as error:
            self._detector.leave_note([ranks[place] for place in error.peers if place in ranks])
            raise

    @property
    def address(self) -> str:
        return address_of(self._rejoin_store.store, self._rejoin_store.group_key)

    @in_own_process
    def decide(self, question: str, answer: str) -> str:
        key = self._key_of(question)
        return str(self._ask_store(lambda store: store.compare_set(key, "", answer).decode()))

    @in_own_process
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

    def _fill(self, empty: Sequence[int], seconds: float, check: Callable[[], None]) -> DistributedGroup:
        self._check_store()
        if self._carrier.type != "cpu":
            raise GroupError(
                f"group {self.name!r} uses NCCL",
                expected="a group over gloo: NCCL cannot add a process",
                fix="make a new process group of all ranks, and pass it: DistributedGroup(…)",
                rank=self.rank,
            )
        self._readmissions += 1
        name = name_again(self.name, self._readmissions)
        meeting = f"{self._rejoin_store.group_key}/{name}/{'-'.join(map(str, empty))}"
        size = max(self.size, *(rank + 1 for rank in empty))
        invitation = Invitation(meeting=meeting, size=size, name=name, deadline=self.deadline)
        first = min(rank for rank in range(self.size) if rank not in empty)
        places = {rank: rank for rank in range(self.size) if rank not in empty}
        with self._rejoin_store.invited(empty if self.rank == first else [], invitation):
            return self._meet(places, self._rejoin_store, invitation, seconds=seconds, check=check)

    def _check_store(self) -> None:
        """Raise if the store does not answer, through which the ranks of a new group find each other."""
        self._detector.ask_again()
        if self._detector.silent:
            raise _lost_store(self.name, self._detector.silent, self.rank)

    @in_own_process
    def close(self) -> None:
        """Close this group. The process group belongs to whoever made it, and can be destroyed now."""
        if self._process_group is not None:
            self._detector.leave(*(self._written if self._all_met else ()))
        self._broken = self._broken or "it was closed"
        self._process_group = None  # torch's own destructor aborts where a reference outlives the library


def rejoin_processes(
    address: str, rank: int, *, device: str | torch.device | None, seconds: float
) -> DistributedGroup:
    """Join a group of processes as rank `rank`, in this process: in place of a lost rank, or as a further one."""
    rejoin_store, invitation = invited_at(address, rank, seconds)
    place = resolve_device(device)
    return DistributedGroup._met(rejoin_store, rank, invitation, device=place, seconds=seconds)


def _lost_store(name: str, why: str, rank: int) -> GroupError:
    return GroupError(
        f"the ranks of group {name!r} cannot find each other: {why}",
        expected="a store that answers: it is where the ranks of a new group meet",
        fix="continue with the ranks that still reach the store's host, and start the others again",
        rank=rank,
    )
