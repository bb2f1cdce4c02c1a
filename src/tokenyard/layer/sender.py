"""What a layer does on the way out: it checks the rows, finds their routes, and lets shared experts run beside."""

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


class SharedExpertsCall:
    """Shared experts that are called once, and have ended at the end of this context, whatever was raised in it.

    They run while rows travel out, and while results travel back. Where ranks are on several hosts, most of a round
    trip is a wait for its links, and they run in a thread of their own: the layer goes on beside them, and waits for
    them before it sums. Elsewhere a round trip is work of the same cores, and they run where they are called, between
    the start of the dispatch and its end.
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
