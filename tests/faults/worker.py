"""What one rank does in a session: round trips, faults, and a record of everything that it met.

All ranks of a session run this, and know the whole session: who is struck, when, and by what. A rank writes files into
the session's folder, which outlive it: `pid-R`, `record-R.jsonl` (one line per fault: what was raised, by whom, when),
and timestamps, by which ranks and the launching process wait for each other where no exchange may be used.
"""

import contextlib
import faulthandler
import gc
import json
import os
import signal
import time
from pathlib import Path

import torch

import tokenyard as ty
from tests.faults.fault_actions import PLAN_FAULTS, ROUND_TRIP_FAULTS
from tests.faults.fault_points import INTERRUPTIBLE, FaultPoint, InterruptibleExperts
from tests.faults.kinds import ANYTIME
from tests.faults.timestamps import Timestamps, met
from tests.models import batch
from tokenyard.conformance.cases import random_weights, same_bits
from tokenyard.conformance.twin import twin

_BATCHES = 3
# Seconds that ranks have to compute what they expect, and to look at what they hold: no part of what is tested.
_COMPUTING = 60.0
_GIVING_BACK = 2.0  # seconds
_AFTER = 3  # good round trips after a fault


class Gone(Exception):
    """This rank was given up by the others: its story ends here."""


class RankWorker:
    """One rank of a session: its plan, its batches, and what it expects of them."""

    def __init__(self, group, session, folder):
        self.session, self.timestamps = session, Timestamps(folder)
        self.rank = group.rank  # as it was at the start: ranks are renumbered after a loss
        self.there = list(range(session.world))
        self.number = 0  # of the next round trip
        self.wrong = 0  # results that were not bitwise what they must be
        self.specs = session.specs(InterruptibleExperts)
        self.weights = {spec.name: random_weights(spec, session.seed) for spec in self.specs}
        exchange = INTERRUPTIBLE[session.exchange]
        self.plan = ty.plan(
            self.specs, group, exchange=exchange, paranoid=session.paranoid, max_rows=session.max_rows
        )
        self.layers = {
            name: ty.MoELayer(self.plan, name, weights.select(self.plan.local_experts(name)))
            for name, weights in self.weights.items()
        }
        self.batches = {
            spec.name: [
                batch(spec, (7 * self.rank + 5 * i + session.seed) % 13, seed=100 * self.rank + i)
                for i in range(_BATCHES)
            ]
            for spec in self.specs
        }
        self.expect()

    @property
    def group(self):
        return self.plan.group

    def expect(self):
        """Compute, without a group, what every batch must give on the ranks that are there now."""
        self.expected = {
            spec.name: [
                twin(self.plan.wiring(spec.name), self.weights[spec.name], x_TH, routes, self.group.rank)
                for x_TH, routes in self.batches[spec.name]
            ]
            for spec in self.specs
        }
        self.meet_again()

    def meet_again(self):
        """Wait for ranks that did what is no part of the test."""
        with self.group.patience(_COMPUTING):
            self.group.barrier()

    # -- Round trips ---------------------------------------------------------------------------------------------

    def round_trip(self):
        """The next layer with the next batch. Its bits are checked."""
        number, self.number = self.number, self.number + 1
        spec = self.specs[number % len(self.specs)]
        i = number // len(self.specs) % _BATCHES
        y_TH = self.layers[spec.name](*self.batches[spec.name][i])
        self.wrong += not same_bits(y_TH, self.expected[spec.name][i])

    def count_dropped(self):
        """A round trip in which every choice of an expert that was lost is dropped, and counted."""
        spec = self.specs[self.number % len(self.specs)]
        _, routes = self.batches[spec.name][self.number // len(self.specs) % _BATCHES]
        lost = self.plan.wiring(spec.name).exchange_spec.placement.lost_experts
        due = sum(expert in lost for expert in routes.topk_ids_TK.flatten().tolist())
        before = self.plan.stats()[spec.name].dropped
        self.round_trip()
        self.wrong += self.plan.stats()[spec.name].dropped - before != due

    def calm(self, rounds):
        """Round trips in which nothing may happen."""
        for _ in range(rounds):
            self.round_trip()

    def until_it_raises(self):
        """A stream of round trips, until one fails."""
        error = None
        while error is None:
            error = met(self.round_trip)
        return error

    def until_it_is_over(self, timestamp):
        """A stream of round trips, until all ranks have seen a timestamp."""
        over = False
        while not over:
            self.calm(4)
            over = all(self.group.gather_json(self.timestamps.get(timestamp) is not None))

    # -- Faults --------------------------------------------------------------------------------------------------

    def live(self, first=0):
        for index, fault in list(enumerate(self.session.faults))[first:]:
            wrong, before = self.wrong, holdings()
            self.calm(fault.rounds)
            FaultPoint.place = ("", "")
            error = self.meet(index, fault)
            self.record(index, error)
            self.go_on(index, fault, error)
            self.calm(_AFTER)
            del error  # its traceback holds what it passed through
            # A group without the lost one, or with a fresh one, has connections of its own.
            more = {} if fault.declared.lethal else more_than(before)
            self.write({"fault": index, "wrong": self.wrong - wrong, "more": more, "done": True})
            self.meet_again()
        self.calm(_AFTER)
        self.write({"wrong": self.wrong, "end": True})

    def meet(self, index, fault):
        """Live through a fault; return what this rank raised, if anything."""
        mine = fault.victim == self.rank
        if fault.kind in ("killed", "replaced", "stopped", "stopped for good"):
            return self.meet_a_signal(index, fault, mine)
        if mine:
            self.timestamps.put(f"struck-{index}")
        if fault.kind in PLAN_FAULTS:
            trial = PLAN_FAULTS[fault.kind]
            return trial(self, fault, mine)
        return ROUND_TRIP_FAULTS[fault.kind](self, fault, mine)

    def meet_a_signal(self, index, fault, mine):
        number = signal.SIGKILL if fault.kind in ("killed", "replaced") else signal.SIGSTOP

        def strike():
            self.timestamps.put(f"struck-{index}")
            os.kill(os.getpid(), number)

        if fault.variant == ANYTIME:
            if mine:
                self.timestamps.put(f"strike-{index}")  # the launching process does it
        elif fault.variant in ("before a plan", "sharing memory"):
            return PLAN_FAULTS["killed"](self, fault, mine, strike)
        elif mine:
            FaultPoint.arm(fault.variant, strike)
        if fault.declared.lethal:
            return self.until_it_raises()
        if fault.variant == ANYTIME:
            return met(self.until_it_is_over, f"over-{index}")
        return met(self.calm, _AFTER)

    def go_on(self, index, fault, error):
        """Whoever is left goes on; whoever was given up ends."""
        if not fault.declared.lethal:
            if error is not None and fault.declared.other is None:
                raise error  # nothing was to happen: there is no telling what state the group is in
            return
        if fault.victim == self.rank:
            raise Gone
        lost = self.there.index(fault.victim)
        self.number = 0  # some were a round trip ahead of the others when it ended
        if fault.kind == "replaced":
            if fault.number < 0.5:
                self.plan.go_on_without([lost])
                self.expect()
                self.calm(_AFTER)
                self.plan.readmit()
            else:
                self.plan.readmit([lost])
            self.expect()
            self.number = 0  # where the fresh rank starts
            return
        self.there.remove(fault.victim)
        self.plan.go_on_without([lost])
        self.expect()
        self.count_dropped()
        if fault.kind == "stopped for good":
            self.calm(1)
            self.timestamps.put(f"went-on-{index}-{self.rank}")
            self.timestamps.wait(f"over-{index}")  # it is awake, and finds nothing to write into

    # -- The record ----------------------------------------------------------------------------------------------

    def record(self, index, error):
        """What this rank raised, with ranks as they were counted at the start."""
        peers = getattr(error, "peers", None)
        if peers is None:
            peers = [error.peer] if hasattr(error, "peer") else []
        layer, phase = FaultPoint.place
        self.write(
            {
                "fault": index,
                "error": None if error is None else type(error).__name__,
                "text": "" if error is None else str(error),
                "names": [self.there[peer] for peer in peers],
                "layer": getattr(error, "layer", None),
                "phase": getattr(error, "phase", None),
                "waited": getattr(error, "waited", None),
                "place": {"layer": layer, "phase": phase},
                "at": getattr(error, "raised_at", None),
            }
        )

    def write(self, entry):
        with open(self.timestamps.folder / f"record-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")


def holdings():
    """Descriptors and shared mappings of this process."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:tokenyard")
    return {"descriptors": len(os.listdir("/proc/self/fd")), "mappings": mappings}


def more_than(before):
    """What this process holds more of than before. It may take a moment to be given back."""
    until = time.monotonic() + _GIVING_BACK
    while True:
        more = {name: count for name, count in holdings().items() if count > before[name]}
        if not more or time.monotonic() > until:
            return more
        time.sleep(0.02)


def live_through(group, session, folder):
    """What every rank of a session runs."""
    timestamps = Timestamps(folder)
    timestamps.put(f"pid-{group.rank}", os.getpid())
    dump = open(Path(folder) / f"stack-{group.rank}-{os.getpid()}", "w")  # noqa: SIM115 (it stays open)
    faulthandler.register(signal.SIGUSR1, file=dump)
    torch.set_num_threads(1)
    group.deadline = session.deadline
    worker = RankWorker(group, session, folder)
    fresh = "again" in group.name
    with contextlib.suppress(Gone):
        if fresh:
            worker.calm(_AFTER)
            worker.write({"fault": len(session.faults) - 1, "wrong": worker.wrong, "more": {}, "done": True})
            worker.meet_again()
        worker.live(first=len(session.faults) if fresh else 0)
