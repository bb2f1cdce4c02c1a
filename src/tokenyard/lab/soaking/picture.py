"""A soak as a picture: memory, what is open, and speed, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.units import MB

_COLORS = ("#1b4f8a", "#e0963a", "#5f9e6e", "#8c6bb1", "#5aa0d0", "#a3413a")


def draw_soak(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard soak` into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samples = document["samples"]
    minutes = [sample["seconds"] / 60 for sample in samples]
    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    above, between, under = figure.subplots(3, 1, sharex=True)
    _draw_memory(above, minutes, document)
    for place, name in enumerate(("descriptors", "threads", "sockets", "processes")):
        between.plot(minutes, [sample[name] for sample in samples], color=_COLORS[place], label=name)
    between.set_ylabel("open at rest")
    between.set_ylim(bottom=0)
    between.legend(frameon=False, fontsize=9, ncols=4)
    speeds = [sample["round_trips_per_s"] for sample in samples]
    under.plot(minutes, speeds, ".", color=_COLORS[0], markersize=3)
    under.set_ylabel("round trips a second\nof the steady layers")
    under.set_ylim(bottom=0)
    under.set_xlabel("minutes")
    for axes in (above, between, under):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    counts, hardware = document["counts"], document["hardware"]
    figure.suptitle(
        f"{counts['episodes']:,} episodes on {document['ranks']} {document['kind']}: {counts['round_trips']:,} round "
        f"trips, {counts['checked']:,} results checked, {counts['lost']:,} ranks killed and replaced",
        fontsize=10,
    )
    figure.supxlabel(f"{hardware['cpu']}, {hardware['cores']} cores, {document['date'][:10]}", fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_memory(axes: Any, minutes: list[float], document: dict[str, Any]) -> None:
    samples, growth = document["samples"], document["growth"]
    names = {
        "memory": "all processes",
        "lasting_memory": "those that live all along",
        "shared_memory": "shared memory",
    }
    for place, (name, label) in enumerate(names.items()):
        slope = f": {growth[name]['value'] / MB:+.2f} MB in 10 minutes" if name in growth else ""
        values = [sample[name] / MB for sample in samples]
        axes.plot(minutes, values, color=_COLORS[place], label=label + slope)
    axes.set_ylabel("MB held at rest")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.08))
