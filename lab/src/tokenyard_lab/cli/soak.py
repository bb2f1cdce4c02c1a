"""`tokenyard soak`: ranks run random work as long as you like; every result is checked, and memory must not grow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenyard.cli.interrupts import describe_progress
from tokenyard.cli.machine import provenance
from tokenyard.cli.options import JSON_FLAG, LOADED_EXCHANGES, ROWS_DEVICE, option
from tokenyard.cli.output import Output, console, say
from tokenyard.cli.parts import load_part, refuse_override
from tokenyard.cli.tables import show_table
from tokenyard.errors import InputError
from tokenyard.units import MB, size
from tokenyard_lab.cli.options import OUT_FILE, PLOT_FILE, RANK_COUNT

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokenyard_lab.soaking import Report

EXIT_OFF = 1
# Findings shown at the end; `--json` has all.
_MOST_SHOWN = 12


def soak(
    minutes: float = option(10.0, "How many minutes.", min=0.01),
    episodes: int | None = option(None, "End after this number of episodes, however long they take.", min=1),
    ranks: int = RANK_COUNT,
    processes: bool = option(True, "Ranks as processes or as threads.", "--processes/--threads"),
    exchange: list[str] | None = LOADED_EXCHANGES,
    losses: bool | None = option(
        None,
        "Kill ranks, and let fresh ones take their places.",
        "--losses/--no-losses",
        shown="losses, on a CPU",
    ),
    device: str = ROWS_DEVICE,
    seed: int = option(0, "The seed of everything that is drawn at random."),
    deadline: float = option(
        20.0, "Seconds that a rank waits for another before that is a finding.", min=1.0
    ),
    out: Path | None = OUT_FILE,
    plot: Path | None = PLOT_FILE,
    as_json: bool = JSON_FLAG,
) -> None:
    """Let ranks work for minutes or for a night: nothing may be wrong, hang, leak or grow."""
    from tokenyard.group.forkserver import start_forkserver

    # Torch remembers the last 2,000 collectives of a process, 1.1 KB each: that looks like a leak until it is full.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    if processes:
        start_forkserver("tokenyard_lab.soaking.worker")  # it loads torch while this process does
    from tokenyard.exchange import EXCHANGES, resolve
    from tokenyard.group import thread_groups
    from tokenyard_lab.plots import check_picture, draw_soak
    from tokenyard_lab.soaking import Settings
    from tokenyard_lab.soaking import soak as run_soak

    refuse_override()
    (group,) = thread_groups(1, device=device)  # raises where there is no such device
    on_cpu = group.device.type == "cpu"
    if losses and not on_cpu:
        raise InputError(
            f"--losses with --device {device}",
            expected="losses on a CPU: a soak kills no ranks on GPUs yet",
            fix="leave out --losses",
        )
    output = Output(as_json, out)
    check_picture(plot)
    settings = Settings(
        ranks=ranks,
        kind="processes" if processes else "threads",
        seconds=None if episodes is not None else 60 * minutes,
        episodes=episodes,
        exchanges=tuple(load_part(name, resolve) for name in exchange or reversed(EXCHANGES)),
        device=device,
        seed=seed,
        deadline=deadline,
        losses=on_cpu if losses is None else losses,
    )
    with _Display(settings.seconds) as display:
        describe_progress(display.describe)
        report = run_soak(settings, display.on_progress)
    document = _document(report)
    output.deliver(document, lambda: _show(report))
    if plot is not None:
        draw_soak(document, plot)
    if not report.passed:
        raise typer.Exit(EXIT_OFF)


def _document(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    settings = report.settings
    return {
        "command": "soak",
        "passed": report.passed,
        "ranks": settings.ranks,
        "kind": settings.kind,
        "exchanges": [name if isinstance(name, str) else name.name for name in settings.exchanges],
        "device": settings.device,
        "seed": settings.seed,
        "seconds": round(report.seconds, 1),
        "counts": asdict(report.counts),
        "findings": [asdict(finding) for finding in report.findings],
        # Bytes in 10 minutes, with their 95% intervals.
        "growth": {name: asdict(growth) for name, growth in report.growth.items()},
        "samples": [asdict(sample) for sample in report.samples],
        **provenance(),
    }


class _Display:
    """The progress of a soak on stderr: live in a terminal, else one line a minute."""

    def __init__(self, seconds: float | None) -> None:
        from rich.live import Live

        self._seconds = seconds
        self._out = console(stderr=True)
        self._latest: Report | None = None
        self._live = Live(console=self._out, refresh_per_second=2, transient=True, get_renderable=self._now)
        self._minutes_shown = 0

    def __enter__(self) -> _Display:
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._out.is_terminal:
            self._live.stop()

    def on_progress(self, report: Report) -> None:
        """Show new progress."""
        news = self._latest is None or len(report.findings) > len(self._latest.findings)
        self._latest = report
        if news and report.findings:
            say(f"✗ {report.findings[-1]}", style="red", on=self._out)
        if not self._out.is_terminal and report.seconds // 60 > self._minutes_shown:
            self._minutes_shown = int(report.seconds // 60)
            say(_in_words(report), on=self._out)

    def describe(self) -> str:
        """The progress in one line."""
        return "" if self._latest is None else _done(self._latest)

    def _now(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        if self._latest is None:
            return Text("starting the ranks …", style="dim")
        lines: list[RenderableType] = [Text(_in_words(self._latest))]
        if self._seconds is not None:
            lines.append(ProgressBar(total=self._seconds, completed=min(self._seconds, self._latest.seconds)))
        return Group(*lines)


def _in_words(report: Report) -> str:
    """The progress in one line, with the latest sample."""
    parts = [f"{report.seconds / 60:.1f} min", _done(report)]
    for sample in report.samples[-1:]:
        parts += [
            size(sample.memory),
            f"{sample.descriptors} descriptors",
            f"{sample.threads} threads",
            f"{sample.round_trips_per_s:,.0f} round trips/s",
        ]
    return ", ".join(parts)


def _done(report: Report) -> str:
    """Counts of what was done, and of findings."""
    counts = report.counts

    def number(value: int, one: str, many: str) -> str:
        return f"{value:,} {one if value == 1 else many}"

    return ", ".join(
        [
            number(counts.episodes, "episode", "episodes"),
            number(counts.round_trips, "round trip", "round trips"),
            number(counts.checked, "result checked", "results checked"),
            number(counts.lost, "rank killed and replaced", "ranks killed and replaced"),
            number(len(report.findings), "finding", "findings"),
        ]
    )


def _show(report: Report) -> None:
    if report.growth:
        figures = ("growth", "95% interval", "in the end")
        rows = [
            (
                name.replace("_", " "),
                f"{growth.value / MB:+.2f}",
                f"{growth.low / MB:+.2f} to {growth.high / MB:+.2f}",
                size(getattr(report.samples[-1], name)),
            )
            for name, growth in report.growth.items()
        ]
        title = "What grows, in MB per 10 minutes, after the warm-up"
        show_table(("", *figures), rows, right=figures, title=title)
    for finding in report.findings[:_MOST_SHOWN]:
        say(f"✗ {finding}", style="red")
    if len(report.findings) > _MOST_SHOWN:
        say(f"… and {len(report.findings) - _MOST_SHOWN} more", style="red")
    say(
        f"{_done(report)}, in {report.seconds / 60:.1f} min",
        style="green" if report.passed else "red",
    )
