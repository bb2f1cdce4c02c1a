"""`ExpertMoves` begins moves of experts: to given placements, to fewer or more ranks, or because the load is uneven.

All ranks agree on the new placements before a move begins. At most one move is under way (`move_under_way`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tokenyard.elastic.move_under_way import MoveUnderWay
from tokenyard.elastic.moving import HeldExperts, held_by_all, steps
from tokenyard.elastic.rebalancing import Rebalance
from tokenyard.elastic.resizing import (
    NextGroup,
    check_grown,
    check_leaving,
    exchange_named,
    introduction,
    placement_with,
    placement_without,
    widened,
)
from tokenyard.errors import InputError, PlanError, shown
from tokenyard.group import Group
from tokenyard.planning.drafting import Draft
from tokenyard.planning.spec import LayerSpec, is_size
from tokenyard.planning.state import PlanState
from tokenyard.routing import Placement, balance, imbalance, placement_for, rank_loads

_log = logging.getLogger("tokenyard")


@dataclass(frozen=True, kw_only=True)
class _Autobalance:
    """The settings with which a plan checks its load by itself (`Plan.autobalance`)."""

    every: int  # calls of layers between two checks
    threshold: float  # experts move if the load of the busiest rank, over the mean, is above this


class ExpertMoves:
    """Moves experts between the ranks of a plan, one move at a time."""

    def __init__(self, state: PlanState) -> None:
        self._state = state
        self.under_way = MoveUnderWay(state)  # the one move, and what moves share
        self._auto: _Autobalance | None = None

    def rebalance(
        self,
        placements: Mapping[str, str | Placement] | None = None,
        *,
        threshold: float = 1.1,
        wait: bool = True,
    ) -> Rebalance:
        """See `Plan.rebalance`."""
        self.under_way.check_still("rebalance")
        with self._state.exchange.in_use():
            held = self._held(list(placements or ()))
            slots = _slots(held)
            wanted = self._balanced(threshold, slots) if placements is None else dict(placements)
            agreed, _ = self._state.redraft(self._state.group, lambda: self._specs_with(wanted))
            present = self._present
            goals = {wiring.spec.name: wiring.exchange_spec.placement for wiring in agreed.wirings}
            ways = _ways(present, goals, slots)
            moved = {name: held[name] for name in ways}
            move = self._move(moved, {name: present[name] for name in ways}, _together(ways))
            self.under_way.begin(move)
        if wait:
            move.wait()
        return move

    def shrink(self, ranks: Sequence[int], *, wait: bool) -> Rebalance:
        """See `Plan.shrink`."""
        state, group = self._state, self._state.group
        leaving = check_leaving(ranks, group)
        held = self._begin_resize("shrink", leaving)
        slots = _slots(held)
        staying = [rank for rank in range(group.size) if rank not in leaving]
        present = self._present
        goals = {name: placement_without(each, leaving, slots[name]) for name, each in present.items()}
        ways = _ways(present, goals, slots)
        after = {
            name: Placement.explicit(goal.num_experts, [goal.table[rank] for rank in staying])
            for name, goal in goals.items()
        }
        question, draft = self._question(), state.draft

        def make(check: Callable[[], None]) -> Group:
            return group.subgroup(staying, purpose=question, check=check)

        def agree(made: Group) -> tuple[Draft, int]:
            return state.redraft(made, lambda: _placed(draft.specs, after))

        make_group = None if group.rank in leaving else make
        next_group = NextGroup(group, question, staying, make_group, agree, layers=state.layers)
        return self._move_to(next_group, held, present, ways, after, wait=wait)

    def grow(self, ranks: int | Group, *, seconds: float, wait: bool) -> Rebalance:
        """See `Plan.grow`."""
        state, group = self._state, self._state.group
        given = ranks if isinstance(ranks, Group) else None
        count = check_grown(ranks, group)
        exchange_named(state.draft.exchange.name, group.rank)
        held = self._begin_resize("grow", [count, seconds, given is not None])
        present = {name: widened(each, count) for name, each in self._present.items()}
        goals = {name: placement_with(each, count) for name, each in self._present.items()}
        question, draft = self._question(), state.draft
        introduced = introduction(draft, question, goals)

        def agree(made: Group) -> tuple[Draft, int]:
            made.gather_json(introduced, phase="growing")
            return state.redraft(made, lambda: _placed(draft.specs, goals))

        next_group = NextGroup(
            group,
            question,
            range(group.size),
            lambda check: given or group.admit(count, seconds=seconds, check=check),
            agree,
            layers=state.layers,
            patience=seconds,
            decided_in=given,
        )
        ways = {name: [goal] for name, goal in goals.items() if goal != present[name]}
        return self._move_to(next_group, held, present, ways, goals, wait=wait)

    @property
    def _present(self) -> dict[str, Placement]:
        """The present placement of each layer."""
        return {name: wiring.exchange_spec.placement for name, wiring in self._state.wirings.items()}

    def _begin_resize(self, what: str, terms: object) -> dict[str, list[HeldExperts]]:
        """Check that all ranks ask for one change; return, by layer, where each rank holds its experts. Collective."""
        self._check_can_resize(what)
        self.under_way.check_still(what)
        state = self._state
        reason = (
            "a plan with survive=True" if state.survive
            else "a plan that has lost experts with their ranks"
            if any(wiring.exchange_spec.placement.lost_experts for wiring in state.draft.wirings)
            else ""
        )  # fmt: skip
        if reason:
            raise PlanError(
                f"{what} was called on {reason}",
                expected="a plan that has all its experts, made without survive",
                fix="readmit the ranks that were lost first; or make a new plan on other ranks",
                rank=state.group.rank,
            )
        with state.exchange.in_use(alone=True):
            state.group.agree(what, terms)
            self.under_way.resizes += 1
            return self._held(list(state.wirings))

    def _question(self) -> str:
        """The name of the change of ranks under way, for `Group.decide`: the same on all ranks."""
        return f"plan {self._state.exchange.announcer.plan_id:x}, change {self.under_way.resizes}"

    def _move_to(
        self,
        next_group: NextGroup,
        held: Mapping[str, list[HeldExperts]],
        present: Mapping[str, Placement],
        ways: Mapping[str, Sequence[Placement]],
        after: dict[str, Placement],
        *,
        wait: bool,
    ) -> Rebalance:
        """Begin a move of experts whose last switch also switches to the next group; with `wait`, wait for it."""
        move = self._move(held, present, _together(ways) or [{}], next_group)
        move.placements = after
        self.under_way.begin(move)
        if wait:
            move.wait()
        return move

    def _move(
        self,
        held: Mapping[str, list[HeldExperts]],
        present: Mapping[str, Placement],
        steps: Sequence[Mapping[str, Placement]],
        next_group: NextGroup | None = None,
    ) -> Rebalance:
        """A move of the layers in `held`, which was not begun yet."""
        return Rebalance(
            self._state.group,
            self.under_way.carrier,
            {name: self._state.layers[name] for name in held},
            held,
            present,
            steps,
            finish=self.under_way.finish,
            after=self.under_way.last_move,
            next_ranks=next_group,
        )

    def autobalance(self, *, every: int | None, threshold: float = 1.1) -> None:
        """See `Plan.autobalance`."""
        if every is None:
            self._auto = None
            return
        if not is_size(every):
            raise InputError(
                f"every is {shown(every)}",
                expected="a number of calls, from 1; or None, to end it",
                fix="leave it on with every=1000",
                rank=self._state.group.rank,
            )
        counted = [
            wiring
            for wiring in self._state.draft.wirings
            if wiring.spec.spare_experts and not wiring.exchange_spec.carries_logits
        ]
        transport = self._state.exchange.transport
        reason = (
            "one rank has all experts" if self._state.group.size == 1
            else f"{transport.name} counts no choices" if not self._state.exchange.counts_choices
            else "no layer that takes routes has memory for further experts" if not counted
            else ""
        )  # fmt: skip
        if reason:
            raise PlanError(
                f"autobalance has nothing to move: {reason}",
                expected="several ranks, and layers that take routes and declare spare_experts",
                fix="declare LayerSpec(spare_experts=2), on several ranks",
                rank=self._state.group.rank,
            )
        with self._state.exchange.in_use():
            self._state.group.agree("autobalance", [every, threshold])
            self._auto = _Autobalance(every=every, threshold=threshold)
            self.under_way.looked = self._state.exchange.rounds

    def between_calls(self, layer: str) -> None:
        """Switch to experts that have moved, or check the load if that is due. A layer calls this before each call."""
        move, auto = self.under_way.move, self._auto
        if move is None and auto is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # in a capture nothing runs yet, and writes into the tables would be repeated in every replay
        if move is not None:
            self.under_way.between_calls(layer, move)
        elif (
            auto is not None
            and self._state.exchange.rounds >= self.under_way.looked + auto.every
            and self._state.exchange.is_between_calls()
        ):
            self._look(auto)

    def _look(self, auto: _Autobalance) -> None:
        """Begin to move experts if the load since the last check was uneven. If that is impossible, only log it."""
        self.under_way.looked = self._state.exchange.rounds
        try:
            self.rebalance(threshold=auto.threshold, wait=False)
        except PlanError as error:
            _log.warning("autobalance moves nothing: %s", error)
            for stats in self._state.exchange.stats.values():
                stats.moves.refused = str(error)

    def _check_can_resize(self, what: str) -> None:
        if self._state.group.device.type != "cpu":
            raise InputError(
                f"{what} on {self._state.group.device}",
                expected="ranks on CPUs: captured CUDA graphs do not survive another number of ranks",
                fix="make a new plan on the ranks that serve from now on, and capture its graphs",
                rank=self._state.group.rank,
            )

    def _held(self, named: Sequence[str]) -> dict[str, list[HeldExperts]]:
        """By layer, where each rank holds its experts. Layers in `named` must be in use on all ranks."""
        for name in named:
            self._state.wiring(name)
        return held_by_all(
            self._state.group, self._state.layers, named, list(self._state.wirings), copied=self._state.copied
        )

    def _specs_with(self, placements: Mapping[str, str | Placement]) -> list[LayerSpec]:
        """The layers of this plan, some of them with other placements."""
        wanted = {}
        for name, placement in placements.items():
            spec = self._state.wiring(name).exchange_spec
            if spec.placement.lost_experts:
                raise PlanError(
                    f"experts {shown(spec.placement.lost_experts)} were lost with their ranks",
                    expected="ranks that hold all experts of the layer",
                    fix="readmit the ranks that were lost first",
                    layer=name,
                )
            wanted[name] = placement_for(placement, spec.num_experts, self._state.group.size)
        return [
            replace(spec, placement=wanted.get(spec.name, spec.placement)) for spec in self._state.draft.specs
        ]

    def _balanced(self, threshold: float, slots: Mapping[str, list[int]]) -> dict[str, str | Placement]:
        """A better placement for each layer whose imbalance is above `threshold`, from the counts of all ranks.

        One slot of each rank stays free, because the next move needs it to copy experts into.
        """
        found: dict[str, str | Placement] = {}
        for name, load_E in self._state.load(reset=True).items():
            spec, stats = self._state.wiring(name).exchange_spec, self._state.exchange.stats[name].moves
            present, spare = spec.placement, self._state.wiring(name).spec.spare_experts
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


def _slots(held: Mapping[str, Sequence[HeldExperts]]) -> dict[str, list[int]]:
    """By layer, the number of slots for experts on each rank."""
    return {name: [one.slots.count for one in by_rank] for name, by_rank in held.items()}


def _ways(
    present: Mapping[str, Placement], goals: Mapping[str, Placement], slots: Mapping[str, list[int]]
) -> dict[str, list[Placement]]:
    """The steps of placements, from the present one to the goal, for each layer whose placement changes."""
    return {
        name: steps(present[name], goal, slots[name]) for name, goal in goals.items() if goal != present[name]
    }


def _together(ways: Mapping[str, Sequence[Placement]]) -> list[dict[str, Placement]]:
    """The steps of several layers together: step n has the n-th placement of each layer with at least n steps."""
    longest = max(map(len, ways.values()), default=0)
    return [{name: way[n] for name, way in ways.items() if n < len(way)} for n in range(longest)]


def _placed(specs: Sequence[LayerSpec], placements: Mapping[str, Placement]) -> list[LayerSpec]:
    return [replace(spec, placement=placements[spec.name]) for spec in specs]
