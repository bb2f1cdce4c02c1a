"""The cells of `bench dispatch --device cuda`, and the floors, targets and peers that figures are compared with.

Nothing here needs a GPU. A *cell* is one figure: an operation, for a number of ranks and tokens, in one format. It is
compared with three things:

- **the floor**: the bytes that the operation cannot avoid, read once and written once, over the bandwidth of a large
  copy on the same GPU in the same run. A dispatch reads the plain rows, and writes every encoded row with its ids and
  weights, once for each (token, rank). A combine reads every result, and writes the sums. Batches of a few tokens are
  in the cache, and take as long as their launches do: their floor says little;
- **the target**: what this project set out to reach;
- **the peer**: FlashInfer's one-sided exchange, which gets rows that are encoded already. Our times include encoding.

Targets and the peer's stored times hold for one shape on one kind of GPU, and are left out elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Literal

from tokenyard.formats import get
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.bench.shapes import Shape

Operation = Literal["dispatch", "round trip", "combine"]
Launch = Literal["one for all ranks", "a stream per rank"]
ALL_RANKS: Launch = "one for all ranks"
PER_RANK: Launch = "a stream per rank"

TABLE_WIRES = ("bf16", "mxfp8", "nvfp4(global_scale=448.0)")
EXTRA_WIRES = ("fp8_block128", "nvfp4")
# (ranks, tokens of each) if neither is chosen. If one is chosen, `WORLDS` or `TOKENS` replaces the other.
PAIRS = ((4, 16), (4, 128), (4, 1024), (4, 4096), (8, 1024), (8, 4096))
QUICK_PAIRS = ((4, 16), (4, 1024))
WORLDS = (4, 8)
TOKENS = (16, 128, 1024, 4096)
# Up to the first number of tokens a round trip is measured, too; from the second on, a combine alone.
SMALL_BATCH = 64
LARGE_BATCH = 1024
# The most streams of one captured graph that wait for each other: eight of them hung in some runs.
MOST_STREAMS = 4


@dataclass(frozen=True, kw_only=True)
class DispatchCell:
    """One figure."""

    operation: Operation
    ranks: int
    tokens: int  # of each rank
    wire: str
    launch: Launch = ALL_RANKS

    def __str__(self) -> str:
        streams = "" if self.launch == ALL_RANKS else f", {self.launch}"
        return f"{self.operation}, W={self.ranks}, T={self.tokens}, {self.wire}{streams}"


_Key = tuple[Operation, int, int]
_ByWire = dict[_Key, tuple[float, float, float]]

# µs on one H200, by `TABLE_WIRES`.
TARGETS: _ByWire = {
    ("dispatch", 4, 16): (9.5, 10, 10.5),
    ("dispatch", 4, 128): (15, 13.5, 13.5),
    ("dispatch", 4, 1024): (78, 52, 44),
    ("dispatch", 4, 4096): (285, 180, 150),
    ("dispatch", 8, 1024): (205, 130, 105),
    ("dispatch", 8, 4096): (770, 475, 370),
    ("round trip", 4, 16): (17, 17.5, 18),
}
# The same, as a multiple of the floor.
TARGET_RATIOS: dict[_Key, float] = {("combine", 4, 4096): 1.08}

# FlashInfer 0.7.2, one-sided, on one H200, a stream per rank in one graph: µs by `TABLE_WIRES`, without quantizing.
PEER = "FlashInfer"
STORED_PEER = "FlashInfer 0.7.2, stored, H200"
STORED: _ByWire = {
    ("dispatch", 4, 16): (12.2, 12.1, 11.7),
    ("dispatch", 4, 128): (17.8, 13.8, 12.6),
    ("dispatch", 4, 1024): (84.0, 51.8, 38.6),
    ("dispatch", 4, 4096): (299, 171, 124),
    ("dispatch", 8, 128): (42.1, 31.4, 24.7),
    ("dispatch", 8, 1024): (250, 196, 161),
    ("dispatch", 8, 4096): (951, 743, 609),
    ("round trip", 4, 16): (21.9, 22.0, 21.4),
    ("round trip", 4, 32): (22.5, 22.1, 21.8),
}
# µs that the peer takes to quantize in a separate pass, where that was measured. bf16 rows are not quantized.
QUANTIZER = "FlashInfer + quantizer"
QUANTIZER_ADDS: _ByWire = {
    ("dispatch", 4, 1024): (0, 21, 18),
    ("dispatch", 4, 4096): (0, 84, 70),
}


def dispatch_grid(
    ranks: Sequence[int] = (), tokens: Sequence[int] = (), wires: Sequence[str] = (), *, quick: bool = False
) -> list[DispatchCell]:
    """The cells of a run: those of the targets, or those that were asked for.

    >>> [str(cell) for cell in dispatch_grid([2], [16], ["bf16"])]  # doctest: +NORMALIZE_WHITESPACE
    ['dispatch, W=2, T=16, bf16', 'round trip, W=2, T=16, bf16',
     'dispatch, W=2, T=16, bf16, a stream per rank', 'round trip, W=2, T=16, bf16, a stream per rank']
    """
    chosen = ranks or tokens
    pairs = list(product(ranks or WORLDS, tokens or TOKENS)) if chosen else QUICK_PAIRS if quick else PAIRS
    names = list(wires) or [*TABLE_WIRES, *(() if quick else EXTRA_WIRES)]
    cells, apart = [], []
    operations: tuple[Operation, ...] = ("dispatch", "round trip", "combine")
    for operation, (world, count), wire in product(operations, pairs, names):
        if operation == "round trip" and count > SMALL_BATCH:
            continue
        if operation == "combine" and (count < LARGE_BATCH or wire != names[0]):
            continue  # the way back does not depend on the format of the way out
        cell = DispatchCell(operation=operation, ranks=world, tokens=count, wire=wire)
        cells.append(cell)
        if count <= SMALL_BATCH and world <= MOST_STREAMS and wire not in EXTRA_WIRES:
            apart.append(replace(cell, launch=PER_RANK))
    return [*cells, *apart]


@dataclass(frozen=True)
class Traffic:
    """Bytes that an operation of all ranks cannot avoid."""

    read: int
    written: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written."""
        return self.read + self.written


def traffic(cell: DispatchCell, shape: Shape, rows_sent: int) -> Traffic:
    """The bytes of a cell in which this number of rows travels, counted once for each (token, rank)."""
    hidden = shape.hidden_size
    batch = cell.ranks * cell.tokens * hidden * 2  # bf16 goes in, and comes out
    ids_and_weights = shape.top_k * (4 + 4)
    out = Traffic(batch, rows_sent * (get(cell.wire).bytes_per_row(hidden) + ids_and_weights))
    back = Traffic(rows_sent * get(shape.combine_wire).bytes_per_row(hidden), batch)
    return {"dispatch": out, "combine": back, "round trip": out + back}[cell.operation]


def dispatch_record(
    cell: DispatchCell,
    shape: Shape,
    gpu: str,
    *,
    rows_sent: int | None,
    copy_bytes_per_us: float,
    times: Sequence[float] = (),
    note: str = "",
) -> Record:
    """The record of a cell. `times` are µs, one for each round; there are none if `note` says what went wrong."""
    moved = traffic(cell, shape, rows_sent) if rows_sent is not None else None
    floor = moved.nbytes / copy_bytes_per_us if moved is not None else None
    # Targets and the peer's stored times are for one shape on one GPU.
    known = shape == Shape() and "H200" in gpu
    target = _by_wire(TARGETS, cell) if known and cell.launch == ALL_RANKS else None
    over_floor = TARGET_RATIOS.get((cell.operation, cell.ranks, cell.tokens))
    if target is None and known and floor is not None and over_floor is not None:
        target = over_floor * floor
    record = Record(
        parameters=asdict(cell),
        ours=Spread.of(times) if times else None,
        floor=Spread(floor) if floor is not None else None,
        target=target,
        details={
            "rows_sent": rows_sent,
            "bytes_read": moved.read if moved is not None else None,
            "bytes_written": moved.written if moved is not None else None,
        },
        note=note,
    )
    stored = _by_wire(STORED, cell) if known else None
    return record if stored is None else with_peer(record, cell, stored, STORED_PEER)


def with_peer(record: Record, cell: DispatchCell, us: float, source: str) -> Record:
    """A record with the peer's time for encoded rows and, where that is known, with its time including a quantizer."""
    adds = 0.0 if cell.wire == "bf16" else _by_wire(QUANTIZER_ADDS, cell)
    quantizer = {QUANTIZER: Spread(us + adds)} if adds is not None else {}
    return replace(
        record, peers={PEER: Spread(us), **quantizer}, details={**record.details, "peer_source": source}
    )


def _by_wire(table: _ByWire, cell: DispatchCell) -> float | None:
    figures = table.get((cell.operation, cell.ranks, cell.tokens))
    if figures is None or cell.wire not in TABLE_WIRES:
        return None
    return figures[TABLE_WIRES.index(cell.wire)]
