"""`Group`: the interface of a group of ranks, which move bytes between each other, agree on values, and wait.

Every wait is scoped to the ranks of one group and bounded by its deadline. Two groups side by side (pipeline stages)
therefore cannot wait for each other, and a rank that is gone gives `PeerLost` instead of a hang.

A group moves bytes (`uint8`) of any meaning. Collectives of torch.distributed refuse float8, and sum in an order of
their own; a group therefore uses them only to move bytes, and never to sum. Every collective takes the name of the
`phase` that it is called for, which errors mention.

Each collective can be split into two calls, `start_all_gather(…)` and `.wait()`, with computation between them. All
ranks start collectives in the same order, and wait for them in that order.

Collectives:

    all_gather(mine[n])                          → [W, n]     the same n on every rank
    all_gather_rows(mine[n, B], counts)          → [Σ counts, B]   counts[w] rows from rank w
    all_to_all_rows(rows[Σ send, B], send, recv) → [Σ recv, B]     send[w] rows to rank w, recv[w] from it
    start_messages(bytes[Σ send], send, most, …) → offsets of arrivals   send[w] bytes to rank w, at most `most` from it
    gather_json(value)                           → [value of rank 0, value of rank 1, …]
    agree(what, value)                           raises `Disagreement` on every rank if values differ
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from tokenyard.errors import GroupError, InputError, PeerFailed, PeerLost, shown
from tokenyard.group.one_thread import OneThread
from tokenyard.group.own_process import OwnProcess, in_own_process, not_pickled
from tokenyard.group.pending import Background as Background  # noqa: PLC0414 - a part of the contract
from tokenyard.group.pending import Pending as Pending  # noqa: PLC0414 - a part of the contract
from tokenyard.group.readmission import READMISSION, check_lost
from tokenyard.rows import describe

# Seconds that any single wait may take. A rank that compiles kernels or loads weights between two calls is
# late by less than this; a rank that died is found out as soon as its connection closes.
DEFAULT_DEADLINE = 60.0
# Seconds: eleven days. Torch counts milliseconds, and loses count above 24 days.
LONGEST_DEADLINE = 1e6

# The most bytes that a rank reserves for messages whose length it does not know, from all ranks together.
MESSAGE_BYTES = 256 << 20

# The most bytes of a value that travels as JSON. The plan of a model of 100 layers and 1,000 experts has half a
# megabyte. A rank that announces more is refused, before memory for it is allocated.
LARGEST_JSON = 1 << 26


_MEMORY_FIX = (
    "bound what a rank receives at a time, plan(..., max_rows=…), plan with a smaller max_tokens or fewer dispatches "
    "in flight, or give the machine more memory"
)


def check_deadline(deadline: object) -> float:
    """The seconds that a wait may take; raise unless it is a finite number in range."""
    seconds = float(deadline) if isinstance(deadline, Real) else math.nan
    if not 0 < seconds <= LONGEST_DEADLINE:
        raise InputError(
            f"deadline is {shown(deadline)}",
            expected=f"seconds, above 0 and at most {LONGEST_DEADLINE:,.0f}: every wait has an end",
            fix=f"leave it out, for {DEFAULT_DEADLINE:.0f} s",
        )
    return seconds


def check_count(count: object, rank: int) -> int:
    """The number of fresh ranks; raise unless it is an int of at least 1."""
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    raise InputError(
        f"the number of fresh ranks is {shown(count)}",
        expected="a number of ranks, from 1; or, for `plan.grow`, a group that has more of them",
        fix="pass how many processes will call `rejoin`",
        rank=rank,
    )


Result = TypeVar("Result")


class Disagreement(GroupError):
    """The ranks of a group hold different values for what must be one value. Raised on every rank."""

    by_rank: list[Any]  # the value of each rank

    when = "ranks hold different values for what must be one value (`group.agree`)"

    def __init__(self, what: str, by_rank: list[Any], *, rank: int | None = None) -> None:
        self.by_rank = by_rank
        values = ", ".join(f"rank {r} has {value!r}" for r, value in enumerate(by_rank))
        super().__init__(
            f"ranks disagree on {what}: {values}",
            expected="the same value on every rank of the group",
            fix=f"set {what} from one source on all ranks",
            rank=rank,
        )


class Group(ABC):
    """The ranks that exchange. `rank` counts within the group."""

    rank: int  # the number of this process or thread within the group
    size: int  # W, the number of ranks
    name: str  # the name of the group in errors and in the names of subgroups
    deadline: float  # seconds that any single wait may take
    device: torch.device  # the device that rows and the bytes of a collective are on
    # Bytes of the longest message whose length its receiver does not know; 0: such messages are not allowed.
    longest_message = 0
    # The number of hosts that its ranks run on, as found when the last plan was made.
    num_hosts = 1
    _plans = 0
    _one_thread: OneThread
    _subgroups: dict[tuple[tuple[int, ...], str], int]  # how many were made, by their ranks and purpose

    @property
    def own_process(self) -> OwnProcess:
        """Refuses calls in processes that are forked from the one that made the group."""
        return self._one_thread.own_process

    @abstractmethod
    def start_all_gather(self, mine: Tensor, *, phase: str) -> Pending[Tensor]:
        """Start an `all_gather`, without waiting for the other ranks."""

    @abstractmethod
    def start_all_gather_rows(self, mine: Tensor, counts: Sequence[int], *, phase: str) -> Pending[Tensor]:
        """Start an `all_gather_rows`, without waiting for the other ranks."""

    @abstractmethod
    def start_all_to_all_rows(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, phase: str
    ) -> Pending[Tensor]:
        """Start an `all_to_all_rows`, without waiting for the other ranks."""

    def allow_messages(self, nbytes: int) -> None:
        """Allow messages of up to `nbytes` whose length their receivers do not know. All ranks allow the same, on CPUs.

        A plan allows the largest message of any of its layers. If ranks drift into different layers or plans, a message
        is then still not longer than the room for it. Messages of all ranks together have at most `MESSAGE_BYTES`.
        """
        if self.device.type == "cpu":
            self.longest_message = max(self.longest_message, min(nbytes, MESSAGE_BYTES // self.size))

    def start_messages(
        self, content: Tensor, send: Sequence[int], most: int, room: Tensor, *, phase: str
    ) -> Pending[list[int]]:
        """Send `send[w]` bytes to rank w (consecutive in `content`); receive at most `most` bytes from each rank.

        The messages are written into `room`, which has space for one of each rank; `wait` returns the offset of each.
        A message must say itself how long it is. If `longest_message` is 0, all messages have exactly `most` bytes.
        """
        one = [1] * self.size
        came = self.start_all_to_all_rows(content.view(-1, most), one, one, phase=phase)

        def take() -> list[int]:
            room[: most * self.size].copy_(came.wait().flatten())
            return [most * rank for rank in range(self.size)]

        return Pending(take)

    def all_gather(self, mine: Tensor, *, phase: str) -> Tensor:
        """Every rank's bytes, in rank order: `[n]` → `[W, n]`."""
        return self.start_all_gather(mine, phase=phase).wait()

    def all_gather_rows(self, mine: Tensor, counts: Sequence[int], *, phase: str) -> Tensor:
        """Every rank's rows of bytes, in rank order; `counts[w]` is the number of rows of rank w."""
        return self.start_all_gather_rows(mine, counts, phase=phase).wait()

    def all_to_all_rows(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, phase: str
    ) -> Tensor:
        """Send `send[w]` rows of bytes to rank w (consecutive in `rows`); return the rows that this rank receives."""
        return self.start_all_to_all_rows(rows, send, receive, phase=phase).wait()

    @abstractmethod
    def share_memory(self, nbytes: int) -> list[Tensor]:
        """A buffer of zeroed bytes on each rank, mapped by all: `[buffer of rank 0, of rank 1, …]`.

        Collective, and all or nothing: if one rank cannot allocate, all raise. Nothing is left behind when the
        tensors are gone, however the processes end.
        """

    @abstractmethod
    def gone(self) -> dict[int, str]:
        """Ranks that this rank knows to have ended, each with the reason, such as "its process has ended"."""

    def lost(
        self, ranks: Sequence[int], *, phase: str, waited: float, layer: str | None = None, detail: str = ""
    ) -> PeerLost:
        """The error for ranks that did not arrive. If this rank knows that they have ended, the error says why."""
        gone = self.gone()
        ended = bool(ranks) and all(rank in gone for rank in ranks)
        return PeerLost(
            ranks,
            phase=phase,
            waited=waited,
            layer=layer,
            rank=self.rank,
            detail="; ".join(dict.fromkeys(gone[rank] for rank in ranks)) if ended else detail,
            ended=ended,
        )

    @abstractmethod
    def lost_elsewhere(self, ranks: Sequence[int], *, phase: str, waited: float) -> PeerLost:
        """Break the group, and return the error for ranks that did not arrive in a wait outside of the group's calls.

        Such a wait is one in shared memory, say. All waits of other ranks in this group end, and raise the same error.
        Ranks that wait in the group, or call this, are not lost. `ranks` may be empty, if this rank only knows that
        others have given up.
        """

    def look(self, *, waits: bool | None = None) -> None:  # noqa: B027 (most groups need not know)
        """Note that this rank is awake, and whether it waits for others from now on; left out, that stays as it is.

        A wait outside of the group's calls, such as one in shared memory, calls this when it begins and ends, and every
        0.1 s: it proves that this rank was there, or when it was stopped.
        """

    @abstractmethod
    def host(self) -> str:
        """The name of the host that this rank runs on: ranks with the same name can share memory."""

    def hosts(self) -> list[list[int]]:
        """The ranks of each host, hosts in the order of their first ranks. Collective over the group."""
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(self.gather_json(self.host(), phase="finding hosts")):
            by_host.setdefault(host, []).append(rank)
        return list(by_host.values())

    def on_this_host(self, *, name: str | None = None) -> Group:
        """The ranks that run on this rank's host, as a group: they can share memory. Collective over the group."""
        hosts = self.hosts()
        number = next(index for index, ranks in enumerate(hosts) if self.rank in ranks)
        return self.subgroup(hosts[number], name=name or f"{self.name}/host {number}")

    @in_own_process
    def subgroup(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        purpose: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> Self:
        """A group of some of these ranks. Collective over *those* ranks only; no other rank is waited for.

        All ranks make the subgroups of one `purpose` in the same order; those of another purpose may be made at the
        same time. While processes over gloo wait for each other in this call, `check` is called repeatedly, in another
        thread, and may raise.
        """
        members = self._check_members(ranks)
        # The n-th subgroup of these ranks that a rank asks for is the same on all of them: they need not wait.
        self._subgroups[members, purpose] = number = self._subgroups.get((members, purpose), 0) + 1
        name = name or f"{self.name}/{'-'.join(map(str, members))}"
        return self._subgroup(members, name, purpose, number, check)

    @abstractmethod
    def _subgroup(
        self, members: tuple[int, ...], name: str, purpose: str, number: int, check: Callable[[], None]
    ) -> Self:
        """The `number`-th group of these ranks for a purpose, counted from 1."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address with which a fresh rank joins this group, in place of a lost rank or behind all: see `rejoin`."""

    @in_own_process
    def readmit(self, lost: Sequence[int], *, seconds: float = READMISSION) -> Self:
        """A new group of the same size: the ranks that are left, and fresh ranks in place of the lost ones.

        Collective over the ranks that are left, and over the fresh ranks' `rejoin`. If these have not come after
        `seconds`, `PeerLost` names the missing ones, and nothing has changed.
        """
        return self._fill(check_lost(lost, self.rank, self.size), seconds, lambda: None)

    @in_own_process
    def admit(
        self, count: int, *, seconds: float = READMISSION, check: Callable[[], None] = lambda: None
    ) -> Self:
        """A new group of these ranks and `count` fresh ones behind them. Collective, with the fresh ranks' `rejoin`.

        The first fresh rank calls `rejoin(group.address, rank=group.size)`. If they have not come after `seconds`,
        `PeerLost` names the missing ones, and nothing has changed. Meanwhile `check` is called as in `subgroup`.
        """
        check_count(count, self.rank)
        return self._fill(range(self.size, self.size + count), seconds, check)

    @abstractmethod
    def _fill(self, empty: Sequence[int], seconds: float, check: Callable[[], None]) -> Self:
        """A new group of these ranks, with fresh ranks under the numbers in `empty`: lost ones, or further ones."""

    @abstractmethod
    def decide(self, question: str, answer: str) -> str:
        """Give an answer to a question, unless a rank has given one before; return the first answer, which is final.

        It is the same for all ranks, admitted ones included. The call waits for no other rank, and works after a loss:
        the answer is kept where the ranks of this group find each other, such as in the store of torch.distributed.
        """

    @abstractmethod
    def decided(self, question: str) -> str | None:
        """The first answer that a rank gave to a question (`decide`); None, if no rank gave one."""

    @abstractmethod
    def close(self) -> None:
        """Free what the group holds. Later calls raise."""

    def in_background(self, job: Callable[[], Result]) -> Pending[Result]:
        """Run a job that calls this group in a thread of its own; `wait` returns its result, or raises its error.

        Other calls of the group first wait for the end of the job, so that all ranks make their calls in one order.
        """
        running = Background(job, name=f"{self.name} in background")
        self._one_thread.lend(running.thread)
        running.thread.start()
        return running

    def await_background(self) -> None:
        """Wait until the last job that was started in the background, if any, has ended."""
        self._one_thread.await_helper()

    def barrier(self, *, phase: str = "barrier") -> None:
        """Return when every rank of the group has called this."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device), phase=phase)

    def gather_json(self, value: Any, *, phase: str = "gather_json") -> list[Any]:
        """Every rank's value, in rank order. Values travel as JSON: nothing is executed on arrival."""
        encoded = json.dumps(value, sort_keys=True, allow_nan=True).encode()
        size = torch.tensor([len(encoded)], dtype=torch.int64).view(torch.uint8)
        sizes = self.all_gather(size.to(self.device), phase=phase).cpu().view(torch.int64).flatten().tolist()
        for rank, announced in enumerate(sizes):  # all ranks see all sizes, and raise together
            if not 0 < announced <= LARGEST_JSON:
                raise self._unreadable(rank, phase, f"{announced} bytes", f"from 1 to {LARGEST_JSON} bytes")
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        gathered = self.all_gather(mine.to(self.device), phase=phase).cpu()
        values = []
        for rank, (row, length) in enumerate(zip(gathered, sizes, strict=True)):
            try:
                values.append(json.loads(row[:length].numpy().tobytes()))
            except (ValueError, RecursionError) as error:
                raise self._unreadable(
                    rank, phase, f"no JSON ({str(error)[:120]})", "a JSON value"
                ) from error
        return values

    def _unreadable(self, source: int, phase: str, found: str, expected: str) -> GroupError:
        return GroupError(
            f"rank {source} sent {found} in {phase}",
            expected=expected,
            fix=f"run the same version of tokenyard on rank {source}, in the same order of calls",
            rank=self.rank,
        )

    def agree(self, what: str, value: Any) -> None:
        """Compare a value across ranks. If it differs, every rank raises `Disagreement`, which holds all values."""
        by_rank = self.gather_json(value, phase=f"agreement on {what}")
        if any(other != by_rank[0] for other in by_rank):
            raise Disagreement(what, by_rank, rank=self.rank)

    def count_plan(self) -> int:
        """The number of the next plan of this group. Ranks compare it: plans must be made in one order on all ranks."""
        self._plans += 1
        return self._plans

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Inside the block, the deadline is at least `seconds`: for steps that are slow, such as loading weights."""
        deadline = self.deadline
        self.deadline = max(deadline, seconds)
        try:
            yield
        finally:
            self.deadline = deadline

    def wait_for_device(self) -> None:
        """Wait until the work on this rank's current CUDA stream is done. On the CPU, return at once."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def all_or_none(
        self,
        what: str,
        error: str | None,
        *,
        expected: str = "memory for the workspace",
        fix: str = _MEMORY_FIX,
    ) -> None:
        """Raise on every rank if one rank had an error: that error on the rank itself, `PeerFailed` on the others."""
        errors = self.gather_json(error, phase=what)
        if error is not None:
            raise GroupError(error, expected=expected, fix=fix, rank=self.rank)
        for rank, other in enumerate(errors):
            if other is not None:
                raise PeerFailed(rank, other, phase=what, rank=self.rank)

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of what holds a group is used by the same rank

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_pickled(f"group {self.name!r}", fix="make the group in each process", rank=self.rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.size})"

    def _check_members(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks of a subgroup that this rank asks for; raise unless it is one of them."""
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise InputError(
                f"rank {self.rank} asks for a subgroup of ranks {list(ranks)}",
                expected="distinct ranks that include the caller's own",
                fix="call subgroup only on the ranks that belong to it",
                rank=self.rank,
            )
        return tuple(ranks)

    def _check_bytes(self, tensor: Tensor, dims: int, rows: int | None = None) -> Tensor:
        """Raise unless `tensor` is contiguous bytes on the group's device, and this is the group's own process."""
        self.own_process.check()
        fits = tensor.dtype == torch.uint8 and tensor.dim() == dims and tensor.device.type == self.device.type
        if not fits or (rows is not None and tensor.shape[0] != rows):
            what = "a vector" if dims == 1 else f"a matrix of {rows} rows"
            raise InputError(
                f"a collective was given {describe(tensor)} on {tensor.device}",
                expected=f"{what} of uint8 on {self.device}",
                fix="send the bytes of a tensor: `.view(torch.uint8)`",
                rank=self.rank,
            )
        return tensor.contiguous()
