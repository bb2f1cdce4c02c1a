"""How fast are experts on a GPU? The kernels of `fused` experts, beside the floor, a figure to reach, and peers.

**What is timed.** The whole stage: sorting pairs by expert, both products with the activation, weights and sums, from
rows as they arrive to results where `combine` reads them. A CUDA graph holds several batches with routes of their own;
it is replayed many times, and the median over rounds is the figure: of rounds that follow at once, and beside it of
rounds after a rest. Weights of the experts that are hit are far larger than the cache.

**Batches.** Routes are uniform over all experts of the layer. A rank gets the rows that have an expert of its own, cut
so that there are exactly as many pairs of a row and an expert as the cell says.

**Why it can be trusted.** Before a cell is timed, one of its batches is compared with decoded weights and float32
products at full size; after it, what the graph left is compared with runs outside of it, bit by bit. A cell that
differs is shown with the reason and without a time.

`Clock` and `device` are arguments: all but the clock runs on a CPU, too, with Triton's interpreter.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenyard.experts import ExpertsSpec, FusedExperts, activation
from tokenyard.formats import get, weight_format
from tokenyard.lab.bench import grouped_peers
from tokenyard.lab.bench.drawn_experts import DrawnExperts, check_replayed, check_results, exact_products
from tokenyard.lab.bench.expert_figures import BESIDE, CASES, Case, Cell, Load, floor_of, peer_fields, result
from tokenyard.lab.bench.graph_clock import Clock
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows

if TYPE_CHECKING:
    from tokenyard.lab.bench.machine_rates import Rates

ROUNDS = 15
# Seconds, and rounds, in which a GPU is found rested.
REST = 0.2
RESTED_ROUNDS = 5
# Batches of a graph; where one has many rows, a few will do.
ROTATION = 8
MANY_PAIRS = 4096
ROTATION_OF_MANY = 3


def draw_routes(case: Case, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Local ids and weights of the rows that arrive: uniform choices, exactly as many pairs as the case wants.

    >>> ids_RK, weights_RK = draw_routes(CASES["B"], 64, seed=0)
    >>> int((ids_RK >= 0).sum()), bool((ids_RK >= 0).any(dim=1).all()), weights_RK.shape == ids_RK.shape
    (64, True, True)
    """
    draw = torch.Generator().manual_seed(seed)
    pairs, tokens = case.pairs(size), max(64, size)
    if case.all_local:
        tokens = size
    found: list[Tensor] = []
    while sum(int((ids >= 0).sum()) for ids in found) < pairs:
        ids_TK = torch.rand(tokens, case.num_experts, generator=draw).topk(case.top_k).indices.int()
        ids_TK = torch.where(ids_TK < case.local_experts, ids_TK, -1)
        found.append(ids_TK[(ids_TK >= 0).any(dim=1)])
    ids_RK = torch.cat(found)
    counts_R = (ids_RK >= 0).sum(dim=1).cumsum(0)
    last = int((counts_R >= pairs).nonzero()[0])
    ids_RK = ids_RK[: last + 1]
    too_many = int(counts_R[last]) - pairs
    ids_RK[last, (ids_RK[last] >= 0).nonzero().flatten()[:too_many]] = -1
    return ids_RK, torch.rand(ids_RK.shape, generator=draw)


def draw_batch(cell: Cell, device: torch.device, seed: int) -> ReceivedRows:
    """A batch as an exchange delivers it, with a place for its results."""
    case = CASES[cell.case]
    ids_RK, weights_RK = draw_routes(case, cell.size, seed)
    rows, draw = ids_RK.shape[0], torch.Generator(device).manual_seed(seed)
    x_RH = torch.randn(rows, case.hidden_size, device=device, dtype=torch.bfloat16, generator=draw)
    return ReceivedRows(
        rows=get(cell.rows_format).encode(x_RH),
        routes=LocalRoutes(ids_RK=ids_RK.to(device), weights_RK=weights_RK.to(device)),
        counts_W=(rows,),
        results=CombineBuffer(rows_SH=torch.empty_like(x_RH), slots_R=None),
    )


def spec_of(case: Case, weights: str) -> ExpertsSpec:
    """The experts of a case."""
    return ExpertsSpec(
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_local_experts=case.local_experts,
        num_experts=case.num_experts,
        top_k=case.top_k,
        activation=activation("swiglu"),
        weights=weights,
        inner=get(case.inner) if case.inner in weight_format(weights).inner_formats else None,
    )


def measure_cells(
    cells: Sequence[Cell],
    *,
    device: torch.device,
    gpu: str,
    clock: Clock,
    rates: Rates,
    rested: Clock | None = None,
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """The figures of one cell after the other, and what kept a peer from being measured. Trouble is a cell's note."""
    measured: dict[Cell, float] = {}
    for (name, weights), group in groupby(cells, key=lambda cell: (cell.case, cell.weights)):
        drawn: DrawnExperts | None = None
        experts: FusedExperts | None = None
        for cell in group:
            other = Cell(case=name, weights=BESIDE.get(weights, weights), size=cell.size)
            beside_us = measured.get(other) if weights in BESIDE else None
            why = None
            try:
                if drawn is None or experts is None:
                    spec = spec_of(CASES[name], weights)
                    drawn = DrawnExperts.draw(spec, device)
                    experts = FusedExperts(spec, drawn.weights, adopt=True)
                batches = draw_batches(cell, device)
                error = check_batch(experts, drawn, batches[0], str(cell))
                work = {"ours": stage_of(experts, batches)}
                times, rested_times = (
                    [us / len(batches) for us in by(work)["ours"]] if by is not None else []
                    for by in (clock, rested)
                )
                _check_replayed(experts, batches, str(cell))
                load = _load(batches, drawn)
                floor = floor_of(cell, load, read=rates.read, bf16=rates.bf16, fp8=rates.fp8)
                row = result(
                    cell,
                    gpu,
                    load=load,
                    floor=floor,
                    times=times,
                    rested_times=rested_times,
                    error=error,
                    beside_us=beside_us,
                )
                measured[cell] = row["us"]
                peer, why = _measure_peer(drawn, batches, clock)
                row |= peer_fields(row, peer, grouped_peers.NAMES[weights] if peer is not None else None)
                del batches
            except Exception as trouble:  # ours, torch's, or Triton's, which is none of both
                row = result(cell, gpu, note=f"{type(trouble).__name__}: {trouble}")
            yield row, why
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del drawn, experts
        if device.type == "cuda":
            torch.cuda.empty_cache()


def draw_batches(cell: Cell, device: torch.device) -> list[ReceivedRows]:
    many = CASES[cell.case].pairs(cell.size) >= MANY_PAIRS
    return [draw_batch(cell, device, seed) for seed in range(ROTATION_OF_MANY if many else ROTATION)]


def stage_of(experts: FusedExperts, batches: Sequence[ReceivedRows]) -> Any:
    def run() -> None:
        for batch in batches:
            experts(batch)

    return run


def _load(batches: Sequence[ReceivedRows], drawn: DrawnExperts) -> Load:
    ids = [batch.routes.ids_RK for batch in batches if isinstance(batch.routes, LocalRoutes)]
    return Load(
        rows=statistics.fmean(batch.num_rows for batch in batches),
        experts_hit=statistics.fmean(int(found[found >= 0].unique().numel()) for found in ids),
        bytes_per_expert=drawn.bytes_per_expert,
    )


def check_batch(experts: FusedExperts, drawn: DrawnExperts, batch: ReceivedRows, what: str) -> float:
    assert isinstance(batch.routes, LocalRoutes)
    assert batch.results is not None
    batch.results.rows_SH.fill_(torch.nan)
    experts(batch)
    x_RH = batch.rows.decode(torch.float32)
    y_RH = torch.zeros_like(x_RH)
    with exact_products():
        drawn.add_results(x_RH, batch.routes.ids_RK, batch.routes.weights_RK, y_RH)
    return check_results(batch.results.rows_SH, y_RH, what)


def _check_replayed(experts: FusedExperts, batches: Sequence[ReceivedRows], what: str) -> None:
    for batch in batches:
        assert batch.results is not None
        replayed = batch.results.rows_SH.clone()
        experts(batch)
        check_replayed(replayed, batch.results.rows_SH, what)


def _measure_peer(
    drawn: DrawnExperts, batches: Sequence[ReceivedRows], clock: Clock
) -> tuple[float | None, str | None]:
    """The µs of a peer, or why it has none."""
    try:
        work = grouped_peers.peer_of(drawn.weights, batches)
        if work is None:
            return None, None
        return statistics.median(clock({"peer": work})["peer"]) / len(batches), None
    except Exception as error:  # whatever another version's kernel answers
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
