"""The sum over ranks: in float32, in rank order, from +0, rounded once, with each row read only once.

A token has at most one row from each rank, and rows stand in the order of tokens. There are two ways. Both add in the
order of `RankRows.sum`, and give the same bits:

- **Where they stand.** Rows of the output's own dtype are taken as lines of one table: all memory from the first of
  them to the last, whatever lies in between. The sum is the product of a sparse matrix of ones, which has a line per
  token with its rows in rank order, and that table. Torch adds the products of a line in float32, in their order, and
  rounds at the end.
- **Decoded.** Else the tokens are walked in blocks whose float32 sums stay in the cache: for each rank in turn the
  block's rows are decoded and added, then the tensors that the caller adds, then the block is rounded into the output.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.duties import Duty, record
from tokenyard.formats.base import EncodedRows

# float32 elements of a block of sums (512 KiB: with the rows that are added, it fits a core's L2 cache).
# CPU time of a sum at T 512, H 2048 from 4 ranks, 4 processes on 2 cores: 8.1 ms at 32 Ki, 5.1 to 6.5 at 64 Ki,
# 4.6 to 5.7 at 128 Ki, 5.3 to 6.5 at 256 Ki.
BLOCK = 128 * 1024
# Elements of a block that is summed where it stands: each block has a fixed cost, and its result is allocated and
# copied. The same sum by one process alone: 3.5 ms at 64 Ki, 3.0 at 128 Ki, 2.7 at 256 Ki, 2.3 at 512 Ki and 1 Mi.
TABLE_BLOCK = 512 * 1024
# Bytes: a table with narrower lines has so many lines that to index them costs more than to decode the rows.
NARROWEST_LINE = 512


def sum_over_ranks(
    home: Sequence[EncodedRows], tokens_by_rank: Sequence[Tensor], out_TH: Tensor, add: Sequence[Tensor]
) -> Tensor:
    """Write into `out_TH` the sum of `home[w]`, the rows of tokens `tokens_by_rank[w]`, and of `add`."""
    if len(home) == 1 and not add and tokens_by_rank[0].numel() == out_TH.shape[0]:
        return _sum_of_one_rank(home[0], out_TH)
    record(Duty.REDUCE_RANKS, sum(tokens.numel() for tokens in tokens_by_rank))
    table = None if add else _table_of(home, out_TH)
    if table is None:
        return _sum_decoded(home, tokens_by_rank, out_TH, add)
    return _sum_where_they_stand(table, tokens_by_rank, out_TH)


def _sum_of_one_rank(rows: EncodedRows, out_TH: Tensor) -> Tensor:
    """Write the rows of one rank, which has all tokens, into `out_TH`.

    Adds +0, as a sum that begins there does: -0 becomes +0. It does so before the rounding, because a negative sum that
    is smaller than the output's smallest number is no zero, and rounds to -0.
    """
    record(Duty.REDUCE_RANKS, out_TH.shape[0])
    (first, *_), dtype = rows.payloads.values(), out_TH.dtype
    same = not rows.format.quantized and first.dtype == dtype
    y_TH = without_graph(rows.decode(dtype if same else torch.float32))
    return torch.add(y_TH, 0.0, out=out_TH)  # rounds the float32 sum


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor without its autograd graph: itself, or a detached view."""
    return tensor.detach() if tensor.requires_grad else tensor


# -- Where they stand --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Memory that holds the rows of all ranks, cut into lines: a row is one line, or several consecutive ones."""

    lines: Tensor
    lines_per_row: int
    first_lines: list[int]  # by rank: where its first row starts
    steps: list[int]  # by rank: lines from a row to the next


class _Memory:
    """Bytes at an address, described by NumPy's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def _table_of(home: Sequence[EncodedRows], out_TH: Tensor) -> _Table | None:
    """One table for the rows of all ranks; None if they must be decoded, or do not lie on common lines."""
    if out_TH.device.type != "cpu" or any(rows.format.quantized for rows in home):
        return None
    rows_by_rank = [next(iter(rows.payloads.values())) for rows in home]
    there = [rows for rows in rows_by_rank if rows.shape[0]]
    if not there or any(rows.dtype != out_TH.dtype or rows.stride(1) != 1 for rows in there):
        return None
    size = out_TH.dtype.itemsize
    row_bytes = out_TH.shape[1] * size
    start = min(rows.data_ptr() for rows in there)
    end = max(rows.data_ptr() + (len(rows) - 1) * rows.stride(0) * size + row_bytes for rows in there)
    line = gcd(row_bytes, *(n for rows in there for n in (rows.data_ptr() - start, rows.stride(0) * size)))
    if line < min(NARROWEST_LINE, row_bytes):
        return None
    # The memory between the rows may hold anything: no line of it is ever read.
    memory = torch.from_numpy(np.asarray(_Memory(start, end - start)))
    return _Table(
        lines=memory.view(out_TH.dtype).view(-1, line // size),
        lines_per_row=row_bytes // line,
        first_lines=[(rows.data_ptr() - start) // line for rows in rows_by_rank],
        steps=[rows.stride(0) * size // line for rows in rows_by_rank],
    )


def _sum_where_they_stand(table: _Table, tokens_by_rank: Sequence[Tensor], out_TH: Tensor) -> Tensor:
    num_tokens, hidden_size = out_TH.shape
    parts, world = table.lines_per_row, len(tokens_by_rank)
    # The index by NumPy: small operators of torch take several times as long.
    line_TW = np.full((num_tokens, world), -1)
    for rank, (tokens, first, step) in enumerate(
        zip(tokens_by_rank, table.first_lines, table.steps, strict=True)
    ):
        line_TW[tokens.numpy(), rank] = first + step * np.arange(tokens.numel())
    line_NW = line_TW
    if parts > 1:
        line_TPW = line_TW[:, None] + np.arange(parts)[:, None]
        line_NW = np.where(line_TW[:, None] >= 0, line_TPW, -1).reshape(-1, world)
    there_NW = line_NW >= 0
    line_L = torch.from_numpy(line_NW[there_NW])
    ends_N = np.zeros(len(line_NW) + 1, dtype=np.int64)
    np.cumsum(there_NW.sum(axis=1), out=ends_N[1:])
    ones = torch.ones(line_L.numel(), dtype=out_TH.dtype)
    block = max(1, TABLE_BLOCK // hidden_size)
    for start in range(0, num_tokens, block):
        end = min(start + block, num_tokens)
        block_ends = ends_N[start * parts : end * parts + 1]
        first, last = block_ends[0], block_ends[-1]
        chosen = torch.sparse_csr_tensor(
            torch.from_numpy(block_ends - first),
            line_L[first:last],
            ones[first:last],
            size=((end - start) * parts, table.lines.shape[0]),
            check_invariants=False,
        )
        sums: Any = torch.sparse.mm(chosen, table.lines, reduce="sum")
        out_TH[start:end] = sums.view(-1, hidden_size)
    return out_TH


with warnings.catch_warnings():
    # Torch warns once per process that its sparse CSR tensors are in beta. Here a twin checks them: `RankRows.sum`.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1), check_invariants=False)


# -- Decoded -----------------------------------------------------------------------------------------------


@torch.no_grad()  # a residual may require a gradient; layers have none, and sums are made in place
def _sum_decoded(
    home: Sequence[EncodedRows], tokens_by_rank: Sequence[Tensor], out_TH: Tensor, add: Sequence[Tensor]
) -> Tensor:
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
                # No token occurs twice within a rank, so the order of additions is fixed, on any device.
                sums_TH.index_add_(0, tokens[first:last] - start, some_TH)
        for term_TH in add:
            sums_TH += term_TH[start:end].float()
        out_TH[start:end] = sums_TH
    return out_TH


def _decode(rows: EncodedRows, into_NH: Tensor) -> Tensor:
    """Decode rows to float32; rows of a plain format are written into `into_NH`, without a new tensor."""
    if rows.format.quantized:
        return rows.decode(torch.float32)
    (data,) = rows.payloads.values()
    return into_NH.copy_(data)
