"""The figures of `bench experts --device cuda` and of `bench layer` as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.lab.bench.expert_figures import CASES
from tokenyard.lab.bench.picture import COLORS, PEER_COLOR, save_figure

_WIDTH = 0.72  # of a bar


def draw_experts(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `bench experts --device cuda` into a file: a panel for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    rows = [row for row in document["results"] if row["us"] is not None]
    names = list(dict.fromkeys(row["case"] for row in rows))
    formats = list(dict.fromkeys(row["weights"] for row in rows))
    figure = Figure(figsize=(2.6 + 3.8 * max(1, len(names)), 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    for number, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), number)
        here = [row for row in rows if row["case"] == name]
        for format in dict.fromkeys(row["weights"] for row in here):
            color = COLORS[formats.index(format) % len(COLORS)]
            found = sorted(
                (row for row in here if row["weights"] == format), key=lambda row: int(row["size"])
            )
            sizes = [row["size"] for row in found]
            axes.plot(sizes, [row["us"] for row in found], color=color, marker="o", label=format)
            axes.plot(sizes, [row["floor_us"] for row in found], color=color, linestyle="--", linewidth=1)
            peers = [(row["size"], row["best_peer_us"]) for row in found if row["best_peer_us"] is not None]
            axes.plot([at for at, _ in peers], [us for _, us in peers], "x", color=color)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["size"] for row in here})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        case = CASES[name]
        axes.set_title(
            f"{name}: H {case.hidden_size}, I {case.intermediate_size},\n"
            f"{case.local_experts} of {case.num_experts} experts, K {case.top_k}",
            fontsize=11,
        )
        axes.set_xlabel("pairs of a row and an expert" if case.counts == "rows" else case.counts)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        if number == 1:
            axes.set_ylabel("whole expert stage, µs (lower is better)")
        if number == len(names):
            axes.plot([], [], color="black", linestyle="--", linewidth=1, label="floor")
            if any(row["best_peer_us"] is not None for row in rows):
                axes.plot([], [], "x", color="black", label="best peer,\nwithout sorting\nand sums")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.supxlabel(
        f"{document['gpu']}, reads {document['read_TB_per_s']:.2f} TB/s, multiplies bf16 at "
        f"{document['bf16_TFLOP_per_s']:.0f} TFLOP/s, {document['date'][:10]}.",
        fontsize=8,
    )
    save_figure(figure, path)


def draw_layer(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `bench layer` into a file: times over those of an allgather, whole and of rows alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in document["results"] if row["us"] is not None]
    figure = Figure(figsize=(max(8.0, 3.4 + 2.0 * len(rows)), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {
        "whole layer": ("ratio", "us", "allgather_us"),
        "rows alone": ("exchange_ratio", "exchange_us", "allgather_exchange_us"),
    }
    reported = document["reported"]
    for number, (title, (ratio, ours, theirs)) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, 2, number)
        first = number == 1
        for place, row in enumerate(rows):
            axes.bar(place, row[ratio], _WIDTH, color=COLORS[0])
            spread = [[row[ratio] - row[f"{ratio}_min"]], [row[f"{ratio}_max"] - row[ratio]]]
            axes.errorbar(place, row[ratio], spread, color="#333333", capsize=3, linewidth=1)
            axes.annotate(
                f"{row[ours]:,.0f}\nof {row[theirs]:,.0f} µs",
                (place, 0),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
                color="white",
            )
        axes.axhline(1.0, color=PEER_COLOR, linewidth=1.8, label="allgather" if first else "_")
        if first:
            said = f"{reported['by']},\n{reported['on']}"
            axes.axhline(reported["ratio"], color="black", linestyle="--", linewidth=1, label=said)
            axes.set_ylabel("one_sided / allgather (lower is better)")
        names = [f"{row['weights']}\nT {row['num_tokens']}" for row in rows]
        axes.set_xticks(range(len(rows)), names, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    shape = document["shape"]
    figure.supxlabel(
        f"{document['gpu']}, virtual ranks, H {shape['hidden_size']}, I {shape['intermediate_size']}, "
        f"E {shape['num_experts']}, K {shape['top_k']}, {document['date'][:10]}.\n"
        "Ranks share one GPU's memory: this is not the speed of a link.",
        fontsize=8,
    )
    save_figure(figure, path)
