"""What a transport is: it moves the bytes of an exchange between the ranks of a group.

    send(batch)        → Pending   .wait() → Arrival         the rows that came to this rank
    send_back(results) → Pending   .wait() → ResultsAtHome   the results of this rank's tokens
    fail(failure)                                            take part in a phase only to say that this rank failed

An `Exchange` checks batches and results, keeps their order, announces failures and keeps statistics. A transport knows
bytes and ranks, not layers, experts or duties. It may be made of other transports, and it may wrap one.

- **Sending and waiting are separate calls.** `send` and `send_back` wait for no other rank: the caller may compute
  between them and `wait`. If they raise, they do so before anything has left this rank.
- **Announcements.** In each phase every rank sends its announcement to the others, and uses the rows that came only
  when it has the announcements of all ranks. `batch.announcements` makes them; its `heard` raises if a rank failed, or
  is in another layer, phase or round.
- **Order.** Rows arrive in the order of (source rank, token), each once for each rank.
- **Waits** are calls of the group, or end at its deadline. A wait that ends without an answer raises `PeerLost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from tokenyard.errors import HandleError, Reason
from tokenyard.exchange.announcement import ANNOUNCEMENT_BYTES, Announcement, Announcements
from tokenyard.exchange.batch import Arrival, Batch, BatchRoutes, Failure, WayBack, received_rows
from tokenyard.exchange.results import Results, ResultsAtHome
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.workspace import LayerBytes
from tokenyard.formats.base import Format
from tokenyard.group.base import Group, Pending
from tokenyard.rows import ReceivedRows

Term = TypeVar("Term")  # what the sum of a combine adds: a tensor of the caller's


class Transport(ABC, Generic[WayBack]):
    """Moves rows for all layers of a plan, and declares which layers, groups and devices it can serve."""

    name: ClassVar[str]  # the name in `EXCHANGES`, or one of your own
    # The kinds of devices whose rows it moves.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    # The most ranks of a group that it serves; None: any number.
    most_ranks: ClassVar[int | None] = None
    # Whether router logits can travel in place of routes: every token must go to every rank then.
    carries_logits: ClassVar[bool] = False
    # Whether the host reads values, and waits for them: the ids of a batch, and how many rows came.
    reads_values: ClassVar[bool] = True
    # Whether the transport counts the choices of a batch (in `batch.choice_counts`), as the host does not read ids.
    counts_choices: ClassVar[bool] = False
    # Whether the transport encodes results in the combine wire; else the exchange does so before.
    encodes_results: ClassVar[bool] = False
    # Whether the sum over ranks itself waits for other ranks.
    waits_in_sum: ClassVar[bool] = False
    # Whether `wait` also does work, which a background thread can do while the caller computes (`Group.in_background`).
    works_ahead: ClassVar[bool] = False
    # Whether results are summed inside each host before they leave it: a layer's spec then says which ranks share one.
    sums_in_hosts: ClassVar[bool] = False
    # Whether each choice's result can come home by itself (`LayerSpec(sum="choices")`).
    returns_choices: ClassVar[bool] = True
    # The kinds of devices whose gradients it moves (`plan(training=True)`), with payloads beside the results: those of
    # `spec.combine_layout`. A transport that encodes results finds the payloads in `results.beside`.
    carries_gradients: ClassVar[tuple[str, ...]] = ("cpu",)
    # Whether the rows that a rank receives in one pass can have a bound (`plan(max_rows=…)`).
    bounds_rows: ClassVar[bool] = False
    # Whether the number of multiprocessors (SMs) that its kernels use can have a bound (`plan(sms=…)`).
    limits_sms: ClassVar[bool] = False
    # That bound, for the kernels of one rank; None: they may use all.
    sms: int | None = None
    # The most tensors that a combine can add to its sums (`add`); None: any number.
    most_terms: ClassVar[int | None] = None

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> Reason | None:
        """None, or why this transport cannot carry a layer."""
        if cls.most_ranks is not None and spec.placement.world > cls.most_ranks:
            why = f"{cls.name} serves at most {cls.most_ranks} rank, and the experts are on {spec.placement.world}"
            return Reason(field="exchange", value=cls.name, why=why)
        if spec.carries_logits and not cls.carries_logits:
            why = f"{cls.name} sends a row only where its experts are, so routes must be known before"
            return Reason(field="experts", value="experts that route by themselves", why=why)
        if spec.sums_choices and not cls.returns_choices:
            why = f"{cls.name} ({cls.__name__}) sums results before they come home"
            return Reason(field="sum", value="choices", why=why)
        if spec.max_rows is not None and not cls.bounds_rows:
            why = f"{cls.name} ({cls.__name__}) sends rows before it has heard how many come: leave max_rows out"
            return Reason(field="max_rows", value=spec.max_rows, why=why)
        if spec.of_gradients and not cls.carries_gradients:
            why = f"{cls.name} sums results before they come home, and cannot place gradients beside them"
            return Reason(field="exchange", value=cls.name, why=why)
        return spec.wire.carries(spec.dtype) or spec.combine_wire.returns(spec.dtype)

    @classmethod
    def trains_on(cls, device: torch.device) -> Reason | None:
        """None, or why this transport cannot move the gradients of rows on this device."""
        if device.type in cls.carries_gradients:
            return None
        where = " and ".join(cls.carries_gradients) or "no device"
        why = f"{cls.name} carries gradients on {where}, and rows are on {device.type}"
        return Reason(field="exchange", value=cls.name, why=why)

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        """None, or why this transport cannot serve the ranks of a group, which run on these hosts."""
        return cls.runs_on(group.device)

    @classmethod
    def runs_on(cls, device: torch.device) -> Reason | None:
        """None, or why this transport cannot move rows that are on this device."""
        if device.type in cls.devices:
            return None
        why = f"{cls.name} serves rows on {' and '.join(cls.devices)}, and rows are on {device}"
        return Reason(field="exchange", value=cls.name, why=why)

    @classmethod
    def why_not_auto(cls, hosts: Sequence[str]) -> Reason | None:
        """None, or why `auto` passes this transport over for ranks on these hosts, though it reaches them."""
        return None

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        """None, or why this transport cannot be watched on this group (`plan(paranoid=True)`)."""
        return None

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        """The memory that a round trip of a layer takes on one rank, at most."""
        return spec.nbytes

    @classmethod
    def for_device(cls, device: torch.device) -> type[Transport]:
        """The class that does the work where rows are on this kind of device."""
        return cls

    @classmethod
    def encodes(cls, format: Format) -> bool:
        """Whether this transport itself encodes rows in a format, given `UnencodedRows`."""
        return False

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        self.group = group  # the ranks that exchange
        self.in_flight = in_flight  # dispatches that may be in flight
        # Unused bytes around each region of shared memory: a paranoid plan checks that nothing writes into them.
        self.guard = guard

    # -- What is carried -----------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on: make room for the largest of them. Collective."""

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on, and give back memory that they do not need. Collective."""
        self.serve(specs)

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        """Prepare what the first round trips of these layers would otherwise wait for, such as kernels. Collective."""

    def record_launches(self, specs: Sequence[ExchangeSpec]) -> None:
        """Launch every kernel that round trips of these layers can launch, so that `gpu_kernels` records it."""

    def samples(self, spec: ExchangeSpec) -> Sequence[Callable[[int], ReceivedRows]]:
        """For each form in which rows of a layer arrive: a function that makes so many of them on the meta device."""

        def sample(num_rows: int) -> ReceivedRows:
            packets = torch.empty(num_rows, spec.dispatch_layout.stride, dtype=torch.uint8, device="meta")
            return received_rows(spec, packets, [num_rows, *[0] * (self.group.size - 1)])

        return [sample]

    def synchronize(self) -> None:
        """Wait for calls that returned before their work was done; raise their errors. By default there are none."""

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """A context in which the shape of an arrival does not depend on the routes, as a CUDA graph needs it."""
        raise HandleError(
            f"{self.name} on {self.group.device.type} was asked for fixed shapes",
            expected="one_sided on GPUs",
            fix="leave fixed_shapes out: here every call reads how many rows came",
            rank=self.group.rank,
        )

    def close(self) -> None:
        """Give back the memory that this transport holds or shares."""

    # -- What is announced ---------------------------------------------------------------------------------

    def num_counts(self, spec: ExchangeSpec) -> int:
        """The number of counts in a rank's announcement of a batch: the length of `counts`."""
        return self.group.size

    def counts(self, routes: BatchRoutes) -> list[int]:
        """The counts that a rank announces of a batch: rows for each rank, then further ones of a transport's own."""
        return routes.counts

    def loads(self, source: int, counts: Sequence[int]) -> Sequence[int]:
        """The rows that rank `source`, which announces these counts, adds to each place that `max_rows` bounds."""
        return counts

    # -- What moves ----------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, batch: Batch) -> Pending[Arrival[WayBack]]:
        """Send each row of a checked batch to every rank that owns one of its experts."""

    @abstractmethod
    def send_back(self, results: Results[WayBack]) -> Pending[ResultsAtHome]:
        """Return checked results to their source ranks."""

    def run_overlapped(self, job: Callable[[], Term]) -> Term:
        """Run a job that needs no received rows at the same time as the round trip that was started last.

        Its result is a term of that round trip's sum, and nothing reads it before. By default the job runs at once.
        """
        return job()

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Take part in a phase only to say that this rank failed, and wait until all ranks have met in it."""

    @abstractmethod
    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        """Bytes that this rank puts on the wire for each rank, its own included, in a dispatch of so many rows."""

    def rows_sent(self, batch: Batch, arrival: Arrival) -> Sequence[int]:
        """Rows that went to each rank in a dispatch."""
        return batch.routes.counts

    def counts_at_end(self, arrival: Arrival) -> tuple[Sequence[int], Sequence[int]] | None:
        """Rows sent to and received from each rank, if the host knows them only after the combine; else None."""
        return None

    def bytes_returned(self, arrival: Arrival) -> list[int]:
        """Bytes of results that this rank puts on the wire for each rank, its own included, in a combine."""
        row = self.region_bytes(arrival.spec).combine_row
        return [count * row for count in arrival.results_due]

    def in_workspace(self, arrival: Arrival[WayBack]) -> Arrival:
        """An arrival as the memory that ranks share holds it."""
        return arrival

    def lost(self) -> list[int]:
        """The ranks that this transport itself has found to be lost; empty, if it leaves that to the group."""
        return []

    # -- What most transports need -------------------------------------------------------------------------

    def announce(self, announcements: Announcements) -> Pending[Sequence[Announcement]]:
        """Send this rank's announcement to all ranks, by an all-gather of the group; `wait` returns those of all."""
        size = ANNOUNCEMENT_BYTES + 8 * announcements.announcer.num_counts(announcements.spec)
        mine = bytes_tensor(announcements.for_all().encode(size)).to(self.group.device)
        gathered = self.group.start_all_gather(mine, phase=announcements.mine.phase.value)

        def hear() -> Sequence[Announcement]:
            answers = enumerate(gathered.wait())
            return announcements.heard(
                [Announcement.decode(tensor_bytes(part), rank) for rank, part in answers]
            )

        return Pending(hear)


def bytes_tensor(encoded: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor, on any device."""
    return tensor.cpu().contiguous().numpy().tobytes()
