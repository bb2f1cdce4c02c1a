"""Trials of who is named: a rank is stopped for longer than the deadline and comes back, or is killed.

Four processes call a layer, or make subgroups, again and again. Another process stops one of them at a random moment,
for the deadline and 0.3 to 0.9 s more, and continues it; or kills it while subgroups are made. Ranks that got an error
stay and go on without the lost rank, or leave at once. Every rank that raises must name the victim and nobody else; so
must the victim itself, when it is awake again.

    python -m tests.faults.named --trials 1000 --write bench/results/named-cpu.json --page docs/guide/faults.md
    python -m tests.faults.named --trials 20 --seed 7 --only two_sided
"""

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tokenyard as ty
from tests.faults.starting import kill
from tests.faults.trials import run_trials
from tests.models import batch, build, spec
from tokenyard.errors import RankError
from tokenyard.exchange import EXCHANGES

DEADLINE = 1.0  # seconds
WORLD = 4
# What the ranks do: call a layer over an exchange, or make subgroups.
JOBS = (*EXCHANGES, "subgroups")
# Seconds after the fault within which every rank must have said something. A rank that misses others at a meeting
# waits for half a minute.
_LONGEST = 45.0
_AFTER = 3  # calls without the lost rank
_COUNTS = ("trials", "no loss", "unnamed", "innocent", "different", "other")
_counting = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the ranks do, and what happens to one of them."""

    seed: int
    job: str
    hosts: int
    victim: int
    lethal: bool  # whether the victim is killed, or else stopped
    after: float  # seconds from the first call
    beyond: float  # seconds that the victim is stopped for, beyond the deadline
    leaves: bool  # whether ranks end at an error, or stay


def draw(seed, jobs=JOBS):
    chance = random.Random(seed)
    job = jobs[seed % len(jobs)]
    return Trial(
        seed=seed,
        job=job,
        hosts=chance.choice([1, 2]) if job == "hierarchical" else 1,
        victim=chance.randrange(WORLD),
        lethal=job == "subgroups" and chance.random() < 0.7,
        after=chance.uniform(0.0, 0.4),
        beyond=chance.uniform(0.3, 0.9),
        leaves=chance.random() < 0.5,
    )


class _Rank:
    """One rank of a trial: what it does, and what it has to say."""

    def __init__(self, group, trial, folder):
        self.group, self.trial, self.folder = group, trial, Path(folder)
        self.said = {"peers": None, "text": "", "after": ""}
        self._plan = self._layer = None
        if trial.job != "subgroups":
            layer = spec("moe", num_experts=8)
            with group.patience(30):
                self._plan = ty.plan([layer], group, exchange=trial.job, max_tokens=8)
                self._layer = build(self._plan, "moe")
                self._batch = batch(layer, 4, seed=group.rank)
                self._layer(*self._batch)

    def call(self):
        if self._layer is not None:
            self._layer(*self._batch)
        else:
            self.group.subgroup(range(WORLD)).barrier()

    def until_it_raises(self):
        """Call until an error comes, or the trial is over."""
        while not (self.folder / "over").exists():
            self.call()

    def record(self):
        (self.folder / f"said-{self.group.rank}").write_text(json.dumps(self.said))

    def go_on(self, error):
        """What the ranks that stay do without the lost one; the victim is refused."""
        if self._plan is None or not error.peers or self.group.rank in error.peers:
            return
        with self.group.patience(20):
            self._plan.go_on_without(error.peers)
            for _ in range(_AFTER):
                self.call()


def rank_main(group, trial, folder):
    rank = _Rank(group, trial, folder)
    (rank.folder / f"pid-{group.rank}").write_text(str(os.getpid()))
    with group.patience(30):
        group.barrier()
    (rank.folder / f"begun-{group.rank}").touch()
    try:
        rank.until_it_raises()
    except ty.PeerLost as error:
        if not (rank.folder / "over").exists():  # else others have ended, because nobody was lost
            rank.said |= {"peers": list(error.peers), "text": str(error)}
            rank.record()
            if trial.leaves:
                raise
            try:
                rank.go_on(error)
            except ty.TokenyardError as later:
                rank.said["after"] = str(later)
    rank.record()
    _wait((rank.folder / "over").exists)  # it lives on: nobody may blame it


def _wait(there, seconds=60.0):
    until = time.monotonic() + seconds
    while not there() and time.monotonic() < until:
        time.sleep(0.005)


def _strike(trial, folder, ended):
    """Stop or kill the victim at its moment; end the trial when all that are left have said something."""

    def count(what, ranks=range(WORLD)):
        return sum((folder / f"{what}-{rank}").exists() for rank in ranks)

    _wait(lambda: count("begun") == WORLD or ended.is_set())
    if count("begun") == WORLD:
        pid = int((folder / f"pid-{trial.victim}").read_text())
        time.sleep(trial.after)
        kill(pid, signal.SIGKILL if trial.lethal else signal.SIGSTOP)
        if not trial.lethal:
            time.sleep(DEADLINE + trial.beyond)
            kill(pid, signal.SIGCONT)
        speak = [rank for rank in range(WORLD) if not (trial.lethal and rank == trial.victim)]
        # A trial in which nobody raises is over after a while; one in which somebody did, when all have.
        _wait(lambda: count("said", speak) or ended.is_set(), DEADLINE + 8.0)
        if count("said", speak):
            _wait(lambda: count("said", speak) == len(speak) or ended.is_set(), _LONGEST)
            time.sleep(0.0 if trial.leaves else 0.5)
    (folder / "over").touch()


def run(trial):
    """What each rank said; None for one that said nothing."""
    with tempfile.TemporaryDirectory(prefix="named-") as name:
        folder, ended = Path(name), threading.Event()
        striking = threading.Thread(target=_strike, args=(trial, folder, ended), daemon=True)
        striking.start()
        # Ranks that leave, or are killed, are an error for `launch`; its deadline is that of the last rank to report.
        with contextlib.suppress(RankError):
            ty.launch(
                WORLD,
                _with_deadline,
                trial,
                name,
                ranks="processes",
                deadline=2 * _LONGEST,
                hosts=trial.hosts,
                threads_per_rank=1,
            )
        ended.set()
        striking.join()
        said = [folder / f"said-{rank}" for rank in range(WORLD)]
        return [json.loads(path.read_text()) if path.exists() else None for path in said]


def _with_deadline(group, trial, folder):
    group.deadline = DEADLINE
    rank_main(group, trial, folder)


def findings(trial, said_by_rank):
    """What came of a trial, as names of counts: each with a sentence."""
    victim, found = trial.victim, []
    named = {
        rank: said["peers"] for rank, said in enumerate(said_by_rank) if said and said["peers"] is not None
    }
    if not named:
        return [("no loss", "nobody raised")] if all(said_by_rank) else [("other", "ranks said nothing")]
    for rank, peers in named.items():
        if not peers:
            found.append(("unnamed", f"rank {rank} names nobody: {said_by_rank[rank]['text']}"))
        elif peers != [victim]:
            found.append(("innocent", f"rank {rank} names {peers}: {said_by_rank[rank]['text']}"))
    if len({tuple(peers) for peers in named.values()}) > 1:
        found.append(("different", f"verdicts {named}"))
    for rank, said in enumerate(said_by_rank):
        if said is None and not (trial.lethal and rank == victim):
            found.append(("other", f"rank {rank} said nothing"))
        elif said and said["peers"] is None:
            found.append(("other", f"rank {rank} met no loss"))
        elif said and said["after"]:
            found.append(("other", f"rank {rank} cannot go on: {said['after']}"))
    return found


def judge(seed, summary, jobs=JOBS):
    """Make a trial of one of these jobs, and count what came of it; return the trial and its complaints."""
    trial = draw(seed, jobs)
    found = findings(trial, run(trial))
    with _counting:
        counts = summary["counts"].setdefault(trial.job, dict.fromkeys(_COUNTS, 0))
        counts["trials"] += 1
        for name in {name for name, _ in found}:
            counts[name] += 1
    return trial, [f"{name}: {text}" for name, text in found if name != "no loss"]


def markdown(summary):
    """For the documentation."""
    lines = [
        "| ranks that | trials | without a loss | victim unnamed | others named | verdicts differ | other |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for job in sorted(summary["counts"], key=JOBS.index):
        does = "make subgroups" if job == "subgroups" else f"call a layer over `{job}`"
        lines.append(
            "| " + " | ".join([does, *(str(summary["counts"][job][name]) for name in _COUNTS)]) + " |"
        )
    return "\n".join(lines)


def sentence(summary):
    """In a word, for the terminal."""
    total = sum((Counter(counts) for counts in summary["counts"].values()), Counter())
    return ", ".join(f"{name}: {total[name]}" for name in _COUNTS)


def table(summary):
    """For the terminal."""
    made = Table(title="who is named", title_justify="left")
    for name in ("ranks", *_COUNTS):
        made.add_column(name, justify="left" if name == "ranks" else "right")
    for job in sorted(summary["counts"], key=JOBS.index):
        made.add_row(job, *(str(summary["counts"][job][name]) for name in _COUNTS))
    return made


def main():
    summary = run_trials(
        __doc__,
        judge,
        sentence,
        trials=1000,
        summary={"counts": {}, "deadline_s": DEADLINE},
        benchmark="who is named",
        mark="named",
        text=markdown,
        jobs=JOBS,
    )
    Console().print(table(summary))
    return 1 if summary["off"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
