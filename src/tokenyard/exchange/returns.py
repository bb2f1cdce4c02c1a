"""What comes home of each choice beside the results: payloads whose numbers are placed, and never summed.

The gradient of a routing weight is a number of one choice, which the rank of its expert computes. With `sum="choices"`
it travels beside the result of that choice. With `sum="ranks"` a row comes home for each (token, rank), and beside it a
place for each of the token's K choices; those of other ranks stay zero, and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokenyard.errors import ContractError
from tokenyard.exchange.batch import Arrival, BatchRoutes
from tokenyard.formats.base import EncodedRows, Payload
from tokenyard.rows import LocalRoutes


def with_returns(arrival: Arrival, encoded: EncodedRows | None, returns: Mapping[str, Tensor]) -> EncodedRows:
    """Results with the payloads that the spec declares; `returns` has a row for each choice of the received rows."""
    spec = arrival.spec
    declared = [payload.name for payload in spec.returns]
    if encoded is None or sorted(returns) != sorted(declared):
        found = "results in the combine buffer" if encoded is None else f"payloads {sorted(returns)}"
        raise ContractError(
            f"a combine was given {found}",
            expected=f"results, and payloads {sorted(declared)} of each choice, as the spec declares",
            fix="return rows from the experts, and each declared payload beside them",
        )
    assert isinstance(arrival.received.routes, LocalRoutes)  # logits have no choices
    pairs_N = arrival.received.routes.pairs
    payloads = dict(encoded.payloads)
    for payload in spec.returns:
        numbers_N = returns[payload.name]
        payload.check(numbers_N, len(pairs_N))
        if not spec.sums_choices:
            shape = (arrival.received.num_rows * spec.top_k, payload.width)
            places = torch.zeros(shape, dtype=payload.dtype, device=numbers_N.device)
            places[pairs_N] = numbers_N
            numbers_N = places.view(arrival.received.num_rows, spec.top_k * payload.width)
        payloads[payload.name] = numbers_N
    return replace(encoded, payloads=payloads)


def place_returns(payload: Payload, routes: BatchRoutes, rows_by_rank: Sequence[EncodedRows]) -> Tensor:
    """The numbers of this rank's choices, `[T, K · width]`, from what each rank returned; 0 for ids of -1."""
    top_k = routes.spec.top_k
    first = rows_by_rank[0].payloads[payload.name]
    placed = first.new_zeros(routes.num_tokens * top_k, payload.width)
    for rank, (rows, choice_N) in enumerate(zip(rows_by_rank, routes.choices_by_rank, strict=True)):
        numbers = rows.payloads[payload.name]
        if not routes.spec.sums_choices:
            # Rows stand in the order of their tokens, and each holds the numbers of all choices of its token.
            row_N = torch.searchsorted(routes.tokens_by_rank[rank], choice_N // top_k)
            numbers = numbers.reshape(-1, top_k, payload.width)[row_N, choice_N % top_k]
        placed[choice_N] = numbers
    return placed.view(routes.num_tokens, top_k * payload.width)
