"""`two_sided`: each rank sends every other one a message, with its announcement and the rows that go there.

A row travels once to each rank that owns at least one of its experts, with the ids already rewritten to that
rank's local experts. Rows leave in `send`, and results in `send_back`; the caller may compute between these and `wait`
(`messages`). Runs on any group, on any number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tokenyard.exchange.batch import Arrival, Batch, Failure, received_rows
from tokenyard.exchange.results import Results, ResultsAtHome
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.messages import HOME, Mailbox, Outgoing
from tokenyard.exchange.transports.way_back import send_back
from tokenyard.group.base import Group, Pending


class TwoSidedTransport(Transport[Outgoing | None]):
    """Sends each rank a message with rows, and gets one back with results."""

    name = "two_sided"
    bounds_rows = True

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        super().__init__(group, in_flight=in_flight, guard=guard)
        self.mailbox = Mailbox(group)  # sends and receives messages

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        self.mailbox.serve(specs, self.num_counts)

    def send(self, batch: Batch) -> Pending[Arrival[Outgoing | None]]:
        stride, bounded = batch.spec.dispatch_layout.stride, batch.announcements.bound is not None
        outgoing = Outgoing(self.mailbox, stride, batch.routes.counts, batch.region, bounded=bounded)
        self.pack(batch, outgoing.packets_by_rank)
        arriving = outgoing.start(batch.announcements)

        def receive() -> Arrival[Outgoing | None]:
            came = arriving.wait()
            received = received_rows(batch.spec, came.packets, came.counts, came.slots())
            way_back = self._way_back(batch, came.counts)
            if way_back is not None:
                received = replace(received, results=way_back.places(batch.spec.combine_layout))
            return batch.arrived(received, came.counts, way_back)

        return Pending(receive)

    def _way_back(self, batch: Batch, counts: Sequence[int]) -> Outgoing | None:
        """The messages with results, for experts to write into; None if they are encoded, per choice, or on a GPU."""
        spec = batch.spec
        if (
            self.group.device.type != "cpu"
            or spec.combine_wire.quantized
            or spec.sums_choices
            or spec.returns
        ):
            return None
        stride, out = spec.combine_layout.stride, ("results", batch.region)
        return Outgoing(self.mailbox, stride, counts, into=HOME, out=out)

    def pack(self, batch: Batch, packets_by_rank: Sequence[Tensor]) -> None:
        """Write the packets of a checked batch for each rank, with the ids of its own experts."""
        batch.write(packets_by_rank)

    def send_back(self, results: Results[Outgoing | None]) -> Pending[ResultsAtHome]:
        return send_back(self.mailbox, results)

    def fail(self, failure: Failure) -> None:
        self.mailbox.announce(failure.announcements).wait()

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        return [count * batch.spec.dispatch_layout.stride for count in rows]

    def close(self) -> None:
        self.mailbox.clear()
