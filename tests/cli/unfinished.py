"""Classes that cannot be checked, each for a reason that can be said at once."""

from tokenyard.exchange import Exchange, TwoSidedExchange
from tokenyard.exchange.message import MessageExchange
from tokenyard.experts import Experts


class Nameless(MessageExchange):
    """Has everything but a name."""

    def _pack(self, exchange_spec, outgoing):
        raise NotImplementedError

    def _move(self, exchange_spec, outgoing, packets, heard):
        raise NotImplementedError

    def bytes_sent(self, exchange_spec, outgoing):
        raise NotImplementedError


class Unfinished(Exchange):
    """Has one method of seven."""

    name = "unfinished"

    def bytes_sent(self, exchange_spec, outgoing):
        return [0] * self.group.size


class Inherits(TwoSidedExchange):
    """Has the name of the exchange that it derives from."""


class Idle(Experts):
    """Computes nothing."""

    name = "idle"


an_object = [1, 2]
