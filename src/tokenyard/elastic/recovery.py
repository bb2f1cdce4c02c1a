"""How a plan goes on after ranks were lost: without them, or with fresh ranks in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenyard.elastic.move_under_way import MoveUnderWay
from tokenyard.errors import InputError, PeerLost, PlanBroken, PlanError, shown
from tokenyard.group import READMISSION, Group
from tokenyard.planning.agreement import make_plan_id
from tokenyard.planning.drafting import Draft
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.state import PlanState, WholePlan


class Recovery:
    """Lets a plan go on after a loss: on the ranks that are left, or with fresh ranks."""

    def __init__(self, state: PlanState, move: MoveUnderWay) -> None:
        self._state, self._move = state, move

    def go_on_without(self, lost: Sequence[int], *, renormalize: bool = False) -> None:
        """See `Plan.go_on_without`."""
        self._state.exchange.usability.check_open()
        lost, followed = self._move.follow(self._check_lost(lost))
        if followed and not lost:
            return  # the ranks that were lost had left the plan
        group = self._state.group.subgroup(self._without(lost))
        self._move.settle(group)

        def specs() -> list[LayerSpec]:
            return [
                replace(spec, placement=wiring.exchange_spec.placement.without(lost))
                for spec, wiring in zip(self._state.draft.specs, self._state.draft.wirings, strict=True)
            ]

        reduced, number = self._state.redraft(group, specs, renormalize_dropped=renormalize)
        self._restart(reduced, group, number, self._state.whole.without(lost))

    def go_on_after(self, loss: PeerLost, layer: str) -> None:
        """See `PlanState.go_on_after`."""
        is_mine = not loss.peers or self._state.group.rank in loss.peers
        if not self._state.survive or isinstance(loss, PlanBroken) or is_mine:
            raise loss
        if any(w.exchange_spec.placement.without(loss.peers).lost_experts for w in self._state.draft.wirings):
            raise loss  # some experts have no copy on the ranks that are left
        self.go_on_without(loss.peers)
        by_rank = self._state.group.gather_json([self._state.calls, layer], phase="after a loss")
        furthest = max(calls for calls, _ in by_rank)
        behind = [name for calls, name in by_rank if calls < furthest]
        if behind and self._state.calls == furthest:
            self._state.layers[behind[0]].take_part()

    def _without(self, lost: Sequence[int]) -> list[int]:
        """The ranks of the present group that are left."""
        return [rank for rank in range(self._state.group.size) if rank not in lost]

    def _check_lost(self, lost: Sequence[int]) -> list[int]:
        """The lost ranks; raise unless they are other ranks of the present group."""
        size, mine = self._state.group.size, self._state.group.rank
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
        """See `Plan.readmit`."""
        self._state.exchange.usability.check_open()
        lost, _ = self._move.follow(self._check_lost(lost))
        if lost:
            left = self._state.group.subgroup(self._without(lost))
            self._move.settle(left)
            left.close()
        whole = self._state.whole.without(lost)
        if added := [spec.name for spec in self._state.draft.specs if spec.name not in whole.specs]:
            raise PlanError(
                f"layer {added[0]!r} was added while ranks {list(self._state.whole.lost)} were lost",
                expected="layers whose experts were placed on all ranks",
                fix=f"forget it (`plan.trim(keep=…)` without {', '.join(map(repr, added))}), readmit, add it anew",
                rank=self._state.group.rank,
            )
        everybody = group or whole.group.readmit(whole.lost, seconds=seconds)
        # A fresh rank makes its plan late: it first loads its libraries and its weights.
        with everybody.patience(seconds):
            restored, number = self._state.redraft(
                everybody, lambda: [whole.specs[spec.name] for spec in self._state.draft.specs]
            )
        restored_whole = replace(whole, group=everybody, lost=(), made_here=group is None)
        self._restart(restored, everybody, number, restored_whole)

    def _restart(self, agreed: Draft, group: Group, number: int, whole: WholePlan) -> None:
        """Serve a draft on another group. Nothing that was shared with the old group is used again."""
        self._move.close_carrier()
        self._state.exchange.close()
        old = self._state.whole
        if self._state.group is not old.group:
            self._state.group.close()  # the plan made it, of the ranks that were left
        if old.made_here and old.group is not whole.group:
            old.group.close()
        self._state.whole = whole
        self._state.start(agreed, group, make_plan_id(agreed, number))
        self._move.start()
