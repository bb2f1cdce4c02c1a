"""Batches for fused experts, in any formats, on any device; and their float64 result with a bound around it.

The bound is that of `tokenyard.conformance.experts_bound`: sums of float32, results rounded to the weights' dtype.
Where the tensor cores of a GPU multiply, the operands are numbers of 16 bits: one that is not (an mxint4 weight, a row
of fp8 times a float32 scale) is rounded to them, which moves each product by u of itself, half of bf16's epsilon.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.conformance.experts_bound import activation_error
from tokenyard.conformance.oracle import exact_activation, quantizing_error
from tokenyard.experts import Experts, ExpertsSpec, ExpertWeights, activation
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import WEIGHT_FORMATS, weight_format
from tokenyard.formats.base import EncodedRows
from tokenyard.rows import CombineBuffer, ExpertRows, LocalRoutes, PlacedRows, ReceivedRows, UnfinalizedRows

FLOAT32 = 2.0**-24
TINY = 2.0**-24  # half the distance of fp16's subnormal numbers
PLAIN_ROWS = {"fp16": "fp16", "fp32": "fp32"}
# Spellings of a row format that have another layout.
SPELLINGS = {
    "mxfp8": ["mxfp8", "mxfp8(alignment=256)"],
    "nvfp4": ["nvfp4", "nvfp4(global_scale=448.0)"],
}
ROUTINGS = ["any", "any", "one expert", "few experts", "duplicates", "sparse", "nobody"]


def declared_pairs() -> list[tuple[str, str]]:
    """Every weight format with every row format that it declares, plain rows first."""
    return [
        (weights, rows)
        for weights in WEIGHT_FORMATS
        for named in (PLAIN_ROWS.get(weights, "bf16"), *weight_format(weights).row_formats)
        for rows in SPELLINGS.get(named, [named])
    ]


@dataclass(frozen=True, kw_only=True)
class FusedCase:
    """A layer of experts and a batch; all numbers follow from the seed."""

    weights: str = "bf16"
    rows: str = "bf16"
    H: int = 80
    I: int = 48  # noqa: E741
    L: int = 3
    K: int = 2
    R: int = 9
    activation: str = "swiglu"
    bias: bool = False
    weight_on: str = "output"
    inner: str | None = None  # between the products; None: exact
    routing: str = "any"
    in_workspace: bool = False  # rows stand in some slots of a larger buffer, whose other bytes are garbage
    signed: bool = False  # half of the routing weights are negative, and every second row is zero
    device: str = "cpu"
    seed: int = 0

    @property
    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            hidden_size=self.H,
            intermediate_size=self.I,
            num_local_experts=self.L,
            top_k=self.K,
            activation=activation(self.activation),
            bias=self.bias,
            weights=self.weights,
            dtype=WEIGHT_DTYPES.get(self.weights, torch.bfloat16),
            weight_on=self.weight_on,
            inner=None if self.inner is None else formats.get(self.inner),
        )

    def _draw(self, salt: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * salt + self.seed)

    @cached_property
    def held(self) -> ExpertWeights:
        """The weights: Gaussian, in their format."""
        draw, spec = self._draw(1), self.spec

        def normal(name: str, shape: tuple[int, ...]) -> Tensor:
            scale = 1.0 if name.startswith("b") else shape[-1] ** -0.5
            return (torch.randn(shape, generator=draw, device=self.device) * scale).to(spec.dtype)

        plain = ExpertWeights(**{name: normal(name, shape) for name, shape in spec.shapes().items()})
        return plain.quantize(self.weights)

    @cached_property
    def x(self) -> EncodedRows:
        """The rows, one after the other."""
        x_RH = torch.randn(self.R, self.H, generator=self._draw(2), device=self.device)
        if self.signed:
            x_RH[::2] = 0.0
        return formats.get(self.rows).encode(x_RH.to(self.spec.dtype))

    @cached_property
    def routes(self) -> LocalRoutes:
        draw = self._draw(3)

        def ids(low: int, high: int, columns: int) -> Tensor:
            return torch.randint(low, high, (self.R, columns), generator=draw, device=self.device)

        drawn = {
            "any": ids(-1, self.L, self.K),
            "one expert": torch.full((self.R, self.K), self.L - 1, device=self.device),
            "few experts": ids(-1, self.L, self.K).clamp(max=1),
            "duplicates": ids(0, max(1, self.L), 1).expand(-1, self.K),
            "sparse": ids(-6 * max(1, self.L), self.L, self.K).clamp(min=-1),
            "nobody": torch.full((self.R, self.K), -1, device=self.device),
        }[self.routing]
        ids_RK = drawn.int().contiguous().clamp(max=self.L - 1)
        weights_RK = torch.rand(self.R, self.K, generator=draw, device=self.device) + 0.1
        if self.signed:
            weights_RK -= 0.6
        # Whatever stands beside an id of -1 means nothing.
        return LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK.masked_fill(ids_RK < 0, torch.nan))

    def received(self, *, results: bool = False) -> ReceivedRows:
        """The batch; with `results`, it names the place where they are read."""
        x, slots_R, num_slots = self.x, None, self.R
        if self.in_workspace:
            num_slots = 2 * self.R + 3
            slots_R = torch.randperm(num_slots, generator=self._draw(4), device=self.device)[: self.R]
            x = replace(x, payloads={k: _scattered(v, slots_R, num_slots) for k, v in x.payloads.items()})
        buffer = None
        if results:
            rows_SH = torch.full((num_slots, self.H), torch.nan, dtype=torch.bfloat16, device=self.device)
            buffer = CombineBuffer(rows_SH=rows_SH, slots_R=slots_R)
        return ReceivedRows(rows=x, routes=self.routes, counts_W=(self.R,), slots_R=slots_R, results=buffer)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The result in float64, and the bound on the error of each element."""
        return exact(self.spec, self.held, self.x, self.routes, rounds_operands=self.device != "cpu")


def _scattered(payload: Tensor, slots_R: Tensor, num_slots: int) -> Tensor:
    """The rows of a payload in slots of a buffer of wider lines; 0xFF everywhere else."""
    bytes_RB = payload.contiguous().view(torch.uint8)
    buffer = torch.full((num_slots, bytes_RB.shape[1] + 64), 0xFF, dtype=torch.uint8, device=payload.device)
    buffer[slots_R, : bytes_RB.shape[1]] = bytes_RB
    return buffer.view(payload.dtype)[:, : payload.shape[1]]


def exact(
    spec: ExpertsSpec, weights: ExpertWeights, x: EncodedRows, routes: LocalRoutes, *, rounds_operands: bool
) -> tuple[Tensor, Tensor]:
    """The result in float64 from decoded weights and rows, and the bound."""
    dtype = WEIGHT_DTYPES.get(spec.weights, torch.bfloat16)
    u = torch.finfo(dtype).eps / 2
    operand = 2 * u * rounds_operands
    x_RH = x.decode(torch.float32).double()
    y_RH, bound_RH = torch.zeros_like(x_RH), torch.zeros_like(x_RH)
    for expert in range(spec.num_local_experts):
        row_N, choice_N = (routes.ids_RK == expert).nonzero(as_tuple=True)
        if row_N.numel() == 0:
            continue
        one = weights.select([expert]).decode(torch.float64)
        (w13,), (w2,) = one.plain_matrices()
        b13 = w13.new_zeros(len(w13)) if one.b13 is None else one.b13[0].double()
        b2 = w2.new_zeros(len(w2)) if one.b2 is None else one.b2[0].double()
        weight = routes.weights_RK[row_N, choice_N].double().unsqueeze(1)
        on_input = spec.weight_on == "input"
        x_NH = x_RH[row_N] * weight if on_input else x_RH[row_N]
        pre = x_NH @ w13.T + b13
        size = x_NH.abs() @ w13.abs().T + b13.abs()
        error = ((spec.hidden_size + 8) * FLOAT32 + operand) * size + TINY
        act = exact_activation(spec.activation, pre)
        act_error = activation_error(spec.activation, pre, error) + (u + 8 * FLOAT32) * act.abs() + TINY
        if spec.inner is not None:
            act_error = 1.07 * act_error + quantizing_error(spec.inner, act)
        y = act @ w2.T + b2
        size = act.abs() @ w2.abs().T + b2.abs()
        y_error = act_error @ w2.abs().T + ((spec.intermediate_size + 8) * FLOAT32 + operand) * size
        y_error = y_error + u * y.abs() + TINY
        last = torch.ones_like(weight) if on_input else weight
        # A row may name an expert twice: both count.
        y_RH.index_add_(0, row_N, y * last)
        bound_RH.index_add_(0, row_N, (y_error + (spec.top_k + 1) * FLOAT32 * y.abs()) * last.abs())
    return y_RH, bound_RH * 1.01  # the second order


def drawn(weights: str, rows: str, seed: int) -> FusedCase:
    """Any shape and batch: most sizes are no multiples of a tile."""
    chance = random.Random(f"{seed} {weights} {rows}")
    return FusedCase(
        weights=weights,
        rows=rows,
        H=chance.choice((1, 24, 33, 80, 100, 136)),
        I=chance.choice((7, 20, 40, 48)),
        L=chance.choice((1, 2, 4)),
        K=chance.choice((1, 2, 3, 8)),
        R=chance.choice((1, 1, 5, 18)),
        activation=chance.choice(("swiglu", "swiglu_clamped", "gelu", "gelu_tanh", "relu2")),
        bias=chance.random() < 0.5,
        weight_on=chance.choice(("output", "input")),
        inner=chance.choice((None, *weight_format(weights).inner_formats)),
        routing=chance.choice(ROUTINGS),
        in_workspace=chance.random() < 0.5,
        seed=seed,
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def check_case(case: FusedCase, experts: Experts) -> Tensor:
    """Run a case every way there is: within the bound, the same bits finished by hand, and the same in place."""
    finished = experts(case.received())
    assert isinstance(finished, ExpertRows)
    y_RH, (exact_RH, bound_RH) = finished.rows_RH, case.exact()
    over = ((y_RH - exact_RH).abs() - bound_RH).amax() if y_RH.numel() else -1.0
    assert over <= 0, (case, float(over))
    unfinished = experts(case.received(), finalize=False)
    assert isinstance(unfinished, UnfinalizedRows)
    assert same_bits(unfinished.finish().rows_RH, y_RH), case
    received = case.received(results=True)
    placed = experts(received)
    assert isinstance(placed, PlacedRows)
    buffer = received.results
    assert buffer is not None
    assert placed.buffer is buffer
    taken_R = (case.routes.ids_RK >= 0).any(1)
    slots_R = torch.arange(case.R, device=y_RH.device) if buffer.slots_R is None else buffer.slots_R
    assert same_bits(buffer.rows_SH[slots_R][taken_R], y_RH[taken_R].bfloat16()), case
    written_S = torch.zeros(len(buffer.rows_SH), dtype=torch.bool, device=y_RH.device)
    written_S[slots_R[taken_R]] = True
    assert buffer.rows_SH[~written_S].isnan().all(), case  # nothing else is touched
    return y_RH
