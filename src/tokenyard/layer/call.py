"""One call of a layer: what it is called with, and what the layer does before its dispatch and around its experts.

    sender      check the rows, make their routes, call the shared experts
    receiver    swizzle scales that arrived linear, run the experts, finish what a kernel returns unfinished

The wiring says which of these duties a layer has; nothing is guessed from the result of a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.duties import NO_CONTEXT, Duty, Party, acting
from tokenyard.errors import InputError
from tokenyard.experts import Experts
from tokenyard.experts.base import TOKEN_NUMBERS
from tokenyard.formats.base import dtype_name, is_matrix
from tokenyard.group import Group
from tokenyard.group.base import Background
from tokenyard.planning.audit import Audit
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import (
    ExpertResult,
    LocalRoutes,
    ReceivedRows,
    RoutingLogits,
    UnfinalizedRows,
    check_choice_rows,
    check_result,
    describe,
)

if TYPE_CHECKING:
    from tokenyard.layer.training import Tape


class Inputs(NamedTuple):
    """What a layer is called with: the tokens of this rank."""

    x_TH: Tensor
    routes_or_logits: Routes | Tensor
    payloads: Mapping[str, Tensor] | None = None  # further payloads, by name
    out: Tensor | None = None  # where the result is written
    add: Tensor | None = None  # what is added to it
    token_numbers: Tensor | None = None  # a number for each token, if the layer declares them
    # All that is added, in place of `add`, where shared experts have run before the call.
    terms: tuple[Tensor, ...] | None = None

    @property
    def extra(self) -> Mapping[str, Tensor] | None:
        """All that travels with the rows: further payloads, and token numbers as a payload of one column."""
        if self.token_numbers is None:
            return self.payloads
        numbers = self.token_numbers.unsqueeze(1) if self.token_numbers.dim() == 1 else self.token_numbers
        return {**(self.payloads or {}), TOKEN_NUMBERS: numbers}


class Call(NamedTuple):
    """What the steps of a call know, beside the round trip."""

    wiring: Wiring
    inputs: Inputs
    terms: Sequence[
        Tensor | Background[Tensor]
    ]  # what is added to the sum: results of shared experts, a residual
    audit: Audit | None  # counts the duties of the call, in a paranoid plan
    tape: Tape | None = None  # keeps what a backward needs, if the call is differentiated

    def recording(self) -> AbstractContextManager[object]:
        """Record the duties that are done inside the block, if the plan is paranoid."""
        return NO_CONTEXT if self.audit is None else self.audit.recording()


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


def run_experts(
    wiring: Wiring,
    experts: Experts,
    received: ReceivedRows,
    slot_of_L: Tensor | None = None,
    compute: Callable[..., Any] | None = None,
) -> ExpertResult:
    """Run the experts on the received rows, and do the duties that the wiring gives to the receiver.

    `slot_of_L` is the slot of each local expert in the weights; None if local expert l is in slot l. `compute` is
    called in place of the experts.
    """
    with acting(Party.RECEIVER):
        if slot_of_L is not None and isinstance(received.routes, LocalRoutes):
            # After a dispatch that failed on a GPU, the ids may be arbitrary numbers: keep them in range.
            ids_RK = slot_of_L[received.routes.ids_RK.clamp(-1, len(slot_of_L) - 1)]
            routes = dataclasses.replace(received.routes, ids_RK=ids_RK, renumbered=received.routes)
            received = dataclasses.replace(received, routes=routes)
        if wiring.duties[Duty.SWIZZLE] is Party.RECEIVER:
            received = dataclasses.replace(received, rows=received.dense().swizzled(), slots_R=None)
        if experts.places_results:
            received = _with_place(received)
        finalize = wiring.duties[Duty.REDUCE_EXPERTS] is Party.EXPERTS
        with without_autocast(received.rows.device.type):
            result = (compute or experts)(received, finalize=finalize)
        if wiring.exchange_spec.sums_choices:
            return check_choice_rows(result.weighted(), received)
        if isinstance(result, UnfinalizedRows):
            result = result.finish()
    return check_result(result, received)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Inside the block, torch computes in the dtypes of its operands: experts have chosen these."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else NO_CONTEXT


def _with_place(received: ReceivedRows) -> ReceivedRows:
    """The same rows with `place` set, so that experts write their results there; not on GPUs, nor in paranoid plans."""
    results = received.results
    if results is None or results.is_watched or not results.rows_SH.is_cpu:
        return received
    return dataclasses.replace(received, place=results)


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
