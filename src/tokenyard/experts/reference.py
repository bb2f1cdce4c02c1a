"""The reference experts: slow experts whose results for a row do not depend on the batch, the rank or the device.

Other experts are compared with them, and exchanges are tested with them: since a row's result does not depend on
the other rows of its batch, a layer on four ranks must equal a layer on one rank *bitwise*, and tests of moving rows
need no tolerance.

A BLAS product cannot be used, because it chooses its tiles, and with them its order of summation, by the number of
rows and threads. The product is therefore made of elementwise operations, which IEEE 754 defines to the bit:

    products[n, o, d] = x[n, d] · w[o, d]               (exact for bf16 and fp16 inputs, in float32)
    fold the inner dimension in halves: products[.., :m-h] += products[.., h:m], h = ⌈m/2⌉, until one is left

Which additions make up an element, and in which order, follows from the inner width alone. Blocks over rows
and outputs only bound the temporaries, and the inner dimension is the last one where it is wide and the first where
it is narrow, so that every operation runs over long contiguous memory: neither changes a bit. Everything stays
in float32: pre-activation, bias, activation (see `Activation.reproducible`), second product, bias, routing
weight, and the sum over a row's experts. Quantized weights are decoded expert by expert, to float32, which holds
every format's numbers exactly.

The same argument holds on a GPU, and between a CPU and a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.duties import record_weights
from tokenyard.experts.gradients import FirstProduct, Products
from tokenyard.experts.trained import TrainedExperts
from tokenyard.experts.weights import ExpertWeights, expert_matrix
from tokenyard.formats import WEIGHT_FORMATS, Fp8Block128
from tokenyard.rows import ExpertRows, PlacedRows, ReceivedRows, UnfinalizedRows

# float32 elements of one block of products (1 MiB, about a core's L2 cache). No influence on the result.
# [2, 7168] · [8, 7168] on one busy core: 0.30 G multiply-adds/s at 256 Ki, 0.06 at 64 Ki.
BLOCK = 256 * 1024
# From this inner width on, the inner dimension is the last one. No influence on the result either.
# [2, 7168] · [8, 7168]: 0.30 G/s last, 0.11 first; [16, 32] · [1024, 32]: 0.42 last, 0.89 first.
WIDE = 64


class ReferenceExperts(TrainedExperts):
    """Plain experts whose result for a row is bitwise independent of the rest of the batch."""

    name = "reference"
    counts_duties = True
    any_strides = True
    places_results = True
    weight_formats = tuple(WEIGHT_FORMATS)
    inner_formats = (Fp8Block128.name,)
    batch_invariant = ("cpu", "cuda")
    trains = ("cpu",)

    @property
    def products(self) -> Products:
        """How the products of a backward are computed."""
        return Products(
            by_rows=product_written_out,
            over_rows=lambda a_nO, b_nI: product_written_out(a_nO.t(), b_nI.t()),
            inner=lambda a_nD, b_nD: _fold(a_nD * b_nD, -1),
            column_sums=lambda a_nD: _fold(a_nD.clone(), 0),
            reproducible=True,
        )

    def compute_pairs(
        self,
        received: ReceivedRows,
        weights: ExpertWeights,
        *,
        finalize: bool,
        first: FirstProduct | None = None,
    ) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Compute expert by expert, in float32."""
        spec = self.spec
        pairs = self.sorted_pairs(received)
        x_RH = self.incoming(received, torch.float32)
        if first is not None:
            first.pre_NI = x_RH.new_empty(len(pairs.index_N), weights.w13.shape[1], dtype=first.dtype)
        weights_N, row_N = pairs.weights_N, pairs.row_N
        rows_NH = x_RH.new_empty(len(row_N), spec.hidden_size)
        for expert, run in pairs.runs():
            chosen = pairs.by_expert_N[run]
            x_nH = x_RH[row_N[chosen]]
            if spec.weight_on == "input":
                record_weights(weights_N[chosen])
                x_nH = x_nH * weights_N[chosen].unsqueeze(1)
            pre = product_written_out(x_nH, expert_matrix(weights.w13, expert))
            if weights.b13 is not None:
                pre += weights.b13[expert].float()
            if first is not None and first.pre_NI is not None:
                first.pre_NI[run] = pre
                if first.only:
                    continue
            hidden_nI = self.between(spec.activation.reproducible(pre))
            y_nH = product_written_out(hidden_nI, expert_matrix(weights.w2, expert))
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
        return received.result(unfinalized.finish().rows_RH) if finalize else unfinalized


def product_written_out(x_nD: Tensor, w_OD: Tensor) -> Tensor:
    """`x_nD @ w_OD.T` in float32, in an order of summation that depends on the inner width D only.

    >>> product_written_out(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]]))
    tensor([[6., 6.]])
    """
    x_nD, w_OD = x_nD.float(), w_OD.float()
    (rows, inner), outputs = x_nD.shape, w_OD.shape[0]
    last = inner >= WIDE
    if last:
        x, w = x_nD.contiguous().unsqueeze(1), w_OD.contiguous().unsqueeze(0)  # [n, 1, D] · [1, O, D]
    else:
        x, w = x_nD.t().contiguous().unsqueeze(2), w_OD.t().contiguous().unsqueeze(1)  # [D, n, 1] · [D, 1, O]
    sums_nO = x_nD.new_empty(rows, outputs)
    row_dim, output_dim = (0, 1) if last else (1, 2)
    output_step = max(1, min(outputs, BLOCK // inner))
    row_step = max(1, BLOCK // (inner * output_step))
    for n in range(0, rows, row_step):
        some_rows = x.narrow(row_dim, n, min(row_step, rows - n))
        for o in range(0, outputs, output_step):
            products = some_rows * w.narrow(output_dim, o, min(output_step, outputs - o))
            sums_nO[n : n + row_step, o : o + output_step] = _fold(products, -1 if last else 0)
    return sums_nO


def _fold(terms: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, by adding its second half to the first until one is left. Overwrites `terms`."""
    left = terms.shape[dim]
    while left > 1:
        half = (left + 1) // 2
        terms.narrow(dim, 0, left - half).add_(terms.narrow(dim, half, left - half))
        left = half
    return terms.select(dim, 0)
