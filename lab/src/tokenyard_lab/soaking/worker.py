"""What a rank does in a soak: episodes, an agreement after each, and pauses in which memory is measured.

    ┌► steady layers ─► episode ─► meeting ─► (rest: rank 0 measures) ─┐
    └──────────────────────────────────────────────────────────────────┘

Rank 0 is never killed, so that its leaks add up for as long as the soak lasts. At each meeting it decides whether to go
on, and whether to rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tokenyard.errors import Drifted, PeerLost
from tokenyard.group import Group
from tokenyard_lab.soaking.episodes import RUNS, STEADY_TRIPS, KnownLayers, Tally, draw_episode, steady_layers
from tokenyard_lab.soaking.loss import join, lose_a_rank
from tokenyard_lab.soaking.measuring import let_freed_memory_go, measure, settle
from tokenyard_lab.soaking.run_folder import Counts, Finding, FindingKind, RunFolder
from tokenyard_lab.soaking.settings import Settings


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The arguments of a rank's run: its folder, when the run began, and its first episode."""

    folder: str
    launcher: int  # the process that started the ranks
    began: float  # on the clock that all processes of a machine share
    first_episode: int = 0


def work(group: Group, settings: Settings, arguments: RunArguments) -> None:
    """Run episodes until the soak ends. A new rank begins with the one that it joins."""
    if settings.kind == "processes":
        let_freed_memory_go()
    run_folder = RunFolder(arguments.folder)
    run_folder.write_pid(group.rank)
    joined = run_folder.expected_episode() if group.rank else None
    worker = _Worker(group, settings, arguments, run_folder)
    try:
        if joined is None:
            worker.start()
        else:
            worker.join(joined)
        while worker.goes_on:
            worker.do_episode()
        worker.end()
    except Exception as error:
        kind: FindingKind = "hang" if isinstance(error, PeerLost) else "error"
        what = f"{type(error).__name__}: {error}"
        run_folder.add_finding(Finding(kind=kind, what=what, episode=worker.number, rank=group.rank))
        raise


class _Worker:
    """One rank of a soak; on rank 0, also the counts of all ranks."""

    def __init__(
        self, group: Group, settings: Settings, arguments: RunArguments, run_folder: RunFolder
    ) -> None:
        self.group, self.settings, self.arguments, self.run_folder = group, settings, arguments, run_folder
        self.number = arguments.first_episode
        self.goes_on = True
        self.counts = Counts()
        self.steady: KnownLayers | None = None
        self._next_sample = arguments.began
        self._steady_trips, self._steady_seconds = 0, 0.0

    def start(self) -> None:
        """Start together with all other ranks."""
        self._serve()

    def join(self, number: int) -> None:
        """Start in the middle of an episode, in the place of a rank that was lost in it."""
        self.number, tally = number, Tally()
        self.group = join(self.group, self.settings, draw_episode(self.settings, number), tally)
        self._serve()
        self._meet(tally)

    def do_episode(self) -> None:
        """Call the steady layers, run one episode, and agree with the other ranks."""
        tally = Tally()
        self._go_steadily(tally)
        episode = draw_episode(self.settings, self.number)
        if episode.kind == "loss":
            self.end()  # the group of the steady layers will be broken
            self.group = lose_a_rank(self.group, self.settings, episode, self.run_folder, tally)
            self._serve()
        else:
            RUNS[episode.kind](self.group, episode, tally)
        self._meet(tally, lost=int(episode.kind == "loss"))

    def end(self) -> None:
        """Close the plan of the steady layers."""
        if self.steady is not None:
            self.steady.plan.close()
            self.steady = None

    def _serve(self) -> None:
        self.steady = steady_layers(self.group, self.settings.exchanges[0])

    def _go_steadily(self, tally: Tally) -> None:
        assert self.steady is not None
        before, started = tally.round_trips, time.monotonic()
        self.steady.go(tally, STEADY_TRIPS)
        self._steady_trips += tally.round_trips - before
        self._steady_seconds += time.monotonic() - started

    def _meet(self, tally: Tally, *, lost: int = 0) -> None:
        """Report this rank's findings and counts, learn whether to go on, and rest if rank 0 says so."""
        for complaint in tally.complaints:
            finding = Finding(kind="wrong result", what=complaint, episode=self.number, rank=self.group.rank)
            self.run_folder.add_finding(finding)
        mine = {"episode": self.number, "round_trips": tally.round_trips, "checked": tally.checked}
        orders = {"goes_on": self._is_time_left(), "rests": time.monotonic() >= self._next_sample}
        by_rank = self.group.gather_json(mine | orders, phase="the end of an episode")
        if any(other["episode"] != self.number for other in by_rank):
            raise Drifted(
                f"the ranks are in episodes {[other['episode'] for other in by_rank]}",
                expected="all ranks in one episode",
                fix="report it: the soak itself has drifted",
                rank=self.group.rank,
            )
        if self.group.rank == 0:
            self.run_folder.expect_episode(None)
            self.counts += Counts(
                episodes=1,
                round_trips=max(other["round_trips"] for other in by_rank),
                checked=sum(other["checked"] for other in by_rank),
                lost=lost,
            )
            self.run_folder.write_progress(self.counts)
        self.number += 1
        self.goes_on = by_rank[0]["goes_on"]
        if by_rank[0]["rests"]:
            self._rest()

    def _is_time_left(self) -> bool:
        """Whether there is time for another episode. Rank 0 decides."""
        settings = self.settings
        if settings.episodes is not None and self.number + 1 >= settings.episodes:
            return False
        if settings.seconds is not None and time.monotonic() >= self.arguments.began + settings.seconds:
            return False
        return not self.run_folder.stopped()

    def _rest(self) -> None:
        """Pause all ranks while rank 0 measures their memory."""
        if self.group.rank == 0 or self.settings.kind == "processes":
            settle()
        self.group.barrier(phase="a rest")
        if self.group.rank == 0:
            self._next_sample = time.monotonic() + self.settings.sample_every
            sample = measure(
                self.arguments.launcher,
                seconds=time.monotonic() - self.arguments.began,
                episode=self.number,
                round_trips_per_s=self._steady_trips / max(self._steady_seconds, 1e-9),
                device=self.group.device,
            )
            self._steady_trips, self._steady_seconds = 0, 0.0
            self.run_folder.add_sample(sample)
        self.group.barrier(phase="the end of a rest")
