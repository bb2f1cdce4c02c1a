"""Where tokenyard sits in an engine: what stays with the engine, what happens once, what happens in every call."""

from __future__ import annotations

from docs.generate.pictures.svg import Drawing

_LEFT, _WIDE = 16, 608


def draw() -> str:
    """The picture."""
    drawing = Drawing(640, "Where tokenyard sits in an engine")
    drawing.text(_LEFT, 28, "Where tokenyard sits in an engine", size=17, bold=True)
    drawing.boxed(
        _LEFT,
        44,
        _WIDE,
        58,
        [
            "The engine",
            "requests, scheduling, KV cache, attention, norms, sampling",
        ],
        "gray",
        size=13,
        bold=True,
    )
    _doors(drawing, 128)
    _layer(drawing, 252)
    _below(drawing, 548)
    return str(drawing)


def _doors(drawing: Drawing, y: float) -> None:
    """The four ways in."""
    drawing.text(_LEFT, y, "calls one of these for every MoE layer", size=13, color="muted")
    doors = (
        ("MoELayer", "in a model", "of your own"),
        ("ShardedExperts", "in a model", "of Transformers"),
        ("TokenyardExperts", "in vLLM's", "modular kernel"),
        ("MoeAlltoAll", "FlashInfer's calls:", "moves rows only"),
    )
    width = (_WIDE - 3 * 8) / 4
    for number, lines in enumerate(doors):
        x = _LEFT + number * (width + 8)
        drawing.boxed(x, y + 12, width, 60, list(lines), "violet", size=12.5, bold=True)
        drawing.arrow((x + width / 2, y + 72), (x + width / 2, y + 98))


def _layer(drawing: Drawing, y: float) -> None:
    """What happens once, and in every call."""
    drawing.box(_LEFT, y - 24, _WIDE, 286, "page")
    drawing.text(_LEFT + 12, y, "tokenyard", bold=True)
    drawing.boxed(
        _LEFT + 12,
        y + 14,
        _WIDE - 24,
        58,
        [
            "once, before the first token: plan(layers, group)",
            "checks all layers, compares them on all ranks, allocates memory",
        ],
        "pink",
        size=13,
    )
    drawing.text(_LEFT + 12, y + 98, "in every call", size=13, color="muted")
    steps = (
        ("route", "logits", "to routes", "gray"),
        ("encode", "rows into", "the wire", "blue"),
        ("dispatch", "rows to", "their experts", "blue"),
        ("experts", "compute", "and sum", "amber"),
        ("combine", "results home,", "summed", "green"),
    )
    width = (_WIDE - 24 - 4 * 16) / 5
    for number, (name, first, second, color) in enumerate(steps):
        x = _LEFT + 12 + number * (width + 16)
        drawing.boxed(x, y + 110, width, 76, [name, first, second], color, size=13, bold=True)
        if number:
            drawing.arrow((x - 16, y + 148), (x, y + 148))
    drawing.text(
        _LEFT + 12,
        y + 212,
        "An error on one rank reaches all ranks of the call. Every wait has an end.",
        size=13,
    )
    drawing.text(
        _LEFT + 12,
        y + 234,
        "print(plan) says who quantizes, weights and sums: each duty has one party.",
        size=13,
    )
    drawing.arrow((_LEFT + _WIDE / 2, y + 262), (_LEFT + _WIDE / 2, y + 284))


def _below(drawing: Drawing, y: float) -> None:
    """What it stands on."""
    below = (
        ("memory", "shared between processes,", "symmetric between GPUs"),
        ("torch.distributed", "gloo: CPUs, hosts;", "NCCL: GPUs"),
        ("kernels", "torch on CPUs,", "Triton on GPUs"),
    )
    width = (_WIDE - 2 * 8) / 3
    for number, lines in enumerate(below):
        drawing.boxed(
            _LEFT + number * (width + 8), y - 12, width, 76, list(lines), "gray", size=12.5, bold=True
        )
