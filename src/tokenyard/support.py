"""Tables of what is supported, made from the declarations of the parts.

Exchanges, formats and experts publish what they can carry (`supports`). The planner asks these declarations,
and so do the tables here: a combination cannot be supported in the documentation and refused by a plan. The
tables are generated, never written: `tokenyard support` shows them, `docs/generate` puts them on a page.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tokenyard.errors import Reason
from tokenyard.exchange import EXCHANGES, ExchangeSpec, Transport
from tokenyard.experts import ACTIVATIONS, EXPERTS, Experts, ExpertsSpec, activation
from tokenyard.experts.spec import takes_rows
from tokenyard.formats import FORMATS, WEIGHT_FORMATS, Format, for_dtype, weight_format
from tokenyard.formats import get as formats_get
from tokenyard.formats.base import ROW_DTYPES, dtype_name
from tokenyard.integrations.huggingface import FAMILIES, layers_from_config
from tokenyard.routing import PLACEMENTS, ROUTERS, Placement

YES, NO = "✓", "–"

_DEVICES = {"cpu": "CPU", "cuda": "GPU"}

# The width of DeepSeek-V3's rows, for the column of bytes.
_HIDDEN_SIZE = 7168


@dataclass(frozen=True, kw_only=True)
class SupportTable:
    """A title, a sentence on how to read it, and cells of text."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. The column without a heading is called `what`."""
        columns = [plain(column) or "what" for column in self.columns]
        cells = [dict(zip(columns, map(plain, row), strict=True)) for row in self.rows]
        return {"title": self.title, "note": plain(self.note), "rows": cells}


def plain(text: str) -> str:
    """A text without the marks of Markdown that these tables use.

    >>> plain("`replicas` hold it *as well*")
    'replicas hold it as well'
    """
    return re.sub(r"`|\*(?=\S)|(?<=\S)\*", "", text)


def support_tables() -> list[SupportTable]:
    """All tables, in the order in which a reader wants them.

    >>> [table.title for table in support_tables()]
    ['Exchanges and formats', 'Weights', 'Experts', 'Routers', 'Placements', 'Models']
    """
    return [_exchanges(), _weights(), _experts(), _routers(), _placements(), _models()]


# --- The tables -------------------------------------------------------------------------------------------


def _exchanges() -> SupportTable:
    exchanges = list(EXCHANGES.values())
    rows = []
    for format in (kind() for kind in FORMATS.values()):
        cells = [
            _both_ways(_for_dtypes(exchange, wire=format), _for_dtypes(exchange, combine_wire=format))
            for exchange in exchanges
        ]
        rows.append((f"`{format}`", str(format.bytes_per_row(_HIDDEN_SIZE)), *cells))
    logits, choices = (
        [_mark(exchange.supports(_exchange_spec(torch.bfloat16, **{field: True}))) for exchange in exchanges]
        for field in ("carries_logits", "sums_choices")
    )
    rows.append(("router logits", NO, *(_both_ways(mark, NO) for mark in logits)))
    rows.append(("results of single choices", NO, *(_both_ways(NO, mark) for mark in choices)))
    trained = [", ".join(_DEVICES[kind] for kind in exchange.carries_gradients) for exchange in exchanges]
    rows.append(("gradients", NO, *(cell or NO for cell in trained)))
    return SupportTable(
        title="Exchanges and formats",
        note=f"Which rows travel in which format, and the bytes of a row of {_HIDDEN_SIZE}. {YES}: to the experts "
        f"(out) and home (back). “{dtype_name(torch.float32)} only”: for layers whose rows are of that dtype. "
        "Router logits travel for experts that route by themselves, results of single choices (on CPUs) with "
        '`sum="choices"`, gradients with `plan(training=True)` on these devices.',
        columns=("format", "bytes", *(f"`{exchange.name}`" for exchange in exchanges)),
        rows=tuple(rows),
    )


def _both_ways(out: str, back: str) -> str:
    """A cell for the way to the experts, and the way home."""
    if out == back:
        return out
    return {(YES, NO): "out", (NO, YES): "back"}.get((out, back), f"out: {out}; back: {back}")


def _for_dtypes(exchange: type[Transport], **wires: Format) -> str:
    """✓ if rows of every dtype are served; else the dtypes that are."""
    served = [dtype for dtype in ROW_DTYPES if exchange.supports(_exchange_spec(dtype, **wires)) is None]
    if len(served) == len(ROW_DTYPES):
        return YES
    return " and ".join(map(dtype_name, served)) + " only" if served else NO


def _exchange_spec(dtype: torch.dtype, **changes: Any) -> ExchangeSpec:
    spec = ExchangeSpec(
        layer="moe",
        index=0,
        hidden_size=_HIDDEN_SIZE,
        num_experts=8,
        top_k=2,
        max_tokens=1,
        dtype=dtype,
        wire=for_dtype(dtype),
        combine_wire=for_dtype(dtype),
        placement=Placement.contiguous(8, 2),
    )
    return dataclasses.replace(spec, **changes)


def _weights() -> SupportTable:
    bf16 = weight_format("bf16").nbytes(_HIDDEN_SIZE, _HIDDEN_SIZE)
    rows = []
    for name in WEIGHT_FORMATS:
        size = weight_format(name).nbytes(_HIDDEN_SIZE, _HIDDEN_SIZE) / bf16
        taken = [row for row, kind in FORMATS.items() if kind.quantized and takes_rows(name, kind())]
        rows.append((f"`{name}`", f"{size:.3f}", ", ".join(["plain", *(f"`{row}`" for row in taken)])))
    return SupportTable(
        title="Weights",
        note="The formats that hold weights, their bytes beside those of bf16, and the rows that experts with such "
        "weights compute on. Rows that arrive in another format are decoded by the experts, once.",
        columns=("weights", "size", "rows"),
        rows=tuple(rows),
    )


def _experts() -> SupportTable:
    kinds = list(EXPERTS.values())
    weight_formats = dict.fromkeys(
        [*WEIGHT_FORMATS, *(name for kind in kinds for name in kind.weight_formats)]
    )
    changes: dict[str, dict[str, Any]] = {}
    changes |= {f"activation `{name}`": {"activation": activation(name)} for name in ACTIVATIONS}
    changes |= {f"weights in `{name}`": {"weights": name} for name in weight_formats}
    changes |= {
        f"computes on `{name}` rows": {"rows": kind()} for name, kind in FORMATS.items() if kind.quantized
    }
    changes |= {
        f"weights in `{name}`, `{inner}` between the products": {"weights": name, "inner": formats_get(inner)}
        for name in WEIGHT_FORMATS
        for inner in weight_format(name).inner_formats
    }
    changes |= {"biases": {"bias": True}, "routing weight on the input": {"weight_on": "input"}}
    rows = [
        (name, *(_mark(kind.supports(_experts_spec(**change))) for kind in kinds))
        for name, change in changes.items()
    ]
    traits: dict[str, Callable[[type[Experts]], bool]] = {
        "weight and sum by themselves": lambda kind: kind.finalizes,
        "route by themselves": lambda kind: kind.routes_itself,
        "the same bits in any batch, on a CPU": lambda kind: "cpu" in kind.batch_invariant,
        "the same bits in any batch, on a GPU": lambda kind: "cuda" in kind.batch_invariant,
        "trained on a CPU": lambda kind: "cpu" in kind.trains,
        "trained on an NVIDIA GPU": lambda kind: "cuda" in kind.trains,
        "run on a CPU": lambda kind: "cpu" in kind.devices,
        "run on an NVIDIA GPU": lambda kind: "cuda" in kind.devices,
    }
    rows += [(name, *(YES if has(kind) else NO for kind in kinds)) for name, has in traits.items()]
    return SupportTable(
        title="Experts",
        note="What the experts of each kind compute. Where they do not sum by themselves, the receiver does.",
        columns=("", *(f"`{kind.name}`" for kind in kinds)),
        rows=tuple(rows),
    )


def _experts_spec(**changes: Any) -> ExpertsSpec:
    plain: dict[str, Any] = {"activation": activation("swiglu")}
    return ExpertsSpec(
        hidden_size=128, intermediate_size=128, num_local_experts=4, top_k=2, **{**plain, **changes}
    )


def _routers() -> SupportTable:
    return SupportTable(
        title="Routers",
        note="Logits in, routes out. A router of your own passes ready routes instead.",
        columns=("router", "what it does", "settings"),
        rows=tuple(
            (f"`{name}`", _first_line(kind), ", ".join(f"`{f.name}`" for f in dataclasses.fields(kind)))
            for name, kind in ROUTERS.items()
        ),
    )


def _placements() -> SupportTable:
    contiguous = Placement.contiguous(5, 2)
    examples = {name: make(5, 2) for name, make in PLACEMENTS.items()}
    examples["explicit"] = Placement.explicit(5, [[4, 2, 0], [1, 3]])
    examples["replicated"] = Placement.replicated(contiguous, {0: [1]})
    return SupportTable(
        title="Placements",
        note="Which rank owns which expert. Any number of experts on any number of ranks.",
        columns=("placement", "what it does", "5 experts on 2 ranks"),
        rows=tuple(
            (
                f"`{name}`",
                _first_line(getattr(Placement, name)),
                "; ".join(f"rank {rank}: {_words(ids)}" for rank, ids in enumerate(example.table)),
            )
            for name, example in examples.items()
        ),
    )


def _models() -> SupportTable:
    rows = []
    for name, family in FAMILIES.items():
        keys = ("hidden_size", family.intermediate_size, *family.num_experts)
        sizes = {**dict.fromkeys(keys, 64), "num_hidden_layers": 8, "num_experts_per_tok": 2}
        spec = layers_from_config({"model_type": name, **sizes})[0]
        router = NO if spec.router is None else f"`{spec.router.name}`"
        act = f"`{activation(spec.activation).name}`"
        heads = NO if family.prediction_layers is None else f"`{family.prediction_layers}`"
        rows.append((f"`{name}`", router, act, YES if spec.bias else NO, heads))
    return SupportTable(
        title="Models",
        note="Model types whose Hugging Face `config.json` is read (`tokenyard plan --config`).",
        columns=("model type", "router", "activation", "biases", "prediction layers"),
        rows=tuple(rows),
    )


def _mark(reason: Reason | None) -> str:
    return YES if reason is None else NO


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")


def _words(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))
