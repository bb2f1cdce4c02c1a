"""The workspace of `one_sided`, drawn to scale: what each of two layers needs, and what both share."""

from __future__ import annotations

from typing import Any

from docs.generate.pictures.svg import WIDTH, Drawing
from tokenyard import LayerSpec
from tokenyard.exchange import SharedMemoryTransport
from tokenyard.exchange.transports.one_sided.cpu.signals import control_bytes
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.planning import Draft
from tokenyard.planning.drafting import draft_ignoring_env
from tokenyard.units import size

WORLD, MAX_TOKENS = 8, 1024
_SIZES: dict[str, Any] = {"intermediate_size": 2048, "num_experts": 256, "top_k": 8}
BODY = LayerSpec(name="body", hidden_size=7168, wire="mxfp8", **_SIZES)
HEAD = LayerSpec(name="head", hidden_size=4096, **_SIZES)

_LEFT, _RIGHT = 16, 16
_BAR = 40


def planned() -> Draft:
    """What a plan of both layers would be."""
    return draft_ignoring_env(
        [BODY, HEAD],
        WORLD,
        exchange="one_sided",
        max_tokens=MAX_TOKENS,
        in_flight=1,
        paranoid=False,
        device=None,
    )


def layout() -> WorkspaceLayout:
    """The workspace that serves both layers, as `one_sided` lays it out between CPU processes."""
    drafted = planned()
    return WorkspaceLayout(
        control=control_bytes(WORLD), dispatch=drafted.dispatch_bytes, combine=drafted.combine_bytes
    )


def draw() -> str:
    """The picture."""
    drafted, whole = planned(), layout()
    scale = (WIDTH - _LEFT - _RIGHT) / whole.nbytes
    drawing = Drawing(446, "The workspace of a rank, to scale")
    title = f"The workspace of a rank: {WORLD} ranks, up to {MAX_TOKENS:,} tokens each"
    drawing.text(_LEFT, 28, title, size=17, bold=True)
    y = 60.0
    combine_at = whole.combine_region(0).offset
    for wiring in drafted.wirings:
        spec, needs = wiring.spec, SharedMemoryTransport.region_bytes(wiring.exchange_spec)
        formats = f"rows in {wiring.wire} out, in {wiring.exchange_spec.combine_wire} back"
        about = f"layer “{spec.name}”: H {spec.hidden_size}, {formats}"
        drawing.text(_LEFT, y, about)
        _bar(drawing, _LEFT, y + 8, needs.dispatch * scale, "blue", f"out {size(needs.dispatch)}")
        _bar(
            drawing,
            _LEFT + combine_at * scale,
            y + 8,
            needs.combine * scale,
            "green",
            f"back {size(needs.combine)}",
        )
        y += 78
    drawing.text(_LEFT, y + 6, f"what both share: {size(whole.nbytes)}", bold=True)
    regions = whole.regions()
    _bar(
        drawing, _LEFT, y + 16, regions["dispatch 0"].end * scale, "blue", f"dispatch {size(whole.dispatch)}"
    )
    _bar(
        drawing,
        _LEFT + combine_at * scale,
        y + 16,
        whole.combine * scale,
        "green",
        f"combine {size(whole.combine)}",
    )
    y += 78
    offsets = ", ".join(
        f"{name.removesuffix(' 0')} at byte {region.offset:,}" for name, region in regions.items()
    )
    drawing.text(_LEFT, y, offsets, size=12.5, color="muted")
    _slots(drawing, drafted, y + 34)
    return str(drawing)


def _bar(drawing: Drawing, x: float, y: float, width: float, color: str, text: str) -> None:
    drawing.boxed(x, y, width, _BAR, [text], color, size=13)


def _slots(drawing: Drawing, drafted: Draft, y: float) -> None:
    """What lies in the dispatch region while the body runs, payload by payload."""
    slots = drafted.wirings[0].exchange_spec.dispatch_slots
    drawing.text(_LEFT, y, f"Inside of dispatch, while “{BODY.name}” runs: {slots.slots:,} slots", bold=True)
    rule = "row i from rank w is in slot w · max_tokens + i"
    drawing.text(_LEFT, y + 20, rule, size=13, color="muted")
    y += 44
    for payload, offset in zip(slots.payloads, slots.offsets, strict=True):
        drawing.text(_LEFT, y, payload.name, size=13, font="mono")
        drawing.text(_LEFT + 90, y, f"[{slots.slots:,}, {payload.width:,}]", size=13, font="mono")
        drawing.text(_LEFT + 230, y, str(payload.dtype).removeprefix("torch."), size=13, font="mono")
        drawing.text(_LEFT + 360, y, f"from byte {offset:,} of the region", size=13)
        y += 21
