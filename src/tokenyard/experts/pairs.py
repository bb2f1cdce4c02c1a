"""The (received row, expert) pairs of a batch, and their order by expert.

Routes give, for each received row, up to K experts of this rank. Products are computed expert by expert, so the
pairs are sorted by expert. Results are indexed by pair (`index_N`, ascending), so that they can be summed
in the order of a row's choices. With K = 2 and local experts 0 and 1:

    ids_RK = [[1, -1], [0, 1], [-1, -1]]     row 2 has no expert here
    index_N = [0, 2, 3]                      r · K + k of each pair that exists
    by_expert_N = [1, 0, 2]                  pair 1 goes to expert 0, pairs 0 and 2 to expert 1
    place_N = [1, 0, 2]                      the position of each pair in by_expert_N: its inverse
    counts = (1, 2)                          pairs of each expert

Routing weights are read only for pairs that exist: the weight of an id of -1 may be anything, even NaN, and so
may a row that has no pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.rows import LocalRoutes


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedPairs:
    """The pairs of a batch; see the module's docstring for the fields."""

    index_N: Tensor
    row_N: Tensor  # the received row of each pair, in the order of index_N
    weights_N: Tensor  # float32, in the order of index_N
    by_expert_N: Tensor
    expert_N: Tensor  # the expert of each pair, in the order of by_expert_N
    place_N: Tensor
    counts: tuple[int, ...]
    counts_L: Tensor  # `counts` as a tensor on the device of the routes
    num_rows: int
    top_k: int

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has pairs, with their slice of `by_expert_N`."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count


def check_shapes(routes: LocalRoutes) -> None:
    """Raise unless ids and weights are matrices of the same shape."""
    ids_RK, weights_RK = routes.ids_RK, routes.weights_RK
    if ids_RK.dim() != 2 or ids_RK.shape != weights_RK.shape:
        raise InputError(
            f"ids_RK is {list(ids_RK.shape)} and weights_RK is {list(weights_RK.shape)}",
            expected="one id and one weight for each received row and choice: [R, K] both",
            fix="pass the routes of this batch",
        )


def check_local_id(highest: int, num_local_experts: int) -> None:
    """Raise if the highest local id of a batch is beyond the experts of this rank."""
    if highest >= num_local_experts:
        raise InputError(
            f"ids_RK holds local expert id {highest}",
            expected=f"ids from -1 to {num_local_experts - 1}: this rank has {num_local_experts} experts",
            fix="map global expert ids to local ones through the placement",
        )


def sort_pairs(
    routes: LocalRoutes, num_local_experts: int, token_numbers: Tensor | None = None
) -> SortedPairs:
    """Find the pairs of a batch and sort them by expert; ties keep the order of `index_N`.

    With the numbers of the rows' tokens, `[R, 1]`, the pairs of an expert are sorted by these.

    >>> routes = LocalRoutes(ids_RK=torch.tensor([[1, -1], [0, 1], [-1, -1]]), weights_RK=torch.ones(3, 2))
    >>> pairs = sort_pairs(routes, 2)
    >>> pairs.index_N.tolist(), pairs.by_expert_N.tolist(), pairs.counts
    ([0, 2, 3], [1, 0, 2], (1, 2))
    """
    check_shapes(routes)
    ids_RK, weights_RK = routes.ids_RK, routes.weights_RK
    ids = ids_RK.reshape(-1)
    index_N = (ids >= 0).nonzero().view(-1)
    if token_numbers is None:
        expert_N, by_expert_N = torch.sort(ids[index_N], stable=True)
    else:
        by_number_N = torch.argsort(token_numbers.view(-1)[index_N // ids_RK.shape[1]], stable=True)
        expert_N, order_N = torch.sort(ids[index_N[by_number_N]], stable=True)
        by_expert_N = by_number_N[order_N]
    counts_L = torch.bincount(expert_N, minlength=num_local_experts)
    check_local_id(counts_L.shape[0] - 1, num_local_experts)
    return SortedPairs(
        index_N=index_N,
        row_N=index_N // ids_RK.shape[1],
        weights_N=weights_RK.reshape(-1)[index_N].float(),
        by_expert_N=by_expert_N,
        expert_N=expert_N,
        place_N=torch.argsort(by_expert_N),
        counts=tuple(counts_L.tolist()),
        counts_L=counts_L,
        num_rows=ids_RK.shape[0],
        top_k=ids_RK.shape[1],
    )
