"""The round trips of a rank that are under way: their order, and how all of them end if one fails.

**Turns.** One thread makes the calls of a plan. One phase travels at a time: each call first finishes the phase that
was started before, so that a transport handles one phase after the other. Results go back in the order of dispatches.

**One error, all ranks.** When one rank raises (bad input, an expert that fails), the others wait for it and must be
told. So every phase starts with an announcement from each rank: "layer 3, round 17, so many rows", or "I failed,
because …". A rank that fails announces that, then raises its own error; the others raise `PeerFailed`; the group stays
usable. Ranks that are in different layers, phases or rounds see it in these announcements, and raise `Drifted`.

**A loss.** A wait that ends without the others' answer (a rank is lost, or this one was interrupted) breaks the plan
(`usability`): this rank makes no more announcements.

**A fork.** A process that is forked in the middle of a call (by an expert, say) announces nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from tokenyard.errors import HandleError, PeerLost, TokenyardError, WrongProcess
from tokenyard.exchange.announcement import Announcer
from tokenyard.exchange.batch import Arrival, Failure
from tokenyard.exchange.in_flight import InFlightQueue
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.usability import Usability
from tokenyard.group.base import Pending
from tokenyard.group.one_thread import OneThread

Result = TypeVar("Result")


def _nothing() -> None:
    pass


class OpenRoundTrips:
    """Keeps the order of one rank's calls, and announces to the other ranks if one of the calls fails."""

    def __init__(
        self, transport: Transport, announcer: Announcer, usability: Usability, in_flight: InFlightQueue
    ) -> None:
        self._transport, self._announcer = transport, announcer
        self._usability, self._in_flight = usability, in_flight
        self._rank = transport.group.rank
        self._open: list[RoundTrip] = []  # in the order of their starts
        self._traveling: Pending[Any] | None = None  # the phase that was started last
        self.one_thread = OneThread("the plan", self._rank)  # lets one thread at a time make calls

    # -- Turns ---------------------------------------------------------------------------------------------

    def begin(self, layer: str | None) -> None:
        """Begin a call: raise if the plan cannot be used, and finish the phase that travels, if one does."""
        self._usability.check(layer=layer)
        if self._traveling is not None:
            self.settle()

    def begin_dispatch(self, spec: ExchangeSpec) -> None:
        """Begin the dispatch of a batch; raise if too many dispatches are in flight."""
        self.begin(spec.layer)
        self._check_dropped(spec)
        self._in_flight.check_room(spec)

    def in_use(self, *, layer: str | None, alone: bool) -> AbstractContextManager[None]:
        """See `Exchange.in_use`."""

        def begin() -> None:
            self.begin(layer)
            self._check_dropped()
            if alone:
                self._in_flight.check_empty(layer)

        def failed(error: BaseException) -> None:
            if isinstance(error, PeerLost):
                self._usability.break_by(error)

        return _Call(self.one_thread, layer, begin, failed)

    def travels(
        self, finish: Callable[[], Result], check: Callable[[Result], None] | None = None
    ) -> Pending[Result]:
        """Note a phase that was started: `finish` runs when it is waited for, or before the next phase starts."""
        self._traveling = traveling = Pending(finish, check)
        return traveling

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
        trip.advance = None  # the function keeps the tensors of the batch alive

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

    def next_to_advance(self, trip: RoundTrip) -> RoundTrip:
        """The round trip that must go on first: the given one, unless the oldest arrival in flight is another's.

        That happens if a batch goes in several passes while another one is in flight. All ranks find the same one.
        """
        oldest = self._in_flight.oldest
        return next((other for other in self._open if other.arrival is oldest is not None), trip)

    # -- One error, all ranks ------------------------------------------------------------------------------

    def propagate_errors(self, trip: RoundTrip) -> AbstractContextManager[None]:
        """A context for a part of a round trip: an error inside, on one rank, ends all round trips, on all ranks."""

        def failed(error: BaseException) -> None:  # an interrupt is announced to the others, too
            self._end_by(error, trip.spec, owes_dispatch=trip.owes_dispatch)

        return _Call(self.one_thread, trip.spec.layer, _nothing, failed)

    def _check_dropped(self, spec: ExchangeSpec | None = None) -> None:
        """Raise if a round trip was dropped unfinished; `spec`: this is asked before a dispatch of that layer."""
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
                owes_dispatch = spec is not None and self._in_flight.has_room
                self._end_by(error, spec or trip.spec, owes_dispatch=owes_dispatch)

    def _end_by(self, error: BaseException, spec: ExchangeSpec, *, owes_dispatch: bool) -> NoReturn:
        """End all round trips because of an error in one of them: announce it to the others, and raise it.

        `owes_dispatch`: the others wait for a dispatch of this rank, in addition to its combines.
        """
        trips = self.end_all(f"{type(error).__name__}: {error}")
        # If the phase before has failed, no rank begins this dispatch.
        settled = isinstance(error, PeerLost) or self._usability.broken_by is not None or self._settles()

        def tell() -> None:
            if owes_dispatch and settled:
                self._announce_failed_dispatch(spec, error)
            for other in trips:
                if other.arrival is not None:
                    self._in_flight.give_up(other.arrival, error)

        if owes_dispatch or any(other.arrival in self._in_flight for other in trips):
            self._fail(spec, error, tell)
        raise error

    def fail_dispatch(self, spec: ExchangeSpec, error: BaseException) -> NoReturn:
        """Take part in a dispatch only to announce that this rank failed; raise its error."""
        self._fail(spec, error, lambda: self._announce_failed_dispatch(spec, error))

    def fail_combine(self, arrival: Arrival, error: BaseException) -> NoReturn:
        """Take part in the combine of an arrival only to announce that this rank failed; raise its error."""
        self._fail(arrival.spec, error, lambda: self._announce_failed_combine(arrival, error))

    def give_up(self, arrival: Arrival, error: BaseException) -> NoReturn:
        """Raise an error found after the dispatch had ended; the others receive it in place of this rank's combine."""
        self._fail(arrival.spec, error, lambda: self._in_flight.give_up(arrival, error))

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

    def _announce_failed_dispatch(self, spec: ExchangeSpec, error: BaseException) -> None:
        told = self._announcer.of_failed_dispatch(spec, error)
        region = self._in_flight.free_region
        self._transport.fail(Failure(spec=spec, region=region, announcements=told, arrival=None))

    def _announce_failed_combine(self, arrival: Arrival, error: BaseException) -> None:
        told = self._announcer.of_combine(arrival.spec, arrival.round, 0, error)
        self._transport.fail(
            Failure(spec=arrival.spec, region=arrival.region, announcements=told, arrival=arrival)
        )

    def tell_given_up(self, spec: ExchangeSpec) -> None:
        """Take part in the combines of the oldest arrivals, if these were given up, only to announce that."""
        self._usability.own_process.check(layer=spec.layer)
        for arrival, error in self._in_flight.take_given_up():
            with self._usability.waiting(spec):
                self._announce_failed_combine(arrival, error)


class _Call:
    """A context for a call that one thread makes: `begin` runs on entering, `failed` if an error leaves it.

    A class and no generator, because every call of a layer enters some, and a generator takes microseconds more.
    """

    __slots__ = ("_begin", "_failed", "_layer", "_one_thread")

    def __init__(
        self,
        one_thread: OneThread,
        layer: str | None,
        begin: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._one_thread, self._layer, self._begin, self._failed = one_thread, layer, begin, failed

    def __enter__(self) -> None:
        try:
            self._one_thread.enter()
        except WrongProcess as error:
            raise error.at(layer=self._layer) from None
        try:
            self._begin()
        except BaseException:
            self._one_thread.leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._failed(error)
        finally:
            self._one_thread.leave()
