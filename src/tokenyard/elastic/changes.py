"""`PlanChanges`: what a plan makes for its first change. A plan that never changes does not load this package."""

from __future__ import annotations

import weakref

from tokenyard.elastic.expert_moves import ExpertMoves
from tokenyard.elastic.recovery import Recovery
from tokenyard.errors import PeerLost
from tokenyard.planning.state import PlanState


class PlanChanges:
    """Changes a plan while it serves: moves its experts, and goes on after a loss. Layers ask it around each call."""

    def __init__(self, state: PlanState) -> None:
        self.moves = ExpertMoves(state)  # experts that move between ranks, and ranks that come and go
        self.recovery = Recovery(state, self.moves.under_way)  # what is done after a loss
        self._own_process = state.exchange.usability.own_process
        state.changes = weakref.proxy(self)  # the plan has the reference that keeps this object alive

    def between_calls(self, layer: str) -> None:
        """Switch to experts that have finished moving, if all ranks are ready. A layer calls this before each call."""
        self._own_process.check(layer=layer)
        self.moves.between_calls(layer)

    def check_still(self, what: str) -> None:
        """See `PlanState.check_still`."""
        self.moves.under_way.check_still(what)

    def go_on_after(self, loss: PeerLost, layer: str) -> None:
        """See `PlanState.go_on_after`."""
        self.recovery.go_on_after(loss, layer)

    def close(self) -> None:
        """Give up a move that is under way, and free what moves share."""
        self.moves.under_way.close()
