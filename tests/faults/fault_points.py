"""Exchanges and experts that can be struck at a named moment of a round trip, and that know where they are."""

from dataclasses import replace

import torch

from tokenyard.exchange import EXCHANGES, Pending, RowsAtHome
from tokenyard.experts.reference import ReferenceExperts


class FaultPoint:
    """Where this rank is interrupted next, and by what. One for each process."""

    moment = ""  # where the next round trip is interrupted
    strike = staticmethod(lambda: None)  # what happens there
    protocol = None  # another one than its own, that this rank speaks
    place = ("", "")  # the layer and the phase that this rank is in

    @classmethod
    def at(cls, moment):
        if cls.moment == moment:
            cls.moment = ""
            cls.strike()

    @classmethod
    def arm(cls, moment, strike):
        cls.moment, cls.strike = moment, staticmethod(strike)


class Interruptible:
    """A round trip that can be interrupted anywhere."""

    def send(self, batch):
        FaultPoint.place = (batch.spec.layer, "dispatch")
        FaultPoint.at("before dispatch")
        pending = super().send(replace(batch, announcements=in_another_protocol(batch.announcements)))

        def wait():
            arrival = pending.wait()
            FaultPoint.at("after dispatch")
            return arrival

        return Pending(wait)

    def send_back(self, results):
        FaultPoint.place = (results.arrival.spec.layer, "combine")
        FaultPoint.at("before combine")
        told = replace(results, announcements=in_another_protocol(results.announcements))
        pending = super().send_back(told)
        return Pending(lambda: Interrupted(**vars(pending.wait())))


class Interrupted(RowsAtHome):
    """Results, behind whose sum something happens."""

    def sum_into(self, out_TH, add):
        y_TH = super().sum_into(out_TH, add)
        FaultPoint.at("after combine")
        return y_TH


def in_another_protocol(announcements):
    """What this rank tells the others, if it is to speak another protocol than they do."""
    if not FaultPoint.protocol:
        return announcements
    other = replace(announcements.mine, protocol=FaultPoint.protocol)
    return replace(announcements, say=lambda: other)


class InterruptibleOneSided(Interruptible, EXCHANGES["one_sided"]):
    name = "interruptible one_sided"

    def _tell(self, announcements):
        if FaultPoint.moment == f"inside {announcements.mine.phase.value}":
            first = (self.group.rank + 1) % self.group.size
            # One rank has heard of it, the others have not.
            self.workspace.signals.tell(first, announcements.for_rank(first))
            FaultPoint.at(FaultPoint.moment)
        super()._tell(announcements)


class _Message(Interruptible):
    def send(self, batch):
        return self.interrupted("dispatch", super().send(batch))

    def send_back(self, results):
        return self.interrupted("combine", super().send_back(results))

    def interrupted(self, phase, pending):
        def wait():
            FaultPoint.at(f"inside {phase}")  # messages are on their way, and nobody was heard
            return pending.wait()

        return Pending(wait)


class InterruptibleTwoSided(_Message, EXCHANGES["two_sided"]):
    name = "interruptible two_sided"


class InterruptibleAllgather(_Message, EXCHANGES["allgather"]):
    name = "interruptible allgather"


class InterruptibleHierarchical(_Message, EXCHANGES["hierarchical"]):
    name = "interruptible hierarchical"

    def _forwarded(self, *arrived):
        FaultPoint.at("between levels")  # rows of other hosts have come, and are not forwarded
        return super()._forwarded(*arrived)

    def _sum(self, *arrived):
        FaultPoint.at("before sums")  # results are in their place, and nothing has crossed back
        return super()._sum(*arrived)


INTERRUPTIBLE = {
    "one_sided": InterruptibleOneSided,
    "two_sided": InterruptibleTwoSided,
    "allgather": InterruptibleAllgather,
    "hierarchical": InterruptibleHierarchical,
}


class InterruptibleExperts(ReferenceExperts):
    """Reference experts, in whose midst something happens; a strike may put something else in place of the result."""

    name = "interruptible"
    returns = None

    def compute(self, received, *, finalize):
        FaultPoint.at("in the experts")
        if (other := InterruptibleExperts.returns) is not None:
            InterruptibleExperts.returns = None
            return other
        return super().compute(received, finalize=finalize)


def raise_value_error():
    raise ValueError("an expert's own fault")


def raise_runtime_error():
    raise RuntimeError("an expert's own fault")


def return_a_tuple():
    InterruptibleExperts.returns = (torch.zeros(1, 1), None)


def allocate_too_much():
    torch.empty(2**50)  # four petabytes
