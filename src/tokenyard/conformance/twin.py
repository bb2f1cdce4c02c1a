"""The twin: one process that does what all ranks do, without a group, and must be **bitwise** equal to them.

Same grouping by rank, same rounding on the wire, same order of every sum; only the moving of bytes is left
out. With the reference experts, whose rows do not depend on each other, any exchange on any kind of ranks must
give exactly these bits, whatever else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.experts import ExpertWeights
from tokenyard.layer.receiver import build_experts, run_experts
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows


def twin(wiring: Wiring, weights: ExpertWeights, x_TH: Tensor, routes: Routes, source_rank: int) -> Tensor:
    """What rank `source_rank` must get for its tokens. `weights` are those of all E experts."""
    placement, combine_wire = wiring.exchange_spec.placement, wiring.exchange_spec.combine_wire
    rows = wiring.wire.encode(x_TH)
    rank_TK, local_TK = placement.resolve(routes.topk_ids_TK, source_rank)
    sums_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    for rank in range(placement.world):
        here_TK = rank_TK == rank
        if not bool(here_TK.any()):
            continue
        local = weights.select(list(placement.local_experts(rank)))
        experts = build_experts(wiring, rank, local, adopt=True)
        received = ReceivedRows(
            rows=rows,
            routes=LocalRoutes(
                ids_RK=torch.where(here_TK, local_TK, -1),
                weights_RK=torch.where(here_TK, routes.topk_weights_TK.float(), 0.0),
            ),
            counts_W=(x_TH.shape[0],),
        )
        result = run_experts(wiring, experts, received)
        assert isinstance(result, ExpertRows)  # there is no place to write them to
        goes_T = here_TK.any(dim=1)
        sums_TH[goes_T] += combine_wire.encode(result.rows_RH[goes_T]).decode(torch.float32)
    return sums_TH.to(x_TH.dtype)
