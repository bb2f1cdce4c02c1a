"""The base class of experts that are differentiated: two products of pairs that are sorted by expert.

A subclass says how it computes a batch, and hands out the first product on the way (`compute_pairs`), and how it
computes the float32 products of a backward (`products`). The rest is the same for all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenyard.duties import aside
from tokenyard.experts.base import TOKEN_NUMBERS, Experts, local_routes
from tokenyard.experts.gradients import FirstProduct, Products, RowGradients, differentiate_pairs
from tokenyard.experts.pairs import SortedPairs, sort_pairs
from tokenyard.experts.weights import ExpertWeights
from tokenyard.rows import ExpertRows, PlacedRows, ReceivedRows, UnfinalizedRows


class TrainedExperts(Experts):
    """Computes experts pair by pair, and keeps the first product of each pair for a backward."""

    @abstractmethod
    def compute_pairs(
        self,
        received: ReceivedRows,
        weights: ExpertWeights,
        *,
        finalize: bool,
        first: FirstProduct | None = None,
    ) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """What `compute` returns, without a graph.

        `first` takes the first product. If that is wanted only, the results need not be valid.
        """

    @property
    @abstractmethod
    def products(self) -> Products:
        """How the products of a backward are computed."""

    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Compute both products of each pair; with `finalize`, weight and sum the results of each row."""
        if not torch.is_grad_enabled():
            return self.compute_pairs(received, self.multiplied(), finalize=finalize)
        with torch.no_grad():
            return self.compute_pairs(received, self.multiplied(), finalize=finalize)

    @torch.no_grad()
    def compute_kept(
        self, received: ReceivedRows, weights: ExpertWeights, *, finalize: bool
    ) -> tuple[ExpertRows | PlacedRows | UnfinalizedRows, Tensor]:
        first = FirstProduct(self.spec.dtype)
        result = self.compute_pairs(received, self.multiplied(weights), finalize=finalize, first=first)
        assert first.pre_NI is not None
        return result, first.pre_NI

    @torch.no_grad()
    def differentiate(
        self,
        received: ReceivedRows,
        kept: Tensor | None,
        dy_RH: Tensor,
        weights: ExpertWeights,
        sums: Mapping[str, Tensor],
    ) -> RowGradients:
        cast = self.multiplied(weights)
        if kept is None:
            first = FirstProduct(self.spec.dtype, only=True)
            with aside():  # duties were done in the forward
                self.compute_pairs(received, cast, finalize=False, first=first)
            kept = first.pre_NI
        assert kept is not None
        pairs, x_RH = self.sorted_pairs(received), self.incoming(received, torch.float32)
        return differentiate_pairs(self.spec, self.products, pairs, x_RH, kept, dy_RH, cast, sums)

    def sorted_pairs(self, received: ReceivedRows) -> SortedPairs:
        """The pairs of received rows: those of an expert in the order of their tokens' numbers, if these have come."""
        numbers = received.extra.get(TOKEN_NUMBERS)
        return sort_pairs(local_routes(received), self.spec.num_local_experts, numbers)
