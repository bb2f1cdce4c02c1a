"""Start the ranks of a soak, watch them, and say what came of it.

The ranks run in a thread of this process (as threads of it, or as processes), and write how far they are into a folder.
If they have written nothing for far longer than any wait may take, something hangs: that is a finding, and they are
ended. Ranks that came apart are started anew, a few times, from the next episode on.
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
from tokenyard.lab.soaking.measuring import Sample, check_measurable
from tokenyard.lab.soaking.run_folder import Counts, Finding, RunFolder
from tokenyard.lab.soaking.settings import Settings
from tokenyard.lab.soaking.verdict import Growth, judge
from tokenyard.lab.soaking.worker import RunArguments, work
from tokenyard.temporary_folders import temporary_folder

# Groups that may break before a soak is given up.
_MOST_BREAKS = 3
# Ranks that may be killed in one soak: a night of losses has fewer.
_MOST_REPLACEMENTS = 1_000_000
# Seconds between two looks at the ranks.
_LOOK = 0.25


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a soak has done so far."""

    seconds: float
    counts: Counts
    sample: Sample | None  # the latest
    findings: int
    last_finding: Finding | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a soak."""

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


def soak(settings: Settings, on_progress: Callable[[Progress], None] = lambda progress: None) -> Report:
    """Run a soak; report progress a few times a second. `KeyboardInterrupt` ends it early, with what was found."""
    check_measurable()
    began = time.monotonic()
    with temporary_folder("tokenyard-soak-") as folder:
        run_folder = RunFolder(folder)
        done = _soak_in_runs(settings, run_folder, began, on_progress)
        samples = run_folder.samples()
        growth, leaks = judge(samples)
        findings = [*_without_echoes(run_folder.findings()), *leaks]
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


def _soak_in_runs(
    settings: Settings, run_folder: RunFolder, began: float, on_progress: Callable[[Progress], None]
) -> Counts:
    """Run the ranks; start them again where a run fails."""
    done = Counts()
    for _ in range(_MOST_BREAKS):
        run_folder.expect_episode(None)
        arguments = RunArguments(
            folder=str(run_folder.folder), launcher=os.getpid(), began=began, first_episode=done.episodes
        )
        whole = _work(settings, arguments, run_folder, done, on_progress)
        done += run_folder.progress() or Counts()
        run_folder.write_progress(Counts())
        if whole:
            break
        done += Counts(episodes=1)  # the one in which they came apart
    return done


def _work(
    settings: Settings,
    arguments: RunArguments,
    run_folder: RunFolder,
    before: Counts,
    on_progress: Callable[[Progress], None],
) -> bool:
    """Run one group of ranks; return whether it reached the end."""
    errors: list[BaseException] = []
    ended = threading.Event()  # a `join` that is interrupted takes a thread that runs for one that has ended
    ranks = threading.Thread(
        target=_launch, args=(settings, arguments, errors, ended), name="soak", daemon=True
    )
    ranks.start()
    watch = _Watch(settings, run_folder)
    while not ended.is_set():
        try:
            ended.wait(_LOOK)
            on_progress(_progress(run_folder, arguments, before))
            if watch.hangs():
                run_folder.add_finding(Finding(kind="hang", what=watch.complaint, episode=watch.episode))
                _end_processes(settings, run_folder)
                ended.wait(settings.deadline)
                return False
        except KeyboardInterrupt:
            run_folder.stop()
    if errors and not run_folder.findings():
        run_folder.add_finding(Finding(kind="error", what=f"{type(errors[0]).__name__}: {errors[0]}"))
    return not errors


def _launch(
    settings: Settings, arguments: RunArguments, errors: list[BaseException], ended: threading.Event
) -> None:
    try:
        launch(
            settings.ranks,
            work,
            settings,
            arguments,
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
    """Notices when ranks make no progress."""

    def __init__(self, settings: Settings, run_folder: RunFolder) -> None:
        # A loss takes several waits: the deadline itself, a fresh process, and the meeting of all.
        self._patience = 6 * settings.deadline + 60.0
        self._run_folder = run_folder
        self._seen, self._since = run_folder.progress(), time.monotonic()

    @property
    def episode(self) -> int:
        """The episode that the ranks have not finished."""
        return self._seen.episodes if self._seen else 0

    @property
    def complaint(self) -> str:
        """The finding, if the ranks hang."""
        return f"no episode has ended for {self._patience:.0f} s, and no wait has raised"

    def hangs(self) -> bool:
        """Whether the ranks have made no progress for too long."""
        if (now := self._run_folder.progress()) != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since > self._patience


def _end_processes(settings: Settings, run_folder: RunFolder) -> None:
    """End the ranks that hang. Threads cannot be ended; they go with this process."""
    for pid in run_folder.pids() if settings.kind == "processes" else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _progress(run_folder: RunFolder, arguments: RunArguments, before: Counts) -> Progress:
    findings = run_folder.findings()
    return Progress(
        seconds=time.monotonic() - arguments.began,
        counts=before + (run_folder.progress() or Counts()),
        sample=run_folder.last_sample(),
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
