"""Batches for any class of experts, and the bound on the distance of its results from float64.

The bound is the usual first-order analysis, carried through the layer: a dot product of D terms, summed in float32 in
any order, is off by at most (D + 2) · 2^-24 · Σ|x·w|; where a product runs in a 16-bit dtype, its output, the
activation's result, and a row that was weighted are each rounded to it; and through the activation an error grows by at
most its slope.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenyard import formats
from tokenyard.conformance.cases import excess
from tokenyard.conformance.oracle import exact_activation, quantizing_error
from tokenyard.conformance.runner import Finding, expect
from tokenyard.experts import ACTIVATIONS, Activation, Experts, ExpertsSpec, ExpertWeights, activation
from tokenyard.experts.spec import EXACT
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import WEIGHT_FORMATS, Format
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits, UnfinalizedRows

# Random specs that the oracle check draws, and rows of a batch.
_DRAWS = 40
ROWS = 17
_FLOAT32 = 2.0**-24
_SLOPE = 1.13  # of silu, gelu and the clamped SwiGLU, at most
_TINY = 2.0**-24  # half the distance of float16's subnormal numbers
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ExpertsBatch:
    """A layer of experts on this rank, and rows for it. They are drawn on the CPU, and computed on `device`."""

    spec: ExpertsSpec
    weights: ExpertWeights
    x_RH: Tensor
    routes: LocalRoutes
    device: torch.device = _CPU
    wire: Format | None = None  # the format in which rows arrive; None: their own dtype

    def received(self, cls: type[Experts], routes: LocalRoutes | None = None) -> ReceivedRows:
        """The rows as an exchange would deliver them; with logits, for experts that route by themselves."""
        routes, x_RH = self.routes_there() if routes is None else routes, self.x_RH.to(self.device)
        shape = (x_RH.shape[0], self.spec.num_local_experts)
        logits = RoutingLogits(logits_RE=torch.zeros(shape, device=self.device))
        return ReceivedRows(
            rows=(self.wire or formats.for_dtype(x_RH.dtype)).encode(x_RH),
            routes=logits if cls.routes_itself else routes,
            counts_W=(x_RH.shape[0],),
        )

    def routes_there(self) -> LocalRoutes:
        """The routes on the device."""
        ids_RK, weights_RK = self.routes.ids_RK.to(self.device), self.routes.weights_RK.to(self.device)
        return LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK)

    def build(self, cls: type[Experts], **options: Any) -> Experts:
        """The experts. Those that route by themselves get a router that answers with this batch's routes."""
        if cls.routes_itself:
            there = self.routes_there()
            routes = SimpleNamespace(topk_ids_TK=there.ids_RK, topk_weights_TK=there.weights_RK)
            options |= {"router": lambda logits_RE: routes, "to_local": lambda ids_RK, counts_W: ids_RK}
        return cls(self.spec, self.weights, **options).to(self.device)

    def result(self, cls: type[Experts], **options: Any) -> Tensor:
        """The finished rows."""
        return finished_rows(self.build(cls, **options), self.received(cls))

    def first(self, count: int) -> ExpertsBatch:
        """The first rows of this batch."""
        return self.with_rows(torch.arange(count))

    def with_rows(self, index_N: Tensor) -> ExpertsBatch:
        """Some rows of this batch, in this order."""
        ids_NK, weights_NK = self.routes.ids_RK[index_N], self.routes.weights_RK[index_N]
        routes = LocalRoutes(ids_RK=ids_NK, weights_RK=weights_NK)
        return replace(self, x_RH=self.x_RH[index_N], routes=routes)


def finished_rows(experts: Experts, received: ReceivedRows) -> Tensor:
    result = experts(received, finalize=experts.finalizes)
    if isinstance(result, UnfinalizedRows):
        result = result.finish()
    rows_RH, device = result.rows_RH, received.rows.device
    assert isinstance(rows_RH, Tensor)
    expect(rows_RH.device.type == device.type, f"the result is on {rows_RH.device}", f"{device}, as the rows")
    return rows_RH.cpu()


def draw_specs(cls: type[Experts], seed: int = 0, count: int = _DRAWS) -> Iterator[ExpertsSpec]:
    """Random specs that the class supports."""
    chance = random.Random(seed)
    left = count
    for _ in range(100 * count):
        weights = chance.choice([name for name in cls.weight_formats if name in WEIGHT_FORMATS] or ["bf16"])
        spec = ExpertsSpec(
            hidden_size=chance.choice((1, 8, 33, 64, 100)),
            intermediate_size=chance.choice((1, 7, 16, 40)),
            num_local_experts=chance.choice((1, 2, 3, 5, 8)),
            top_k=chance.choice((1, 2, 3, 8)),
            activation=activation(chance.choice(sorted(ACTIVATIONS))),
            bias=chance.random() < 0.5,
            weights=weights,
            dtype=row_dtype(weights),
            weight_on=chance.choice(("output", "input")),
            inner=_inner(chance, weights),
        )
        if cls.supports(spec) is None:
            left -= 1
            yield spec
        if left == 0:
            return
    if left == count:
        raise Finding(
            f"`supports` refused {100 * count} specs, the last with: {cls.supports(spec)}", "some spec"
        )


def _inner(chance: random.Random, weights: str) -> Format | None:
    """A random `inner` for weights in this format: None (exact), or a format."""
    held = WEIGHT_FORMATS[weights].inner_formats if weights in WEIGHT_FORMATS else ()
    return formats.get(chance.choice(held)) if held and chance.random() < 0.5 else None


def row_dtype(weights: str) -> torch.dtype:
    """The dtype of rows for weights in this format: bf16 for quantized ones, whose products have the bound of bf16."""
    return WEIGHT_DTYPES.get(weights, torch.bfloat16)


def supported_batch(
    cls: type[Experts], device: torch.device, seed: int = 0, rows: int = ROWS, *, least_k: int = 1
) -> ExpertsBatch:
    """A batch for a spec that the class supports: with top-k of at least `least_k`, if one is drawn."""
    for spec in draw_specs(cls, seed):
        if spec.top_k >= least_k and spec.num_local_experts > 1 and spec.hidden_size > 1:
            return draw_batch(spec, rows, seed, device)
    return draw_batch(next(draw_specs(cls, seed)), rows, seed, device)


def draw_batch(
    spec: ExpertsSpec, rows: int = ROWS, seed: int = 0, device: torch.device = _CPU
) -> ExpertsBatch:
    draw = torch.Generator().manual_seed(seed)
    dtype = row_dtype(spec.weights)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(dtype)

    weights = ExpertWeights(
        **{  # type: ignore[arg-type]
            name: normal(*shape, scale=1.0 if name.startswith("b") else shape[-1] ** -0.5)
            for name, shape in spec.shapes().items()
        }
    )
    ids_RK = torch.randint(-1, spec.num_local_experts, (rows, spec.top_k), generator=draw).int()
    weights_RK = torch.rand(rows, spec.top_k, generator=draw) + 0.1
    return ExpertsBatch(
        spec=spec,
        weights=weights.quantize(spec.weights),
        x_RH=normal(rows, spec.hidden_size),
        routes=LocalRoutes(ids_RK=ids_RK, weights_RK=weights_RK),
        device=device,
    )


def draw_batches(
    cls: type[Experts], device: torch.device, *, seed: int = 0, count: int = _DRAWS
) -> Iterator[ExpertsBatch]:
    """A batch for each of some random specs that the class supports."""
    for number, spec in enumerate(draw_specs(cls, seed, count)):
        yield draw_batch(spec, seed=number, device=device)


def expect_bound(
    rows_RH: Tensor, batch: ExpertsBatch, where: str = "", expected: str = "every element within it"
) -> None:
    """Raise a finding unless the result of a batch is within the bound around the float64 one."""
    over = excess(rows_RH, *exact(batch))
    expect(over <= 0, f"{over:.3g} beyond the bound for {in_words(batch.spec)}{where}", expected)


def activation_error(act: Activation, pre: Tensor, error: Tensor) -> Tensor:
    """How far the activation's result may be off, if its input is off by `error`."""
    (gate, up), (gate_error, up_error) = act.split(pre), act.split(error)
    if up is None or up_error is None:
        return 2 * gate.abs() * gate_error + gate_error**2
    shift = dict(act.parameters).get("up_shift", 0.0)
    return _SLOPE * gate_error * ((up + shift).abs() + up_error) + gate.abs() * up_error


def exact(batch: ExpertsBatch) -> tuple[Tensor, Tensor]:
    """The result in float64, and the bound on the error of each element."""
    spec, weights, routes = batch.spec, batch.weights.decode(torch.float64), batch.routes
    u = torch.finfo(row_dtype(spec.weights)).eps / 2
    x_RH = batch.x_RH.double()
    y_RH, bound_RH = torch.zeros_like(x_RH), torch.zeros_like(x_RH)
    w13, w2 = weights.plain_matrices()
    b13 = torch.zeros(w13.shape[:2]).double() if weights.b13 is None else weights.b13.double()
    b2 = torch.zeros(w2.shape[:2]).double() if weights.b2 is None else weights.b2.double()
    on_input = spec.weight_on == "input"
    for choice in range(spec.top_k):
        for expert in range(spec.num_local_experts):
            taken = routes.ids_RK[:, choice] == expert
            weight = routes.weights_RK[taken, choice].double().unsqueeze(1)
            x = x_RH[taken] * weight if on_input else x_RH[taken]
            product = x @ w13[expert].T
            pre = product + b13[expert]
            size = x.abs() @ w13[expert].abs().T + b13[expert].abs()
            # The product may be rounded before the bias is added, and both together again.
            rounded = u * (product.abs() + pre.abs() + on_input * size)
            error = (spec.hidden_size + 2) * _FLOAT32 * size + rounded + _TINY
            act = exact_activation(spec.activation, pre)
            act_error = activation_error(spec.activation, pre, error)
            # The formula itself is evaluated in float32, with a handful of roundings.
            act_error = act_error + (u + 8 * _FLOAT32) * act.abs() + _TINY
            if spec.inner is not None:
                # The number that is quantized has an error already; quantizing makes that at most this much larger.
                act_error = 1.07 * act_error + quantizing_error(spec.inner, act)
            product = act @ w2[expert].T
            y = product + b2[expert]
            size = act.abs() @ w2[expert].abs().T + b2[expert].abs()
            y_error = act_error @ w2[expert].abs().T + (spec.intermediate_size + 2) * _FLOAT32 * size
            y_error = y_error + u * (product.abs() + y.abs()) + _TINY
            last = torch.ones_like(weight) if on_input else weight
            y_RH[taken] += y * last
            bound_RH[taken] += (y_error + (spec.top_k + 1) * _FLOAT32 * y.abs()) * last.abs()
    return y_RH, bound_RH * 1.01  # for errors of second order


def expect_weight_format(name: str) -> None:
    """Raise a finding unless a name in `weight_formats` is that of a format of weights."""
    known = ", ".join(WEIGHT_FORMATS)
    expect(name in WEIGHT_FORMATS, f"`weight_formats` has {name!r}", f"formats of weights: {known}")


def in_words(spec: ExpertsSpec) -> str:
    """How a finding names a spec."""
    return (
        f"H {spec.hidden_size}, I {spec.intermediate_size}, L {spec.num_local_experts}, K {spec.top_k}, "
        f"{spec.activation.name}, {spec.weights} weights, bias {spec.bias}, weight on {spec.weight_on}, "
        f"{spec.inner or EXACT} between the products"
    )
