"""A move of experts under way: a thread of each rank copies weights while the layers run, then all ranks switch.

**Preparing.** The thread uses a group of its own, so that it does not disturb the calls of layers. It copies the
experts that this rank gets into spare slots (`moving`), and reports when it is ready, or has failed.

**Switching.** In the announcement of every dispatch, each rank says how far its thread is. All ranks receive the same
announcements. After the same dispatch, all of them therefore know that every rank is ready, and they switch before the
next dispatch with nothing in flight: a call ends with the placement that it began with. If the thread of one rank has
failed, all ranks give the move up at that point.

**A loss.** If a rank dies before the switch, the others keep their placements. It may also die when some of the others
have received all announcements and switched, and the rest have not. The rest are ready, too, or no rank would have
switched. `Plan.go_on_without` finds out which ranks have switched, and lets the rest follow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tokenyard.elastic.moving import Carrier, HeldExperts, Parcel, bytes_of, not_held, streams, width
from tokenyard.errors import HandleError, PeerFailed, PeerLost
from tokenyard.experts import Experts
from tokenyard.experts.slots import ExpertSlots
from tokenyard.group import Group
from tokenyard.group.devices import rank_on
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Move, Placement, moves

if TYPE_CHECKING:
    from tokenyard.elastic.resizing import NextGroup

_log = logging.getLogger("tokenyard")

Step = Mapping[str, Placement]  # the layers that switch together, each with its placement


class HoldsExperts(Protocol):
    """A layer whose experts can be moved."""

    name: str  # its name in the plan
    experts: Experts  # the experts of this rank, with their weights
    slots: ExpertSlots  # the slot of each expert in these weights

    def switch(self, wiring: Wiring, came: dict[int, int]) -> None:
        """Use another placement from now on; `came` maps each expert that was copied to this rank to its slot."""

    def take_part(self) -> None:
        """Take part in a call that the other ranks make, without tokens of this rank."""


class Progress(IntEnum):
    """How far a rank's thread is with copying the experts of a step."""

    PREPARING = 0
    READY = 1
    FAILED = 2


class Rebalance:
    """A move of experts to other ranks: what `plan.rebalance`, `plan.grow` and `plan.shrink` return."""

    # the placements that layers will have, by layer; empty, if nothing moves
    placements: dict[str, Placement]
    error: BaseException | None  # why the experts stay where they are, if the move was given up

    def __init__(
        self,
        group: Group,
        carrier: Carrier,
        holders: Mapping[str, HoldsExperts],
        held: Mapping[str, Sequence[HeldExperts]],
        present: Step,
        steps: Sequence[Step],
        *,
        finish: Callable[[Rebalance], None],
        after: Rebalance | None = None,
        next_ranks: NextGroup | None = None,
    ) -> None:
        self.placements = {layer: placement for step in steps for layer, placement in step.items()}
        self.error = None
        self.decision: Progress = Progress.PREPARING  # what all ranks have agreed on in a dispatch
        self.came: dict[str, dict[int, int]] = {}  # by layer: the slots of experts that came in this step
        self.nbytes = 0  # bytes that came to this rank in this step
        self.seconds = 0.0  # of this step's copying
        self.pause_ms = 0.0  # milliseconds of the last switch, in which no layer runs on this rank
        self.next_ranks = next_ranks  # the group that the plan has after the last step, if it is another one
        self.holders = dict(holders)  # the layers whose experts move
        self.progress = Progress.PREPARING  # how far this rank's thread is with the present step
        self._group, self._present, self._steps = group, dict(present), list(steps)
        self._held = held  # by layer, where each rank holds its experts
        self._carrier, self._finish, self._after = carrier, finish, after
        self._number = 0
        self._changed = threading.Condition()
        self._cancelled = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to copy, in a thread."""
        if self._steps:
            self._group.wait_for_device()  # the thread reads weights on another stream: they must be written
            self._thread = threading.Thread(target=self._run, name="moving experts", daemon=True)
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all layers use their new placements; on a rank that leaves, whether it has no more calls to make."""
        return self._number == len(self._steps) or self.leaves_now

    @property
    def is_last_step(self) -> bool:
        """Whether the next switch is the last one."""
        return self._number == len(self._steps) - 1

    @property
    def leaves_now(self) -> bool:
        """Whether this rank leaves the plan, and all ranks have agreed to switch now."""
        ready = self.decision is Progress.READY and self.error is None
        leaves = self.next_ranks is not None and self.next_ranks.leaves
        return leaves and ready and self.is_last_step and self.next_ranks.take()  # type: ignore[union-attr]

    @property
    def has_ended(self) -> bool:
        """Whether this rank's thread has nothing more to do."""
        return self.is_done or self._thread is None or not self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether this rank's thread has copied all experts for the next switch, or no switch is left."""
        return self.is_done or self.progress is Progress.READY

    @property
    def step(self) -> Step:
        """The layers that switch next, with their placements."""
        return self._steps[self._number]

    def wait(self) -> None:
        """Wait until the experts have moved, and switch to the new placements. Collective over the plan's ranks.

        Calling this is not required: calls of layers switch, too, once all ranks are ready. Raises if the move was
        given up after an error on any rank, and the experts stay where they are.
        """
        self._finish(self)
        if self.error is not None:
            raise self.error
        if self.next_ranks is not None and self.next_ranks.leaves and self._thread is not None:
            self._thread.join()  # it waits until no other rank reads what this rank has sent

    def wait_for_thread(self) -> Progress:
        """Wait until this rank is ready for the next switch, or has failed."""
        with self._changed:
            while self.progress is Progress.PREPARING and self.error is None:
                self._changed.wait(1.0)  # with a limit, so that this thread can handle signals such as Ctrl-C
            return self.progress

    def switched(self) -> None:
        """Let the thread go on with the next step, after all layers of this step have switched."""
        with self._changed:
            self._present |= self.step
            self._number += 1
            self.progress = self.decision = Progress.PREPARING
            self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """End the move with an error: the experts stay where they are."""
        with self._changed:
            self.error, self._cancelled = self.error or error, True
            self._changed.notify_all()

    # -- The thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._after is not None and self._after._thread is not None:
                self._after._thread.join()  # the move before, if it was given up, may still write into spare slots
                self._after = None
            if self.next_ranks is not None:
                self._check()
                self.next_ranks.prepare()
                self._carrier, self._held = self.next_ranks.carrier, self.next_ranks.held or self._held
            self._carrier.keep(one for held in self._held.values() for one in held)
            with rank_on(self._group.device), torch.no_grad():
                while self._number < len(self._steps):
                    self._check()
                    self.copy()
                    self._group.wait_for_device()
                    self._report(Progress.READY)
                    self._await_switch()
            if self.next_ranks is not None:
                self.next_ranks.free_old_group()
        except BaseException as error:
            with self._changed:
                self.error = self.error or error
            if not isinstance(error, (PeerLost, PeerFailed)):
                self._carrier.abandon()
            self._carrier.close()  # its ranks may be in different calls: the next move makes a new group
            if self.next_ranks is not None:
                self.next_ranks.close(error=error)
            self._report(Progress.FAILED)
        finally:
            self.holders = {}  # no switch needs them any more, and they would keep freed layers in memory

    def copy(self) -> None:
        """Copy the experts of one step into spare slots."""
        started, mine = time.monotonic(), self._group.rank
        world = max((placement.world for placement in self.step.values()), default=self._group.size)
        paths = {layer: moves(self._present[layer], wanted) for layer, wanted in self.step.items()}
        tensors = {layer: self.holders[layer].experts.movable() for layer in self.step}
        widths = {
            layer: {name: width(tensor) for name, tensor in named.items()} for layer, named in tensors.items()
        }
        arrivals = {
            layer: [held.arrivals(path, rank) for rank, held in enumerate(self._held[layer])]
            for layer, path in paths.items()
        }
        came = {layer: by_rank[mine] for layer, by_rank in arrivals.items()}

        def read(parcel: Parcel) -> Tensor:
            slot = self.holders[parcel.layer].slots.of(parcel.expert)
            return bytes_of(tensors[parcel.layer][parcel.tensor][slot])

        def write(parcel: Parcel) -> Tensor:
            return bytes_of(tensors[parcel.layer][parcel.tensor][came[parcel.layer][parcel.expert]])

        through_group: dict[str, list[Move]] = {layer: [] for layer in paths}
        for layer, path in paths.items():
            held = self._held[layer]
            for move in path:
                if not held[move.source].is_mapped_by(held[move.target]):
                    through_group[layer].append(move)
                elif move.target == mine:
                    for name, tensor in tensors[layer].items():
                        into = bytes_of(tensor[came[layer][move.expert]])
                        try:
                            self._carrier.fetch(held[move.source], name, move.expert, into, self._check)
                        except OSError as error:
                            if (lost := not_held(self._group, move.source, error)) is None:
                                raise
                            self._carrier.abandon()  # others may wait for this rank in the group
                            raise lost from error
        self._carrier.carry(streams(world, through_group, widths), read, write, self._check)
        if self.next_ranks is not None:
            self.next_ranks.all_have_copied()
        for layer, placement in self.step.items():
            for rank, one in enumerate(self._held[layer]):
                one.slots.switch(placement.local_experts(rank), arrivals[layer][rank])
        for placement in self.step.values():  # builds the lookup tables, so that the first call need not
            placement.resolve(torch.zeros(1, 1, dtype=torch.int64), mine)
        self.came, self.seconds = came, time.monotonic() - started
        self.nbytes = sum(len(experts) * sum(widths[layer].values()) for layer, experts in came.items())

    def _check(self) -> None:
        if self._cancelled:
            raise HandleError(
                "the move of experts was given up",
                expected="the plan to go on as it is while experts move",
                fix="first call `wait` of the `Rebalance` that the earlier change returned",
                rank=self._group.rank,
            )

    def _report(self, progress: Progress) -> None:
        with self._changed:
            self.progress = progress
            self._changed.notify_all()

    def _await_switch(self) -> None:
        with self._changed:
            while self.progress is Progress.READY and not self._cancelled:
                self._changed.wait()


def failure_of(rank: int, errors: Sequence[str | None], own: BaseException | None) -> BaseException:
    """The error that a rank raises when a move was given up: its own, or `PeerFailed` for the rank that caused it.

    `errors` has the error of each rank as text, if there is one. A `PeerLost` counts as caused by another rank's error.
    """
    first = next(
        (r for r, words in enumerate(errors) if words and not words.startswith(PeerLost.__name__)), None
    )
    if own is not None and (first is None or first == rank or not isinstance(own, PeerLost)):
        return own
    first = first if first is not None else next(r for r, words in enumerate(errors) if words)
    return PeerFailed(first, str(errors[first]), phase="moving experts", rank=rank)
