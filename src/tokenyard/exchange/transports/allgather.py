"""`allgather`: every rank sees every token and keeps the rows of its own experts.

The simplest exchange, and the one between ranks that carries router logits: experts that route by themselves must see
all tokens. It moves W copies of each row, so it pays if a token's experts live on nearly all ranks anyway.
Results go back as rows, as in every exchange: a reduce-scatter would sum in an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.exchange.batch import Arrival, Batch, BatchRoutes, Failure, received_rows
from tokenyard.exchange.results import Results, ResultsAtHome
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.messages import Mailbox
from tokenyard.exchange.transports.way_back import send_back
from tokenyard.group.base import Group, Pending
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits


class AllgatherTransport(Transport[None]):
    """Sends all tokens to all ranks; each rank keeps the rows of its own experts."""

    name = "allgather"
    bounds_rows = True
    carries_logits = True
    works_ahead = True

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        super().__init__(group, in_flight=in_flight, guard=guard)
        self.mailbox = Mailbox(group)  # sends and receives results

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        self.mailbox.serve(specs, self.num_counts)

    def num_counts(self, spec: ExchangeSpec) -> int:
        return self.group.size + (spec.max_rows is not None)

    def counts(self, routes: BatchRoutes) -> list[int]:
        """Rows for each rank; with `max_rows` also the number of tokens, because all of them come to every rank."""
        return [*routes.counts, routes.num_tokens] if routes.spec.max_rows is not None else routes.counts

    def loads(self, source: int, counts: Sequence[int]) -> Sequence[int]:
        return counts[-1:]

    def send(self, batch: Batch) -> Pending[Arrival[None]]:
        packets = self.pack(batch)
        answers = self.announce(batch.announcements)

        def receive() -> Arrival[None]:
            heard = answers.wait()
            tokens = [announcement.tokens for announcement in heard]
            arrived = self.group.all_gather_rows(packets, tokens, phase="dispatch")
            # Each source expects a result for each row that it announced: `Arrival.check_counts` compares.
            announced = [announcement.counts[self.group.rank] for announcement in heard]
            return batch.arrived(self._kept(batch.spec, arrived, tokens), announced)

        return Pending(receive)

    def pack(self, batch: Batch) -> Tensor:
        """The packets of a checked batch, one for each token, with global ids."""
        routes, tensors = batch.routes.routes, batch.payloads
        if isinstance(routes, RoutingLogits):
            tensors["logits"] = routes.logits_RE
        else:
            nobody_TK = routes.topk_ids_TK < 0
            tensors["ids"] = routes.topk_ids_TK.int()
            tensors["weights"] = routes.topk_weights_TK.float().masked_fill(nobody_TK, 0.0)
        return batch.spec.dispatch_layout.pack(tensors, batch.num_tokens, self.group.device)

    def _kept(self, spec: ExchangeSpec, arrived: Tensor, tokens: Sequence[int]) -> ReceivedRows:
        """Keep the rows that have an expert here; turn global ids into local ones. If logits travel, all are kept."""
        everything = received_rows(spec, arrived, tokens)
        if isinstance(everything.routes, RoutingLogits):
            return everything
        kept, ids, kept_counts = [], [], []
        start = 0
        for source, count in enumerate(tokens):
            # Which replica of an expert serves a token depends on the token's source rank.
            global_ids = everything.routes.ids_RK[start : start + count]
            # An id that no expert has was damaged on the way: its row is not kept, and missing in the counts.
            unknown_TK = (global_ids < 0) | (global_ids >= spec.num_experts)
            rank_TK, local_TK = spec.placement.resolve(global_ids.masked_fill(unknown_TK, -1), source)
            here_TK = rank_TK == self.group.rank
            keep = here_TK.any(dim=1).nonzero().squeeze(1)
            kept.append(keep + start)
            kept_counts.append(keep.numel())
            ids.append(torch.where(here_TK, local_TK, -1)[keep])
            start += count
        ids_RK = torch.cat(ids)
        rows = received_rows(spec, arrived[torch.cat(kept)], kept_counts)
        assert isinstance(rows.routes, LocalRoutes)
        weights_RK = torch.where(ids_RK >= 0, rows.routes.weights_RK, 0.0)
        local = LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)
        return ReceivedRows(rows=rows.rows, routes=local, counts_W=rows.counts_W, extra=rows.extra)

    def send_back(self, results: Results[None]) -> Pending[ResultsAtHome]:
        return send_back(self.mailbox, results)

    def fail(self, failure: Failure) -> None:
        if failure.arrival is None:
            self.announce(failure.announcements).wait()
        else:
            self.mailbox.announce(failure.announcements).wait()

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        return [batch.num_tokens * batch.spec.dispatch_layout.stride] * self.group.size

    def close(self) -> None:
        self.mailbox.clear()
