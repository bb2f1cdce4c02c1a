"""Who makes the announcements of a plan on one rank: it knows the round, and what the plan tells beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tokenyard.errors import TokenyardError
from tokenyard.exchange.announcement import Announcement, Announcements, Phase, ignore_notices
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.passes import RowBound
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.usability import Usability


class Announcer:
    """Makes what this rank tells the others in each phase of each round of a plan."""

    def __init__(self, transport: Transport, usability: Usability, plan_id: int) -> None:
        self.plan_id = plan_id  # the same on all ranks, and different for each plan of a group
        self.layers: list[str] = []  # the names of the plan's layers
        self.round = 0  # the last dispatch in which all ranks met
        # Gives the number that this rank tells the others in a dispatch.
        self.notice: Callable[[], int] = int
        # Called with the numbers of all ranks, in the same dispatch on every rank: they agree without a message.
        self.noticed: Callable[[Sequence[int]], None] = ignore_notices
        self._transport, self._usability = transport, usability

    def of_dispatch(
        self, spec: ExchangeSpec, tokens: int, counts: Sequence[int], error: BaseException | None = None
    ) -> Announcements:
        """This rank starts the next round, with so many tokens, and rows for each rank; or it fails there."""
        bound = (
            None if spec.max_rows is None else RowBound(max_rows=spec.max_rows, loads=self._transport.loads)
        )
        return self._make(spec, Phase.DISPATCH, self.round + 1, tokens, counts, error, bound)

    def of_combine(self, arrival: Arrival, error: BaseException | None = None) -> Announcements:
        """This rank returns the results of an arrival; or it fails there."""
        tokens = arrival.routes.num_tokens if error is None else 0
        return self._make(arrival.spec, Phase.COMBINE, arrival.round, tokens, (), error, None)

    def of_failed_dispatch(self, spec: ExchangeSpec, error: BaseException) -> Announcements:
        """This rank starts the next round only to say that it failed."""
        return self.of_dispatch(spec, 0, [0] * self._num_counts(spec), error)

    def _num_counts(self, spec: ExchangeSpec) -> int:
        """The counts of an announcement: those of a pass, and where passes have a bound those of later ones."""
        return self._transport.num_counts(spec) * (1 if spec.max_rows is None else 2)

    def _make(
        self,
        spec: ExchangeSpec,
        phase: Phase,
        round: int,
        tokens: int,
        counts: Sequence[int],
        error: BaseException | None,
        bound: RowBound | None,
    ) -> Announcements:
        def say() -> Announcement:
            told = error.announced_as if isinstance(error, TokenyardError) else error
            return Announcement(
                plan=self.plan_id,
                layer=spec.index,
                phase=phase,
                round=round,
                tokens=tokens,
                counts=tuple(counts),
                error="" if told is None else f"{type(told).__name__}: {told}",
                notice=self.notice() if phase is Phase.DISPATCH else 0,
            )

        return Announcements(
            group=self._transport.group,
            layers=self.layers,
            say=say,
            most=spec.max_tokens,
            room=self._num_counts(spec),
            bound=bound,
            all_met=partial(self.meet, round),
            notice=self.notice,
            noticed=self.noticed,
            ranks_parted=self._usability.ranks_parted,
        )

    def meet(self, round: int) -> None:
        """All ranks were heard to be in a round."""
        self.round = max(self.round, round)
