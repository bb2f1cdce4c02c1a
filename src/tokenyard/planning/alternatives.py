"""Alternatives: changes with which a layer that cannot be wired would fit. Each was tried.

An alternative changes one field of the layer's spec, or the exchange; if no single change helps, it changes two. The
values to try come from the registries, so that a new format or exchange is offered without a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch

from tokenyard import experts as experts_room
from tokenyard import formats
from tokenyard.errors import Alternative, Reason, TokenyardError, shown
from tokenyard.exchange import EXCHANGES, Transport
from tokenyard.exchange import resolve as resolve_exchange
from tokenyard.experts.spec import EXACT
from tokenyard.planning.spec import LayerSpec, check_spec
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Router
from tokenyard.routing.placement import PLACEMENTS, Placement, placement_for

_MOST_ALTERNATIVES = 6


def apply_alternative(
    alternative: Alternative, layers: Sequence[LayerSpec], layer: str, exchange: str
) -> tuple[list[LayerSpec], str]:
    """The layers and the exchange with an alternative's changes made."""
    changes = dict(alternative.changes)
    exchange = changes.pop("exchange", exchange)
    return [replace(spec, **changes) if spec.name == layer else spec for spec in layers], exchange


# The fields of a spec that may be changed to make a layer fit, and the values to try, from the registries.
def _candidates(spec: LayerSpec) -> dict[str, list[Any]]:
    wires: list[Any] = list(formats.FORMATS)
    return {
        "exchange": list(EXCHANGES),
        "wire": wires,
        "combine_wire": wires,
        "expert_rows": [None, *wires],
        "experts": list(experts_room.EXPERTS),
        "weights": list(
            dict.fromkeys(w for cls in experts_room.EXPERTS.values() for w in cls.weight_formats)
        ),
        "inner": [
            EXACT,
            *dict.fromkeys(f for cls in experts_room.EXPERTS.values() for f in cls.inner_formats),
        ],
        "weight_on": ["output", "input"],
        "reduce_ranks": ["exchange", "caller"],
        "sum": ["ranks", "choices"],
        "placement": list(PLACEMENTS),
        "top_k": [spec.router.top_k] if isinstance(spec.router, Router) else [],
        "routed_scaling": [None],
        "spare_experts": [0],
        "gradient_wire": [None],
        "router": _other_routers(spec.router),
    }


def _other_routers(router: Router | None) -> list[Router]:
    """The same router without renormalization, if it can do without."""
    if not isinstance(router, Router) or not router.renormalize:
        return []
    try:
        return [replace(router, renormalize=False)]
    except TokenyardError:  # a softmax over the chosen is renormalized by its nature
        return []


def alternatives(
    layers: list[LayerSpec],
    index: int,
    world: int,
    exchange: type[Transport],
    wire: Callable[..., Wiring | Reason],
    reason: Reason,
) -> list[Alternative]:
    """Changes of one field (or, if none helps, two) with which the layer fits, the field at fault first.

    `wire(spec, index=…, exchange=…)` tries to wire a changed layer.
    """
    spec = layers[index]
    candidates = _candidates(spec)
    if reason.field == "dtype":
        candidates["dtype"] = [torch.bfloat16]
    current = {name: shown(getattr(spec, name, exchange.name), write=str) for name in candidates}

    def tries(count: int) -> Iterator[dict[str, Any]]:
        chosen = sorted(combinations(candidates, count), key=lambda names: reason.field not in names)
        for names in chosen:
            for values in product(*(candidates[name] for name in names)):
                changes = dict(zip(names, values, strict=True))
                if all(str(value) != current[name] for name, value in changes.items()):
                    yield changes

    tables: dict[tuple[str, int], Placement] = {}

    def with_table(spec: LayerSpec) -> LayerSpec:
        """The layer with its named placement replaced by the table. Each table is made once, for all of 1,000 tries."""
        if not (
            isinstance(spec.placement, str) and spec.placement in PLACEMENTS and check_spec(spec) is None
        ):
            return spec
        key = (spec.placement, spec.num_experts)
        if key not in tables:
            tables[key] = placement_for(*key, world)
        return replace(spec, placement=tables[key])

    def fits(changes: dict[str, Any]) -> bool:
        changed, name = apply_alternative(Alternative(changes=changes), layers, spec.name, exchange.name)
        # All layers share one exchange: a change of it must fit the other layers, too.
        others = range(len(layers)) if "exchange" in changes else (index,)
        used = resolve_exchange(name) if "exchange" in changes else exchange
        wired = (wire(with_table(changed[i]), index=i, exchange=used) for i in others)
        return all(isinstance(each, Wiring) for each in wired)

    for count in (1, 2):
        found = [Alternative(changes=changes) for changes in tries(count) if fits(changes)]
        if found:
            return found[:_MOST_ALTERNATIVES]
    return []
