"""Accuracy against bytes, as a picture: of rows on the wire on the left, of the experts' weights on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.evaluation.table import WHOLE_MODEL

_COLORS = ("#1b4f8a", "#e0963a", "#5f9e6e", "#8c6bb1", "#5aa0d0", "#a3413a", "#6b6b6b")


def draw_accuracy(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard eval` into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in document["results"] if row["exchange"] != WHOLE_MODEL]
    whole = next(row for row in document["results"] if row["exchange"] == WHOLE_MODEL)
    first = rows[0]["exchange"]
    rows = [row for row in rows if row["exchange"] == first]
    plain_weights, plain_wire = rows[0]["weights"], rows[0]["wire"]
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    _panel(
        figure.add_subplot(1, 2, 1),
        [
            (row["wire"], row["bytes_per_token"] / 1000, row)
            for row in rows
            if row["weights"] == plain_weights
        ],
        whole,
        f"Wires, with weights in {plain_weights}",
        "KB moved per token, all layers, out and back",
    )
    _panel(
        figure.add_subplot(1, 2, 2),
        [(row["weights"], row["expert_bytes"] / 1e6, row) for row in rows if row["wire"] == plain_wire],
        whole,
        f"Weights, with rows in {plain_wire}",
        "MB of experts' weights, all ranks",
    )
    hardware = document["hardware"]
    figure.supxlabel(
        f"{whole['questions']} questions, {document['ranks']} ranks; bars: 95%, of the difference to the whole model "
        f"(dashed).\n{hardware['cpu']}, {document['date'][:10]}",
        fontsize=8,
    )
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(
    axes: Any, points: list[tuple[str, float, dict[str, Any]]], whole: dict[str, Any], title: str, below: str
) -> None:
    level = 100 * whole["accuracy"]["value"]
    axes.axhline(level, color="black", linestyle="--", linewidth=1)
    for place, (name, size, row) in enumerate(points):
        value = 100 * row["accuracy"]["value"]
        low, high = (level + 100 * row["difference"][end] for end in ("low", "high"))
        color = _COLORS[place % len(_COLORS)]
        spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar(size, value, spread, color=color, marker="o", capsize=3, linewidth=1, label=name)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(below)
    axes.set_ylabel("% of answers that are right")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
