"""A batch that a layer was started on: rows travel while the caller computes; `finish` brings the results home.

    start ── rows travel ──► compute ── results travel ──► finish
             shared experts  experts
             run

One phase travels at a time: whatever is started next first waits for it. So two batches take turns: while the experts
compute one, the rows or the results of the other travel (`overlapped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from tokenyard.errors import HandleError, PeerLost
from tokenyard.exchange import RoundTrip
from tokenyard.layer.compiled import refuse_gradients
from tokenyard.layer.sender import Batch
from tokenyard.planning.audit import Audit
from tokenyard.planning.wiring import Wiring

if TYPE_CHECKING:
    from tokenyard.layer.moe_layer import MoELayer


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sent:
    """A batch whose rows were sent, and what is needed for the rest of its way."""

    wiring: Wiring  # the layer's wiring, when they were sent
    trip: RoundTrip  # the round trip that they are on
    audit: Audit  # what was done for them so far
    batch: Batch  # what the layer was called with


class PendingBatch:
    """What `layer.start` returns. It is finished once, in the order of the starts; a dropped one is an error."""

    def __init__(self, layer: MoELayer, start: Callable[[], Sent], *, survives: bool = False) -> None:
        self._layer, self._start, self._survives = layer, start, survives
        self._is_finished = False
        self._sent: Sent | None = None
        self._surviving(lambda sent: None)

    def _surviving(self, step: Callable[[Sent], Result]) -> Result:
        """Take a step of the batch. Where a rank is lost, and calls survive that, its rows are sent again first."""
        while True:
            try:
                self._sent = self._sent or self._start()
                return step(self._sent)
            except PeerLost as loss:
                if not self._survives:
                    raise
                self._layer.plan.go_on_after(loss, self._layer.name)  # raises what is not survived
                self._sent = None

    def compute(self) -> None:
        """Wait for the rows that came to this rank, run its experts on them, and send the results back.

        `finish` does so where it was not done before. What is done between the two calls is done while results travel.
        Of a batch that goes in several passes, all of them are made.
        """
        self._surviving(partial(self._compute, ahead=True))

    def _compute(self, sent: Sent, *, ahead: bool) -> None:
        trip, exchange = sent.trip, self._layer.plan.exchange
        exchange.check_turn(trip)
        trip.ahead = ahead
        while not trip.is_sent_back:
            ready = exchange.next_to_advance(trip)
            with exchange.telling(ready):
                assert ready.advance is not None  # `layer.start` has set it
                ready.advance()

    def finish(self) -> Tensor:
        """Wait until the results are home, and return their sum, as `layer(x_TH, routes)` does."""
        layer = self._layer
        if self._is_finished:
            raise HandleError(
                "this batch was finished before",
                expected="`finish` to be called once for each `start`",
                fix="keep what it returned",
                layer=layer.name,
                rank=layer.plan.group.rank,
            )
        y_TH = self._surviving(self._finish)
        if self._survives:
            layer.plan.count_call()
        return y_TH

    def _finish(self, sent: Sent) -> Tensor:
        exchange = self._layer.plan.exchange
        self._compute(sent, ahead=False)
        self._is_finished = True
        with exchange.telling(sent.trip):
            y_TH = sent.trip.combined().y_TH
        exchange.end_round_trip(sent.trip)
        return refuse_gradients(self._layer, y_TH, sent.batch)

    def __del__(self) -> None:
        # Nobody can be told from here: this may run at any time, in any thread. The next call of the plan does it.
        if self._sent is not None:
            self._sent.trip.is_dropped = not self._is_finished
