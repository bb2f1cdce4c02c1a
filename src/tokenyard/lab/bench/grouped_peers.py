"""torch's grouped products as experts: what our kernels are measured beside, in the same run.

A peer gets rows that are sorted by expert before the clock starts, and ends with a result for each pair: no sorting,
no weights, no sums. Between its products stand SiLU and a product of numbers, as torch computes them; for fp8 also the
quantization of the rows in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.experts import ExpertWeights
from tokenyard.formats import QuantizedMatrix
from tokenyard.lab.bench.graph_clock import Work
from tokenyard.rows import LocalRoutes, ReceivedRows

_E4M3_MAX = 448.0

NAMES = {"bf16": "F.grouped_mm", "fp8_block128": "torch._scaled_grouped_mm, row-wise"}


def peer_of(weights: ExpertWeights, batches: Sequence[ReceivedRows]) -> Work | None:
    """The products of all batches by torch's kernels; None where there is no such kernel for the weights."""
    if isinstance(weights.w13, Tensor):
        run: Callable[[ReceivedRows], Work] = lambda batch: _plain(weights, batch)  # noqa: E731
    elif weights.w13.format.name == "fp8_block128":
        run = lambda batch: _row_wise_fp8(weights, batch)  # noqa: E731
    else:
        return None
    works = [run(batch) for batch in batches]

    def all_of_them() -> None:
        for work in works:
            work()

    return all_of_them


def _sorted(batch: ReceivedRows, experts: int) -> tuple[Tensor, Tensor]:
    """The row of each pair, by expert, and where each expert's pairs end (int32)."""
    assert isinstance(batch.routes, LocalRoutes)
    ids_RK = batch.routes.ids_RK
    row_N, choice_N = (ids_RK >= 0).nonzero(as_tuple=True)
    expert_N, order_N = ids_RK[row_N, choice_N].sort(stable=True)
    ends = expert_N.long().bincount(minlength=experts).cumsum(0).int()
    return row_N[order_N], ends


def _gated(both_NI: Tensor) -> Tensor:
    gate_NI, up_NI = both_NI.chunk(2, dim=1)
    return functional.silu(gate_NI) * up_NI


def _plain(weights: ExpertWeights, batch: ReceivedRows) -> Work:
    w13, w2 = weights.plain_matrices()
    row_N, ends = _sorted(batch, w13.shape[0])
    x_NH = batch.rows.decode(w13.dtype)[row_N].contiguous()

    def work() -> None:
        inner_NI = _gated(functional.grouped_mm(x_NH, w13.mT, offs=ends))
        functional.grouped_mm(inner_NI, w2.mT, offs=ends)

    return work


def _row_wise_fp8(weights: ExpertWeights, batch: ReceivedRows) -> Work:
    """It knows a scale for each row and each output, no blocks: the same bytes of weights, with made-up scales."""
    matrices = []
    for matrix in (weights.w13, weights.w2):
        assert isinstance(matrix, QuantizedMatrix)
        data = matrix.payloads["data"]
        matrices.append((data, torch.full(data.shape[:2], 1e-4, device=data.device)))
    (w13, scales13), (w2, scales2) = matrices
    row_N, ends = _sorted(batch, w13.shape[0])
    x_NH, scales_N = _by_row(batch.rows.decode(torch.bfloat16)[row_N])
    multiply: Any = torch._scaled_grouped_mm

    def product(x: Tensor, scales: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        found: Tensor = multiply(
            x, w.mT, scales, w_scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return found

    def work() -> None:
        inner_NI, inner_scales_N = _by_row(_gated(product(x_NH, scales_N, w13, scales13)))
        product(inner_NI, inner_scales_N, w2, scales2)

    return work


def _by_row(x_NH: Tensor) -> tuple[Tensor, Tensor]:
    scales_N = x_NH.abs().amax(dim=1).float().clamp_(min=1e-12) / _E4M3_MAX
    return (x_NH / scales_N.unsqueeze(1)).to(torch.float8_e4m3fn), scales_N
