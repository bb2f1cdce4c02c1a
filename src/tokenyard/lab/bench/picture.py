"""The figures of `bench dispatch` as a picture.

On the CPU a bar per contestant, its quartiles, and the floor across them; on a GPU time against tokens by format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.errors import InputError
from tokenyard.lab.bench.cuda_figures import ALL_RANKS

ENDINGS = (".png", ".svg", ".pdf")
# By contestant, in the order of the registry; gray is for the peer. They differ in lightness, too.
COLORS = ("#1b4f8a", "#5aa0d0", "#e0963a", "#5f9e6e", "#8c6bb1", "#b03a48")
PEER_COLOR = "#a9a9a9"
_WIDTH = 0.72  # of the space of one group


def check_picture(path: Path) -> None:
    """Raise unless a picture can be drawn into this file. Asked before the time is spent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "matplotlib is not installed",
            expected="matplotlib 3.8 or newer, which draws the picture",
            fix="pip install 'tokenyard[plot]'",
        ) from error
    if path.suffix.lower() not in ENDINGS or not path.parent.is_dir():
        raise InputError(
            f"a picture cannot be written to {path}",
            expected=f"a file in a folder that exists, ending in {', '.join(ENDINGS)}",
            fix="choose another --plot",
        )


def draw_dispatch(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `bench dispatch` into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = document["results"]
    cases: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["num_tokens"], row["wire"]), []).append(row)
    exchanges = list(dict.fromkeys(row["exchange"] for row in rows))
    has_gloo = rows[0]["gloo_ms"] is not None
    bar = _WIDTH / (len(exchanges) + has_gloo)

    figure = Figure(figsize=(max(7.0, 2.2 + 2.4 * len(cases)), 5.0), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.add_subplot()
    named: set[str] = set()

    def label(name: str) -> str:
        """The name, once: the legend has one entry for each."""
        new = name not in named
        named.add(name)
        return name if new else "_"

    def draw(place: float, name: str, prefix: str, row: dict[str, Any], color: str) -> None:
        ms, low, high = (row[f"{prefix}{end}"] for end in ("ms", "ms_low", "ms_high"))
        axes.bar(place, ms, bar * 0.92, color=color, label=label(name))
        axes.errorbar(place, ms, [[ms - low], [high - ms]], color="#333333", capsize=3, linewidth=1)
        axes.annotate(
            f"{ms:.1f}",
            (place, high),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
        )

    for group, found in enumerate(cases.values()):
        left = group - _WIDTH / 2
        for row in found:
            position = exchanges.index(row["exchange"])
            color = COLORS[position % len(COLORS)]
            draw(left + (position + 0.5) * bar, row["exchange"], "", row, color)
        if has_gloo:
            draw(left + (len(exchanges) + 0.5) * bar, "bare gloo", "gloo_", found[0], PEER_COLOR)
        floor = found[0]["floor_ms"]
        ends = (left - 0.04, left + _WIDTH + 0.12)
        axes.hlines(floor, *ends, color="black", linewidth=1.8, linestyle="--", label=label("floor (copy)"))
        axes.annotate(
            f"{floor:.1f}",
            (ends[1], floor),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=9,
        )

    first = rows[0]
    axes.set_xticks(
        range(len(cases)),
        [f"{wire} out, {first['combine_wire']} back\n{tokens} tokens a rank" for tokens, wire in cases],
    )
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms, median and quartiles (lower is better)")
    axes.set_title(
        f"Dispatch and combine of one layer on {first['world']} {first['kind']}\n"
        f"H {first['hidden_size']}, K {first['top_k']}, E {first['num_experts']}",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    hardware = document["hardware"]
    figure.supxlabel(
        f"{hardware['cpu']}, {hardware['cores']} cores, {first['threads']} thread a rank, {first['rounds']} rounds, "
        f"{document['date'][:10]}.\nShared memory on one host: this is not the speed of a link.\n"
        "Gloo moves ready bytes; floor: each rank copies the same bytes.",
        fontsize=8,
    )
    save_figure(figure, path)


def draw_dispatch_cuda(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `bench dispatch --device cuda` into a file: a panel for each number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [
        row
        for row in document["results"]
        if (row["operation"], row["launch"]) == ("dispatch", ALL_RANKS) and row["us"] is not None
    ]
    worlds = sorted({row["world"] for row in rows})
    wires = list(dict.fromkeys(row["wire"] for row in rows))
    figure = Figure(figsize=(2.6 + 4.2 * max(1, len(worlds)), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    for number, world in enumerate(worlds, start=1):
        axes = figure.add_subplot(1, len(worlds), number)
        first = number == 1
        for position, wire in enumerate(wires):
            color = COLORS[position % len(COLORS)]
            found = sorted(
                (row for row in rows if (row["world"], row["wire"]) == (world, wire)),
                key=lambda row: int(row["num_tokens"]),
            )
            tokens = [row["num_tokens"] for row in found]
            name = wire if first else "_"
            axes.plot(tokens, [row["us"] for row in found], color=color, marker="o", label=name)
            axes.plot(tokens, [row["floor_us"] for row in found], color=color, linestyle="--", linewidth=1)
            peer = [(row["num_tokens"], row["peer_us"]) for row in found if row["peer_us"] is not None]
            axes.plot([at for at, _ in peer], [us for _, us in peer], "x", color=color)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["num_tokens"] for row in rows if row["world"] == world})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_title(f"{world} virtual ranks", fontsize=11)
        axes.set_xlabel("tokens a rank")
        axes.spines[["top", "right"]].set_visible(False)
        if first:
            axes.set_ylabel("dispatch, µs (lower is better)")
            axes.plot([], [], color="black", linestyle="--", linewidth=1, label="floor (copy)")
            if any(row["peer_us"] is not None for row in rows):
                axes.plot([], [], "x", color="black", label="FlashInfer,\nwithout quantizing")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    shape = document["shape"]
    figure.supxlabel(
        f"{document['gpu']}, H {shape['hidden_size']}, K {shape['top_k']}, E {shape['num_experts']}, "
        f"a copy moves {document['copy_TB_per_s']:.2f} TB/s, {document['date'][:10]}.\n"
        "Ranks share one GPU's memory: this is not the speed of a link.",
        fontsize=8,
    )
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, or say why that cannot be."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error})",
            expected="a file in a folder that exists",
            fix="choose another --plot",
        ) from error
