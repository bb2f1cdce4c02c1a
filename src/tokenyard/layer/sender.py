"""What a layer does on the way out, before the exchange: it checks the rows and finds their routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats.base import dtype_name, is_matrix
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import RoutingLogits, describe


class Batch(NamedTuple):
    """What a layer is called with: the tokens of this rank."""

    x_TH: Tensor
    routes_or_logits: Routes | Tensor
    payloads: Mapping[str, Tensor] | None = None  # further payloads, by name
    out: Tensor | None = None  # where the result is written
    add: Tensor | None = None  # what is added to it


def check_rows(wiring: Wiring, x_TH: Tensor) -> None:
    """Raise unless `x_TH` is what the layer was planned for."""
    spec = wiring.spec
    fits = is_matrix(x_TH) and x_TH.shape[1] == spec.hidden_size
    if not fits or x_TH.dtype != spec.dtype:
        raise InputError(
            f"x_TH is {describe(x_TH)}",
            expected=f"{dtype_name(spec.dtype)}[T, {spec.hidden_size}]",
            fix=f"flatten the batch with x.reshape(-1, {spec.hidden_size}); another dtype needs "
            "LayerSpec(dtype=…)",
        )


def check_shared(wiring: Wiring, shared: object) -> None:
    """Raise where shared experts are given to a layer whose sum is not made here."""
    if shared is not None and not wiring.exchange_spec.reduces_ranks:
        raise InputError(
            "shared experts were given to a layer whose results come home unreduced",
            expected="the caller, who reduces over ranks, to add them",
            fix='leave `shared` out, or plan with reduce_ranks="exchange"',
            layer=wiring.spec.name,
        )


def route(wiring: Wiring, routes_or_logits: Routes | Tensor) -> Routes | RoutingLogits:
    """Routes as they are, or the layer's router applied to logits, or logits for experts that route."""
    if isinstance(routes_or_logits, Routes):
        return routes_or_logits
    if not isinstance(routes_or_logits, Tensor):
        raise InputError(
            f"the layer was given {describe(routes_or_logits)} instead of routes",
            expected="Routes, or the router's logits as a tensor [T, E]",
            fix="wrap ids and weights in Routes(topk_ids_TK=…, topk_weights_TK=…)",
        )
    if wiring.exchange_spec.carries_logits:
        return RoutingLogits(logits_RE=routes_or_logits.float())
    if wiring.spec.router is None:
        raise InputError(
            f"the layer was given logits, {describe(routes_or_logits)}, and has no router",
            expected="Routes",
            fix="pass Routes, or give the LayerSpec a router",
        )
    return wiring.spec.router(routes_or_logits)
