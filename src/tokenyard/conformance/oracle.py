"""The float64 oracle: what a layer computes, on one rank, without an exchange, in full precision.

It states in a few lines what a layer must compute:

    y_t = Σ_k  w_tk · Expert_{id_tk}(x_t)          (or Expert(w · x), where the weight is on the input)

Given `decode(encode(x))`, it shows the error of the matrix products alone; given `x`, the error from end to end.
Quantized weights are decoded first.

The bound around it has two terms. Results are rounded once per rank on the way back and once at the end:
each rounding moves an element by at most eps/2 of the size of what it rounds, which is at most
Σ_k |w · Expert(x)|, the *magnitude* (a little more, which the second term covers).
Sums in float32 move it by a few units of 2^-24 of the sum of the
*absolute* products, which can be far larger than the result where the products cancel. Where the way back is quantized,
the small elements of a result are rounded to a grid that its largest element sets.

Numbers that are quantized between the two products (`LayerSpec.inner`) are left exact here, and the bound has a third
term: how far quantizing may move each number, carried through the second product. (A number in the middle between two
codes gets one or the other by the last bit of the first product, which no oracle can know.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard.experts import Activation, ExpertWeights, activation
from tokenyard.experts.spec import EXACT
from tokenyard.experts.weights import expert_matrix
from tokenyard.formats import FORMATS, Format, Fp8Block128, Nvfp4, QuantizedMatrix, get
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes


@dataclass(frozen=True, kw_only=True)
class _Elements:
    """What `torch.finfo` says of a type of numbers, for one that torch does not have."""

    eps: float
    smallest_normal: float
    max: float


_SMALLEST_AMAX = 1e-10  # that a block of fp8_block128 has a scale for
E2M1 = _Elements(eps=0.5, smallest_normal=1.0, max=6.0)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far a result may be from the exact one, element by element."""

    magnitude_TH: Tensor
    absolute_TH: Tensor
    largest_T1: Tensor  # the largest element of each choice's result, summed over a token's choices
    most_rows: int  # rows that a token's result is the sum of: one per rank, so at most K
    # How far quantizing between the two products may move a result; zeros if nothing is quantized there.
    inner_TH: Tensor

    def tolerance(self, combine_wire: Format, dtype: torch.dtype) -> Tensor:
        """The bound for results that travelled back in `combine_wire`, and were rounded to `dtype` at the end."""
        # 1.01, because the moved part of a result is rounded, too.
        return self._rounded(combine_wire, dtype) + 1.01 * self.inner_TH

    def _rounded(self, combine_wire: Format, dtype: torch.dtype) -> Tensor:
        end = torch.finfo(dtype)
        if combine_wire.quantized and combine_wire.name not in FORMATS:
            # Of an unregistered format only the declared error of a row is known. If none is declared: no bound.
            declared: float | None = getattr(combine_wire, "relative_error", None)
            if declared is None:
                return torch.full_like(self.magnitude_TH, torch.inf)
            norm_T1: Tensor = torch.linalg.vector_norm(self.magnitude_TH, dim=1, keepdim=True)
            rounded_TH = end.eps * self.magnitude_TH + 2.0**-16 * self.absolute_TH
            return rounded_TH + declared * norm_T1 + end.smallest_normal * end.eps
        is_e2m1 = isinstance(combine_wire, Nvfp4)
        wire = E2M1 if is_e2m1 else torch.finfo(combine_wire.payloads(1)[0].dtype)
        tolerance_TH = (wire.eps + end.eps) / 2 * self.magnitude_TH + 2.0**-17 * self.absolute_TH
        if combine_wire.quantized:
            # Half a step of the smallest elements of a block, whose scale may be twice its largest element over `max`.
            tolerance_TH += wire.smallest_normal * wire.eps / wire.max * self.largest_T1
            if isinstance(combine_wire, Fp8Block128):  # no scale is smaller than this one, rounded up
                smallest = _SMALLEST_AMAX / wire.max
                tolerance_TH += self.most_rows * smallest * wire.smallest_normal * wire.eps
            if isinstance(combine_wire, Nvfp4) and combine_wire.global_scale is not None:
                tolerance_TH += self._beyond_static_scale(combine_wire.global_scale)
        else:
            # Below the smallest normal number, half a step is no longer a share of what is rounded.
            tolerance_TH += self.most_rows * wire.smallest_normal * wire.eps / 2
        return tolerance_TH + end.smallest_normal * end.eps

    def _beyond_static_scale(self, g: float) -> Tensor:
        """What nvfp4 with a fixed global scale loses: large numbers saturate, and small block scales become zero."""
        unit = torch.finfo(torch.float8_e4m3fn)
        lost = unit.smallest_normal * unit.eps / 2 * E2M1.max / g
        return (self.magnitude_TH - unit.max * E2M1.max / g).clamp(min=0) + self.most_rows * lost


def oracle(spec: LayerSpec, weights: ExpertWeights, x_TH: Tensor, routes: Routes) -> Tensor:
    """The exact result of a layer, float64. `weights` are those of all E experts."""
    return bounded_oracle(spec, weights, x_TH, routes)[0]


def bounded_oracle(
    spec: LayerSpec, weights: ExpertWeights, x_TH: Tensor, routes: Routes
) -> tuple[Tensor, Bound]:
    """The exact result of a layer, float64, and how far a computed one may be from it."""
    y_TH, magnitude_TH, absolute_TH, inner_TH = torch.zeros(4, *x_TH.shape, dtype=torch.float64).unbind()
    largest_T1 = torch.zeros(x_TH.shape[0], 1, dtype=torch.float64)
    inner = None if spec.inner == EXACT else get(spec.inner)
    act = activation(spec.activation)
    for expert in range(spec.num_experts):
        token_N, choice_N = (routes.topk_ids_TK == expert).nonzero(as_tuple=True)
        if token_N.numel() == 0:
            continue
        weight_N1 = routes.topk_weights_TK[token_N, choice_N].double().unsqueeze(1)
        x_NH = x_TH[token_N].double()
        if spec.weight_on == "input":
            x_NH = weight_N1 * x_NH
        hidden_NI = exact_activation(act, _linear(x_NH, weights.w13, weights.b13, expert))
        result_NH = _linear(hidden_NI, weights.w2, weights.b2, expert)
        if spec.weight_on == "output":
            result_NH = weight_N1 * result_NH
        y_TH.index_add_(0, token_N, result_NH)  # adds twice if a token names an expert twice
        magnitude_TH.index_add_(0, token_N, result_NH.abs())
        largest_T1.index_add_(0, token_N, result_NH.abs().amax(dim=1, keepdim=True))
        last_N1 = torch.ones_like(weight_N1) if spec.weight_on == "input" else weight_N1.abs()
        first_NI = _linear(x_NH, weights.w13, weights.b13, expert, absolute=True)
        sums_NI = _absolute_activation(act, first_NI)
        sums_NH = _linear(sums_NI, weights.w2, weights.b2, expert, absolute=True)
        absolute_TH.index_add_(0, token_N, last_N1 * sums_NH)
        if inner is not None:
            error_NI = quantizing_error(inner, hidden_NI)
            moved_NH = _linear(error_NI, weights.w2, None, expert, absolute=True)
            inner_TH.index_add_(0, token_N, last_N1 * moved_NH)
    return y_TH, Bound(
        magnitude_TH=magnitude_TH,
        absolute_TH=absolute_TH,
        largest_T1=largest_T1,
        most_rows=spec.top_k,
        inner_TH=inner_TH,
    )


def quantizing_error(format: Format, numbers_ND: Tensor) -> Tensor:
    """The most by which quantizing to e4m3, with a scale per block, moves each number.

    Half a step is 2^-4 of a number, or 2^-10 of its scale where that is more, and the scale is at most a 224th of the
    block's largest (a 448th, rounded up to a power of two).

    >>> quantizing_error(get("fp8_block128"), torch.tensor([[448.0, 1.0, 0.0]], dtype=torch.float64)).tolist()
    [[28.001953125, 0.064453125, 0.001953125]]
    """
    assert isinstance(format, Fp8Block128), format
    size = numbers_ND.shape[1]
    whole = functional.pad(numbers_ND.abs(), (0, -size % format.block)).unflatten(1, (-1, format.block))
    grid = whole.amax(dim=2, keepdim=True).clamp(min=_SMALLEST_AMAX) / 224 * 2.0**-10
    moved: Tensor = (2.0**-4 * whole + grid).flatten(1)[:, :size]
    return moved


def _linear(
    x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None, expert: int, *, absolute: bool = False
) -> Tensor:
    parts = [x, expert_matrix(weight, expert).double(), None if bias is None else bias[expert].double()]
    if absolute:
        parts = [None if part is None else part.abs() for part in parts]
    assert parts[0] is not None
    assert parts[1] is not None
    return functional.linear(parts[0], parts[1], parts[2])


def exact_activation(act: Activation, pre: Tensor) -> Tensor:
    """Each activation's formula once more, in float64, written independently of the one that experts use."""
    gate, up = act.split(pre)
    if act.name == "relu2":
        return torch.relu(gate) ** 2
    assert up is not None
    if act.name == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if act.name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if act.name == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    constants = dict(act.parameters)
    gate = gate.clamp(max=constants["limit"])
    up = up.clamp(-constants["limit"], constants["limit"])
    return gate / (1 + torch.exp(-constants["alpha"] * gate)) * (up + constants["up_shift"])


def _absolute_activation(act: Activation, pre: Tensor) -> Tensor:
    """An upper bound of |activation|, and of how it grows, from absolute pre-activations."""
    gate, up = act.split(pre)
    return gate**2 if up is None else gate * (up + 1)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖; 0 where both are zero, NaN where either holds one."""
    distance = torch.linalg.vector_norm(found.double() - exact.double())
    norm = torch.linalg.vector_norm(exact.double())
    return float(distance / norm) if float(norm) != 0.0 else float(distance)
