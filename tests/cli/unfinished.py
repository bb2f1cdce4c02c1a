"""Classes that cannot be checked, each for a reason that can be said at once."""

from tokenyard.exchange import Transport, TwoSidedTransport
from tokenyard.experts import Experts


class Nameless(Transport):
    """Has everything but a name."""

    def send(self, batch):
        raise NotImplementedError

    def send_back(self, results):
        raise NotImplementedError

    def fail(self, failure):
        raise NotImplementedError

    def bytes_sent(self, batch, rows):
        raise NotImplementedError


class Unfinished(Transport):
    """Has one method of four."""

    name = "unfinished"

    def bytes_sent(self, batch, rows):
        return [0] * self.group.size


class Inherits(TwoSidedTransport):
    """Has the name of the exchange that it derives from."""


class Idle(Experts):
    """Computes nothing."""

    name = "idle"


an_object = [1, 2]
