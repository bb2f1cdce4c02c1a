"""`two_sided`: first every rank hears how many rows come, then rows go out in one variable all-to-all.

A row travels once to each rank that owns at least one of its experts, with the ids already rewritten to that
rank's local experts. Runs on any group, on any number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenyard.exchange import return_message
from tokenyard.exchange.batch import Arrival, Batch, Failure, Results, ResultsAtHome, received_rows
from tokenyard.exchange.transport import Transport
from tokenyard.group.base import Pending


class TwoSidedTransport(Transport):
    """Counts, then a variable all-to-all."""

    name = "two_sided"
    bounds_rows = True

    def send(self, batch: Batch) -> Pending[Arrival]:
        packets = self.pack(batch)
        answers = self.announce(batch.announcements)

        def receive() -> Arrival:
            arriving = [announcement.counts[self.group.rank] for announcement in answers.wait()]
            arrived = self.group.all_to_all_rows(packets, batch.routes.counts, arriving, phase="dispatch")
            return batch.arrived(received_rows(batch.spec, arrived, arriving), arriving)

        return Pending(receive)

    def pack(self, batch: Batch) -> Tensor:
        """The packets of a checked batch, rank after rank, with the ids of each rank's own experts."""
        return batch.packets()

    def send_back(self, results: Results) -> Pending[ResultsAtHome]:
        return return_message.send_back(self.group, results)

    def fail(self, failure: Failure) -> None:
        if failure.arrival is None:
            self.announce(failure.announcements).wait()
        else:
            return_message.fail_back(self.group, failure)

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        return [count * batch.spec.dispatch_layout.stride for count in rows]
