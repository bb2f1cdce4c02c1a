"""A batch that `layer.start` has sent: its rows travel while the caller computes, and `finish` returns the output.

    start ── rows travel ──► compute ── results travel ──► finish
             shared experts  experts
             run

Only one phase travels at a time: starting the next one first waits for the one before. Two batches can therefore take
turns: while the experts compute one, the rows or the results of the other travel (`overlapped`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

from tokenyard.errors import HandleError, PeerLost
from tokenyard.exchange import RoundTrip
from tokenyard.layer.call import Call, Inputs
from tokenyard.planning.planner import state_of

if TYPE_CHECKING:
    from tokenyard.layer.moe_layer import MoELayer


Result = TypeVar("Result")

# Batches that were started, by their round trips. With several passes (`max_rows`), results go back in the order of the
# dispatches of all batches: to compute one, another one may have to go on first.
_started: WeakValueDictionary[RoundTrip, PendingBatch] = WeakValueDictionary()


class PendingBatch:
    """What `layer.start` returns. Each must be finished once, in the order of the starts; dropping one is an error."""

    def __init__(self, layer: MoELayer, inputs: Inputs) -> None:
        self._layer, self._inputs = layer, inputs
        self._is_finished = False
        self._trip: RoundTrip | None = None
        self._call: Call | None = None
        self._surviving(lambda trip: None)

    def _surviving(self, step: Callable[[RoundTrip], Result]) -> Result:
        """Run a step of the batch. After a loss that the plan survives, send the rows again and repeat the step."""
        while True:
            try:
                self._trip = self._trip or self._start()
                return step(self._trip)
            except PeerLost as loss:
                state_of(self._layer.plan).go_on_after(loss, self._layer.name)  # raises what is not survived
                self._trip = None

    def _start(self) -> RoundTrip:
        layer = self._layer
        if (changes := state_of(layer.plan).changes) is not None:
            changes.between_calls(layer.name)  # experts that have moved are served from here on
        exchange = layer.plan.exchange
        trip = exchange.open(layer.wiring.exchange_spec, takes_slots=layer.experts.skips_empty_slots)
        with exchange.trips.propagate_errors(trip):
            self._call = layer._depart(trip, self._inputs, layer.shared, ahead=True)
        _started[trip] = self
        return trip

    def compute(self) -> None:
        """Wait for the rows that this rank receives, run its experts on them, and start sending the results back.

        What the caller does between `compute` and `finish` overlaps with the results on their way. Without a call of
        `compute`, `finish` does this work itself. If the batch goes in several passes, all of them are made here.
        """
        self._surviving(partial(self._compute, ahead=True))

    def _compute(self, trip: RoundTrip, *, ahead: bool) -> None:
        trips = self._layer.plan.exchange.trips
        trips.check_turn(trip)
        while not trip.is_sent_back:
            due = trips.next_due(trip)
            batch = _started.get(due)
            if batch is None:
                trips.check_dropped()  # raises on all ranks
            with trips.propagate_errors(due):
                assert batch is not None
                assert batch._call is not None
                batch._layer._advance(due, batch._call, ahead=ahead if batch is self else True)

    def finish(self) -> Tensor:
        """Wait for the results of this rank's tokens, and return their sum, as `layer(x_TH, routes)` does."""
        layer = self._layer
        if self._is_finished:
            raise HandleError(
                "this batch was finished before",
                expected="`finish` to be called once for each `start`",
                fix="keep what it returned",
                layer=layer.name,
                rank=layer.plan.group.rank,
            )
        y_TH = self._surviving(self._come_home)
        state = state_of(layer.plan)
        if state.survive:
            state.calls += 1
        assert self._trip is not None
        assert self._call is not None
        return layer._differentiable(self._trip, self._call, y_TH)

    def _come_home(self, trip: RoundTrip) -> Tensor:
        trips = self._layer.plan.exchange.trips
        self._compute(trip, ahead=False)
        self._is_finished = True
        with trips.propagate_errors(trip):
            y_TH = trip.result()
        trips.end(trip)
        return y_TH

    def __del__(self) -> None:
        # The other ranks cannot be told from here: this may run at any time, in any thread. The next call of the plan
        # raises the error on all ranks.
        if self._trip is not None:
            self._trip.is_dropped = not self._is_finished
