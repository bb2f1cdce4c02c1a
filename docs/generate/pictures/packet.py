"""A packet, byte by byte: one row of a small layer on the mxfp8 wire, as `RowLayout` lays it out."""

from __future__ import annotations

import torch

from docs.generate.pictures.svg import Drawing
from tokenyard import LayerSpec, Routes
from tokenyard.exchange import ExchangeSpec
from tokenyard.exchange.workspace import RowLayout
from tokenyard.planning.drafting import draft_ignoring_env

SMALL = LayerSpec(
    name="moe", hidden_size=40, intermediate_size=8, num_experts=8, top_k=2, wire="mxfp8", max_tokens=1
)
LARGE = LayerSpec(
    name="moe", hidden_size=7168, intermediate_size=8, num_experts=256, top_k=8, wire="mxfp8", max_tokens=1
)

_COLORS = {"data": "blue", "scales": "green", "ids": "violet", "weights": "amber"}
_PER_LINE, _CELL, _LINE = 16, 25, 24
_LEFT, _TOP = 48, 74


def exchange_spec_of(spec: LayerSpec) -> ExchangeSpec:
    """What an exchange is told of a layer on four ranks."""
    drafted = draft_ignoring_env([spec], 4, exchange="two_sided", in_flight=1, paranoid=False, device=None)
    return drafted.wirings[0].exchange_spec


def packet() -> tuple[RowLayout, list[int]]:
    """The layout of a packet of the small layer, and the bytes of one."""
    exchange_spec = exchange_spec_of(SMALL)
    x_TH = (torch.arange(SMALL.hidden_size) - 20).reshape(1, -1).bfloat16() / 8
    routes = Routes(topk_ids_TK=torch.tensor([[1, -1]]), topk_weights_TK=torch.tensor([[0.75, 0.0]]))
    tensors = dict(exchange_spec.wire.encode(x_TH).payloads)
    tensors |= {"ids": routes.topk_ids_TK.int(), "weights": routes.topk_weights_TK}
    layout = exchange_spec.dispatch_layout
    return layout, layout.pack(tensors, 1, torch.device("cpu"))[0].tolist()


def draw() -> str:
    """The picture."""
    layout, values = packet()
    lines = len(values) // _PER_LINE
    bottom = _TOP + lines * _LINE
    drawing = Drawing(bottom + 124, f"A packet of {len(values)} bytes, byte by byte")
    drawing.text(
        16, 28, f"One row on the wire: H {SMALL.hidden_size}, K {SMALL.top_k}, mxfp8", size=17, bold=True
    )
    drawing.text(
        16,
        52,
        f"{layout.stride} bytes; every part starts at a multiple of 16, and gray bytes are pad",
        color="muted",
    )
    owner = _owners(layout)
    for index, value in enumerate(values):
        line, column = divmod(index, _PER_LINE)
        x, y = _LEFT + column * _CELL, _TOP + line * _LINE
        color = _COLORS[owner[index]] if index in owner else "gray"
        drawing.boxed(x, y, _CELL, _LINE, [f"{value:02x}"], color, size=12, font="mono")
    for line in range(lines):
        y = _TOP + line * _LINE + 16
        drawing.text(_LEFT - 6, y, str(line * _PER_LINE), size=12, anchor="end", font="mono", color="muted")
    _label(drawing, layout)
    _large(drawing, bottom + 34)
    return str(drawing)


def _owners(layout: RowLayout) -> dict[int, str]:
    """The payload of each byte, without pads. The pad inside of `data` belongs to the format, which has set it."""
    bytes_of = {payload.name: payload.nbytes for payload in layout.payloads}
    bytes_of["data"] = SMALL.hidden_size * layout.payloads[0].dtype.itemsize
    return {
        offset + byte: payload.name for payload, offset in layout for byte in range(bytes_of[payload.name])
    }


def _label(drawing: Drawing, layout: RowLayout) -> None:
    pad = layout.payloads[0].width - SMALL.hidden_size
    texts = {
        "data": [f"data: {SMALL.hidden_size} numbers of e4m3", f"and {pad} to fill a block of 32"],
        "scales": [f"scales: {layout.payloads[1].width} bytes"],
        "ids": ["ids: expert 1, nobody"],
        "weights": ["weights: 0.75, 0"],
    }
    x = _LEFT + _PER_LINE * _CELL + 8
    for payload, offset in layout:
        y = _TOP + offset // _PER_LINE * _LINE + 16
        for number, text in enumerate(texts[payload.name]):
            drawing.text(x, y + number * 16, text, size=11.5)


def _large(drawing: Drawing, y: float) -> None:
    """The same layout for a large model, as a list of offsets."""
    layout = exchange_spec_of(LARGE).dispatch_layout
    drawing.text(16, y, f"The same for H {LARGE.hidden_size}, K {LARGE.top_k}:", bold=True)
    plain = exchange_spec_of(LayerSpec(**{**vars(LARGE), "wire": None})).dispatch_layout.stride
    parts = [f"{payload.name} {offset:,}–{offset + payload.nbytes - 1:,}" for payload, offset in layout]
    drawing.text(16, y + 24, "   ".join(parts), size=13, font="mono")
    back = exchange_spec_of(LARGE).combine_layout.stride
    drawing.text(
        16,
        y + 50,
        f"{layout.stride:,} bytes; in bf16 it would be {plain:,}. Back comes one row of {back:,} bytes",
    )
    drawing.text(16, y + 70, "(bf16) from each rank that owns one of the token's experts.")
