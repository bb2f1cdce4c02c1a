"""Faults while experts move: a rank is killed, stopped or slowed at every stage of a move; the others serve on.

Three processes call a layer whose experts are on two ranks each, and move them meanwhile; or a fourth one comes, or the
first one leaves. One of the three is hit at a stage of it, or the one that comes ("join"). Then those that are left
have one placement, the old or the new one, and every result has the bits of before, those of a fresh rank, too.

    python -m tests.faults.moves --trials 252 --write bench/results/moves-cpu.json --page docs/guide/balancing.md
"""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import tokenyard as ty
from tests.faults.trials import run_trials
from tests.models import batch, build, spec
from tokenyard.elastic import join_plan, moving, take_over
from tokenyard.elastic.joining import Joining
from tokenyard.elastic.move_under_way import MoveUnderWay
from tokenyard.elastic.rebalancing import Progress, Rebalance
from tokenyard.elastic.resizing import placement_with, placement_without
from tokenyard.errors import RankError
from tokenyard.group import DistributedGroup, distributed, rejoin
from tokenyard.routing import Placement

DEADLINE = 3.0  # seconds
WORLD = 3
OLD = Placement.replicated(Placement.round_robin(6, WORLD), {e: [(e + 1) % WORLD] for e in range(6)})
NEW = Placement.replicated(Placement.contiguous(6, WORLD), {e: [(e // 2 + 1) % WORLD] for e in range(6)})
# What the victim is hit in, and how often it passes there before.
STAGES = {"agreement": 2, "copying": 12, "ready": 1, "decision": 1, "switch": 1, "switched": 1}
# The same for one that comes.
JOINING = {"connecting": 2, "agreement": 3, "copying": 12, "ready": 1, "decision": 2, "switched": 3}
ACTIONS = ("kill", "stop", "slow")
CHANGES = ("rebalance", "join", "grow", "shrink")
GOALS = {
    "rebalance": NEW,
    "join": placement_with(OLD, 1),
    "grow": placement_with(OLD, 1),
    "shrink": Placement.explicit(6, placement_without(OLD, [0], [8] * WORLD).table[1:]),
}
EXCHANGES = ("one_sided", "two_sided", "allgather")
_CALLS = 400


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Which rank is hit, where, and how."""

    seed: int
    exchange: str
    victim: int
    stage: str
    passes: int  # how often the victim passes the stage before it is hit
    action: str
    change: str  # what the ranks do
    wait: bool  # whether ranks wait for the move, or call the layer meanwhile


def stages_of(change):
    """The stages of a change, and how often its victim passes them."""
    # Where a rank comes, those that are there give experts, and copy none: they look once before, and once behind.
    return {"join": JOINING, "grow": STAGES | {"copying": 2}}.get(change, STAGES)


def draw(seed):
    chance = random.Random(seed)
    change = CHANGES[seed // (len(STAGES) * len(ACTIONS)) % len(CHANGES)]
    stages = stages_of(change)
    stage = list(stages)[seed % len(stages)]
    first = int((change, stage) == ("shrink", "copying"))  # the one that leaves copies nothing
    return Trial(
        seed=seed,
        exchange=chance.choice(EXCHANGES),
        victim=WORLD if change == "join" else chance.randrange(first, WORLD),
        change=change,
        stage=stage,
        passes=chance.randrange(stages[stage]),
        action=ACTIONS[seed // len(STAGES) % len(ACTIONS)],
        wait=stage != "decision" and chance.random() < 0.3,
    )


def hit(action):
    """What happens to this process now."""
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {DEADLINE + 2}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(0.5)


def lay_trap(plan, trial, folder):
    """Hit this rank when it comes to the stage so many times."""
    left = [trial.passes]

    def passed():
        if left[0] == 0:
            (Path(folder) / "hit").touch()
            hit(trial.action)
        left[0] -= 1

    def before(owner, name, when=lambda *_: True, *, after=False, both=False):
        method = getattr(owner, name)

        def trapped(*arguments, **options):
            if (both or not after) and when(*arguments):
                passed()
            result = method(*arguments, **options)
            if (both or after) and when(*arguments):
                passed()
            return result

        setattr(owner, name, trapped)

    if trial.stage == "connecting":
        before(distributed, "meet", both=True)
    elif trial.stage == "agreement":
        before(DistributedGroup if plan is None else plan.group, "gather_json")
    elif trial.stage == "copying":
        before(Rebalance, "_check")
    elif trial.change == "join" and trial.stage == "ready":
        before(Rebalance, "copy", after=True)
    elif trial.change == "join" and trial.stage == "decision":
        before(Joining, "_answer", both=True)
    elif trial.change == "join":
        before(ty.MoELayer, "forward")
    elif trial.stage == "ready":
        before(Rebalance, "_report", lambda _, progress: progress is Progress.READY, after=True)
    elif trial.stage == "decision":
        moves = plan._changing().moves.under_way
        all_ready = lambda _: moves.move and moves.move.decision == Progress.READY  # noqa: E731
        before(plan.exchange.announcer, "noticed", all_ready, after=True)
    else:
        before(MoveUnderWay, "_conclude", after=trial.stage == "switched")


def begin(plan, trial):
    """Begin what the ranks of a trial do."""
    if trial.change == "rebalance":
        return plan.rebalance({"moe": NEW}, wait=trial.wait)
    if trial.change == "shrink":
        return plan.shrink([0], wait=trial.wait)
    return plan.grow(1, seconds=3 * DEADLINE, wait=trial.wait)


def come(address, layer, folder):
    """What a fresh rank does, and saw. Where the others do not take it in, or lose another one, it may end."""
    said, plan = {"wrong": 0, "lost": None, "errors": []}, None
    try:
        plan = join_plan([layer], rejoin(address, rank=WORLD, seconds=5 * DEADLINE))
        built = plan.layer("moe")
        take_over(plan, seconds=3 * DEADLINE)
        given, due_TH = batch(layer, 5, seed=WORLD), torch.load(Path(folder) / "fresh.pt")
        try:
            for _ in range(3):
                said["wrong"] += not torch.equal(built(*given), due_TH)
        except ty.PeerLost as error:
            said["lost"] = list(error.peers)
        if said["lost"]:
            plan.go_on_without(said["lost"])
            for _ in range(3):
                said["wrong"] += not torch.equal(built(*given), due_TH)
    except ty.TokenyardError as error:
        said["left"] = f"{type(error).__name__}: {error}"
    if plan is not None:
        said["table"] = plan.wiring("moe").exchange_spec.placement.table
        plan.close()
    return said


def held_memory():
    """The files of shared memory that this process holds open or mapped."""
    held = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(entry).startswith("/memfd:"):
                held.add(entry.stat().st_ino)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            held.add(int(line.split()[4]))
    return held


def rank_main(everybody, trial, folder):
    """Write down what this rank saw, and what it left behind."""
    moving.PIECE = 1024  # each rank gets 12 or more
    layer = spec(
        sum="choices", num_experts=6, placement=OLD, spare_experts=4, hidden_size=64, intermediate_size=32
    )
    group, held_before = everybody, held_memory()
    if trial.change in ("join", "grow"):
        group = everybody.subgroup(range(WORLD)) if everybody.rank < WORLD else None
        address = everybody.gather_json(group and group.address)[0]
    if group is None:
        if trial.victim == WORLD:
            lay_trap(None, trial, folder)
        said = come(address, layer, folder)
    else:
        group.deadline = DEADLINE
        said = serve(group, layer, trial, folder)
    # A thread that waits for a rank that is stopped ends when its waits do: after 5.1 s, where nothing else runs.
    copying = [thread for thread in threading.enumerate() if thread.name == "moving experts"]
    for thread in copying:
        thread.join(4 * DEADLINE)
    said["threads"] = sum(thread.is_alive() for thread in copying)
    gc.collect()
    said["memory"] = sorted(held_memory() - held_before)
    (Path(folder) / f"rank-{everybody.rank}.json").write_text(json.dumps(said))


def serve(group, layer, trial, folder):
    """What a rank saw that was there: whether results were right, who was lost, and the placement at the end."""
    with group.patience(30):
        plan = ty.plan([layer], group, exchange=trial.exchange)
        built = build(plan, "moe")
        given = batch(layer, 5, seed=group.rank)
        before_TH = built(*given)
        fresh_TH = built(*batch(layer, 5, seed=WORLD))  # the bits do not depend on the rank
        if group.rank == 0:
            torch.save(fresh_TH, Path(folder) / "fresh.pt")
        group.barrier()
    if group.rank == trial.victim:
        lay_trap(plan, trial, folder)
    said, move = {"wrong": 0, "lost": None, "errors": []}, None
    grows = trial.change in ("join", "grow")
    try:
        move = begin(plan, trial)
        calls = 0
        while not move.is_done and not plan.stats()["moe"].moves.given_up and calls < 100 * _CALLS:
            said["wrong"] += not torch.equal(built(*given), before_TH)
            calls += 1
        if trial.change == "shrink" and group.rank == 0 and move.is_done:
            move.wait()
            said["left"] = True
        # A fresh rank makes three calls; in the last one of the loop, all had switched.
        for _ in range(0 if "left" in said else 2 if grows and not trial.wait else 3):
            said["wrong"] += not torch.equal(built(*given), before_TH)
    except ty.PeerLost as error:
        said["lost"] = list(error.peers)
    except ty.TokenyardError as error:
        said["errors"].append(f"{type(error).__name__}: {error}")
    shifted = trial.change == "shrink" and plan.group.size < WORLD  # rank 0 has left
    if said["lost"] == [trial.victim - shifted] and group.rank != trial.victim:
        if said["lost"][0] < plan.group.size:  # else it was not taken in, and nobody is missed
            plan.go_on_without(said["lost"])
        for _ in range(3):
            said["wrong"] += not torch.equal(built(*given), before_TH)
    said["table"] = plan.wiring("moe").exchange_spec.placement.table
    plan.close()
    return said


def run(trial):
    """What each rank said, None for one that said nothing; and whether the victim was hit."""
    with tempfile.TemporaryDirectory(prefix="moves-") as folder:
        world = WORLD + (trial.change in ("join", "grow"))
        try:
            ty.launch(world, rank_main, trial, folder, ranks="processes", deadline=60)
        except RankError as error:
            if trial.action != "kill":
                print(trial, error)
        paths = [Path(folder) / f"rank-{rank}.json" for rank in range(world)]
        said = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        return said, (Path(folder) / "hit").exists()


def tables_of(placement):
    """The tables that ranks have with a placement: all of them, and without any one."""
    left = [placement.without([rank]) for rank in range(placement.world)]
    return [[list(row) for row in one.table] for one in (placement, *left)]


def complaints(trial, said_by_rank):
    """What is wrong with what the ranks of a trial said."""
    found = []
    others = [(rank, said) for rank, said in enumerate(said_by_rank) if rank != trial.victim]
    for rank, said in others:
        if said is None:
            found.append(f"rank {rank} said nothing")
            continue
        if said["wrong"] or said["errors"] or said["threads"] or said["memory"]:
            found.append(f"rank {rank}: {said}")
        lost = [None, [trial.victim], *([[trial.victim - 1]] if trial.change == "shrink" else [])]
        if said["lost"] not in lost or (trial.action == "slow" and said["lost"]):
            found.append(f"rank {rank} lost {said['lost']}")
        known = tables_of(OLD) + tables_of(GOALS[trial.change])
        if "left" not in said and said["table"] not in known:
            found.append(f"rank {rank} has another placement: {said['table']}")
    staying = [said for _, said in others if said and "left" not in said]
    if len({json.dumps(said["table"]) for said in staying}) > 1:
        found.append("the ranks that are left have different placements")
    return found


def sentence(summary):
    """For the documentation."""
    return (
        f"**{summary['hit']} faults** in moves of experts, on three processes over every exchange "
        f"({summary['rebalance']} while they rebalance, {summary['grow']} while a fourth comes, {summary['join']} of "
        f"that one itself, {summary['shrink']} while the first leaves): a rank killed, stopped or slowed while it "
        f"connects, in the agreement, while copying, when ready, and around the switch. In **{summary['new']}** those "
        f"that were left had the new placement, in **{summary['old']}** the old one; wrong results, different "
        f"placements, threads or shared memory that were left, or silence: **{len(summary['off'])}**."
    )


def judge(seed, summary):
    """A trial, and what was wrong in it; counts which placement was left."""
    trial = draw(seed)
    said, was_hit = run(trial)
    summary["hit"] += was_hit
    others = [each for rank, each in enumerate(said) if each and rank != trial.victim and "left" not in each]
    summary["old" if others and others[0]["table"] in tables_of(OLD) else "new"] += 1
    summary[trial.change] += 1
    return trial, complaints(trial, said)


def main():
    counts = {"hit": 0, "new": 0, "old": 0, **dict.fromkeys(CHANGES, 0), "deadline_s": DEADLINE}
    summary = run_trials(
        __doc__, judge, sentence, trials=252, summary=counts, benchmark="moves", mark="moves"
    )
    return 1 if summary["off"] or not (summary["new"] and summary["old"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
