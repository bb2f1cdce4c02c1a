"""Exchanges and experts that can be struck at a named moment of a round trip, and that know where they are."""

from dataclasses import replace

import torch

from tokenyard.exchange import EXCHANGES
from tokenyard.experts.reference import ReferenceExperts


class Ambush:
    """What waits for this rank. One for each process."""

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
    def lay(cls, moment, strike):
        cls.moment, cls.strike = moment, staticmethod(strike)


class Interruptible:
    """A round trip that can be interrupted anywhere."""

    def dispatch(self, exchange_spec, *arguments):
        Ambush.place = (exchange_spec.layer, "dispatch")
        return super().dispatch(exchange_spec, *arguments)

    def _load_out(self, exchange_spec, round, outgoing):
        Ambush.at("before dispatch")
        return super()._load_out(exchange_spec, round, outgoing)

    def _send_out(self, exchange_spec, round, outgoing, loaded):
        arrived = super()._send_out(exchange_spec, round, outgoing, loaded)
        Ambush.at("after dispatch")
        return arrived

    def _send_back(self, dispatched, loaded):
        Ambush.at("before combine")
        return super()._send_back(dispatched, loaded)

    def combine(self, dispatched, result, **options):
        Ambush.place = (dispatched.spec.layer, "combine")
        combined = super().combine(dispatched, result, **options)
        Ambush.at("after combine")
        return combined

    def _announcement(self, *arguments):
        announcement = super()._announcement(*arguments)
        return replace(announcement, protocol=Ambush.protocol) if Ambush.protocol else announcement


class InterruptibleOneSided(Interruptible, EXCHANGES["one_sided"]):
    name = "interruptible one_sided"

    def _tell_and_hear(self, by_rank):
        if Ambush.moment == f"inside {by_rank[0].phase.value}":
            first = (self.group.rank + 1) % self.group.size
            self.workspace.signals.tell(
                first, by_rank[first]
            )  # one rank has heard of it, the others have not
            Ambush.at(Ambush.moment)
        return super()._tell_and_hear(by_rank)


class _Message(Interruptible):
    def _move(self, *arguments):
        Ambush.at("inside dispatch")  # announced, and not sent
        return super()._move(*arguments)


class InterruptibleTwoSided(_Message, EXCHANGES["two_sided"]):
    name = "interruptible two_sided"


class InterruptibleAllgather(_Message, EXCHANGES["allgather"]):
    name = "interruptible allgather"


INTERRUPTIBLE = {
    "one_sided": InterruptibleOneSided,
    "two_sided": InterruptibleTwoSided,
    "allgather": InterruptibleAllgather,
}


class InterruptibleExperts(ReferenceExperts):
    """Reference experts, in whose midst something happens; a strike may put something else in place of the result."""

    name = "interruptible"
    returns = None

    def compute(self, received, *, finalize):
        Ambush.at("in the experts")
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
