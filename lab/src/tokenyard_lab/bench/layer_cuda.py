"""How fast is a whole layer on a GPU? `one_sided` and fused experts, beside the same experts behind an allgather.

W virtual ranks share one GPU, each with experts and a workspace of its own, and all of them run in one CUDA graph: a
dispatch of all ranks in one launch, the experts of one rank after the other, a combine of all ranks in one launch. The
figure is the time of all ranks divided by W. Experts take most of it, so the exchange of rows is measured alone, too.

**The allgather** is made of plain device copies in a graph of the same kind: every rank copies the rows, ids and
weights of all ranks into its own memory, runs the same experts on them, with -1 for experts that live elsewhere, and
the results of all ranks are summed for each token. It is given every advantage: rows are encoded before the clock
starts (ours encode on the way), copies are kernels that reach the bandwidth of the memory, and one pass makes the sums.
Both take turns in the same rounds; the ratio is taken round by round.

**The floor** is that of the experts of one rank, and the bytes that rows take out and back over the rate of a copy.

**Why it can be trusted.** Before a cell is timed, the results of both are compared with decoded weights and float32
products, token by token; after it, the results of the graphs are compared with a run outside of them, bit by bit. No
link is measured: no byte leaves the GPU. `DeepGEMM` is the time of its fused layer on eight H200 with links.

`Clock` and `device` are arguments: all but the clock runs on a CPU, too, with Triton's interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.experts import FusedExperts
from tokenyard.formats import get, weight_format
from tokenyard.formats.base import EncodedRows
from tokenyard.machine_rates import Work
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows
from tokenyard_lab.bench.clock import give_back_memory
from tokenyard_lab.bench.dispatch_cells import DispatchCell, traffic
from tokenyard_lab.bench.dispatch_cuda import ROTATED_BELOW, ROTATION
from tokenyard_lab.bench.drawn_experts import DrawnExperts, check_replayed, check_results, exact_products
from tokenyard_lab.bench.experts import Load, floor_of
from tokenyard_lab.bench.machine_rates import Machine
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.bench.shapes import LAYER_PEERS, Case, Cell, check_top_k

if TYPE_CHECKING:
    from tokenyard_lab.bench.virtual_ranks import Batch, VirtualRanks

ROUNDS = 15
WHOLE, ROWS_ALONE = "whole layer", "rows alone"
ALLGATHER, DEEPGEMM = "allgather", "DeepGEMM"
NOTES = (
    "µs of all ranks divided by their number; both run the same experts, one rank after the other in one graph; rows "
    "alone: there and back, no experts",
    # On eight B200 with links between them: ms by one-sided writes and by an allgather.
    "#40960 reports 35 against 40 ms on 8 B200 with links, a ratio of 0.875; here ranks share one GPU's memory: this "
    "is not the speed of a link",
)
DEEPGEMM_NOTE = "DeepGEMM: its fused fp8 layer on 8 × H200 with links, the exchange included"


def check_layer(ranks: int, num_experts: int, top_k: int, weights: Sequence[str]) -> None:
    """Raise if a layer cannot be measured. Called before anything is measured."""
    check_top_k(top_k, num_experts)
    for name in weights:
        weight_format(name)
    if num_experts % ranks:
        raise InputError(
            f"{num_experts} experts on {ranks} ranks",
            expected="as many experts on every rank",
            fix="choose --num-experts that --ranks divides",
        )


def measure_layer(cells: Sequence[Cell], machine: Machine) -> Iterator[list[Record]]:
    """Two records per cell: of the whole layer, and of rows alone. An error in a cell becomes the note of a record."""
    device = machine.device
    drawn: list[DrawnExperts] = []
    experts: list[FusedExperts] = []
    held: tuple[Case, str] | None = None
    for cell in cells:
        try:
            if held != (cell.shape, cell.weights):
                drawn, experts, held = [], [], None
                give_back_memory(device)
                for rank in range(cell.shape.ranks):
                    mine = DrawnExperts.draw(cell.spec, device, seed=rank)
                    # Copied, as a layer does: experts hold their own weights in another order. The drawn ones are not
                    # kept, since the weights of all ranks may not fit into a GPU twice.
                    experts.append(FusedExperts(cell.spec, mine.weights))
                    drawn.append(replace(mine, weights=mine.weights.select([])))
                    del mine
                held = (cell.shape, cell.weights)
            yield _measure(cell, drawn, experts, machine)
        except Exception as error:  # ours, torch's or Triton's, which have no common base
            yield [Record(parameters=_parameters(cell, WHOLE), note=f"{type(error).__name__}: {error}")]
        give_back_memory(device)


def _parameters(cell: Cell, measured: str) -> dict[str, Any]:
    return {**cell.parameters("tokens"), "measured": measured}


def _measure(
    cell: Cell, drawn: list[DrawnExperts], experts: list[FusedExperts], machine: Machine
) -> list[Record]:
    # Imported here, because it needs Triton, which a CPU build of torch does not bring.
    virtual_ranks: Any = importlib.import_module("tokenyard_lab.bench.virtual_ranks")
    world, device, clock, rates = cell.shape.ranks, machine.device, machine.clock, machine.rates
    travel = DispatchCell(operation="round trip", ranks=world, tokens=cell.size, wire=cell.rows_format)
    sets = ROTATION if cell.size < ROTATED_BELOW else 1
    batches: list[Batch] = [
        virtual_ranks.Batch.draw(travel, cell.shape, device, seed) for seed in range(sets)
    ]
    ranks: VirtualRanks = virtual_ranks.VirtualRanks(travel, cell.shape, batches, device)
    ours, theirs = OneSidedLayer(ranks, experts), AllGatherLayer(cell, experts, batches)
    errors = _check(cell, drawn, ours, theirs, batches[0])
    works = {"ours": _all_of(batches, ours), "theirs": _all_of(batches, theirs)}
    whole, whole_rested = clock(works), machine.rested(works) if machine.rested is not None else {"ours": []}
    for name, layer in (("one_sided", ours), ("behind an allgather", theirs)):
        replayed_TH = layer.y_TH.clone()
        layer.run_batch(batches[-1])
        check_replayed(replayed_TH, layer.y_TH, f"{name}, {cell}")
    alone = clock(
        {"ours": _all_of(batches, ours, experts=False), "theirs": _all_of(batches, theirs, experts=False)}
    )
    ranks.check_no_rank_gave_up()
    rows_sent = ranks.rows_sent()
    rows_floor = traffic(travel, cell.shape, rows_sent).nbytes / rates.copy / world
    load = Load(
        rows=rows_sent / world,
        experts_hit=sum(batch.ids_TK.unique().numel() for batch in batches) / sets / world,
        bytes_per_expert=drawn[0].bytes_per_expert,
    )

    def record(
        measured: str, times: dict[str, list[float]], rested_times: list[float], floor: float, **details: Any
    ) -> Record:
        ours_us, theirs_us, rested_us = (
            [us / sets / world for us in found] for found in (times["ours"], times["theirs"], rested_times)
        )
        recorded = cell.figure_of(LAYER_PEERS) if measured == WHOLE else None
        return Record(
            parameters=_parameters(cell, measured),
            ours=Spread.of(ours_us),
            rested=Spread.of(rested_us) if rested_us else None,
            floor=Spread(floor),
            peers={ALLGATHER: Spread.of(theirs_us)}
            | ({DEEPGEMM: Spread(recorded)} if recorded is not None else {}),
            ratios={"ours / allgather": Spread.ratio(ours_us, theirs_us)},
            details={"wire": cell.rows_format, **details},
        )

    return [
        record(
            WHOLE,
            whole,
            whole_rested["ours"],
            rows_floor + floor_of(cell, load, rates).us,
            relative_error=errors[0],
            allgather_relative_error=errors[1],
        ),
        record(ROWS_ALONE, alone, [], rows_floor),
    ]


class OneSidedLayer:
    """The layer as this project runs it: rows go where their experts are."""

    def __init__(self, ranks: VirtualRanks, experts: Sequence[FusedExperts]) -> None:
        self._ranks, self._experts = ranks, experts
        self._received = [ranks.received(rank) for rank in range(len(experts))]
        self.y_TH = ranks.y_TH  # the sums of all ranks' tokens, of the batch that ran last

    def run_batch(self, batch: Batch, *, experts: bool = True) -> None:
        """Dispatch, compute and combine one batch. Without `experts`, combine the results that are there."""
        self._ranks.dispatch(batch)
        if experts:
            _compute(self._experts, self._received)
        self._ranks.combine()


class AllGatherLayer:
    """The layer behind an allgather: every rank gets all rows, and its results are summed with the others'."""

    def __init__(self, cell: Cell, experts: Sequence[FusedExperts], batches: Sequence[Batch]) -> None:
        self._experts = experts
        wire, first = get(cell.rows_format), batches[0]
        self._sent = [(wire.encode(batch.x_TH), batch) for batch in batches]
        world, (tokens, hidden), device = cell.shape.ranks, first.x_TH.shape, first.x_TH.device
        self._results = torch.zeros(world, tokens, hidden, dtype=torch.bfloat16, device=device)
        self.y_TH = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        local = experts[0].spec.num_local_experts
        id_E = torch.arange(world * local, dtype=torch.int32, device=device)
        # For each rank: the local id of each expert of the layer, or -1.
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
            may_be_empty=True,
            results=CombineBuffer(rows_SH=self._results[rank], slots_R=None),
        )

    def run_batch(self, batch: Batch, *, experts: bool = True) -> None:
        """Gather, compute and sum one of the batches. Without `experts`, sum the results that are there."""
        rows = next(rows for rows, sent in self._sent if sent is batch)
        for table_E, received in zip(self._local, self._received, strict=True):
            for name, payload in rows.payloads.items():
                _copy(payload, received.rows.payloads[name])
            routes = received.routes
            assert isinstance(routes, LocalRoutes)
            _copy(batch.weights_TK, routes.weights_RK)
            torch.index_select(table_E, 0, batch.ids_TK.view(-1), out=routes.ids_RK.view(-1))
        self._results.zero_()  # rows that no expert of a rank takes are summed, too
        if experts:
            _compute(self._experts, self._received)
        torch.sum(self._results, dim=0, out=self.y_TH)  # bf16 numbers are added in float32


def _all_of(batches: Sequence[Batch], layer: OneSidedLayer | AllGatherLayer, *, experts: bool = True) -> Work:
    """Work that runs all batches through a layer, one after the other."""

    def run() -> None:
        for batch in batches:
            layer.run_batch(batch, experts=experts)

    return run


def _compute(experts: Sequence[FusedExperts], received: Sequence[ReceivedRows]) -> None:
    """Run the experts of one rank after the other."""
    for mine, rows in zip(experts, received, strict=True):
        mine(rows)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy bits by a kernel: in a graph, `copy_` would run on the copy engines, which are slower."""
    torch.bitwise_or(source.view(torch.int32), 0, out=target.view(torch.int32))


def _check(
    cell: Cell, drawn: Sequence[DrawnExperts], ours: OneSidedLayer, theirs: AllGatherLayer, batch: Batch
) -> tuple[float, float]:
    for layer in (ours, theirs):
        layer.y_TH.fill_(torch.nan)
        layer.run_batch(batch)
    x_TH = get(cell.rows_format).encode(batch.x_TH).decode(torch.float32)
    y_TH = torch.zeros_like(x_TH)
    with exact_products():
        for rank, mine in enumerate(drawn):
            local = mine.spec.num_local_experts
            here = batch.ids_TK // local == rank
            mine.add_results(x_TH, torch.where(here, batch.ids_TK % local, -1), batch.weights_TK, y_TH)
    return (
        check_results(ours.y_TH, y_TH, f"one_sided, {cell}"),
        check_results(theirs.y_TH, y_TH, f"behind an allgather, {cell}"),
    )
