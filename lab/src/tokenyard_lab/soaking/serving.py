"""Layers that a soak calls, and the checks of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenyard.conformance.batch_data import DATA
from tokenyard.conformance.cases import Case, excess, oracle_tolerance, same_numbers
from tokenyard.conformance.twin import twin
from tokenyard.experts import ExpertWeights
from tokenyard.experts.weights import WEIGHT_DTYPES
from tokenyard.formats import QuantizedMatrix
from tokenyard.layer import MoELayer
from tokenyard.layer.call import run_experts
from tokenyard.planning.planner import Plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes

# Experts whose result for a row does not depend on the rest of the batch: it is compared bit by bit.
BITWISE = "reference"
# The relative error of fast experts: they round rows, first products and activations to bf16.
_ROUNDED_TO_BF16 = 3 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank brings to a round trip."""

    case: Case  # of which this is the batch
    rank: int
    x_TH: Tensor
    routes: Routes

    def payloads_on(self, device: torch.device) -> dict[str, Tensor] | None:
        """The further payloads of the rows, on a device; None if there are none."""
        payloads = self.case.further_payloads(self.rank)
        return payloads and {name: tensor.to(device) for name, tensor in payloads.items()}


class Served:
    """One layer of a plan on this rank, the weights of all its experts, and the case that it is from."""

    def __init__(self, plan: Plan, case: Case, name: str) -> None:
        self.plan, self.case, self.name = plan, case, name
        self.weights: ExpertWeights = case.all_weights()
        local = self.weights.select(plan.local_experts(name))
        self.layer = MoELayer(plan, name, local).to(plan.group.device)

    def batch(self, tokens: Sequence[int], seed: int) -> Batch:
        """This rank's batch, of a round trip in which rank r brings `tokens[r]`."""
        rank = self.plan.group.rank
        drawn = replace(self.case, tokens=tuple(tokens), seed=seed)
        x_TH, routes = drawn.batch(rank)
        return Batch(case=drawn, rank=rank, x_TH=x_TH, routes=routes)

    def __call__(self, batch: Batch) -> Tensor:
        """Call the layer, and return its output on the CPU."""
        device = self.plan.group.device
        y_TH: Tensor = self.layer(
            batch.x_TH.to(device), batch.routes.to(device), payloads=batch.payloads_on(device)
        )
        return y_TH.cpu()

    def complaint(self, batch: Batch, y_TH: Tensor) -> str | None:
        """What is wrong with a result; None if nothing is."""
        wiring = self.plan.wiring(self.name)
        routes = without_lost(self.plan, self.name, batch.routes)
        if y_TH.dtype != batch.x_TH.dtype or y_TH.shape != batch.x_TH.shape:
            return f"{self._said(batch)}: an output of another dtype or shape than the input"
        if DATA[batch.case.data].is_bounded:  # of NaN, and of numbers that saturate, no bound is known
            exact_TH, tolerance_TH, bound = oracle_tolerance(wiring, self.weights, batch.x_TH, routes)
            if wiring.experts.name != BITWISE:
                dtype = WEIGHT_DTYPES.get(wiring.spec.weights, torch.bfloat16)
                tolerance_TH += _ROUNDED_TO_BF16 * bound.absolute_TH + _underflow(self.weights, routes, dtype)
            over = excess(y_TH, exact_TH, tolerance_TH)
            if not over <= 0:  # NaN is wrong, too
                return f"{self._said(batch)}: {over:.3g} beyond the bound around the oracle"
        if wiring.experts.name == BITWISE:
            expected_TH = twin(wiring, self.weights, batch.x_TH, routes, self.plan.group.rank)
            if not same_numbers(y_TH, expected_TH):
                return f"{self._said(batch)}: other bits than the twin in one process has"
        return None

    def _said(self, batch: Batch) -> str:
        return f"layer {self.name!r}, {batch.case}"


def _underflow(weights: ExpertWeights, routes: Routes, dtype: torch.dtype) -> Tensor:
    """The most error, `[T, 1]`, that a token's result gets from subnormal numbers between the two products."""
    kind = torch.finfo(dtype)
    w2 = weights.w2.decode() if isinstance(weights.w2, QuantizedMatrix) else weights.w2
    largest = float(w2.abs().amax()) if w2.numel() else 0.0
    half_a_step = kind.smallest_normal * kind.eps / 2
    each = half_a_step * (w2.shape[-1] * largest + 1)  # all inputs of the second product, and its result
    weights_TK = routes.topk_weights_TK.double().abs()
    weights_TK = weights_TK.masked_fill(routes.topk_ids_TK < 0, 0.0)  # unused weights may be NaN
    return each * weights_TK.sum(dim=1, keepdim=True)


def two_in_flight(first: Served, second: Served, batches: tuple[Batch, Batch]) -> tuple[Tensor, Tensor]:
    """Make two round trips, with the second dispatch before the first combine."""
    exchange, device = first.plan.exchange, first.plan.group.device
    flights = []
    for served, batch in zip((first, second), batches, strict=True):
        exchange_spec = served.layer.wiring.exchange_spec
        rows = exchange.encode(exchange_spec, batch.x_TH.to(device))
        routes, payloads = batch.routes.to(device), batch.payloads_on(device)
        flights.append(exchange.dispatch(exchange_spec, rows, routes, payloads))
    home = []
    for served, flight in zip((first, second), flights, strict=True):
        result = run_experts(served.layer.wiring, served.layer.experts, flight.received)
        home.append(flight.combine(result).y_TH.cpu())
    return home[0], home[1]


def without_lost(plan: Plan, name: str, routes: Routes) -> Routes:
    """The routes without the choices whose expert was lost with its rank, as a plan drops them."""
    placement = plan.wiring(name).exchange_spec.placement
    if not placement.lost_experts:
        return routes
    rank_TK, _ = placement.resolve(routes.topk_ids_TK, plan.group.rank)
    return routes.without((routes.topk_ids_TK >= 0) & (rank_TK < 0), renormalize=False)


def named(case: Case, name: str) -> LayerSpec:
    """The spec of a case's layer under a name of its own, for a plan of several layers."""
    return replace(case.spec(), name=name)
