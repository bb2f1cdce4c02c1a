"""Trials from outside: a rank is stopped for a little longer than the deadline, and continued; all ranks call again.

Every rank calls its layer again and again, with rows that tell which call they are of, and goes on when a call raises.
Another process stops one of the ranks at a random moment. Whatever the ranks raise, a result that comes must be that of
its own call, and none may come from a plan that has lost a rank.

    python -m tests.faults.late --trials 200 --write bench/results/late-cpu.json --page docs/guide/losing-ranks.md
"""

import collections
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import tokenyard as ty
from tests.faults.starting import kill
from tests.faults.trials import run_trials

DEADLINE = 0.5  # seconds
EXCHANGES = ("one_sided", "two_sided", "allgather")
_HIDDEN = 4
_CALLS = 250
_PAUSE = 0.002  # seconds between two calls


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One group, and when one of its ranks is stopped, for how long."""

    seed: int
    exchange: str
    world: int
    in_flight: int
    victim: int
    after: float  # seconds from the first call
    beyond: float  # seconds that it is stopped for, beyond the deadline
    pause: float  # seconds before a rank calls again after an error


def draw(seed):
    chance = random.Random(seed)
    world = chance.randint(2, 4)
    return Trial(
        seed=seed,
        exchange=EXCHANGES[seed % len(EXCHANGES)],
        world=world,
        in_flight=chance.choice([1, 2]),
        victim=chance.randrange(world),
        after=chance.uniform(0.0, 0.4),
        beyond=chance.choice([0.02, 0.1, 0.3, 0.8]) * chance.uniform(0.5, 1.0),
        pause=chance.choice([0.0, 0.01, 0.1]),
    )


def call_again_and_again(group, trial, folder):
    """What came of every call of this rank: right, wrong, or the name of an error."""
    spec = ty.LayerSpec(
        name="moe",
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_experts=group.size,
        top_k=1,
        activation="relu2",
        experts="reference",
        dtype=torch.float32,
        weights="fp32",
    )
    eye = torch.eye(_HIDDEN).repeat(group.size, 1, 1)
    group.deadline = DEADLINE
    plan = ty.plan([spec], group, exchange=trial.exchange, max_tokens=4, in_flight=trial.in_flight)
    layer = ty.MoELayer(plan, "moe", ty.ExpertWeights(w13=eye, w2=eye).select(plan.local_experts("moe")))
    (Path(folder) / f"pid-{group.rank}").write_text(str(os.getpid()))
    with group.patience(20):
        group.barrier()
    (Path(folder) / f"begun-{group.rank}").touch()
    draws = torch.Generator().manual_seed(trial.seed + group.rank)
    said = collections.Counter()
    lost = False
    for number in range(_CALLS):
        tokens = int(torch.randint(1, 5, (), generator=draws))
        ids_TK = torch.randint(0, group.size, (tokens, 1), generator=draws)
        value = 1.0 + group.rank + 8 * number  # its square is exact in float32
        x_TH = torch.full((tokens, _HIDDEN), value)
        try:
            y_TH = layer(x_TH, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(tokens, 1)))
        except ty.TokenyardError as error:
            said[type(error).__name__] += 1
            lost = lost or isinstance(error, ty.PeerLost)
            time.sleep(min(trial.pause, 0.005 if number > 50 else trial.pause))
            continue
        right = bool((y_TH == value * value).all())
        said["wrong" if not right else "after a loss" if lost else "right"] += 1
        time.sleep(_PAUSE)
    return dict(said)


class _Stops(threading.Thread):
    """Stops the victim at its moment, and continues it."""

    def __init__(self, trial, folder):
        super().__init__(daemon=True)
        self.trial, self.folder, self.over = trial, Path(folder), threading.Event()

    def run(self):
        begun = [self.folder / f"begun-{rank}" for rank in range(self.trial.world)]
        while not all(path.exists() for path in begun):
            if self.over.wait(0.002):
                return
        pid = int((self.folder / f"pid-{self.trial.victim}").read_text())
        time.sleep(self.trial.after)
        kill(pid, signal.SIGSTOP)
        time.sleep(DEADLINE + self.trial.beyond)
        kill(pid, signal.SIGCONT)


def run(trial):
    """What the calls of each rank gave."""
    with tempfile.TemporaryDirectory(prefix="late-") as folder:
        stops = _Stops(trial, folder)
        stops.start()
        try:
            return ty.launch(trial.world, call_again_and_again, trial, folder, ranks="processes", deadline=20)
        finally:
            stops.over.set()
            stops.join()


def complaints(said_by_rank):
    """What is wrong with what the ranks of a trial said."""
    known = {"right", "PeerLost", "PlanBroken"}
    return [
        f"rank {rank}: {count} × {what}"
        for rank, said in enumerate(said_by_rank)
        for what, count in said.items()
        if what not in known
    ]


def sentence(summary):
    """For the documentation."""
    return (
        f"**{summary['trials']} trials** on groups of two to four processes, over every exchange: a rank was lost in "
        f"**{summary['with a loss']}**, wrong rows or wrong errors in **{len(summary['off'])}**."
    )


def judge(seed, summary):
    """A trial, and what was wrong in it; counts those in which a rank was lost."""
    trial = draw(seed)
    said = run(trial)
    summary["with a loss"] += any("PeerLost" in each for each in said)
    return trial, complaints(said)


def main():
    counts = {"with a loss": 0, "deadline_s": DEADLINE}
    summary = run_trials(
        __doc__, judge, sentence, trials=200, summary=counts, benchmark="late ranks", mark="late"
    )
    return 1 if summary["off"] or not summary["with a loss"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
