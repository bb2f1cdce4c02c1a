"""The sum over ranks: float32, in rank order, rounded once, and read only once from where the rows came home.

A token has at most one row from each rank, and rows stand in the order of tokens. So the tokens are walked in
blocks whose float32 sums stay in the cache: for each rank in turn the block's rows are decoded and added, then
whatever the caller adds, then the block is rounded into the output. The order of additions is that of
`RankRows.sum`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.formats.base import EncodedRows

# float32 elements of a block of sums (512 KiB: with the rows that are added, it fits a core's L2 cache).
# CPU time of a sum at T 512, H 2048 from 4 ranks, 4 processes on 2 cores: 8.1 ms at 32 Ki, 5.1 to 6.5 at 64 Ki,
# 4.6 to 5.7 at 128 Ki, 5.3 to 6.5 at 256 Ki.
BLOCK = 128 * 1024


def sum_over_ranks(
    home: Sequence[EncodedRows], tokens_by_rank: Sequence[Tensor], out_TH: Tensor, add: Sequence[Tensor]
) -> Tensor:
    """Write into `out_TH` the sum of `home[w]`, the rows of tokens `tokens_by_rank[w]`, and of `add`."""
    num_tokens, hidden_size = out_TH.shape
    step = max(1, BLOCK // hidden_size)
    starts = range(0, num_tokens, step)
    edges = torch.tensor([*starts, num_tokens], device=out_TH.device)
    bounds = [torch.searchsorted(tokens, edges).tolist() for tokens in tokens_by_rank]
    # Made once: fresh memory for every block costs half of the time again.
    block_TH, decoded_TH = torch.empty(2, step, hidden_size, dtype=torch.float32, device=out_TH.device)
    for number, start in enumerate(starts):
        end = min(start + step, num_tokens)
        sums_TH = block_TH[: end - start].zero_()
        for rows, tokens, bound in zip(home, tokens_by_rank, bounds, strict=True):
            first, last = bound[number], bound[number + 1]
            if first < last:
                some_TH = _decode(rows.slice(first, last), decoded_TH[: last - first])
                # No token twice within a rank: the additions have one order, on any device.
                sums_TH.index_add_(0, tokens[first:last] - start, some_TH)
        for term_TH in add:
            sums_TH += term_TH[start:end].float()
        out_TH[start:end] = sums_TH
    return out_TH


def _decode(rows: EncodedRows, into_NH: Tensor) -> Tensor:
    """Rows as float32; plain ones into memory that is there."""
    if rows.format.quantized:
        return rows.decode(torch.float32)
    (data,) = rows.payloads.values()
    return into_NH.copy_(data)
