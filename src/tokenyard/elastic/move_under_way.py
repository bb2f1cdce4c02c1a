"""The move of experts that is under way on one rank: all ranks switch together, or give it up together.

`expert_moves` begins moves, and `rebalancing` has the thread that copies. Ranks announce in their dispatches how far
this thread is, and switch between two calls.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from tokenyard.elastic.moving import Carrier
from tokenyard.elastic.rebalancing import Progress, Rebalance, failure_of
from tokenyard.elastic.resizing import NextGroup
from tokenyard.errors import Drifted, HandleError, PeerFailed, PlanBroken, TokenyardError
from tokenyard.group import Group
from tokenyard.planning.state import PlanState, WholePlan

_log = logging.getLogger("tokenyard")

# On GPUs the host does not wait for announcements, and does not learn from a dispatch how far the other ranks are.
# There, ranks ask each other between two calls, after this number of calls since they asked last.
CALLS_BETWEEN_QUESTIONS = 16


class MoveUnderWay:
    """The move of experts under way, if there is one, and the carrier and counters that all moves of a group share."""

    def __init__(self, state: PlanState) -> None:
        self._state = state
        self.move: Rebalance | None = None  # the one under way
        self.last_move: Rebalance | None = None  # the one that was begun last
        self.start()

    def start(self) -> None:
        """Start anew on the present group of the plan: a new carrier, counters at 0, and notices in its dispatches."""
        self.carrier = Carrier(self._state.group)  # copies experts between ranks
        self._switches = 0  # switches of placements on this group
        self._asked = 0  # the number of calls at which the ranks last asked each other how far they are
        self.resizes = 0  # changes of ranks (`grow`, `shrink`) that were begun on this group
        self.looked = 0  # the number of calls at which the ranks last checked their load
        # A weak reference: the memory of a plan is then freed with the last reference to it.
        this = weakref.ref(self)
        announcer = self._state.exchange.announcer
        announcer.notice = lambda: moves._notice() if (moves := this()) else 0
        announcer.noticed = lambda notices: moves._noticed(notices) if (moves := this()) else None

    def check_still(self, what: str) -> None:
        """Raise if a move is under way. All ranks end a move between the same two calls, and raise together."""
        if self.move is not None:
            raise HandleError(
                f"{what} was called while experts move",
                expected="one change of a plan at a time",
                fix="first call `wait` of the `Rebalance` that the earlier change returned",
                rank=self._state.group.rank,
            )

    def begin(self, move: Rebalance) -> None:
        """Begin a move. The caller has checked that no other one is under way."""
        self.last_move = move
        if not move.is_done:
            self.move = move
            move.start()

    def between_calls(self, layer: str, move: Rebalance) -> None:
        """Before a call of a layer: switch or give the move up, if all ranks have decided on it.

        A change of ranks takes effect only before a call of the plan's first layer: fresh ranks begin with that one.
        """
        exchange = self._state.exchange
        if not exchange.hears_notices:
            self._ask(move)
        if (
            move.decision is not Progress.PREPARING
            and (move.next_ranks is None or layer == self._state.draft.wirings[0].spec.name)
            and exchange.is_between_calls()
        ):
            self._conclude(move)

    def _notice(self) -> int:
        """This rank's notice in a dispatch: how often it has switched placements, and how far its thread is."""
        progress = Progress.PREPARING if self.move is None else self.move.progress
        return self._switches << 2 | progress

    def _noticed(self, notices: Sequence[int]) -> None:
        """Decide on the move from the notices of all ranks in one dispatch, which are the same on every rank."""
        lowest = self._switches << 2  # the two lowest bits are the progress
        if not lowest <= min(notices) <= max(notices) <= lowest | 3:
            raise Drifted(
                f"the ranks have switched placements {[notice >> 2 for notice in notices]} times",
                expected="every rank to serve the same placements",
                fix="report it: ranks switch together, or not at all",
                rank=self._state.group.rank,
            )
        if self.move is not None:
            self.move.decision = _decided([notice & 3 for notice in notices])

    def finish(self, move: Rebalance) -> None:
        """Wait for the thread of every rank, and switch. Collective."""
        while self.move is move:
            with self._state.exchange.in_use(alone=True):
                if move.decision is Progress.PREPARING:  # no dispatch since all ranks were ready
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
        """Gather how far all ranks are with a move, and decide on it. All ranks decide the same. Collective."""
        rank = self._state.group.rank
        words = None if move.error is None else f"{type(move.error).__name__}: {move.error}"
        by_rank = self._state.group.gather_json([progress, words], phase="moving experts")
        move.decision = _decided([other for other, _ in by_rank])
        if move.decision is Progress.FAILED:
            move.error = failure_of(rank, [error for _, error in by_rank], move.error)

    def _conclude(self, move: Rebalance) -> None:
        """Switch, or give the move up, as all ranks have decided."""
        started, step = time.monotonic(), move.step
        following = move.next_ranks if move.is_last_step else None
        if move.decision is Progress.FAILED or (following is not None and not following.take()):
            self.give_up(self._refusal(move.next_ranks))
            return
        self._switch(move)
        seconds = time.monotonic() - started
        move.pause_ms = 1000 * seconds
        for name in step:
            stats = self._state.exchange.stats[name].moves
            stats.count_switch(len(move.came[name]), seconds, move.nbytes, move.seconds)

    def _refusal(self, following: NextGroup | None) -> TokenyardError:
        """The error of a rank that was itself ready when the move was given up: the lost ranks, if it knows of any."""
        group = self._state.group
        if gone := list(group.gone()):
            return group.lost(gone, phase="moving experts", waited=0.0)
        grown = following.group if following is not None and following.admits else None
        if grown is not None and (gone := [rank for rank in grown.gone() if rank >= group.size]):
            return grown.lost(gone, phase="moving experts", waited=0.0)
        return PeerFailed(group.rank, "the move was given up", phase="moving experts")

    def _switch(self, move: Rebalance) -> None:
        """Switch to the placements of a step and the experts that came; in the last step, also to the next group."""
        if move.is_last_step and move.next_ranks is not None:
            self._take(move.next_ranks, move)
        else:
            self._take_step(move)
            self._state.exchange.switch(self._state.draft.exchange_specs)
        move.switched()
        if move.is_done:
            self.move = None

    def _take(self, following: NextGroup, move: Rebalance) -> None:
        """Switch to the next group; a rank that is not in it closes its plan for further calls."""
        state, before, whole = self._state, self._state.exchange, self._state.whole
        # Nothing uses the old carrier any more: the thread of this move has another one.
        following.left_behind = [before.close, self.carrier.close]
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
        """Switch to the placements of a step, on the same ranks."""
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
        """Give the move under way up: the experts stay where they are, and `wait` of the move raises this error."""
        move, self.move = self.move, None
        if move is None:
            return
        if move.next_ranks is not None:
            with contextlib.suppress(TokenyardError):  # the store of the group does not answer
                move.next_ranks.refuse()
        move.give_up(error)
        _log.warning("experts stay where they are: %s", move.error)
        for name in move.placements:
            self._state.exchange.stats[name].moves.given_up += 1

    def close_carrier(self) -> None:
        """Close the carrier, unless a thread still uses it: that thread closes it when it ends."""
        if self.last_move is None or self.last_move.has_ended:
            self.carrier.close()

    def follow(self, lost: list[int]) -> tuple[list[int], bool]:
        """After a loss: switch to the next group if another rank has done so; else make sure that no rank does.

        Returns the lost ranks as the plan's group numbers them afterwards, and whether this rank has switched.
        """
        move = self.move
        following = None if move is None else move.next_ranks
        if move is None or following is None or not move.is_last_step or following.refuse():
            return lost, False
        self._switch(move)
        self._state.exchange.usability.check_open()  # of a rank that leaves
        return [following.members.index(rank) for rank in lost if rank in following.members], True

    def settle(self, group: Group) -> None:
        """After a loss: switch if any rank of `group`, those that are left, has switched; else give up. Collective."""
        switches = group.gather_json(self._switches, phase="moving experts")
        if self.move is not None and max(switches) > self._switches:
            self._take_step(self.move)
            self.move.switched()
        loss = self._state.exchange.usability.broken_by
        if self.move is not None and not self.move.is_done:
            again = HandleError("ranks were lost", expected="all ranks", fix="rebalance again")
            self.give_up(PlanBroken(loss) if loss else again)
        self.move = None

    def close(self) -> None:
        """Give up the move under way, and close the carrier. A rank that is leaving waits for the end of its move."""
        if self.move is not None and self.move.leaves_now:
            self.move.wait()
        self.give_up(
            HandleError("the plan was closed", expected="an open plan", fix="call `wait` before `close`")
        )
        self.close_carrier()


def _decided(progress: Sequence[int]) -> Progress:
    """The decision that follows from the progress of all ranks: failed if one has failed, ready if all are ready."""
    if Progress.FAILED in progress:
        return Progress.FAILED
    return Progress.READY if all(one == Progress.READY for one in progress) else Progress.PREPARING
