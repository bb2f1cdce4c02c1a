"""The float64 oracle of gradients: those of a whole layer, on one rank, without an exchange, by torch's autograd.

The gradients are those of `(dy · layer(x)).sum()` over the tokens of all ranks. Beside each stands its *size*: the same
sums with all terms positive, where an activation's slope is replaced by the most that it may be. Each step of a
backward rounds once, so that an element is off by at most `_ROUNDINGS` half units of its size. Elements do not all
round the same way: the norm of the error is held to a quarter of that. Another formula, or a factor of two, is outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tokenyard.conformance.oracle import exact_activation
from tokenyard.experts import Activation, ExpertWeights, activation
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes

# Roundings of a gradient's way in the dtype of the layer: both products forward, three backward, the activation and its
# slope, the routing weight, the wire on both ways, the sum at home, the parameter's dtype; and room for second order.
_ROUNDINGS = 16
_FLOAT32 = 2.0**-24
_SLOPE = 1.13  # of silu, gelu and the clamped SwiGLU, at most


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of one layer: of the rows and routing weights of all tokens, and of all experts' parameters."""

    rows_TH: Tensor
    weights_TK: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        """All that are not None."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


@torch.enable_grad()
def exact_gradients(
    spec: LayerSpec, weights: ExpertWeights, x_TH: Tensor, routes: Routes, dy_TH: Tensor
) -> tuple[Gradients, Gradients]:
    """The exact gradients, float64, and their sizes. `weights` are those of all experts; the rest is of all tokens."""
    wide = {name: part.double().requires_grad_() for name, part in weights.decode().by_name().items()}
    x_TH, dy_TH = x_TH.double().requires_grad_(), dy_TH.double()
    ids_TK = routes.topk_ids_TK
    # Weights beside -1 mean nothing, and may be NaN.
    weights_TK = routes.topk_weights_TK.double().masked_fill(ids_TK < 0, 0.0).requires_grad_()
    size = {name: torch.zeros_like(part) for name, part in wide.items()}
    size |= {"rows_TH": torch.zeros_like(x_TH), "weights_TK": torch.zeros_like(weights_TK)}
    y_TH = torch.zeros_like(x_TH)
    for expert in range(spec.num_experts):
        token_N, choice_N = (ids_TK == expert).nonzero(as_tuple=True)
        if not len(token_N):
            continue
        mine = {name: part[expert] for name, part in wide.items()}
        weight_N1 = weights_TK[token_N, choice_N].unsqueeze(1)
        x_NH = x_TH[token_N]
        given_NH = weight_N1 * x_NH if spec.weight_on == "input" else x_NH
        hidden_NI = exact_activation(
            activation(spec.activation), given_NH @ mine["w13"].T + mine.get("b13", 0)
        )
        result_NH = hidden_NI @ mine["w2"].T + mine.get("b2", 0)
        y_TH = y_TH.index_add(0, token_N, weight_N1 * result_NH if spec.weight_on == "output" else result_NH)
        with torch.no_grad():
            found = _sizes(spec, mine, x_NH, weight_N1, dy_TH[token_N])
            for name in mine:
                size[name][expert] += found[name]
            size["rows_TH"].index_add_(0, token_N, found["rows"])
            size["weights_TK"][token_N, choice_N] += found["weights"]
    inputs = {"rows_TH": x_TH, "weights_TK": weights_TK, **wide}
    exact = [torch.zeros_like(given) for given in inputs.values()]
    if y_TH.requires_grad:  # some token has an expert
        computed = torch.autograd.grad((y_TH * dy_TH).sum(), list(inputs.values()), allow_unused=True)
        exact = [
            zeros if gradient is None else gradient for zeros, gradient in zip(exact, computed, strict=True)
        ]
    return Gradients(**dict(zip(inputs, exact, strict=True))), Gradients(**size)


def excess_of_gradient(spec: LayerSpec, found: Tensor, exact: Tensor, size: Tensor, num_tokens: int) -> float:
    """By how much a gradient is beyond its bound, in any element or in norm: at most 0 if it is within.

    NaN counts as beyond. `num_tokens` is the most terms that a sum over tokens has.
    """
    most = _tolerance(spec, size, num_tokens)
    error = found.double().cpu() - exact
    over = max(
        float((error.abs() - most).amax()) if error.numel() else 0.0,
        float(torch.linalg.vector_norm(error) - torch.linalg.vector_norm(most) / 4),
    )
    return torch.inf if math.isnan(over) else over


def _tolerance(spec: LayerSpec, size: Tensor, num_tokens: int) -> Tensor:
    terms = spec.hidden_size + spec.intermediate_size + num_tokens * spec.top_k
    kind = torch.finfo(spec.dtype)
    return (_ROUNDINGS * kind.eps / 2 + terms * _FLOAT32) * size + kind.smallest_normal


def _sizes(
    spec: LayerSpec, expert: Mapping[str, Tensor], x_NH: Tensor, weight_N1: Tensor, dy_NH: Tensor
) -> dict[str, Tensor]:
    """The sizes of the gradients of the pairs of one expert."""
    act = activation(spec.activation)
    w13, w2 = expert["w13"].abs(), expert["w2"].abs()
    x_NH, weight_N1, dy_NH = x_NH.abs(), weight_N1.abs(), dy_NH.abs()
    on_input = spec.weight_on == "input"
    given_NH = weight_N1 * x_NH if on_input else x_NH
    pre = given_NH @ w13.T + (expert["b13"].abs() if "b13" in expert else 0)
    hidden_NI, slopes = _activation_sizes(act, pre)
    plain_NI = dy_NH @ w2  # without the routing weight
    weighted_NH = dy_NH if on_input else weight_N1 * dy_NH
    d_hidden_NI = plain_NI if on_input else weight_N1 * plain_NI
    d_pre = slopes(d_hidden_NI)
    d_given_NH = d_pre @ w13
    result_NH = hidden_NI @ w2.T + (expert["b2"].abs() if "b2" in expert else 0)
    d_weight_N = (d_given_NH * x_NH if on_input else dy_NH * result_NH).sum(dim=1)
    found = {
        "rows": weight_N1 * d_given_NH if on_input else d_given_NH,
        "weights": d_weight_N,
        "w13": d_pre.T @ given_NH,
        "w2": weighted_NH.T @ hidden_NI,
        "b13": d_pre.sum(dim=0),
        "b2": weighted_NH.sum(dim=0),
    }
    return found


def _activation_sizes(act: Activation, pre: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The most that an activation may be for inputs of this size, and a function that carries sizes back through it."""
    gate, up = act.split(pre)

    def back(d_hidden_NI: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = torch.zeros_like(pre).requires_grad_()
            parts = [part for part in act.split(leaf) if part is not None]
        # The slope at a point that is off by an error differs by the error times the curvature, which is at most 1.
        if up is None:
            sizes = [d_hidden_NI * 4 * gate]
        else:
            sizes = [d_hidden_NI * (up + 1) * (_SLOPE + gate), d_hidden_NI * _SLOPE * gate]
        (d_pre,) = torch.autograd.grad(parts, leaf, sizes)
        return d_pre

    return (gate**2 if up is None else gate * (up + 1)), back
