"""How fast are experts? The whole stage beside the floor, a target, and peers, on a GPU and on a CPU.

**What is timed.** From received rows to results where `combine` reads them: sorting pairs by expert, both products with
the activation, weights and sums. On a GPU (`FUSED`) a CUDA graph holds several batches with routes of their
own; weights of the experts that are hit are far larger than the cache. Figures are of rounds without a
pause, and beside them of rounds after a rest. On a CPU (`GROUPED`) ours and the peer take turns.

**Batches.** Routes are uniform over all experts of the layer. A rank gets the rows that have an expert of its own, cut
so that there are exactly as many pairs of a row and an expert as the cell says.

**Why it can be trusted.** Before a cell is timed, one of its batches is compared with decoded weights and float32
products at full size; after it, the results of a graph are compared with runs outside of it, bit by bit. A cell that
differs is shown with the reason and without a time.

**The floor** is the larger of two times: the bytes of the experts that are really hit, of the rows that arrive and of
the results, over the rate at which the machine reads memory; and the operations of both products over the rate of a
plain matrix product of the same type, fp8 where rows and weights are. Both rates are measured in the same run.

`Clock` and `device` are arguments: all but the clock of a GPU runs on a CPU, too, with Triton's interpreter.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from tokenyard.experts import Experts, FusedExperts, GroupedExperts
from tokenyard.formats import get
from tokenyard.machine_rates import Clock, Work
from tokenyard.rows import CombineBuffer, ExpertRows, LocalRoutes, ReceivedRows
from tokenyard_lab.bench.clock import give_back_memory
from tokenyard_lab.bench.drawn_experts import DrawnExperts, check_replayed, check_results, exact_products
from tokenyard_lab.bench.experts_peers import Peer, grouped_peer, host_peer
from tokenyard_lab.bench.machine_rates import Machine, Rates
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.bench.shapes import BESIDE, PEERS, TARGETS, WITHIN, Case, Cell

ROUNDS = 15
# Batches of a graph; fewer, where a batch has many pairs.
ROTATION = 8
MANY_PAIRS = 4096
ROTATION_OF_MANY = 3

TORCH, RECORDED = "torch", "recorded"
COLUMNS = ("floor_by", "relative_error", "peer_not_measured")
NOTES = (
    "ours sort, weight and sum; peers get rows that are sorted beforehand, and do neither",
    "torch: F.grouped_mm, or torch._scaled_grouped_mm with a scale for each row; recorded: the best that was measured "
    "before, on an H200",
    f"targets of {' and '.join(BESIDE)}: {WITHIN} × {' and '.join(BESIDE.values())} of the same run",
)


PeerOf = Callable[[DrawnExperts, Sequence[ReceivedRows]], Peer | None]


@dataclass(frozen=True)
class Kind:
    """Which experts are measured, beside which peer, and how."""

    experts: type[Experts]
    peer: PeerOf
    in_place: bool  # whether there is a buffer that results are written into
    takes_turns: bool  # whether ours and the peer take turns in the same rounds
    us: float  # in one unit of the figures


FUSED = Kind(FusedExperts, grouped_peer, in_place=True, takes_turns=False, us=1.0)
GROUPED = Kind(GroupedExperts, host_peer, in_place=False, takes_turns=True, us=1e3)


# -- Batches -----------------------------------------------------------------------------------------------


def draw_routes(case: Case, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Local ids and weights of the rows that arrive: uniform choices, exactly as many pairs as the case wants.

    >>> from tokenyard_lab.bench.shapes import CASES
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


def draw_batch(cell: Cell, device: torch.device, seed: int, *, in_place: bool = True) -> ReceivedRows:
    """A batch as an exchange delivers it, with a place for its results."""
    ids_RK, weights_RK = draw_routes(cell.shape, cell.size, seed)
    rows, draw = ids_RK.shape[0], torch.Generator(device).manual_seed(seed)
    x_RH = torch.randn(rows, cell.shape.hidden_size, device=device, dtype=torch.bfloat16, generator=draw)
    return ReceivedRows(
        rows=get(cell.rows_format).encode(x_RH),
        routes=LocalRoutes(ids_RK=ids_RK.to(device), weights_RK=weights_RK.to(device)),
        counts_W=(rows,),
        results=CombineBuffer(rows_SH=torch.empty_like(x_RH), slots_R=None) if in_place else None,
    )


def draw_batches(cell: Cell, device: torch.device, *, in_place: bool = True) -> list[ReceivedRows]:
    many = cell.shape.pairs(cell.size) >= MANY_PAIRS
    sets = (ROTATION_OF_MANY if many else ROTATION) if in_place else 1
    return [draw_batch(cell, device, seed, in_place=in_place) for seed in range(sets)]


# -- Floors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load:
    """Means over the batches of a cell, from which its floor is computed."""

    rows: float  # that arrive
    experts_hit: float
    bytes_per_expert: float

    @classmethod
    def of(cls, batches: Sequence[ReceivedRows], drawn: DrawnExperts) -> Load:
        """The load of some batches."""
        ids = [batch.routes.ids_RK for batch in batches if isinstance(batch.routes, LocalRoutes)]
        return cls(
            rows=statistics.fmean(batch.num_rows for batch in batches),
            experts_hit=statistics.fmean(int(found[found >= 0].unique().numel()) for found in ids),
            bytes_per_expert=drawn.bytes_per_expert,
        )


@dataclass(frozen=True)
class Floor:
    """The least µs that a cell can take, by bytes and by arithmetic."""

    nbytes: float
    flops: float
    by_bytes: float
    by_flops: float

    @property
    def us(self) -> float:
        """The floor in µs: the larger of the two."""
        return max(self.by_bytes, self.by_flops)


def floor_of(cell: Cell, load: Load, rates: Rates) -> Floor:
    """The floor of a cell on a machine with these rates."""
    hidden, inner = cell.shape.hidden_size, cell.shape.intermediate_size
    ids_and_weights = cell.shape.top_k * (4 + 4)
    per_row = get(cell.rows_format).bytes_per_row(hidden) + ids_and_weights + 2 * hidden
    nbytes = load.experts_hit * load.bytes_per_expert + load.rows * per_row
    flops = 2.0 * cell.shape.pairs(cell.size) * 3 * hidden * inner
    # Where this torch has no fp8 product, its rate is not known: the floor is then that of bytes.
    rate = rates.fp8 if cell.rows_format != "bf16" else rates.product
    return Floor(nbytes, flops, nbytes / rates.read, flops / rate if rate else 0.0)


# -- Figures -----------------------------------------------------------------------------------------------


def experts_record(
    cell: Cell,
    *,
    is_h200: bool,
    load: Load | None = None,
    floor: Floor | None = None,
    times: Sequence[float] = (),
    rested_times: Sequence[float] = (),
    error: float | None = None,
    beside: float | None = None,
    us: float = 1.0,
    note: str = "",
) -> Record:
    """The record of a cell. `times` are µs, one for each round; there are none if `note` says what went wrong.

    `beside` is the time of the format that this one's target refers to, in the same run; `us` is the unit of figures
    in µs.
    """
    target = cell.figure_of(TARGETS) if is_h200 else None
    if target is None and beside is not None:
        target = WITHIN * beside
    recorded = cell.figure_of(PEERS) if is_h200 else None
    details: dict[str, object] = {"rows_format": cell.rows_format, "pairs": cell.shape.pairs(cell.size)}
    if load and floor:
        by = "bytes" if floor.by_bytes >= floor.by_flops else "products"
        details |= {"floor_by": by, "bytes": floor.nbytes, "flops": floor.flops}
        details |= {"arrived_rows": load.rows, "experts_hit": load.experts_hit, "relative_error": error}
    if beside is not None:
        details["target_is"] = f"{WITHIN} × {BESIDE[cell.weights]}"
    return Record(
        parameters=cell.parameters("size" if cell.case else "tokens"),
        ours=Spread.of(time / us for time in times) if times else None,
        rested=Spread.of(time / us for time in rested_times) if rested_times else None,
        floor=Spread(floor.us / us) if floor else None,
        target=target,
        peers={RECORDED: Spread(recorded)} if recorded is not None else {},
        details=details,
        note=note,
    )


def measure_experts(cells: Sequence[Cell], *, kind: Kind, machine: Machine) -> Iterator[Record]:
    """The records of the cells, one after the other. An error in a cell becomes the note of its record."""
    device, is_h200 = machine.device, "H200" in machine.name
    measured: dict[Cell, float] = {}
    for (_, weights), group in groupby(cells, key=lambda cell: (cell.case, cell.weights)):
        drawn: DrawnExperts | None = None
        experts: Experts | None = None
        for cell in group:
            other = replace(cell, weights=BESIDE.get(weights, weights))
            beside = measured.get(other) if weights in BESIDE else None
            try:
                if drawn is None or experts is None:
                    drawn = DrawnExperts.draw(cell.spec, device)
                    # Copied, as a layer does: on a GPU, experts hold their own weights in another order.
                    experts = kind.experts(cell.spec, drawn.weights, adopt=device.type == "cpu")
                batches = draw_batches(cell, device, in_place=kind.in_place)
                error = check_batch(experts, drawn, batches[0], str(cell))
                works: dict[str, Work] = {"ours": stage_of(experts, batches)}
                peer = kind.peer(drawn, batches) if kind.takes_turns else None
                if peer is not None:
                    works["peer"] = peer.work
                times = machine.clock(works)
                rested_times = machine.rested(works)["ours"] if machine.rested is not None else []
                if kind.in_place:
                    _check_replayed(experts, batches, str(cell))
                load = Load.of(batches, drawn)
                record = experts_record(
                    cell,
                    is_h200=is_h200,
                    load=load,
                    floor=floor_of(cell, load, machine.rates),
                    times=[us / len(batches) for us in times["ours"]],
                    rested_times=[us / len(batches) for us in rested_times],
                    error=error,
                    beside=beside,
                    us=kind.us,
                )
                if record.ours is not None:
                    measured[cell] = record.ours.median
                if peer is not None:
                    record = replace(
                        record,
                        peers={peer.name: Spread.of(time / kind.us for time in times["peer"])},
                        ratios={"peer / ours": Spread.ratio(times["peer"], times["ours"])},
                        details={**record.details, "difference": peer.difference},
                    )
                elif not kind.takes_turns:
                    record = _with_torch(record, kind.peer, drawn, batches, machine.clock)
                del batches
            except Exception as trouble:  # ours, torch's or Triton's, which have no common base
                record = experts_record(cell, is_h200=is_h200, note=f"{type(trouble).__name__}: {trouble}")
            yield record
            give_back_memory(device)
        del drawn, experts
        give_back_memory(device)


def _with_torch(
    record: Record, peer_of: PeerOf, drawn: DrawnExperts, batches: Sequence[ReceivedRows], clock: Clock
) -> Record:
    """A record with the time of torch's products, or with the reason why they could not be measured."""
    try:
        peer = peer_of(drawn, batches)
        if peer is None:
            return record
        spread = Spread.of(us / len(batches) for us in clock({"peer": peer.work})["peer"])
    except Exception as error:  # another version's kernel may refuse anything
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return replace(record, details={**record.details, "peer_not_measured": why})
    return replace(
        record, peers={TORCH: spread, **record.peers}, details={**record.details, "peer": peer.name}
    )


def stage_of(experts: Experts, batches: Sequence[ReceivedRows]) -> Work:
    """Work that runs the experts on all batches."""

    def run() -> None:
        for batch in batches:
            experts(batch)

    return run


def results_of(experts: Experts, batch: ReceivedRows) -> Tensor:
    """The results of experts for a batch: as they are returned, or from the buffer of the batch."""
    result = experts(batch)
    if isinstance(result, ExpertRows):
        return result.rows_RH
    assert batch.results is not None
    return batch.results.rows_SH


def check_batch(experts: Experts, drawn: DrawnExperts, batch: ReceivedRows, what: str) -> float:
    """The relative error of the results of a batch; raise if it is too large."""
    assert isinstance(batch.routes, LocalRoutes)
    if batch.results is not None:
        batch.results.rows_SH.fill_(torch.nan)
    x_RH = batch.rows.decode(torch.float32)
    y_RH = torch.zeros_like(x_RH)
    with exact_products():
        drawn.add_results(x_RH, batch.routes.ids_RK, batch.routes.weights_RK, y_RH)
    return check_results(results_of(experts, batch), y_RH, what)


def _check_replayed(experts: Experts, batches: Sequence[ReceivedRows], what: str) -> None:
    for batch in batches:
        assert batch.results is not None
        replayed = batch.results.rows_SH.clone()
        check_replayed(replayed, results_of(experts, batch), what)
