"""The round trips of a rank that are under way: whether calls can be made, their order, and how all end if one fails.

    Usability        whether the plan is open, in its own process, and not broken by a loss
    InFlightQueue    arrivals that are not combined yet: each is combined once, in the order of dispatches, or given up
    OpenRoundTrips   the order of calls; an error on one rank reaches all ranks

**Turns.** One thread makes the calls of a plan. One phase travels at a time: each call first finishes the phase that
was started before, so that a transport handles one phase after the other. Results go back in the order of dispatches.

**One error, all ranks.** When one rank raises (bad input, an expert that fails), the others wait for it and must be
told. So every phase starts with an announcement from each rank: "layer 3, round 17, so many rows", or "I failed,
because …". A rank that fails announces that, then raises its own error; the others raise `PeerFailed`; the group stays
usable. Ranks that are in different layers, phases or rounds see it in these announcements, and raise `Drifted`.

**A loss.** A wait that ends without the others' answer (a rank is lost, or this one was interrupted) breaks the plan
(`Usability`): this rank makes no more announcements.

**A fork.** A process that is forked in the middle of a call (by an expert, say) announces nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

from tokenyard.errors import Drifted, HandleError, PeerLost, PlanBroken, TokenyardError, WrongProcess
from tokenyard.exchange.announcement import Announcer
from tokenyard.exchange.batch import Arrival, Failure
from tokenyard.exchange.passes import TooManyRows
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.group.one_thread import OneThread
from tokenyard.group.own_process import OwnProcess


class Usability:
    """Knows on one rank whether its plan can be used: it was not closed, and no wait in it ended without an answer.

    After such a wait this rank does not know what the others have received, and a late answer must not be taken for an
    answer to a later call.
    """

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
        if self.own_process.forks != OwnProcess.forks_now:
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


class InFlightQueue:
    """What one rank has dispatched and not yet combined, the oldest first. All ranks have the same ones."""

    def __init__(self, capacity: int, rank: int) -> None:
        self.capacity = capacity
        self._rank = rank
        self._waiting: deque[Arrival] = deque()
        # By round: the error of an arrival that will not be combined. It is announced when that is the oldest one.
        self._given_up: dict[int, BaseException] = {}

    def __contains__(self, arrival: object) -> bool:
        return any(waiting is arrival for waiting in self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self._waiting

    @property
    def oldest(self) -> Arrival | None:
        """The arrival that must be combined next; None if nothing is in flight."""
        return self._waiting[0] if self._waiting else None

    @property
    def free_region(self) -> int:
        """The first pair of regions that nothing in flight uses: the same one on every rank."""
        if not self._waiting:
            return 0
        used = {arrival.region for arrival in self._waiting}
        return next(region for region in range(self.capacity) if region not in used)

    @property
    def has_room(self) -> bool:
        """Whether one more dispatch may be in flight."""
        return len(self._waiting) < self.capacity

    def check_room(self, spec: ExchangeSpec) -> None:
        """Raise if no further dispatch may be in flight."""
        if not self.has_room:
            waiting = ", ".join(repr(arrival.spec.layer) for arrival in self._waiting)
            raise HandleError(
                f"{len(self._waiting)} dispatch in flight already (of {waiting})",
                expected=f"at most {self.capacity}",
                fix=f"combine it first, or plan(..., in_flight={self.capacity + 1})",
                layer=spec.layer,
                rank=self._rank,
            )

    def check_empty(self, layer: str | None) -> None:
        """Raise if a dispatch is in flight: it would have to be combined before a whole round trip of this layer."""
        if self._waiting:
            earlier = self._waiting[0].spec.layer
            raise HandleError(
                f"a dispatch of layer {earlier!r} is in flight, and is combined only after this call",
                expected="each dispatch to be combined in the order of the dispatches",
                fix=f"combine the dispatch of {earlier!r} first; inside a round trip, no other layer can be called",
                layer=layer,
                rank=self._rank,
            )

    def add(self, arrival: Arrival) -> None:
        """Append an arrival, as the newest one."""
        self._waiting.append(arrival)

    def take(self, arrival: Arrival) -> None:
        """Take an arrival out of the queue; raise if it is not the oldest one, or not in flight."""
        if not self._waiting or self._waiting[0] is not arrival:
            known = arrival in self
            raise HandleError(
                "an earlier dispatch is still in flight" if known else "this handle is not in flight",
                expected="each dispatch to be combined once, in the order of the dispatches",
                fix="combine the oldest dispatch first" if known else "dispatch again",
                layer=arrival.spec.layer,
                rank=self._rank,
            )
        self._waiting.popleft()

    def give_up(self, arrival: Arrival, error: BaseException) -> None:
        """Note that an arrival will not be combined, and why. Does nothing if it is not in flight."""
        if arrival in self:
            self._given_up[arrival.round] = error

    def take_given_up(self) -> Iterator[tuple[Arrival, BaseException]]:
        """Take the oldest arrivals out, with their errors, until one comes that was not given up."""
        while self._waiting and self._waiting[0].round in self._given_up:
            oldest = self._waiting.popleft()
            yield oldest, self._given_up.pop(oldest.round)

    def clear(self) -> None:
        """Forget all arrivals."""
        self._waiting.clear()
        self._given_up.clear()


class OpenRoundTrips:
    """Keeps the order of one rank's calls, and announces to the other ranks if one of the calls fails."""

    def __init__(
        self, transport: Transport, announcer: Announcer, usability: Usability, in_flight: InFlightQueue
    ) -> None:
        self.in_flight = in_flight  # what is dispatched and not combined
        self._transport, self._announcer, self._usability = transport, announcer, usability
        self._rank = transport.group.rank
        self._open: list[RoundTrip] = []  # in the order of their starts
        self._traveling: RoundTrip | None = None  # the one whose phase was started last
        self.one_thread = OneThread("the plan", self._rank)  # lets one thread at a time make calls

    # -- Turns ---------------------------------------------------------------------------------------------

    def begin(self, layer: str | None) -> None:
        """Begin a call: raise if the plan cannot be used, and finish the phase that travels, if one does."""
        self._usability.check(layer=layer)
        if self._traveling is not None:
            self.settle()

    def begin_dispatch(self, trip: RoundTrip) -> None:
        """Begin the dispatch of a batch; raise if too many dispatches are in flight."""
        self.begin(trip.spec.layer)
        if self._open:
            self.check_dropped(trip)
        self.in_flight.check_room(trip.spec)

    def travels(self, trip: RoundTrip) -> None:
        """Note that a phase of a round trip was started: it is finished before the next phase starts."""
        self._traveling = trip

    def settle(self) -> None:
        """Finish the phase that travels, if one does; raise if it failed."""
        traveling, self._traveling = self._traveling, None
        if traveling is not None:
            traveling.settle()

    def _settles(self) -> bool:
        """Finish the phase that travels, before an error is announced; return whether that phase succeeded."""
        try:
            self.settle()
        except Exception:  # the caller raises the announced error; `wait` of this phase raises this one
            return False
        return True

    def add(self, trip: RoundTrip) -> RoundTrip:
        """Add a round trip that is made in several calls: each inside of `propagate_errors`; `end` removes it."""
        self._open.append(trip)
        return trip

    def end(self, trip: RoundTrip) -> None:
        """Remove a round trip whose phases this rank has all made."""
        self._open = [other for other in self._open if other is not trip]
        self.forget(trip)

    def forget(self, trip: RoundTrip) -> None:
        """Forget a round trip of which nothing travels any more: it would keep the tensors of its batch alive."""
        if self._traveling is trip and not trip.travels:
            self._traveling = None

    def end_all(self, why: str) -> list[RoundTrip]:
        """Give up all round trips, and return them; `why` becomes part of the error of whoever finishes one."""
        ended, self._open = self._open, []
        for trip in ended:
            trip.ended_by = why
        return ended

    def close(self) -> None:
        """Give up the phase that travels and all round trips, because the plan was closed."""
        self._traveling = None
        self.end_all("the plan was closed")

    def check_turn(self, trip: RoundTrip) -> None:
        """Raise unless it is this round trip's turn to send back its results."""
        layer = trip.spec.layer
        self._usability.check(layer=layer)
        if trip.ended_by is not None:
            raise HandleError(
                f"this batch was given up: {trip.ended_by}",
                expected="no error in any batch that was under way",
                fix="start it again",
                layer=layer,
                rank=self._rank,
            )
        for earlier in self._open[: self._open.index(trip)]:
            if not earlier.is_sent_back:
                raise HandleError(
                    f"a batch of layer {earlier.spec.layer!r} was started before, and is not finished",
                    expected="batches to be finished in the order in which they were started",
                    fix=f"finish the batch of {earlier.spec.layer!r} first",
                    layer=layer,
                    rank=self._rank,
                )

    def next_due(self, trip: RoundTrip) -> RoundTrip:
        """The round trip that must go on first: the given one, unless the oldest arrival in flight is another's.

        That happens if a batch goes in several passes while another one is in flight. All ranks find the same one.
        """
        oldest = self.in_flight.oldest
        return next((other for other in self._open if other.arrived is oldest is not None), trip)

    # -- One error, all ranks ------------------------------------------------------------------------------

    def in_use(self, *, layer: str | None, alone: bool) -> InUse:
        """See `Exchange.in_use`."""
        return InUse(self, layer, alone=alone)

    def whole(self, trip: RoundTrip) -> InTrip:
        """See `Exchange.begin`."""
        return InTrip(self, trip, whole=True)

    def propagate_errors(self, trip: RoundTrip) -> InTrip:
        """A context for a part of a round trip: an error inside, on one rank, ends all round trips, on all ranks."""
        return InTrip(self, trip, whole=False)

    def enter(self, layer: str | None) -> None:
        """Let this thread make calls, until `one_thread.leave`; raise if another one does, or in a forked process."""
        try:
            self.one_thread.enter()
        except WrongProcess as error:
            raise error.at(layer=layer) from None

    def begin_use(self, layer: str | None, *, alone: bool) -> None:
        """Begin a call of the plan that all ranks make; see `Exchange.in_use`."""
        self.begin(layer)
        if self._open:
            self.check_dropped()
        if alone:
            self.in_flight.check_empty(layer)

    def fail_use(self, error: BaseException) -> None:
        """Break the plan if the error of a call is the loss of a rank."""
        if isinstance(error, PeerLost):
            self._usability.break_by(error)

    def fail_trip(self, trip: RoundTrip, error: BaseException) -> NoReturn:
        """End all round trips, on all ranks, because of an error in a part of one; an interrupt is announced, too."""
        self._end_by(error, trip, owes_dispatch=trip.owes_dispatch)

    def check_dropped(self, due: RoundTrip | None = None) -> None:
        """Raise if a round trip was dropped unfinished; `due`: this is asked before its dispatch."""
        for trip in self._open:
            if trip.is_dropped:
                error = HandleError(
                    "a batch was started, and what `start` returned is gone",
                    expected="each batch that was started to be finished",
                    fix="keep what `start` returns, and call its `finish`",
                    layer=trip.spec.layer,
                    rank=self._rank,
                )
                # If there is room for one more dispatch in flight, the other ranks have begun this one, and wait.
                owes_dispatch = due is not None and self.in_flight.has_room
                self._end_by(error, due or trip, owes_dispatch=owes_dispatch)

    def _end_by(self, error: BaseException, trip: RoundTrip, *, owes_dispatch: bool) -> NoReturn:
        """End all round trips because of an error in one of them: announce it to the others, and raise it.

        `owes_dispatch`: the others wait for a dispatch of this rank, in addition to its combines.
        """
        trips = self.end_all(f"{type(error).__name__}: {error}")
        # If the phase before has failed, no rank begins this dispatch.
        settled = isinstance(error, PeerLost) or self._usability.broken_by is not None or self._settles()

        def tell() -> None:
            if owes_dispatch and settled:
                self._announce_failed_dispatch(trip, error)
            for other in trips:
                if other.arrived is not None:
                    self.in_flight.give_up(other.arrived, error)

        if owes_dispatch or any(other.arrived in self.in_flight for other in trips):
            self._fail(trip.spec, error, tell)
        raise error

    def fail_dispatch(self, trip: RoundTrip, error: BaseException) -> NoReturn:
        """Take part in a dispatch only to announce that this rank failed; raise its error."""
        self._fail(trip.spec, error, lambda: self._announce_failed_dispatch(trip, error))

    def fail_combine(self, arrival: Arrival, error: BaseException) -> NoReturn:
        """Take part in the combine of an arrival only to announce that this rank failed; raise its error."""
        self._fail(arrival.spec, error, lambda: self._announce_failed_combine(arrival, error))

    def give_up(self, arrival: Arrival, error: BaseException) -> NoReturn:
        """Raise an error found after the dispatch had ended; the others receive it in place of this rank's combine."""
        self._fail(arrival.spec, error, lambda: self.in_flight.give_up(arrival, error))

    def _fail(self, spec: ExchangeSpec, error: BaseException, tell: Callable[[], None]) -> NoReturn:
        """Announce by `tell` that this rank failed, unless the plan is broken; then raise its error."""
        if not self._usability.own_process.is_here:
            raise error
        if isinstance(error, TokenyardError):
            error.at(layer=spec.layer, rank=self._rank)
        if isinstance(error, PeerLost):
            self._usability.break_by(error)
        if self._usability.broken_by is None:
            self._settles()  # what travels ends first
        if self._usability.broken_by is None:
            with self._usability.waiting(spec):
                tell()
            self.tell_given_up(spec)
        raise error

    def _announce_failed_dispatch(self, trip: RoundTrip, error: BaseException) -> None:
        told = self._announcer.of_failed_dispatch(trip.spec, error, forward=trip.forward)
        region = self.in_flight.free_region
        self._transport.fail(Failure(spec=trip.spec, region=region, announcements=told, arrival=None))

    def _announce_failed_combine(self, arrival: Arrival, error: BaseException) -> None:
        told = self._announcer.of_combine(arrival.spec, arrival.round, 0, error, forward=arrival.forward)
        self._transport.fail(
            Failure(spec=arrival.spec, region=arrival.region, announcements=told, arrival=arrival)
        )

    def tell_given_up(self, spec: ExchangeSpec) -> None:
        """Take part in the combines of the oldest arrivals, if these were given up, only to announce that."""
        if self._usability.own_process.forks != OwnProcess.forks_now:
            self._usability.own_process.check(layer=spec.layer)
        for arrival, error in self.in_flight.take_given_up():
            with self._usability.waiting(spec):
                self._announce_failed_combine(arrival, error)


class InUse:
    """A context for a call of a plan that one thread makes. A class: entering a generator takes microseconds more."""

    __slots__ = ("_alone", "_layer", "_trips")

    def __init__(self, trips: OpenRoundTrips, layer: str | None, *, alone: bool) -> None:
        self._trips, self._layer, self._alone = trips, layer, alone

    def __enter__(self) -> None:
        trips = self._trips
        trips.enter(self._layer)
        try:
            trips.begin_use(self._layer, alone=self._alone)
        except BaseException:
            trips.one_thread.leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._trips.fail_use(error)
        self._trips.one_thread.leave()


class InTrip:
    """A context for a round trip (`whole`), or for some steps of one: an error inside, on one rank, reaches all."""

    __slots__ = ("_trip", "_trips", "_whole")

    def __init__(self, trips: OpenRoundTrips, trip: RoundTrip, *, whole: bool) -> None:
        self._trips, self._trip, self._whole = trips, trip, whole

    def __enter__(self) -> RoundTrip:
        trips, trip = self._trips, self._trip
        trips.enter(trip.spec.layer)
        if self._whole:
            try:
                trips.begin_use(trip.spec.layer, alone=True)
            except BaseException:
                trips.one_thread.leave()
                raise
            trips.add(trip)
        return trip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                if self._whole:
                    self._trips.fail_use(error)
                self._trips.fail_trip(self._trip, error)
            elif self._whole:
                self._trips.end(self._trip)
        finally:
            self._trips.one_thread.leave()
