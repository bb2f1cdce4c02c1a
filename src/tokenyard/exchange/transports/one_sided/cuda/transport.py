"""`one_sided` on GPUs: the same protocol, with kernels in place of the CPU's copies.

No step needs the host to wait for the device, so a round trip can be captured in a CUDA graph and replayed: rounds are
counted on the device, and every batch size uses the same workspace. There are two modes:

- *Checked* (the default, outside of a capture): after a dispatch the host reads how many rows came from each rank, and
  after a combine whether all went well. Experts get the rows that came, and errors are raised in the call in which they
  happen, on every rank. If slots are few, and experts skip empty ones, experts get all slots, and the host reads both
  after the combine, so that it waits only once. In that case the kernel that waits for the other ranks in the combine
  also reports ids that no expert has to them.
- *Fixed shapes* (in a capture, or inside `fixed_shapes(…)`): the host reads nothing. Experts get every slot as a
  row, empty ones with ids of -1: `W · max_tokens` rows, where `max_tokens` can be set for a while, for small
  batches. Errors are written into a status, and raised by the next call, or by `synchronize`.

If the caller computes something meanwhile (`layer.start`, shared experts), rows and results travel on a stream of their
own; the caller's stream goes on, and waits for that one when it needs the rows or sums (`side_stream`).

If a rank fails, dies or drifts, every rank gets a status; kernels that find one do not wait, and write NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tokenyard.errors import HandleError, InputError, PeerFailed
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch import Arrival, Batch, Failure, UnencodedRows
from tokenyard.exchange.results import Results, ResultsAtHome, SumAhead
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Term
from tokenyard.exchange.transports.one_sided.cuda.control import ControlLayout, Trouble
from tokenyard.exchange.transports.one_sided.cuda.graphs import CapturedGraphs
from tokenyard.exchange.transports.one_sided.cuda.launch import Launcher
from tokenyard.exchange.transports.one_sided.cuda.operands import LAYER_BITS, DispatchSlots, Encoding
from tokenyard.exchange.transports.one_sided.cuda.results import (
    DeviceResults,
    WayBack,
    choice_places,
    slots_back,
)
from tokenyard.exchange.transports.one_sided.cuda.side_stream import Done, RankStreams
from tokenyard.exchange.transports.one_sided.cuda.workspace import DeviceWorkspace
from tokenyard.exchange.transports.one_sided.declarations import OneSided
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.formats.base import Format
from tokenyard.gpu_kernels import COMPILING, aligned, is_aligned
from tokenyard.group.base import Group, Pending
from tokenyard.routing import Routes
from tokenyard.rows import ReceivedRows

# The most slots of a workspace with which experts get every slot as a row (see *Checked*): with K = 8 and H = 7168,
# fused experts take 120 MB for this many.
FEW_SLOTS = 1024
# The most tensors that the kernel which sums over ranks can add.
MOST_TERMS = 2


class CudaTransport(OneSided[DeviceWorkspace, WayBack]):
    """`one_sided` between GPUs: kernels push rows into, and pull results out of, the workspaces of other ranks."""

    looks_up_ids = True  # kernels find the rank of each choice by its id, in their tables
    reads_values = False
    counts_choices = True
    limits_sms = True
    encodes_results = True
    waits_in_sum = True
    most_terms = MOST_TERMS

    @classmethod
    def encodes(cls, format: Format) -> bool:
        return Encoding.of(format) is not None

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        super().__init__(group, in_flight=in_flight, guard=guard)
        self._control = ControlLayout(group.size, in_flight)
        self._control_bytes = self._control.nbytes
        self._graphs = CapturedGraphs()
        self._limit: int | None = None  # tokens of a rank inside `fixed_shapes(max_tokens)`
        self._is_fixed = False
        self._streams = RankStreams(group.device)
        # By layer, region and most tokens of a rank: where rows are in the workspace.
        self._slots: dict[tuple[str, int, int], DispatchSlots] = {}
        # The phase in which this rank failed last, and the flag that reported it.
        self._failed = Phase.DISPATCH, 0

    @property
    def launcher(self) -> Launcher:
        """The launcher of this rank's kernels."""
        return self.workspace.launcher

    # -- The workspace -------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = self.layout_for(specs), max(spec.max_tokens for spec in specs)
        there = self._workspace
        if there is None:
            there = self._build(needed, tokens)
        elif not there.layout.suffices_for(needed) or there.launcher.max_tokens < tokens:
            self._check_graphs()
            there = self._build(there.layout.union(needed), max(tokens, there.launcher.max_tokens))
        there.reports.layers = [spec.layer for spec in specs]
        with there.launcher.on_device():
            for spec in specs:
                there.launcher.table(spec)
            self.group.wait_for_device()  # tables are there for every stream, and nothing reads the old ones

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = self.layout_for(specs), max(spec.max_tokens for spec in specs)
        if self.workspace.layout != needed:
            self._check_graphs()
            self._build(needed, tokens)
        self.workspace.reports.layers = [spec.layer for spec in specs]

    def _build(self, layout: WorkspaceLayout, max_tokens: int) -> DeviceWorkspace:
        self.group.wait_for_device()  # what still uses the old workspace ends first
        self._workspace = DeviceWorkspace(self.group, layout, self._control, max_tokens, self.sms)
        return self._workspace

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
        self.check_slots(specs)
        with self.group.patience(COMPILING):
            with self.launcher.on_device():
                for spec in specs:
                    self.launcher.launch_each_kernel(spec)
            self.group.wait_for_device()
            self.group.barrier(phase="loading kernels")

    def view_slots(self, spec: ExchangeSpec, region: int) -> None:
        slots = self._slots_of(spec, region)
        self.launcher.layer(slots)
        self.workspace.dispatch(slots, self.group.rank)

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
        if self._workspace is not None:
            self._wait_for_device()
        self._workspace = None

    def _wait_for_device(self) -> None:
        """Return when all that this rank has launched is done."""
        self._streams.synchronize()
        self.group.wait_for_device()

    # -- Dispatch ------------------------------------------------------------------------------------------

    def send(self, batch: Batch) -> Pending[Arrival]:
        is_captured = torch.cuda.is_current_stream_capturing()
        self._raise_trouble()
        workspace, slots = self.workspace, self._slots_of(batch.spec, batch.region)
        if batch.num_tokens > slots.max_tokens:
            raise InputError(
                f"{batch.num_tokens} tokens",
                expected=f"at most {slots.max_tokens}, as `fixed_shapes` sets it",
                fix="give fixed_shapes the largest number of tokens of any rank",
            )
        routes = batch.routes.routes
        assert isinstance(routes, Routes)  # `supports` refuses logits
        batch.announcements.all_met()
        if is_captured:
            self._graphs.note()
        is_checked = not (is_captured or self._is_fixed)
        with workspace.launcher.on_device():
            rows = aligned(batch.rows.x_TH) if isinstance(batch.rows, UnencodedRows) else batch.rows
            with self._streams.phase(ahead=batch.ahead) as done:
                slots_TW = workspace.launcher.dispatch(
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

    def run_overlapped(self, job: Callable[[], Term]) -> Term:
        with self.launcher.on_device():
            return self._streams.run_overlapped(job, marks_end=self.sms is not None)

    def _arrived(
        self, batch: Batch, slots: DispatchSlots, slots_TW: Tensor, done: Done, *, is_checked: bool
    ) -> Arrival:
        counts: tuple[int, ...] = ()
        sent: tuple[int, ...] = ()
        problem: InputError | None = None
        in_slots = is_checked and self._gives_slots(batch, slots)
        reads = is_checked and not in_slots
        workspace = self.workspace
        with workspace.launcher.on_device():
            if batch.ahead:
                done.join()
            if reads:
                done.wait()
                counts, sent = workspace.reports.read_counts(slots)
            received = workspace.received(slots, counts if reads else None)
        if reads:
            try:
                self._raise_trouble()  # bad ids of this rank: the others do not know of them yet
            except InputError as error:
                problem = error
        way_back = WayBack(
            slots=slots, slots_TW=slots_TW, sent=sent, is_checked=is_checked, in_slots=in_slots
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
        came, sent = self.workspace.reports.read_counts(arrival.way_back.slots)
        return sent, came

    def _slots_of(self, spec: ExchangeSpec, region: int) -> DispatchSlots:
        """The slots of a dispatch, with the limit of tokens that `fixed_shapes` sets; made once for each."""
        limit = spec.max_tokens if self._limit is None else min(self._limit, spec.max_tokens)
        key = (spec.layer, region, limit)
        known = self._slots.get(key)
        if known is None or known.spec is not spec:
            known = self._slots[key] = DispatchSlots(spec=spec, region=region, max_tokens=limit)
        return known

    def _start_reading_counts(self, slots: DispatchSlots, slots_TW: Tensor) -> None:
        self.workspace.reports.start_reading_counts(slots, slots_TW)

    def rows_sent(self, batch: Batch, arrival: Arrival) -> Sequence[int]:
        """Rows that went to each rank; zeros if only the device knows."""
        return arrival.way_back.sent or [0] * self.group.size

    # -- Combine -------------------------------------------------------------------------------------------

    def send_back(self, results: Results) -> Pending[ResultsAtHome]:
        arrival, ahead, launcher = results.arrival, results.sum_ahead, self.launcher
        with launcher.on_device():
            home = self._at_home(arrival, results)
            out_TH = None if ahead is None else self._home(arrival, ahead)
            with self._streams.phase(ahead=out_TH is not None) as home.done:
                if results.rows_RH is not None:
                    launcher.place(
                        slots_back(arrival),
                        results.rows_RH,
                        dense=arrival.way_back.is_checked and not arrival.way_back.in_slots,
                        places_N=choice_places(arrival.received) if arrival.spec.sums_choices else None,
                    )
                results.on_results_written()
                if ahead is not None and out_TH is not None:
                    home.start_sum(out_TH, ahead.add, ahead=True)
                    home.out_TH = out_TH
        return Pending(lambda: home)

    def _at_home(self, arrival: Arrival, results: Results | None = None) -> DeviceResults:
        return DeviceResults(
            group=self.group,
            workspace=self.workspace,
            streams=self._streams,
            arrival=arrival,
            results=results,
            just_placed=results is not None and results.rows_RH is not None,
        )

    def _home(self, arrival: Arrival, ahead: SumAhead) -> Tensor | None:
        """The tensor into which a sum that starts now is written; None if it must be copied into `out`."""
        if ahead.out_TH is None:
            shape = (arrival.batch_tokens, arrival.spec.hidden_size)
            return torch.empty(shape, dtype=arrival.spec.dtype, device=self.group.device)
        return ahead.out_TH if is_aligned(ahead.out_TH) else None

    # -- Inside a host -------------------------------------------------------------------------------------

    def mark(self, round: int) -> None:
        """Do nothing: in the sum, a kernel publishes that results are in place, behind those that wrote them."""

    def all_marked(self, round: int, seconds: float) -> bool:
        """Always False: only the sum waits for the other ranks, on the device, up to the deadline."""
        return False

    def at_home(self, arrival: Arrival) -> ResultsAtHome:
        return self._at_home(arrival)

    def leave(self) -> None:
        if self._workspace is not None:
            with self.launcher.on_device():
                self.workspace.reports.leave()

    def departed(self) -> bool:
        return self._workspace is not None and self._workspace.reports.departed()

    # -- Failures ------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        failure.announcements.all_met()
        self._streams.computed = None  # nothing reads it any more
        if torch.cuda.is_current_stream_capturing():
            return  # nothing runs yet: the others are capturing, too, and wait for no rank
        arrival = failure.arrival
        slots = self._slots_of(failure.spec, failure.region) if arrival is None else slots_back(arrival)
        phase = failure.announcements.mine.phase
        error = failure.announcements.mine.error
        workspace = self.workspace
        self._failed = phase, workspace.reports.publish_failure(phase, slots.layer, error)
        with workspace.launcher.on_device():
            workspace.launcher.signal_and_wait(slots.layer, phase, fails=1)
        self.group.wait_for_device()
        if workspace.launcher.host_status[0, 0] != Trouble.LOST:
            workspace.reports.forget()

    def all_failed(self) -> bool:
        """Whether every rank failed in the phase in which this one failed last."""
        return self.workspace.reports.all_published(*self._failed)

    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong in rounds that were not checked."""
        self._wait_for_device()
        self._raise_trouble()

    def _raise_trouble(self) -> None:
        """Raise what a kernel has reported so far, without waiting for kernels."""
        if self._workspace is not None:
            self._workspace.reports.raise_trouble()
