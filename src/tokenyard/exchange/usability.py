"""Whether a plan can be used: not after it was closed, nor after a wait has ended without the others' answer.

Nor in a process that is forked from the one that made it.

After such a wait this rank does not know what the others have received, and a late answer must not be taken for an
answer to a later call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenyard.errors import Drifted, HandleError, PeerLost, PlanBroken, TokenyardError
from tokenyard.exchange.passes import TooManyRows
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.group.own_process import OwnProcess


class Usability:
    """Knows on one rank whether its plan was closed, and what has broken it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.own_process = OwnProcess("the plan", rank)  # the process in which the plan can be used
        self._closed = False
        self._left = False
        self.joining = False  # whether this rank joins the plan, and its experts have not come yet
        # Why a wait for the other ranks has ended without an answer; None, if none has.
        self.broken_by: BaseException | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the plan was closed."""
        return self._closed

    def close(self, *, left: bool = False) -> None:
        """Refuse all later calls; `left`: because the plan has let this rank go."""
        self._closed, self._left = True, self._left or left

    def break_by(self, cause: BaseException) -> None:
        """Refuse all later calls, because a wait for the other ranks ended without an answer."""
        self.broken_by = self.broken_by or cause

    def mark_broken_by_drift(self) -> PlanBroken:
        """Break the plan, because ranks met in different plans and their rounds are unknown; return the error."""
        cause = self.broken_by = self.broken_by or (
            Drifted(
                "the ranks were in different plans",
                expected="every rank of the group to call the layers of the same plans in the same order",
                fix="look for a branch that only some ranks take",
            )
        )
        return PlanBroken(cause, rank=self._rank)

    def check_open(self, *, layer: str | None = None) -> None:
        """Raise if the plan is closed, or made by another process."""
        self.own_process.check(layer=layer)
        if self._left:
            raise HandleError(
                "the plan has let this rank go (`plan.shrink`)",
                expected="calls on the ranks that are left",
                fix="end this rank, or let it come back as a new one: `plan.grow` there, `join_plan` here",
                layer=layer,
                rank=self._rank,
            )
        if self._closed:
            raise HandleError(
                "the plan is closed",
                expected="an open plan",
                fix="make a new plan",
                layer=layer,
                rank=self._rank,
            )

    def check(self, *, layer: str | None = None) -> None:
        """Raise if the plan is closed, broken, or made by another process."""
        self.own_process.check(layer=layer)
        if self._closed:
            self.check_open(layer=layer)
        if self.broken_by is not None:
            raise PlanBroken(self.broken_by, layer=layer, rank=self._rank)
        if self.joining:
            raise HandleError(
                "this rank's experts have not come yet",
                expected="a call of `tokenyard.elastic.take_over`, after all layers were made",
                fix="call `take_over(plan)` first",
                layer=layer,
                rank=self._rank,
            )

    @contextmanager
    def waiting(self, spec: ExchangeSpec | None = None) -> Iterator[None]:
        """A context for a wait for the other ranks. If it is interrupted, or a rank is lost, the plan is broken."""
        try:
            yield
        except BaseException as error:
            self.end_wait(error, spec)
            raise

    def end_wait(
        self, error: BaseException, spec: ExchangeSpec | None = None, *, for_others: bool = True
    ) -> None:
        """Take the error of a wait: add the layer's name, and break the plan unless the error is an answer of others.

        `for_others`: whether it was a wait for other ranks; else the plan can still be used.
        """
        if isinstance(error, TokenyardError) and spec is not None:
            error.at(layer=spec.layer, rank=self._rank)
        # Whether the other ranks answered: then all of them know of the error, and the plan can go on.
        answer = isinstance(error, TokenyardError | TooManyRows) and not isinstance(error, PeerLost)
        if for_others and not answer:
            self.break_by(error)
