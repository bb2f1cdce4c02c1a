"""What a training plan on a `DeviceMesh` must have so that the weights of its experts can be DTensors.

A DTensor that is sharded over dimension 0 has ⌈E / W⌉ experts on each rank, in the order of their ids, and fewer
or none on the last ranks. Where torch looks for an expert of a DTensor, in a checkpoint, say, follows from that alone.
With experts elsewhere it would be loaded wrongly, without an error.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenyard.errors import Alternative, PlanError
from tokenyard.planning.drafting import Draft, draft_ignoring_env
from tokenyard.routing import Placement


def shards(num_experts: int, world: int) -> Placement:
    """The placement that DTensors have, which is `contiguous` where W divides E.

    >>> shards(5, 4).table
    ((0, 1), (2, 3), (4,), ())
    """
    share = -(-num_experts // world)
    starts = [min(rank * share, num_experts) for rank in range(world + 1)]
    table = [list(range(starts[rank], starts[rank + 1])) for rank in range(world)]
    return Placement.explicit(num_experts, table)


def check_shards(drafted: Draft, device: torch.device) -> None:
    """Raise unless the experts of all layers are where DTensors have them; the error has a placement that was tried."""
    for number, wiring in enumerate(drafted.wirings):
        placement = wiring.exchange_spec.placement
        due = shards(placement.num_experts, placement.world)
        if placement.table == due.table:
            continue
        specs = [
            replace(spec, placement=due) if n == number else spec for n, spec in enumerate(drafted.specs)
        ]
        draft_ignoring_env(  # the alternative is tried
            specs, drafted.world, exchange=drafted.exchange, device=device, **drafted.settings
        )
        raise PlanError(
            f"placement={placement}: a training plan on a DeviceMesh holds weights as DTensors, and a DTensor of "
            f"{placement.num_experts} experts has {[len(experts) for experts in due.table]} on the ranks of the mesh",
            expected="experts where DTensors have them",
            fix=f"placement=Placement.explicit({placement.num_experts}, {[list(ids) for ids in due.table]}), or pass "
            "mesh.get_group() in place of the mesh: weights are plain parameters then",
            alternatives=[Alternative(changes={"placement": due})],
            layer=wiring.spec.name,
        )
