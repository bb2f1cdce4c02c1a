"""`one_sided` on GPUs: the same protocol, with kernels in place of the CPU's copies.

No step needs the host to wait for the device, so a round trip can be captured in a CUDA graph and replayed: rounds are
counted on the device, and every batch size uses the same workspace. There are two modes:

- *Checked* (the default, outside of a capture): after a dispatch the host reads how many rows came from each rank, and
  after a combine whether all went well. Experts get the rows that came, and errors are raised in the call in which they
  happen, on every rank. If slots are few, and experts skip empty ones, experts get all slots, and the host reads both
  after the combine, so that it waits only once. In that case the kernel that waits for the other ranks in the combine
  tells them of ids that no expert has.
- *Fixed shapes* (in a capture, or inside `fixed_shapes(…)`): the host reads nothing. Experts get every slot as a
  row, empty ones with ids of -1: `W · max_tokens` rows, where `max_tokens` can be set for a while, for small
  batches. Errors are written into a status, and raised by the next call, or by `synchronize`.

If the caller computes something meanwhile (`layer.start`, shared experts), rows and results travel on a stream of their
own; the caller's stream goes on, and waits for that one when it needs the rows or sums (`side_stream`).

If a rank fails, dies or drifts, every rank gets a status; kernels that find one do not wait, and write NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tokenyard.errors import ContractError, HandleError, InputError, PeerFailed, Reason
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch import Arrival, Batch, Failure, UnencodedRows
from tokenyard.exchange.results import Results, ResultsAtHome, SumAhead
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Term, Transport
from tokenyard.exchange.transports.one_sided import declarations
from tokenyard.exchange.transports.one_sided.cuda.control import DEPARTURE, VERDICT, ControlLayout, Trouble
from tokenyard.exchange.transports.one_sided.cuda.graphs import CapturedGraphs
from tokenyard.exchange.transports.one_sided.cuda.launch import Launcher
from tokenyard.exchange.transports.one_sided.cuda.operands import LAYER_BITS, DispatchSlots, Encoding
from tokenyard.exchange.transports.one_sided.cuda.reports import KernelReports
from tokenyard.exchange.transports.one_sided.cuda.results import (
    DeviceResults,
    WayBack,
    choice_places,
    slots_of,
)
from tokenyard.exchange.transports.one_sided.cuda.side_stream import Done, SideStream
from tokenyard.exchange.transports.one_sided.cuda.workspace import DeviceWorkspace
from tokenyard.exchange.workspace import LayerBytes, WorkspaceLayout
from tokenyard.formats.base import Format
from tokenyard.gpu_kernels import COMPILING, aligned, is_aligned
from tokenyard.group.base import Group, Pending
from tokenyard.routing import Routes
from tokenyard.rows import ReceivedRows

# The most slots of a workspace with which experts get every slot as a row (see *Checked*): with K = 8 and H = 7168,
# fused experts take 120 MB for so many.
FEW_SLOTS = 1024
# The most tensors that the kernel which sums over ranks can add.
MOST_TERMS = 2


class CudaTransport(Transport):
    """`one_sided` between GPUs: kernels push rows into, and pull results out of, the workspaces of other ranks."""

    name = "one_sided"
    looks_up_ids = True  # kernels find the rank of each choice by its id, in their tables
    reads_values = False
    counts_choices = True
    limits_sms = True
    encodes_results = True
    waits_in_sum = True
    most_terms = MOST_TERMS

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        return declarations.reaches(group, hosts)

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        return declarations.watches(group)

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        return declarations.slot_bytes(spec)

    @classmethod
    def encodes(cls, format: Format) -> bool:
        return Encoding.of(format) is not None

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        super().__init__(group, in_flight=in_flight, guard=guard)
        # Reports of the kernels on the present workspace; None if there is no workspace.
        self._reports: KernelReports | None = None
        self._control = ControlLayout(group.size, in_flight)
        self._graphs = CapturedGraphs()
        self._limit: int | None = None  # tokens of a rank inside `fixed_shapes(max_tokens)`
        self._is_fixed = False
        # Rows and results travel on the first stream; jobs that overlap with them (`run_overlapped`) run on the second.
        self._communication = SideStream(group.device, priority=-2, large_pieces=0)
        self._computation = SideStream(group.device, priority=-1, large_pieces=4)
        self._begun: Done | None = None  # the work of the caller's stream before rows were last sent
        self._computed: Done | None = None  # the last job beside a round trip, until a sum waits for it
        # The phase in which this rank failed last, and the flag that told of it.
        self._failed = Phase.DISPATCH, 0

    @property
    def reports(self) -> KernelReports:
        """The reader of what this rank's kernels report."""
        if self._reports is None:
            raise ContractError(
                "the exchange has no workspace", expected="a plan that is open", fix="make a new plan"
            )
        return self._reports

    @property
    def workspace(self) -> DeviceWorkspace:
        """The workspace of the layers that are served now."""
        return self.reports.workspace

    @property
    def launcher(self) -> Launcher:
        """The launcher of this rank's kernels."""
        return self.workspace.launcher

    # -- The workspace -------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = self._layout_for(specs), max(spec.max_tokens for spec in specs)
        there = None if self._reports is None else self._reports.workspace
        if there is None:
            self._build(needed, tokens)
        elif not there.layout.suffices_for(needed) or there.launcher.max_tokens < tokens:
            self._check_graphs()
            self._build(there.layout.union(needed), max(tokens, there.launcher.max_tokens))
        self.reports.layers = [spec.layer for spec in specs]
        with self.launcher.on_device():
            for spec in specs:
                self.launcher.table(spec)
            self.group.wait_for_device()  # tables are there for every stream, and nothing reads the old ones

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = self._layout_for(specs), max(spec.max_tokens for spec in specs)
        if self.workspace.layout != needed:
            self._check_graphs()
            self._build(needed, tokens)
        self.reports.layers = [spec.layer for spec in specs]

    def _layout_for(self, specs: Sequence[ExchangeSpec]) -> WorkspaceLayout:
        return declarations.layout_for(
            [self.region_bytes(spec) for spec in specs],
            control=self._control.nbytes,
            in_flight=self.in_flight,
        )

    def _build(self, layout: WorkspaceLayout, max_tokens: int) -> None:
        self.group.wait_for_device()  # what still uses the old workspace ends first
        workspace = DeviceWorkspace(self.group, layout, self._control, max_tokens, self.sms)
        self._reports = KernelReports(self.group, workspace)

    def record_launches(self, specs: Sequence[ExchangeSpec]) -> None:
        for spec in specs:
            self.launcher.launch_each_kernel(spec)

    def samples(self, spec: ExchangeSpec) -> Sequence[Callable[[int], ReceivedRows]]:
        slots = DispatchSlots(spec=spec, region=0, max_tokens=spec.max_tokens)
        return [partial(self.workspace.sample, slots, in_slots=in_slots) for in_slots in (False, True)]

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        """Launch every kernel once, before the first one that waits."""
        over = [spec.layer for spec in specs if spec.index >= 1 << LAYER_BITS]
        if over:
            raise InputError(
                f"layer {over[0]!r} is number {1 << LAYER_BITS}",
                expected=f"at most {1 << LAYER_BITS} layers in a plan on GPUs",
                fix="make several plans",
                layer=over[0],
            )
        for spec in specs:
            for region in range(self.in_flight):
                slots = DispatchSlots(spec=spec, region=region, max_tokens=spec.max_tokens)
                try:
                    self.workspace.dispatch(slots, self.group.rank)
                    self.workspace.combine(slots, self.group.rank)
                except ContractError as error:
                    error.at(layer=spec.layer, rank=self.group.rank)
                    raise
        with self.group.patience(COMPILING):
            with self.launcher.on_device():
                for spec in specs:
                    self.launcher.launch_each_kernel(spec)
            self.group.wait_for_device()
            self.group.barrier(phase="loading kernels")

    def _check_graphs(self) -> None:
        """Raise, on all ranks, if a captured graph still uses the workspace, which would be replaced."""
        alive = self.group.gather_json(self._graphs.alive(), phase="growing the workspace")
        if alive[self.group.rank]:
            raise HandleError(
                f"{alive[self.group.rank]} captured CUDA graphs use this workspace, and it would have to be rebuilt",
                expected="no live graph that was captured on it",
                fix="plan for the largest layers before capturing, or delete the graphs first",
                rank=self.group.rank,
            )
        for rank, count in enumerate(alive):
            if count:
                why = f"{count} captured CUDA graphs use its workspace"
                raise PeerFailed(rank, why, phase="growing the workspace", rank=self.group.rank)

    @contextmanager
    def fixed_shapes(self, max_tokens: int | None = None) -> Iterator[None]:
        """Read nothing from the device inside: experts get all slots as rows, at most `max_tokens` from each rank."""
        before = self._limit, self._is_fixed
        self._limit, self._is_fixed = max_tokens if max_tokens is not None else self._limit, True
        try:
            yield
        finally:
            self._limit, self._is_fixed = before

    def close(self) -> None:
        if self._reports is not None:
            self._wait_for_device()
        self._reports = None

    def _wait_for_device(self) -> None:
        """Return when all that this rank has launched is done."""
        self._communication.synchronize()
        self._computation.synchronize()
        self.group.wait_for_device()

    # -- The way out ---------------------------------------------------------------------------------------

    def send(self, batch: Batch) -> Pending[Arrival]:
        is_captured = torch.cuda.is_current_stream_capturing()
        self._raise_trouble()
        slots = self._slots(batch.spec, batch.region)
        if batch.num_tokens > slots.max_tokens:
            raise InputError(
                f"{batch.num_tokens} tokens",
                expected=f"at most {slots.max_tokens}, as `fixed_shapes` was told",
                fix="give fixed_shapes the largest number of tokens of any rank",
            )
        routes = batch.routes.routes
        assert isinstance(routes, Routes)  # `supports` refuses logits
        batch.announcements.all_met()
        if is_captured:
            self._graphs.note()
        is_checked = not (is_captured or self._is_fixed)
        with self.launcher.on_device():
            rows = aligned(batch.rows.x_TH) if isinstance(batch.rows, UnencodedRows) else batch.rows
            with self._phase_stream(batch.ahead) as done:
                slots_TW = self.launcher.dispatch(
                    slots,
                    rows,
                    routes.topk_ids_TK,
                    routes.topk_weights_TK,
                    batch.extra,
                    choice_counts=batch.choice_counts,
                )
                if is_checked:
                    self._start_reading_counts(slots, slots_TW)
                    done.mark()
        done.reads = rows
        return Pending(lambda: self._arrived(batch, slots, slots_TW, done, is_checked=is_checked))

    def _phase_stream(self, ahead: bool) -> AbstractContextManager[Done]:
        """A context that launches a phase: on a side stream if the caller computes meanwhile, else on its stream."""
        self._begun = None
        if not ahead:
            return nullcontext(Done())
        self._begun = Done()
        self._begun.mark()
        return self._communication.fork(self._begun)

    def run_overlapped(self, job: Callable[[], Term]) -> Term:
        with self.launcher.on_device(), self._computation.fork(self._begun) as self._computed:
            if self.sms is None:
                return job()
            self._computed.ended = torch.zeros(1, dtype=torch.int32, device=self.group.device)
            term = job()
            self._computed.ended.fill_(1)
            return term

    def _join_computed(self) -> None:
        """Make the current stream wait for the job that runs beside the round trip, because its result is read now."""
        if self._computed is not None:
            self._computed.join()
        self._computed = None

    def _arrived(
        self, batch: Batch, slots: DispatchSlots, slots_TW: Tensor, done: Done, *, is_checked: bool
    ) -> Arrival:
        counts: tuple[int, ...] = ()
        sent: tuple[int, ...] = ()
        problem: InputError | None = None
        in_slots = is_checked and self._gives_slots(batch, slots)
        reads = is_checked and not in_slots
        with self.launcher.on_device():
            if batch.ahead:
                done.join()
            if reads:
                done.wait()
                counts, sent = self.reports.read_counts(slots)
            received = self.workspace.received(slots, counts if reads else None)
        if reads:
            try:
                self._raise_trouble()  # bad ids of this rank: the others do not know of them yet
            except InputError as error:
                problem = error
        way_back = WayBack(
            slots_TW=slots_TW,
            max_tokens=slots.max_tokens,
            sent=sent,
            is_checked=is_checked,
            in_slots=in_slots,
        )
        return replace(batch.arrived(received, counts, way_back), problem=problem)

    def _gives_slots(self, batch: Batch, slots: DispatchSlots) -> bool:
        """Whether experts get all slots as rows, so that the host waits only after the combine.

        With several dispatches in flight, one that failed must be known before the combine of an earlier one.
        """
        fits = self.group.size * slots.max_tokens <= FEW_SLOTS and self.in_flight == 1
        return batch.takes_slots and fits and batch.spec.reduces_ranks and not batch.spec.sums_choices

    def counts_at_end(self, arrival: Arrival) -> tuple[Sequence[int], Sequence[int]] | None:
        if not arrival.way_back.in_slots:
            return None
        came, sent = self.reports.read_counts(slots_of(arrival))
        return sent, came

    def _slots(self, spec: ExchangeSpec, region: int) -> DispatchSlots:
        """The slots of a dispatch, with the limit of tokens that `fixed_shapes` sets."""
        limit = spec.max_tokens if self._limit is None else min(self._limit, spec.max_tokens)
        return DispatchSlots(spec=spec, region=region, max_tokens=limit)

    def _start_reading_counts(self, slots: DispatchSlots, slots_TW: Tensor) -> None:
        """Start to copy into the host's memory how many rows came from each rank, and went to each."""
        sent_W1 = (slots_TW >= 0).sum(dim=0, dtype=torch.int32).unsqueeze(1)
        read_W3 = torch.cat([self.workspace.counts(slots.region), sent_W1], dim=1)
        self.workspace.host_counts[slots.region].copy_(read_W3, non_blocking=True)

    def rows_sent(self, batch: Batch, arrival: Arrival) -> Sequence[int]:
        """Rows that went to each rank; zeros if only the device knows."""
        return arrival.way_back.sent or [0] * self.group.size

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        row = self.region_bytes(batch.spec).dispatch_row
        return [count * row for count in rows]

    # -- The way back --------------------------------------------------------------------------------------

    def send_back(self, results: Results) -> Pending[ResultsAtHome]:
        arrival, ahead = results.arrival, results.sum_ahead
        just_placed = results.rows_RH is not None
        with self.launcher.on_device():
            out_TH = None if ahead is None else self._home(arrival, ahead)
            with self._phase_stream(out_TH is not None) as done:
                if results.rows_RH is not None:
                    self.launcher.place(
                        slots_of(arrival),
                        results.rows_RH,
                        dense=arrival.way_back.is_checked and not arrival.way_back.in_slots,
                        places_N=choice_places(arrival.received) if arrival.spec.sums_choices else None,
                    )
                results.on_results_written()
                if ahead is not None and out_TH is not None:
                    self.sum(arrival, out_TH, ahead.add, just_placed=just_placed, ahead=True)
        return Pending(
            lambda: DeviceResults(
                transport=self,
                arrival=arrival,
                results=results,
                just_placed=just_placed,
                out_TH=out_TH,
                done=done,
            )
        )

    def _home(self, arrival: Arrival, ahead: SumAhead) -> Tensor | None:
        """The tensor into which a sum that starts now is written; None if it must be copied into `out`."""
        if ahead.out_TH is None:
            shape = (arrival.batch_tokens, arrival.spec.hidden_size)
            return torch.empty(shape, dtype=arrival.spec.dtype, device=self.group.device)
        return ahead.out_TH if is_aligned(ahead.out_TH) else None

    def sum(
        self,
        arrival: Arrival,
        out_TH: Tensor,
        add: Sequence[Tensor],
        *,
        just_placed: bool,
        ahead: bool = False,
    ) -> None:
        """Wait for the other ranks on the device, and write the sums of this rank's tokens into a contiguous tensor.

        `ahead`: the caller computes meanwhile, so only one block waits for the others and leaves multiprocessors free.
        """
        home_slots, owners_TK = arrival.way_back.slots_TW, None
        if arrival.spec.sums_choices:
            routes = arrival.routes.routes
            assert isinstance(routes, Routes)
            home_slots, owners_TK = self.launcher.choices_at_home(
                arrival.spec, home_slots, routes.topk_ids_TK
            )
        self.launcher.sum(
            slots_of(arrival),
            home_slots,
            out_TH,
            add,
            owners_TK=owners_TK,
            just_placed=just_placed,
            one_block_waits=ahead,
            before_adding=None if self._computed is None else self._join_computed,
            ended=None if self._computed is None else self._computed.ended,
            tells_bad_ids=arrival.way_back.in_slots,
        )

    def end(self, arrival: Arrival, done: Done | None = None) -> None:
        """End a round: if it is checked, wait for it (for `done`, on a side stream) and raise what went wrong in it."""
        if arrival.way_back.is_checked:
            (self.group.wait_for_device if done is None else done.wait)()
            if arrival.way_back.in_slots:
                self.reports.raise_bad_ids(arrival)
            self._raise_trouble()

    # -- Inside a host -------------------------------------------------------------------------------------

    def mark(self, round: int) -> None:
        """Do nothing: in the sum, a kernel tells the others that results are in place, behind those that wrote them."""

    def all_marked(self, round: int, seconds: float) -> bool:
        """Always False: only the sum waits for the other ranks, on the device, up to the deadline."""
        return False

    def at_home(self, arrival: Arrival) -> ResultsAtHome:
        return DeviceResults(transport=self, arrival=arrival)

    def leave(self) -> None:
        if self._reports is None:
            return
        with self.launcher.on_device():
            for buffer in self.workspace.buffers:  # the first verdict stands
                verdict = self.workspace.words(buffer)[VERDICT : VERDICT + 1]
                verdict += torch.where(verdict == 0, DEPARTURE | 1 << self.group.rank, 0)
            self.group.wait_for_device()

    def departed(self) -> bool:
        return self._reports is not None and self._reports.departed()

    # -- Failures ------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        failure.announcements.all_met()
        self._computed = None  # nobody reads it any more
        if torch.cuda.is_current_stream_capturing():
            return  # nothing runs yet: the others are capturing, too, and wait for nobody
        arrival = failure.arrival
        slots = self._slots(failure.spec, failure.region) if arrival is None else slots_of(arrival)
        phase = failure.announcements.mine.phase
        error = failure.announcements.mine.error
        self._failed = phase, self.reports.tell_failure(phase, slots.layer, error)
        with self.launcher.on_device():
            self.launcher.signal_and_wait(slots.layer, phase, fails=1)
        self.group.wait_for_device()
        if self.launcher.host_status[0, 0] != Trouble.LOST:
            self.reports.forget()

    def all_failed(self) -> bool:
        """Whether every rank failed in the phase in which this one failed last."""
        return self.reports.all_told(*self._failed)

    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong in rounds that were not checked."""
        self._wait_for_device()
        self._raise_trouble()

    def _raise_trouble(self) -> None:
        """Raise what a kernel has reported so far, without waiting for kernels."""
        if self._reports is not None:
            self._reports.raise_trouble()
