"""The pictures: each is drawn from what the package computes, and written to `docs/pictures`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate.pictures import choice, engine, packet, timeline, workspace

FOLDER = Path(__file__).resolve().parents[2] / "pictures"

PICTURES: dict[str, Callable[[], str]] = {
    "timeline": timeline.draw,
    "packet": packet.draw,
    "workspace": workspace.draw,
    "choice": choice.draw,
    "engine": engine.draw,
}


def pictures() -> dict[Path, str]:
    """All pictures, by the file that they belong into."""
    return {FOLDER / f"{name}.svg": draw() for name, draw in PICTURES.items()}
