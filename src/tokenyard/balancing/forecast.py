"""A forecast of the time that another placement would save, and of the time that moving the experts would take.

A call takes as long as its busiest rank computes. The gain is the number of rows by which the busiest rank has fewer,
times the time of a row (6·H·I operations for a gated expert, over the rate of products). The cost is the bytes of the
rank that sends or receives most, over the bandwidth. Cost over gain is the number of steps after which the move has
paid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenyard.balancing.recorded_routes import RecordedRoutes
from tokenyard.routing import Placement, balance, imbalance, moves


@dataclass(frozen=True, kw_only=True)
class LayerForecast:
    """The forecast of one layer: its present placement, and the one that was found for it."""

    layer: str
    present: Placement
    placement: Placement
    rows_before: list[int]  # choices that each rank computes, in all steps
    rows_after: list[int]
    experts_moved: int
    moved_between_hosts: int
    moved_bytes: int
    move_s: float  # seconds in which the experts can be moved
    saved_s: float  # seconds that a step takes less

    @property
    def before(self) -> float:
        """Busiest rank over mean, now."""
        return imbalance(self.rows_before)

    @property
    def after(self) -> float:
        """Busiest rank over mean, on the placement that was found."""
        return imbalance(self.rows_after)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fields = {**asdict(self), "present": self.present.fields(), "placement": self.placement.fields()}
        return fields | {"before": self.before, "after": self.after}


def forecast(
    recorded: Sequence[RecordedRoutes],
    ranks: int,
    *,
    copies: int,
    slots: int | None = None,
    ranks_per_host: int | None = None,
    bytes_per_s: float,
    flops_per_s: float,
) -> list[LayerForecast]:
    """The forecast of every layer on `ranks` ranks: from the contiguous placement to one that fits its routes."""
    hosts = [rank // (ranks_per_host or ranks) for rank in range(ranks)]
    found = []
    for routes in recorded:
        present = Placement.contiguous(routes.num_experts, ranks)
        placement = balance(routes.load(), present, copies=copies, slots=slots, hosts=hosts)
        moved = moves(present, placement, hosts)
        out, into = Counter(move.source for move in moved), Counter(move.target for move in moved)
        busiest = max([0, *out.values(), *into.values()])
        before, after = routes.rows_by_rank(present), routes.rows_by_rank(placement)
        row_s = 6 * routes.hidden_size * routes.intermediate_size / flops_per_s
        found.append(
            LayerForecast(
                layer=routes.layer,
                present=present,
                placement=placement,
                rows_before=before,
                rows_after=after,
                experts_moved=len(moved),
                moved_between_hosts=sum(hosts[move.source] != hosts[move.target] for move in moved),
                moved_bytes=len(moved) * routes.expert_bytes,
                move_s=busiest * routes.expert_bytes / bytes_per_s,
                saved_s=(max(before) - max(after)) * row_s / max(1, routes.num_steps),
            )
        )
    return found


def steps_to_pay(layers: Sequence[LayerForecast]) -> int | None:
    """The steps after which all moves have paid; None: never."""
    saved = sum(layer.saved_s for layer in layers)
    cost = sum(layer.move_s for layer in layers)
    if cost == 0:
        return 0
    return math.ceil(cost / saved) if saved > 0 else None
