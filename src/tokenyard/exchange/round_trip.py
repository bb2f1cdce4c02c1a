"""One round trip of one layer, as the layer makes it: encode, dispatch, combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tokenyard.duties import Party, acting
from tokenyard.errors import HandleError
from tokenyard.exchange.batch import Arrival, BatchRoutes, UnencodedRows
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows
from tokenyard.routing import Routes
from tokenyard.rows import CombinedRows, ExpertResult, RankRows, ReceivedRows, RoutingLogits

if TYPE_CHECKING:
    from tokenyard.exchange.exchange import Exchange


@dataclass(kw_only=True)
class RoundTrip:
    """A dispatch and its combine, and what this rank still owes the others of them."""

    exchange: Exchange  # what moves the rows
    spec: ExchangeSpec  # what the exchange knows of the layer
    arrival: Arrival | None = None  # the handle, once rows were sent
    # Whether the others still wait for this rank's dispatch. A combine is owed as long as the arrival is in flight.
    owes_dispatch: bool = True

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
        self.owes_dispatch = False
        with acting(Party.SENDER):
            self.arrival = self.exchange.dispatch(self.spec, rows, routes, extra)
        return self.arrival.received

    def combine(
        self, result: ExpertResult, *, out: Tensor | None = None, add: Sequence[Tensor] = ()
    ) -> CombinedRows:
        """Combine what was dispatched."""
        return self.exchange.combine(self._arrived(), result, out=out, add=add)

    def combine_unreduced(self, result: ExpertResult) -> RankRows:
        """Bring the results home without summing over ranks."""
        return self.exchange.combine_unreduced(self._arrived(), result)

    def _arrived(self) -> Arrival:
        if self.arrival is None:
            raise HandleError(
                "nothing was dispatched", expected="dispatch, then combine", fix="dispatch first"
            )
        return self.arrival
