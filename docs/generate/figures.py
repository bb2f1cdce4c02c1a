"""Tables of measurements, from the files under `bench/results`.

Each table stands between marks on its page (`tables.PAGES`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenyard_lab.bench.records import Document, Record, Spread
from tokenyard_lab.bench.shapes import CASES, MODELS
from tokenyard_lab.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
_SHARE = "experts-deepseek-h200"
_ONE_LAUNCH = "one for all ranks"
_STATIC_NVFP4 = "nvfp4(global_scale=448.0)"


def _summary() -> str:
    """The README's few lines: ours, the best peer, the floor."""
    dispatch, experts, share = (measured(name) for name in ("dispatch-h200", "experts-h200", _SHARE))

    def sent(ranks: int, wire: str) -> Record | None:
        return dispatch.find(operation="dispatch", ranks=ranks, tokens=1024, wire=wire, launch=_ONE_LAUNCH)

    def computed(document: Document, case: str, weights: str, size: int) -> Record | None:
        return document.find(case=case, weights=weights, size=size)

    on_gpu = {
        "dispatch of 4 × 1024 tokens, bf16": sent(4, "bf16"),
        "dispatch of 8 × 1024 tokens, quantized to mxfp8 on the way": sent(8, "mxfp8"),
        "experts, bf16, 256 rows": computed(experts, "A", "bf16", 256),
        "experts, fp8, 8,192 rows": computed(experts, "A", "fp8_block128", 8192),
        "experts of DeepSeek-V3, fp8, 8,192 tokens a rank": computed(share, "V3", "fp8_block128", 8192),
        "experts, mxint4, 64 rows": computed(experts, "B", "mxint4", 64),
        "experts, mxfp4, 128 tokens": computed(experts, "C", "mxfp4", 128),
    }
    on_cpu = {
        "2 CPU cores: experts, 512 tokens": measured("experts-cpu").find(tokens=512),
        "a Qwen3-MoE on 4 CPU processes, prefill": measured("transformers-cpu").find(phase="prefill"),
    }
    lines = [_line(f"H200: {what}", record, "µs", _short) for what, record in on_gpu.items()]
    lines += [_line(what, record, "ms", "{:,.0f}".format) for what, record in on_cpu.items()]
    return markdown_table(("", "ours", "best peer", "floor"), lines)


def _line(what: str, record: Record | None, unit: str, written: Callable[[float], str]) -> tuple[str, ...]:
    assert record is not None, f"not measured: {what}"
    figures = (_median(record.ours), record.best_peer or 0.0, _median(record.floor))
    return (what, *(f"{written(figure)} {unit}" for figure in figures))


def _dispatch_table() -> str:
    """Every operation on the GPU, a column for each wire."""
    document = measured("dispatch-h200")
    wires = {"bf16": "bf16", "mxfp8": "mxfp8", "nvfp4": _STATIC_NVFP4}
    lines = []
    operations = dict.fromkeys(
        (record.parameters["operation"], record.parameters["ranks"], record.parameters["tokens"])
        for record in document.results
    )
    for operation, ranks, tokens in operations:
        of_line = [
            document.find(operation=operation, ranks=ranks, tokens=tokens, wire=wire, launch=_ONE_LAUNCH)
            for wire in wires.values()
        ]
        ours = [f"{_short(_median(r.ours))} ({_short(_median(r.floor))})" if r else "" for r in of_line]
        peers = [_short(r.best_peer) for r in of_line if r and r.best_peer is not None]
        lines.append((f"{operation}, W={ranks}, T={tokens}", *ours, " / ".join(peers)))
    return markdown_table(("µs (floor)", *(f"`{wire}`" for wire in wires), "peer, without quantizing"), lines)


def _experts_table() -> str:
    """One rank's experts on the GPU, a line for each size."""
    return _stages("best peer", measured("experts-h200").results)


def _share_table() -> str:
    """One rank's share of eight of a model's experts, a line for each size."""
    return _stages("torch's grouped products", measured(_SHARE).results)


def _stages(peer: str, records: Iterable[Record]) -> str:
    """A table for each shape."""
    lines: dict[str, list[tuple[str, ...]]] = {}
    for record in records:
        name, weights, size = (record.parameters[key] for key in ("case", "weights", "size"))
        case = CASES[name]
        experts = f"{case.num_experts}" if case.all_local else f"{case.local_experts} of {case.num_experts}"
        shape = f"H {case.hidden_size}, I {case.intermediate_size}, {experts} experts, K {case.top_k}"
        model = f"{MODELS[name]}: " if name in MODELS else ""
        best = "" if record.best_peer is None else _short(record.best_peer)
        what = f"`{weights}`, {size:,} {case.counts}"
        line = (what, _short(_median(record.ours)), best, _short(_median(record.floor)))
        lines.setdefault(f"{model}{shape}", []).append(line)
    tables = [markdown_table((f"{shape}, µs", "ours", peer, "floor"), rows) for shape, rows in lines.items()]
    return "\n\n".join(tables)


def _cpu_table() -> str:
    """What is measured on a CPU."""
    encode, experts, model = (measured(f"{name}-cpu") for name in ("encode", "experts", "transformers"))
    hidden, encoded = encode.setup["hidden_size"], encode.results
    formats = " / ".join(f"`{record.parameters['format']}`" for record in encoded)
    speeds = " / ".join(f"{_median(record.ours):.0f}" for record in encoded)
    (floor,) = {f"{_median(record.floor):,.0f} (a copy)" for record in encoded}
    lines = [(f"encode rows of {hidden}, one thread, MB/s of bf16: {formats}", speeds, "", floor)]
    (record,) = experts.results
    peer = f"Transformers `grouped_mm`: {record.best_peer:.0f} ms"
    what = "grouped experts, 512 tokens, H 2048, I 1024, E 64, K 8"
    lines.append((what, f"{_median(record.ours):.0f} ms", peer, f"{_median(record.floor):.0f} ms (products)"))
    for record in model.results:
        layers, ranks = (model.setup[key] for key in ("num_layers", "ranks"))
        what = f"a Qwen3-MoE of {layers} layers over {ranks} processes, {record.parameters['phase']}"
        peer = f"Transformers' own expert parallelism: {record.best_peer:,.0f} ms"
        lines.append((what, f"{_median(record.ours):.0f} ms", peer, f"{_median(record.floor):.0f} ms"))
    if (RESULTS / "overhead-cpu.json").exists():
        for record in measured("overhead-cpu").results:
            peer = "" if record.best_peer is None else f"plain Transformers: {record.best_peer:.2f} ms"
            floor = "" if record.floor is None else f"{_median(record.floor):.2f} ms (its experts)"
            what = f"one CPU rank: {record.parameters['call']}"
            lines.append((what, f"{_median(record.ours):.2f} ms", peer, floor))
    return markdown_table(("", "ours", "peer", "floor"), lines) + "\n\n" + _round_trips()


def _round_trips() -> str:
    """There and back on a CPU: a line for each exchange, the peer and the floor, and a column for each wire."""
    document = measured("dispatch-cpu")
    times: dict[str, dict[str, str]] = {}
    for record in document.results:
        exchange, wire = (record.parameters[key] for key in ("exchange", "wire"))
        assert record.best_peer is not None
        for what, taken in (
            (f"`{exchange}`", _median(record.ours)),
            ("bare gloo, nothing packed or summed", record.best_peer),
            ("floor (a copy)", _median(record.floor)),
        ):
            shown = f"{taken:.1f}"
            assert times.setdefault(what, {}).setdefault(wire, shown) == shown or what.startswith("`")
    ranks, hidden, top_k = (document.setup[key] for key in ("ranks", "hidden_size", "top_k"))
    (tokens,) = {record.parameters["tokens"] for record in document.results}
    head = f"there and back, {ranks} processes, {tokens} tokens each, H {hidden}, K {top_k}, ms"
    wires = list(dict.fromkeys(record.parameters["wire"] for record in document.results))
    last = [what for what in times if not what.startswith("`")]
    order = [what for what in times if what.startswith("`")] + last
    rows = [(what, *(times[what][wire] for wire in wires)) for what in order]
    return markdown_table((head, *(f"`{wire}`" for wire in wires)), rows)


FIGURES: dict[str, Callable[[], str]] = {
    "figures": _summary,
    "dispatch-gpu": _dispatch_table,
    "experts-gpu": _experts_table,
    "share-gpu": _share_table,
    "cpu": _cpu_table,
}


@functools.cache
def measured(name: str) -> Document:
    """What a benchmark has written, by the name of its file."""
    path = RESULTS / f"{name}.json"
    return Document.from_dict(json.loads(path.read_text()), str(path))


def _median(spread: Spread | None) -> float:
    assert spread is not None, "a figure that is quoted was measured"
    return spread.median


def _short(number: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"
