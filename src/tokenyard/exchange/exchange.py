"""An exchange moves rows out to the ranks that own their experts, and results back: one class, over any transport.

    dispatch(spec, rows, routes) → Arrival           each row once to each *rank* that owns one of its experts
    combine(arrival, expert rows) → CombinedRows     one row per (token, rank) back, summed in float32

It checks batches and results, and leaves the work to these parts:

    Exchange ── Transport         moves the bytes
             ── BatchMaker        checks a batch, and cuts it where it is too large
             ── OpenRoundTrips    keeps the order of calls; makes an error on one rank reach all ranks
             ── InFlightQueue     holds arrivals that are not combined yet
             ── Announcer         makes what ranks tell each other at the start of each phase
             ── Usability         knows whether the plan is open, and not broken by a loss
             ── LayerStats, LoadCounter   count rows, bytes and seconds, and the choices of each expert

`start_dispatch` and `start_combine` return while rows travel; `wait` of what they return gives what `dispatch` and
`combine` do. Where a plan bounds the rows that a rank receives (`max_rows`), a batch that brings more goes in several
passes: `dispatch` sends as many tokens as have room; after their combine, as long as `arrival.has_more`,
`dispatch_next` sends the next ones (`passes`).

An exchange knows a group, placements and formats, but not what an expert is. `ExchangeSpec` is all that it is told of a
layer. An `Arrival` is a frozen handle: it must be combined once, in the order of dispatches; anything else raises.

**Order.** Received rows stand in (source rank, token) order. Results are summed in rank order, in float32,
and rounded once: the result is bitwise the same in every run, on every kind of group, through every exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar, final

import torch
from torch import Tensor

from tokenyard.errors import Corrupted, HandleError, PeerFailed
from tokenyard.exchange.announcement import Announcer
from tokenyard.exchange.batch import (
    Arrival,
    Batch,
    Part,
    Results,
    ResultsAtHome,
    SumAhead,
    UnencodedRows,
)
from tokenyard.exchange.batch_maker import BatchMaker
from tokenyard.exchange.batch_routes import BatchRoutes
from tokenyard.exchange.checks import check_output, check_result, check_sum
from tokenyard.exchange.in_flight import InFlightQueue
from tokenyard.exchange.integrity.watched import WatchedTransport
from tokenyard.exchange.open_trips import OpenRoundTrips
from tokenyard.exchange.passes import TooManyRows, more_parts, parts_for
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.stats import LayerStats, LoadCounter
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.usability import Usability
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import COMPILING, ReadyKernels
from tokenyard.group import make_together
from tokenyard.group.base import Background, Group, Pending
from tokenyard.group.one_thread import by_one_thread
from tokenyard.group.own_process import OwnProcess, in_own_process
from tokenyard.routing import Routes
from tokenyard.rows import CombinedRows, ExpertResult, RankRows, RoutingLogits

Home = TypeVar("Home")  # what a combine makes of the results at home: their sums, or rows by rank


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
        chosen = transport.for_device(group.device)
        # What moves the bytes: in a paranoid plan a transport that checks what the chosen one moves.
        self.transport: Transport = (
            WatchedTransport(chosen, group, in_flight=in_flight)
            if paranoid
            else chosen(group, in_flight=in_flight)
        )
        self.transport.sms = sms
        self.stats: dict[str, LayerStats] = {}  # counters by layer
        self.kernels = ReadyKernels(group.device)  # the kernels of this rank's GPU that calls may launch
        self.load = LoadCounter(group.device)  # choices that fell on each expert
        self.usability = Usability(group.rank)  # whether the plan is open, and not broken
        self.announcer = Announcer(self.transport, self.usability, plan_id)  # makes announcements
        # Whether ranks receive each other's notices (`Announcer.notice`): if a dispatch waits for announcements.
        self.hears_notices = self.transport.reads_values
        self._in_flight = InFlightQueue(in_flight, group.rank)
        # The order of calls, and the round trips that are under way.
        self.trips = OpenRoundTrips(self.transport, self.announcer, self.usability, self._in_flight)
        self._batches = BatchMaker(self.transport, self.announcer, self._in_flight, self.load, self.stats)
        self._one_thread = self.trips.one_thread

    @property
    def own_process(self) -> OwnProcess:
        """Refuses calls in processes that are forked from the one that made the plan."""
        return self.usability.own_process

    # -- The layers ----------------------------------------------------------------------------------------

    @in_own_process
    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on. Collective. Arrivals in flight are dropped: to combine one raises."""
        self.transport.serve(specs)
        self._served(specs)

    @in_own_process
    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on, and give back memory that they do not need. Collective."""
        self.transport.trim(specs)
        self._served(specs)

    def _served(self, specs: Sequence[ExchangeSpec]) -> None:
        kept = {s.layer: self.stats.get(s.layer) or LayerStats(self.group.size) for s in specs}
        self.stats.clear()
        self.stats |= kept
        self.announcer.layers = list(kept)
        self.load.serve({s.layer: s.num_experts for s in specs})
        self._in_flight.clear()
        self.trips.end_all("the layers of the plan have changed")

    @in_own_process
    def switch(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry the same layers with other placements from the next dispatch on. All ranks call this, between calls."""
        self.transport.serve(specs)

    @in_own_process
    def warmup(self, specs: Sequence[ExchangeSpec], record: Callable[[], None] = lambda: None) -> None:
        """Prepare what the first round trips of these layers would otherwise wait for, such as kernels. Collective.

        `record` launches the kernels of their experts; nothing is launched in it, but their kernels are made ready.
        """

        def record_all() -> None:
            self.transport.record_launches(specs)
            record()

        if self.group.device.type == "cuda":
            make_together(
                self.group, "loading kernels", partial(self.kernels.add, record_all), seconds=COMPILING
            )
        self.transport.warmup(specs)

    @in_own_process
    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """A context in which the shape of an arrival does not depend on the routes, as a CUDA graph needs it."""
        return self.transport.fixed_shapes(max_tokens)

    @property
    def rounds(self) -> int:
        """The number of dispatches that all ranks took part in; between calls, the same on every rank."""
        return self.announcer.round

    @property
    def counts_choices(self) -> bool:
        """Whether `load` counts choices: from ids that the host reads, or by the transport while it sends rows."""
        return self.transport.reads_values or self.transport.counts_choices

    # -- Calls ---------------------------------------------------------------------------------------------

    def in_use(self, *, layer: str | None = None, alone: bool = False) -> AbstractContextManager[None]:
        """A context for one call of the plan, which all ranks make; raises if the plan is closed or broken.

        One thread at a time may be inside. `alone`: raise if a dispatch is in flight, because it would have to be
        combined before what this call dispatches.
        """
        return self.trips.in_use(layer=layer, alone=alone)

    @contextmanager
    def round_trip(self, spec: ExchangeSpec) -> Iterator[RoundTrip]:
        """A context for one round trip of one layer: an error inside, on one rank, is raised on all ranks."""
        with self.in_use(layer=spec.layer, alone=True):
            trip = self.open_round_trip(spec)
            with self.trips.propagate_errors(trip):
                yield trip
            self.trips.end(trip)

    def open_round_trip(self, spec: ExchangeSpec) -> RoundTrip:
        """Open a round trip of several calls, each inside of `trips.propagate_errors`; `trips.end` closes it."""
        return self.trips.add(RoundTrip(exchange=self, spec=spec))

    @by_one_thread
    def is_between_calls(self) -> bool:
        """Finish the phase that travels; return whether no dispatch is in flight. Before a dispatch, ranks agree."""
        self.trips.settle()
        return self._in_flight.is_empty

    @by_one_thread
    def synchronize(self) -> None:
        """Wait for calls that returned before their work was done, and raise what went wrong in them."""
        with self.usability.waiting():
            self.transport.synchronize()

    @in_own_process
    def close(self) -> None:
        """Refuse all later calls, and give back shared memory.

        A background thread that still waits for other ranks uses that memory, so its end is awaited first; it comes
        within the deadline.
        """
        self.usability.close()
        self._in_flight.clear()
        self.trips.close()
        if self.transport.works_ahead:
            self.group.await_background()
        self.transport.close()

    # -- The way out ---------------------------------------------------------------------------------------

    def encode(self, spec: ExchangeSpec, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """Encode rows in the layer's wire; or leave them as they are, if the transport encodes them when it sends."""
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
        """Send each row to every rank that owns one of its experts; return the rows that came to this rank.

        With `routes` of an earlier arrival (`arrival.routes`), rows of the same tokens go to the same ranks. If
        `arrival.has_more`, there was no room for all rows: `dispatch_next` sends more of them after the combine.
        """
        return self.start_dispatch(spec, rows, routes, extra, ahead=False).wait()

    def run_overlapped(self, job: Callable[[], Home]) -> Home:
        """Run a job that needs no received rows at the same time as the round trip that was started last.

        Its result may be used only as a term of the sum (`add` of the combine), which waits for it.
        """
        return self.transport.run_overlapped(job)

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
        """Start what `dispatch` does, and return while rows travel.

        `ahead`: the caller computes something before it waits. `takes_slots`: the experts accept empty slots among the
        received rows, with ids of -1.
        """
        self.trips.begin_dispatch(spec)
        try:
            batch = self._batches.make(
                spec, rows, routes, {} if extra is None else extra, ahead=ahead, takes_slots=takes_slots
            )
            pending = self._ahead(self.transport.send(batch), ahead)
        except Exception as error:
            self.trips.fail_dispatch(spec, error)
        return self.trips.travels(partial(self._arrive, batch, pending), self._check_arrival)

    @by_one_thread
    def start_next(self, arrival: Arrival) -> Pending[Arrival]:
        """Start what `dispatch_next` does, and return while rows travel."""
        spec, part = arrival.spec, arrival.part
        self.trips.begin(spec.layer)
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
        return self.trips.travels(partial(self._arrive, batch, pending, is_next=True), self._check_arrival)

    def _send_part(self, batch: Batch, first: int, parts: int) -> tuple[Batch, Pending[Arrival]]:
        """Cut the tokens of a batch from `first` on into `parts` parts, and send the first of these."""
        try:
            part = self._batches.make_part(batch, first, parts)
            return part, self.transport.send(part)
        except Exception as error:
            self.trips.fail_dispatch(batch.spec, error)

    @by_one_thread
    def _arrive(self, batch: Batch, pending: Pending[Arrival], *, is_next: bool = False) -> Arrival:
        """Wait for the rows that come here; if ranks announced too many, no row was sent: try again with fewer."""
        spec, stats = batch.spec, self.stats[batch.spec.layer]
        while True:
            try:
                with stats.waiting("dispatch"):
                    arrival = pending.wait()
                break
            except TooManyRows as announced:
                assert spec.max_rows is not None
                part = batch.part or Part(batch=batch, first=0, parts=1)
                parts = more_parts(part.parts, announced.most, spec.max_rows)
                batch, pending = self._send_part(part.batch, part.first, parts)
            except BaseException as error:
                self.usability.end_wait(error, spec)
                raise
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
        """Raise what this rank has found wrong with an arrival; the others receive the error in the combine."""
        try:
            arrival.check_counts()
            if arrival.problem is not None:
                raise arrival.problem
        except Exception as error:
            with self._one_thread:
                self.trips.give_up(arrival, error)

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
        is written into `out` if given; `combine(…, out=y, add=(y,))` adds it to y. If a batch goes in several passes,
        only the tokens of this pass are written; pass the same `out` to each combine.
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

        `ahead`: the caller computes something before it waits. A term of `add` may still be computed in the background;
        the sum waits for it. If that job fails after results were sent, only this rank raises its error.
        """

        def sum_home(home: ResultsAtHome) -> CombinedRows:
            if (y_TH := home.summed()) is not None:
                return CombinedRows(y_TH=y_TH)
            late = there
            if len(there) < len(terms):
                late = [
                    term if isinstance(term, Tensor) else self._late_term(arrival, term) for term in terms
                ]
            into = out
            if into is None:
                shape = (arrival.batch_tokens, arrival.spec.hidden_size)
                into = torch.empty(shape, dtype=arrival.spec.dtype, device=self.group.device)
            if arrival.part is None:
                return CombinedRows(y_TH=home.sum_into(into, late))
            home.sum_into(into[arrival.tokens], [term[arrival.tokens] for term in late])
            return CombinedRows(y_TH=into)

        # The error of a job that has ended is raised now, when it can still be announced to the others.
        terms = [term.wait() if isinstance(term, Background) and term.has_ended else term for term in add]
        there = [term for term in terms if isinstance(term, Tensor)]
        return self._send_back(arrival, result, sum_home, reduces=True, out=out, add=there, ahead=ahead)

    def _late_term(self, arrival: Arrival, term: Background[Tensor]) -> Tensor:
        """A term of a sum that was still computed when results were sent: wait for it, and check it."""
        tensor = term.wait()
        check_output(arrival.spec, tensor, arrival.batch_tokens, self.group.device)
        return tensor

    def combine_unreduced(self, arrival: Arrival, result: ExpertResult) -> RankRows:
        """Bring every token's results home, one row per (token, rank). Summing them is the caller's duty.

        If a batch goes in several passes, these are the results of this pass; `RankRows.joined` joins those of all.
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
        """Send results back; `wait` returns what `use` makes of the results of this rank's tokens."""
        self._take(arrival)
        spec, transport = arrival.spec, self.transport
        try:
            check_sum(
                arrival,
                reduces=reduces,
                out=out,
                add=add,
                most=transport.most_terms,
                device=self.group.device,
            )
            rows_RH, encoded = check_result(arrival, result), None
            if rows_RH is not None and not transport.encodes_results:
                encoded = spec.combine_wire.encode(rows_RH)
            begins_sum = ahead and reduces and arrival.part is None
            results = Results(
                arrival=arrival,
                rows_RH=rows_RH,
                encoded=encoded,
                announcements=self.announcer.of_combine(spec, arrival.round, arrival.routes.num_tokens),
                sum_ahead=SumAhead(out_TH=out, add=add) if begins_sum else None,
            )
            pending = self._ahead(transport.send_back(results), ahead)
        except Exception as error:
            self.trips.fail_combine(arrival, error)
        return self.trips.travels(partial(self._come_home, arrival, pending, use))

    @by_one_thread
    def _come_home(
        self, arrival: Arrival, pending: Pending[ResultsAtHome], use: Callable[[ResultsAtHome], Home]
    ) -> Home:
        """Wait for the results of this rank's tokens, and return what `use` makes of them."""
        spec, stats = arrival.spec, self.stats[arrival.spec.layer]
        with stats.waiting("combine"):
            for_others = True
            try:
                home = pending.wait()
                for_others = self.transport.waits_in_sum
                used = use(home)
            except BaseException as error:
                self.usability.end_wait(error, spec, for_others=for_others)
                if isinstance(error, PeerFailed | Corrupted):
                    self.trips.tell_given_up(spec)
                raise
            self.trips.tell_given_up(spec)
        if (counts := self.transport.counts_at_end(arrival)) is not None:
            arrival = replace(arrival, counts_W=tuple(counts[1]))
            nbytes = [rows * self.transport.region_bytes(spec).dispatch_row for rows in counts[0]]
            stats.count_rows(*counts, nbytes)
        stats.count_combine(self.transport.bytes_returned(arrival))
        return used

    def _ahead(self, pending: Pending[Home], ahead: bool) -> Pending[Home]:
        """Move the wait of a phase into a background thread, if the wait does work that can overlap the caller's."""
        if ahead and self.transport.works_ahead and self.group.device.type == "cpu":
            return self.group.in_background(pending.wait)
        return pending

    @by_one_thread
    def refuse(self, arrival: Arrival, error: Exception) -> NoReturn:
        """Take part in the combine of an arrival only to say that this rank has an error; raise it."""
        self._take(arrival)
        self.trips.fail_combine(arrival, error)

    @by_one_thread
    def redirect(self, arrival: Arrival, spec: ExchangeSpec, *, again: bool = False) -> Arrival:
        """Let the one arrival in flight be combined with another spec; `again`: after a combine that was refused."""
        self._in_flight.clear()
        redirected = replace(arrival, spec=spec, round=self.announcer.round + 1 if again else arrival.round)
        self._in_flight.add(redirected)
        return redirected

    def _take(self, arrival: Arrival) -> None:
        """Take an arrival out of the queue; raise if it cannot be combined now."""
        self.trips.begin(arrival.spec.layer if isinstance(arrival, Arrival) else None)
        self._in_flight.take(arrival)
