"""The peers of our experts, measured in the same run: torch's grouped products, or Transformers' experts.

On a GPU a peer gets rows that are sorted by expert before the clock starts, and ends with a result for each pair: no
sorting, no weights, no sums. Between its products torch computes SiLU and an elementwise product; for fp8 it
also quantizes the rows in between. On a CPU a peer computes the same layer as ours, and results are compared:
Transformers' experts on the same bf16 weights, or for quantized ones all matrices decoded to bf16 first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokenyard.errors import InputError
from tokenyard.experts import ExpertsSpec, ExpertWeights, GroupedExperts
from tokenyard.formats import QuantizedMatrix
from tokenyard.machine_rates import Work
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows
from tokenyard_lab.bench.drawn_experts import DrawnExperts

_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Peer:
    """A peer: its name, and the work that is timed."""

    name: str
    work: Work
    difference: float | None = None  # of its results from ours, if both compute the same layer


# -- On a GPU ----------------------------------------------------------------------------------------------


def grouped_peer(drawn: DrawnExperts, batches: Sequence[ReceivedRows]) -> Peer | None:
    """The products of all batches by torch's kernels; None where there is no such kernel for the weights."""
    weights = drawn.weights
    if isinstance(weights.w13, Tensor):
        name, one = "F.grouped_mm", _plain
    elif weights.w13.format.name == "fp8_block128":
        name, one = "torch._scaled_grouped_mm, row-wise", _row_wise_fp8
    else:
        return None
    works = [one(weights, batch) for batch in batches]

    def all_of_them() -> None:
        for work in works:
            work()

    return Peer(name, all_of_them)


def _sorted(batch: ReceivedRows, experts: int) -> tuple[Tensor, Tensor]:
    """The row of each pair, sorted by expert, and the end of each expert's pairs (int32)."""
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
    """Torch's fp8 products, with a scale for each row and each output, not for blocks: the scales are made up."""
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


# -- On a CPU ----------------------------------------------------------------------------------------------


def host_peer(drawn: DrawnExperts, batches: Sequence[ReceivedRows]) -> Peer:
    """Experts that compute the same layer as ours, on the first of the batches."""
    spec, weights, batch = drawn.spec, drawn.weights, batches[0]
    work: Callable[[], Tensor]
    if isinstance(weights.w13, Tensor):
        name, work = "Transformers", _transformers_experts(spec, weights, batch)
    else:
        plain_spec = dataclasses.replace(spec, weights="bf16")

        def decode_and_multiply() -> Tensor:
            return _finished(_GroupedMm(plain_spec, weights.decode(torch.bfloat16), adopt=True), batch)

        name, work = "decoded first", decode_and_multiply
    ours = _finished(GroupedExperts(spec, weights, adopt=True), batch)
    return Peer(name, work, compare(ours, work(), name))


def _finished(experts: GroupedExperts, batch: ReceivedRows) -> Tensor:
    result = experts(batch)
    assert isinstance(result, ExpertRows)
    return result.rows_RH.to(torch.bfloat16)


class _GroupedMm(GroupedExperts):
    """Grouped experts that always call `F.grouped_mm`."""

    name = "grouped_mm"

    def _path(self, weights: ExpertWeights, rows: int) -> Any:
        return "grouped_mm"


def compare(ours: Tensor, theirs: Tensor, peer: str) -> float:
    """The largest deviation over the largest result; raise where the two do not compute the same layer.

    Both round to bf16 (2^-9 relative) at the end, and the peer also after each product: four roundings, and
    sums of random sign in between, stay far below 5% of the largest result. A wrong layout does not.
    """
    difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not difference < 0.05:
        raise InputError(
            f"our result differs from that of the peer ({peer}) by {difference:.1%}",
            expected="the same layer from both, to a few bf16 roundings",
            fix="compare only what agrees: check the layout of the weights",
        )
    return difference


def check_transformers(version: str = "5.17", peer: str = "experts are") -> None:
    """Raise if Transformers is not installed. Called before anything is measured."""
    try:
        from transformers.models.qwen3_moe import configuration_qwen3_moe  # noqa: F401
    except ImportError as error:
        raise InputError(
            "transformers is not installed",
            expected=f"transformers {version} or newer, whose {peer} the peer of this benchmark",
            fix="pip install 'tokenyard[transformers]'",
        ) from error


def _transformers_experts(
    spec: ExpertsSpec, weights: ExpertWeights, batch: ReceivedRows
) -> Callable[[], Tensor]:
    """Transformers' experts on the same tensors, with their `grouped_mm` implementation."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.intermediate_size,
        num_experts=spec.num_local_experts,
        num_experts_per_tok=spec.top_k,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        peer: nn.Module = Qwen3MoeExperts(config)  # type: ignore[no-untyped-call]
    w13, w2 = weights.plain_matrices()
    peer.gate_up_proj = nn.Parameter(w13, requires_grad=False)
    peer.down_proj = nn.Parameter(w2, requires_grad=False)
    routes, x_RH = batch.routes, batch.rows.decode(torch.bfloat16)
    assert isinstance(routes, LocalRoutes)
    ids_RK, weights_RK = routes.ids_RK.long(), routes.weights_RK

    @torch.no_grad()
    def work() -> Tensor:
        result: Tensor = peer(x_RH, ids_RK, weights_RK)
        return result.to(torch.bfloat16)

    return work
