"""`local`: a group of one rank, whose rows stay where they are.

Nothing is packed, announced or waited for. Rows travel in the layer's wire all the same, and results come back in its
combine wire: the bits are those of every other exchange. What arrives is a copy, as everywhere: neither the caller nor
the experts see what the other writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenyard.exchange.batch import Arrival, Batch, Failure, without_graph
from tokenyard.exchange.results import Results, ResultsAtHome, RowsAtHome
from tokenyard.exchange.transport import Transport
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Pending
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits


class LocalTransport(Transport[None]):
    """Serves a group of one rank: its rows go to its own experts."""

    name = "local"
    bounds_rows = True
    devices = ("cpu",)
    most_ranks = 1
    carries_logits = True

    def send(self, batch: Batch) -> Pending[Arrival[None]]:
        announcements = batch.announcements
        announcer, bound = announcements.announcer, announcements.bound
        fits = bound is None or batch.routes.counts[0] <= bound.max_rows
        arrival = batch.arrived(_received(batch), batch.routes.counts) if fits else None

        def meet() -> Arrival[None]:
            announcements.all_met()
            announcer.noticed([announcer.notice()])
            if bound is not None:
                bound.hear([announcements.mine.counts])
            assert arrival is not None
            return arrival

        return Pending(meet)

    def send_back(self, results: Results[None]) -> Pending[ResultsAtHome]:
        assert results.encoded is not None
        # Detached: experts may return tensors that require a gradient, and results at home never do.
        payloads = {name: without_graph(payload) for name, payload in results.encoded.payloads.items()}
        results.on_results_written()

        def meet() -> ResultsAtHome:
            results.announcements.all_met()
            return RowsAtHome.of(results.arrival, [payloads])

        return Pending(meet)

    def fail(self, failure: Failure) -> None:
        failure.announcements.all_met()

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        return [count * batch.spec.dispatch_layout.stride for count in rows]


def _received(batch: Batch) -> ReceivedRows:
    """Copies of the rows of a batch that have an expert: all of them arrive."""
    rows, spec = batch.rows, batch.spec
    assert isinstance(rows, EncodedRows)
    (tokens_N,) = (None,) if batch.routes.stays_whole else batch.routes.tokens_by_rank
    routes: LocalRoutes | RoutingLogits
    if isinstance(batch.routes.routes, RoutingLogits):
        routes = RoutingLogits(logits_RE=batch.routes.routes.logits_RE.detach().clone())
    else:
        ids_RK, weights_RK = batch.routes.local_routes()
        routes = LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)
    return ReceivedRows(
        rows=EncodedRows(
            format=spec.wire, hidden_size=spec.hidden_size, payloads=_copied(rows.payloads, tokens_N)
        ),
        routes=routes,
        counts_W=tuple(batch.routes.counts),
        extra=_copied(batch.extra, tokens_N) if batch.extra else {},
    )


def _copied(payloads: Mapping[str, Tensor], tokens_N: Tensor | None) -> dict[str, Tensor]:
    """Copies of the payloads of some tokens (None: of all), without their autograd graph."""
    if tokens_N is not None:
        return {name: without_graph(tensor)[tokens_N] for name, tensor in payloads.items()}
    contiguous = torch.contiguous_format
    return {name: without_graph(tensor).clone(memory_format=contiguous) for name, tensor in payloads.items()}
