"""The figures of `bench experts --device cuda` and of `bench layer` as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.bench.expert_figures import CASES
from tokenyard.bench.picture import COLORS, PEER_COLOR, save_figure

_WIDTH = 0.36  # of a bar; two of them stand in a group


def draw_experts(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `bench experts --device cuda` into a file: a panel for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
        axes.set_xlabel("tokens" if case.all_local else "pairs of a row and an expert")
        axes.spines[["top", "right"]].set_visible(False)
        if number == 1:
            axes.set_ylabel("whole expert stage, µs (lower is better)")
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
    """Draw a document of `bench layer` into a file: the whole layer on the left, rows alone on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in document["results"] if row["us"] is not None]
    figure = Figure(figsize=(max(7.5, 3.0 + 2.2 * len(rows)), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"whole layer": ("us", "allgather_us"), "rows alone": ("exchange_us", "allgather_exchange_us")}
    for number, (title, names) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, 2, number)
        for side, (name, label, color) in enumerate(
            zip(names, ("one_sided", "allgather"), (COLORS[0], PEER_COLOR), strict=True)
        ):
            places = [group + (side - 0.5) * _WIDTH for group in range(len(rows))]
            times = [row[name] for row in rows]
            below = [row[name] - row[f"{name}_min"] for row in rows]
            above = [row[f"{name}_max"] - row[name] for row in rows]
            axes.bar(places, times, _WIDTH * 0.94, color=color, label=label if number == 1 else "_")
            axes.errorbar(
                places, times, [below, above], color="#333333", capsize=3, linewidth=1, linestyle="none"
            )
            for place, row in zip(places, rows, strict=True):
                axes.annotate(
                    f"{row[name]:.0f}",
                    (place, row[f"{name}_max"]),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
        axes.set_xticks(range(len(rows)), [f"{row['weights']}\nT {row['num_tokens']}" for row in rows])
        axes.set_yscale("log")
        axes.margins(y=0.12)
        axes.set_title(title, fontsize=11)
        axes.set_ylabel("µs of all ranks (lower is better)" if number == 1 else "")
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
