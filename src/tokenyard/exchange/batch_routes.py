"""Who gets which row of a batch: computed once, however often the routes are used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tokenyard.exchange.reduce import without_graph
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.routing import Routes
from tokenyard.rows import RoutingLogits


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRoutes:
    """Who gets which row of a batch. What is computed here is computed once, however often the routes are used."""

    spec: ExchangeSpec  # what the exchange knows of the layer
    routes: Routes | RoutingLogits  # as they travel: without choices whose expert was lost with its rank
    num_tokens: int  # T, the tokens of this rank
    rank: int  # this rank: which replica of an expert serves a token depends on it
    # The value of `resolved`, if it is known, as for rows that a relay forwards; None: the placement gives it.
    choices: tuple[Tensor, Tensor] | None = None

    @cached_property
    def resolved(self) -> tuple[Tensor, Tensor]:
        """`(rank_TK, local_TK)`: the rank that each choice goes to, and the number of the expert there."""
        if self.choices is not None:
            return self.choices
        assert isinstance(self.routes, Routes)
        return self.spec.placement.resolve(self.routes.topk_ids_TK, self.rank)

    @cached_property
    def stays_whole(self) -> bool:
        """Whether there is one CPU rank, and every choice of every token is one of its experts."""
        routes = self.routes
        there = routes.topk_ids_TK if isinstance(routes, Routes) else routes.logits_RE
        # If `choices` are given, ids do not say where experts are. On a GPU, to read ids would be one more wait.
        if self.spec.placement.world > 1 or self.choices is not None or not there.is_cpu:
            return False
        return isinstance(routes, RoutingLogits) or self.num_tokens == 0 or routes.id_range()[0] >= 0

    @cached_property
    def rows_out(self) -> tuple[Tensor, Tensor]:
        """`(rank_N, token_N)` of every row that goes out, by rank. If logits travel, every token goes to all ranks."""
        world = self.spec.placement.world
        if isinstance(self.routes, RoutingLogits):
            everything = torch.ones(world, self.num_tokens, device=self.routes.logits_RE.device)
            rank_N, token_N = everything.nonzero().unbind(1)
            return rank_N, token_N
        return rows_out(self.resolved[0], world)

    @cached_property
    def tokens_by_rank(self) -> tuple[Tensor, ...]:
        """For each rank, the tokens (ascending) that go there."""
        if self.stays_whole:
            return (torch.arange(self.num_tokens),)
        return tuple(self.rows_out[1].split_with_sizes(self.counts))

    @cached_property
    def counts(self) -> list[int]:
        """Rows for each rank."""
        if self.stays_whole:
            return [self.num_tokens]
        counts: list[int] = self.rows_out[0].bincount(minlength=self.spec.placement.world).tolist()
        return counts

    @cached_property
    def choices_by_rank(self) -> tuple[Tensor, ...]:
        """For each rank, the choices (ascending) whose results it returns, as token · K + choice."""
        rank_N, choice_N = self.resolved[0].flatten().sort(stable=True)
        nobody, *counts = (rank_N + 1).bincount(minlength=self.spec.placement.world + 1).tolist()
        return tuple(choice_N[nobody:].split(counts))

    @property
    def result_counts(self) -> list[int]:
        """Results that come home from each rank: one for each row, or for each choice if choices are summed at home."""
        return [c.numel() for c in self.choices_by_rank] if self.spec.sums_choices else self.counts

    def of_tokens(self, first: int, last: int) -> BatchRoutes:
        """The routes of some consecutive tokens."""
        if isinstance(self.routes, RoutingLogits):
            logits = RoutingLogits(logits_RE=self.routes.logits_RE[first:last])
            return replace(self, routes=logits, num_tokens=last - first)
        rank_TK, local_TK = self.resolved
        return replace(
            self,
            routes=self.routes.of_tokens(slice(first, last)),
            num_tokens=last - first,
            choices=(rank_TK[first:last], local_TK[first:last]),
        )

    def local_routes(self) -> tuple[Tensor, Tensor]:
        """`(ids_NK, weights_NK)` of every row that goes out, by rank: local ids of that rank's experts, else -1."""
        assert isinstance(self.routes, Routes)
        weights_TK = without_graph(self.routes.topk_weights_TK)
        if self.stays_whole:
            local_TK = self.spec.placement.local_ids(self.routes.topk_ids_TK)
            return local_TK, weights_TK.to(torch.float32, copy=True)
        target_N, token_N = self.rows_out
        rank_TK, local_TK = self.resolved
        here_NK = rank_TK[token_N] == target_N.unsqueeze(1)
        weights_NK = torch.where(here_NK, weights_TK[token_N].float(), 0.0)
        return torch.where(here_NK, local_TK[token_N], -1), weights_NK


def rows_out(rank_TK: Tensor, world: int) -> tuple[Tensor, Tensor]:
    """`(rank_N, token_N)` of every row that goes out, by rank: a token once for each rank that has an expert of it.

    >>> [index.tolist() for index in rows_out(torch.tensor([[0, 0], [1, -1], [1, 0]]), world=3)]
    [[0, 0, 1, 1], [0, 2, 1, 2]]
    """
    # One column more than ranks takes the choices of nobody: -1 modulo W + 1.
    goes_TW = torch.zeros(rank_TK.shape[0], world + 1, dtype=torch.bool, device=rank_TK.device)
    goes_TW.scatter_(1, rank_TK.remainder(world + 1), True)
    rank_N, token_N = goes_TW[:, :world].t().nonzero().unbind(1)
    return rank_N, token_N
