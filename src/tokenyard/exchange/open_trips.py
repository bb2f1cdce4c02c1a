"""The round trips of a rank that are under way: whose turn it is, and what becomes of all of them if one fails.

**Turns.** One thread makes the calls of a plan. One phase travels at a time: each call first finishes the one that was
started before, so that a transport sees one phase after the other. Results go back in the order of the dispatches.

**One error, all ranks.** Bad input, or an expert that raises, on one rank must reach the others, which wait. So every
phase starts with an announcement from each rank, "here is layer 3, round 17, so many rows", or "I failed,
because …". A rank that fails still announces that, then raises its own error; the others raise `PeerFailed`;
nothing is lost, and the group stays usable. Ranks that are in different layers, phases or rounds find out here
(`Drifted`).

**A loss.** A wait that ends without the others' answer (a rank is lost, or this one was interrupted) breaks the plan
(`usability`): nobody is told anything any more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from tokenyard.errors import HandleError, PeerLost, TokenyardError
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
    """Keeps the order of one rank's calls, and tells the other ranks where one of them fails."""

    def __init__(
        self, transport: Transport, announcer: Announcer, usability: Usability, in_flight: InFlightQueue
    ) -> None:
        self._transport, self._announcer = transport, announcer
        self._usability, self._in_flight = usability, in_flight
        self._rank = transport.group.rank
        self._open: list[RoundTrip] = []  # in the order of their starts
        self._traveling: Pending[Any] | None = None  # the phase that was started last
        self.one_thread = OneThread("the plan")  # which makes all calls

    # -- Turns ---------------------------------------------------------------------------------------------

    def begin(self, layer: str | None) -> None:
        """Begin a call: finish what travels, or say why the plan cannot be used."""
        self._usability.check(layer=layer)
        if self._traveling is not None:
            self.settle()

    def begin_dispatch(self, spec: ExchangeSpec) -> None:
        """Begin the dispatch of a batch, for which there is room."""
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

        return _Call(self.one_thread, begin, failed)

    def travels(
        self, finish: Callable[[], Result], check: Callable[[Result], None] | None = None
    ) -> Pending[Result]:
        """A phase that was started. It is finished when it is waited for, or before the next one is started."""
        self._traveling = traveling = Pending(finish, check)
        return traveling

    def settle(self) -> None:
        """Finish the phase that travels, if one does; raise if it failed."""
        traveling, self._traveling = self._traveling, None
        if traveling is not None:
            traveling.settle()

    def _settles(self) -> bool:
        """Finish the phase that travels before an error is told; return whether it did not fail."""
        try:
            self.settle()
        except Exception:  # the error that is told is raised; this one, by whoever asks for what travels
            return False
        return True

    def add(self, trip: RoundTrip) -> RoundTrip:
        """One more, that is made in several calls, each inside of `telling`, up to `end`."""
        self._open.append(trip)
        return trip

    def end(self, trip: RoundTrip) -> None:
        """This rank owes the others nothing more of a round trip."""
        self._open = [other for other in self._open if other is not trip]
        trip.advance = None  # it holds the batch

    def end_all(self, why: str) -> list[RoundTrip]:
        """All of them, which are given up."""
        ended, self._open = self._open, []
        for trip in ended:
            trip.ended_by = why
        return ended

    def close(self) -> None:
        """The plan was closed: nothing is finished any more."""
        self._traveling = None
        self.end_all("the plan was closed")

    def check_turn(self, trip: RoundTrip) -> None:
        """Raise unless the results of a round trip are the next ones that go back."""
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
        """The round trip that goes on before a given one can: itself, unless another one's arrival is older.

        That happens where a batch goes in several passes while another one is in flight. All ranks find the same one.
        """
        oldest = self._in_flight.oldest
        return next((other for other in self._open if other.arrival is oldest is not None), trip)

    # -- One error, all ranks ------------------------------------------------------------------------------

    def telling(self, trip: RoundTrip) -> AbstractContextManager[None]:
        """A part of a round trip. An error in it, on one rank, ends all round trips under way, on all ranks."""

        def failed(error: BaseException) -> None:  # one that is interrupted owes the others a word, too
            self._end_by(error, trip.spec, owes_dispatch=trip.owes_dispatch)

        return _Call(self.one_thread, _nothing, failed)

    def _check_dropped(self, spec: ExchangeSpec | None = None) -> None:
        """Raise if nobody can finish a round trip any more; before a dispatch of a layer, if its spec is given."""
        for trip in self._open:
            if trip.is_dropped:
                error = HandleError(
                    "a batch was started, and what `start` returned is gone",
                    expected="each batch that was started to be finished",
                    fix="keep what `start` returns, and call its `finish`",
                    layer=trip.spec.layer,
                    rank=self._rank,
                )
                # Where one more may be in flight, the others have begun this dispatch, too.
                owes_dispatch = spec is not None and self._in_flight.has_room
                self._end_by(error, spec or trip.spec, owes_dispatch=owes_dispatch)

    def _end_by(self, error: BaseException, spec: ExchangeSpec, *, owes_dispatch: bool) -> NoReturn:
        """End all round trips because of an error in one of them: tell the others, and raise it.

        `owes_dispatch`: they wait for a dispatch of this rank, too.
        """
        trips = self.end_all(f"{type(error).__name__}: {error}")
        # Where the phase before has failed, nobody begins this dispatch.
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
        """Take part in a dispatch only to say that this rank has an error; raise it."""
        self._fail(spec, error, lambda: self._announce_failed_dispatch(spec, error))

    def fail_combine(self, arrival: Arrival, error: BaseException) -> NoReturn:
        """Take part in the combine of an arrival only to say that this rank has an error; raise it."""
        self._fail(arrival.spec, error, lambda: self._announce_failed_combine(arrival, error))

    def give_up(self, arrival: Arrival, error: BaseException) -> NoReturn:
        """Raise an error that was found when the others had gone on: they hear of it in this rank's combine."""
        self._fail(arrival.spec, error, lambda: self._in_flight.give_up(arrival, error))

    def _fail(self, spec: ExchangeSpec, error: BaseException, tell: Callable[[], None]) -> NoReturn:
        """Tell the others that this rank failed, then raise its error."""
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
        """Take part in the combines of the oldest arrivals that were given up, only to say so."""
        for arrival, error in self._in_flight.take_given_up():
            with self._usability.waiting(spec):
                self._announce_failed_combine(arrival, error)


class _Call:
    """A call that one thread makes, and what is done if it fails.

    A class, as every call of a layer enters some: a generator takes some microseconds more.
    """

    __slots__ = ("_begin", "_failed", "_one_thread")

    def __init__(
        self, one_thread: OneThread, begin: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:
        self._one_thread, self._begin, self._failed = one_thread, begin, failed

    def __enter__(self) -> None:
        self._one_thread.enter()
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
