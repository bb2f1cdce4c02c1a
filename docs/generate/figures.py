"""Tables of measurements, from the files under `bench/results`.

Each table stands between marks on its page (`PAGES`). Nobody copies a figure by hand, and a test compares.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenyard.lab.bench.expert_figures import CASES
from tokenyard.lab.markdown import markdown_table
from tokenyard.lab.support import between_marks

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/figures.md")

_MODELS = {"FLASH": "DeepSeek-V4-Flash", "PRO": "DeepSeek-V4-Pro", "V3": "DeepSeek-V3"}
_PEERS_ON_CPU = {"gloo": "bare gloo, nothing packed or summed", "grouped_mm": "Transformers `grouped_mm`"}


def rewrite(page: Path) -> bool:
    """Renew the tables of a page; whether anything changed."""
    text = written = page.read_text()
    for name, make in TABLES.items():
        if f"<!-- {name}:begin -->" in text:
            written = between_marks(page, written, name, make())
    if written != text:
        page.write_text(written)
    return written != text


def _summary() -> str:
    """The README's few lines: ours, the best peer, the floor."""
    lines = [
        _gpu_line("dispatch of 4 × 1024 tokens, bf16", _dispatch(4, 1024, "bf16"), "peer_us"),
        _gpu_line(
            "dispatch of 8 × 1024 tokens, quantized to mxfp8 on the way",
            _dispatch(8, 1024, "mxfp8"),
            "peer_us",
        ),
        _gpu_line("experts, bf16, 256 rows", _experts("A", "bf16", 256), "best_peer_us"),
        _gpu_line("experts, fp8, 8,192 rows", _experts("A", "fp8_block128", 8192), "best_peer_us"),
        _gpu_line(
            "experts of DeepSeek-V3, fp8, 8,192 tokens a rank",
            _share("V3", "fp8_block128", 8192),
            "best_peer_us",
        ),
        _gpu_line("experts, mxint4, 64 rows", _experts("B", "mxint4", 64), "best_peer_us"),
        _gpu_line("experts, mxfp4, 128 tokens", _experts("C", "mxfp4", 128), "best_peer_us"),
    ]
    cpu_experts, model = _measured("experts-cpu")["results"][0], _measured("transformers-cpu")["results"][0]
    lines += [
        _cpu_line("2 CPU cores: experts, 512 tokens", cpu_experts, "ours_ms", "transformers_ms"),
        _cpu_line("a Qwen3-MoE on 4 CPU processes, prefill", model, "ours_ms", "peer_ms"),
    ]
    return markdown_table(("", "ours", "best peer", "floor"), lines)


def _dispatch_table() -> str:
    """Every operation on the GPU, a column for each wire."""
    cells = [row for row in _measured("dispatch-h200")["results"] if row["launch"] == "one for all ranks"]
    wires = ("bf16", "mxfp8", "nvfp4")
    lines = []
    for operation, world, tokens in dict.fromkeys(
        (c["operation"], c["world"], c["num_tokens"]) for c in cells
    ):
        of_line = [_dispatch(world, tokens, wire, operation) for wire in wires]
        ours = [f"{_short(cell['us'])} ({_short(cell['floor_us'])})" if cell else "" for cell in of_line]
        peers = [_short(cell["peer_us"]) for cell in of_line if cell and cell["peer_us"]]
        lines.append((f"{operation}, W={world}, T={tokens}", *ours, " / ".join(peers)))
    return markdown_table(("µs (floor)", *(f"`{wire}`" for wire in wires), "peer, without quantizing"), lines)


def _experts_table() -> str:
    """One rank's experts on the GPU, a line for each size."""
    return _stages("best peer", _measured("experts-h200")["results"])


def _share_table() -> str:
    """One rank's share of eight of a model's experts, a line for each size."""
    names = ("experts-deepseek-fp8-h200", "experts-deepseek-h200")
    cells = [
        cell for name in names for cell in _measured(name)["results"] if CASES[cell["case"]].tokens_a_rank
    ]
    return _stages("torch's grouped products", cells)


def _stages(peer: str, cells: Iterable[dict[str, Any]]) -> str:
    lines = []
    for cell in cells:
        case = CASES[cell["case"]]
        experts = f"{case.num_experts}" if case.all_local else f"{case.local_experts} of {case.num_experts}"
        shape = f"H {case.hidden_size}, I {case.intermediate_size}, {experts} experts, K {case.top_k}"
        model = f"{_MODELS[cell['case']]}: " if cell["case"] in _MODELS else ""
        what = f"`{cell['weights']}`, {model}{shape}, {cell['size']:,} {case.counts}"
        best = _short(cell["best_peer_us"]) if cell["best_peer_us"] else ""
        lines.append((what, _short(cell["us"]), best, _short(cell["floor_us"])))
    return markdown_table(("µs", "ours", peer, "floor"), lines)


def _cpu_table() -> str:
    """What is measured on a CPU."""
    lines = []
    for cell in _measured("encode-cpu")["results"]:
        what = f"encode rows of {cell['hidden_size']}, one thread, MB/s of bf16: `{cell['format']}`"
        lines.append((what, f"{cell['MB_per_s']:.0f}", "", f"{cell['ceiling_MB_per_s']:,.0f} (a copy)"))
    cell = _measured("experts-cpu")["results"][0]
    peer = f"{_PEERS_ON_CPU['grouped_mm']}: {cell['transformers_ms']:.0f} ms"
    floor = f"{cell['floor_ms']:.0f} ms (products)"
    lines.append(
        ("grouped experts, 512 tokens, H 2048, I 1024, E 64, K 8", f"{cell['ours_ms']:.0f} ms", peer, floor)
    )
    for cell in _measured("dispatch-cpu")["results"]:
        what = f"`{cell['exchange']}` there and back, {cell['world']} processes, {cell['num_tokens']} tokens each"
        what += f", H {cell['hidden_size']}, K {cell['top_k']}, `{cell['wire']}`"
        peer = f"{_PEERS_ON_CPU['gloo']}: {cell['gloo_ms']:.1f} ms"
        lines.append((what, f"{cell['ms']:.1f} ms", peer, f"{cell['floor_ms']:.1f} ms (a copy)"))
    for cell in _measured("transformers-cpu")["results"]:
        what = f"a Qwen3-MoE of {cell['num_layers']} layers over {cell['ranks']} processes, {cell['phase']}"
        peer = f"Transformers' own expert parallelism: {cell['peer_ms']:,.0f} ms"
        lines.append((what, f"{cell['ours_ms']:.0f} ms", peer, f"{cell['floor_ms']:.0f} ms"))
    return markdown_table(("", "ours", "peer", "floor"), lines)


TABLES: dict[str, Callable[[], str]] = {
    "figures": _summary,
    "dispatch-gpu": _dispatch_table,
    "experts-gpu": _experts_table,
    "share-gpu": _share_table,
    "cpu": _cpu_table,
}


@functools.cache
def _measured(name: str) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return measured


def _dispatch(world: int, tokens: int, wire: str, operation: str = "dispatch") -> dict[str, Any] | None:
    for cell in _measured("dispatch-h200")["results"]:
        fits = (cell["operation"], cell["world"], cell["num_tokens"]) == (operation, world, tokens)
        if fits and cell["wire"].startswith(wire) and cell["launch"] == "one for all ranks":
            return dict(cell)
    return None


def _share(case: str, weights: str, size: int) -> dict[str, Any] | None:
    return _experts(case, weights, size, "experts-deepseek-fp8-h200")


def _experts(case: str, weights: str, size: int, file: str = "experts-h200") -> dict[str, Any] | None:
    for cell in _measured(file)["results"]:
        if (cell["case"], cell["weights"], cell["size"]) == (case, weights, size):
            return dict(cell)
    return None


def _gpu_line(what: str, cell: dict[str, Any] | None, peer: str) -> tuple[str, ...]:
    assert cell is not None, f"not measured: {what}"
    return (f"H200: {what}", *(f"{_short(cell[column])} µs" for column in ("us", peer, "floor_us")))


def _cpu_line(what: str, cell: dict[str, Any], ours: str, peer: str) -> tuple[str, ...]:
    return (what, *(f"{cell[column]:,.0f} ms" for column in (ours, peer, "floor_ms")))


def _short(number: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"
