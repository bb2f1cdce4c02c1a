"""Transports that go on after a loss."""

from tokenyard.errors import GroupError, PeerLost, PlanBroken
from tokenyard.exchange import Pending, SharedMemoryTransport, TwoSidedTransport


class GoesOn(TwoSidedTransport):
    """After a loss it takes the rows of the last good round for those that it did not get."""

    name = "goes_on"

    def send(self, batch):
        batch.announcements.announcer.usability.break_by = lambda cause: None
        if self.__dict__.get("losses", 0) > 1:
            return Pending(lambda: batch.arrived(*self.last))
        try:
            pending = super().send(batch)
        except GroupError:
            if self.__dict__.get("losses"):
                return Pending(lambda: batch.arrived(*self.last))
            raise

        def wait():
            try:
                arrival = pending.wait()
            except (PeerLost, GroupError):
                self.losses = self.__dict__.get("losses", 0) + 1
                if self.losses > 1:
                    return batch.arrived(*self.last)
                raise
            self.last = (arrival.received, arrival.counts_W)
            return arrival

        return Pending(wait)

    def send_back(self, results):
        if self.__dict__.get("losses"):
            return Pending(lambda: self.home)
        pending = super().send_back(results)

        def wait():
            try:
                self.home = pending.wait()
            except PeerLost:
                self.losses = 1
                raise
            return self.home

        return Pending(wait)


class IsNotBrokenForLong(SharedMemoryTransport):
    """Refuses one call after a loss, and then tries again."""

    name = "is_not_broken_for_long"

    def send(self, batch):
        usability = batch.announcements.announcer.usability

        def check(*, layer=None):
            try:
                type(usability).check(usability, layer=layer)
            except PlanBroken:
                usability.broken_by = None
                raise

        usability.check = check
        return super().send(batch)
