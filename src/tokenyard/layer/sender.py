"""What a layer does before and during dispatch: check the rows, make their routes, and call the shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats.base import dtype_name, is_matrix
from tokenyard.group import Group
from tokenyard.group.base import Background
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
    """Raise if shared experts are given to a layer whose results the caller sums: nothing could add theirs."""
    if shared is not None and not wiring.exchange_spec.reduces_ranks:
        raise InputError(
            "shared experts were given to a layer whose results come home unreduced",
            expected="the caller, who reduces over ranks, to add them",
            fix='leave `shared` out, or plan with reduce_ranks="exchange"',
            layer=wiring.spec.name,
        )


def route(wiring: Wiring, routes_or_logits: Routes | Tensor) -> Routes | RoutingLogits:
    """What travels with the rows: the given routes, those that the router makes of logits, or the logits themselves."""
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


class SharedExpertsCall:
    """One call of the shared experts, which overlaps with the round trip and has ended when this context is left.

    Where CPU ranks are on several hosts, a round trip mostly waits for network links. The shared experts then run in a
    thread of their own: the layer goes on meanwhile, and waits for them before it sums. Elsewhere the round trip uses
    the same cores, and the shared experts run in the calling thread, between the start and the end of the dispatch.
    """

    def __init__(self, shared: Callable[[Tensor], Tensor], group: Group, layer: str) -> None:
        self._shared, self._layer = shared, layer
        self.in_thread = group.num_hosts > 1 and group.device.type == "cpu"
        self._running: Background[Tensor] | None = None

    def __call__(self, x_TH: Tensor) -> Tensor | Background[Tensor]:
        if not self.in_thread:
            return self._shared(x_TH)
        self._running = Background(lambda: self._shared(x_TH), name=f"shared experts of {self._layer}")
        self._running.thread.start()
        return self._running

    def __enter__(self) -> SharedExpertsCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.thread.join()
