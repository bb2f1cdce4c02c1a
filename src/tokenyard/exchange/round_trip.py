"""One round trip of one layer, as the layer makes it: encode, dispatch, combine; or start and wait for each."""

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
    """A dispatch and its combine, and what this rank still owes the others of them."""

    exchange: Exchange  # what moves the rows
    spec: ExchangeSpec  # what the exchange knows of the layer
    # Whether the others still wait for this rank's dispatch: the first one, or after a combine that of the next pass.
    # A combine is owed as long as the arrival is in flight.
    owes_dispatch: bool = True
    is_dropped: bool = False  # whether nobody is left who could finish it
    ended_by: str | None = None  # the error that has ended it, with all others that were under way
    # Computes what came to this rank in the present pass, sends it back, and starts the next pass. The layer sets it.
    advance: Callable[[], None] | None = None
    ahead: bool = False  # whether something is computed between the start of a phase and its end
    takes_slots: bool = False  # whether empty slots may be among the rows that come, with ids of -1
    _arriving: Pending[Arrival] | None = None
    _coming_home: Pending[CombinedRows] | None = None
    _out: Tensor | None = None  # what the passes of a batch write into, where the caller gave nothing

    @property
    def arrival(self) -> Arrival | None:
        """The handle, once rows have arrived."""
        return None if self._arriving is None else self._arriving.result

    @property
    def is_sent_back(self) -> bool:
        """Whether the results of all passes were sent back."""
        return self._coming_home is not None and not self.owes_dispatch

    def encode(self, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """The rows of a batch, as the exchange takes them."""
        with acting(Party.SENDER):
            return self.exchange.encode(self.spec, x_TH)

    def dispatch(
        self,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
    ) -> ReceivedRows:
        """Dispatch; from now on, this rank owes the others a combine."""
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
        """Wait for the rows that the others sent here."""
        return self._arrived().received

    def combine(
        self, result: ExpertResult, *, out: Tensor | None = None, add: Sequence[Tensor] = ()
    ) -> CombinedRows:
        """Combine what was dispatched."""
        return self.exchange.combine(self._arrived(), result, out=out, add=add)

    def start_combine(
        self,
        result: ExpertResult,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor | Background[Tensor]] = (),
    ) -> None:
        """Combine what was dispatched, and return while results travel."""
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
        """Make all passes of the batch, and wait for its results: where nothing else is in flight."""
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
