"""How fast is a whole layer on a GPU? `one_sided` and fused experts, beside the same experts behind an allgather.

W virtual ranks share one GPU, each with experts and a workspace of its own, and all of them run in one CUDA graph: a
dispatch of all ranks in one launch, the experts of one rank after the other, a combine of all ranks in one launch.

**The allgather** is made of plain device copies in a graph of the same kind: every rank copies the rows, ids and
weights of all ranks into its own memory, runs the same experts on them, with -1 for experts that live elsewhere, and
the results of all ranks are summed for each token. It is given every advantage: rows are encoded before the clock
starts (ours encode on the way), copies are kernels that reach the bandwidth of the memory, and one pass makes the sums.

**Why it can be trusted.** Before a cell is timed, the results of both are compared with decoded weights and float32
products, token by token; after it, what the graphs left is compared with a run outside of them, bit by bit. What is
not measured is a link: no byte leaves the GPU.

`Clock` and `device` are arguments: all but the clock runs on a CPU, too, with Triton's interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.experts import ExpertsSpec, FusedExperts, activation
from tokenyard.formats import get, weight_format
from tokenyard.formats.base import EncodedRows
from tokenyard.lab.bench.cuda_figures import Cell, Shape
from tokenyard.lab.bench.dispatch_cuda import ROTATED_BELOW, ROTATION
from tokenyard.lab.bench.drawn_experts import DrawnExperts, check_replayed, check_results, exact_products
from tokenyard.lab.bench.graph_clock import Clock
from tokenyard.lab.bench.layer_figures import LayerCell, LayerShape, LayerTimes, layer_result
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows

if TYPE_CHECKING:
    from tokenyard.lab.bench.virtual_ranks import Batch, VirtualRanks

ROUNDS = 15


def check_layer(cells: Sequence[LayerCell], shape: LayerShape) -> None:
    """Raise if a cell cannot be measured. Asked before the time is spent."""
    if not 1 <= shape.top_k <= shape.num_experts:
        raise InputError(
            f"top_k is {shape.top_k}, of {shape.num_experts} experts",
            expected=f"a top_k from 1 to {shape.num_experts}: choices are drawn without repetition",
            fix="choose fewer experts per token, or more experts",
        )
    for cell in cells:
        weight_format(cell.weights)
        if shape.num_experts % cell.world:
            raise InputError(
                f"{shape.num_experts} experts on {cell.world} ranks",
                expected="as many experts on every rank",
                fix="choose --num-experts that --ranks divides",
            )


def measure_layer(
    cells: Sequence[LayerCell], shape: LayerShape, *, device: torch.device, clock: Clock
) -> Iterator[dict[str, Any]]:
    """The figures of one cell after the other. What goes wrong in a cell is its note."""
    drawn: list[DrawnExperts] = []
    experts: list[FusedExperts] = []
    held: tuple[int, str] | None = None
    for cell in cells:
        try:
            if held != (cell.world, cell.weights):
                drawn, experts, held = [], [], None
                _tidy(device)
                spec = _spec(cell, shape)
                drawn = [DrawnExperts.draw(spec, device, seed=rank) for rank in range(cell.world)]
                experts = [FusedExperts(spec, mine.weights, adopt=True) for mine in drawn]
                held = (cell.world, cell.weights)
            row = _measure(cell, shape, drawn, experts, device, clock)
        except Exception as error:  # ours, torch's, or Triton's, which is none of both
            row = layer_result(cell, note=f"{type(error).__name__}: {error}")
        yield row
        _tidy(device)


def _tidy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _spec(cell: LayerCell, shape: LayerShape) -> ExpertsSpec:
    return ExpertsSpec(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_local_experts=shape.num_experts // cell.world,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        activation=activation("swiglu"),
        weights=cell.weights,
    )


def _measure(
    cell: LayerCell,
    shape: LayerShape,
    drawn: list[DrawnExperts],
    experts: list[FusedExperts],
    device: torch.device,
    clock: Clock,
) -> dict[str, Any]:
    # It needs Triton, which a CPU's torch does not bring.
    room: Any = importlib.import_module("tokenyard.lab.bench.virtual_ranks")
    travel = Cell(operation="round trip", world=cell.world, num_tokens=cell.num_tokens, wire=cell.wire)
    rows = Shape(hidden_size=shape.hidden_size, top_k=shape.top_k, num_experts=shape.num_experts)
    sets = ROTATION if cell.num_tokens < ROTATED_BELOW else 1
    batches: list[Batch] = [room.Batch.draw(travel, rows, device, seed) for seed in range(sets)]
    ranks: VirtualRanks = room.VirtualRanks(travel, rows, batches, device)
    ours, theirs = OneSidedLayer(ranks, experts), AllGatherLayer(cell, experts, batches)
    errors = _check(cell, drawn, ours, theirs, batches[0])
    whole = clock({"ours": ours.run, "theirs": theirs.run})
    for name, layer in (("one_sided", ours), ("behind an allgather", theirs)):
        replayed_TH = layer.y_TH.clone()
        layer.run_batch(batches[-1])
        check_replayed(replayed_TH, layer.y_TH, f"{name}, {cell}")
    alone = clock({"ours": ours.run_alone, "theirs": theirs.run_alone})
    ranks.check_nobody_gave_up()

    def each(times: Sequence[float]) -> list[float]:
        return [us / sets for us in times]

    times = LayerTimes(
        layer=each(whole["ours"]),
        allgather_layer=each(whole["theirs"]),
        exchange=each(alone["ours"]),
        allgather=each(alone["theirs"]),
    )
    return layer_result(cell, times=times, errors=errors)


class OneSidedLayer:
    """The layer as this project runs it: rows go where their experts are."""

    def __init__(self, ranks: VirtualRanks, experts: Sequence[FusedExperts]) -> None:
        self._ranks, self._experts = ranks, experts
        self._received = [ranks.received(rank) for rank in range(len(experts))]
        self.y_TH = ranks.y_TH  # the sums of all ranks' tokens, of the batch that ran last

    def run(self) -> None:
        """All batches."""
        for batch in self._ranks.batches:
            self.run_batch(batch)

    def run_batch(self, batch: Batch) -> None:
        """One batch."""
        self._ranks.dispatch(batch)
        for experts, received in zip(self._experts, self._received, strict=True):
            experts(received)
        self._ranks.combine()

    def run_alone(self) -> None:
        """All batches there and back, with whatever results are there."""
        for batch in self._ranks.batches:
            self._ranks.dispatch(batch)
            self._ranks.combine()


class AllGatherLayer:
    """The layer behind an allgather: every rank gets all rows, and its results are summed with the others'."""

    def __init__(self, cell: LayerCell, experts: Sequence[FusedExperts], batches: Sequence[Batch]) -> None:
        self._experts = experts
        wire, first = get(cell.wire), batches[0]
        self._sent = [(wire.encode(batch.x_TH), batch) for batch in batches]
        world, (tokens, hidden), device = cell.world, first.x_TH.shape, first.x_TH.device
        self._results = torch.zeros(world, tokens, hidden, dtype=torch.bfloat16, device=device)
        self.y_TH = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        local = experts[0].spec.num_local_experts
        id_E = torch.arange(world * local, dtype=torch.int32, device=device)
        # What an expert of the layer is to each rank.
        self._local = [
            torch.where(id_E // local == rank, id_E - rank * local, -1).int() for rank in range(world)
        ]
        self._received = [self._buffer(rank, self._sent[0][0], first) for rank in range(world)]

    def _buffer(self, rank: int, rows: EncodedRows, batch: Batch) -> ReceivedRows:
        payloads = {name: torch.empty_like(payload) for name, payload in rows.payloads.items()}
        world = len(self._experts)
        return ReceivedRows(
            rows=EncodedRows(format=rows.format, hidden_size=rows.hidden_size, payloads=payloads),
            routes=LocalRoutes(
                ids_RK=torch.empty_like(batch.ids_TK), weights_RK=torch.empty_like(batch.weights_TK)
            ),
            counts_W=(batch.x_TH.shape[0] // world,) * world,
            results=CombineBuffer(rows_SH=self._results[rank], slots_R=None),
        )

    def run(self) -> None:
        """All batches."""
        for sent in self._sent:
            self._run(*sent, with_experts=True)

    def run_batch(self, batch: Batch) -> None:
        """One of the batches."""
        self._run(next(rows for rows, sent in self._sent if sent is batch), batch, with_experts=True)

    def run_alone(self) -> None:
        """All batches there and back, with whatever results are there."""
        for sent in self._sent:
            self._run(*sent, with_experts=False)

    def _run(self, rows: EncodedRows, batch: Batch, *, with_experts: bool) -> None:
        for table_E, received in zip(self._local, self._received, strict=True):
            for name, payload in rows.payloads.items():
                _copy(payload, received.rows.payloads[name])
            routes = received.routes
            assert isinstance(routes, LocalRoutes)
            _copy(batch.weights_TK, routes.weights_RK)
            torch.index_select(table_E, 0, batch.ids_TK.view(-1), out=routes.ids_RK.view(-1))
        self._results.zero_()  # rows that no expert of a rank takes are summed, too
        if with_experts:
            for experts, received in zip(self._experts, self._received, strict=True):
                experts(received)
        torch.sum(self._results, dim=0, out=self.y_TH)  # bf16 numbers are added in float32


def _copy(source: Tensor, target: Tensor) -> None:
    """The same bits, by a kernel: in a graph `copy_` is left to the copy engines, which are slower."""
    torch.bitwise_or(source.view(torch.int32), 0, out=target.view(torch.int32))


def _check(
    cell: LayerCell,
    drawn: Sequence[DrawnExperts],
    ours: OneSidedLayer,
    theirs: AllGatherLayer,
    batch: Batch,
) -> tuple[float, float]:
    ours.y_TH.fill_(torch.nan)
    theirs.y_TH.fill_(torch.nan)
    ours.run_batch(batch)
    theirs.run_batch(batch)
    x_TH = get(cell.wire).encode(batch.x_TH).decode(torch.float32)
    y_TH = torch.zeros_like(x_TH)
    with exact_products():
        for rank, mine in enumerate(drawn):
            local = mine.weights.w13.shape[0]
            here = batch.ids_TK // local == rank
            mine.add_results(x_TH, torch.where(here, batch.ids_TK % local, -1), batch.weights_TK, y_TH)
    return (
        check_results(ours.y_TH, y_TH, f"one_sided, {cell}"),
        check_results(theirs.y_TH, y_TH, f"behind an allgather, {cell}"),
    )
