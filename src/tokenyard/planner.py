"""Plans: the checked wiring of all layers, agreed on by all ranks, before the first token.

    plan(layers, group, exchange="two_sided", max_tokens=512)

1. resolves every layer's wiring, or raises `PlanError` with choices that do work (each was tried);
2. computes the bytes that serve all layers: the largest dispatch region, the largest combine region;
3. compares itself across the group: ranks that disagree **all** raise `PlanMismatch`, nobody hangs. An error
   on one rank reaches the others too.

`draft` is the first half without a group: what a plan *would* be, for any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from tokenyard import experts as experts_room
from tokenyard import formats
from tokenyard.errors import (
    Alternative,
    InputError,
    PeerFailed,
    PlanError,
    PlanMismatch,
    Reason,
    TokenyardError,
    unknown_name,
)
from tokenyard.exchange import EXCHANGES, Cargo, Exchange
from tokenyard.exchange import resolve as resolve_exchange
from tokenyard.exchange.stats import LayerStats
from tokenyard.group import Group
from tokenyard.placement import PLACEMENTS
from tokenyard.spec import LayerSpec
from tokenyard.version import PROTOCOL
from tokenyard.wiring import Duty, Party, Wiring, wire_layer

_log = logging.getLogger("tokenyard")

# Overrides the `exchange` of every plan in this process.
EXCHANGE_VARIABLE = "TOKENYARD_EXCHANGE"
_MOST_ALTERNATIVES = 6


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan before any rank has agreed to it: the wiring of every layer on `world` ranks, and its bytes."""

    world: int
    exchange: type[Exchange]
    in_flight: int
    wirings: tuple[Wiring, ...]

    @property
    def specs(self) -> list[LayerSpec]:
        """The layers, each with the limit of tokens that it was planned with."""
        return [replace(wiring.spec, max_tokens=wiring.cargo.max_tokens) for wiring in self.wirings]

    @property
    def dispatch_bytes(self) -> int:
        """The largest dispatch region of any layer, on one rank."""
        return max(self.exchange.region_bytes(wiring.cargo).dispatch for wiring in self.wirings)

    @property
    def combine_bytes(self) -> int:
        """The largest combine region of any layer, on one rank."""
        return max(self.exchange.region_bytes(wiring.cargo).combine for wiring in self.wirings)

    @property
    def workspace_bytes(self) -> int:
        """What one rank holds at most for rows in flight, whichever layer is running."""
        return (self.dispatch_bytes + self.combine_bytes) * self.in_flight

    def fields(self) -> dict[str, Any]:
        """Plain values, flat, by name: what ranks compare."""
        flat: dict[str, Any] = {
            "protocol": PROTOCOL,
            "world": self.world,
            "exchange": self.exchange.name,
            "in_flight": self.in_flight,
            "number of layers": len(self.wirings),
        }
        for index, wiring in enumerate(self.wirings):
            flat |= {f"layers[{index}].{name}": value for name, value in wiring.fields().items()}
        return flat

    def fingerprint(self) -> int:
        """63 bits of a hash of all fields."""
        digest = hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def rows(self) -> list[dict[str, Any]]:
        """A row per distinct wiring: its layers, who does each duty, bytes. For tables and JSON."""
        distinct: dict[str, dict[str, Any]] = {}
        for wiring in self.wirings:
            spec, nbytes = wiring.spec, self.exchange.region_bytes(wiring.cargo)
            row = {
                "shape": f"H {spec.hidden_size}, I {spec.intermediate_size}, E {spec.num_experts}, K {spec.top_k}",
                "experts": f"{wiring.experts.name}, {spec.weights} weights, {wiring.cargo.placement}",
                "wire": str(wiring.wire),
                "combine_wire": str(wiring.cargo.combine_wire),
                "duties": {duty.value: party.value for duty, party in wiring.duties.items()},
                "max_tokens": wiring.cargo.max_tokens,
                "bytes_per_row": {"dispatch": nbytes.dispatch_row, "combine": nbytes.combine_row},
                "bytes_per_rank": {"dispatch": nbytes.dispatch, "combine": nbytes.combine},
            }
            distinct.setdefault(json.dumps(row), {"layers": [], **row})["layers"].append(spec.name)
        return list(distinct.values())

    def __str__(self) -> str:
        size_of_plan = f"{count(len(self.wirings), 'layer')} on {count(self.world, 'rank')}"
        lines = [f"plan of {size_of_plan}, exchange {self.exchange.name}, {self.in_flight} in flight"]
        for row in self.rows():
            duties = ", ".join(f"{duty}: {who}" for duty, who in row["duties"].items() if who != "–")
            per_row, per_rank = row["bytes_per_row"], row["bytes_per_rank"]
            lines += [
                f"  {span(row['layers'])}: {row['shape']}; {row['experts']}",
                f"    wire {row['wire']} ({per_row['dispatch']} bytes a row), "
                f"back {row['combine_wire']} ({per_row['combine']}); up to {row['max_tokens']} tokens a rank",
                f"    {duties}",
                f"    at most {size(per_rank['dispatch'])} out + {size(per_rank['combine'])} back on a rank",
            ]
        lines.append(
            f"  all layers share {size(self.workspace_bytes)} a rank "
            f"(largest out {size(self.dispatch_bytes)} + largest back {size(self.combine_bytes)})"
        )
        return "\n".join(lines)


class Plan:
    """All layers of a model on one rank, agreed on with the other ranks. Made by `plan`."""

    def __init__(self, draft: Draft, group: Group, plan_id: int) -> None:
        self._start(draft, group, plan_id)

    def _start(self, draft: Draft, group: Group, plan_id: int) -> None:
        self.group = group
        self.exchange = draft.exchange(group, in_flight=draft.in_flight, plan_id=plan_id)
        self.exchange.serve([wiring.cargo for wiring in draft.wirings])
        self._adopt(draft)

    def _adopt(self, draft: Draft) -> None:
        self.draft = draft
        self._wirings = {wiring.spec.name: wiring for wiring in draft.wirings}

    def extend(self, layers: Sequence[LayerSpec], *, max_tokens: int | None = None) -> None:
        """Serve further layers, too. Collective over the group, and over nobody else.

        The workspace is kept where it suffices, else rebuilt for the union of all layers; layers stay valid, and a
        dispatch that was in flight must be made again. If a rank cannot allocate, all raise, and the plan is as it
        was.
        """
        self._reshape([*self.draft.specs, *layers], max_tokens, self.exchange.serve)

    def trim(self, keep: Sequence[str] | None = None) -> None:
        """Give back what the layers do not need; with `keep`, forget all layers but these. Collective."""
        for name in keep or ():
            self.wiring(name)
        specs = [spec for spec in self.draft.specs if keep is None or spec.name in keep]
        self._reshape(specs, None, self.exchange.trim)

    def _reshape(
        self,
        specs: Sequence[LayerSpec],
        max_tokens: int | None,
        serve: Callable[[Sequence[Cargo]], None],
    ) -> None:
        old = self.draft

        def make() -> Draft:
            return draft(
                specs, self.group.size, exchange=old.exchange, max_tokens=max_tokens, in_flight=old.in_flight
            )

        reshaped, _ = _agree(self.group, make)
        serve([wiring.cargo for wiring in reshaped.wirings])
        self._adopt(reshaped)

    def go_on_without(self, lost: Sequence[int], *, renormalize: bool = False) -> None:
        """Serve all layers on the ranks that are left. Collective over these, after `PeerLost`.

        Ranks are renumbered in their order. What exchanges share is made anew: a lost rank that wakes up finds
        nothing to write into. Experts that were lost, and have no replica elsewhere, are dropped from the routes and
        counted (`stats`); with `renormalize` a token's other weights make up for them.
        """
        survivors = [rank for rank in range(self.group.size) if rank not in lost]
        group = self.group.subgroup(survivors)
        old = self.draft

        def make() -> Draft:
            specs = [
                replace(spec, placement=wiring.cargo.placement.without(lost))
                for spec, wiring in zip(old.specs, old.wirings, strict=True)
            ]
            return draft(
                specs,
                len(survivors),
                exchange=old.exchange,
                in_flight=old.in_flight,
                renormalize_dropped=renormalize,
            )

        reduced, number = _agree(group, make)
        self.exchange.close()
        self._start(reduced, group, _plan_id(reduced, number))

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        if layer not in self._wirings:
            raise unknown_name("layer of this plan", layer, self._wirings).at(rank=self.group.rank)
        return self._wirings[layer]

    def local_experts(self, layer: str) -> list[int]:
        """The global ids of the experts of a layer that this rank owns, in the order of its weights."""
        return list(self.wiring(layer).cargo.placement.local_experts(self.group.rank))

    def stats(self) -> dict[str, LayerStats]:
        """What this rank has sent, received and waited, by layer."""
        return self.exchange.stats

    def gather_stats(self) -> list[dict[str, dict[str, Any]]]:
        """`stats` of every rank, as plain values, in rank order. Collective over the group."""
        mine = {layer: stats.as_dict() for layer, stats in self.stats().items()}
        return self.group.gather_json(mine, phase="gather_stats")

    def close(self) -> None:
        """Give everything back. Layers of this plan raise from now on; the group stays."""
        self.exchange.close()

    def __str__(self) -> str:
        return str(self.draft)


def plan(
    layers: Sequence[LayerSpec],
    group: Group,
    *,
    exchange: str | type[Exchange] = "two_sided",
    max_tokens: int | None = None,
    in_flight: int = 1,
) -> Plan:
    """Check the layers, agree with the other ranks of the group, and set up the exchange. Collective.

    `TOKENYARD_EXCHANGE` in the environment overrides `exchange`.

    >>> from tokenyard import LayerSpec, launch, plan
    >>> moe = LayerSpec(name="moe", hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, wire="nvfp4")
    >>> head = LayerSpec(name="head", hidden_size=48, intermediate_size=16, num_experts=3, top_k=1)
    >>> print(launch(2, lambda group: str(plan([moe, head], group, max_tokens=16)))[0])
    plan of 2 layers on 2 ranks, exchange two_sided, 1 in flight
      moe: H 64, I 32, E 8, K 2; grouped, bf16 weights, 8 experts on 2 ranks, contiguous
        wire nvfp4 (96 bytes a row), back bf16 (128); up to 16 tokens a rank
        quantize: sender, weight: experts, reduce experts: experts, reduce ranks: exchange
        at most 3.0 KB out + 4.0 KB back on a rank
      head: H 48, I 16, E 3, K 1; grouped, bf16 weights, 3 experts on 2 ranks, contiguous
        wire bf16 (128 bytes a row), back bf16 (96); up to 16 tokens a rank
        weight: experts, reduce experts: experts, reduce ranks: exchange
        at most 4.0 KB out + 3.0 KB back on a rank
      all layers share 8.0 KB a rank (largest out 4.0 KB + largest back 4.0 KB)
    """

    def make() -> Draft:
        return draft(layers, group.size, exchange=exchange, max_tokens=max_tokens, in_flight=in_flight)

    agreed, number = _agree(group, make)
    made = Plan(agreed, group, _plan_id(agreed, number))
    if group.rank == 0:
        _log.info("%s", made)
    return made


def _plan_id(agreed: Draft, number: int) -> int:
    """The same on all ranks, and different for each plan of a group."""
    return (agreed.fingerprint() + number) & (2**63 - 1)


def _agree(group: Group, make: Callable[[], Draft]) -> tuple[Draft, int]:
    """Make a draft on every rank and compare: one that all ranks made, or an error on every rank."""
    drafted: Draft | None = None
    error: Exception | None = None
    try:
        drafted = make()
    except Exception as raised:
        error = raised.at(rank=group.rank) if isinstance(raised, TokenyardError) else raised
    number = group.count_plan()
    report = {
        "host": group.host(),
        "error": f"{type(error).__name__}: {error}" if error else None,
        "fields": {"plans made": number, **({} if drafted is None else drafted.fields())},
    }
    by_rank = group.gather_json(report, phase="agreement on the plan")
    if error is not None:
        raise error
    assert drafted is not None
    for rank, other in enumerate(by_rank):
        if other["error"] is not None:
            raise PeerFailed(rank, other["error"], phase="plan", rank=group.rank)
    if differences := _differences([other["fields"] for other in by_rank]):
        raise PlanMismatch(differences, rank=group.rank)
    _check_reach(drafted, group, [other["host"] for other in by_rank])
    return drafted, number


def _check_reach(drafted: Draft, group: Group, hosts: list[str]) -> None:
    """Raise unless the exchange reaches all ranks. It is the same on all of them: they all raise."""
    reason = drafted.exchange.reaches(group, hosts)
    if reason is None:
        return
    cargos = [wiring.cargo for wiring in drafted.wirings]
    others = [
        Alternative(changes={"exchange": name})
        for name, cls in EXCHANGES.items()
        if cls.reaches(group, hosts) is None and all(cls.supports(cargo) is None for cargo in cargos)
    ]
    raise PlanError(
        str(reason),
        expected="an exchange that reaches all ranks of the group",
        fix="" if others else reason.why,
        rank=group.rank,
        alternatives=others,
    )


def draft(
    layers: Sequence[LayerSpec],
    world: int,
    *,
    exchange: str | type[Exchange] = "two_sided",
    max_tokens: int | None = None,
    in_flight: int = 1,
    renormalize_dropped: bool = False,
) -> Draft:
    """What a plan would be on `world` ranks, without a group. Raises what `plan` would raise."""
    layers = list(layers)
    _check_layers(layers, world, in_flight)
    chosen = resolve_exchange(os.environ.get(EXCHANGE_VARIABLE) or exchange)
    wirings: list[Wiring] = []
    for index, spec in enumerate(layers):
        try:
            wired = wire_layer(spec, index=index, world=world, exchange=chosen, max_tokens=max_tokens)
            if isinstance(wired, Reason):
                found = _alternatives(layers, index, world, chosen, max_tokens, wired)
                raise PlanError(
                    str(wired),
                    expected="a layer that its exchange, formats and experts all support",
                    fix="" if found else wired.why,
                    alternatives=found,
                )
        except TokenyardError as error:  # that one, or an unknown name
            error.at(layer=spec.name)
            raise
        cargo = replace(wired.cargo, renormalizes_dropped=renormalize_dropped)
        wirings.append(replace(wired, cargo=cargo))
    return Draft(world=world, exchange=chosen, in_flight=in_flight, wirings=tuple(wirings))


def apply_alternative(
    alternative: Alternative, layers: Sequence[LayerSpec], layer: str, exchange: str
) -> tuple[list[LayerSpec], str]:
    """The layers and the exchange with an alternative's changes made."""
    changes = dict(alternative.changes)
    exchange = changes.pop("exchange", exchange)
    return [replace(spec, **changes) if spec.name == layer else spec for spec in layers], exchange


def _check_layers(layers: list[LayerSpec], world: int, in_flight: int) -> None:
    wrong = [spec for spec in layers if not isinstance(spec, LayerSpec)]
    if wrong or not layers:
        raise InputError(
            f"layers holds a {type(wrong[0]).__name__}" if wrong else "layers is empty",
            expected="at least one LayerSpec, and nothing else",
            fix="pass [LayerSpec(...), ...]",
        )
    names = [spec.name for spec in layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"{len(names)} layers share {len(set(names))} names: {', '.join(twice)} stands more than once",
            expected="a name of its own for each layer",
            fix="number them: 'model.layers.0.mlp', 'model.layers.1.mlp', …",
        )
    for name, value in (("world", world), ("in_flight", in_flight)):
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"{name} is {value!r}", expected="a whole number ≥ 1", fix=f"pass {name}=1 or more"
            )


# The fields of a spec that may be changed to make a layer fit, and the values to try, by asking the registries.
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
        "tensor_parallel": [1],
        "weight_on": ["output", "input"],
        "reduce_ranks": ["exchange", "caller"],
        "placement": list(PLACEMENTS),
        "top_k": [] if spec.router is None else [spec.router.top_k],
        "routed_scaling": [None],
    }


def _alternatives(
    layers: list[LayerSpec],
    index: int,
    world: int,
    exchange: type[Exchange],
    max_tokens: int | None,
    reason: Reason,
) -> list[Alternative]:
    """Changes of one field (or, if none helps, two) with which the layer fits, the field at fault first."""
    spec = layers[index]
    candidates = _candidates(spec)
    current = {
        "exchange": exchange.name,
        **{name: getattr(spec, name) for name in candidates if name != "exchange"},
    }

    def tries(count: int) -> Iterator[dict[str, Any]]:
        chosen = sorted(combinations(candidates, count), key=lambda names: reason.field not in names)
        for names in chosen:
            for values in product(*(candidates[name] for name in names)):
                changes = dict(zip(names, values, strict=True))
                if all(str(value) != str(current[name]) for name, value in changes.items()):
                    yield changes

    def fits(changes: dict[str, Any]) -> bool:
        changed, name = apply_alternative(Alternative(changes=changes), layers, spec.name, exchange.name)
        # A change of the exchange must not take it away from another layer.
        others = range(len(layers)) if "exchange" in changes else (index,)
        return all(
            isinstance(
                wire_layer(
                    changed[i], index=i, world=world, exchange=resolve_exchange(name), max_tokens=max_tokens
                ),
                Wiring,
            )
            for i in others
        )

    for count in (1, 2):
        found = [Alternative(changes=changes) for changes in tries(count) if fits(changes)]
        if found:
            return found[:_MOST_ALTERNATIVES]
    return []


def _differences(by_rank: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """The fields that differ, with every rank's value. A field that a rank lacks is None there."""
    names = dict.fromkeys(name for fields in by_rank for name in fields)
    values = {name: {rank: fields.get(name) for rank, fields in enumerate(by_rank)} for name in names}
    return {
        name: ranks for name, ranks in values.items() if any(value != ranks[0] for value in ranks.values())
    }


def size(nbytes: float) -> str:
    """Bytes for people.

    >>> size(2048), size(3_500_000)
    ('2.0 KB', '3.3 MB')
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1024 or unit == "GB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "rank"), count(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {noun}" + ("s" if number != 1 else "")


def span(names: list[str]) -> str:
    """How a list of layers is written in one line.

    >>> span(["moe.0"]), span(["moe.0", "moe.1", "moe.2"])
    ('moe.0', 'moe.0 … moe.2 (3 layers)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} layers)"


__all__ = [
    "EXCHANGE_VARIABLE",
    "Draft",
    "Duty",
    "Party",
    "Plan",
    "apply_alternative",
    "draft",
    "plan",
    "size",
    "span",
]
