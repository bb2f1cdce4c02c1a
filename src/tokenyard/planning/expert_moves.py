"""The moves of a plan's experts: at most one is under way, and all ranks begin, switch and give it up together.

`rebalancing` has the thread that copies; here is what the ranks do in their calls: they agree on placements before a
move, hear from each other how far they are, and switch between two calls.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tokenyard.errors import (
    Drifted,
    HandleError,
    InputError,
    PeerFailed,
    PlanBroken,
    PlanError,
    TokenyardError,
    shown,
)
from tokenyard.group import Group
from tokenyard.planning.drafting import Draft
from tokenyard.planning.moving import Carrier, HeldExperts, held_by_all, steps
from tokenyard.planning.rebalancing import Progress, Rebalance, failure_of
from tokenyard.planning.resizing import (
    NextGroup,
    check_grown,
    check_leaving,
    exchange_named,
    introduction,
    placement_with,
    placement_without,
    widened,
)
from tokenyard.planning.spec import LayerSpec, is_size
from tokenyard.planning.state import PlanState, WholePlan
from tokenyard.routing import Placement, balance, imbalance, placement_for, rank_loads

_log = logging.getLogger("tokenyard")

# Where a dispatch does not tell the ranks how far the others are (on GPUs nobody waits for that), they ask each other
# between two calls: after so many calls since they asked last.
CALLS_BETWEEN_QUESTIONS = 16


@dataclass(kw_only=True)
class _Autobalance:
    """When a plan looks at its load by itself."""

    every: int  # calls of layers between two looks
    threshold: float  # the busiest rank over the mean, above which experts move
    seen: int  # the calls up to the last look


class ExpertMoves:
    """Moves experts between the ranks of a plan, one move at a time."""

    def __init__(self, state: PlanState) -> None:
        self._state = state
        self._move: Rebalance | None = None  # the one under way
        self._last_move: Rebalance | None = None
        self._auto: _Autobalance | None = None
        self._next_group: NextGroup | None = None  # the one that the move under way leads to
        self.start()

    def start(self) -> None:
        """Serve the present group of the plan, which its ranks have agreed on."""
        self._carrier = Carrier(self._state.group)  # of experts that move
        self._switches = 0  # of placements, since the ranks of this group have agreed
        self._asked = 0  # the calls before the ranks asked each other last how far they are
        self._resizes = 0  # changes of the ranks that were begun since
        # Weakly: memory of a plan that is gone is given back at once.
        this = weakref.ref(self)
        announcer = self._state.exchange.announcer
        announcer.notice = lambda: moves._notice() if (moves := this()) else 0
        announcer.noticed = lambda notices: moves._noticed(notices) if (moves := this()) else None
        if self._auto is not None:
            self._auto.seen = 0

    def rebalance(
        self,
        placements: Mapping[str, str | Placement] | None = None,
        *,
        threshold: float = 1.1,
        wait: bool = True,
    ) -> Rebalance:
        """See `Plan.rebalance`."""
        self.check_still("rebalance")
        with self._state.exchange.in_use():
            held = self._held(list(placements or ()))
            slots = {name: [one.slots.count for one in by_rank] for name, by_rank in held.items()}
            wanted = self._balanced(threshold, slots) if placements is None else dict(placements)
            agreed, _ = self._state.redraft(self._state.group, lambda: self._specs_with(wanted))
            present = {name: wiring.exchange_spec.placement for name, wiring in self._state.wirings.items()}
            goals = {wiring.spec.name: wiring.exchange_spec.placement for wiring in agreed.wirings}
            ways = {
                name: steps(present[name], goal, slots[name])
                for name, goal in goals.items()
                if goal != present[name]
            }
            self._begin(
                Rebalance(
                    self._state.group,
                    self._carrier,
                    {name: self._state.layers[name] for name in ways},
                    {name: held[name] for name in ways},
                    {name: present[name] for name in ways},
                    _together(ways),
                    finish=self._finish,
                    after=self._last_move,
                )
            )
        move = self._last_move
        assert move is not None
        if wait:
            move.wait()
        return move

    def shrink(self, ranks: Sequence[int], *, wait: bool) -> Rebalance:
        """See `Plan.shrink`."""
        state, group = self._state, self._state.group
        leaving = check_leaving(ranks, group)
        held = self._begin_resize("shrink", leaving)
        slots = {name: [one.slots.count for one in by_rank] for name, by_rank in held.items()}
        staying = [rank for rank in range(group.size) if rank not in leaving]
        present = {name: wiring.exchange_spec.placement for name, wiring in state.wirings.items()}
        goals = {name: placement_without(each, leaving, slots[name]) for name, each in present.items()}
        ways = {
            name: steps(present[name], goal, slots[name])
            for name, goal in goals.items()
            if goal != present[name]
        }
        after = {
            name: Placement.explicit(goal.num_experts, [goal.table[rank] for rank in staying])
            for name, goal in goals.items()
        }
        question, draft = self._question(), state.draft
        next_group = NextGroup(
            group,
            question,
            staying,
            None
            if group.rank in leaving
            else lambda check: group.subgroup(staying, purpose=question, check=check),
            lambda made: state.redraft(made, lambda: _placed(draft.specs, after)),
            layers=state.layers,
        )
        return self._move_to(next_group, held, present, ways, after, wait=wait)

    def grow(self, ranks: int | Group, *, seconds: float, wait: bool) -> Rebalance:
        """See `Plan.grow`."""
        state, group = self._state, self._state.group
        given = ranks if isinstance(ranks, Group) else None
        count = check_grown(ranks, group)
        exchange_named(state.draft.exchange.name, group.rank)
        held = self._begin_resize("grow", [count, seconds, given is not None])
        present = {
            name: widened(wiring.exchange_spec.placement, count) for name, wiring in state.wirings.items()
        }
        goals = {
            name: placement_with(wiring.exchange_spec.placement, count)
            for name, wiring in state.wirings.items()
        }
        question, draft = self._question(), state.draft
        told = introduction(draft, question, goals)

        def agree(made: Group) -> tuple[Draft, int]:
            made.gather_json(told, phase="growing")
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

    def _begin_resize(self, what: str, terms: object) -> dict[str, list[HeldExperts]]:
        """Where each rank holds the experts of all layers; raise unless all ranks ask for the same. Collective."""
        self._check_can_resize(what)
        self.check_still(what)
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
            self._resizes += 1
            return self._held(list(state.wirings))

    def _question(self) -> str:
        """Names the change of ranks under way, alike on all ranks."""
        return f"plan {self._state.exchange.announcer.plan_id:x}, change {self._resizes}"

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
        """Move experts, and with the last of them to the next group."""
        move = Rebalance(
            self._state.group,
            self._carrier,
            dict(self._state.layers),
            held,
            present,
            _together(ways) or [{}],
            finish=self._finish,
            after=self._last_move,
            next_ranks=next_group,
        )
        move.placements = after
        self._next_group = next_group
        self._begin(move)
        if wait:
            move.wait()
        return move

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
            self._auto = _Autobalance(every=every, threshold=threshold, seen=self._state.exchange.rounds)

    def between_calls(self, layer: str) -> None:
        """What a layer calls before each of its calls: experts that have moved are served from then on.

        Ranks come and go before a call of the first layer: fresh ones begin with it.
        """
        move, auto = self._move, self._auto
        if move is None and auto is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # nothing runs yet, and what is written now would be written again in every replay
        if move is not None:
            if not self._state.exchange.hears_notices:
                self._ask(move)
            if (
                move.decision is not Progress.PREPARING
                and (self._next_group is None or layer == self._state.draft.wirings[0].spec.name)
                and self._state.exchange.is_between_calls()
            ):
                self._conclude(move)
        elif (
            auto is not None
            and self._state.exchange.rounds >= auto.seen + auto.every
            and self._state.exchange.is_between_calls()
        ):
            self._look(auto)

    def _look(self, auto: _Autobalance) -> None:
        """Move experts if the load since the last look was uneven. What cannot be moved is said, and serves on."""
        auto.seen = self._state.exchange.rounds
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
                fix="make a new plan on the ranks that shall serve, and capture graphs anew",
                rank=self._state.group.rank,
            )

    def check_still(self, what: str) -> None:
        """Raise while experts move. All ranks see the end of a move in the same call."""
        if self._move is not None:
            raise HandleError(
                f"{what} was called while experts move",
                expected="one change of a plan at a time",
                fix="call `wait` on what began the move first",
                rank=self._state.group.rank,
            )

    def _held(self, named: Sequence[str]) -> dict[str, list[HeldExperts]]:
        """Where each rank holds the experts of a layer, by layer; one that is named must be in use on all ranks."""
        for name in named:
            self._state.wiring(name)
        return held_by_all(self._state.group, self._state.layers, named, list(self._state.wirings))

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
        """A placement for each layer whose load is more uneven than that, from the counts of all ranks.

        One slot of each rank stays free: experts of the next move come through it.
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

    # -- A move under way ----------------------------------------------------------------------------------

    def _begin(self, move: Rebalance) -> None:
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
        lowest = self._switches << 2  # below it stand two bits of progress
        if not lowest <= min(notices) <= max(notices) <= lowest | 3:
            raise Drifted(
                f"the ranks have switched placements {[notice >> 2 for notice in notices]} times",
                expected="every rank to serve the same placements",
                fix="report it: ranks switch together, or not at all",
                rank=self._state.group.rank,
            )
        if self._move is not None:
            self._move.decision = _decided([notice & 3 for notice in notices])

    def _finish(self, move: Rebalance) -> None:
        """Wait for the thread of every rank, and switch. Collective."""
        while self._move is move:
            with self._state.exchange.in_use(alone=True):
                if move.decision is Progress.PREPARING:  # no dispatch has told the others yet
                    self._decide(move, move.wait_for_thread())
                self._conclude(move)

    def _ask(self, move: Rebalance) -> None:
        """Ask the other ranks between two calls, from time to time, how far they are. Collective."""
        exchange = self._state.exchange
        if exchange.rounds >= self._asked + CALLS_BETWEEN_QUESTIONS and exchange.is_between_calls():
            self._asked = exchange.rounds
            with exchange.in_use():
                self._decide(move, move.progress)

    def _decide(self, move: Rebalance, progress: Progress) -> None:
        """Hear from all ranks how far they are with a move: all of them decide the same. Collective."""
        rank = self._state.group.rank
        words = None if move.error is None else f"{type(move.error).__name__}: {move.error}"
        told = self._state.group.gather_json([progress, words], phase="moving experts")
        move.decision = _decided([other for other, _ in told])
        if move.decision is Progress.FAILED:
            move.error = failure_of(rank, [said for _, said in told], move.error)

    def _conclude(self, move: Rebalance) -> None:
        """Switch, or give the move up, as all ranks have decided."""
        started, step = time.monotonic(), move.step
        following = self._next_group if move.is_last_step else None
        if move.decision is Progress.FAILED or (following is not None and not following.take()):
            self.give_up(self._refusal())
            return
        self._switch(move)
        seconds = time.monotonic() - started
        move.pause_ms = 1000 * seconds
        for name in step:
            stats = self._state.exchange.stats[name].moves
            stats.count_switch(len(move.came[name]), seconds, move.nbytes, move.seconds)

    def _refusal(self) -> TokenyardError:
        """What a rank says that was ready, of a move that is given up: who is lost, as far as it sees."""
        group, following = self._state.group, self._next_group
        if gone := list(group.gone()):
            return group.lost(gone, phase="moving experts", waited=0.0)
        grown = following.group if following is not None and following.admits else None
        if grown is not None and (gone := [rank for rank in grown.gone() if rank >= group.size]):
            return grown.lost(gone, phase="moving experts", waited=0.0)
        return PeerFailed(group.rank, "the move was given up", phase="moving experts")

    def _switch(self, move: Rebalance) -> None:
        """Take the placements of a step, and the experts that came for it; with the last one the next group."""
        if move.is_last_step and self._next_group is not None:
            self._take(self._next_group, move)
        else:
            self._take_step(move)
            self._state.exchange.switch([wiring.exchange_spec for wiring in self._state.draft.wirings])
        move.switched()
        if move.is_done:
            self._move = self._next_group = None

    def _take(self, following: NextGroup, move: Rebalance) -> None:
        """Serve the next group from now on; or leave, if this rank is not in it."""
        state, before, whole = self._state, self._state.exchange, self._state.whole
        # The thread of this move has another carrier.
        following.left_behind = [before.close, self._carrier.close]
        if state.group is not whole.group:
            following.left_behind.append(state.group.close)  # the plan made it, of the ranks that were left
        if whole.made_here:
            following.left_behind.append(whole.group.close)
        if following.exchange is None:
            before.usability.close(left=True)
            return
        for name, stats in following.exchange.stats.items():
            stats.moves = before.stats[name].moves
        assert following.group is not None
        state.whole = WholePlan(group=following.group, specs=whole.specs, made_here=True)
        state.take(following.exchange, following.draft)
        for name, layer in state.layers.items():
            layer.switch(state.wirings[name], move.came.get(name, {}))
        self.start()

    def _take_step(self, move: Rebalance) -> None:
        """Serve the placements of a step, on the same ranks."""
        switched = {
            name: replace(
                self._state.wiring(name),
                spec=replace(self._state.wiring(name).spec, placement=placement),
                exchange_spec=replace(self._state.wiring(name).exchange_spec, placement=placement),
            )
            for name, placement in move.step.items()
        }
        for name, wiring in switched.items():
            move.holders[name].switch(wiring, move.came[name])
        wirings = [switched.get(wiring.spec.name, wiring) for wiring in self._state.draft.wirings]
        self._state.adopt(replace(self._state.draft, wirings=tuple(wirings)))
        self._switches += 1

    def give_up(self, error: BaseException) -> None:
        """Experts stay where they are, on this rank; whoever asks for the move hears why."""
        move, self._move = self._move, None
        following, self._next_group = self._next_group, None
        if following is not None:
            with contextlib.suppress(TokenyardError):  # where the ranks find each other, nobody answers
                following.refuse()
        if move is not None:
            move.give_up(error)
            _log.warning("experts stay where they are: %s", move.error)
            for name in move.placements:
                self._state.exchange.stats[name].moves.given_up += 1

    def close_carrier(self) -> None:
        """Give back what moves share. A thread that is still in one does so itself."""
        if self._last_move is None or self._last_move.has_ended:
            self._carrier.close()

    def follow(self, lost: list[int]) -> tuple[list[int], bool]:
        """After a loss: take the next group if another rank has; else nobody does.

        Returns the lost ranks as the plan's group numbers them then, and whether it was taken.
        """
        move, following = self._move, self._next_group
        if move is None or following is None or not move.is_last_step or following.refuse():
            return lost, False
        self._switch(move)
        self._state.exchange.usability.check_open()  # of a rank that leaves
        return [following.members.index(rank) for rank in lost if rank in following.members], True

    def settle(self, group: Group) -> None:
        """After a loss: switch if any of the ranks that are left has switched; else stay. Collective over these."""
        switches = group.gather_json(self._switches, phase="moving experts")
        if self._move is not None and max(switches) > self._switches:
            self._take_step(self._move)
            self._move.switched()
        lost = (
            PlanBroken(self._state.exchange.usability.broken_by)
            if self._state.exchange.usability.broken_by
            else None
        )
        if self._move is not None and not self._move.is_done:
            self.give_up(lost or HandleError("ranks were lost", expected="all ranks", fix="rebalance again"))
        self._move = None

    def close(self) -> None:
        """Give up the move under way, and give back what moves share. A rank that leaves does so in order."""
        if self._move is not None and self._move.lets_go:
            self._move.wait()
        self.give_up(
            HandleError("the plan was closed", expected="an open plan", fix="call `wait` before `close`")
        )
        self.close_carrier()


def _together(ways: Mapping[str, Sequence[Placement]]) -> list[dict[str, Placement]]:
    """The steps of several layers, each with the layers that switch in it."""
    longest = max(map(len, ways.values()), default=0)
    return [{name: way[n] for name, way in ways.items() if n < len(way)} for n in range(longest)]


def _placed(specs: Sequence[LayerSpec], placements: Mapping[str, Placement]) -> list[LayerSpec]:
    return [replace(spec, placement=placements[spec.name]) for spec in specs]


def _decided(progress: Sequence[int]) -> Progress:
    """What all ranks do, who have heard of each other how far they are."""
    if Progress.FAILED in progress:
        return Progress.FAILED
    return Progress.READY if all(one == Progress.READY for one in progress) else Progress.PREPARING
