"""The figures of `bench layer --device cuda`: a whole layer, beside the same experts behind an allgather.

Nothing here needs a GPU. A *cell* is a layer on W virtual ranks with so many tokens each. Its two contestants compute
the same: rows go out, the experts of every rank run on them, sums come home. They differ in how rows travel, and take
turns in the same rounds; the ratio is taken round by round. Experts take most of the time in both, so the travelling
alone is measured, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokenyard.lab.bench.cuda_figures import number
from tokenyard.lab.bench.expert_figures import ARRIVES_AS
from tokenyard.lab.bench.graph_clock import spread

BENCHMARK = "layer-cuda"
TOKENS = (128, 512, 4096)
WEIGHTS = ("bf16",)
WORLD = 4
# What #40960 reports: ms by one-sided writes and by an allgather, on eight B200 with links between them.
REPORTED_MS = (35.0, 40.0)
REPORTED_RATIO = REPORTED_MS[0] / REPORTED_MS[1]
REPORTED_BY = "#40960"
REPORTED_ON = "8 B200 with links"


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What all cells of a run have in common. The default is DeepSeek-V3's."""

    hidden_size: int = 7168
    intermediate_size: int = 2048
    num_experts: int = 256
    top_k: int = 8


@dataclass(frozen=True, kw_only=True)
class LayerCell:
    """One figure."""

    world: int
    num_tokens: int  # of each rank
    weights: str

    @property
    def wire(self) -> str:
        """The format on the way out: what these experts like best."""
        return ARRIVES_AS.get(self.weights, "bf16")

    def __str__(self) -> str:
        return f"W={self.world}, T={self.num_tokens}, {self.weights} weights, {self.wire} rows"


def cell_of(row: dict[str, Any]) -> LayerCell:
    """The cell that a row of a document is about."""
    return LayerCell(**{field.name: row[field.name] for field in fields(LayerCell)})


def layer_grid(
    world: int = WORLD, tokens: Sequence[int] = TOKENS, weights: Sequence[str] = WEIGHTS
) -> list[LayerCell]:
    """The cells of a run.

    >>> [str(cell) for cell in layer_grid(4, [128], ["bf16", "fp8_block128"])]
    ['W=4, T=128, bf16 weights, bf16 rows', 'W=4, T=128, fp8_block128 weights, fp8_block128 rows']
    """
    return [
        LayerCell(world=world, num_tokens=count, weights=format) for format in weights for count in tokens
    ]


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """µs of each round: the whole layer and the travelling alone, of both contestants."""

    layer: Sequence[float]
    allgather_layer: Sequence[float]
    exchange: Sequence[float]
    allgather: Sequence[float]


def layer_result(
    cell: LayerCell,
    *,
    times: LayerTimes | None = None,
    errors: tuple[float, float] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """A cell's figures as plain values; no times, where `note` says what went wrong."""
    found = times or LayerTimes(layer=(), allgather_layer=(), exchange=(), allgather=())
    pairs = zip(found.layer, found.allgather_layer, strict=True)
    alone = zip(found.exchange, found.allgather, strict=True)
    ratio = spread("ratio", [ours / theirs for ours, theirs in pairs])
    return {
        **asdict(cell),
        "wire": cell.wire,
        **spread("us", found.layer),
        **spread("allgather_us", found.allgather_layer),
        **ratio,
        "faster": ratio["ratio"] < 1 if times else None,
        **spread("exchange_us", found.exchange),
        **spread("allgather_exchange_us", found.allgather),
        **spread("exchange_ratio", [ours / theirs for ours, theirs in alone]),
        "relative_error": errors[0] if errors else None,
        "allgather_relative_error": errors[1] if errors else None,
        "note": note,
    }


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells that failed, and why."""
    return [f"{cell_of(row)}: {row['note']}" for row in rows if row["note"]]


def render_markdown(document: dict[str, Any]) -> str:
    """A document of `bench layer` as a table for a page."""
    text = [
        "| µs, all ranks | `one_sided` | allgather | ratio | rows alone: `one_sided` | allgather | ratio |",
        "| --- " * 7 + "|",
    ]
    for row in document["results"]:
        name = f"| `{row['weights']}`, W={row['world']}, T={row['num_tokens']}"
        if row["us"] is None:
            text.append(" | ".join([name, *["–"] * 6]) + " |")
            continue
        cells = [
            number(row["us"]),
            number(row["allgather_us"]),
            f"{row['ratio']:.3f}",
            number(row["exchange_us"]),
            number(row["allgather_exchange_us"]),
            f"{row['exchange_ratio']:.2f}",
        ]
        text.append(" | ".join([name, *cells]) + " |")
    return "\n".join(text)
