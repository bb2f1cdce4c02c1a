"""A layer of experts in float64, written plainly, and how far float arithmetic may be from it.

`oracle` returns the exact result and, element by element, a bound on the error of any implementation that
keeps the contract. The bound is the usual first-order analysis, carried through the layer:

- A dot product of D terms, summed in float32 in any order, is off by at most (D + 2) · 2^-24 · Σ|x·w|.
- Where a product is computed in a 16-bit dtype, its output is rounded to it: u · |value|, with u half the
  machine epsilon; so are the activation's result, and the row, if the weight is applied to it.
- Through the activation an error grows by at most its slope: 1.13 bounds those of silu, gelu and the clamped
  SwiGLU; relu² has 2|x|.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tokenyard import formats
from tokenyard.experts import Experts, ExpertsSpec, ExpertWeights, activation, get
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, UnfinalizedRows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOAT32 = 2.0**-24
SLOPE = 1.13
TINY = 2.0**-24  # half the distance of fp16's subnormal numbers


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer of experts and the size of a batch. All numbers are drawn from the seed."""

    H: int = 32
    I: int = 24  # noqa: E741
    L: int = 4
    K: int = 3
    R: int = 20
    activation: str = "swiglu"
    bias: bool = False
    weight_on: str = "output"
    weights: str = "bf16"
    ids: str = "random"  # random, nobody, first (everything to one expert), duplicate, sparse
    seed: int = 0

    def __str__(self) -> str:
        changed = [f"{k}{v}" for k, v in vars(self).items() if v != getattr(Case, k)]
        return "-".join(changed) or "plain"

    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden_size=self.H,
            intermediate_size=self.I,
            num_local_experts=self.L,
            top_k=self.K,
            activation=activation(self.activation),
            bias=self.bias,
            weights=self.weights,
            dtype=DTYPES[self.weights],
            weight_on=self.weight_on,
        )

    def build(self) -> tuple[ExpertsSpec, ExpertWeights, Tensor, LocalRoutes]:
        """The spec, its weights, the rows (in the dtype of the weights) and the routes."""
        generator = torch.Generator().manual_seed(self.seed)
        spec, dtype = self.spec(), DTYPES[self.weights]

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        weights = ExpertWeights(
            **{
                name: normal(*shape, scale=1.0 if name.startswith("b") else shape[-1] ** -0.5)
                for name, shape in spec.shapes().items()
            }
        )
        ids = {
            "random": torch.randint(-1, self.L, (self.R, self.K), generator=generator),
            "nobody": torch.full((self.R, self.K), -1),
            "first": torch.zeros(self.R, self.K, dtype=torch.int64),
            "duplicate": torch.randint(0, self.L, (self.R, 1), generator=generator).expand(-1, self.K),
            "sparse": torch.randint(-7 * self.L, self.L, (self.R, self.K), generator=generator).clamp(min=-1),
        }[self.ids]
        scores = torch.randn(self.R, self.K, generator=generator)
        routes = LocalRoutes(ids_RK=ids.int().contiguous(), weights_RK=scores)
        return spec, weights, normal(self.R, self.H), routes


def receive(x_RH: Tensor, routes: LocalRoutes) -> ReceivedRows:
    """A batch as an exchange would deliver it, from one source rank."""
    rows = formats.for_dtype(x_RH.dtype).encode(x_RH)
    return ReceivedRows(rows=rows, routes=routes, counts_W=(x_RH.shape[0],))


def run(experts: Experts, x_RH: Tensor, routes: LocalRoutes) -> Tensor:
    """The finalized result."""
    result = experts(receive(x_RH, routes))
    assert isinstance(result, ExpertRows)
    return result.rows_RH


def run_unfinalized(experts: Experts, x_RH: Tensor, routes: LocalRoutes) -> UnfinalizedRows:
    result = experts(receive(x_RH, routes), finalize=False)
    assert isinstance(result, UnfinalizedRows)
    return result


def build_experts(name: str, case: Case) -> tuple[Experts, Tensor, LocalRoutes]:
    spec, weights, x_RH, routes = case.build()
    return get(name)(spec, weights), x_RH, routes


def formula(name: str, pre: Tensor) -> Tensor:
    """The activations once more, from their definitions, in the dtype of `pre`."""
    if name == "relu2":
        return pre.clamp(min=0) ** 2
    if name == "swiglu_clamped":
        gate, up = pre[:, ::2].clamp(max=7), pre[:, 1::2].clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = pre[:, : pre.shape[1] // 2], pre[:, pre.shape[1] // 2 :]
    if name == "swiglu":
        return gate * torch.sigmoid(gate) * up
    return functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def activation_error(name: str, pre: Tensor, error: Tensor) -> Tensor:
    """How far the activation's result may be off, if its input is off by `error`."""
    if name == "relu2":
        return 2 * pre.abs() * error + error**2
    if name == "swiglu_clamped":
        gate, up, gate_error, up_error = pre[:, ::2], pre[:, 1::2] + 1, error[:, ::2], error[:, 1::2]
    else:
        half = pre.shape[1] // 2
        gate, up, gate_error, up_error = pre[:, :half], pre[:, half:], error[:, :half], error[:, half:]
    # |a(g)| ≤ |g|, and its slope is at most SLOPE.
    return SLOPE * gate_error * (up.abs() + up_error) + gate.abs() * up_error


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    """The result in float64, and the bound on the error of each element."""
    spec, weights, x_RH, routes = case.build()
    u = torch.finfo(DTYPES[case.weights]).eps / 2
    x_RH = x_RH.double()
    y_RH, bound_RH = torch.zeros_like(x_RH), torch.zeros_like(x_RH)
    w13, w2 = weights.w13.double(), weights.w2.double()
    b13 = weights.b13.double() if weights.b13 is not None else torch.zeros(w13.shape[:2]).double()
    b2 = weights.b2.double() if weights.b2 is not None else torch.zeros(w2.shape[:2]).double()
    on_input = case.weight_on == "input"
    for k in range(case.K):
        for expert in range(case.L):
            taken = routes.ids_RK[:, k] == expert
            weight = routes.weights_RK[taken, k].double().unsqueeze(1)
            x = x_RH[taken] * weight if on_input else x_RH[taken]
            pre = x @ w13[expert].T + b13[expert]
            size = x.abs() @ w13[expert].abs().T + b13[expert].abs()
            error = (spec.hidden_size + 2) * FLOAT32 * size + u * pre.abs() + u * on_input * size + TINY
            act = formula(case.activation, pre)
            # The formula itself is evaluated in float32, with a handful of roundings.
            act_error = activation_error(case.activation, pre, error) + (u + 8 * FLOAT32) * act.abs() + TINY
            y = act @ w2[expert].T + b2[expert]
            size = act.abs() @ w2[expert].abs().T + b2[expert].abs()
            y_error = act_error @ w2[expert].abs().T + (spec.intermediate_size + 2) * FLOAT32 * size
            y_error = y_error + u * y.abs() + TINY
            last = torch.ones_like(weight) if on_input else weight
            y_RH[taken] += y * last
            # The weight, and K additions to a sum that is never larger than all terms together.
            bound_RH[taken] += (y_error + (case.K + 1) * FLOAT32 * y.abs()) * last.abs()
    return y_RH, bound_RH * 1.01  # the second order
