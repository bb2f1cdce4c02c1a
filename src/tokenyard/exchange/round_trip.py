"""One round trip of one layer, step by step: encode, dispatch, combine; or a start and a wait for each phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard.duties import Party, acting
from tokenyard.errors import HandleError
from tokenyard.exchange.batch import Arrival, UnencodedRows
from tokenyard.exchange.batch_routes import BatchRoutes
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Background, Pending
from tokenyard.routing import Routes
from tokenyard.rows import CombinedRows, ExpertResult, RankRows, ReceivedRows, RoutingLogits

if TYPE_CHECKING:
    from tokenyard.exchange.exchange import Exchange


@dataclass(kw_only=True, eq=False)
class RoundTrip:
    """A dispatch and its combine, and which of them the other ranks still wait for this rank to make."""

    exchange: Exchange  # what moves the rows
    spec: ExchangeSpec  # what the exchange knows of the layer
    # Whether the others still wait for this rank's dispatch: the first one, or after a combine that of the next pass.
    # They wait for its combine as long as the arrival is in flight.
    owes_dispatch: bool = True
    # Whether the caller dropped what `start` returned, so that nothing can finish it.
    is_dropped: bool = False
    # Why it was given up, with all round trips that were under way; None: it was not.
    ended_by: str | None = None
    # Runs the experts on the rows of the present pass, sends results back, starts the next pass. The layer sets it.
    advance: Callable[[], None] | None = None
    ahead: bool = False  # whether the caller computes something between the start of a phase and its end
    # Whether the experts accept empty slots among the received rows, with ids of -1.
    takes_slots: bool = False
    _arriving: Pending[Arrival] | None = None
    _coming_home: Pending[CombinedRows] | None = None
    _out: Tensor | None = None  # what all passes of a batch write into, if the caller gave no `out`

    @property
    def arrival(self) -> Arrival | None:
        """The handle, once rows have arrived."""
        return None if self._arriving is None else self._arriving.result

    @property
    def is_sent_back(self) -> bool:
        """Whether the results of all passes were sent back."""
        return self._coming_home is not None and not self.owes_dispatch

    def encode(self, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """The rows of a batch, encoded as the exchange wants them (`Exchange.encode`)."""
        with acting(Party.SENDER):
            return self.exchange.encode(self.spec, x_TH)

    def dispatch(
        self,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
    ) -> ReceivedRows:
        """Dispatch a batch; return the rows that came. The other ranks then wait for this rank's combine."""
        with acting(Party.SENDER):
            self._start_dispatch(rows, routes, extra)
        return self.received()

    def send(
        self,
        x_TH: Tensor,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Encode the rows of a batch, dispatch them, and return while they travel."""
        with acting(Party.SENDER):
            self._start_dispatch(self.exchange.encode(self.spec, x_TH), routes, extra)

    def _start_dispatch(
        self,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None,
    ) -> None:
        self.owes_dispatch = False
        self._arriving = self.exchange.start_dispatch(
            self.spec, rows, routes, extra, ahead=self.ahead, takes_slots=self.takes_slots
        )

    def start_next(self) -> None:
        """Dispatch the next pass of the batch, and return while its rows travel."""
        arrival, self.owes_dispatch, self._coming_home = self._arrived(), False, None
        with acting(Party.SENDER):
            self._arriving = self.exchange.start_next(arrival)

    def received(self) -> ReceivedRows:
        """Wait for the rows that come to this rank."""
        return self._arrived().received

    def combine(
        self, result: ExpertResult, *, out: Tensor | None = None, add: Sequence[Tensor] = ()
    ) -> CombinedRows:
        """Send back the results of the received rows; return the sums of this rank's tokens (`Exchange.combine`)."""
        return self.exchange.combine(self._arrived(), result, out=out, add=add)

    def start_combine(
        self,
        result: ExpertResult,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor | Background[Tensor]] = (),
    ) -> None:
        """Start what `combine` does, and return while results travel."""
        arrival = self._arrived()
        more_follow = arrival.has_more
        if more_follow and self._out is None:  # all passes write into one tensor
            shape = (arrival.batch_tokens, self.spec.hidden_size)
            self._out = torch.empty(shape, dtype=self.spec.dtype, device=self.exchange.group.device)
        self._coming_home = self.exchange.start_combine(
            arrival, result, out=self._out if out is None else out, add=add, ahead=self.ahead
        )
        self.owes_dispatch = more_follow

    def combined(self) -> CombinedRows:
        """Wait for the results that `start_combine` brings home."""
        assert self._coming_home is not None
        return self._coming_home.wait()

    def come_home(self) -> Tensor:
        """Make all passes of the batch, and wait for its results. No other dispatch may be in flight."""
        while not self.is_sent_back:
            assert self.advance is not None  # the layer has set it
            self.advance()
        return self.combined().y_TH

    def combine_unreduced(self, result: ExpertResult) -> RankRows:
        """Bring the results home without summing over ranks."""
        arrival = self._arrived()
        rows = self.exchange.combine_unreduced(arrival, result)
        self.owes_dispatch = arrival.has_more
        return rows

    def _arrived(self) -> Arrival:
        if self._arriving is None:
            raise HandleError(
                "nothing was dispatched", expected="dispatch, then combine", fix="dispatch first"
            )
        return self._arriving.wait()
