"""`one_sided` on GPUs: the same protocol, with kernels in place of the CPU's copies.

Nothing on the way waits for the device, so a round trip can be captured in a CUDA graph and replayed: rounds are
counted on the device, and every batch size uses the same workspace. What differs between two ways of calling it:

- *Checked* (the default, outside of a capture): after a dispatch the host reads how many rows came from whom, and
  after a combine whether all went well. Experts get the rows that came, and errors are raised where they happen, on
  every rank. Where slots are few, and experts pass over empty ones, they get all slots, and the host reads both after
  the combine: it waits once. Ids that no expert has are told to the others by the kernel that meets them there.
- *Fixed shapes* (in a capture, or inside `fixed_shapes(…)`): the host reads nothing. Experts get every slot as a
  row, empty ones with ids of -1: `W · max_tokens` rows, where `max_tokens` can be set for a while, for small
  batches. What goes wrong is written into a status, and raised by the next call, or by `synchronize`.

Where something is computed meanwhile (`layer.start`, shared experts), rows and results travel on a stream of their own;
the caller's goes on beside it, and waits for it where what came is needed (`side_stream`).

A rank that fails, dies or drifts leaves a status on every rank; kernels that find one do not wait, and write NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenyard.errors import (
    ContractError,
    Drifted,
    HandleError,
    InputError,
    PeerFailed,
    Reason,
)
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.batch import (
    Arrival,
    Batch,
    Failure,
    Results,
    ResultsAtHome,
    SumAhead,
    UnencodedRows,
)
from tokenyard.exchange.one_sided import declarations
from tokenyard.exchange.one_sided.control import (
    COMPILING,
    DEPARTURE,
    ROUND,
    STATUS,
    VERDICT,
    WORD,
    ControlLayout,
    Trouble,
)
from tokenyard.exchange.one_sided.graphs import CapturedGraphs
from tokenyard.exchange.one_sided.launch import Launcher
from tokenyard.exchange.one_sided.operands import LAYER_BITS, DispatchSlots, Encoding, aligned
from tokenyard.exchange.one_sided.side_stream import Done, SideStream
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Term, Transport
from tokenyard.exchange.workspace import LayerBytes, WorkspaceLayout
from tokenyard.formats.base import EncodedRows, Format
from tokenyard.group.base import Group, Pending
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows

# Slots up to which experts get all of them: with K = 8 and H = 7168, fused experts take 120 MB for so many.
FEW_SLOTS = 1024
# Tensors that a combine adds in the pass that sums over ranks.
MOST_TERMS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class WayBack:
    """What is remembered of a dispatch for its results."""

    slots_TW: Tensor  # the slot of each token on each rank, -1 where it did not go
    max_tokens: int  # of any rank, in this dispatch: windows are so many slots apart
    sent: tuple[int, ...]  # rows for each rank, where the host has read them
    is_checked: bool  # whether the host reads how many rows came, and whether all went well
    in_slots: bool = False  # whether it does so after the combine: a row is a slot until then


class DeviceWorkspace:
    """One symmetric buffer per rank in device memory, and the launcher that works on it."""

    def __init__(
        self,
        group: Group,
        layout: WorkspaceLayout,
        control: ControlLayout,
        max_tokens: int,
        sms: int | None,
    ) -> None:
        self.layout, self.control, self.nbytes = layout, control, layout.nbytes
        self.buffers = group.share_memory(layout.nbytes)
        self.launcher = Launcher(
            self.buffers, layout, control, group.rank, group.deadline, max_tokens, sms=sms
        )
        # In the host's memory, by region and rank: rows that came, the rank's `max_tokens`, and rows that went there.
        self.host_counts = torch.zeros(
            control.in_flight, group.size, 3, dtype=torch.int32, pin_memory=group.device.type == "cuda"
        )
        self._mine = self.buffers[group.rank]
        self.status = self._mine[STATUS * WORD : STATUS * WORD + self.launcher.host_status[0].nbytes]

    def dispatch(self, slots: DispatchSlots, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots that a rank receives into."""
        region = self.layout.dispatch_region(slots.region)
        return self._first(slots, slots.spec.dispatch_slots.views(region.of(self.buffers[rank])))

    def combine(self, slots: DispatchSlots, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots that a rank's results are read from."""
        region = self.layout.combine_region(slots.region)
        views = slots.spec.combine_slots.views(region.of(self.buffers[rank]))
        return self._first(slots, views, slots.spec.results_per_row)

    def _first(self, slots: DispatchSlots, views: dict[str, Tensor], per_slot: int = 1) -> dict[str, Tensor]:
        used = len(self.buffers) * slots.max_tokens * per_slot
        return {name: payload[:used] for name, payload in views.items()}

    def counts(self, region: int) -> Tensor:
        """What the ranks told this one in a dispatch: rows that come, and their `max_tokens`, `[W, 2]`."""
        start = self.control.counts(region)
        return self._mine[start : self.control.counts(region + 1)].view(torch.int32).view(-1, 2)

    def words(self, buffer: Tensor | None = None) -> Tensor:
        """The words of this rank's control region, or of that in another rank's buffer."""
        return self.layout.control_region().of(self._mine if buffer is None else buffer).view(torch.int64)

    def text(self, rank: int, phase: Phase) -> Tensor:
        """The bytes of why a rank failed in a phase."""
        return self.control.text(list(Phase).index(phase)).of(self.buffers[rank])

    def read_text(self, rank: int, phase: Phase) -> str:
        """Why a rank failed in a phase."""
        return bytes(self.text(rank, phase).cpu().tolist()).rstrip(b"\0").decode(errors="replace")


class CudaTransport(Transport):
    """`one_sided` between GPUs: push out, pull back, by kernels."""

    name = "one_sided"
    looks_up_ids = True  # by kernels, in their tables
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
        self._workspace: DeviceWorkspace | None = None
        self._control = ControlLayout(group.size, in_flight)
        self._graphs = CapturedGraphs()
        self._layers: list[str] = []
        self._limit: int | None = None  # of tokens on a rank, for a while
        self._is_fixed = False
        # Rows travel on the first one, and what is computed beside a whole round trip runs on the second one.
        self._communication = SideStream(group.device, priority=-2, large_pieces=0)
        self._computation = SideStream(group.device, priority=-1, large_pieces=4)
        self._begun: Done | None = None  # what the caller's stream had been given before rows were sent last
        self._computed: Done | None = None  # the last job beside a round trip, until a sum waits for it
        self._failed_flag, self._failed_phase = (
            0,
            Phase.DISPATCH,
        )  # of the phase in which this rank failed last

    @property
    def workspace(self) -> DeviceWorkspace:
        """The workspace of the layers that are served now."""
        if self._workspace is None:
            raise ContractError(
                "the exchange has no workspace", expected="a plan that is open", fix="make a new plan"
            )
        return self._workspace

    @property
    def launcher(self) -> Launcher:
        """What launches this rank's kernels."""
        return self.workspace.launcher

    # -- The workspace -------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = self._layout_for(specs), max(spec.max_tokens for spec in specs)
        there = self._workspace
        if there is None:
            self._build(needed, tokens)
        elif not there.layout.suffices_for(needed) or there.launcher.max_tokens < tokens:
            self._check_graphs()
            self._build(there.layout.union(needed), max(tokens, there.launcher.max_tokens))
        self._layers = [spec.layer for spec in specs]
        with self.launcher.on_device():
            for spec in specs:
                self.launcher.table(spec)
            self.group.wait_for_device()  # tables are there for every stream, and nothing reads the old ones

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = self._layout_for(specs), max(spec.max_tokens for spec in specs)
        if self.workspace.layout != needed:
            self._check_graphs()
            self._build(needed, tokens)
        self._layers = [spec.layer for spec in specs]

    def _layout_for(self, specs: Sequence[ExchangeSpec]) -> WorkspaceLayout:
        return declarations.layout_for(
            [self.region_bytes(spec) for spec in specs],
            control=self._control.nbytes,
            in_flight=self.in_flight,
        )

    def _build(self, layout: WorkspaceLayout, max_tokens: int) -> None:
        self.group.wait_for_device()  # what still uses the old workspace ends first
        self._workspace = DeviceWorkspace(self.group, layout, self._control, max_tokens, self.sms)

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        """Load every kernel on every rank, before the first one that waits."""
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
            for turn in range(2):  # one rank compiles, the others find what it has compiled
                if turn == min(self.group.rank, 1):
                    with self.launcher.on_device():
                        for spec in specs:
                            self.launcher.rehearse(spec)
                    self.group.wait_for_device()
                self.group.barrier(phase="loading kernels")

    def _check_graphs(self) -> None:
        """Raise, on all ranks, where a captured graph would go on using a workspace that is given up."""
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
            with self._way(batch.ahead) as done:
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

    def _way(self, ahead: bool) -> AbstractContextManager[Done]:
        """Where a phase is launched: beside the caller's stream, if something is computed meanwhile, or on it."""
        self._begun = None
        if not ahead:
            return nullcontext(Done())
        self._begun = Done()
        self._begun.mark()
        return self._communication.fork(self._begun)

    def beside(self, job: Callable[[], Term]) -> Term:
        with self.launcher.on_device(), self._computation.fork(self._begun) as self._computed:
            if self.sms is None:
                return job()
            self._computed.ended = torch.zeros(1, dtype=torch.int32, device=self.group.device)
            term = job()
            self._computed.ended.fill_(1)
            return term

    def _join_computed(self) -> None:
        """Let the current stream go on behind what was computed beside the round trip: it is read now."""
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
                counts, sent = self._read_counts(slots)
            received = self._received(slots, counts if reads else None)
        if reads:
            try:
                self._raise_trouble()  # of this rank's own ids: the others have gone on
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
        """Whether experts get all slots as rows, and the host waits for the combine alone.

        With several dispatches in flight, one that failed must be known before the combine of an earlier one.
        """
        fits = self.group.size * slots.max_tokens <= FEW_SLOTS and self.in_flight == 1
        return batch.takes_slots and fits and batch.spec.reduces_ranks and not batch.spec.sums_choices

    def counts_at_end(self, arrival: Arrival) -> tuple[Sequence[int], Sequence[int]] | None:
        if not arrival.way_back.in_slots:
            return None
        came, sent = self._read_counts(slots_of(arrival))
        return sent, came

    def _slots(self, spec: ExchangeSpec, region: int) -> DispatchSlots:
        """Where rows of a dispatch go, with the limit that is set for a while."""
        limit = spec.max_tokens if self._limit is None else min(self._limit, spec.max_tokens)
        return DispatchSlots(spec=spec, region=region, max_tokens=limit)

    def _start_reading_counts(self, slots: DispatchSlots, slots_TW: Tensor) -> None:
        """Copy how many rows came from whom, and went to whom, into the host's memory."""
        sent_W1 = (slots_TW >= 0).sum(dim=0, dtype=torch.int32).unsqueeze(1)
        read_W3 = torch.cat([self.workspace.counts(slots.region), sent_W1], dim=1)
        self.workspace.host_counts[slots.region].copy_(read_W3, non_blocking=True)

    def _read_counts(self, slots: DispatchSlots) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many rows came from whom, and went to whom, as was copied last."""
        self._raise_trouble(Trouble.FAILED)
        came, limits, sent = self.workspace.host_counts[slots.region].t().tolist()
        if set(limits) != {slots.max_tokens}:
            by_rank = ", ".join(f"rank {rank} has {limit}" for rank, limit in enumerate(limits))
            raise Drifted(
                f"the ranks dispatch for different numbers of tokens: {by_rank}",
                expected="one max_tokens on every rank",
                fix="give fixed_shapes the same number on all ranks",
                rank=self.group.rank,
            )
        return tuple(came), tuple(sent)

    def _received(self, slots: DispatchSlots, counts: tuple[int, ...] | None) -> ReceivedRows:
        """What came, as views of the workspace: the rows that are there, or all slots."""
        spec, views = slots.spec, self.workspace.dispatch(slots, self.group.rank)
        names = [payload.name for payload in spec.wire.payloads(spec.hidden_size)]
        rows = EncodedRows(
            format=spec.wire,
            hidden_size=spec.hidden_size,
            payloads={name: views[name] for name in names},
        )
        extra = {payload.name: views[payload.name] for payload in spec.extra}
        if counts is None:
            return ReceivedRows(
                rows=rows,
                routes=LocalRoutes(ids_RK=views["ids"], weights_RK=views["weights"]),
                counts_W=(slots.max_tokens,) * self.group.size,
                extra=extra,
                may_be_empty=True,
                results=self.results_at(slots, None),
            )
        places = [torch.arange(n) + source * slots.max_tokens for source, n in enumerate(counts)]
        # From pageable memory: it is read before this returns, and the host waits for nothing that runs on the device.
        slots_R = torch.cat(places).to(self.group.device, non_blocking=True)
        return ReceivedRows(
            rows=rows,
            routes=LocalRoutes(ids_RK=views["ids"][slots_R], weights_RK=views["weights"][slots_R]),
            counts_W=counts,
            extra={name: payload[slots_R] for name, payload in extra.items()},
            slots_R=slots_R,
            results=self.results_at(slots, slots_R),
        )

    def results_at(self, slots: DispatchSlots, slots_R: Tensor | None) -> CombineBuffer | None:
        """Where results are read; None where they are encoded on the way there."""
        if slots.spec.combine_wire.quantized or slots.spec.sums_choices:
            return None
        (rows_SH,) = self.workspace.combine(slots, self.group.rank).values()
        return CombineBuffer(rows_SH=rows_SH, slots_R=slots_R)

    def rows_sent(self, batch: Batch, arrival: Arrival) -> Sequence[int]:
        """Rows that went to each rank; none are counted where only the device knows."""
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
            with self._way(out_TH is not None) as done:
                if results.rows_RH is not None:
                    self.launcher.place(
                        slots_of(arrival),
                        results.rows_RH,
                        dense=arrival.way_back.is_checked and not arrival.way_back.in_slots,
                        places_N=_choice_places(arrival.received) if arrival.spec.sums_choices else None,
                    )
                results.before_telling()
                if ahead is not None and out_TH is not None:
                    self.sum(arrival, out_TH, ahead.add, just_placed=just_placed, ahead=True)
        return Pending(
            lambda: _DeviceResults(
                transport=self,
                arrival=arrival,
                results=results,
                just_placed=just_placed,
                out_TH=out_TH,
                done=done,
            )
        )

    def _home(self, arrival: Arrival, ahead: SumAhead) -> Tensor | None:
        """What a sum can be written into while something else is computed."""
        if ahead.out_TH is None:
            shape = (arrival.batch_tokens, arrival.spec.hidden_size)
            return torch.empty(shape, dtype=arrival.spec.dtype, device=self.group.device)
        return ahead.out_TH if ahead.out_TH.is_contiguous() else None

    def sum(
        self,
        arrival: Arrival,
        out_TH: Tensor,
        add: Sequence[Tensor],
        *,
        just_placed: bool,
        ahead: bool = False,
    ) -> None:
        """Meet the others, and write the sums of this rank's tokens into a contiguous tensor, on the current stream.

        `ahead`: something is computed meanwhile, so one block alone waits for the others.
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
        """The end of a checked round: whatever went wrong in it is raised here. `done` is its end on a side stream."""
        if arrival.way_back.is_checked:
            (self.group.wait_for_device if done is None else done.wait)()
            if arrival.way_back.in_slots:
                self._raise_bad_ids(arrival)
            self._raise_trouble()

    def _raise_bad_ids(self, arrival: Arrival) -> None:
        """Raise if this rank has told the others in the combine that its ids were bad."""
        kind, _, ranks, _ = self.launcher.host_status[0].tolist()
        if kind != Trouble.FAILED or not ranks >> self.group.rank & 1:
            return
        self._forget_trouble()
        routes = arrival.routes.routes
        assert isinstance(routes, Routes)
        ids_TK, most = routes.topk_ids_TK.cpu(), arrival.spec.num_experts
        token, choice = ((ids_TK < -1) | (ids_TK >= most)).nonzero()[0].tolist()
        raise self._bad_id(int(ids_TK[token, choice]), f"token {token}")

    def _bad_id(self, found: int, where: str) -> InputError:
        return InputError(
            f"topk_ids_TK holds id {found} ({where})",
            expected="ids of the layer's experts, or -1 for nobody",
            fix="pass global expert ids of this layer, and -1 for padding",
            rank=self.group.rank,
        )

    # -- Inside a host -------------------------------------------------------------------------------------

    def mark(self, round: int) -> None:
        """Nothing: kernels tell of results in the sum, behind what has written them."""

    def all_marked(self, round: int, seconds: float) -> bool:
        """Whether all have is known in the sum alone, which waits for them: on the device, up to the deadline."""
        return False

    def at_home(self, arrival: Arrival) -> ResultsAtHome:
        return _DeviceResults(transport=self, arrival=arrival)

    def leave(self) -> None:
        if self._workspace is None:
            return
        with self.launcher.on_device():
            for buffer in self.workspace.buffers:  # the first verdict stands
                verdict = self.workspace.words(buffer)[VERDICT : VERDICT + 1]
                verdict += torch.where(verdict == 0, DEPARTURE | 1 << self.group.rank, 0)
            self.group.wait_for_device()

    def departed(self) -> bool:
        if self._workspace is None:
            return False
        kind, _, ranks, _ = self.launcher.host_status[0].tolist()
        return bool(kind == Trouble.LOST and ranks & DEPARTURE)

    # -- Failures ------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        failure.announcements.all_met()
        self._computed = None  # nobody reads it any more
        if torch.cuda.is_current_stream_capturing():
            return  # nothing runs yet: the others are capturing, too, and wait for nobody
        arrival = failure.arrival
        slots = self._slots(failure.spec, failure.region) if arrival is None else slots_of(arrival)
        phase = failure.announcements.mine.phase
        number = list(Phase).index(phase)
        round = int(self.workspace.words()[ROUND + number]) + 1  # as the device counts
        self._failed_flag, self._failed_phase = round << 24 | slots.layer << 2 | number | 2, phase
        # The text of an older failure may still stand there: this one says of which round it is.
        told = self.workspace.text(self.group.rank, phase)
        room = told.numel()
        text = (_stamp(phase, round) + failure.announcements.mine.error).encode()[:room].ljust(room, b"\0")
        told.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        with self.launcher.on_device():
            self.launcher.signal_and_wait(slots.layer, phase, fails=1)
        self.group.wait_for_device()
        if self.launcher.host_status[0, 0] != Trouble.LOST:
            self._forget_trouble()

    def all_failed(self) -> bool:
        """Whether every rank came to the phase in which this one failed last only to say that it failed, too."""
        number, round = list(Phase).index(self._failed_phase), self._failed_flag >> 24
        flags = self.workspace.words()[self.workspace.control.flags(number, round)]
        return bool((flags == self._failed_flag).all())

    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong in rounds that were not checked."""
        self._wait_for_device()
        self._raise_trouble()

    def _raise_trouble(self, least: Trouble = Trouble.BAD_IDS) -> None:
        """Raise what a kernel has reported, without waiting for it to do so."""
        if self._workspace is None:
            return
        kind, flag, ranks, waited = self.launcher.host_status[0].tolist()
        if kind < least:
            return
        phase = list(Phase)[flag & 1]
        layer = self._layers[flag >> 2 & (1 << LAYER_BITS) - 1] if kind != Trouble.BAD_IDS else None
        who = [rank for rank in range(self.group.size) if ranks >> rank & 1]
        if kind == Trouble.LOST:
            raise self.group.lost(who, phase=phase.value, waited=waited / 1e9, layer=layer)
        if kind == Trouble.BAD_IDS:
            self._forget_trouble()
            raise self._bad_id(ranks, f"token {flag} or one of the 63 behind it")
        stamp = _stamp(phase, flag >> 24)
        failures = {rank: self.workspace.read_text(rank, phase).partition(stamp) for rank in who}
        self._forget_trouble()
        for rank, (_, found, why) in failures.items():
            if found:
                raise PeerFailed(rank, why, phase=phase.value, layer=layer, rank=self.group.rank)
        if kind == Trouble.FAILED and phase is Phase.COMBINE:  # its kernel has told so, which knows no words
            why = "InputError: its topk_ids_TK hold an id that no expert has"
            raise PeerFailed(who[0], why, phase=phase.value, layer=layer, rank=self.group.rank)
        names = ", ".join(f"rank {rank}" for rank in who)
        raise Drifted(
            f"in {phase.value}, {names} came with another layer or another max_tokens",
            expected="every rank of the group to call the same layers in the same order",
            fix="an idle rank calls every layer too, with T = 0",
            layer=layer,
            rank=self.group.rank,
        )

    def _forget_trouble(self) -> None:
        self.workspace.status.zero_()
        self.group.wait_for_device()
        self.launcher.host_status.zero_()


@dataclass(frozen=True, kw_only=True, eq=False)
class _DeviceResults(ResultsAtHome):
    """Results in the workspaces of all ranks; one pass over them meets the others and sums."""

    transport: CudaTransport
    arrival: Arrival  # what these are the results of
    results: Results | None = None  # kept until they have come home
    just_placed: bool = False  # by a kernel of this transport, not by the experts
    out_TH: Tensor | None = None  # where the sum was begun, if it was
    done: Done | None = None  # the end of that sum

    def summed(self) -> Tensor | None:
        if self.out_TH is not None:
            assert self.done is not None
            with self.transport.launcher.on_device():
                self.done.join()
                self.transport.end(self.arrival, self.done)
        return self.out_TH

    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        with self.transport.launcher.on_device():
            whole = (
                out_TH
                if out_TH.is_contiguous()
                else torch.empty_like(out_TH, memory_format=torch.contiguous_format)
            )
            self.transport.sum(self.arrival, whole, add, just_placed=self.just_placed)
            if whole is not out_TH:
                out_TH.copy_(whole)
            self.transport.end(self.arrival)
        return out_TH

    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        transport, spec, way_back = self.transport, self.arrival.spec, self.arrival.way_back
        slots = slots_of(self.arrival)
        with transport.launcher.on_device():
            transport.launcher.signal_and_wait(slots.layer, Phase.COMBINE)
            tokens = tuple(column.nonzero().squeeze(1) for column in (way_back.slots_TW >= 0).unbind(dim=1))
            first = transport.group.rank * slots.max_tokens
            home = []
            for rank, token_N in enumerate(tokens):
                payloads = {
                    name: payload[first : first + len(token_N)]
                    for name, payload in transport.workspace.combine(slots, rank).items()
                }
                encoded = EncodedRows(
                    format=spec.combine_wire, hidden_size=spec.hidden_size, payloads=payloads
                )
                home.append(encoded.decode(torch.float32).clone())
            transport.end(self.arrival)
        return tuple(home), tokens


def slots_of(arrival: Arrival) -> DispatchSlots:
    """Where the rows of an arrival, and their results, stand."""
    return DispatchSlots(spec=arrival.spec, region=arrival.region, max_tokens=arrival.way_back.max_tokens)


def _choice_places(received: ReceivedRows) -> Tensor:
    """Where results stand that rows have for each of their choices: K places for each slot."""
    assert isinstance(received.routes, LocalRoutes)
    pairs_N, top_k = received.routes.pairs, received.routes.ids_RK.shape[1]
    if received.slots_R is None:
        return pairs_N
    return received.slots_R[pairs_N // top_k] * top_k + pairs_N % top_k


def _stamp(phase: Phase, round: int) -> str:
    """What stands in front of the text of a failure: the phase and the round in which it happened."""
    return f"{phase.value} {round}: "
