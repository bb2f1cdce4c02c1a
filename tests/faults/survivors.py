"""Kills of a rank at random moments of calls that survive it: every result of those that are left must be right.

python -m tests.faults.survivors --trials 60 --write bench/results/survivors-cpu.json --page docs/guide/losing-ranks.md
"""

import json
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
from tests.faults.trials import run_trials
from tests.models import batch, build, spec
from tokenyard.errors import RankError
from tokenyard.routing import Placement

DEADLINE = 10.0  # seconds
EXCHANGES = ("one_sided", "two_sided", "allgather")
_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Which rank of how many is killed, and when."""

    seed: int
    exchange: str
    world: int
    victim: int
    step: int  # in which it is killed
    after: float  # seconds from the beginning of that step
    starts: bool  # whether batches are started and finished, or the layers called


def draw(seed):
    chance = random.Random(seed)
    world = chance.choice([2, 3, 4])
    return Trial(
        seed=seed,
        exchange=EXCHANGES[seed % len(EXCHANGES)],
        world=world,
        victim=chance.randrange(world),
        step=chance.randrange(_STEPS // 2),
        after=chance.uniform(0.0, 0.01),
        starts=chance.random() < 0.5,
    )


def rank_main(group, trial, folder):
    """How many results of this rank were wrong, and who is gone at its end."""
    twice = Placement.replicated(
        Placement.contiguous(8, group.size),
        {
            expert: [(rank + 1) % group.size]
            for rank, row in enumerate(Placement.contiguous(8, group.size).table)
            for expert in row
        },
    )
    layers = [spec(name, sum="choices", num_experts=8, placement=twice) for name in ("first", "second")]
    with group.patience(30):
        plan = ty.plan(layers, group, exchange=trial.exchange, survive=True)
        built = [build(plan, layer.name) for layer in layers]
        given = [batch(layer, 4, seed=group.rank) for layer in layers]
        expected = [module(*x) for module, x in zip(built, given, strict=True)]
        group.barrier()
    wrong = 0
    for step in range(_STEPS):
        if group.rank == trial.victim and step == trial.step:
            threading.Timer(trial.after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for module, x, y_TH in zip(built, given, expected, strict=True):
            found_TH = module.start(*x).finish() if trial.starts else module(*x)
            wrong += not torch.equal(found_TH, y_TH)
        if group.rank == trial.victim and step == _STEPS // 2:
            time.sleep(1.0)  # it is killed in any case
    said = {"wrong": wrong, "lost": plan.stats()["first"].lost}
    (Path(folder) / f"rank-{group.rank}.json").write_text(json.dumps(said))


def run(trial):
    """What each rank said; None for one that said nothing."""
    with tempfile.TemporaryDirectory(prefix="survivors-") as folder:
        try:
            ty.launch(trial.world, rank_main, trial, folder, ranks="processes", deadline=DEADLINE)
        except RankError as error:
            if f"rank {trial.victim}" not in str(error):
                print(error)
        paths = [Path(folder) / f"rank-{rank}.json" for rank in range(trial.world)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def complaints(trial, said_by_rank):
    """What is wrong with what the ranks of a trial said."""
    expected = {"wrong": 0, "lost": [trial.victim]}
    return [
        f"rank {rank}: {said}"
        for rank, said in enumerate(said_by_rank)
        if (said is not None if rank == trial.victim else said != expected)
    ]


def sentence(summary):
    """For the documentation."""
    return (
        f"**{summary['trials']} kills** of one of two to four processes at a random moment of their calls, over three "
        f"exchanges: wrong or missing results in **{len(summary['off'])}**."
    )


def judge(seed, summary):
    """A trial, and what was wrong in it."""
    trial = draw(seed)
    return trial, complaints(trial, run(trial))


def main():
    summary = run_trials(
        __doc__, judge, sentence, trials=60, summary={}, benchmark="survivors", mark="survivors"
    )
    return 1 if summary["off"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
