"""The way of a token, on one page.

x_TH ── router ──► routes
  │                  │
  └─► wire.encode ───┴─► dispatch ──► experts ──► combine ──► y_TH
       (payloads)        one copy      (rows        (float32 sum over
                         per rank       weighted     ranks, fixed order)
                                        and summed
                                        per rank)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from tokenyard.exchange import Fate
from tokenyard.experts import Experts, ExpertWeights
from tokenyard.layer.compiled import compilable
from tokenyard.layer.receiver import build_experts, fitting, run_experts
from tokenyard.layer.sender import check_rows, check_shared, route
from tokenyard.planning.audit import audited
from tokenyard.planning.planner import Plan, wiring_in
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import ExpertRows, PlacedRows, RankRows


@compilable  # torch.compile sees one operator
class MoELayer(nn.Module):
    """One layer of a plan, on this rank. Every rank of the group calls it, an idle one with T = 0.

    `weights` are those of this rank's experts: `all_weights.select(plan.local_experts(name))`. They are
    copied, or with `adopt=True` taken over. `shared` experts run on this rank's own tokens, and are added once.
    """

    plan: Plan  # the plan that all ranks agreed on
    name: str  # the layer's name in the plan
    shared: Callable[[Tensor], Tensor] | None  # the shared experts, if there are any
    experts: Experts  # the experts of this rank, with their weights

    def __init__(
        self,
        plan: Plan,
        name: str,
        weights: ExpertWeights,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        adopt: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.name, self.shared = plan, name, shared
        check_shared(wiring_in(plan, name), shared)
        self.experts = build_experts(plan.wiring(name), plan.group.rank, weights, adopt=adopt)

    @property
    def wiring(self) -> Wiring:
        """The layer's wiring, as the plan has it now: a plan may grow, or go on without a rank."""
        return fitting(self.plan.wiring(self.name), self.plan.group.rank, self.experts)

    def forward(
        self,
        x_TH: Tensor,
        routes_or_logits: Routes | Tensor,
        *,
        payloads: Mapping[str, Tensor] | None = None,
        out: Tensor | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """Send tokens to their experts and bring the results home, into `out` if given, plus `add` if given."""
        wiring = self.wiring
        with self.plan.exchange.shared_fate(wiring.cargo) as fate:  # an error on one rank reaches all
            result = self._go_out(wiring, fate, x_TH, routes_or_logits, payloads)
            terms = [self.shared(x_TH)] if self.shared is not None else []
            terms += [add] if add is not None else []
            return fate.combine(result, out=out, add=terms).y_TH

    def unreduced(
        self, x_TH: Tensor, routes_or_logits: Routes | Tensor, *, payloads: Mapping[str, Tensor] | None = None
    ) -> RankRows:
        """The same up to the sum over ranks, which is the caller's duty here (`reduce_ranks="caller"`)."""
        wiring = self.wiring
        with self.plan.exchange.shared_fate(wiring.cargo) as fate:
            return fate.combine_unreduced(self._go_out(wiring, fate, x_TH, routes_or_logits, payloads))

    @audited  # in a plan that watches itself, every duty is counted
    def _go_out(
        self,
        wiring: Wiring,
        fate: Fate,
        x_TH: Tensor,
        routes_or_logits: Routes | Tensor,
        payloads: Mapping[str, Tensor] | None,
    ) -> ExpertRows | PlacedRows:
        check_rows(wiring, x_TH)
        routes = route(wiring, routes_or_logits)
        rows = fate.encode(x_TH)
        received = fate.dispatch(rows, routes, payloads)
        return run_experts(wiring, self.experts, received)
