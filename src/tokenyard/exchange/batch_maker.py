"""Checks what a caller gives to a dispatch, and makes of it a batch, or a part of one, that a transport can send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from tokenyard.errors import ContractError
from tokenyard.exchange.announcement import Announcer
from tokenyard.exchange.batch import Batch, Part, UnencodedRows
from tokenyard.exchange.batch_routes import BatchRoutes
from tokenyard.exchange.checks import check_batch
from tokenyard.exchange.open_trips import InFlightQueue
from tokenyard.exchange.passes import first_part
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.stats import LayerStats, LoadCounter
from tokenyard.exchange.transport import Transport
from tokenyard.formats.base import EncodedRows
from tokenyard.routing import Routes
from tokenyard.rows import RoutingLogits


class BatchMaker:
    """Makes the batches of the next round on one rank."""

    def __init__(
        self,
        transport: Transport,
        announcer: Announcer,
        in_flight: InFlightQueue,
        load: LoadCounter,
        stats: Mapping[str, LayerStats],
    ) -> None:
        self._transport, self._announcer, self._in_flight = transport, announcer, in_flight
        self._load, self._stats = load, stats
        self._group = transport.group

    def make(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor],
        *,
        ahead: bool,
        takes_slots: bool,
    ) -> Batch:
        """Make a batch of rows, routes and further payloads; raise if they are not what the layer was planned for."""
        transport = self._transport
        if isinstance(rows, UnencodedRows):
            rows.check()
            if not transport.encodes(spec.wire):
                rows = rows.format.encode(rows.x_TH)
        known, given = (routes, routes.routes) if isinstance(routes, BatchRoutes) else (None, routes)
        if known is not None and known.spec.placement != spec.placement:
            raise ContractError(
                f"the routes are those of layer {known.spec.layer!r}, whose experts are elsewhere",
                expected=f"routes of a layer with the placement of {spec.layer!r}",
                fix="pass Routes",
            )
        values = transport.reads_values and known is None
        checked = check_batch(spec, rows, given, extra, self._group.device, values=values)
        tokens = rows.num_rows
        if known is None:
            if spec.placement.lost_experts and isinstance(checked, Routes):
                checked = self._without_lost(spec, checked)
            known = BatchRoutes(spec=spec, routes=checked, num_tokens=tokens, rank=self._group.rank)
        counts = transport.counts(known) if transport.reads_values else [0] * self._group.size
        if spec.max_rows is not None:
            counts = [*counts, *([0] * len(counts))]  # nothing is left for later passes
        return Batch(
            spec=spec,
            round=self._announcer.round + 1,
            region=self._in_flight.free_region,
            rows=rows,
            extra=extra,
            routes=known,
            announcements=self._announcer.of_dispatch(spec, tokens, counts),
            choice_counts=self._load.counts(spec.layer) if transport.counts_choices else None,
            ahead=ahead,
            takes_slots=takes_slots,
        )

    def _without_lost(self, spec: ExchangeSpec, routes: Routes) -> Routes:
        """The routes without choices whose expert was lost with its rank.

        Which replicas serve a token depends on all of its ids. Only the remaining ones travel, and all ranks use these.
        """
        rank_TK, _ = spec.placement.resolve(routes.topk_ids_TK, self._group.rank)
        dropped_TK = (routes.topk_ids_TK >= 0) & (rank_TK < 0)
        self._stats[spec.layer].count_dropped(dropped_TK)
        return routes.without(dropped_TK, renormalize=spec.renormalizes_dropped)

    def make_part(self, batch: Batch, first: int, parts: int) -> Batch:
        """Cut the tokens of a batch from `first` on into `parts` parts, and make a batch of the first."""
        transport, routes = self._transport, batch.routes
        assert isinstance(batch.rows, EncodedRows)
        last = first + first_part(batch.num_tokens - first, parts)
        later = transport.counts(routes.of_tokens(last, batch.num_tokens))
        if not any(transport.loads(self._group.rank, later)):
            last = batch.num_tokens  # the tokens behind go to no rank: they need no further pass
        some = routes.of_tokens(first, last)
        counts = [*transport.counts(some), *later]
        return replace(
            batch,
            round=self._announcer.round + 1,
            region=self._in_flight.free_region,
            rows=batch.rows.slice(first, last),
            extra={name: payload[first:last] for name, payload in batch.extra.items()},
            routes=some,
            announcements=self._announcer.of_dispatch(batch.spec, last - first, counts),
            part=Part(batch=batch, first=first, parts=parts),
        )
