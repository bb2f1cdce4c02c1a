"""What a rank still owes the others in a round trip: the thread that a layer holds on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tokenyard.duties import Party, acting
from tokenyard.errors import HandleError
from tokenyard.exchange.spec import Dispatched, ExchangeSpec, UnencodedRows
from tokenyard.formats.base import EncodedRows
from tokenyard.routing import Routes
from tokenyard.rows import CombinedRows, ExpertRows, PlacedRows, RankRows, ReceivedRows, RoutingLogits

if TYPE_CHECKING:
    from tokenyard.exchange.base import Exchange


@dataclass(kw_only=True)
class RoundTrip:
    """What a rank still owes the others in one round trip of one layer."""

    exchange: Exchange  # what moves the rows
    spec: ExchangeSpec  # what the exchange knows of the layer
    dispatched: Dispatched | None = None  # the handle, once rows were sent
    # Whether the others still wait for this rank's dispatch. A combine is owed as long as the dispatch is in flight.
    owes_dispatch: bool = True

    def encode(self, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """The rows of a batch, as the exchange takes them."""
        with acting(Party.SENDER):
            return self.exchange.encode(self.spec, x_TH)

    def dispatch(
        self,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits,
        extra: Mapping[str, Tensor] | None = None,
    ) -> ReceivedRows:
        """Dispatch; from now on, this rank owes the others a combine."""
        self.owes_dispatch = False
        with acting(Party.SENDER):
            self.dispatched = self.exchange.dispatch(self.spec, rows, routes, extra)
        return self.dispatched.received

    def combine(
        self, result: ExpertRows | PlacedRows, *, out: Tensor | None = None, add: Sequence[Tensor] = ()
    ) -> CombinedRows:
        """Combine what was dispatched."""
        return self.exchange.combine(self._arrived(), result, out=out, add=add)

    def combine_unreduced(self, result: ExpertRows | PlacedRows) -> RankRows:
        """Bring the results home without summing over ranks."""
        return self.exchange.combine_unreduced(self._arrived(), result)

    def _arrived(self) -> Dispatched:
        if self.dispatched is None:
            raise HandleError(
                "nothing was dispatched", expected="dispatch, then combine", fix="dispatch first"
            )
        return self.dispatched
