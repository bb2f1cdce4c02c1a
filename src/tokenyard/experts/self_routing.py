"""Experts that turn logits into routes by themselves.

Some kernels fuse the router with the experts: then the router's logits travel with the rows, and each rank
routes the rows that it received. `SelfRoutingExperts` do this without a fused kernel. They take the same
`ReceivedRows` as other experts, with `RoutingLogits` in place of `LocalRoutes`, route them, keep the choices of
experts on this rank, and let other experts compute:

    RoutingLogits ── router ──► global ids, weights ── to_local ──► LocalRoutes ── inner experts

Every rank that receives a row routes it, and all must choose the same experts. Routers work row by row, so
equal logits give equal routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokenyard.errors import ContractError, Reason, unknown_name
from tokenyard.experts.base import Experts
from tokenyard.experts.grouped import GroupedExperts
from tokenyard.experts.reference import ReferenceExperts
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import ExpertWeights
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, RoutingLogits, UnfinalizedRows, describe

# Turns logits [R, E] into an object that has `topk_ids_TK` (global ids) and `topk_weights_TK`.
Router = Callable[[Tensor], Any]
# Turns global ids [R, K] and the rows' counts by source rank into ids on this rank; -1 for experts elsewhere.
ToLocal = Callable[[Tensor, tuple[int, ...]], Tensor]


class SelfRoutingExperts(Experts):
    """A router in front of other experts, on the receiving side."""

    router: Router  # turns logits into routes
    to_local: ToLocal  # turns global ids into those of this rank

    name = "self_routing"
    counts_duties = True  # the inner experts record them
    routes_itself = True
    weight_formats = GroupedExperts.weight_formats
    inner_formats = GroupedExperts.inner_formats
    # The experts that can be used as inner experts, by name.
    inner_classes: ClassVar[dict[str, type[Experts]]] = {
        cls.name: cls for cls in (ReferenceExperts, GroupedExperts)
    }

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Reason | None:
        """None, or why the inner experts cannot serve this spec; all inner classes support the same specs."""
        return GroupedExperts.supports(spec)

    def __init__(
        self,
        spec: ExpertsSpec,
        weights: ExpertWeights,
        *,
        router: Router,
        to_local: ToLocal,
        inner: str | type[Experts] = "grouped",
        adopt: bool = False,
    ) -> None:
        """`router` and `to_local` come from the layer, which knows the placement and the rank."""
        # Only the inner experts register the weights: two registrations of one tensor would become two tensors
        # when the module moves to another device. So `Experts.__init__` is not called here.
        nn.Module.__init__(self)
        if isinstance(inner, str):
            if inner not in self.inner_classes:
                raise unknown_name("inner experts", inner, self.inner_classes)
            inner = self.inner_classes[inner]
        self.spec, self.router, self.to_local = spec, router, to_local
        self.inner = inner(spec, weights, adopt=adopt)  # the experts that compute

    @property
    def weights(self) -> ExpertWeights:
        """The weights as they are now (no copies)."""
        return self.inner.weights

    def load_(self, weights: ExpertWeights) -> None:
        """Replace the weights in place; all of them are checked before the first is changed."""
        self.inner.load_(weights)

    @torch.no_grad()
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | UnfinalizedRows:
        """Route the rows, then compute."""
        result = self.inner(self.route(received), finalize=finalize)
        assert isinstance(result, (ExpertRows, UnfinalizedRows))  # as their `forward` has checked
        return result

    def route(self, received: ReceivedRows) -> ReceivedRows:
        """The same batch with `LocalRoutes` in place of its logits."""
        if not isinstance(received.routes, RoutingLogits):
            raise ContractError(
                f"the batch carries {describe(received.routes)}",
                expected="RoutingLogits: these experts route by themselves",
                fix="dispatch the router's logits, or use experts that take routes",
            )
        routes = self.router(received.routes.logits_RE)
        ids_RK = self.to_local(routes.topk_ids_TK, received.counts_W)
        if ids_RK.shape != routes.topk_weights_TK.shape or ids_RK.shape[0] != received.num_rows:
            raise ContractError(
                f"routing {received.num_rows} rows gave local ids {list(ids_RK.shape)} "
                f"and weights {list(routes.topk_weights_TK.shape)}",
                expected=f"[{received.num_rows}, K] for both",
                fix="give a router and a `to_local` that keep one row of choices per received row",
            )
        local = LocalRoutes(ids_RK=ids_RK.int(), weights_RK=routes.topk_weights_TK.float())
        return replace(received, routes=local)
