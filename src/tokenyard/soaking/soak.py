"""Start the ranks of a soak, watch them, and say what came of it.

The ranks run in a thread of this process (as threads of it, or as processes), and tell how far they are in a folder. If
they have told nothing for far longer than any wait may take, something hangs: that is a finding, and they are ended.
Ranks that came apart are started anew, a few times, from the next episode on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenyard.group import launch
from tokenyard.soaking.desk import Counts, Desk, Finding
from tokenyard.soaking.life import Shift, live
from tokenyard.soaking.measuring import Sample, check_measurable
from tokenyard.soaking.settings import Settings
from tokenyard.soaking.verdict import Growth, judge
from tokenyard.temporary_folders import temporary_folder

# Groups that may break before a soak is given up.
_MOST_BREAKS = 3
# Ranks that may be killed in one soak: a night of losses has fewer.
_MOST_REPLACEMENTS = 1_000_000
# Seconds between two looks at the ranks.
_LOOK = 0.25


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How a soak stands."""

    seconds: float
    counts: Counts
    sample: Sample | None  # the latest
    findings: int
    last_finding: Finding | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a soak."""

    settings: Settings
    seconds: float
    counts: Counts
    samples: list[Sample]
    growth: dict[str, Growth]  # by what was measured
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def soak(settings: Settings, hear: Callable[[Progress], None] = lambda progress: None) -> Report:
    """Soak, and tell how it goes a few times a second. `KeyboardInterrupt` ends it early, with what was found."""
    check_measurable()
    began = time.monotonic()
    with temporary_folder("tokenyard-soak-") as folder:
        desk = Desk(folder)
        done = _soak_in_shifts(settings, desk, began, hear)
        samples = desk.samples()
        growth, leaks = judge(samples)
        findings = [*_without_echoes(desk.findings()), *leaks]
        if not done.episodes and not findings:
            findings.append(Finding(kind="error", what="the ranks did nothing"))
    return Report(
        settings=settings,
        seconds=time.monotonic() - began,
        counts=done,
        samples=samples,
        growth=growth,
        findings=findings,
    )


def _soak_in_shifts(settings: Settings, desk: Desk, began: float, hear: Callable[[Progress], None]) -> Counts:
    """One shift, or a few where the ranks come apart."""
    done = Counts()
    for _ in range(_MOST_BREAKS):
        desk.expect(None)
        shift = Shift(folder=str(desk.folder), launcher=os.getpid(), began=began, first_episode=done.episodes)
        whole = _work(settings, shift, desk, done, hear)
        done += desk.progress() or Counts()
        desk.write_progress(Counts())
        if whole:
            break
        done += Counts(episodes=1)  # the one in which they came apart
    return done


def _work(
    settings: Settings, shift: Shift, desk: Desk, before: Counts, hear: Callable[[Progress], None]
) -> bool:
    """Run one group of ranks to its end; whether it got there."""
    errors: list[BaseException] = []
    ended = threading.Event()  # a `join` that is interrupted takes a thread that runs for one that has ended
    ranks = threading.Thread(target=_launch, args=(settings, shift, errors, ended), name="soak", daemon=True)
    ranks.start()
    watch = _Watch(settings, desk)
    while not ended.is_set():
        try:
            ended.wait(_LOOK)
            hear(_progress(desk, shift, before))
            if watch.hangs():
                desk.add_finding(Finding(kind="hang", what=watch.complaint, episode=watch.episode))
                _end_processes(settings, desk)
                ended.wait(settings.deadline)
                return False
        except KeyboardInterrupt:
            desk.stop()
    if errors and not desk.findings():
        desk.add_finding(Finding(kind="error", what=f"{type(errors[0]).__name__}: {errors[0]}"))
    return not errors


def _launch(settings: Settings, shift: Shift, errors: list[BaseException], ended: threading.Event) -> None:
    try:
        launch(
            settings.ranks,
            live,
            settings,
            shift,
            ranks=settings.kind,
            device=settings.device,
            deadline=settings.deadline,
            threads_per_rank=1,
            # Threads do not die: they leave, and come back by themselves.
            replacements=_MOST_REPLACEMENTS if settings.loses_ranks and settings.kind == "processes" else 0,
        )
    except Exception as error:
        errors.append(error)
    finally:
        ended.set()


class _Watch:
    """Sees whether ranks still get somewhere."""

    def __init__(self, settings: Settings, desk: Desk) -> None:
        # A loss takes several waits: the deadline itself, a fresh process, and the meeting of all.
        self._patience = 6 * settings.deadline + 60.0
        self._desk = desk
        self._seen, self._since = desk.progress(), time.monotonic()

    @property
    def episode(self) -> int:
        """The one that the ranks have not come out of."""
        return self._seen.episodes if self._seen else 0

    @property
    def complaint(self) -> str:
        """What is wrong, once it hangs."""
        return f"no episode has ended for {self._patience:.0f} s, and no wait has raised"

    def hangs(self) -> bool:
        """Whether nothing has happened for too long."""
        if (now := self._desk.progress()) != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since > self._patience


def _end_processes(settings: Settings, desk: Desk) -> None:
    """End the ranks that hang. Threads cannot be ended; they go with this process."""
    for pid in desk.pids() if settings.kind == "processes" else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _progress(desk: Desk, shift: Shift, before: Counts) -> Progress:
    findings = desk.findings()
    return Progress(
        seconds=time.monotonic() - shift.began,
        counts=before + (desk.progress() or Counts()),
        sample=desk.last_sample(),
        findings=len(findings),
        last_finding=findings[-1] if findings else None,
    )


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """What ranks say of each other's errors is left out, where the error itself is there."""
    causes = {f.episode for f in findings if f.kind == "error" and not f.what.startswith(_ECHOES)}
    return [
        f for f in findings if f.episode not in causes or not (f.kind == "hang" or f.what.startswith(_ECHOES))
    ]


_ECHOES = ("PeerFailed", "PeerLost", "GroupError")
