"""Accuracy against bytes, as a picture: of rows on the wire on the left, of the experts' weights on the right.

Below the accuracy stands the error of the logits, which moves before the answers do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.experts.base import EXACT
from tokenyard.lab.evaluation.table import WHOLE_MODEL
from tokenyard.units import KB, MB

_COLORS = ("#1b4f8a", "#e0963a", "#5f9e6e", "#8c6bb1", "#5aa0d0", "#a3413a", "#6b6b6b")


def _held(row: dict[str, Any]) -> str:
    """How a row holds its weights, and the numbers between its products where these are quantized, too."""
    inner = row.get("inner", EXACT)
    return str(row["weights"]) + ("" if inner == EXACT else f", {inner} between")


def draw_accuracy(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard eval` into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in document["results"] if row["exchange"] != WHOLE_MODEL]
    whole = next(row for row in document["results"] if row["exchange"] == WHOLE_MODEL)
    first = rows[0]["exchange"]
    rows = [row for row in rows if row["exchange"] == first]
    plain_wire = rows[0]["wire"]
    figure = Figure(figsize=(10.5, 7.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    panels = (
        (
            [(row["wire"], row["bytes_per_token"] / KB, row) for row in rows if _held(row) == _held(rows[0])],
            f"Wires, with weights in {_held(rows[0])}",
            "KB moved per token, all layers, out and back",
        ),
        (
            [(_held(row), row["expert_bytes"] / MB, row) for row in rows if row["wire"] == plain_wire],
            f"Weights, with rows in {plain_wire}",
            "MB of experts' weights, all ranks",
        ),
    )
    for column, (points, title, below) in enumerate(panels, start=1):
        above = figure.add_subplot(2, 2, column)
        _draw_accuracy(above, points, whole)
        above.set_title(title, fontsize=11)
        under = figure.add_subplot(2, 2, 2 + column, sharex=above)
        _draw_errors(under, points)
        under.set_xlabel(below)
        under.set_xlim(left=0)
        for axes in (above, under):
            axes.spines[["top", "right"]].set_visible(False)
    hardware = document["hardware"]
    figure.supxlabel(
        f"{whole['questions']} questions, {document['ranks']} ranks; bars: 95%, of the difference to the whole model "
        f"(dashed).\n{hardware['cpu']}, {document['date'][:10]}",
        fontsize=8,
    )
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


Points = list[tuple[str, float, dict[str, Any]]]


def _draw_accuracy(axes: Any, points: Points, whole: dict[str, Any]) -> None:
    level = 100 * whole["accuracy"]["value"]
    axes.axhline(level, color="black", linestyle="--", linewidth=1)
    for place, (name, size, row) in enumerate(points):
        value = 100 * row["accuracy"]["value"]
        low, high = (level + 100 * row["difference"][end] for end in ("low", "high"))
        spread = [[max(0.0, value - low)], [max(0.0, min(high, 100.0) - value)]]
        color = _COLORS[place % len(_COLORS)]
        axes.errorbar(size, value, spread, color=color, marker="o", capsize=3, linewidth=1, label=name)
    # At least half a point is shown: differences that nobody can tell from zero should not fill the picture.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, level - 0.5), max(high, level + 0.1))
    axes.set_ylabel("% of answers that are right")
    axes.legend(frameon=False, fontsize=9)


def _draw_errors(axes: Any, points: Points) -> None:
    for place, (_, size, row) in enumerate(points):
        axes.plot(size, 100 * row["logit_error"], "o", color=_COLORS[place % len(_COLORS)])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("error of the logits, %")
