"""Start the ranks of a soak, watch them, and return a report.

The ranks run in a thread of this process (as threads of it, or as processes), and write how far they are into a folder.
If they have written nothing for far longer than any wait may take, something hangs: that is a finding, and they are
ended. If a group breaks, its ranks are started again, a few times, with the next episode.
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
from tokenyard.temporary_folders import temporary_folder
from tokenyard_lab.soaking.measuring import Sample, check_measurable
from tokenyard_lab.soaking.run_folder import Counts, Finding, RunFolder
from tokenyard_lab.soaking.settings import Settings
from tokenyard_lab.soaking.verdict import Growth, judge
from tokenyard_lab.soaking.worker import RunArguments, work

# Groups that may break before a soak is given up.
_MOST_BREAKS = 3
# Ranks that may be replaced in one soak: more than a night of losses kills.
_MOST_REPLACEMENTS = 1_000_000
# Seconds between two checks of the ranks' progress.
_LOOK = 0.25


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a soak. While it runs: what was done and found so far, the latest sample, and no growth."""

    settings: Settings
    seconds: float
    counts: Counts
    samples: list[Sample]
    growth: dict[str, Growth]  # by the name of what was measured
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def soak(settings: Settings, on_progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Run a soak; report progress a few times a second. `KeyboardInterrupt` ends it early, with what was found."""
    check_measurable()
    with temporary_folder("tokenyard-soak-") as folder:
        return _Soak(settings, RunFolder(folder), on_progress).run()


class _Soak:
    """A soak in the process that starts the ranks."""

    def __init__(
        self, settings: Settings, run_folder: RunFolder, on_progress: Callable[[Report], None]
    ) -> None:
        self.settings, self.run_folder, self.on_progress = settings, run_folder, on_progress
        self.began = time.monotonic()
        self.done = Counts()  # in runs that have ended
        # Seconds without progress that are a hang. A loss takes several waits: a deadline, a fresh process, a meeting.
        self.patience = 6 * settings.deadline + 60.0

    def run(self) -> Report:
        """Run the ranks; start them again where a run fails."""
        for _ in range(_MOST_BREAKS):
            reached_end = self._run_ranks()
            self.done = self._counts()
            self.run_folder.write_progress(Counts())
            if reached_end:
                break
            self.done += Counts(episodes=1)  # the one in which they came apart
        samples = self.run_folder.samples()
        growth, leaks = judge(samples)
        findings = [*_without_echoes(self.run_folder.findings()), *leaks]
        if not self.done.episodes and not findings:
            findings.append(Finding(kind="error", what="the ranks did nothing"))
        return self._report(samples, growth, findings)

    def _counts(self) -> Counts:
        return self.done + (self.run_folder.progress() or Counts())

    def _report(self, samples: list[Sample], growth: dict[str, Growth], findings: list[Finding]) -> Report:
        return Report(
            settings=self.settings,
            seconds=time.monotonic() - self.began,
            counts=self._counts(),
            samples=samples,
            growth=growth,
            findings=findings,
        )

    def _run_ranks(self) -> bool:
        """Run one group of ranks; return whether it reached the end."""
        self.run_folder.expect_episode(None)
        errors: list[BaseException] = []
        ended = (
            threading.Event()
        )  # a `join` that is interrupted takes a thread that runs for one that has ended
        threading.Thread(target=self._launch, args=(errors, ended), name="soak", daemon=True).start()
        seen, since = self.run_folder.progress(), time.monotonic()
        while not ended.is_set():
            try:
                ended.wait(_LOOK)
                latest = self.run_folder.last_sample()
                self.on_progress(self._report([latest] if latest else [], {}, self.run_folder.findings()))
                if (now := self.run_folder.progress()) != seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > self.patience:
                    what = f"no episode has ended for {self.patience:.0f} s, and no wait has raised"
                    episode = seen.episodes if seen else 0
                    self.run_folder.add_finding(Finding(kind="hang", what=what, episode=episode))
                    self._end_processes()
                    ended.wait(self.settings.deadline)
                    return False
            except KeyboardInterrupt:
                self.run_folder.stop()
        if errors and not self.run_folder.findings():
            what = f"{type(errors[0]).__name__}: {errors[0]}"
            self.run_folder.add_finding(Finding(kind="error", what=what))
        return not errors

    def _launch(self, errors: list[BaseException], ended: threading.Event) -> None:
        settings = self.settings
        arguments = RunArguments(
            folder=str(self.run_folder.folder),
            launcher=os.getpid(),
            began=self.began,
            first_episode=self.done.episodes,
        )
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
                replacements=_MOST_REPLACEMENTS
                if settings.loses_ranks and settings.kind == "processes"
                else 0,
            )
        except Exception as error:
            errors.append(error)
        finally:
            ended.set()

    def _end_processes(self) -> None:
        """End the ranks that hang. Threads cannot be ended; they go with this process."""
        for pid in self.run_folder.pids() if self.settings.kind == "processes" else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Findings without those that only repeat another rank's error, if that error is a finding of the same episode."""
    causes = {f.episode for f in findings if f.kind == "error" and not f.what.startswith(_ECHOES)}
    return [
        f for f in findings if f.episode not in causes or not (f.kind == "hang" or f.what.startswith(_ECHOES))
    ]


_ECHOES = ("PeerFailed", "PeerLost", "GroupError")
