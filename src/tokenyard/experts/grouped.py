"""The fast experts for CPU and CUDA: pairs sorted by expert once, then two products per expert.

    sort pairs ── gather rows ── W13 · x ── activation ── W2 · h ── weight ── sum over a row's choices

Rows are decoded to the dtype of the weights. How a product is computed is chosen by `product_path`, a pure
function of the shape:

- `grouped_mm`: all experts in one call of `torch.nn.functional.grouped_mm`. It wants rows whose width is a
  multiple of 16 bytes. (It leaves rows past its last offset uninitialized; there are none here, since only
  pairs that exist are sorted.)
- `upcast`: expert by expert, the weights widened to float32 tile by tile, and a float32 product. A CPU
  without 16-bit matrix units emulates bf16 products at a third of its float32 rate, so that from some number
  of rows on, widening the weights pays. Nothing is rounded to 16 bits between the two products.
- `mm`: expert by expert, in the dtype of the weights, for shapes that `grouped_mm` does not take.

In `grouped_mm` and `mm` the sums are float32 inside a product, and its output is rounded to the dtype of the
weights, as is the activation's result. The activation itself, the bias, the routing weight and the sum over a
row's experts are always float32, and that sum has one order: the order of the row's choices, bit for bit as
`UnfinalizedRows.finish` does it. Unlike those of the reference experts, the bits of a row may still depend on
how many rows share its expert, since that is what a BLAS library chooses its tiles by.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.experts.base import Experts, local_routes
from tokenyard.experts.pairs import SortedPairs, sort_pairs
from tokenyard.rows import ExpertRows, ReceivedRows, UnfinalizedRows

ProductPath = Literal["grouped_mm", "upcast", "mm"]

# Rows of one expert from which on a CPU is faster with float32 products. Measured on a core with AVX-512 but
# no 16-bit matrix units, one expert of [2048, 2048], milliseconds for 16-bit → upcast:
#   bf16   4 rows: 1.9 → 2.8    8: 3.1 → 3.3    16: 5.0 → 4.9    32: 9.5 → 4.7    64: 17.9 → 7.7
#   fp16   4 rows: 2.8 → 3.4    8: 6.0 → 3.7    16: 8.9 → 3.9    32: 16.5 → 4.6   64: 34.0 → 6.4
UPCAST_ROWS = {torch.bfloat16: 16, torch.float16: 8}

# Elements of the weights that are widened at a time (4 MiB of float32, which stay in the cache). 64 rows ·
# [2048, 2048] on one core: 8.4 ms at 4 Mi elements, 6.5 at 1 Mi, 8.4 at 512 Ki, 11 at 128 Ki; 5.2 if the
# weights were float32 already.
UPCAST_TILE = 1024 * 1024

# float32 elements of one block of the sum over choices (512 KiB, half of a core's L2 cache).
SUM_BLOCK = 128 * 1024

GROUPED_MM_ALIGNMENT = 16  # bytes


def product_path(
    rows_per_expert: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ProductPath:
    """How experts of this shape should compute their products.

    >>> product_path(64, 2048, 1024, torch.bfloat16, torch.device("cpu"))
    'upcast'
    >>> product_path(4, 2048, 1024, torch.bfloat16, torch.device("cpu"))
    'grouped_mm'
    >>> product_path(4, 100, 1024, torch.bfloat16, torch.device("cuda"))
    'mm'
    """
    if device.type == "cpu" and rows_per_expert >= UPCAST_ROWS.get(dtype, rows_per_expert + 1):
        return "upcast"
    widths = (hidden_size * dtype.itemsize, intermediate_size * dtype.itemsize)
    return "mm" if any(width % GROUPED_MM_ALIGNMENT for width in widths) else "grouped_mm"


class GroupedExperts(Experts):
    """Experts computed group by group, on whatever matrix product is fastest for the shape."""

    name = "grouped"

    @torch.no_grad()
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | UnfinalizedRows:
        """Sort, gather, multiply, and weight and sum where asked to."""
        spec = self.spec
        pairs = sort_pairs(local_routes(received), spec.num_local_experts)
        x_RH = self.incoming(received.rows, self.weights.w13.dtype)
        if self._path(max(pairs.counts_L, default=0)) == "grouped_mm":
            rows_NH = self._all_at_once(x_RH, pairs)
        else:
            rows_NH = self._one_by_one(x_RH, pairs)
        weights_N = torch.ones_like(pairs.weights_N) if spec.weight_on == "input" else pairs.weights_N
        if finalize:
            return ExpertRows(rows_RH=sum_choices(rows_NH.mul_(weights_N.unsqueeze(1)), pairs))
        return UnfinalizedRows(
            rows_NH=rows_NH,
            weights_N=weights_N,
            index_N=pairs.index_N,
            num_rows=pairs.num_rows,
            top_k=pairs.top_k,
        )

    def _path(self, rows: int) -> ProductPath:
        spec, weights = self.spec, self.weights
        path = product_path(
            rows, spec.hidden_size, spec.intermediate_size, weights.w13.dtype, weights.w13.device
        )
        # Adopted weights may lie anywhere, say inside a memory-mapped file, and in any order.
        usable = all(
            w.is_contiguous() and w.data_ptr() % GROUPED_MM_ALIGNMENT == 0 for w in (weights.w13, weights.w2)
        )
        return "mm" if path == "grouped_mm" and not usable else path

    def _inputs(self, x_RH: Tensor, pairs: SortedPairs, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of some pairs in the dtype of the product, weighted where the weight goes on the input."""
        x_nH = x_RH[pairs.row_N[chosen]]
        if self.spec.weight_on == "input":
            return (x_nH.float() * pairs.weights_N[chosen].unsqueeze(1)).to(dtype)
        return x_nH.to(dtype)

    def _all_at_once(self, x_RH: Tensor, pairs: SortedPairs) -> Tensor:
        """Float32 results of all pairs, in the order of `index_N`, by two grouped products."""
        weights, order = self.weights, pairs.by_expert_N
        dtype, device = weights.w13.dtype, weights.w13.device
        counts_L = torch.tensor(pairs.counts_L, device=device)
        ends_L = counts_L.cumsum(0, dtype=torch.int32)
        rows_NH = torch.empty(len(order), self.spec.hidden_size, dtype=torch.float32, device=device)
        if len(order) == 0:
            return rows_NH
        x_NH = self._inputs(x_RH, pairs, order, dtype)
        pre = functional.grouped_mm(x_NH, weights.w13.mT, offs=ends_L).float()
        if weights.b13 is not None:
            pre += weights.b13.float().repeat_interleave(counts_L, dim=0)
        inner_NI = self.spec.activation(pre).to(dtype)
        y_NH = functional.grouped_mm(inner_NI, weights.w2.mT, offs=ends_L).float()
        if weights.b2 is not None:
            y_NH += weights.b2.float().repeat_interleave(counts_L, dim=0)
        rows_NH[order] = y_NH
        return rows_NH

    def _one_by_one(self, x_RH: Tensor, pairs: SortedPairs) -> Tensor:
        """Float32 results of all pairs, in the order of `index_N`, expert by expert."""
        weights = self.weights
        w13, b13, w2, b2 = weights.w13, weights.b13, weights.w2, weights.b2
        rows_NH = torch.empty(
            len(pairs.index_N), self.spec.hidden_size, dtype=torch.float32, device=w13.device
        )
        for expert, run in pairs.runs():
            chosen = pairs.by_expert_N[run]
            # An expert with few rows is better off in 16 bits, even where others of the batch are widened.
            upcast = self._path(len(chosen)) == "upcast"
            x_nH = self._inputs(x_RH, pairs, chosen, torch.float32 if upcast else w13.dtype)
            pre = _product(x_nH, w13[expert])
            if b13 is not None:
                pre += b13[expert].float()
            inner_nI = self.spec.activation(pre).to(x_nH.dtype)
            y_nH = _product(inner_nI, w2[expert])
            if b2 is not None:
                y_nH += b2[expert].float()
            rows_NH[chosen] = y_nH
        return rows_NH


def _product(x_nD: Tensor, w_OD: Tensor) -> Tensor:
    """`x_nD @ w_OD.T`, as float32. Weights that are narrower than the rows are widened by tiles."""
    if x_nD.dtype == w_OD.dtype:
        return torch.mm(x_nD, w_OD.t()).float()
    outputs, inner = w_OD.shape
    y_nO = x_nD.new_empty(x_nD.shape[0], outputs)
    step = max(1, min(outputs, UPCAST_TILE // inner))
    tile_oD = x_nD.new_empty(step, inner)
    for o in range(0, outputs, step):
        tile = tile_oD[: min(step, outputs - o)].copy_(w_OD[o : o + step])
        torch.mm(x_nD, tile.t(), out=y_nO[:, o : o + step])
    return y_nO


def sum_choices(weighted_NH: Tensor, pairs: SortedPairs) -> Tensor:
    """Sum the weighted results of each row, in float32, in the order of its choices, from +0.

    The same additions as in `UnfinalizedRows.finish`, hence the same bits: a row's first pair, its second, …;
    no row occurs twice in one step. Where all K choices of all rows live here, nothing needs to be gathered.
    """
    hidden_size = weighted_NH.shape[1]
    sums_RH = weighted_NH.new_zeros(pairs.num_rows, hidden_size)
    if len(weighted_NH) == pairs.num_rows * pairs.top_k:
        weighted_RKH = weighted_NH.view(pairs.num_rows, pairs.top_k, hidden_size)
        step = max(1, SUM_BLOCK // hidden_size)
        for r in range(0, pairs.num_rows, step):
            for choice in range(pairs.top_k):
                sums_RH[r : r + step] += weighted_RKH[r : r + step, choice]
        return sums_RH
    pairs_R = torch.bincount(pairs.row_N, minlength=pairs.num_rows)
    first_R = pairs_R.cumsum(0) - pairs_R
    for nth in range(int(pairs_R.max())):
        rows = (pairs_R > nth).nonzero().squeeze(1)
        sums_RH[rows] += weighted_NH[first_R[rows] + nth]
    return sums_RH
