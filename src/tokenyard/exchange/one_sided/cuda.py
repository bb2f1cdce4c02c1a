"""`one_sided` on GPUs: the same protocol, with kernels in place of the CPU's copies.

Nothing on the way waits for the device, so a round trip can be captured in a CUDA graph and replayed: rounds are
counted on the device, and every batch size uses the same workspace. What differs between two ways of calling it:

- *Checked* (the default, outside of a capture): after a dispatch the host reads how many rows came from whom, and
  after a combine whether all went well. Experts get the rows that came, and errors are raised where they happen, on
  every rank.
- *Fixed shapes* (in a capture, or inside `fixed_shapes(…)`): the host reads nothing. Experts get every slot as a
  row, empty ones with ids of -1: `W · max_tokens` rows, where `max_tokens` can be set for a while, for small
  batches. What goes wrong is written into a status, and raised by the next call, or by `synchronize`.

A rank that fails, dies or drifts leaves a status on every rank; kernels that find one do not wait, and write NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from tokenyard.errors import ContractError, Drifted, HandleError, InputError, PeerFailed
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.base import Exchange
from tokenyard.exchange.one_sided.control import STATUS, WORD, ControlLayout, Trouble
from tokenyard.exchange.one_sided.exchange import OneSidedExchange
from tokenyard.exchange.one_sided.graphs import CapturedGraphs
from tokenyard.exchange.one_sided.launches import LAYER_BITS, Crossing, Encoding, Launcher
from tokenyard.exchange.spec import Dispatched, ExchangeSpec, ReturnPath, UnencodedRows
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Group
from tokenyard.group.one_thread import by_one_thread
from tokenyard.routing import Routes
from tokenyard.rows import (
    CombineBuffer,
    CombinedRows,
    ExpertRows,
    LocalRoutes,
    PlacedRows,
    RankRows,
    ReceivedRows,
    RoutingLogits,
)

# Seconds in which one rank may compile while the others wait, whatever the deadline of other waits.
COMPILING = 900.0
# Tensors that a combine adds in the pass that sums over ranks.
MOST_TERMS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class DevicePath(ReturnPath):
    """How results get home from GPUs: each token's slots, and the crossing that they came by."""

    crossing: Crossing
    slots_TW: Tensor

    @property
    def is_checked(self) -> bool:
        """Whether the host has read how many rows came."""
        return bool(self.received_counts)


class DeviceWorkspace:
    """One symmetric buffer per rank in device memory, and the launcher that works on it."""

    def __init__(
        self, group: Group, layout: WorkspaceLayout, control: ControlLayout, max_tokens: int
    ) -> None:
        self.layout, self.control, self.nbytes = layout, control, layout.nbytes
        self.buffers = group.share_memory(layout.nbytes)
        self.launcher = Launcher(self.buffers, layout, control, group.rank, group.deadline, max_tokens)
        self._mine = self.buffers[group.rank]
        self.status = self._mine[STATUS * WORD : STATUS * WORD + self.launcher.told[0].nbytes]

    def dispatch(self, crossing: Crossing, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots that a rank receives into."""
        region = self.layout.dispatch_region(crossing.flight)
        return self._first(crossing, crossing.spec.dispatch_slots.views(region.of(self.buffers[rank])))

    def combine(self, crossing: Crossing, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots that a rank's results are read from."""
        region = self.layout.combine_region(crossing.flight)
        return self._first(crossing, crossing.spec.combine_slots.views(region.of(self.buffers[rank])))

    def _first(self, crossing: Crossing, slots: dict[str, Tensor]) -> dict[str, Tensor]:
        used = len(self.buffers) * crossing.max_tokens
        return {name: payload[:used] for name, payload in slots.items()}

    def mail(self, flight: int) -> Tensor:
        """What the ranks told this one in a dispatch: rows that come, and their `max_tokens`, `[W, 2]`."""
        start = self.control.mail(flight)
        return self._mine[start : self.control.mail(flight + 1)].view(torch.int32).view(-1, 2)

    def text(self, rank: int) -> Tensor:
        """The bytes of why a rank failed."""
        return self.control.text.of(self.buffers[rank])


class CudaOneSidedExchange(OneSidedExchange):
    """Push out, pull back, by kernels."""

    def __init__(self, group: Group, *, in_flight: int = 1, plan_id: int = 0, paranoid: bool = False) -> None:
        super().__init__(group, in_flight=in_flight, plan_id=plan_id, paranoid=paranoid)
        self._device_workspace: DeviceWorkspace | None = None
        self._graphs = CapturedGraphs()
        self._limit: int | None = None  # of tokens on a rank, for a while
        self._is_fixed = False

    @property
    def memory(self) -> DeviceWorkspace:
        """The workspace of the layers that are served now."""
        if self._device_workspace is None:
            raise ContractError(
                "the exchange has no workspace", expected="a plan that is open", fix="make a new plan"
            )
        return self._device_workspace

    @property
    def launcher(self) -> Launcher:
        """What launches this rank's kernels."""
        return self.memory.launcher

    # -- The workspace -------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = (
            self.layout_for(specs),
            max(spec.max_tokens for spec in specs),
        )
        there = self._device_workspace
        if there is None:
            self._build(needed, tokens)
        elif not there.layout.suffices_for(needed) or there.launcher.max_tokens < tokens:
            self._check_graphs()
            self._build(there.layout.union(needed), max(tokens, there.launcher.max_tokens))
        Exchange.serve(self, specs)

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        needed, tokens = (
            self.layout_for(specs),
            max(spec.max_tokens for spec in specs),
        )
        if self.memory.layout != needed:
            self._check_graphs()
            self._build(needed, tokens)
        Exchange.serve(self, specs)

    @property
    def _control(self) -> ControlLayout:
        return ControlLayout(self.group.size, self._in_flight.capacity)

    @property
    def _control_bytes(self) -> int:
        return self._control.nbytes

    def _build(self, layout: WorkspaceLayout, max_tokens: int) -> None:
        self.group.wait_for_device()  # what still uses the old workspace ends first
        self._device_workspace = DeviceWorkspace(self.group, layout, self._control, max_tokens)

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
        super().warmup(specs)
        with self.group.patience(COMPILING):
            for turn in range(2):  # one rank compiles, the others find what it has compiled
                if turn == min(self.group.rank, 1):
                    with self.launcher.on_device():
                        for spec in specs:
                            self.launcher.rehearse(spec)
                    self.group.wait_for_device()
                self.group.barrier(phase="loading kernels")

    def _look_at(self, spec: ExchangeSpec, flight: int) -> None:
        crossing = Crossing(spec=spec, flight=flight, max_tokens=spec.max_tokens)
        self.memory.dispatch(crossing, self.group.rank)
        self.memory.combine(crossing, self.group.rank)

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

    # -- The way out ---------------------------------------------------------------------------------------

    def encode(self, spec: ExchangeSpec, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        fused = Encoding.of(spec.wire) is not None
        return UnencodedRows(format=spec.wire, x_TH=x_TH) if fused else super().encode(spec, x_TH)

    @by_one_thread
    def dispatch(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Dispatched:
        self._check_turn(spec)
        round, is_captured = self._round + 1, torch.cuda.is_current_stream_capturing()
        try:
            self._raise_trouble()
            crossing = self._crossing(spec)
            checked = self._check_batch(spec, rows, routes, extra or {}, values=False)
            assert isinstance(checked, Routes)  # `supports` refuses logits
            checked = self._drop_lost(spec, checked)
            if rows.num_rows > crossing.max_tokens:
                raise InputError(
                    f"{rows.num_rows} tokens",
                    expected=f"at most {crossing.max_tokens}, as `fixed_shapes` was told",
                    fix="give fixed_shapes the largest number of tokens of any rank",
                )
        except Exception as error:
            self._fail(spec, error, partial(self._fail_out, spec, round, error))
        self._round = round
        if is_captured:
            self._graphs.note()
        with self._working(spec, "dispatch"):
            slots_TW = self.launcher.dispatch(
                crossing,
                rows.x_TH if isinstance(rows, UnencodedRows) else rows,
                checked.topk_ids_TK,
                checked.topk_weights_TK,
                extra or {},
            )
            is_checked = not (is_captured or self._is_fixed)
            counts = self._read_counts(crossing) if is_checked else None
        path = DevicePath(
            tokens_by_rank=(),
            received_counts=counts or (),
            num_tokens=rows.num_rows,
            crossing=crossing,
            slots_TW=slots_TW,
        )
        received = self._rows_received(crossing, counts)
        dispatched = Dispatched(
            received=received,
            spec=spec,
            round=round,
            return_path=path,
            flight=crossing.flight,
        )
        self._in_flight.add(dispatched)
        if is_checked:
            try:
                self._raise_trouble()  # of this rank's own ids: the others have gone on, and wait for its combine
            except InputError as error:
                self._fail(spec, error, partial(self._in_flight.give_up, dispatched, error))
        self._count(dispatched)
        return dispatched

    @contextmanager
    def _working(self, spec: ExchangeSpec, phase: str) -> Iterator[None]:
        with (
            self.stats[spec.layer].waiting(phase),
            self._in_layer(spec),
            self._waiting(),
            self.launcher.on_device(),
        ):
            yield

    def _crossing(self, spec: ExchangeSpec) -> Crossing:
        """The way of a dispatch through the first region that none in flight uses."""
        limit = spec.max_tokens if self._limit is None else min(self._limit, spec.max_tokens)
        return Crossing(spec=spec, flight=self._in_flight.free, max_tokens=limit)

    def _read_counts(self, crossing: Crossing) -> tuple[int, ...]:
        """How many rows came from whom; waits for the device."""
        told = self.memory.mail(crossing.flight).cpu()
        self._raise_trouble(Trouble.FAILED)
        limits = told[:, 1].tolist()
        if set(limits) != {crossing.max_tokens}:
            by_rank = ", ".join(f"rank {rank} has {limit}" for rank, limit in enumerate(limits))
            raise Drifted(
                f"the ranks dispatch for different numbers of tokens: {by_rank}",
                expected="one max_tokens on every rank",
                fix="give fixed_shapes the same number on all ranks",
                rank=self.group.rank,
            )
        return tuple(told[:, 0].tolist())

    def _rows_received(self, crossing: Crossing, counts: tuple[int, ...] | None) -> ReceivedRows:
        """What came, as views of the workspace: the rows that are there, or all slots."""
        spec, slots = crossing.spec, self.memory.dispatch(crossing, self.group.rank)
        names = [payload.name for payload in spec.wire.payloads(spec.hidden_size)]
        rows = EncodedRows(
            format=spec.wire,
            hidden_size=spec.hidden_size,
            payloads={name: slots[name] for name in names},
        )
        extra = {payload.name: slots[payload.name] for payload in spec.extra}
        if counts is None:
            routes = LocalRoutes(ids_RK=slots["ids"], weights_RK=slots["weights"])
            everything = (crossing.max_tokens,) * self.group.size
            results = self._results_at(crossing, None)
            return ReceivedRows(rows=rows, routes=routes, counts_W=everything, extra=extra, results=results)
        places = [torch.arange(n) + source * crossing.max_tokens for source, n in enumerate(counts)]
        slots_R = torch.cat(places).to(self.group.device)
        return ReceivedRows(
            rows=rows,
            routes=LocalRoutes(ids_RK=slots["ids"][slots_R], weights_RK=slots["weights"][slots_R]),
            counts_W=counts,
            extra={name: payload[slots_R] for name, payload in extra.items()},
            slots_R=slots_R,
            results=self._results_at(crossing, slots_R),
        )

    def _count(self, dispatched: Dispatched) -> None:
        path, stats = cast(DevicePath, dispatched.return_path), self.stats[dispatched.spec.layer]
        if path.is_checked:
            sent = (path.slots_TW >= 0).sum(dim=0).tolist()
            row = self.region_bytes(dispatched.spec).dispatch_row
            stats.count_dispatch(path.num_tokens, sent, path.received_counts, [n * row for n in sent])
        else:  # how many rows went where, only the device knows
            nobody = [0] * self.group.size
            stats.count_dispatch(path.num_tokens, nobody, nobody, nobody)

    # -- The way back --------------------------------------------------------------------------------------

    def combine_buffer(self, dispatched: Dispatched) -> CombineBuffer | None:
        path = cast(DevicePath, dispatched.return_path)
        return self._results_at(path.crossing, dispatched.received.slots_R)

    def _results_at(self, crossing: Crossing, slots_R: Tensor | None) -> CombineBuffer | None:
        """Where results are read; None where they are encoded on the way there."""
        if crossing.spec.combine_wire.quantized:
            return None
        (rows_SH,) = self.memory.combine(crossing, self.group.rank).values()
        return CombineBuffer(rows_SH=rows_SH, slots_R=slots_R)

    @by_one_thread
    def combine(
        self,
        dispatched: Dispatched,
        result: ExpertRows | PlacedRows,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor] = (),
    ) -> CombinedRows:
        path, rows_RH = self._results(dispatched, result, reduces=True, out=out, add=add)
        spec = dispatched.spec
        if out is None:
            out = torch.empty(
                path.num_tokens,
                spec.hidden_size,
                dtype=spec.dtype,
                device=self.group.device,
            )
        with self._working(spec, "combine"), self._in_turn():
            home = (
                out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
            )
            self.launcher.combine(path.crossing, path.slots_TW, rows_RH, home, add, dense=path.is_checked)
            if home is not out:
                out.copy_(home)
            self._end(path)
        self._count_back(dispatched)
        return CombinedRows(y_TH=out)

    @by_one_thread
    def combine_unreduced(self, dispatched: Dispatched, result: ExpertRows | PlacedRows) -> RankRows:
        path, rows_RH = self._results(dispatched, result, reduces=False, out=None, add=())
        spec, crossing = dispatched.spec, path.crossing
        with self._working(spec, "combine"), self._in_turn():
            if rows_RH is not None:
                self.launcher.place(crossing, rows_RH, dense=path.is_checked)
            self.launcher.meet(crossing.layer, Phase.COMBINE)
            tokens = [column.nonzero().squeeze(1) for column in (path.slots_TW >= 0).unbind(dim=1)]
            first = self.group.rank * crossing.max_tokens
            home = []
            for rank, token_N in enumerate(tokens):
                payloads = {
                    name: payload[first : first + len(token_N)]
                    for name, payload in self.memory.combine(crossing, rank).items()
                }
                encoded = EncodedRows(
                    format=spec.combine_wire,
                    hidden_size=spec.hidden_size,
                    payloads=payloads,
                )
                home.append(encoded.decode(torch.float32).clone())
            self._end(path)
        self._count_back(dispatched)
        return RankRows(
            rows_by_rank=tuple(home),
            tokens_by_rank=tuple(tokens),
            num_tokens=path.num_tokens,
            dtype=spec.dtype,
        )

    def _results(
        self,
        dispatched: Dispatched,
        result: ExpertRows | PlacedRows,
        *,
        reduces: bool,
        out: Tensor | None,
        add: Sequence[Tensor],
    ) -> tuple[DevicePath, Tensor | None]:
        """Check a result; its rows, or None where they are placed already."""
        self._land(dispatched)
        spec, path = dispatched.spec, cast(DevicePath, dispatched.return_path)
        try:
            rows_RH = self._check_result(dispatched, result, reduces=reduces, out=out, add=add)
            if len(add) > MOST_TERMS:
                raise InputError(
                    f"{len(add)} tensors to add",
                    expected=f"at most {MOST_TERMS} on a GPU",
                    fix="add some of them before",
                )
            return path, rows_RH
        except Exception as error:
            self._fail(spec, error, partial(self._fail_back, dispatched, error))

    def _end(self, path: DevicePath) -> None:
        """The end of a checked round: whatever went wrong in it is raised here."""
        if path.is_checked:
            self.group.wait_for_device()
            self._raise_trouble()

    def _count_back(self, dispatched: Dispatched) -> None:
        row = self.region_bytes(dispatched.spec).combine_row
        counts = dispatched.return_path.received_counts
        self.stats[dispatched.spec.layer].count_combine([n * row for n in counts])

    # -- Shared fate ---------------------------------------------------------------------------------------

    def _fail_out(self, spec: ExchangeSpec, round: int, error: BaseException) -> None:
        self._round = round
        self._tell_failure(self._crossing(spec), Phase.DISPATCH, error)

    def _fail_back(self, dispatched: Dispatched, error: BaseException) -> None:
        self._tell_failure(cast(DevicePath, dispatched.return_path).crossing, Phase.COMBINE, error)

    def _tell_failure(self, crossing: Crossing, phase: Phase, error: BaseException) -> None:
        """Take part in a phase only to say that this rank failed, and why."""
        if torch.cuda.is_current_stream_capturing():
            return  # nothing runs yet: the others are capturing, too, and wait for nobody
        text = f"{type(error).__name__}: {error}".encode()[: self.memory.control.text.nbytes].ljust(
            self.memory.control.text.nbytes, b"\0"
        )
        self.memory.text(self.group.rank).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        with self.launcher.on_device():
            self.launcher.meet(crossing.layer, phase, fails=True)
        self.group.wait_for_device()
        if self.launcher.told[0, 0] != Trouble.LOST:
            self._forget_trouble()

    @by_one_thread
    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong in rounds that were not checked."""
        self.group.wait_for_device()
        self._raise_trouble()

    def _raise_trouble(self, least: Trouble = Trouble.BAD_IDS) -> None:
        """Raise what a kernel has reported, without waiting for it to do so."""
        kind, flag, ranks, waited = self.launcher.told[0].tolist()
        if kind < least or self._device_workspace is None:
            return
        phase = list(Phase)[flag & 1]
        layer = self._names[flag >> 2 & (1 << LAYER_BITS) - 1] if kind != Trouble.BAD_IDS else None
        who = [rank for rank in range(self.group.size) if ranks >> rank & 1]
        if kind == Trouble.LOST:
            lost = self.group.lost(who, phase=phase.value, waited=waited / 1e9, layer=layer)
            self._break(lost)
            raise lost
        if kind == Trouble.BAD_IDS:
            self._forget_trouble()
            raise InputError(
                f"topk_ids_TK holds id {ranks} (token {flag} or one of the 63 behind it)",
                expected="ids of the layer's experts, or -1 for nobody",
                fix="pass global expert ids of this layer, and -1 for padding",
                rank=self.group.rank,
            )
        why = bytes(self.memory.text(who[0]).cpu().tolist()).rstrip(b"\0").decode(errors="replace")
        self._forget_trouble()
        if kind == Trouble.FAILED:
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
        self.memory.status.zero_()
        self.group.wait_for_device()
        self.launcher.told.zero_()

    def close(self) -> None:
        """No more rounds, and the workspace is given back."""
        if self._device_workspace is not None:
            self.group.wait_for_device()
        Exchange.close(self)
        self._device_workspace = None
