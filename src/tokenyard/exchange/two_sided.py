"""`two_sided`: first every rank hears how many rows come, then rows go out in one variable all-to-all.

A row travels once to each rank that owns at least one of its experts, with the ids already rewritten to that
rank's local experts. Runs on any group, on any number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenyard.exchange.announcement import Announcement
from tokenyard.exchange.cargo import Cargo, Outgoing, received_rows
from tokenyard.exchange.message import MessageExchange
from tokenyard.routing import Routes
from tokenyard.rows import ReceivedRows


class TwoSidedExchange(MessageExchange):
    """Counts, then a variable all-to-all."""

    name = "two_sided"

    def _move(
        self, cargo: Cargo, outgoing: Outgoing, heard: Sequence[Announcement]
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        routes = outgoing.routes
        assert isinstance(routes, Routes)  # `supports` refuses logits
        counts = [tokens.numel() for tokens in outgoing.tokens_by_rank]
        arriving = tuple(announcement.counts[self.group.rank] for announcement in heard)
        token_N = torch.cat(outgoing.tokens_by_rank)
        target_N = torch.arange(self.group.size, device=token_N.device).repeat_interleave(
            torch.tensor(counts, device=token_N.device)
        )
        rank_TK, local_TK = cargo.placement.resolve(routes.topk_ids_TK, self.group.rank)
        here_NK = rank_TK[token_N] == target_N.unsqueeze(1)
        tensors = {name: tensor[token_N] for name, tensor in outgoing.rows.payloads.items()}
        tensors |= {name: tensor[token_N] for name, tensor in outgoing.extra.items()}
        tensors["ids"] = torch.where(here_NK, local_TK[token_N], -1)
        tensors["weights"] = torch.where(here_NK, routes.topk_weights_TK[token_N].float(), 0.0)
        packets = cargo.dispatch_layout.pack(tensors, token_N.numel(), token_N.device)
        arrived = self.group.all_to_all_rows(packets, counts, arriving, phase="dispatch")
        return received_rows(cargo, arrived, arriving), arriving

    def bytes_sent(self, cargo: Cargo, outgoing: Outgoing) -> list[int]:
        return [tokens.numel() * cargo.dispatch_layout.stride for tokens in outgoing.tokens_by_rank]
