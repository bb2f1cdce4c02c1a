"""What a layer does around its experts, on the rank that received the rows.

The duties of the receiver are those that a kernel leaves to it: swizzling the scales that arrived linear, and
finishing (weighting, summing per rank) what a kernel returns unfinished. The wiring says which; nothing is
guessed from the kernel's result.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tokenyard.duties import Duty, Party, acting
from tokenyard.errors import TokenyardError
from tokenyard.experts import Experts, ExpertWeights
from tokenyard.experts.self_routing import SelfRoutingExperts
from tokenyard.placement import Placement
from tokenyard.rows import ExpertRows, PlacedRows, ReceivedRows, UnfinalizedRows, check_result
from tokenyard.wiring import Wiring


def build_experts(wiring: Wiring, rank: int, weights: ExpertWeights, *, adopt: bool) -> Experts:
    """This rank's experts of a layer, with their weights checked."""
    spec = wiring.experts_spec(rank)
    try:
        if issubclass(wiring.experts, SelfRoutingExperts):
            assert wiring.spec.router is not None  # the wiring has checked it
            to_local = LocalIds(wiring.cargo.placement, rank)
            return wiring.experts(spec, weights, router=wiring.spec.router, to_local=to_local, adopt=adopt)
        return wiring.experts(spec, weights, adopt=adopt)
    except TokenyardError as error:
        error.at(layer=wiring.spec.name, rank=rank)
        raise


def run_experts(wiring: Wiring, experts: Experts, received: ReceivedRows) -> ExpertRows | PlacedRows:
    """Run the experts on the rows that arrived, and do what the wiring leaves to the receiver."""
    with acting(Party.RECEIVER):
        if wiring.duties[Duty.SWIZZLE] is Party.RECEIVER:
            received = dataclasses.replace(received, rows=received.dense().swizzled(), slots_R=None)
        result = experts(received, finalize=wiring.duties[Duty.REDUCE_EXPERTS] is Party.EXPERTS)
        if isinstance(result, UnfinalizedRows):
            result = result.finish()
    return check_result(result, received)


@dataclasses.dataclass(frozen=True)
class LocalIds:
    """Global expert ids → the local ones of a rank (-1: elsewhere), for rows in (source rank, token) order."""

    placement: Placement
    rank: int

    def __call__(self, topk_ids_RK: Tensor, counts_W: tuple[int, ...]) -> Tensor:
        parts = []
        for source, ids_TK in enumerate(topk_ids_RK.split(counts_W)):
            rank_TK, local_TK = self.placement.resolve(ids_TK, source)
            parts.append(torch.where(rank_TK == self.rank, local_TK, -1))
        return torch.cat(parts)
