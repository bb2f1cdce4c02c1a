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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from tokenyard.errors import (
    Drifted,
    HandleError,
    InputError,
    PeerFailed,
    PeerLost,
    PlanBroken,
    PlanError,
    shown,
    unknown_name,
)
from tokenyard.exchange import Exchange, ExchangeSpec, Transport
from tokenyard.exchange.stats import LayerStats
from tokenyard.group import READMISSION, Group, make_together
from tokenyard.planning.agreement import agree_on_draft, make_plan_id
from tokenyard.planning.choosing import AUTO
from tokenyard.planning.drafting import Draft, draft, draft_as_told
from tokenyard.planning.moving import Carrier, steps
from tokenyard.planning.rebalancing import HoldsExperts, Progress, Rebalance, failure_of
from tokenyard.planning.spec import LayerSpec, is_size
from tokenyard.planning.surviving import check_survives
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement, balance, imbalance, placement_for, rank_loads

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


@dataclass(kw_only=True)
class _Autobalance:
    """When a plan looks at its load by itself."""

    every: int  # calls of layers between two looks
    threshold: float  # the busiest rank over the mean, above which experts move
    seen: int  # the calls up to the last look


class Plan:
    """All layers of a model on one rank, agreed on with the other ranks. Made by `plan`."""

    group: Group  # the ranks that agreed
    exchange: Exchange  # what moves the rows
    draft: Draft  # the wiring of all layers, and its bytes
    # What has the experts of each layer on this rank: the `MoELayer` that was made last.
    layers: weakref.WeakValueDictionary[str, HoldsExperts]

    def __init__(self, draft: Draft, group: Group, plan_id: int, *, survive: bool = False) -> None:
        self.survive = survive  # whether a call goes on where a rank is lost in it
        self._calls = 0  # of layers that have ended well, where losses are survived
        self.layers = weakref.WeakValueDictionary()
        self._move: Rebalance | None = None  # the one under way
        self._last_move: Rebalance | None = None
        self._auto: _Autobalance | None = None
        self._whole = _Whole(group=group, specs={spec.name: spec for spec in draft.specs})
        self._start(draft, group, plan_id)

    def _start(self, draft: Draft, group: Group, plan_id: int) -> None:
        self.group = group
        self.exchange = Exchange(
            draft.exchange, group, in_flight=draft.in_flight, plan_id=plan_id, paranoid=draft.paranoid
        )
        self._carrier = Carrier(group)  # of experts that move
        self._switches = 0  # of placements, since the ranks of this group have agreed
        # Weakly: memory of a plan that is gone is given back at once.
        notice, noticed = weakref.WeakMethod(self._notice), weakref.WeakMethod(self._noticed)
        self.exchange.notice = lambda: call() if (call := notice()) else 0
        self.exchange.noticed = lambda notices: call(notices) if (call := noticed()) else None
        self.exchange.serve([wiring.exchange_spec for wiring in draft.wirings])
        self._adopt(draft)
        for stats in self.exchange.stats.values():
            stats.lost = list(self._whole.lost)
        if self._auto is not None:
            self._auto.seen = 0
        self.warmup()

    def _adopt(self, draft: Draft) -> None:
        self.draft = draft
        self._wirings = {wiring.spec.name: wiring for wiring in draft.wirings}

    def extend(self, layers: Sequence[LayerSpec], *, max_tokens: int | None = None) -> None:
        """Serve further layers, too, with the plan's `max_rows`. Collective over the group, and over nobody else.

        The workspace is kept where it suffices, else rebuilt for the union of all layers; layers stay valid, and a
        dispatch that was in flight must be made again. If a rank cannot allocate, all raise, and the plan is as it
        was.
        """
        self._check_still("extend")
        with self.exchange.in_use():
            self._reshape([*self.draft.specs, *layers], max_tokens, self.exchange.serve)

    def trim(self, keep: Sequence[str] | None = None) -> None:
        """Give back what the layers do not need; with `keep`, forget all layers but these. Collective."""
        self._check_still("trim")
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
            "max_rows": self.draft.max_rows,
            "paranoid": self.draft.paranoid,
            "renormalize_dropped": self.draft.renormalize_dropped,
        }
        return agree_on_draft(
            group,
            lambda: draft_as_told(specs(), group.size, device=group.device, **(kept | changes)),
            survive=self.survive,
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
        self._settle_move(group)

        def specs() -> list[LayerSpec]:
            return [
                replace(spec, placement=wiring.exchange_spec.placement.without(lost))
                for spec, wiring in zip(self.draft.specs, self.draft.wirings, strict=True)
            ]

        reduced, number = self._redraft(group, specs, renormalize_dropped=renormalize)
        self._restart(reduced, group, number, self._whole.without(lost))

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that are gone, as the whole group numbered them."""
        return self._whole.lost

    def count_call(self) -> None:
        """One more call of a layer has ended well on this rank."""
        self._calls += 1

    def go_on_after(self, loss: PeerLost, layer: str) -> None:
        """Go on without ranks that were lost in a call of a layer, which this rank then makes again; or raise the loss.

        Collective over the ranks that are left. Some of them may have finished that call, and be in the next one: they
        take part in the others' once more, without rows.
        """
        if (
            not self.survive
            or isinstance(loss, PlanBroken)
            or not loss.peers
            or self.group.rank in loss.peers
        ):
            raise loss
        if any(w.exchange_spec.placement.without(loss.peers).lost_experts for w in self.draft.wirings):
            raise loss  # some experts had no other copy any more
        self.go_on_without(loss.peers)
        told = self.group.gather_json([self._calls, layer], phase="after a loss")
        furthest = max(calls for calls, _ in told)
        behind = [name for calls, name in told if calls < furthest]
        if behind and self._calls == furthest:
            self.layers[behind[0]].take_part()

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
        if self._check_lost(lost):
            left = self.group.subgroup([rank for rank in range(self.group.size) if rank not in lost])
            self._settle_move(left)
            left.close()
        whole = self._whole.without(lost)
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
        self._restart(restored, everybody, number, restored_whole)

    def _restart(self, agreed: Draft, group: Group, number: int, whole: _Whole) -> None:
        """Serve what was agreed on with another group. Nothing that was shared with the old one is used again."""
        self._close_carrier()
        self.exchange.close()
        old = self._whole
        if self.group is not old.group:
            self.group.close()  # the plan made it, of the ranks that were left
        if old.made_here and old.group is not whole.group:
            old.group.close()
        self._whole = whole
        self._start(agreed, group, make_plan_id(agreed, number))

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
        by themselves are left out: only these experts know their choices.
        """
        if not self.exchange.counts_choices:
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
        self,
        placements: Mapping[str, str | Placement] | None = None,
        *,
        threshold: float = 1.1,
        wait: bool = True,
    ) -> Rebalance:
        """Move experts to other ranks, and serve the new placements. Collective, on CPUs.

        `placements` are those that layers shall have, by layer. Without them each layer whose busiest rank has more
        than `threshold` times the mean load gets the one that `balance` finds for the load since the last time, with
        as many copies of hot experts as there is memory for. Experts come through memory that layers declare
        (`LayerSpec.spare_experts`).

        With `wait=False` it returns at once, and experts move while the layers are called; then all ranks switch
        between two calls. A rank that is lost on the way leaves the others with the placements that they had, and
        `PeerLost`. `stats` has the pause of each switch.
        """
        self._check_can_move()
        self._check_still("rebalance")
        with self.exchange.in_use():
            slots = self._slots(list(placements or ()))
            wanted = self._balanced(threshold, slots) if placements is None else dict(placements)
            agreed, _ = self._redraft(self.group, lambda: self._specs_with(wanted))
            present = {name: wiring.exchange_spec.placement for name, wiring in self._wirings.items()}
            goals = {wiring.spec.name: wiring.exchange_spec.placement for wiring in agreed.wirings}
            ways = {
                name: steps(present[name], goal, slots[name])
                for name, goal in goals.items()
                if goal != present[name]
            }
            longest = max(map(len, ways.values()), default=0)
            self._begin_move(
                Rebalance(
                    self.group,
                    self._carrier,
                    {name: self.layers[name] for name in ways},
                    {name: present[name] for name in ways},
                    [{name: way[n] for name, way in ways.items() if n < len(way)} for n in range(longest)],
                    finish=self._finish_move,
                    after=self._last_move,
                )
            )
        move = self._last_move
        assert move is not None
        if wait:
            move.wait()
        return move

    def autobalance(self, *, every: int | None, threshold: float = 1.1) -> None:
        """Look at the load after so many calls of layers, again and again, and `rebalance` in the background.

        Collective. `every` counts the calls of all layers together; None ends it. `stats` says what was found, moved
        and gained. Raises where nothing could ever be moved.
        """
        if every is None:
            self._auto = None
            return
        if not is_size(every):
            raise InputError(
                f"every is {shown(every)}",
                expected="a number of calls, from 1; or None, to end it",
                fix="leave it on with every=1000",
                rank=self.group.rank,
            )
        self._check_can_move()
        counted = [
            wiring
            for wiring in self.draft.wirings
            if wiring.spec.spare_experts and not wiring.exchange_spec.carries_logits
        ]
        reason = (
            "one rank has all experts" if self.group.size == 1
            else f"{self.exchange.transport.name} counts no choices" if not self.exchange.counts_choices
            else "no layer that takes routes has memory for further experts" if not counted
            else ""
        )  # fmt: skip
        if reason:
            raise PlanError(
                f"autobalance has nothing to move: {reason}",
                expected="several ranks, and layers that take routes and declare spare_experts",
                fix="declare LayerSpec(spare_experts=2), on several ranks",
                rank=self.group.rank,
            )
        with self.exchange.in_use():
            self.group.agree("autobalance", [every, threshold])
            self._auto = _Autobalance(every=every, threshold=threshold, seen=self.exchange.rounds)

    def between_calls(self) -> None:
        """What a layer calls before each of its calls: experts that have moved are served from then on."""
        move, auto = self._move, self._auto
        if move is not None:
            if move.decision is not Progress.PREPARING and self.exchange.is_between_calls():
                self._conclude(move)
        elif (
            auto is not None
            and self.exchange.rounds >= auto.seen + auto.every
            and self.exchange.is_between_calls()
        ):
            self._look(auto)

    def _look(self, auto: _Autobalance) -> None:
        """Move experts if the load since the last look was uneven. What cannot be moved is said, and serves on."""
        auto.seen = self.exchange.rounds
        try:
            self.rebalance(threshold=auto.threshold, wait=False)
        except PlanError as error:
            _log.warning("autobalance moves nothing: %s", error)
            for stats in self.stats().values():
                stats.moves.refused = str(error)

    def _check_can_move(self) -> None:
        if self.group.device.type != "cpu":
            raise InputError(
                f"rebalance on {self.group.device}",
                expected="ranks on CPUs: captured CUDA graphs would keep the old placement",
                fix="make a new plan with LayerSpec(placement=…)",
                rank=self.group.rank,
            )

    def _check_still(self, what: str) -> None:
        """Raise while experts move. All ranks see the end of a move in the same call."""
        if self._move is not None:
            raise HandleError(
                f"{what} was called while experts move",
                expected="one change of a plan at a time",
                fix="call `wait` on what `plan.rebalance` returned first",
                rank=self.group.rank,
            )

    def _slots(self, named: Sequence[str]) -> dict[str, list[int]]:
        """The experts that each rank has memory for, by layer; a layer that is named must be in use on all ranks."""

        def mine() -> dict[str, int]:
            for name in named:
                self.wiring(name)
                if name not in self.layers:
                    raise PlanError(
                        "no MoELayer of this rank has the experts of this layer",
                        expected="a layer made with this plan, and in use",
                        fix="rebalance layers that exist: plan.rebalance({name: placement})",
                        layer=name,
                    )
            return {name: layer.slots.count for name, layer in self.layers.items()}

        _, by_rank = make_together(
            self.group, "making room for experts", mine, seconds=self.group.deadline, note=lambda made: made
        )
        everywhere = [name for name in self._wirings if all(name in slots for slots in by_rank)]
        return {name: [slots[name] for slots in by_rank] for name in everywhere}

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
            wanted[name] = placement_for(placement, spec.num_experts, self.group.size)
        return [replace(spec, placement=wanted.get(spec.name, spec.placement)) for spec in self.draft.specs]

    def _balanced(self, threshold: float, slots: Mapping[str, list[int]]) -> dict[str, str | Placement]:
        """A placement for each layer whose load is more uneven than that, from the counts of all ranks.

        One slot of each rank stays free: experts of the next move come through it.
        """
        found: dict[str, str | Placement] = {}
        for name, load_E in self.load(reset=True).items():
            spec, stats = self.wiring(name).exchange_spec, self.stats()[name].moves
            present, spare = spec.placement, self.wiring(name).spec.spare_experts
            stats.count_look(now := imbalance(rank_loads(load_E, present)))
            if present.lost_experts or not spare or name not in slots or now <= threshold:
                continue
            usable = [max(count - 1, len(row)) for count, row in zip(slots[name], present.table, strict=True)]
            copies = sum(usable) - spec.num_experts
            better = balance(load_E, present, copies=copies, slots=usable)
            if (then := imbalance(rank_loads(load_E, better))) < now:
                found[name] = better
                stats.imbalance_expected = then
        return found

    # -- A move under way ----------------------------------------------------------------------------------

    def _begin_move(self, move: Rebalance) -> None:
        self._last_move = move
        if not move.is_done:
            self._move = move
            move.start()

    def _notice(self) -> int:
        """What this rank tells in a dispatch: how often placements were switched, and how far its thread is."""
        progress = Progress.PREPARING if self._move is None else self._move.progress
        return self._switches << 2 | progress

    def _noticed(self, notices: Sequence[int]) -> None:
        """Hear from all ranks, in one dispatch, how far they are: all of them decide the same."""
        if any(notice >> 2 != self._switches for notice in notices):
            raise Drifted(
                f"the ranks have switched placements {[notice >> 2 for notice in notices]} times",
                expected="every rank to serve the same placements",
                fix="report it: ranks switch together, or not at all",
                rank=self.group.rank,
            )
        if self._move is not None:
            self._move.decision = _decided([notice & 3 for notice in notices])

    def _finish_move(self, move: Rebalance) -> None:
        """Wait for the thread of every rank, and switch. Collective."""
        while self._move is move:
            with self.exchange.in_use(alone=True):
                if move.decision is Progress.PREPARING:  # no dispatch has told the others yet
                    progress = move.wait_for_thread()
                    words = None if move.error is None else f"{type(move.error).__name__}: {move.error}"
                    told = self.group.gather_json([progress, words], phase="moving experts")
                    move.decision = _decided([other for other, _ in told])
                    if move.decision is Progress.FAILED:
                        move.error = failure_of(self.group.rank, [said for _, said in told], move.error)
                self._conclude(move)

    def _conclude(self, move: Rebalance) -> None:
        """Switch, or give the move up, as all ranks have decided."""
        if move.decision is Progress.FAILED:
            self._give_up_move(PeerFailed(self.group.rank, "the move was given up", phase="moving experts"))
            return
        started, step = time.monotonic(), move.step
        self._switch(move)
        self.exchange.switch([wiring.exchange_spec for wiring in self.draft.wirings])
        move.switched()
        seconds = time.monotonic() - started
        for name in step:
            self.stats()[name].moves.count_switch(len(move.came[name]), seconds, move.nbytes, move.seconds)
        if move.is_done:
            self._move = None

    def _switch(self, move: Rebalance) -> None:
        """Take the placements of a step, and the experts that came for it."""
        switched = {
            name: replace(
                self.wiring(name),
                spec=replace(self.wiring(name).spec, placement=placement),
                exchange_spec=replace(self.wiring(name).exchange_spec, placement=placement),
            )
            for name, placement in move.step.items()
        }
        for name, wiring in switched.items():
            move.holders[name].switch(wiring, move.came[name])
        wirings = [switched.get(wiring.spec.name, wiring) for wiring in self.draft.wirings]
        self._adopt(replace(self.draft, wirings=tuple(wirings)))
        if not self._whole.lost:
            self._whole = replace(self._whole, specs={spec.name: spec for spec in self.draft.specs})
        self._switches += 1

    def _give_up_move(self, error: BaseException) -> None:
        """Experts stay where they are, on this rank; whoever asks for the move hears why."""
        move, self._move = self._move, None
        if move is not None:
            move.give_up(error)
            _log.warning("experts stay where they are: %s", move.error)
            for name in move.placements:
                self.stats()[name].moves.given_up += 1

    def _close_carrier(self) -> None:
        """Give back what moves share. A thread that is still in one does so itself."""
        if self._last_move is None or self._last_move.has_ended:
            self._carrier.close()

    def _settle_move(self, group: Group) -> None:
        """After a loss: switch if any of the ranks that are left has switched; else stay. Collective over these."""
        switches = group.gather_json(self._switches, phase="moving experts")
        if self._move is not None and max(switches) > self._switches:
            self._switch(self._move)
            self._move.switched()
        lost = PlanBroken(self.exchange.broken_by) if self.exchange.broken_by else None
        if self._move is not None and not self._move.is_done:
            self._give_up_move(
                lost or HandleError("ranks were lost", expected="all ranks", fix="rebalance again")
            )
        self._move = None

    def close(self) -> None:
        """Give the memory back. Every later call of this plan raises; the group stays usable."""
        self._give_up_move(
            HandleError("the plan was closed", expected="an open plan", fix="call `wait` before `close`")
        )
        self._close_carrier()
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
    max_rows: int | None = None,
    paranoid: bool = False,
    survive: bool = False,
) -> Plan:
    """Check the layers, agree with the other ranks of the group, and set up the exchange. Collective.

    `exchange` is a name of `EXCHANGES`, `local`, or a class. `auto` takes `local` on one CPU rank, `one_sided` where
    the ranks share memory, `hierarchical` where they do so inside hosts, else the next one that reaches all of them.
    `max_tokens` is the most tokens that a rank brings in one call, for layers that do not set their own. `in_flight`
    dispatches may wait for their combine at a time. `max_rows` bounds the rows that a rank receives at a time, and the
    memory for them; a batch that brings more goes in several passes, on all ranks.

    `TOKENYARD_EXCHANGE` in the environment overrides `exchange`. A `paranoid` plan watches every row, region and duty
    while its layers run, and raises `Corrupted` when one is not what it must be; `TOKENYARD_PARANOID=1` in the
    environment asks for it, too. With `survive`, a rank that is lost in a call of a layer costs time, not the call: the
    others go on without it, and send their rows again. Every expert must then be on two ranks, and layers have
    `sum="choices"`.

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
        made = draft(
            layers,
            group.size,
            exchange=exchange,
            max_tokens=max_tokens,
            in_flight=in_flight,
            max_rows=max_rows,
            paranoid=paranoid,
            device=group.device,
        )
        if survive:
            check_survives(made, group.device)
        return made

    return plan_draft(make, group, survive=survive)


def plan_draft(make: Callable[[], Draft], group: Group, *, survive: bool = False) -> Plan:
    """The plan of a draft that every rank makes for itself: `plan`, where the draft is needed before. Collective."""
    agreed, number = agree_on_draft(group, make, survive=survive)
    made = Plan(agreed, group, make_plan_id(agreed, number), survive=survive)
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


def _decided(progress: Sequence[int]) -> Progress:
    """What all ranks do, who have heard of each other how far they are."""
    if Progress.FAILED in progress:
        return Progress.FAILED
    return Progress.READY if all(one == Progress.READY for one in progress) else Progress.PREPARING
