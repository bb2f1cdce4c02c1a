"""What the layers of a plan must have so that a call succeeds even if a rank is lost in it (`survive=True`)."""

from __future__ import annotations

import torch

from tokenyard.errors import PlanError
from tokenyard.planning.drafting import Draft


def check_survives(drafted: Draft, device: torch.device) -> None:
    """Raise unless the plan can lose any one rank in a call and still compute the same bits on the others."""
    for wiring in drafted.wirings:
        table = wiring.exchange_spec.placement.table
        alone = [
            expert for expert in range(wiring.spec.num_experts) if sum(expert in row for row in table) < 2
        ]
        reason = (
            f"rows are on {device}" if device.type != "cpu"
            else "a backward cannot be repeated: training=True" if drafted.training
            else f"{drafted.in_flight} calls may be in flight" if drafted.in_flight > 1
            else "bits would depend on the ranks that are left" if wiring.spec.sum != "choices"
            else f"only one rank has experts {alone[:8]}" if alone
            else ""
        )  # fmt: skip
        if reason:
            raise PlanError(
                f"survive=True, and {reason}",
                expected='one call at a time on CPUs, layers with sum="choices", and every expert on two ranks',
                fix="place copies with Placement.replicated(…), or leave survive out",
                layer=wiring.spec.name,
            )
