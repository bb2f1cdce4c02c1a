"""Every picture that a command draws: figures of a benchmark, accuracy against bytes, placements, a soak over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenyard.errors import InputError
from tokenyard.experts.spec import EXACT
from tokenyard.units import KB, MB
from tokenyard_lab.evaluation.cells import OWN_DTYPE

if TYPE_CHECKING:
    from tokenyard_lab.bench.records import Document, Record

ENDINGS = (".png", ".svg", ".pdf")
# They also differ in lightness, for prints without color.
COLORS = ("#1b4f8a", "#e0963a", "#5f9e6e", "#8c6bb1", "#5aa0d0", "#a3413a", "#6b6b6b")
_PANELS_IN_A_ROW = 4


def check_picture(path: Path | None) -> None:
    """Raise unless a picture can be drawn into this file, if one is given. Called before anything is measured."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "matplotlib is not installed",
            expected="matplotlib 3.8 or newer, which draws the picture",
            fix="pip install matplotlib",
        ) from error
    if path.suffix.lower() not in ENDINGS or not path.parent.is_dir():
        raise InputError(
            f"a picture cannot be written to {path}",
            expected=f"a file in a folder that exists, ending in {', '.join(ENDINGS)}",
            fix="choose another --plot",
        )


@contextmanager
def _figure(path: Path, width: float, height: float, *below: str) -> Iterator[Any]:
    """A figure to draw on, saved at the end with these lines below it, which its file also holds as text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    yield figure
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    caption = "\n".join(below)
    figure.supxlabel(caption, fontsize=8)
    metadata = {
        ".png": {"Description": caption},
        ".svg": {"Description": caption, "Date": None},
        ".pdf": {"Subject": caption},
    }
    try:
        figure.savefig(path, dpi=150, metadata=metadata.get(path.suffix))
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error})",
            expected="a file in a folder that exists",
            fix="choose another --plot",
        ) from error


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


# -- Benchmarks --------------------------------------------------------------------------------------------


def draw_figures(document: Document, path: Path) -> None:
    """Draw the figures of a benchmark: ours with quartiles, floors dashed, the best peers as crosses.

    There is a panel for each choice of the parameters that are neither along the x-axis nor a line.
    """
    records = [record for record in document.results if record.ours is not None]
    panels: dict[str, list[Record]] = {}
    for record in records:
        others = [
            str(value) if isinstance(value, str) else f"{name} {value}"
            for name, value in record.parameters.items()
            if name not in (document.x, document.line)
        ]
        panels.setdefault(", ".join(others), []).append(record)
    lines = list(dict.fromkeys(_line_of(document, record) for record in records))
    columns = max(1, min(len(panels), _PANELS_IN_A_ROW))
    rows = max(1, -(-len(panels) // columns))
    date = str(document.provenance.get("date", ""))[:10]
    with _figure(path, 3.0 + 3.6 * columns, 0.8 + 4.0 * rows, document.title, date) as figure:
        for place, (title, found) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, columns, place)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(document.x.replace("_", " "))
            axes.set_ylabel(f"{document.unit} ({'higher' if document.is_rate else 'lower'} is better)")
            _draw_panel(axes, document, found, lines)
        if panels:
            for number, name in enumerate(lines if document.line else ["ours"]):
                axes.plot([], [], color=_color(number), marker="o", label=name)
            axes.plot([], [], "_--", color="black", label="ceiling" if document.is_rate else "floor")
            if any(record.peers for record in records):
                axes.plot([], [], "x", color="black", label="best peer")
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)


def _line_of(document: Document, record: Record) -> str:
    return "" if document.line is None else str(record.parameters.get(document.line))


def _draw_panel(axes: Any, document: Document, records: Sequence[Record], lines: Sequence[str]) -> None:
    ticks: list[Any] = list(dict.fromkeys(record.parameters.get(document.x) for record in records))
    # If the x values are several numbers, lines are drawn; else the points of a tick are drawn side by side.
    along = len(ticks) > 1 and all(isinstance(tick, int | float) for tick in ticks)
    places = {tick: float(tick) if along else float(place) for place, tick in enumerate(ticks)}
    axes.set_xticks(list(places.values()), [str(tick) for tick in ticks])
    if along:
        from matplotlib.ticker import LogFormatter, NullLocator

        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        axes.set_xticks(list(places.values()), [str(tick) for tick in ticks])
    here = list(dict.fromkeys(_line_of(document, record) for record in records))
    for number, line in enumerate(here):
        color = _color(lines.index(line))
        beside = 0.0 if along else 0.8 * ((number + 0.5) / len(here) - 0.5)
        found = {
            places[r.parameters.get(document.x)] + beside: r for r in records if _line_of(document, r) == line
        }
        at, mine = sorted(found), [found[place] for place in sorted(found)]
        ours = [record.ours for record in mine if record.ours is not None]
        around = [spread.range or (spread.median, spread.median) for spread in ours]
        errors = [
            [spread.median - low for spread, (low, _) in zip(ours, around, strict=True)],
            [high - spread.median for spread, (_, high) in zip(ours, around, strict=True)],
        ]
        medians = [spread.median for spread in ours]
        axes.errorbar(at, medians, errors, color=color, marker="o", capsize=3, linestyle="-" if along else "")
        floors = [record.floor.median if record.floor else float("nan") for record in mine]
        axes.plot(at, floors, "_--" if along else "_", color=color, linewidth=1, markersize=10)
        axes.plot(at, [record.best_peer or float("nan") for record in mine], "x", color=color)
    if not along:
        axes.set_xlim(-0.6, len(ticks) - 0.4)
        axes.set_ylim(bottom=0)


# -- Accuracy against bytes ----------------------------------------------------------------------------------


def draw_accuracy(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard eval`: against bytes of rows on the left, of experts' weights on the right.

    Below the accuracy is the error of the logits, which changes before the answers do.
    """
    whole, *rows = document["results"]
    rows = [row for row in rows if row["exchange"] == rows[0]["exchange"]]
    plain_wire = _wires(rows[0])
    panels = (
        (
            [(_wires(row), row["bytes_per_token"] / KB, row) for row in rows if _held(row) == _held(rows[0])],
            f"Wires, with weights in {_held(rows[0])}",
            "KB moved per token, all layers, out and back",
        ),
        (
            [(_held(row), row["expert_bytes"] / MB, row) for row in rows if _wires(row) == plain_wire],
            f"Weights, with rows in {plain_wire}",
            "MB of experts' weights, all ranks",
        ),
    )
    asked = f"{whole['questions']} questions, {document['ranks']} ranks"
    caption = f"{asked}; bars: 95%, of the difference to the whole model (dashed)."
    with _figure(path, 10.5, 7.2, caption, _machine(document)) as figure:
        for column, (points, title, below) in enumerate(panels, start=1):
            above = figure.add_subplot(2, 2, column)
            _draw_accuracy(above, points, whole)
            above.set_title(title, fontsize=11)
            under = figure.add_subplot(2, 2, 2 + column, sharex=above)
            for place, (_, size, row) in enumerate(points):
                under.plot(size, 100 * row["logit_error"], "o", color=_color(place))
            under.set_ylim(bottom=0)
            under.set_ylabel("error of the logits, %")
            under.set_xlabel(below)
            under.set_xlim(left=0)


def _wires(row: dict[str, Any]) -> str:
    """The wire of a row of the document, and its combine wire if that is not the model's own dtype."""
    back = row.get("combine_wire", OWN_DTYPE)
    return str(row["wire"]) + ("" if back == OWN_DTYPE else f", {back} back")


def _held(row: dict[str, Any]) -> str:
    """The weight format of a row of the document, and its inner format if that is quantized."""
    inner = row.get("inner", EXACT)
    return str(row["weights"]) + ("" if inner == EXACT else f", {inner} between")


def _machine(document: dict[str, Any]) -> str:
    hardware = document["hardware"]
    return f"{hardware['cpu']}, {hardware['cores']} cores, {document['date'][:10]}"


def _draw_accuracy(axes: Any, points: list[tuple[str, float, dict[str, Any]]], whole: dict[str, Any]) -> None:
    level = 100 * whole["accuracy"]["value"]
    axes.axhline(level, color="black", linestyle="--", linewidth=1)
    for place, (name, size, row) in enumerate(points):
        value = 100 * row["accuracy"]["value"]
        low, high = (level + 100 * row["difference"][end] for end in ("low", "high"))
        spread = [[max(0.0, value - low)], [max(0.0, min(high, 100.0) - value)]]
        axes.errorbar(
            size, value, spread, color=_color(place), marker="o", capsize=3, linewidth=1, label=name
        )
    # The y axis spans at least half a point, so that differences within the noise do not look large.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, level - 0.5), max(high, level + 0.1))
    axes.set_ylabel("% of answers that are right")
    axes.legend(frameon=False, fontsize=9)


# -- A balanced placement ----------------------------------------------------------------------------------


def draw_balance(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard balance`: the rows of each rank over the mean, before and after, busiest first."""
    layers = document["layers"]
    columns = min(len(layers), _PANELS_IN_A_ROW)
    caption = f"{document['ranks']} ranks, {document['replicas']} replicas a layer, {document['steps']} steps"
    with _figure(path, 1.5 + 2.6 * columns, 0.8 + 2.6 * -(-len(layers) // columns), caption) as figure:
        for place, layer in enumerate(layers, start=1):
            axes = figure.add_subplot(-(-len(layers) // columns), columns, place)
            for number, (name, when) in enumerate((("rows_before", "before"), ("rows_after", "after"))):
                rows = sorted(layer[name], reverse=True)
                mean = sum(rows) / len(rows) or 1
                label = f"{when}: {layer[when]:.2f}"
                shares = [count / mean for count in rows]
                axes.step(range(len(rows)), shares, where="mid", color=_color(number), label=label)
            axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
            axes.set_ylim(bottom=0)
            axes.set_title(layer["layer"], fontsize=9)
            axes.legend(frameon=False, fontsize=8)
        figure.supylabel("rows of a rank over the mean, busiest first", fontsize=9)


# -- A soak over time ------------------------------------------------------------------------------------------


def draw_soak(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard soak`: memory, counts of open resources, and speed."""
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


# -- Training on several numbers of ranks ------------------------------------------------------------------------


def draw_losses(document: dict[str, Any], path: Path) -> None:
    """Draw a document of `tokenyard_lab.cli.same_bits`: losses, and how far they are from those on one rank."""
    runs: list[dict[str, Any]] = document["results"]
    recipe = document["recipe"]
    caption = f"{recipe['shape']['experts']} experts, {recipe['batch']} sequences a step, float32"
    with _figure(path, 11.0, 4.8, caption, _machine(document)) as figure:
        left, right = figure.subplots(1, 2)
        for number, (way, name) in enumerate(document["ways"].items()):
            alone, *others = [run for run in runs if run["way"] == way]
            if number == 0:
                for place, run in enumerate([alone, *others]):  # one line within the other
                    width = 1.2 * (len(others) - place) + 1
                    left.plot(run["losses"], color=_color(place), linewidth=width, label=_ranks(run["ranks"]))
            for place, run in enumerate(others):
                apart = [
                    abs(loss - other) for loss, other in zip(run["losses"], alone["losses"], strict=True)
                ]
                label = name if place == 0 else None
                right.plot(apart, color=_color(number), linewidth=1, label=label, zorder=3 - number)
        left.set_title('Loss with sum="choices": all runs are one line', fontsize=11)
        left.legend(frameon=False, fontsize=9, title="ranks")
        right.set_yscale("symlog", linthresh=1e-9)
        right.set_ylim(bottom=-2e-10)
        right.set_title("Difference to the loss on one rank", fontsize=11)
        right.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.04))
        for axes in (left, right):
            axes.set_xlabel("step")


def _ranks(stages: list[int]) -> str:
    return ", then ".join(map(str, stages))
