"""The gradients of experts: of rows, of routing weights, of matrices and biases.

For a pair of a received row x and an expert, with the routing weight w on the output, the forward is

    pre = W13 · x + b13      h = act(pre)      y = w · (W2 · h + b2)

and with the gradient dy of its result

    g    = W2ᵀ · dy                     dW2  = Σ (w · dy) ⊗ h      db2  = Σ w · dy
    dw   = ⟨g, h⟩ + ⟨dy, b2⟩            dW13 = Σ dpre ⊗ x          db13 = Σ dpre
    dpre = act'(pre) · (w · g)          dx   = W13ᵀ · dpre

`y` is not needed: ⟨dy, W2 · h⟩ is ⟨W2ᵀ · dy, h⟩, and g is computed anyway. `h` is computed again from `pre`. With the
routing weight on the input, x is w · x in the forward, so that dx = w · (W13ᵀ · dpre) and dw = ⟨W13ᵀ · dpre, x⟩.

All of it is float32, expert by expert, over the pairs that exist: an id of -1 is no pair, whatever its weight, and an
expert without pairs adds nothing to its sums, which began as zeros. All rows of an expert are on one rank, in the order
of (source rank, token), or of their token numbers. So each product has the same operands on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.duties import Duty, record, record_weights
from tokenyard.experts.pairs import SortedPairs
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import ExpertWeights

# Bytes. Torch aligns new tensors to it. The bits of a product may depend on how its operands are aligned.
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGradients:
    """The gradients of the pairs of received rows, in the order of rows and their choices, in float32."""

    rows_NH: Tensor  # of the row that each pair has
    weights_N: Tensor  # of the routing weight of each pair


@dataclass(eq=False)
class FirstProduct:
    """The first product of a batch's pairs, with its bias, which a forward hands to its backward.

    It is rounded to the dtype in which experts multiply, so that it takes no more memory than on a GPU.
    """

    dtype: torch.dtype  # of what is kept
    only: bool = False  # whether the second product is left out: a backward computes the first one again
    pre_NI: Tensor | None = None  # in the order of `SortedPairs.by_expert_N`

    def take(self, pre_NI: Tensor) -> None:
        """Keep it, in memory of its own."""
        self.pre_NI = pre_NI.to(self.dtype, copy=True)


@dataclass(frozen=True, kw_only=True)
class Products:
    """How an experts class computes products in float32."""

    by_rows: Callable[[Tensor, Tensor], Tensor]  # x_nD, w_OD → x · wᵀ
    over_rows: Callable[[Tensor, Tensor], Tensor]  # a_nO, b_nI → Σ a ⊗ b
    inner: Callable[[Tensor, Tensor], Tensor]  # a_nD, b_nD → ⟨a, b⟩ for each row
    column_sums: Callable[[Tensor], Tensor]  # a_nD → Σ a
    reproducible: bool  # whether activations are computed by + - × ÷ alone


def differentiate_pairs(
    spec: ExpertsSpec,
    products: Products,
    pairs: SortedPairs,
    x_RH: Tensor,
    pre_NI: Tensor,
    dy_RH: Tensor,
    weights: ExpertWeights,
    sums: Mapping[str, Tensor],
) -> RowGradients:
    """Gradients of all pairs; those of the weights are added to `sums`, float32 tensors by the names of the weights."""
    w13, w2 = weights.plain_matrices()
    activation = spec.activation
    differentiate = (
        activation.differentiate_reproducibly if products.reproducible else activation.differentiate
    )
    on_input = spec.weight_on == "input"
    num_pairs = len(pairs.index_N)
    dx_NH = x_RH.new_empty(num_pairs, spec.hidden_size, dtype=torch.float32)
    dw_N = x_RH.new_empty(num_pairs, dtype=torch.float32)
    record(Duty.WEIGHT_GRADIENT, num_pairs)
    for expert, run in pairs.runs():
        chosen = pairs.by_expert_N[run]
        rows = pairs.row_N[chosen]
        x_nH, dy_nH = x_RH[rows].float(), dy_RH[rows].float()
        w_n1 = pairs.weights_N[chosen].unsqueeze(1)
        record_weights(w_n1)
        g_nI = products.by_rows(dy_nH, _aligned(w2[expert]).t())
        h_nI, dpre_nI = differentiate(pre_NI[run], g_nI if on_input else g_nI * w_n1)
        dx_nH = products.by_rows(dpre_nI, _aligned(w13[expert]).t())
        if on_input:
            dw_N[chosen] = products.inner(dx_nH, x_nH)
            dx_nH, x_nH = dx_nH * w_n1, x_nH * w_n1
        else:
            dw_n = products.inner(g_nI, h_nI)
            if weights.b2 is not None:
                dw_n = dw_n + products.inner(dy_nH, weights.b2[expert].float().expand_as(dy_nH))
            dw_N[chosen] = dw_n
            dy_nH = dy_nH * w_n1
        dx_NH[chosen] = dx_nH
        for name, a_nO, b_nI in (("w13", dpre_nI, x_nH), ("w2", dy_nH, h_nI)):
            if name in sums:
                sums[name][expert] += products.over_rows(a_nO, b_nI)
        for name, a_nO in (("b13", dpre_nI), ("b2", dy_nH)):
            if name in sums:
                sums[name][expert] += products.column_sums(a_nO)
    return RowGradients(rows_NH=dx_NH, weights_N=dw_N)


def _aligned(matrix: Tensor) -> Tensor:
    """A matrix in memory that is aligned as new tensors are."""
    return (
        matrix
        if matrix.data_ptr() % _ALIGNMENT == 0 and matrix.is_contiguous()
        else matrix.contiguous().clone()
    )
