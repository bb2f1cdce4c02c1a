"""Drafts: what a plan would be, for any number of ranks, before any of them has agreed to it.

`draft` resolves every layer's wiring. If a layer cannot be wired, it raises a `PlanError` with changes that make the
layer fit (`alternatives`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch

from tokenyard.errors import InputError, PlanError, Reason, TokenyardError, shown
from tokenyard.exchange import ExchangeSpec, Transport
from tokenyard.exchange import resolve as resolve_exchange
from tokenyard.planning.alternatives import alternatives
from tokenyard.planning.choosing import AUTO, choose_exchange
from tokenyard.planning.draft_text import chosen, describe_wiring, lines_of_row
from tokenyard.planning.spec import LayerSpec, is_size
from tokenyard.planning.wiring import Wiring, wire_layer
from tokenyard.routing.placement import MOST_RANKS
from tokenyard.units import count, size
from tokenyard.version import PROTOCOL

# Overrides the `exchange` of every plan in this process.
EXCHANGE_VARIABLE = "TOKENYARD_EXCHANGE"
# Makes every plan in this process paranoid.
PARANOID_VARIABLE = "TOKENYARD_PARANOID"
# The largest `in_flight`. A plain call of a layer needs 1, two overlapped micro-batches need 2.
_MOST_IN_FLIGHT = 1024
# The largest `sms`: more multiprocessors than any GPU has.
_MOST_SMS = 1024
# The most bytes of a workspace: what a process of a 64-bit machine can address.
_LARGEST_WORKSPACE = 2**47


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan before any rank has agreed to it: the wiring of every layer on `world` ranks, and its bytes."""

    world: int  # W, the number of ranks
    exchange: type[Transport]  # the class that moves rows
    in_flight: int  # dispatches that may wait for their combine at a time
    wirings: tuple[Wiring, ...]  # the wiring of every layer, in the order of the specs
    paranoid: bool = False  # whether the plan checks rows, regions and duties while its layers run
    # Whether a token's other weights are raised to make up for experts that were lost with their ranks.
    renormalize_dropped: bool = False
    # The most rows that a rank receives in one pass of a batch; None: all that may come.
    max_rows: int | None = None
    # The multiprocessors of a GPU that the exchange of one rank takes, at most; None: as many as are free.
    sms: int | None = None
    exchange_reason: str | None = None  # why this exchange was chosen; None: it was named
    training: bool = False  # whether the weights of its layers are parameters, and calls have a backward
    dtensors: bool = False  # whether these parameters are DTensors, on the mesh of the ranks

    def on_hosts(self, hosts: tuple[int, ...]) -> Draft:
        """The same draft with the host of each rank, for an exchange that sums inside each host first."""
        return replace(self, wirings=tuple(_with(wiring, hosts=hosts) for wiring in self.wirings))

    @property
    def exchange_specs(self) -> list[ExchangeSpec]:
        """All round trips that the exchange serves: those of the layers, then in a training plan of their gradients."""
        gradients = [w.gradients.exchange_spec for w in self.wirings if w.gradients is not None]
        return [wiring.exchange_spec for wiring in self.wirings] + gradients

    @property
    def specs(self) -> list[LayerSpec]:
        """The specs of all layers, each with the `max_tokens` that it was planned with."""
        return [replace(wiring.spec, max_tokens=wiring.exchange_spec.max_tokens) for wiring in self.wirings]

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `plan` other than layers and exchange, as plain values: a plan that changes keeps them."""
        names = ("in_flight", "max_rows", "sms", "paranoid", "renormalize_dropped", "training")
        return {name: getattr(self, name) for name in names}

    @property
    def dispatch_bytes(self) -> int:
        """The largest dispatch region of any layer, on one rank."""
        return max(self.exchange.region_bytes(spec).dispatch for spec in self.exchange_specs)

    @property
    def combine_bytes(self) -> int:
        """The largest combine region of any layer, on one rank."""
        return max(self.exchange.region_bytes(spec).combine for spec in self.exchange_specs)

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that one rank holds for rows in flight, whichever layer is running."""
        return (self.dispatch_bytes + self.combine_bytes) * self.in_flight

    @property
    def scratch_bytes(self) -> int:
        """The most bytes that the experts of a rank use in a call for converted weights, whichever layer is running."""
        ranks = range(self.world)
        return max(
            wiring.experts.scratch_bytes(wiring.experts_spec(rank))
            for wiring in self.wirings
            for rank in ranks
        )

    def fields(self) -> dict[str, Any]:
        """All that ranks compare, as plain values in one flat dictionary."""
        flat: dict[str, Any] = {
            "protocol": PROTOCOL,
            "world": self.world,
            "exchange": self.exchange.name,
            **self.settings,
            "DTensors": self.dtensors,
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
            row = describe_wiring(wiring, self.exchange.region_bytes)
            distinct.setdefault(json.dumps(row), {"layers": [], **row})["layers"].append(wiring.spec.name)
        return list(distinct.values())

    def __str__(self) -> str:
        sms = (
            ""
            if self.sms is None
            else f", {count(self.sms, 'multiprocessor')} of a GPU for the exchange (sms)"
        )
        lines = [
            f"plan of {count(len(self.wirings), 'layer')} on {count(self.world, 'rank')}, exchange "
            f"{self.exchange.name}{chosen(self.exchange_reason)}, {self.in_flight} in flight{sms}"
            + (", paranoid" if self.paranoid else "")
            + (", training" if self.training else "")
        ]
        for row in self.rows():
            lines += lines_of_row(row)
        lines.append(
            f"  all layers share {size(self.workspace_bytes)} a rank "
            f"(largest out {size(self.dispatch_bytes)} + largest back {size(self.combine_bytes)})"
        )
        if self.scratch_bytes:
            lines.append(
                f"  in long batches their experts share {size(self.scratch_bytes)} more, for weights as e4m3"
            )
        return "\n".join(lines)


def draft(
    layers: Sequence[LayerSpec],
    world: int,
    *,
    exchange: str | type[Transport] = AUTO,
    max_tokens: int | None = None,
    in_flight: int = 1,
    max_rows: int | None = None,
    sms: int | None = None,
    paranoid: bool = False,
    training: bool = False,
    device: torch.device | None = None,
) -> Draft:
    """What a plan would be on `world` ranks, without a group. Raises what `plan` would raise.

    The other arguments are those of `plan`. `device` is where the rows of the ranks live; without it, it is not checked
    whether the experts run there.
    """
    return draft_ignoring_env(
        layers,
        world,
        exchange=os.environ.get(EXCHANGE_VARIABLE) or exchange,
        max_tokens=max_tokens,
        in_flight=in_flight,
        max_rows=max_rows,
        sms=sms,
        paranoid=_is_paranoid(paranoid),
        training=training,
        device=device,
    )


def draft_ignoring_env(
    layers: Sequence[LayerSpec],
    world: int,
    *,
    exchange: str | type[Transport],
    max_tokens: int | None = None,
    in_flight: int,
    max_rows: int | None = None,
    sms: int | None = None,
    paranoid: bool,
    renormalize_dropped: bool = False,
    training: bool = False,
    device: torch.device | None,
) -> Draft:
    """`draft` without environment variables: an existing plan that changes keeps the settings that it was made with."""
    layers = _check_layers(layers)
    _check_counts(world=(world, MOST_RANKS), in_flight=(in_flight, _MOST_IN_FLIGHT))
    _check_max_rows(max_rows, world)
    if sms is not None:
        _check_counts(sms=(sms, _MOST_SMS))
    wire = partial(
        wire_layer,
        world=world,
        max_tokens=max_tokens,
        max_rows=max_rows,
        device=device,
        num_layers=len(layers),
        training=_is_training(training),
    )

    @cache
    def wired_by(exchange: type[Transport], index: int) -> Wiring | Reason:
        return wire(layers[index], index=index, exchange=exchange)

    def refusal(exchange: type[Transport]) -> Reason | None:
        """None, or why an exchange cannot serve one of the layers."""
        try:
            wired = [wired_by(exchange, index) for index in range(len(layers))]
        except TokenyardError:
            return None  # the error is raised below, with the layer's name, when the layer is wired
        return next((reason for reason in wired if isinstance(reason, Reason)), None)

    exchange_reason = None
    if isinstance(exchange, str) and exchange == AUTO:
        chosen, exchange_reason = choose_exchange(refusal, world, device, why="if the ranks share memory")
    else:
        chosen = resolve_exchange(exchange)
    wirings: list[Wiring] = []
    for index, spec in enumerate(layers):
        try:
            wired = wired_by(chosen, index)
            if isinstance(wired, Reason):
                found = alternatives(layers, index, world, chosen, wire, wired)
                raise PlanError(
                    str(wired),
                    expected="a layer that its exchange, formats and experts all support",
                    fix="" if found else f"change `{wired.field}` of the LayerSpec",
                    alternatives=found,
                )
            if (
                renormalize_dropped
                and wired.exchange_spec.carries_logits
                and wired.exchange_spec.placement.lost_experts
            ):
                raise PlanError(
                    "its experts route by themselves, and would not renormalize",
                    expected="experts that take routes, where weights are to make up for lost experts",
                    fix="go on without renormalize=True",
                )
        except TokenyardError as error:  # the `PlanError` above, or an unknown name
            error.at(layer=spec.name)
            raise
        wirings.append(_with(wired, renormalizes_dropped=renormalize_dropped, checksummed=paranoid))
    drafted = Draft(
        world=world,
        exchange=chosen,
        in_flight=in_flight,
        wirings=tuple(wirings),
        paranoid=paranoid,
        renormalize_dropped=renormalize_dropped,
        max_rows=max_rows,
        sms=sms,
        exchange_reason=exchange_reason,
        training=training,
    )
    _check_bytes(drafted)
    return drafted


def _with(wiring: Wiring, **changes: Any) -> Wiring:
    """A wiring with these changes of its round trips: that of rows, and that of gradients."""
    gradients = wiring.gradients
    if gradients is not None:
        gradients = replace(gradients, exchange_spec=replace(gradients.exchange_spec, **changes))
    return replace(wiring, exchange_spec=replace(wiring.exchange_spec, **changes), gradients=gradients)


def _is_training(asked: object) -> bool:
    if not isinstance(asked, bool):
        raise InputError(f"training={shown(asked)}", expected="True or False", fix="pass training=True")
    return asked


def _is_paranoid(asked: object) -> bool:
    """Whether the caller or the environment wants a paranoid plan."""
    said = os.environ.get(PARANOID_VARIABLE, "")
    if not isinstance(asked, bool) or said not in ("", "0", "1"):
        found = f"paranoid={shown(asked)} and {PARANOID_VARIABLE}={shown(said)}"
        raise InputError(
            found,
            expected="True or False, and 1 or 0",
            fix=f"pass paranoid=True, or set {PARANOID_VARIABLE}=1",
        )
    return asked or said == "1"


def _check_layers(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The layers as a list; raises unless each is a layer with a name of its own."""
    expected, fix = "at least one LayerSpec, and nothing else", "pass [LayerSpec(...), ...]"
    try:
        layers = list(layers)
    except TypeError as error:
        raise InputError(f"layers is {shown(layers)}", expected=expected, fix=fix) from error
    wrong = [spec for spec in layers if not isinstance(spec, LayerSpec)]
    if wrong or not layers:
        found = f"layers holds a {type(wrong[0]).__name__}" if wrong else "layers is empty"
        raise InputError(found, expected=expected, fix=fix)
    for spec in layers:
        if not isinstance(spec.name, str):
            raise PlanError(
                f"name={shown(spec.name)}: must be a name", expected="a string", fix="name it 'moe', say"
            )
    names = Counter(spec.name for spec in layers)
    if twice := sorted(name for name, times in names.items() if times > 1):
        raise InputError(
            f"{len(layers)} layers share {len(names)} names: {', '.join(twice)} stands more than once",
            expected="a name of its own for each layer",
            fix="number them: 'model.layers.0.mlp', 'model.layers.1.mlp', …",
        )
    return layers


def _check_counts(**counts: tuple[object, int]) -> None:
    """Raise unless each argument, given as (value, most), is a whole number from 1 to `most`."""
    for name, (value, most) in counts.items():
        if not is_size(value, most=most):
            raise InputError(
                f"{name} is {shown(value)}",
                expected=f"a whole number from 1 to {most} (≥ 1)",
                fix=f"pass such a number as {name}",
            )


def _check_max_rows(max_rows: object, world: int) -> None:
    """Raise unless `max_rows` allows one row from each rank: with less, a pass might move nothing."""
    if max_rows is not None and not (is_size(max_rows) and cast(int, max_rows) >= world):
        raise InputError(
            f"max_rows is {shown(max_rows)}",
            expected=f"a whole number of at least {world}, one row of each rank, or None",
            fix="pass the rows that a rank mostly receives, tokens of all ranks · K / W, and some more",
        )


def _check_bytes(drafted: Draft) -> None:
    """Raise if the workspace is larger than any machine's: each size may be valid, but not all of them together."""
    if drafted.workspace_bytes <= _LARGEST_WORKSPACE:
        return
    most = max(drafted.wirings, key=lambda wiring: sum(_regions(drafted.exchange, wiring)))
    needed = size(sum(_regions(drafted.exchange, most)))
    raise PlanError(
        f"max_tokens={most.exchange_spec.max_tokens}: rows of this layer would take {needed} "
        f"on a rank, and those of all layers {size(drafted.workspace_bytes)}",
        expected=f"at most {size(_LARGEST_WORKSPACE)}, all that a process can address",
        fix="bound what a rank receives at a time, plan(..., max_rows=…), or plan for fewer tokens, ranks, or "
        "dispatches in flight, and check the sizes of the layer",
        layer=most.spec.name,
    )


def _regions(exchange: type[Transport], wiring: Wiring) -> tuple[int, int]:
    specs = [wiring.exchange_spec]
    if wiring.gradients is not None:
        specs.append(wiring.gradients.exchange_spec)
    nbytes = [exchange.region_bytes(spec) for spec in specs]
    return max(need.dispatch for need in nbytes), max(need.combine for need in nbytes)
