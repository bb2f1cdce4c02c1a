"""`two_sided`: first every rank hears how many rows come, then rows go out in one variable all-to-all.

A row travels once to each rank that owns at least one of its experts, with the ids already rewritten to that
rank's local experts. Runs on any group, on any number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.exchange.announcement import Announcement
from tokenyard.exchange.message import MessageExchange
from tokenyard.exchange.spec import ExchangeSpec, Outgoing, received_rows
from tokenyard.routing import Routes
from tokenyard.rows import ReceivedRows


class TwoSidedExchange(MessageExchange):
    """Counts, then a variable all-to-all."""

    name = "two_sided"

    def _pack(self, spec: ExchangeSpec, outgoing: Outgoing) -> Tensor:
        routes = outgoing.routes
        assert isinstance(routes, Routes)  # `supports` refuses logits
        token_N = torch.cat(outgoing.tokens_by_rank)
        tensors = {name: tensor[token_N] for name, tensor in outgoing.rows.payloads.items()}
        tensors |= {name: tensor[token_N] for name, tensor in outgoing.extra.items()}
        tensors["ids"], tensors["weights"] = outgoing.local_routes(routes)
        return spec.dispatch_layout.pack(tensors, token_N.numel(), token_N.device)

    def _move(
        self, spec: ExchangeSpec, outgoing: Outgoing, packets: Tensor, heard: Sequence[Announcement]
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        arriving = tuple(announcement.counts[self.group.rank] for announcement in heard)
        arrived = self.group.all_to_all_rows(packets, outgoing.counts, arriving, phase="dispatch")
        return received_rows(spec, arrived, arriving), arriving

    def bytes_sent(self, spec: ExchangeSpec, outgoing: Outgoing) -> list[int]:
        return [tokens.numel() * spec.dispatch_layout.stride for tokens in outgoing.tokens_by_rank]
