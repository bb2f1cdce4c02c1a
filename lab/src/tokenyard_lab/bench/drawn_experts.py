"""Random experts of any format for a benchmark, made quickly, and the results that they must give.

One expert is drawn and quantized. Expert e is that one with its outputs rolled by e steps: bytes are moved, not
quantized again, and no two experts are the same, so that a kernel that takes the wrong one is noticed. The reference
rolls the decoded numbers in the same way, and multiplies in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.errors import ContractError
from tokenyard.experts import ExpertsSpec, ExpertWeights
from tokenyard.formats import QuantizedMatrix, weight_format

# The most relative L2 error against float32. Three roundings to bf16 (between products, of pairs, of sums) are 0.3%.
TOLERANCE = 6e-3
_DEVIATION = 0.02  # of drawn weights, as those of trained layers


@dataclass(frozen=True, eq=False)
class DrawnExperts:
    """The weights of one rank's experts, in a format, and the one that they were made from, decoded."""

    weights: ExpertWeights
    bytes_per_expert: float
    _first: tuple[Tensor, Tensor]  # float32 w13 and w2 of expert 0
    _step: int
    spec: ExpertsSpec

    @classmethod
    def draw(cls, spec: ExpertsSpec, device: torch.device, seed: int = 0) -> DrawnExperts:
        """Random experts as a spec wants them."""
        draw = torch.Generator(device).manual_seed(seed)
        format = weight_format(spec.weights)
        # Where a block of outputs shares a scale, whole blocks are rolled.
        step = 128 if spec.weights == "fp8_block128" else 8
        held: dict[str, Tensor | QuantizedMatrix] = {}
        first = []
        for name, shape in spec.shapes().items():
            one = format.quantize(_DEVIATION * torch.randn(shape[1:], device=device, generator=draw))
            first.append(one.decode())
            many = _turned(one, spec.num_local_experts, step)
            held[name] = many if format.quantized else many.payloads["data"]
        weights = ExpertWeights(**held)  # type: ignore[arg-type]
        nbytes = weights.nbytes / max(1, spec.num_local_experts)
        return cls(weights, nbytes, (first[0], first[1]), step, spec)

    def expert(self, number: int) -> tuple[Tensor, Tensor]:
        """The float32 w13 and w2 of one expert."""
        w13, w2 = (matrix.roll(number * self._step, dims=0) for matrix in self._first)
        return w13, w2

    def add_results(self, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, y_RH: Tensor) -> None:
        """Add to `y_RH` the results of these experts for float32 rows: gate before up, SiLU, weights on the output."""
        for expert in ids_RK.unique().tolist():
            if expert < 0:
                continue
            takes_RK = ids_RK == expert
            (row_N,) = takes_RK.any(dim=1).nonzero(as_tuple=True)
            w13, w2 = self.expert(expert)
            gate_NI, up_NI = (x_RH[row_N] @ w13.t()).chunk(2, dim=1)
            weight_N = (weights_RK * takes_RK)[row_N].sum(dim=1, keepdim=True)
            inner_NI = functional.silu(gate_NI) * up_NI
            if self.spec.inner is not None:
                inner_NI = self.spec.inner.encode(inner_NI).decode(torch.float32)
            y_RH[row_N] += weight_N * (inner_NI @ w2.t())


def _turned(one: QuantizedMatrix, experts: int, step: int) -> QuantizedMatrix:
    outputs = one.shape[0]
    payloads = {}
    for name, payload in one.payloads.items():
        source = payload.view(torch.uint8) if payload.element_size() == 1 else payload
        many = source.new_empty((experts, *source.shape))
        # A payload has a line for each output, or for each block of them, or one number for all.
        lines = step * source.shape[0] // outputs if source.dim() else 0
        for expert in range(experts):
            many[expert] = source.roll(expert * lines, dims=0) if source.dim() else source
        payloads[name] = many.view(payload.dtype)
    return QuantizedMatrix(format=one.format, shape=(experts, *one.shape), payloads=payloads)


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, float32 products are not computed in TF32, whatever the caller has allowed."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def check_results(found: Tensor, expected: Tensor, what: str) -> float:
    """The relative L2 error; raise where it is larger than roundings to bf16 explain."""
    error = float((found.float() - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        raise ContractError(
            f"{what} differs from float32 by {error:.2e} (relative L2)",
            expected=f"at most {TOLERANCE:.0e}: a few roundings to bf16",
            fix="find the difference first (`tokenyard check --device cuda`): a wrong result has no speed",
        )
    return error


def check_replayed(replayed: Tensor, again: Tensor, what: str) -> None:
    """Raise unless a replayed graph gave the bits of a run outside of it: sums have a fixed order."""
    if not torch.equal(replayed, again):
        raise ContractError(
            f"{what} gave other bits in a replayed graph",
            expected="the bits of a run outside of a graph",
            fix="find the race first: a wrong result has no speed",
        )
