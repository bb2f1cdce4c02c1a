"""Plans: the checked wiring of all layers, agreed on by all ranks, before the first token.

    plan(layers, group, exchange="one_sided", max_tokens=512)

1. resolves every layer's wiring, or raises `PlanError` with choices that do work (each was tried);
2. computes the bytes that serve all layers: the largest dispatch region, the largest combine region;
3. compares itself across the group: ranks that disagree **all** raise `PlanMismatch`, nobody hangs. An error
   on one rank reaches the others too.

The first half without a group is a draft (`tokenyard.planning.drafting`).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenyard.errors import (
    Alternative,
    HandleError,
    InputError,
    PeerFailed,
    PlanError,
    PlanMismatch,
    Reason,
    TokenyardError,
    shown,
    unknown_name,
)
from tokenyard.exchange import EXCHANGES, Exchange, ExchangeSpec, Transport, number_hosts
from tokenyard.exchange.stats import LayerStats
from tokenyard.group import READMISSION, Group
from tokenyard.planning.choosing import AUTO, choose_exchange
from tokenyard.planning.drafting import Draft, draft, draft_as_told
from tokenyard.planning.moving import HoldsExperts, in_their_places, moved_weights
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement, balance, imbalance, moves, placement_for, rank_loads
from tokenyard.version import __version__

_log = logging.getLogger("tokenyard")


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """The group and the layers of a plan before ranks were lost. `readmit` restores them."""

    group: Group
    specs: dict[str, LayerSpec]
    lost: tuple[int, ...] = ()
    made_here: bool = False  # whether the group is the plan's own, to be closed by it

    def without(self, lost: Sequence[int]) -> _Whole:
        """The same after further losses; `lost` are ranks as the present group numbers them."""
        left = [rank for rank in range(self.group.size) if rank not in self.lost]
        return replace(self, lost=tuple(sorted({*self.lost, *(left[rank] for rank in lost)})))


class Plan:
    """All layers of a model on one rank, agreed on with the other ranks. Made by `plan`."""

    group: Group  # the ranks that agreed
    exchange: Exchange  # what moves the rows
    draft: Draft  # the wiring of all layers, and its bytes
    # What has the experts of each layer on this rank: the `MoELayer` that was made last.
    layers: weakref.WeakValueDictionary[str, HoldsExperts]

    def __init__(self, draft: Draft, group: Group, plan_id: int) -> None:
        self.layers = weakref.WeakValueDictionary()
        self._whole = _Whole(group=group, specs={spec.name: spec for spec in draft.specs})
        self._start(draft, group, plan_id)

    def _start(self, draft: Draft, group: Group, plan_id: int) -> None:
        self.group = group
        self.exchange = Exchange(
            draft.exchange, group, in_flight=draft.in_flight, plan_id=plan_id, paranoid=draft.paranoid
        )
        self.exchange.serve([wiring.exchange_spec for wiring in draft.wirings])
        self._adopt(draft)
        self.warmup()

    def _adopt(self, draft: Draft) -> None:
        self.draft = draft
        self._wirings = {wiring.spec.name: wiring for wiring in draft.wirings}

    def extend(self, layers: Sequence[LayerSpec], *, max_tokens: int | None = None) -> None:
        """Serve further layers, too. Collective over the group, and over nobody else.

        The workspace is kept where it suffices, else rebuilt for the union of all layers; layers stay valid, and a
        dispatch that was in flight must be made again. If a rank cannot allocate, all raise, and the plan is as it
        was.
        """
        with self.exchange.in_use():
            self._reshape([*self.draft.specs, *layers], max_tokens, self.exchange.serve)

    def trim(self, keep: Sequence[str] | None = None) -> None:
        """Give back what the layers do not need; with `keep`, forget all layers but these. Collective."""
        with self.exchange.in_use():
            for name in keep or ():
                self.wiring(name)
            specs = [spec for spec in self.draft.specs if keep is None or spec.name in keep]
            self._reshape(specs, None, self.exchange.trim)

    def _reshape(
        self,
        specs: Sequence[LayerSpec],
        max_tokens: int | None,
        serve: Callable[[Sequence[ExchangeSpec]], None],
    ) -> None:
        reshaped, _ = self._redraft(self.group, lambda: specs, max_tokens=max_tokens)
        serve([wiring.exchange_spec for wiring in reshaped.wirings])
        self._adopt(reshaped)
        if not self._whole.lost:
            self._whole = replace(self._whole, specs={spec.name: spec for spec in reshaped.specs})
        self.warmup()

    def _redraft(
        self, group: Group, specs: Callable[[], Sequence[LayerSpec]], **changes: Any
    ) -> tuple[Draft, int]:
        """What this plan would be with these layers, agreed on by all ranks of a group."""
        kept: dict[str, Any] = {
            "exchange": self.draft.exchange,
            "in_flight": self.draft.in_flight,
            "paranoid": self.draft.paranoid,
            "renormalize_dropped": self.draft.renormalize_dropped,
        }
        return _agree(
            group, lambda: draft_as_told(specs(), group.size, device=group.device, **(kept | changes))
        )

    def warmup(self) -> None:
        """Compile and load all kernels, before the first one that waits. Collective; a new plan has done so."""
        with self.exchange.in_use():
            self.exchange.warmup([wiring.exchange_spec for wiring in self.draft.wirings])

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """Inside, layers on GPUs wait for nothing, and may be captured in a CUDA graph.

        Experts then get `W · max_tokens` rows, empty ones with ids of -1. `max_tokens`: of any rank, in these calls;
        the same on every rank. What goes wrong is raised by a later call, or by `synchronize`.
        """
        return self.exchange.fixed_shapes(max_tokens)

    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong in calls that did not."""
        self.exchange.synchronize()

    def go_on_without(self, lost: Sequence[int], *, renormalize: bool = False) -> None:
        """Serve all layers on the ranks that are left. Collective over these, after `PeerLost`.

        Ranks are renumbered in their order. What exchanges share is made anew: a lost rank that wakes up finds
        nothing to write into. Experts that were lost, and have no replica elsewhere, are dropped from the routes and
        counted (`stats`); with `renormalize` a token's other weights make up for them. Experts that route by
        themselves leave lost ones out, uncounted, and cannot renormalize.
        """
        self.exchange.check_open()
        lost = self._check_lost(lost)
        survivors = [rank for rank in range(self.group.size) if rank not in lost]
        group = self.group.subgroup(survivors)

        def specs() -> list[LayerSpec]:
            return [
                replace(spec, placement=wiring.exchange_spec.placement.without(lost))
                for spec, wiring in zip(self.draft.specs, self.draft.wirings, strict=True)
            ]

        reduced, number = self._redraft(group, specs, renormalize_dropped=renormalize)
        self._move(reduced, group, number, self._whole.without(lost))

    def _check_lost(self, lost: Sequence[int]) -> list[int]:
        """The lost ranks; raise unless they are other ranks of the present group."""
        size, mine = self.group.size, self.group.rank
        if wrong := [rank for rank in lost if rank not in range(size) or rank == mine]:
            raise InputError(
                f"rank {shown(wrong[0])} among those that are lost",
                expected=f"ranks from 0 to {size - 1}, other than {mine}, which asks",
                fix="pass the `peers` of the PeerLost that this plan raised: after a loss, ranks are renumbered",
                rank=mine,
            )
        return list(lost)

    def readmit(
        self, lost: Sequence[int] = (), *, group: Group | None = None, seconds: float = READMISSION
    ) -> None:
        """Serve all layers on all ranks again, fresh ones in the places of the lost. Collective over all of these.

        The ranks that are left call this: after `go_on_without`, or at once with the ranks that `PeerLost` names. A
        fresh process calls `rejoin(group.address, rank=…)`, makes the same plan, and loads the same weights. Then
        every result is bitwise what it was before. If nobody comes within so many seconds, `PeerLost` says who is
        missing, and the plan is as it was.

        `group` is for several plans of one group: call `group.readmit` once, and pass the new group to each plan, in
        the order in which they were made. It is also the way for groups that cannot readmit (NCCL).
        """
        self.exchange.check_open()
        whole = self._whole.without(self._check_lost(lost))
        if added := [spec.name for spec in self.draft.specs if spec.name not in whole.specs]:
            raise PlanError(
                f"layer {added[0]!r} was added while ranks {list(self._whole.lost)} were lost",
                expected="layers whose experts were placed on all ranks",
                fix=f"forget it (`plan.trim(keep=…)` without {', '.join(map(repr, added))}), readmit, add it anew",
                rank=self.group.rank,
            )
        everybody = group or whole.group.readmit(whole.lost, seconds=seconds)
        # A fresh rank loads its libraries and its weights, and only then makes its plan.
        with everybody.patience(seconds):
            restored, number = self._redraft(
                everybody, lambda: [whole.specs[spec.name] for spec in self.draft.specs]
            )
        restored_whole = replace(whole, group=everybody, lost=(), made_here=group is None)
        self._move(restored, everybody, number, restored_whole)

    def _move(self, agreed: Draft, group: Group, number: int, whole: _Whole) -> None:
        """Serve what was agreed on with another group. Nothing that was shared with the old one is used again."""
        self.exchange.close()
        old = self._whole
        if self.group is not old.group:
            self.group.close()  # the plan made it, of the ranks that were left
        if old.made_here and old.group is not whole.group:
            old.group.close()
        self._whole = whole
        self._start(agreed, group, _plan_id(agreed, number))

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        if layer not in self._wirings:
            raise unknown_name("layer of this plan", layer, self._wirings).at(rank=self.group.rank)
        return self._wirings[layer]

    def local_experts(self, layer: str) -> list[int]:
        """The global ids of the experts of a layer that this rank owns, in the order of its weights."""
        return list(self.wiring(layer).exchange_spec.placement.local_experts(self.group.rank))

    def stats(self) -> dict[str, LayerStats]:
        """What this rank has sent, received and waited, by layer."""
        return self.exchange.stats

    def gather_stats(self) -> list[dict[str, dict[str, Any]]]:
        """`stats` of every rank, as plain values, in rank order. Collective over the group."""
        with self.exchange.in_use():
            mine = {layer: stats.as_dict() for layer, stats in self.stats().items()}
            return self.group.gather_json(mine, phase="gather_stats")

    def load(self, *, reset: bool = False) -> dict[str, list[int]]:
        """By layer, how many choices of all ranks' tokens fell on each expert. Collective over the group.

        Dispatches are counted since the plan was made, or since the last call with `reset`. Layers whose experts route
        by themselves are left out: only these experts know their choices. Where a call reads no values (`one_sided` on
        GPUs), ids are not checked before they travel, and nothing is counted.
        """
        if not self.exchange.transport.reads_values:
            raise HandleError(
                f"the load of {self.exchange.transport.name} on {self.group.device.type} was asked for",
                expected="an exchange whose calls read the ids of a batch",
                fix="record routes (docs/guide/balancing.md), or plan with exchange='two_sided'",
                rank=self.group.rank,
            )
        with self.exchange.in_use():
            mine = {
                wiring.spec.name: self.exchange.load.of(wiring.spec.name)
                for wiring in self.draft.wirings
                if not wiring.exchange_spec.carries_logits
            }
            by_rank = self.group.gather_json(mine, phase="load")
            if reset:
                self.exchange.load.reset()
        return {
            layer: [sum(counts) for counts in zip(*(r[layer] for r in by_rank), strict=True)]
            for layer in mine
        }

    def rebalance(
        self, placements: Mapping[str, str | Placement] | None = None, *, threshold: float = 1.1
    ) -> dict[str, Placement]:
        """Move experts to other ranks, and serve the new placements from the next call on. Collective, on CPUs.

        `placements` are those that layers shall have, by layer. Without them each layer whose busiest rank has more
        than `threshold` times the mean load gets the one that `balance` finds for the load since the last time. Returns
        the placements of the layers that moved. Layers move one after another; a rank that is lost on the way leaves
        the others with the old placement of its layer, and `PeerLost`. `stats` has the pause of each switch.
        """
        if self.group.device.type != "cpu":
            raise InputError(
                f"rebalance on {self.group.device}",
                expected="ranks on CPUs: captured CUDA graphs would keep the old placement",
                fix="make a new plan with LayerSpec(placement=…)",
                rank=self.group.rank,
            )
        wanted = self._balanced(threshold) if placements is None else dict(placements)
        with self.exchange.in_use():
            agreed, _ = self._redraft(self.group, lambda: self._specs_with(wanted))
            moved = {}
            for index, wiring in enumerate(agreed.wirings):
                placement = wiring.exchange_spec.placement
                if placement != self.draft.wirings[index].exchange_spec.placement:
                    self._move_experts(index, wiring)
                    moved[wiring.spec.name] = placement
        return moved

    def _specs_with(self, placements: Mapping[str, str | Placement]) -> list[LayerSpec]:
        """The layers of this plan, some of them with other placements."""
        wanted = {}
        for name, placement in placements.items():
            spec = self.wiring(name).exchange_spec
            if spec.placement.lost_experts:
                raise PlanError(
                    f"experts {shown(spec.placement.lost_experts)} were lost with their ranks",
                    expected="ranks that hold all experts of the layer",
                    fix="readmit the ranks that were lost first",
                    layer=name,
                )
            then = placement_for(placement, spec.num_experts, self.group.size)
            wanted[name] = in_their_places(spec.placement, then)
        return [replace(spec, placement=wanted.get(spec.name, spec.placement)) for spec in self.draft.specs]

    def _balanced(self, threshold: float) -> dict[str, str | Placement]:
        """A placement for each layer whose load is more uneven than that, from the counts of all ranks."""
        found: dict[str, str | Placement] = {}
        for name, load_E in self.load(reset=True).items():
            present = self.wiring(name).exchange_spec.placement
            if not present.lost_experts and imbalance(rank_loads(load_E, present)) > threshold:
                better = balance(load_E, present)
                if imbalance(rank_loads(load_E, better)) < imbalance(rank_loads(load_E, present)):
                    found[name] = better
        return found

    def _move_experts(self, index: int, wiring: Wiring) -> None:
        """Move the experts of one layer, and serve its new wiring."""
        name, layer = wiring.spec.name, self.layers.get(wiring.spec.name)
        present, wanted = self.wiring(name).exchange_spec.placement, wiring.exchange_spec.placement
        held = None if layer is None else layer.experts.weights
        weights = moved_weights(self.group, name, held, present, wanted)
        assert layer is not None
        started = time.monotonic()
        layer.switch(wiring, weights)
        wirings = list(self.draft.wirings)
        wirings[index] = wiring
        switched = replace(self.draft, wirings=tuple(wirings))
        self.exchange.serve([w.exchange_spec for w in wirings])
        self._adopt(switched)
        if not self._whole.lost:
            self._whole = replace(self._whole, specs={spec.name: spec for spec in switched.specs})
        came = sum(move.target == self.group.rank for move in moves(present, wanted))
        self.stats()[name].count_switch(came, time.monotonic() - started)

    def close(self) -> None:
        """Give the memory back. Every later call of this plan raises; the group stays usable."""
        self.exchange.close()

    def __str__(self) -> str:
        return str(self.draft)


def plan(
    layers: Sequence[LayerSpec],
    group: Group,
    *,
    exchange: str | type[Transport] = AUTO,
    max_tokens: int | None = None,
    in_flight: int = 1,
    paranoid: bool = False,
) -> Plan:
    """Check the layers, agree with the other ranks of the group, and set up the exchange. Collective.

    `exchange` is a name of `EXCHANGES`, `local`, or a class. `auto` takes `local` on one CPU rank, `one_sided` where
    the ranks share memory, `hierarchical` where they do so inside hosts, else the next one that reaches all of them.
    `max_tokens` is the most tokens that a rank brings in one call, for layers that do not set their own. `in_flight`
    dispatches may wait for their combine at a time.

    `TOKENYARD_EXCHANGE` in the environment overrides `exchange`. A `paranoid` plan watches every row, region and duty
    while its layers run, and raises `Corrupted` when one is not what it must be; `TOKENYARD_PARANOID=1` in the
    environment asks for it, too.

    >>> from tokenyard import LayerSpec, launch, plan
    >>> moe = LayerSpec(name="moe", hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, wire="nvfp4")
    >>> head = LayerSpec(name="head", hidden_size=48, intermediate_size=16, num_experts=3, top_k=1)
    >>> print(launch(2, lambda group: str(plan([moe, head], group, max_tokens=16)))[0])
    plan of 2 layers on 2 ranks, exchange one_sided (auto: the ranks share memory), 1 in flight
      moe: H 64, I 32, E 8, K 2; grouped (auto: on CPUs), bf16 weights, 8 experts on 2 ranks, contiguous
        wire nvfp4 (56 bytes a row), back bf16 (128); up to 16 tokens a rank
        quantize: sender, weight: experts, reduce experts: experts, reduce ranks: exchange
        at most 1.8 KB out + 4.1 KB back on a rank
      head: H 48, I 16, E 3, K 1; grouped (auto: on CPUs), bf16 weights, 3 experts on 2 ranks, contiguous
        wire bf16 (104 bytes a row), back bf16 (96); up to 16 tokens a rank
        weight: experts, reduce experts: experts, reduce ranks: exchange
        at most 3.3 KB out + 3.1 KB back on a rank
      all layers share 7.4 KB a rank (largest out 3.3 KB + largest back 4.1 KB)
    """

    if not isinstance(group, Group):
        raise InputError(
            f"the group is {shown(group)}",
            expected="a Group: each rank makes the plan with its own",
            fix="call plan inside a function that `launch` runs on every rank, or pass DistributedGroup()",
        )

    def make() -> Draft:
        return draft(
            layers,
            group.size,
            exchange=exchange,
            max_tokens=max_tokens,
            in_flight=in_flight,
            paranoid=paranoid,
            device=group.device,
        )

    return plan_draft(make, group)


def plan_draft(make: Callable[[], Draft], group: Group) -> Plan:
    """The plan of a draft that every rank makes for itself: `plan`, where the draft is needed before. Collective."""
    agreed, number = _agree(group, make)
    made = Plan(agreed, group, _plan_id(agreed, number))
    if group.rank == 0:
        _log.info("%s", made)
    return made


def wiring_in(plan: object, layer: str) -> Wiring:
    """The wiring of a layer of a plan; raise unless it is an open plan."""
    if not isinstance(plan, Plan):
        raise InputError(
            f"the plan of layer {shown(layer)} is {shown(plan)}",
            expected="a Plan, which all ranks have agreed on",
            fix="pass plan(layers, group, …), and the name of the layer after it",
        )
    plan.exchange.check_open()
    return plan.wiring(layer)


def _plan_id(agreed: Draft, number: int) -> int:
    """The same on all ranks, and different for each plan of a group."""
    return (agreed.fingerprint() + number) & (2**63 - 1)


def _agree(group: Group, make: Callable[[], Draft]) -> tuple[Draft, int]:
    """Make a draft on every rank and compare: one that all ranks made, or an error on every rank."""
    drafted: Draft | None = None
    error: Exception | None = None
    fields: dict[str, Any] = {}
    try:
        drafted = make()
        fields = drafted.fields()
    except Exception as raised:
        error = raised.at(rank=group.rank) if isinstance(raised, TokenyardError) else raised
    number = group.count_plan()
    fields = {"plans made": number, **fields}
    report = {
        "host": group.host(),
        "version": __version__,
        "torch": str(torch.__version__),
        "error": f"{type(error).__name__}: {error}" if error else None,
        "fields": fields,
    }
    # A rank of another version may report other things.
    by_rank = [
        {"host": "", "version": None, "torch": None, "error": None, "fields": {}} | other
        for other in group.gather_json(report, phase="agreement on the plan")
    ]
    if error is not None:
        raise error
    assert drafted is not None
    for rank, other in enumerate(by_rank):
        if other["error"] is not None:
            raise PeerFailed(rank, other["error"], phase="plan", rank=group.rank)
    # Another tokenyard may move or round rows otherwise. Another torch computes the same up to rounding.
    differences = _differences(["version"], [{"version": other["version"]} for other in by_rank])
    differences |= _differences(fields, [other["fields"] for other in by_rank])
    if differences:
        raise PlanMismatch(differences, rank=group.rank)
    for by_torch in _differences(["torch"], [{"torch": other["torch"]} for other in by_rank]).values():
        versions = ", ".join(f"rank {rank} has torch {version}" for rank, version in by_torch.items())
        _log.warning("the ranks of group %r run different versions: %s", group.name, versions)
    return _check_reach(drafted, group, [other["host"] for other in by_rank]), number


def _check_reach(drafted: Draft, group: Group, hosts: list[str]) -> Draft:
    """A draft whose exchange reaches all ranks, and can be watched if it must; or all ranks raise the same.

    Where the exchange was not named, another one is taken if need be.
    """
    exchange_specs = [wiring.exchange_spec for wiring in drafted.wirings]

    def refusal(exchange: type[Transport]) -> Reason | None:
        reason = exchange.reaches(group, hosts) or (exchange.watches(group) if drafted.paranoid else None)
        # The class that does the work on this group's devices may support less.
        return reason or next(filter(None, map(exchange.on(group.device).supports, exchange_specs)), None)

    if drafted.exchange_reason is not None:
        chosen, why = choose_exchange(
            lambda exchange: refusal(exchange) or exchange.pays(hosts), group.size, group.device
        )
        if chosen is not drafted.exchange:
            drafted = draft_as_told(
                drafted.specs,
                drafted.world,
                exchange=chosen,
                in_flight=drafted.in_flight,
                paranoid=drafted.paranoid,
                renormalize_dropped=drafted.renormalize_dropped,
                device=group.device,
            )
        drafted = replace(drafted, exchange_reason=why)
    reason = refusal(drafted.exchange)
    if reason is None:
        return drafted.on_hosts(number_hosts(hosts)) if drafted.exchange.sums_in_hosts else drafted
    others = [
        Alternative(changes={"exchange": name}) for name, cls in EXCHANGES.items() if refusal(cls) is None
    ]
    raise PlanError(
        str(reason),
        expected="an exchange that reaches all ranks of the group, and supports its layers there"
        + (", and can be watched" if drafted.paranoid else ""),
        fix="" if others else reason.why,
        rank=group.rank,
        alternatives=others,
    )


def _differences(first: Iterable[str], by_rank: list[dict[str, Any]]) -> dict[str, dict[int, Any]]:
    """The fields that differ, some first, with every rank's value. A field that a rank lacks is None there."""
    names = dict.fromkeys([*first, *(name for fields in by_rank for name in fields)])
    values = {name: {rank: fields.get(name) for rank, fields in enumerate(by_rank)} for name in names}
    return {
        name: ranks for name, ranks in values.items() if any(value != ranks[0] for value in ranks.values())
    }
