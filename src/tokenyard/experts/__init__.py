"""Experts: classes that compute on the rows that a rank received, and the registry that finds them by name."""

from __future__ import annotations

from tokenyard.errors import check_part, unknown_name
from tokenyard.experts.activations import ACTIVATIONS, Activation, activation
from tokenyard.experts.base import Experts
from tokenyard.experts.fused import FusedExperts
from tokenyard.experts.grouped import GroupedExperts
from tokenyard.experts.reference import ReferenceExperts
from tokenyard.experts.self_routing import SelfRoutingExperts
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import ExpertWeights

# The experts by name.
EXPERTS: dict[str, type[Experts]] = {
    cls.name: cls for cls in (ReferenceExperts, GroupedExperts, FusedExperts, SelfRoutingExperts)
}


def get(name: str | type[Experts]) -> type[Experts]:
    """The experts class of this name; a class comes back as it is.

    >>> get("reference")
    <class 'tokenyard.experts.reference.ReferenceExperts'>
    """
    if not isinstance(name, str):
        check_part("experts", name, Experts)
        return name
    if name not in EXPERTS:
        raise unknown_name("experts", name, EXPERTS)
    return EXPERTS[name]


__all__ = [
    "ACTIVATIONS",
    "EXPERTS",
    "Activation",
    "ExpertWeights",
    "Experts",
    "ExpertsSpec",
    "FusedExperts",
    "GroupedExperts",
    "ReferenceExperts",
    "SelfRoutingExperts",
    "activation",
    "get",
]
