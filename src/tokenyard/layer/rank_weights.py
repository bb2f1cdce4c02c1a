"""Selecting a rank's experts from the weights that `plan.layer` is given."""

from __future__ import annotations

from tokenyard.errors import InputError, TokenyardError, shown
from tokenyard.experts import ExpertWeights
from tokenyard.planning.wiring import Wiring
from tokenyard.rows import describe


def rank_weights(wiring: Wiring, rank: int, weights: ExpertWeights | None) -> ExpertWeights:
    """The weights of a rank's experts of a layer, from those of all experts of the layer, or from its own.

    Ids that the weights carry (`ExpertWeights.experts`) say which experts they are. Without ids, their number does.
    """
    try:
        if not isinstance(weights, ExpertWeights):
            raise InputError(
                f"the weights are {describe(weights)}",
                expected="ExpertWeights",
                fix="pass ExpertWeights(w13=…, w2=…), of all experts of the layer or of this rank's",
            )
        return _selected(wiring, rank, weights)
    except TokenyardError as error:
        error.at(layer=wiring.spec.name, rank=rank)
        raise


def _selected(wiring: Wiring, rank: int, weights: ExpertWeights) -> ExpertWeights:
    owned = wiring.exchange_spec.placement.local_experts(rank)
    total = wiring.spec.num_experts
    counts = {name: part.shape[0] if part.shape else 0 for name, part in weights.parts().items()}
    count = counts["w13"]
    if set(counts.values()) != {count}:
        raise InputError(
            f"the weights hold {', '.join(f'{name} of {number}' for name, number in counts.items())} experts",
            expected="tensors of the same experts, laid out as [experts, out, in]",
            fix="give all tensors of the ExpertWeights the same first dimension",
        )
    if weights.experts is not None:
        if weights.experts == owned:
            return weights
        if len(weights.experts) != count or not set(owned) <= set(weights.experts):
            raise InputError(
                f"the weights are those of experts {shown(list(weights.experts))}",
                expected=f"those of all {total} experts, or of experts {shown(list(owned))}, which this rank owns",
                fix="load the experts of plan.local_experts(name); where they are numbered otherwise, pass "
                "dataclasses.replace(weights, experts=None)",
            )
        return weights.select([weights.experts.index(expert) for expert in owned])
    if count == total == len(owned) and owned != tuple(range(total)):
        raise InputError(
            f"the weights are of {count} experts without ids, and this rank owns all {total} in another order",
            expected="weights that say in which order they are",
            fix=f"for the order of the layer pass weights.select(range({total})); for the order of this rank "
            "dataclasses.replace(weights, experts=tuple(plan.local_experts(name)))",
        )
    if count == len(owned):
        return weights
    if count == total:
        return weights.select(owned)
    spare = f", without its {wiring.spec.spare_experts} spare ones" if wiring.spec.spare_experts else ""
    raise InputError(
        f"the weights are of {count} experts",
        expected=f"all {total} experts of the layer, or the {len(owned)} that this rank owns{spare}: "
        f"{shown(list(owned))}",
        fix="pass the weights of all experts, or load those of plan.local_experts(name)",
    )
