"""An exchange moves rows out to the ranks that own their experts, and results back: one class, over any transport.

    dispatch(spec, rows, routes) → Arrival           each row once to each *rank* that owns one of its experts
    combine(arrival, expert rows) → CombinedRows     one row per (token, rank) back, summed in float32

`start_dispatch` and `start_combine` return while rows travel; `wait` returns the same. One of them travels at a time:
each call first waits for what was started before, so that a transport sees one phase after the other.

Where a plan bounds the rows that a rank receives (`max_rows`), a batch that brings more goes in several passes:
`dispatch` sends as many tokens as have room; after their combine, as long as `arrival.has_more`, `dispatch_next` sends
the next ones (`passes`).

An exchange knows a group, placements and formats; what an expert is, it does not know. `ExchangeSpec` is all that it
is told of a layer. An `Arrival` is a frozen handle: it is combined once, in the order of dispatches, or it is an error.
How bytes travel is the matter of a `Transport`; checks, the order of calls, failures and statistics are the same for
all of them, and are here.

**Order.** Received rows stand in (source rank, token) order. Results are summed in rank order, in float32,
and rounded once: the result is bitwise the same in every run, on every kind of group, through every exchange.

**One error, all ranks.** Bad input, or an expert that raises, on one rank must reach the others, which wait. So every
phase starts with an announcement from each rank, "here is layer 3, round 17, so many rows", or "I failed,
because …". A rank that fails still announces that, then raises its own error; the others raise `PeerFailed`;
nothing is lost, and the group stays usable. Ranks that are in different layers, phases or rounds find out here
(`Drifted`).

**A loss.** A wait that ends without the others' answer (a rank is lost, or this one was interrupted) breaks the plan:
nobody knows what the others have received, and a late answer must not be taken for an answer to a later call. Every
call raises `PlanBroken` from then on; `Plan.go_on_without` and `Plan.readmit` make a new exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import Tensor

from tokenyard.errors import (
    ContractError,
    Corrupted,
    HandleError,
    PeerFailed,
    PeerLost,
    TokenyardError,
)
from tokenyard.exchange.announcement import Announcement, Announcements, Phase, ignore_notices
from tokenyard.exchange.batch import (
    Arrival,
    Batch,
    BatchRoutes,
    Failure,
    Part,
    Results,
    ResultsAtHome,
    SumAhead,
    UnencodedRows,
)
from tokenyard.exchange.checks import check_batch, check_output, check_result, check_sum
from tokenyard.exchange.in_flight import InFlightQueue
from tokenyard.exchange.integrity.watched import WatchedTransport
from tokenyard.exchange.passes import RowBound, TooManyRows, first_part, more_parts, parts_for
from tokenyard.exchange.round_trip import OpenRoundTrips, RoundTrip
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.stats import LayerStats, LoadCounter
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.usability import Usability
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Background, Group, Pending
from tokenyard.group.one_thread import OneThread, by_one_thread
from tokenyard.routing import Routes
from tokenyard.rows import (
    CombinedRows,
    ExpertResult,
    RankRows,
    RoutingLogits,
)

Home = TypeVar("Home")  # what is made of results that came home


@final
class Exchange:
    """Moves rows for all layers of a plan, over one transport."""

    def __init__(
        self,
        transport: type[Transport],
        group: Group,
        *,
        in_flight: int = 1,
        plan_id: int = 0,
        paranoid: bool = False,
        sms: int | None = None,
    ) -> None:
        self.group = group  # the ranks that exchange
        chosen = transport.on(group.device)
        # What moves the bytes.
        self.transport: Transport = (
            WatchedTransport(chosen, group, in_flight=in_flight)
            if paranoid
            else chosen(group, in_flight=in_flight)
        )
        self.transport.sms = sms
        self.stats: dict[str, LayerStats] = {}  # counters by layer
        self.load = LoadCounter(group.device)  # choices that fell on each expert
        # Gives the number that this rank tells the others in a dispatch.
        self.notice: Callable[[], int] = int
        # Called with the numbers of all ranks, in the same dispatch on every rank: they agree without a message.
        self.noticed: Callable[[Sequence[int]], None] = ignore_notices
        # Whether `noticed` is called: where a dispatch waits for what the others tell.
        self.hears_notices = self.transport.reads_values
        self._in_flight = InFlightQueue(in_flight, group.rank)
        self.plan_id = plan_id  # the same on all ranks, and different for each plan of a group
        self._names: list[str] = []
        self._round = 0  # the last dispatch in which all ranks met
        self.usability = Usability(group.rank)  # whether the plan is open, and not broken
        self._traveling: Pending[Any] | None = None  # the phase that was started last
        self._trips = OpenRoundTrips(group.rank)
        self._one_thread = OneThread("the plan")

    # -- The layers ----------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on. Collective; handles that are in flight raise afterwards."""
        self.transport.serve(specs)
        self._served(specs)

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers, and give back what they do not need. Collective."""
        self.transport.trim(specs)
        self._served(specs)

    def _served(self, specs: Sequence[ExchangeSpec]) -> None:
        self.stats = {s.layer: self.stats.get(s.layer) or LayerStats(self.group.size) for s in specs}
        self._names = list(self.stats)
        self.load.serve({s.layer: s.num_experts for s in specs})
        self._in_flight.clear()
        self._trips.end_all("the layers of the plan have changed")

    @by_one_thread
    def is_between_calls(self) -> bool:
        """Finish what travels; return whether nothing is in flight then. All ranks find the same before a dispatch."""
        self._settle()
        return self._in_flight.is_empty

    @property
    def rounds(self) -> int:
        """The dispatches in which all ranks met: between calls, the same number on every rank."""
        return self._round

    @property
    def counts_choices(self) -> bool:
        """Whether `load` counts: ids are read before they travel, or counted where they do."""
        return self.transport.reads_values or self.transport.counts_choices

    def switch(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry the same layers with other placements from the next dispatch on. All ranks call this, between calls."""
        self.transport.serve(specs)

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        """Make ready whatever the first round trips of these layers would otherwise wait for. Collective."""
        self.transport.warmup(specs)

    @by_one_thread
    def synchronize(self) -> None:
        """Raise what went wrong in calls that did not wait for it."""
        with self.usability.waiting():
            self.transport.synchronize()

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """Batches whose shapes do not depend on what is in them, for a CUDA graph."""
        return self.transport.fixed_shapes(max_tokens)

    # -- The way out ---------------------------------------------------------------------------------------

    def encode(self, spec: ExchangeSpec, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """Rows in the layer's wire; or as they are, where the transport encodes them on their way."""
        if self.transport.encodes(spec.wire):
            return UnencodedRows(format=spec.wire, x_TH=x_TH)
        return spec.wire.encode(x_TH)

    def dispatch(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Arrival:
        """Send each row to every rank that owns one of its experts; return what the others sent here.

        `routes` of an earlier arrival (`arrival.routes`) send other rows of the same tokens the same way. If
        `arrival.has_more`, there was no room for all rows: `dispatch_next` sends more of them after the combine.
        """
        return self.start_dispatch(spec, rows, routes, extra, ahead=False).wait()

    def beside(self, job: Callable[[], Home]) -> Home:
        """What a job computes that needs no rows of others, beside the dispatch that was started last.

        What it gives may only be added in the sum (`add`), which waits for it.
        """
        return self.transport.beside(job)

    def dispatch_next(self, arrival: Arrival) -> Arrival:
        """Send more rows of a batch that was too large for one pass. Collective, as long as `arrival.has_more`."""
        return self.start_next(arrival).wait()

    @by_one_thread
    def start_dispatch(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
        *,
        ahead: bool = True,
        takes_slots: bool = False,
    ) -> Pending[Arrival]:
        """Start what `dispatch` does, and return while rows travel. `ahead`: something is computed meanwhile.

        With `takes_slots`, empty slots may be among the rows that come, with ids of -1.
        """
        self.usability.check(layer=spec.layer)
        self._settle()
        self._check_dropped(spec)
        self._in_flight.check_room(spec)
        try:
            given = {} if extra is None else extra
            batch = self._checked(
                spec, self._round + 1, rows, routes, given, ahead=ahead, takes_slots=takes_slots
            )
            pending = self._ahead(self.transport.send(batch), ahead)
        except Exception as error:
            self._fail(spec, error, partial(self._fail_dispatch, spec, error))
        return self._travels(partial(self._arrive, batch, pending), self._check_arrival)

    @by_one_thread
    def start_next(self, arrival: Arrival) -> Pending[Arrival]:
        """Start what `dispatch_next` does, and return while rows travel."""
        spec, part = arrival.spec, arrival.part
        self.usability.check(layer=spec.layer)
        self._settle()
        if part is None or not arrival.has_more:
            raise HandleError(
                "all rows of this batch were dispatched",
                expected="an arrival with `has_more`",
                fix="dispatch the next batch",
                layer=spec.layer,
                rank=self.group.rank,
            )
        self._in_flight.check_room(spec)
        assert spec.max_rows is not None
        parts = parts_for(part.left, spec.max_rows)
        batch, pending = self._send_part(part.batch, arrival.tokens.stop, parts)
        return self._travels(partial(self._arrive, batch, pending, is_next=True), self._check_arrival)

    def _send_part(self, batch: Batch, first: int, parts: int) -> tuple[Batch, Pending[Arrival]]:
        """Send the first of so many parts of the tokens of a batch from `first` on. All ranks do the same."""
        spec, routes = batch.spec, batch.routes
        try:
            assert isinstance(batch.rows, EncodedRows)
            last = first + first_part(batch.num_tokens - first, parts)
            later = self.transport.counts(routes.of_tokens(last, batch.num_tokens))
            if not any(self.transport.loads(self.group.rank, later)):
                last = batch.num_tokens  # tokens that go nowhere wait for no other pass
            counts = self.transport.counts(routes.of_tokens(first, last))
            sent = replace(
                batch,
                round=self._round + 1,
                region=self._in_flight.free_region,
                rows=batch.rows.slice(first, last),
                extra={name: payload[first:last] for name, payload in batch.extra.items()},
                routes=routes.of_tokens(first, last),
                announcements=self._announcements(
                    spec, Phase.DISPATCH, self._round + 1, tokens=last - first, counts=[*counts, *later]
                ),
                part=Part(batch=batch, first=first, parts=parts),
            )
            return sent, self.transport.send(sent)
        except Exception as error:
            self._fail(spec, error, partial(self._fail_dispatch, spec, error))

    @by_one_thread
    def _arrive(self, batch: Batch, pending: Pending[Arrival], *, is_next: bool = False) -> Arrival:
        """Wait for what the others sent here; where nobody has sent, because it was too much, send fewer rows."""
        spec, stats = batch.spec, self.stats[batch.spec.layer]
        while True:
            try:
                with stats.waiting("dispatch"), self.usability.waiting(spec):
                    arrival = pending.wait()
                break
            except TooManyRows as announced:
                assert spec.max_rows is not None
                part = batch.part or Part(batch=batch, first=0, parts=1)
                parts = more_parts(part.parts, announced.most, spec.max_rows)
                batch, pending = self._send_part(part.batch, part.first, parts)
        if batch.part is not None:
            assert batch.announcements.bound is not None
            arrival = replace(arrival, part=replace(batch.part, left=batch.announcements.bound.left))
        self._in_flight.add(arrival)
        if self.transport.reads_values and isinstance(batch.routes.routes, Routes):
            self.load.count(spec.layer, batch.routes.routes.topk_ids_TK)
        sent = self.transport.rows_sent(batch, arrival)
        nbytes = self.transport.bytes_sent(batch, sent)
        stats.count_dispatch(batch.num_tokens, sent, arrival.counts_W, nbytes, is_next=is_next)
        return arrival

    def _check_arrival(self, arrival: Arrival) -> None:
        """Raise if this rank has found something wrong with what came."""
        try:
            arrival.check_counts()
            if arrival.problem is not None:
                raise arrival.problem
        except Exception as error:
            # The others have gone on: they wait for this rank's combine, and hear of it there.
            with self._one_thread:
                self._fail(arrival.spec, error, partial(self._in_flight.give_up, arrival, error))

    def _checked(
        self,
        spec: ExchangeSpec,
        round: int,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor],
        *,
        ahead: bool,
        takes_slots: bool,
    ) -> Batch:
        """A batch that can be sent; raises whatever is wrong with it."""
        if isinstance(rows, UnencodedRows):
            rows.check()
            if not self.transport.encodes(spec.wire):
                rows = rows.format.encode(rows.x_TH)
        if isinstance(routes, BatchRoutes) and routes.spec.placement != spec.placement:
            raise ContractError(
                f"the routes are those of layer {routes.spec.layer!r}, whose experts are elsewhere",
                expected=f"routes of a layer with the placement of {spec.layer!r}",
                fix="pass Routes",
            )
        given = routes.routes if isinstance(routes, BatchRoutes) else routes
        checked = check_batch(
            spec,
            rows,
            given,
            extra,
            self.group.device,
            values=self.transport.reads_values and given is routes,
        )
        if not isinstance(routes, BatchRoutes):
            checked = self._drop_lost(spec, checked) if isinstance(checked, Routes) else checked
            routes = BatchRoutes(spec=spec, routes=checked, num_tokens=rows.num_rows, rank=self.group.rank)
        counts = self.transport.counts(routes) if self.transport.reads_values else [0] * self.group.size
        if spec.max_rows is not None:
            counts = [*counts, *([0] * len(counts))]  # nothing is left for later passes
        return Batch(
            spec=spec,
            round=round,
            region=self._in_flight.free_region,
            rows=rows,
            extra=extra,
            routes=routes,
            announcements=self._announcements(
                spec, Phase.DISPATCH, round, tokens=rows.num_rows, counts=counts
            ),
            choice_counts=self.load.counts(spec.layer) if self.transport.counts_choices else None,
            ahead=ahead,
            takes_slots=takes_slots,
        )

    def _drop_lost(self, spec: ExchangeSpec, routes: Routes) -> Routes:
        """The routes without choices whose expert was lost with its rank.

        A token's replicas follow from the ids that are left: these travel, and every rank reads them alike.
        """
        if not spec.placement.lost_experts:
            return routes
        rank_TK, _ = spec.placement.resolve(routes.topk_ids_TK, self.group.rank)
        dropped_TK = (routes.topk_ids_TK >= 0) & (rank_TK < 0)
        self.stats[spec.layer].count_dropped(dropped_TK)
        return routes.without(dropped_TK, renormalize=spec.renormalizes_dropped)

    # -- The way back --------------------------------------------------------------------------------------

    def combine(
        self,
        arrival: Arrival,
        result: ExpertResult,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor] = (),
    ) -> CombinedRows:
        """Bring every token's results home and sum them over ranks, in rank order, in float32.

        `add` (a residual, shared experts) is added before the one rounding to the input's dtype. The result
        is written into `out` if given; `combine(…, out=y, add=(y,))` adds to what is there. Of a batch that goes in
        several passes, the tokens of this pass are written; pass the same `out` to each combine.
        """
        return self.start_combine(arrival, result, out=out, add=add, ahead=False).wait()

    def start_combine(
        self,
        arrival: Arrival,
        result: ExpertResult,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor | Background[Tensor]] = (),
        ahead: bool = True,
    ) -> Pending[CombinedRows]:
        """Start what `combine` does, and return while results travel. The sum is made in `wait`.

        `ahead`: something is computed meanwhile. What is added may still be computed, too: the sum waits for it. If
        that fails when results were sent, this rank alone raises, as it would behind the layer.
        """

        def sum_home(home: ResultsAtHome) -> CombinedRows:
            if (y_TH := home.summed()) is not None:
                return CombinedRows(y_TH=y_TH)
            add = [term if isinstance(term, Tensor) else self._late_term(arrival, term) for term in terms]
            shape = (arrival.batch_tokens, arrival.spec.hidden_size)
            into = (
                torch.empty(shape, dtype=arrival.spec.dtype, device=self.group.device) if out is None else out
            )
            if arrival.part is None:
                return CombinedRows(y_TH=home.sum_into(into, add))
            home.sum_into(into[arrival.tokens], [term[arrival.tokens] for term in add])
            return CombinedRows(y_TH=into)

        # What has ended is looked at now, while the others can still be told of an error.
        terms = [term.wait() if isinstance(term, Background) and term.has_ended else term for term in add]
        there = [term for term in terms if isinstance(term, Tensor)]
        return self._send_back(arrival, result, sum_home, reduces=True, out=out, add=there, ahead=ahead)

    def _late_term(self, arrival: Arrival, term: Background[Tensor]) -> Tensor:
        """What is added to a sum and was still computed when results were sent."""
        tensor = term.wait()
        check_output(arrival.spec, tensor, arrival.batch_tokens, self.group.device)
        return tensor

    def combine_unreduced(self, arrival: Arrival, result: ExpertResult) -> RankRows:
        """Bring every token's results home, one row per (token, rank). Summing them is the caller's duty.

        Of a batch that goes in several passes, these are the results of this pass (`RankRows.joined`).
        """

        def hand_out(home: ResultsAtHome) -> RankRows:
            rows_by_rank, tokens_by_rank = home.by_rank()
            return RankRows(
                rows_by_rank=rows_by_rank,
                tokens_by_rank=tokens_by_rank
                if arrival.part is None
                else tuple(tokens + arrival.tokens.start for tokens in tokens_by_rank),
                num_tokens=arrival.batch_tokens,
                dtype=arrival.spec.dtype,
            )

        return self._send_back(arrival, result, hand_out, reduces=False, out=None, add=(), ahead=False).wait()

    @by_one_thread
    def _send_back(
        self,
        arrival: Arrival,
        result: ExpertResult,
        use: Callable[[ResultsAtHome], Home],
        *,
        reduces: bool,
        out: Tensor | None,
        add: Sequence[Tensor],
        ahead: bool,
    ) -> Pending[Home]:
        """Send results back; `wait` returns what `use` makes of those of this rank's tokens."""
        self._take(arrival)
        try:
            results = self._checked_results(arrival, result, reduces=reduces, out=out, add=add, ahead=ahead)
            pending = self._ahead(self.transport.send_back(results), ahead)
        except Exception as error:
            self._fail(arrival.spec, error, partial(self._fail_combine, arrival, error))
        return self._travels(partial(self._come_home, arrival, pending, use))

    @by_one_thread
    def _come_home(
        self, arrival: Arrival, pending: Pending[ResultsAtHome], use: Callable[[ResultsAtHome], Home]
    ) -> Home:
        """Wait for the results of this rank's tokens, and use them."""
        spec, stats = arrival.spec, self.stats[arrival.spec.layer]
        with stats.waiting("combine"):
            try:
                with self.usability.waiting(spec):
                    home = pending.wait()
                with self.usability.waiting(spec, for_others=self.transport.waits_in_sum):
                    used = use(home)
            except (PeerFailed, Corrupted):
                self._tell_given_up(spec)
                raise
            self._tell_given_up(spec)
        if (counts := self.transport.counts_at_end(arrival)) is not None:
            arrival = replace(arrival, counts_W=tuple(counts[1]))
            nbytes = [rows * self.transport.region_bytes(spec).dispatch_row for rows in counts[0]]
            stats.count_rows(*counts, nbytes)
        stats.count_combine(self.transport.bytes_returned(arrival))
        return used

    def _checked_results(
        self,
        arrival: Arrival,
        result: ExpertResult,
        *,
        reduces: bool,
        out: Tensor | None,
        add: Sequence[Tensor],
        ahead: bool,
    ) -> Results:
        """Results that can be sent; raises unless they, and what they are written into and added to, fit."""
        spec = arrival.spec
        check_sum(
            arrival,
            reduces=reduces,
            out=out,
            add=add,
            most=self.transport.most_terms,
            device=self.group.device,
        )
        rows_RH, encoded = check_result(arrival, result), None
        if rows_RH is not None and not self.transport.encodes_results:
            encoded = spec.combine_wire.encode(rows_RH)
        return Results(
            arrival=arrival,
            rows_RH=rows_RH,
            encoded=encoded,
            announcements=self._announcements(
                spec, Phase.COMBINE, arrival.round, tokens=arrival.routes.num_tokens
            ),
            sum_ahead=SumAhead(out_TH=out, add=add) if ahead and reduces and arrival.part is None else None,
        )

    def _ahead(self, pending: Pending[Home], ahead: bool) -> Pending[Home]:
        """What a transport has started, with its wait in a thread of its own, where that is work and pays."""
        if ahead and self.transport.works_ahead and self.group.device.type == "cpu":
            return self.group.in_background(pending.wait)
        return pending

    # -- One error, all ranks ------------------------------------------------------------------------------

    def _travels(
        self, finish: Callable[[], Home], check: Callable[[Home], None] | None = None
    ) -> Pending[Home]:
        """A phase that was started. It is finished when it is waited for, or before the next one is started."""
        self._traveling = traveling = Pending(finish, check)
        return traveling

    def _settle(self) -> None:
        """Finish the phase that travels, if one does; raise if it failed."""
        traveling, self._traveling = self._traveling, None
        if traveling is not None:
            traveling.settle()

    def _settles(self) -> bool:
        """Finish the phase that travels before an error is told; return whether it did not fail."""
        try:
            self._settle()
        except Exception:  # the error that is told is raised; this one, by whoever asks for what travels
            return False
        return True

    def _check_dropped(self, spec: ExchangeSpec | None = None) -> None:
        """Raise if nobody can finish a round trip any more; before a dispatch of a layer, if its spec is given."""
        dropped = self._trips.dropped()
        if dropped is not None:
            trip, error = dropped
            # Where one more may be in flight, the others have begun this dispatch, too.
            owes = spec is not None and self._in_flight.has_room
            self._end_trips(RoundTrip(exchange=self, spec=spec or trip.spec, owes_dispatch=owes), error)

    @contextmanager
    def round_trip(self, spec: ExchangeSpec) -> Iterator[RoundTrip]:
        """One round trip of one layer, in which an error on one rank reaches all ranks, wherever it happens."""
        with self.in_use(layer=spec.layer, alone=True):
            trip = self.open_round_trip(spec)
            with self.telling(trip):
                yield trip
            self.end_round_trip(trip)

    def open_round_trip(self, spec: ExchangeSpec) -> RoundTrip:
        """A round trip that is made in several calls, each inside of `telling`, up to `end_round_trip`."""
        return self._trips.add(RoundTrip(exchange=self, spec=spec))

    def check_turn(self, trip: RoundTrip) -> None:
        """Raise unless the results of a round trip are the next ones that go back."""
        self.usability.check(layer=trip.spec.layer)
        self._trips.check_turn(trip)

    def next_to_advance(self, trip: RoundTrip) -> RoundTrip:
        """The round trip that goes on before a given one can: itself, unless another one's arrival is older.

        That happens where a batch goes in several passes while another one is in flight. All ranks find the same one.
        """
        return self._trips.of(self._in_flight.oldest) or trip

    def end_round_trip(self, trip: RoundTrip) -> None:
        """This rank owes the others nothing more of a round trip."""
        self._trips.remove(trip)
        trip.advance = None  # it holds the batch

    def telling(self, trip: RoundTrip) -> AbstractContextManager[None]:
        """A part of a round trip. An error in it, on one rank, ends all round trips under way, on all ranks."""
        return _Telling(self, trip)

    def _end_trips(self, trip: RoundTrip, error: BaseException) -> NoReturn:
        """End all round trips because of an error in one of them: tell the others, and raise it."""
        trips = self._trips.end_all(f"{type(error).__name__}: {error}")
        # Where the phase before has failed, nobody begins this dispatch.
        settled = isinstance(error, PeerLost) or self.usability.broken_by is not None or self._settles()

        def tell() -> None:
            if trip.owes_dispatch and settled:
                self._fail_dispatch(trip.spec, error)
            for other in trips:
                if other.arrival is not None:
                    self._in_flight.give_up(other.arrival, error)

        if trip.owes_dispatch or any(other.arrival in self._in_flight for other in trips):
            self._fail(trip.spec, error, tell)
        raise error

    @by_one_thread
    def refuse(self, arrival: Arrival, error: Exception) -> NoReturn:
        """Take part in the combine of an arrival only to say that this rank has an error; raise it."""
        self._take(arrival)
        self._fail(arrival.spec, error, partial(self._fail_combine, arrival, error))

    @by_one_thread
    def redirect(self, arrival: Arrival, spec: ExchangeSpec, *, again: bool = False) -> Arrival:
        """The one arrival in flight, with results of another spec; `again`: after a combine that was refused."""
        self._in_flight.clear()
        redirected = replace(arrival, spec=spec, round=self._round + 1 if again else arrival.round)
        self._in_flight.add(redirected)
        return redirected

    def _fail(self, spec: ExchangeSpec, error: BaseException, tell: Callable[[], None]) -> NoReturn:
        """Tell the others that this rank failed, then raise its error."""
        if isinstance(error, TokenyardError):
            error.at(layer=spec.layer, rank=self.group.rank)
        if isinstance(error, PeerLost):
            self.usability.break_by(error)
        if self.usability.broken_by is None:
            self._settles()  # what travels ends first
        if self.usability.broken_by is None:
            with self.usability.waiting(spec):
                tell()
            self._tell_given_up(spec)
        raise error

    def _fail_dispatch(self, spec: ExchangeSpec, error: BaseException) -> None:
        announcements = self._announcements(
            spec, Phase.DISPATCH, self._round + 1, counts=[0] * self._num_counts(spec), error=error
        )
        region = self._in_flight.free_region
        self.transport.fail(Failure(spec=spec, region=region, announcements=announcements, arrival=None))

    def _fail_combine(self, arrival: Arrival, error: BaseException) -> None:
        announcements = self._announcements(arrival.spec, Phase.COMBINE, arrival.round, error=error)
        self.transport.fail(
            Failure(spec=arrival.spec, region=arrival.region, announcements=announcements, arrival=arrival)
        )

    def _tell_given_up(self, spec: ExchangeSpec) -> None:
        """Take part in the combines of the oldest arrivals that were given up, only to say so."""
        if self._in_flight.is_empty:
            return
        with self.usability.waiting(spec):
            for arrival, error in self._in_flight.take_given_up():
                self._fail_combine(arrival, error)

    def _num_counts(self, spec: ExchangeSpec) -> int:
        """The counts of an announcement: those of a pass, and where passes have a bound those of later ones."""
        return self.transport.num_counts(spec) * (1 if spec.max_rows is None else 2)

    def _announcements(
        self,
        spec: ExchangeSpec,
        phase: Phase,
        round: int,
        *,
        tokens: int = 0,
        counts: Sequence[int] = (),
        error: BaseException | None = None,
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
            group=self.group,
            layers=self._names,
            say=say,
            most=spec.max_tokens,
            room=self._num_counts(spec),
            bound=None
            if spec.max_rows is None or phase is not Phase.DISPATCH
            else RowBound(max_rows=spec.max_rows, loads=self.transport.loads),
            all_met=partial(self._meet, round),
            notice=self.notice,
            noticed=self.noticed,
            ranks_parted=self.usability.ranks_parted,
        )

    def _meet(self, round: int) -> None:
        self._round = max(self._round, round)

    def _take(self, arrival: Arrival) -> None:
        """Take an arrival out of the queue, or say why it cannot be combined."""
        self.usability.check(layer=arrival.spec.layer if isinstance(arrival, Arrival) else None)
        self._settle()
        self._in_flight.take(arrival)

    def in_use(self, *, layer: str | None = None, alone: bool = False) -> AbstractContextManager[None]:
        """A call of the plan that all its ranks make: by one thread at a time, and not after a loss.

        `alone`: nothing may be in flight, because what the call dispatches would have to wait for it.
        """
        return _InUse(self, layer, alone)

    def _begin_call(self, layer: str | None, alone: bool) -> None:
        """Raise unless a call of the plan can be made now."""
        self.usability.check(layer=layer)
        self._settle()
        self._check_dropped()
        if alone:
            self._in_flight.check_empty(layer)

    def close(self) -> None:
        """No more rounds; what is shared is given back."""
        self.usability.close()
        self._in_flight.clear()
        self._traveling = None
        self._trips.end_all("the plan was closed")
        self.transport.close()


# Contexts that every call of a layer enters are classes: generators take some microseconds more.


class _InUse:
    """A call of a plan: one thread makes it, and it is not made after a loss."""

    __slots__ = ("_alone", "_exchange", "_layer")

    def __init__(self, exchange: Exchange, layer: str | None, alone: bool) -> None:
        self._exchange, self._layer, self._alone = exchange, layer, alone

    def __enter__(self) -> None:
        self._exchange._one_thread.enter()
        try:
            self._exchange._begin_call(self._layer, self._alone)
        except BaseException:
            self._exchange._one_thread.leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PeerLost):
            self._exchange.usability.break_by(error)
        self._exchange._one_thread.leave()


class _Telling:
    """A part of a round trip, whose errors the other ranks are told of."""

    __slots__ = ("_exchange", "_trip")

    def __init__(self, exchange: Exchange, trip: RoundTrip) -> None:
        self._exchange, self._trip = exchange, trip

    def __enter__(self) -> None:
        self._exchange._one_thread.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:  # one that is interrupted owes the others a word, too
                self._exchange._end_trips(self._trip, error)
        finally:
            self._exchange._one_thread.leave()
