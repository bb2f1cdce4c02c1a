"""Ranks of a tensor-parallel group hold the same tokens: each sends a slice of them, and all gather the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenSlices:
    """The slices of `size` ranks that hold the same tokens, as rank `rank` of them sees it.

    Slices are equally long, but for the last ones, which may be shorter or empty. `all_gather` joins the equally long
    tensors of all ranks, in rank order, along the first dimension.

    >>> TokenSlices(rank=1, size=2, all_gather=lambda part: part).bounds(5)
    slice(3, 5, None)
    """

    rank: int
    size: int
    all_gather: Callable[[Tensor], Tensor]

    def longest(self, tokens: int) -> int:
        """The tokens of the longest slice."""
        return -(-tokens // self.size)

    def bounds(self, tokens: int) -> slice:
        """Where the slice of this rank is."""
        longest = self.longest(tokens)
        return slice(min(self.rank * longest, tokens), min((self.rank + 1) * longest, tokens))

    def mine(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The slice of this rank, of tensors that have a row for each token."""
        return tuple(tensor[self.bounds(len(tensor))] for tensor in tensors)

    def gather(self, output: Tensor, write: Callable[[Tensor], object]) -> None:
        """Let `write` write the results of this rank's slice, and fill `output` with those of all ranks."""
        part = output.new_zeros(self.longest(len(output)), *output.shape[1:])
        mine = self.bounds(len(output))
        write(part[: mine.stop - mine.start])
        output.copy_(self.all_gather(part)[: len(output)])
