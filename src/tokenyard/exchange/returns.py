"""What comes home of each choice beside the results: payloads whose numbers are placed, and never summed.

The gradient of a routing weight is a number of one choice, which the rank of its expert computes. With `sum="choices"`
it travels beside the result of that choice. With `sum="ranks"` a row comes home for each (token, rank), and beside it a
place for each of the token's K choices; those of other ranks stay zero, and are not read. Where a host's results are
summed before they leave it, the relay places their numbers, and sends them on beside the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import ContractError
from tokenyard.exchange.batch import Arrival, BatchRoutes
from tokenyard.formats.base import EncodedRows, Payload
from tokenyard.rows import LocalRoutes


def beside_results(arrival: Arrival, returns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The payloads that travel beside results; `returns` has a row for each choice of the received rows, by name."""
    spec = arrival.spec
    declared = [payload.name for payload in spec.returns]
    if sorted(returns) != sorted(declared):
        raise ContractError(
            f"a combine was given payloads {sorted(returns)}",
            expected=f"payloads {sorted(declared)} of each choice, as the spec declares",
            fix="pass each declared payload as `returns`",
        )
    assert isinstance(arrival.received.routes, LocalRoutes)  # logits have no choices
    pairs_N, payloads = arrival.received.routes.pairs, {}
    for payload in spec.returns:
        numbers_N = returns[payload.name]
        payload.check(numbers_N, len(pairs_N))
        if not spec.sums_choices:
            shape = (arrival.received.num_rows * spec.top_k, payload.width)
            places = torch.zeros(shape, dtype=payload.dtype, device=numbers_N.device)
            places[pairs_N] = numbers_N
            numbers_N = places.view(arrival.received.num_rows, spec.top_k * payload.width)
        payloads[payload.name] = numbers_N
    return payloads


@dataclass(frozen=True, eq=False)
class ChoicePlaces:
    """Where the numbers belong that come beside results, which come home in parts: of ranks, or of hosts."""

    names: tuple[str, ...]  # of the payloads
    num_tokens: int
    top_k: int
    choices_by_part: Sequence[Tensor]  # the choices (ascending) of each part, as token · K + choice
    # The tokens (ascending) of the rows of each part, which have numbers of K choices; None: a row is of one choice.
    tokens_by_part: Sequence[Tensor] | None

    @classmethod
    def of(cls, routes: BatchRoutes) -> ChoicePlaces:
        """The places of what each rank returns."""
        spec = routes.spec
        tokens = None if spec.sums_choices else routes.tokens_by_rank
        names = tuple(payload.name for payload in spec.returns)
        return cls(names, routes.num_tokens, spec.top_k, routes.choices_by_rank, tokens)

    def without(self, rows: EncodedRows) -> EncodedRows:
        """Rows of results without these payloads."""
        payloads = {name: part for name, part in rows.payloads.items() if name not in self.names}
        return EncodedRows(format=rows.format, hidden_size=rows.hidden_size, payloads=payloads)

    def placed(self, payload: Payload, rows_by_part: Sequence[EncodedRows]) -> Tensor:
        """The numbers of this rank's choices, `[T, K · width]`; 0 for ids of -1."""
        first = rows_by_part[0].payloads[payload.name]
        placed = first.new_zeros(self.num_tokens * self.top_k, payload.width)
        for part, (rows, choice_N) in enumerate(zip(rows_by_part, self.choices_by_part, strict=True)):
            numbers = rows.payloads[payload.name]
            if self.tokens_by_part is not None:
                row_N = torch.searchsorted(self.tokens_by_part[part], choice_N // self.top_k)
                numbers = numbers.reshape(-1, self.top_k, payload.width)[row_N, choice_N % self.top_k]
            placed[choice_N] = numbers
        return placed.view(self.num_tokens, self.top_k * payload.width)
