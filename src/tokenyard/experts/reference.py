"""Experts in plain words: slow, and the same bits for a row wherever and with whomever it is computed.

This is what other experts are compared with, and what an exchange is tested with: if a row's result does not
depend on the batch around it, then a layer on four ranks must equal a layer on one rank *bitwise*, and moving
rows has no tolerance to hide in.

A BLAS product cannot serve: it picks its tiles, and with them its order of summation, by the number of rows
and threads. So the product is written out of elementwise operations, which IEEE 754 defines to the bit:

    for each slice of DEPTH inner columns, in order:
        products[d, n, o] = x[n, d] · w[o, d]           (exact for bf16 and fp16 inputs, in float32)
        fold the first dimension in halves: products[:m-h] += products[h:m], h = ⌈m/2⌉, until one is left
        sums[n, o] += products[0]

Which additions make up an element, and in which order, follows from the inner width alone. Blocks over rows
and outputs only bound the temporaries. The inner dimension comes first, so that every operation runs over
long contiguous stretches. Everything stays in float32: pre-activation, bias, activation (see
`Activation.reproducible`), second product, bias, routing weight, and the sum over a row's experts.

The same argument holds on a GPU, and between a CPU and a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.experts.base import Experts, local_routes
from tokenyard.experts.pairs import sort_pairs
from tokenyard.rows import ExpertRows, ReceivedRows, UnfinalizedRows

# Inner columns that are multiplied at once. It fixes the order of summation: changing it changes bits.
# 64 rows · [1024, 2048] on one core, BLOCK as below: 1.65 G multiply-adds/s at 16, 1.51 at 32, 1.20 at 64.
DEPTH = 16
# float32 elements of one block of products (1 MiB, about a core's L2 cache). No influence on the result.
# At DEPTH 16 on one core: 0.83 G multiply-adds/s at 64 Ki, 1.21 at 128 Ki, 1.65 at 256 Ki, 1.77 at 512 Ki.
BLOCK = 256 * 1024


class ReferenceExperts(Experts):
    """Plain experts whose result for a row is bitwise independent of the rest of the batch."""

    name = "reference"

    @torch.no_grad()
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | UnfinalizedRows:
        """Expert by expert, in float32."""
        spec, weights = self.spec, self.weights
        pairs = sort_pairs(local_routes(received), spec.num_local_experts)
        x_RH = self.incoming(received.rows, torch.float32)
        weights_N, row_N = pairs.weights_N, pairs.row_N
        rows_NH = x_RH.new_empty(len(row_N), spec.hidden_size)
        for expert, run in pairs.runs():
            chosen = pairs.by_expert_N[run]
            x_nH = x_RH[row_N[chosen]]
            if spec.weight_on == "input":
                x_nH = x_nH * weights_N[chosen].unsqueeze(1)
            pre = product_written_out(x_nH, weights.w13[expert])
            if weights.b13 is not None:
                pre += weights.b13[expert].float()
            y_nH = product_written_out(spec.activation.reproducible(pre), weights.w2[expert])
            if weights.b2 is not None:
                y_nH += weights.b2[expert].float()
            rows_NH[chosen] = y_nH
        unfinalized = UnfinalizedRows(
            rows_NH=rows_NH,
            weights_N=torch.ones_like(weights_N) if spec.weight_on == "input" else weights_N,
            index_N=pairs.index_N,
            num_rows=pairs.num_rows,
            top_k=pairs.top_k,
        )
        return unfinalized.finish() if finalize else unfinalized


def product_written_out(x_nD: Tensor, w_OD: Tensor) -> Tensor:
    """`x_nD @ w_OD.T` in float32, in an order of summation that only the inner width D decides.

    >>> product_written_out(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]]))
    tensor([[6., 6.]])
    """
    x_Dn, w_DO = x_nD.float().t().contiguous(), w_OD.float().t().contiguous()
    (inner, rows), outputs = x_Dn.shape, w_DO.shape[1]
    sums_nO = x_Dn.new_zeros(rows, outputs)
    output_step = max(1, min(outputs, BLOCK // DEPTH))
    row_step = max(1, BLOCK // (DEPTH * output_step))
    for o in range(0, outputs, output_step):
        for n in range(0, rows, row_step):
            sums = sums_nO[n : n + row_step, o : o + output_step]
            for d in range(0, inner, DEPTH):
                x_block = x_Dn[d : d + DEPTH, n : n + row_step, None]
                products = x_block * w_DO[d : d + DEPTH, None, o : o + output_step]
                sums += _fold(products)
    return sums_nO


def _fold(terms: Tensor) -> Tensor:
    """The sum over the first dimension, by halves. The terms are used up."""
    left = terms.shape[0]
    while left > 1:
        half = (left + 1) // 2
        terms[: left - half] += terms[half:left]
        left = half
    return terms[0]
