"""How a layer's experts on this rank are built, and how they find the rows that are theirs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tokenyard.errors import HandleError, InputError, TokenyardError, shown
from tokenyard.experts import Experts, ExpertsSpec, ExpertWeights
from tokenyard.experts.self_routing import SelfRoutingExperts
from tokenyard.experts.slots import with_spare_slots
from tokenyard.experts.weights import check_weights
from tokenyard.group.shared_memory import mappable_memory
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement
from tokenyard.rows import describe

# What experts are built for: the spec of what they compute, and the global ids of the experts whose weights they have.
BuiltFor = tuple[ExpertsSpec, tuple[int, ...]]


def built_for(wiring: Wiring, rank: int) -> BuiltFor:
    """The spec that a rank's experts of a layer must fit, and the global ids of these experts."""
    return wiring.experts_spec(rank), wiring.exchange_spec.placement.local_experts(rank)


def build_experts(wiring: Wiring, rank: int, weights: ExpertWeights, *, adopt: bool) -> Experts:
    """Check the weights of this rank's experts of a layer, and build the experts with them."""
    spec, owned = built_for(wiring, rank)
    try:
        if not isinstance(weights, ExpertWeights):
            raise InputError(
                f"the weights are {describe(weights)}",
                expected="ExpertWeights",
                fix="pass ExpertWeights(w13=…, w2=…) to plan.layer(name, weights)",
            )
        if weights.experts is not None and weights.experts != owned:
            raise InputError(
                f"the weights are those of experts {shown(list(weights.experts))}",
                expected=f"those of experts {shown(list(owned))}, which this rank owns",
                fix="make the layer with plan.layer(name, weights), which selects these from the weights of all "
                "experts; where they are numbered otherwise, pass dataclasses.replace(weights, experts=None)",
            )
        if spare := wiring.spec.spare_experts:
            check_weights(spec, weights)
            weights, adopt = with_spare_slots(weights, spare, allocate=mappable_memory), True
            spec = dataclasses.replace(spec, num_local_experts=spec.num_local_experts + spare)
        if issubclass(wiring.experts, SelfRoutingExperts):
            assert wiring.spec.router is not None  # the wiring has checked it
            to_local = LocalIds(wiring.exchange_spec.placement, rank)
            built: Experts = wiring.experts(
                spec, weights, router=wiring.spec.router, to_local=to_local, adopt=adopt
            )
        else:
            built = wiring.experts(spec, weights, adopt=adopt)
    except TokenyardError as error:
        error.at(layer=wiring.spec.name, rank=rank)
        raise
    return built


def check_fits(wiring: Wiring, rank: int, known: BuiltFor) -> None:
    """Raise if the plan now has another layer of this name, for which these experts were not built."""
    if known != built_for(wiring, rank):
        raise HandleError(
            "the plan has another layer of this name now, with other experts on this rank",
            expected="the layer that these experts were built for",
            fix="make a new layer: plan.layer(name, weights)",
            layer=wiring.spec.name,
            rank=rank,
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


@dataclasses.dataclass(frozen=True)
class LocalIds:
    """Maps global expert ids to a rank's local ids (-1: on another rank), for rows in (source rank, token) order."""

    placement: Placement
    rank: int
    slot_of_L: Tensor | None = None  # the slot of each local expert in the weights; None: its local id

    def __call__(self, topk_ids_RK: Tensor, counts_W: tuple[int, ...]) -> Tensor:
        parts = []
        for source, ids_TK in enumerate(topk_ids_RK.split(counts_W)):
            rank_TK, local_TK = self.placement.resolve(ids_TK, source)
            parts.append(torch.where(rank_TK == self.rank, local_TK, -1))
        local_RK = torch.cat(parts)
        return local_RK if self.slot_of_L is None else self.slot_of_L[local_RK]
