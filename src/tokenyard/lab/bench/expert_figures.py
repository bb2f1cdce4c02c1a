"""The figures of `bench experts --device cuda`: what is measured, what it is held against, and how it is written down.

Nothing here needs a GPU. A *cell* is one figure: a case (the shape of a model, and one rank's share of it), a format of
the weights, and a number of pairs of a row and an expert. It is held against:

- **the floor**: the larger of two. The bytes of the experts that are really hit, of the rows that come in and of the
  results that go out, over the rate at which this GPU reads memory; and the arithmetic of both products over the rate
  of a plain matrix product of the same type, fp8 where rows and weights are, else bf16. Both measured in the same run;
- **the figure to reach**: what this project set out for, on one H200. `mxfp8` and `nvfp4` are to stay within 1.15 times
  `fp8_block128` and `mxint4` of the same run;
- **the peers**: torch's grouped products in the same run, and the best of others that was measured before ("recorded").
  They start with rows that are sorted by expert already, and end before weights and sums. Ours include all of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokenyard.errors import unknown_name
from tokenyard.experts.base import EXACT
from tokenyard.formats import get
from tokenyard.lab.bench.cuda_figures import number
from tokenyard.lab.bench.graph_clock import spread

BENCHMARK = "experts-cuda"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank's share of a model's layer, the formats of its weights, and how much work there is."""

    hidden_size: int
    intermediate_size: int
    local_experts: int
    num_experts: int
    top_k: int
    weights: tuple[str, ...]
    # Pairs of a row and a local expert; tokens, where all experts are local or the count is of tokens.
    sizes: tuple[int, ...]
    # Whether sizes are tokens that each of the ranks brings: a rank's experts get its share of all pairs.
    tokens_a_rank: bool = False
    inner: str = EXACT  # what stands between the products, where the weights have that choice
    arrives: tuple[
        tuple[str, str], ...
    ] = ()  # by weights, the format in which rows arrive, if it is not the usual one

    @property
    def all_local(self) -> bool:
        """Whether the rank holds the whole layer."""
        return self.local_experts == self.num_experts

    def pairs(self, size: int) -> int:
        """Pairs of a row and a local expert."""
        return size * self.top_k if self.all_local or self.tokens_a_rank else size

    @property
    def counts(self) -> str:
        """What sizes count."""
        return "tokens" if self.all_local else "tokens a rank" if self.tokens_a_rank else "rows"

    def __str__(self) -> str:
        """What a table's title says of it."""
        between = "" if self.inner == EXACT else f", {self.inner} between products of such weights"
        return (
            f"H {self.hidden_size}, I {self.intermediate_size}, {self.local_experts} of {self.num_experts} "
            f"experts, K {self.top_k}{between}; {self.counts}"
        )


CASES: dict[str, Case] = {
    "A": Case(
        hidden_size=7168,
        intermediate_size=2048,
        local_experts=32,
        num_experts=256,
        top_k=8,
        weights=("bf16", "fp8_block128", "mxfp8"),
        sizes=(32, 256, 1024, 8192),
    ),
    "B": Case(
        hidden_size=7168,
        intermediate_size=2048,
        local_experts=48,
        num_experts=384,
        top_k=8,
        weights=("mxint4", "nvfp4"),
        sizes=(8, 64, 512, 4096),
    ),
    "C": Case(
        hidden_size=2880,
        intermediate_size=2880,
        local_experts=128,
        num_experts=128,
        top_k=4,
        weights=("mxfp4",),
        sizes=(16, 128, 1024),
    ),
    # A, quantized once between the products.
    "D": Case(
        hidden_size=7168,
        intermediate_size=2048,
        local_experts=32,
        num_experts=256,
        top_k=8,
        weights=("fp8_block128",),
        sizes=(32, 256, 1024, 8192),
        inner="fp8_block128",
    ),
    # One rank's share of eight: DeepSeek-V4-Flash, V4-Pro and V3.
    "FLASH": Case(
        hidden_size=4096,
        intermediate_size=2048,
        local_experts=32,
        num_experts=256,
        top_k=6,
        weights=("fp8_block128", "mxfp4", "bf16"),
        sizes=(8, 128, 1024, 8192),
        tokens_a_rank=True,
        inner="fp8_block128",
        arrives=(("mxfp4", "mxfp8"),),
    ),
    "PRO": Case(
        hidden_size=7168,
        intermediate_size=3072,
        local_experts=48,
        num_experts=384,
        top_k=6,
        weights=("fp8_block128", "mxfp4", "bf16"),
        sizes=(8, 128, 1024, 8192),
        tokens_a_rank=True,
        inner="fp8_block128",
        arrives=(("mxfp4", "mxfp8"),),
    ),
    "V3": Case(
        hidden_size=7168,
        intermediate_size=2048,
        local_experts=32,
        num_experts=256,
        top_k=8,
        weights=("fp8_block128",),
        sizes=(8, 128, 1024, 8192),
        tokens_a_rank=True,
        inner="fp8_block128",
    ),
}

# The format in which rows arrive, where it is not bf16.
ARRIVES_AS = {"fp8_block128": "fp8_block128", "mxfp8": "mxfp8"}

# µs on one H200, by the sizes of the case.
TARGETS: dict[tuple[str, str], tuple[float, ...]] = {
    ("A", "bf16"): (425, 650, 680, 1350),
    ("A", "fp8_block128"): (230, 345, 370, 1000),
    ("B", "mxint4"): (58, 230, 350, 820),
    ("C", "mxfp4"): (235, 540, 850),
    ("D", "fp8_block128"): (230, 345, 370, 950),
    ("FLASH", "fp8_block128"): (155, 210, 450, 2650),
    ("FLASH", "mxfp4"): (110, 185, 560, 2950),
    ("FLASH", "bf16"): (280, 385, 630, 4150),
    ("PRO", "fp8_block128"): (425, 830, 1300, 7000),
    ("PRO", "mxfp4"): (268, 580, 1650, 8200),
    ("V3", "fp8_block128"): (300, 400, 950, 6200),
}
# Formats that are to stay within a multiple of another one.
WITHIN = 1.15
BESIDE = {"mxfp8": "fp8_block128", "nvfp4": "mxint4"}

# The best peer on one H200 that was measured before: two grouped products and the activation, without sorting and sums.
RECORDED_PEER = "the best that was measured before, on an H200; rows sorted beforehand, no sums"
PEER: dict[tuple[str, str], tuple[float, ...]] = {
    ("A", "bf16"): (417, 639, 668, 1429),
    ("A", "fp8_block128"): (230, 336, 377, 1140),
    ("B", "mxint4"): (65, 270, 436, 1302),
    ("C", "mxfp4"): (271, 622, 1063),
}
# No cell may be slower than the best peer by more.
MOST_OVER_PEER = 1.15


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure."""

    case: str
    weights: str
    size: int  # pairs, or tokens: see `Case.sizes`

    @property
    def rows_format(self) -> str:
        """The format in which rows arrive."""
        return dict(CASES[self.case].arrives).get(self.weights) or ARRIVES_AS.get(self.weights, "bf16")

    def __str__(self) -> str:
        return f"{self.case}, {self.weights}, {self.size} {CASES[self.case].counts}"


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell that a row of a document is about."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def grid(cases: Sequence[str] = (), weights: Sequence[str] = ()) -> list[Cell]:
    """The cells of a run: all of them, or those of some cases and formats.

    >>> [str(cell) for cell in grid(["C"])]
    ['C, mxfp4, 16 tokens', 'C, mxfp4, 128 tokens', 'C, mxfp4, 1024 tokens']
    """
    for name in cases:
        if name not in CASES:
            raise unknown_name("case", name, CASES)
    known = list(dict.fromkeys(format for case in CASES.values() for format in case.weights))
    for name in weights:
        if name not in known:
            raise unknown_name("weight format of these cases", name, known)
    return [
        Cell(case=name, weights=format, size=size)
        for name, case in CASES.items()
        if not cases or name in cases
        for format in case.weights
        if not weights or format in weights
        for size in case.sizes
    ]


# -- Floors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the batches of a cell are, on average: what cannot be avoided follows from it."""

    rows: float  # that arrive
    experts_hit: float
    bytes_per_expert: float


@dataclass(frozen=True)
class Floor:
    """The least µs that a cell can take, by bytes and by arithmetic."""

    nbytes: float
    flops: float
    by_bytes: float
    by_flops: float

    @property
    def us(self) -> float:
        """The larger one holds."""
        return max(self.by_bytes, self.by_flops)


def floor_of(cell: Cell, load: Load, *, read: float, bf16: float, fp8: float | None) -> Floor:
    """The floor of a cell on a GPU with these rates, per µs."""
    case = CASES[cell.case]
    hidden, inner = case.hidden_size, case.intermediate_size
    ids_and_weights = case.top_k * (4 + 4)
    per_row = get(cell.rows_format).bytes_per_row(hidden) + ids_and_weights + 2 * hidden
    nbytes = load.experts_hit * load.bytes_per_expert + load.rows * per_row
    flops = 2.0 * case.pairs(cell.size) * 3 * hidden * inner
    # Where this torch has no fp8 product, nobody knows its rate: the floor is of bytes, then.
    rate = fp8 if cell.rows_format != "bf16" else bf16
    return Floor(nbytes, flops, nbytes / read, flops / rate if rate else 0.0)


# -- Rows of the table -------------------------------------------------------------------------------------


def result(
    cell: Cell,
    gpu: str,
    *,
    load: Load | None = None,
    floor: Floor | None = None,
    times: Sequence[float] = (),
    rested_times: Sequence[float] = (),
    error: float | None = None,
    beside_us: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """A cell's figures as plain values: `times` are µs, one of each round; none, where `note` says what went wrong.

    Figures and peers are held against `times`; against `rested_times`, of rounds after a rest, in columns of their own.
    `beside_us` is the time of the format that this one is held against, in the same run.
    """
    timed = spread("us", times)
    us = timed["us"]
    rested_us = statistics.median(rested_times) if rested_times else None
    known = "H200" in gpu
    target = _at(TARGETS, cell) if known else None
    if target is None and beside_us is not None:
        target = WITHIN * beside_us
    row = {
        **asdict(cell),
        "rows_format": cell.rows_format,
        "pairs": CASES[cell.case].pairs(cell.size),
        "arrived_rows": load.rows if load else None,
        "experts_hit": load.experts_hit if load else None,
        **timed,
        "relative_error": error,
        "bytes": floor.nbytes if floor else None,
        "flops": floor.flops if floor else None,
        "floor_us": floor.us if floor else None,
        "floor_by": ("bytes" if floor.by_bytes >= floor.by_flops else "products") if floor else None,
        "floor_ratio": us / floor.us if us is not None and floor else None,
        "target_us": target,
        "target_is": f"{WITHIN} × {BESIDE[cell.weights]}" if target and cell.weights in BESIDE else None,
        "target_ratio": us / target if us is not None and target else None,
        "met": us <= target if us is not None and target is not None else None,
        "rested_us": rested_us,
        "rested_met": rested_us <= target if rested_us is not None and target is not None else None,
        "recorded_peer_us": _at(PEER, cell) if known else None,
        "note": note,
    }
    return row | peer_fields(row, None, None)


def peer_fields(row: dict[str, Any], us: float | None, name: str | None) -> dict[str, Any]:
    """The columns of a peer of this run, and how ours compares with the best peer that is known."""
    known = [time for time in (us, row["recorded_peer_us"]) if time is not None]
    best = min(known, default=None)
    return {
        "peer_us": us,
        "peer": name,
        "best_peer_us": best,
        "peer_ratio": row["us"] / best if best is not None and row["us"] is not None else None,
        "rested_peer_ratio": row["rested_us"] / best
        if best is not None and row["rested_us"] is not None
        else None,
    }


def _at(table: dict[tuple[str, str], tuple[float, ...]], cell: Cell) -> float | None:
    figures, sizes = table.get((cell.case, cell.weights)), CASES[cell.case].sizes
    return figures[sizes.index(cell.size)] if figures and cell.size in sizes else None


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells that failed, and why."""
    return [f"{cell_of(row)}: {row['note']}" for row in rows if row["note"]]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the figures come to, in sentences; nothing where nothing is known."""
    lines = []
    fixed = [row for row in rows if row["met"] is not None and row["target_is"] is None]
    beside = [row["met"] for row in rows if row["met"] is not None and row["target_is"] is not None]
    held = [row for row in rows if row["peer_ratio"] is not None]
    if fixed:
        lines.append(f"{sum(row['met'] for row in fixed)} of {len(fixed)} figures reached")
    if beside:
        names = " and ".join(f"{name} of {other}" for name, other in BESIDE.items())
        lines.append(f"{sum(beside)} of {len(beside)} within {WITHIN} × ({names})")
    if held:
        slow = [row for row in held if row["peer_ratio"] > MOST_OVER_PEER]
        faster = sum(row["peer_ratio"] <= 1 for row in held)
        lines.append(
            f"{faster} of {len(held)} at least as fast as the best peer, {len(slow)} slower than "
            f"{MOST_OVER_PEER} × it" + _named(slow)
        )
    if any(row.get("rested_us") is not None for row in fixed):
        slow = [row for row in held if (row["rested_peer_ratio"] or 0) > MOST_OVER_PEER]
        lines.append(
            f"after a rest {sum(bool(row['rested_met']) for row in fixed)} figures reached, {len(slow)} slower than "
            f"{MOST_OVER_PEER} × the best peer" + _named(slow)
        )
    return lines


def _named(rows: Sequence[dict[str, Any]]) -> str:
    """The cells that a sentence ends with, if there are any."""
    return f": {'; '.join(str(cell_of(row)) for row in rows)}" if rows else ""


# -- Markdown ----------------------------------------------------------------------------------------------


def render_markdown(document: dict[str, Any]) -> str:
    """A document of `bench experts --device cuda` as tables for a page: ours, the floor, and the best peer."""
    by_case: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in document["results"]:
        by_case.setdefault(row["case"], {}).setdefault(row["weights"], {})[row["size"]] = row
    tables = []
    for name, by_format in by_case.items():
        sizes = sorted({size for found in by_format.values() for size in found})
        text = [
            f"| {name}: {CASES[name]} | " + " | ".join(f"{size:,}" for size in sizes) + " |",
            "| --- " * (len(sizes) + 1) + "|",
        ]
        for format, found in by_format.items():
            cells = [_with_floor_and_peer(found.get(size)) for size in sizes]
            text.append(f"| `{format}` | " + " | ".join(cells) + " |")
        tables.append("\n".join(text))
    return "\n\n".join(tables)


def _with_floor_and_peer(row: dict[str, Any] | None) -> str:
    if row is None or row["us"] is None:
        return "–" if row is not None else ""
    peer = f" [{number(row['best_peer_us'])}]" if row["best_peer_us"] is not None else ""
    return f"{number(row['us'])} ({number(row['floor_us'])}){peer}"
