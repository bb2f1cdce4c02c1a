"""What ranks do that torchrun has started on several hosts: one job each run, its findings in a file for each rank.

    python -m torch.distributed.run … ranks.py <job> <folder> <arguments>

The same functions run on the threads of one host, for comparison.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from tests.faults.fault_points import FaultPoint, InterruptibleHierarchical
from tests.models import batch, build, raised, spec
from tokenyard.cli.doctor_hosts import examine_hosts
from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.twin import twin
from tokenyard.errors import PlanError
from tokenyard.exchange.transports import hierarchical
from tokenyard.group import failure_detector
from tokenyard_lab.hosts import network

# Seconds. Long where nothing should be lost: a busy machine is not a fault.
DEADLINE, SHORT_DEADLINE, ANSWERING = 60.0, 5.0, 5.0
EXCHANGES = ["two_sided", "allgather", "hierarchical"]
LAYERS = [
    spec("moe.0", hidden_size=64, num_experts=7),
    spec("moe.1", hidden_size=64, num_experts=7, wire="mxfp8", experts="reference"),
    spec("moe.2", hidden_size=64, num_experts=5, wire="nvfp4", combine_wire="mxfp8", experts="reference"),
]
# Every token has an expert on every rank of five. Rows are wide: beside them, announcements are few bytes.
WIDE = spec("wide", hidden_size=8192, num_experts=5, top_k=5, max_tokens=24, combine_wire="bf16")
# Rounds after which somebody would have been told that a link is cut.
MOST_ROUNDS = 100_000


class Links(network.Links):
    """Links that can be cut."""

    def cut(self, host: int, *, down: bool = False) -> None:
        """Cut a host's link: frames vanish; or the host sees, too, that its link is down."""
        self.change({"host": host, "cut": True, **({"down": True} if down else {})})

    def mend(self, host: int) -> None:
        """Undo a cut."""
        self.change({"host": host, "cut": False, "down": False})

    def end(self, host: int) -> None:
        """End a host with all that runs there, as if its power were cut."""
        self.change({"host": host, "cut": True, "end": True})


def digest(y_TH: torch.Tensor) -> str:
    """The bits of a tensor, in short."""
    return hashlib.sha256(y_TH.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def outputs(plan: ty.Plan, rank: int, rounds: int = 1) -> list[str]:
    """The bits that come out of all layers of a plan for a rank's own tokens."""
    layers = [(layer, build(plan, layer.name)) for layer in LAYERS]
    return [
        digest(built(*batch(layer, 3 + rank, seed=10 * turn + rank)))
        for turn in range(rounds)
        for layer, built in layers
    ]


def through(group: ty.Group, exchanges: list[str], rounds: int = 1) -> dict[str, list[str]]:
    """The bits of all layers, through each exchange."""
    found = {}
    for name in exchanges:
        plan = ty.plan(LAYERS, group, exchange=name)
        found[name] = outputs(plan, group.rank, rounds)
        plan.close()
    return found


def inside_and_across(group: ty.Group) -> dict[str, list[str]]:
    """Two plans at a time: one inside each host, through memory, and one over all of them."""
    here = group.on_this_host()
    inside, across = ty.plan(LAYERS, here, exchange="one_sided"), ty.plan(LAYERS, group)
    found: dict[str, list[str]] = {"inside": [], "across": []}
    for _ in range(2):
        found["inside"] += outputs(inside, here.rank)
        found["across"] += outputs(across, group.rank)
    inside.close()
    across.close()
    return found


def refused(group: ty.Group) -> dict[str, Any]:
    """`one_sided` over several hosts; what the error offers instead is taken at its word."""
    error = raised(ty.plan, LAYERS, group, exchange="one_sided")
    assert isinstance(error, PlanError)
    offered = [alternative.changes["exchange"] for alternative in error.alternatives]
    return {"error": str(error), "offered": offered, "work": through(group, offered)}


def over_a_bad_link(group: ty.Group, links: Links, hosts: int) -> dict[str, Any]:
    """20 ms and 2% of frames lost between any two hosts."""
    good, bad = {"delay": 0.0, "loss": 0.0}, {"delay": 0.01, "loss": 0.01}
    group.barrier()
    if group.rank == 0:
        links.change(*({"host": host, **bad} for host in range(hosts)))
    started = time.monotonic()
    found = through(group, EXCHANGES)
    seconds = time.monotonic() - started
    group.barrier()
    if group.rank == 0:
        links.change(*({"host": host, **good} for host in range(hosts)))
    group.barrier()
    return {"bits": found, "seconds": seconds, "links": links.change()}


def examined(group: ty.Group, links: Links) -> list[list[dict[str, Any]]]:
    """What `doctor --hosts` says of good links, and of a link that is slow and thin."""
    found = []
    for changes in ({}, {"delay": 0.02, "rate": 5e6}, {"delay": 0.0, "rate": 0.0}):
        group.barrier()
        if group.rank == 0:
            links.change({"host": 2, **changes})
        group.barrier()
        if len(found) < 2:
            found.append([asdict(finding) for finding in examine_hosts(group)])
    return found


def wide_routes(rank: int, tokens: int, top_k: int) -> ty.Routes:
    """The choices of some tokens among the experts of WIDE, of which each rank has one; the first has all."""
    draw = torch.Generator().manual_seed(rank)
    ids_TK = torch.full((tokens, 5), -1)
    ids_TK[:, :top_k] = torch.rand(tokens, 5, generator=draw).argsort(-1)[:, :top_k]
    ids_TK[0] = torch.arange(5)
    return ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(tokens, 5))


def bytes_on_links(group: ty.Group, links: Links, folder: Path, exchange: str) -> dict[str, Any]:
    """What the switch counts in a call of full batches, in one of random routes, and in one with a token of each rank.

    All three send the same messages; what differs is rows, and nothing else.
    """
    plan = ty.plan([WIDE], group, exchange=exchange)
    layer = build(plan, "wide")
    counted = {}
    longest_wait, hierarchical._LONGEST_WAIT = (
        hierarchical._LONGEST_WAIT,
        20.0,
    )  # however busy the machine is, no sums follow their announcement
    for name, tokens, top_k in (("full", 24, 5), ("random", 24, 2), ("one", 1, 5)):
        routes = wide_routes(group.rank, tokens, top_k)
        meet_past_the_network(folder, f"{exchange}-{name}-planned", group)
        before = links.sent()
        meet_past_the_network(folder, f"{exchange}-{name}-looked", group)
        layer(torch.ones(tokens, 8192).bfloat16(), routes)
        meet_past_the_network(folder, f"{exchange}-{name}-done", group)
        after = links.sent()
        meet_past_the_network(folder, f"{exchange}-{name}-looked-again", group)
        counted[name] = [
            [source, target, crossed - before.get((source, target), 0)]
            for (source, target), crossed in after.items()
        ]
    hierarchical._LONGEST_WAIT = longest_wait
    (row,) = plan.draft.rows()
    spec_ = plan.wiring("wide").exchange_spec
    strides = [spec_.dispatch_layout.stride, spec_.combine_layout.stride]
    plan.close()
    return {"counted": counted, "planned": row["links"], "strides": strides}


def meet_past_the_network(folder: Path, what: str, group: ty.Group) -> None:
    """Wait for all ranks, by way of files."""
    (folder / f"{what}.{group.rank}").touch()
    while len(list(folder.glob(f"{what}.*"))) < group.size:
        time.sleep(0.02)


def stages_apart(group: ty.Group, links: Links, folder: Path) -> list[str]:
    """Each host a stage, of as many layers and rounds as it likes, while the other host cannot be reached at all."""
    stage = group.on_this_host(name="stage")
    first = group.rank == 0
    plan = ty.plan(LAYERS if group.rank < 2 else LAYERS[:1], stage)
    built = [build(plan, wiring.spec.name) for wiring in plan.draft.wirings]
    meet_past_the_network(folder, "ready", group)
    if first:
        links.cut(1)
    while not links.change()[1]["cut"]:
        time.sleep(0.02)
    found = []
    for turn in range(2 if group.rank < 2 else 9):
        found += [digest(layer(*batch(layer.wiring.spec, 2, seed=turn))) for layer in built]
    meet_past_the_network(folder, "done", group)
    if first:
        links.mend(1)
    plan.close()
    group.barrier()  # what was sent meanwhile arrives late, and nothing is lost
    return found


def until_cut(
    group: ty.Group,
    links: Links,
    cut: Callable[[Links], None],
    after: int,
    exchange: str,
) -> dict[str, Any]:
    """Rounds without a pause, until a link is cut; then what every rank says, and how those go on that can."""
    plan = ty.plan(LAYERS, group, exchange=exchange)
    built = [(layer, build(plan, layer.name)) for layer in LAYERS]
    rank, group.deadline = group.rank, SHORT_DEADLINE
    group.barrier()
    error, turn, started = None, 0, time.monotonic()
    while error is None and turn < MOST_ROUNDS:
        if rank == 0 and turn == after:
            cut(links)
        started = time.monotonic()
        layer, moe = built[turn % len(built)]
        error = raised(moe, *batch(layer, 4, seed=turn))
        turn += 1
    seconds = time.monotonic() - started
    assert error is not None
    found = {
        "error": type(error).__name__,
        "message": str(error),
        "peers": list(getattr(error, "peers", [])),
        "phase": getattr(error, "phase", None),
        "layer": error.layer,
        "rounds": turn,
        "seconds": seconds,
    }
    lost = found["peers"] or [other for other in range(group.size) if other != rank]
    started = time.monotonic()
    refusal = raised(plan.go_on_without, lost)
    found["refusal"] = str(refusal) if refusal else None
    found["refused after"] = time.monotonic() - started
    if refusal is None:
        found["goes on"] = outputs(plan, plan.group.rank)
    return found


def story(group: ty.Group, folder: Path, links: Links) -> None:
    """Three hosts, of two, two and one rank: everything once, and then losses."""
    found: dict[str, Any] = {"hosts": group.hosts(), "three hosts": through(group, EXCHANGES)}
    if group.rank < 4:
        two_hosts = group.subgroup([0, 1, 2, 3])
        found["two hosts"] = through(two_hosts, EXCHANGES)
        found["stages"] = stages_apart(two_hosts, links, folder)
    found["inside and across"] = inside_and_across(group)
    found["refused"] = refused(group)
    found["bad link"] = over_a_bad_link(group, links, 3)
    found["bytes"] = {
        name: bytes_on_links(group, links, folder, name) for name in ("two_sided", "hierarchical")
    }
    found["doctor"] = examined(group, links)
    (folder / f"rank{group.rank}.story").write_text(json.dumps(found))
    losses(group, folder, links)


def cut(group: ty.Group, folder: Path, links: Links) -> None:
    """A link is cut at a random moment: after some rounds, and a little more."""
    host, how, exchange, seed = json.loads((folder / "cut.json").read_text())
    draw = random.Random(seed)
    after, pause = draw.randrange(1, 40), draw.random() * 0.02

    def strike(links: Links) -> None:
        import threading

        # In the middle of whatever this rank does next.
        threading.Timer(pause, links.cut, [host], {"down": how == "down"}).start()

    found = until_cut(group, links, strike, after, exchange)
    (folder / f"rank{group.rank}.cut").write_text(json.dumps(found))


# -- Losses, one after the other -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What strikes, on whom, and where in a round trip."""

    kind: str  # "killed": one rank. "stopped": all ranks of a host. "cut": the link of a host
    victims: list[int]  # ranks, as they were counted at the start
    moment: str  # of a round trip, as fault points name it
    host: int  # of the victims


def strike(loss: Loss, links: Links) -> None:
    """Do to this rank, or to the link of its host, what a loss says."""
    if loss.kind == "cut":
        links.cut(loss.host)  # and the round trip goes on, as far as it comes
    else:
        os.kill(os.getpid(), signal.SIGKILL if loss.kind == "killed" else signal.SIGSTOP)


def is_right(moe: ty.MoELayer, given: tuple[torch.Tensor, ty.Routes]) -> bool:
    """Whether a layer gives the bits of the one-process twin, for the ranks and hosts that are there now."""
    weights = random_weights(moe.wiring.spec, 0)
    return torch.equal(moe(*given), twin(moe.wiring, weights, *given, moe.plan.group.rank))


def losses(group: ty.Group, folder: Path, links: Links) -> None:
    """Ranks are lost one after the other; all others say so each time, and go on with the bits of the twin."""
    told = [Loss(**fields) for fields in json.loads((folder / "losses.json").read_text())]
    layers = LAYERS[1:]  # whose experts are the same in any batch
    plan = ty.plan(layers, group, exchange=InterruptibleHierarchical)
    built = [(layer, build(plan, layer.name)) for layer in layers]
    me, there, found = group.rank, list(range(group.size)), []
    group.deadline = SHORT_DEADLINE
    for number, loss in enumerate(told):
        plan.group.barrier()
        if me in loss.victims and (loss.kind != "cut" or me == loss.victims[0]):
            FaultPoint.arm(loss.moment, lambda loss=loss: strike(loss, links))
        error, turn, started = None, 0, time.monotonic()
        while error is None and turn < MOST_ROUNDS:
            started = time.monotonic()
            layer, moe = built[turn % len(built)]
            error = raised(moe, *batch(layer, 4, seed=turn))
            turn += 1
        entry = {
            "error": type(error).__name__,
            "peers": [there[peer] for peer in getattr(error, "peers", [])],
            "phase": getattr(error, "phase", None),
            "seconds": time.monotonic() - started,
            "message": str(error),
        }
        found.append(entry)
        (folder / f"rank{me}.losses").write_text(json.dumps(found))
        if me in loss.victims:
            break
        there = [rank for rank in there if rank not in loss.victims]
        plan.go_on_without(error.peers)
        entry["right"] = [is_right(moe, batch(layer, 5, seed=me)) for layer, moe in built]
        entry["hosts"] = list(built[0][1].wiring.exchange_spec.hosts)
        (folder / f"rank{me}.losses").write_text(json.dumps(found))
        meet_past_the_network(folder, f"went-on-{number}", plan.group)
    if me == 0:  # stopped ranks would never end
        for loss in told:
            if loss.kind == "stopped":
                links.end(loss.host)


JOBS = {"story": story, "cut": cut, "losses": losses}


def main(job: str, folder: Path) -> None:
    """Join the others, do the job, and leave what was found."""
    torch.set_num_threads(1)
    failure_detector.ANSWERING = ANSWERING
    dist.init_process_group("gloo")
    group = ty.DistributedGroup(deadline=DEADLINE)
    JOBS[job](group, folder, Links(folder))
    group.close()
    dist.destroy_process_group()
    if job == "cut":
        raise SystemExit("a link was cut")  # as an engine ends that does not go on


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
