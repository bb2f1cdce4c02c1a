"""`allgather`: every rank sees every token and keeps the rows of its own experts.

The plainest way, and the one that carries router logits: experts that route by themselves must see all
tokens. It moves W copies of each row, so it pays where a token's experts live on nearly all ranks anyway.
Results go back as rows, as in every exchange: a reduce-scatter would sum in an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.exchange.announcement import Announcement
from tokenyard.exchange.message import MessageExchange
from tokenyard.exchange.spec import ExchangeSpec, Outgoing, received_rows
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits


class AllgatherExchange(MessageExchange):
    """All tokens to all ranks."""

    name = "allgather"
    carries_logits = True

    def _pack(self, spec: ExchangeSpec, outgoing: Outgoing) -> Tensor:
        routes = outgoing.routes
        tensors = {**outgoing.rows.payloads, **outgoing.extra}
        if isinstance(routes, RoutingLogits):
            tensors["logits"] = routes.logits_RE
        else:
            nobody_TK = routes.topk_ids_TK < 0
            tensors["ids"] = routes.topk_ids_TK.int()
            tensors["weights"] = routes.topk_weights_TK.float().masked_fill(nobody_TK, 0.0)
        return spec.dispatch_layout.pack(tensors, outgoing.num_tokens, self.group.device)

    def _move(
        self, spec: ExchangeSpec, outgoing: Outgoing, packets: Tensor, heard: Sequence[Announcement]
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        tokens = tuple(announcement.tokens for announcement in heard)
        arrived = self.group.all_gather_rows(packets, tokens, phase="dispatch")
        everything = received_rows(spec, arrived, tokens)
        if isinstance(everything.routes, RoutingLogits):
            return everything, tokens
        # What every source expects back is what it announced: `dispatch` compares it with what is found here.
        announced = tuple(announcement.counts[self.group.rank] for announcement in heard)
        return self._keep_local(spec, everything.routes, arrived, tokens), announced

    def _keep_local(
        self, spec: ExchangeSpec, routes: LocalRoutes, arrived: Tensor, tokens: tuple[int, ...]
    ) -> ReceivedRows:
        """Keep the rows that have an expert here; turn global ids into local ones."""
        kept, ids, kept_counts = [], [], []
        start = 0
        for source, count in enumerate(tokens):
            # Where a replicated expert is, depends on where the token comes from.
            global_ids = routes.ids_RK[start : start + count]
            # An id that no expert has was damaged on the way: its row is missed below.
            unknown_TK = (global_ids < 0) | (global_ids >= spec.num_experts)
            rank_TK, local_TK = spec.placement.resolve(global_ids.masked_fill(unknown_TK, -1), source)
            here_TK = rank_TK == self.group.rank
            keep = here_TK.any(dim=1).nonzero().squeeze(1)
            kept.append(keep + start)
            kept_counts.append(keep.numel())
            ids.append(torch.where(here_TK, local_TK, -1)[keep])
            start += count
        ids_RK = torch.cat(ids)
        batch = received_rows(spec, arrived[torch.cat(kept)], tuple(kept_counts))
        assert isinstance(batch.routes, LocalRoutes)
        weights_RK = torch.where(ids_RK >= 0, batch.routes.weights_RK, 0.0)
        local = LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)
        return ReceivedRows(rows=batch.rows, routes=local, counts_W=batch.counts_W, extra=batch.extra)

    def bytes_sent(self, spec: ExchangeSpec, outgoing: Outgoing) -> list[int]:
        return [outgoing.num_tokens * spec.dispatch_layout.stride] * self.group.size
