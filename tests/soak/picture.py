"""The picture of a soak: memory, what is open, and speed, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.lab.plots import _color, _figure, _machine
from tokenyard.units import MB


def draw_soak(document: dict[str, Any], path: Path) -> None:
    """Draw a document of a soak: memory, what is open, and speed."""
    samples, growth, counts = document["samples"], document["growth"], document["counts"]
    minutes = [sample["seconds"] / 60 for sample in samples]
    memories = {
        "memory": "all processes",
        "lasting_memory": "those that live all along",
        "shared_memory": "shared memory",
    }
    with _figure(path, 9.0, 8.0, _machine(document)) as figure:
        above, between, under = figure.subplots(3, 1, sharex=True)
        for place, (name, label) in enumerate(memories.items()):
            slope = f": {growth[name]['value'] / MB:+.2f} MB in 10 minutes" if name in growth else ""
            above.plot(minutes, [s[name] / MB for s in samples], color=_color(place), label=label + slope)
        above.set_ylabel("MB held at rest")
        above.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.08))
        for place, name in enumerate(("descriptors", "threads", "sockets", "processes")):
            between.plot(minutes, [sample[name] for sample in samples], color=_color(place), label=name)
        between.set_ylabel("open at rest")
        between.legend(frameon=False, fontsize=9, ncols=4)
        speeds = [sample["round_trips_per_s"] for sample in samples]
        under.plot(minutes, speeds, ".", color=_color(0), markersize=3)
        under.set_ylabel("round trips a second\nof the steady layers")
        under.set_xlabel("minutes")
        for axes in (above, between, under):
            axes.set_ylim(bottom=0)
            axes.margins(x=0.01)
        figure.suptitle(
            f"{counts['episodes']:,} episodes on {document['ranks']} {document['kind']}: {counts['round_trips']:,} "
            f"round trips, {counts['checked']:,} results checked, {counts['lost']:,} ranks killed and replaced",
            fontsize=10,
        )
