"""`RoundTrip`: one call of one layer, that is the rows of a batch on their way out, and their results on the way home.

    with exchange.begin(spec) as trip:                # an error inside, on one rank, reaches all ranks
        trip.send(exchange.encode(spec, x_TH), routes)
        …                                             # what overlaps with the rows on their way
        while not trip.is_sent_back:                  # one pass, unless `max_rows` cuts the batch
            trip.send_back(experts(trip.receive()), out=out, add=add)
            if trip.owes_dispatch:
                trip.send_next()
        y_TH = trip.result()

It is the state of a call, and the only one: which phase travels, what has arrived, what the other ranks still wait for.
`send`, `send_next` and `send_back` return while rows travel; `receive` and `result` wait for them. `dispatch`,
`dispatch_next` and `combine` do both. Whoever computes by other means than a layer takes these (`Exchange.dispatch`
makes a round trip and dispatches in it): the arrival must be combined once, in the order of dispatches.

**Passes.** Where a plan bounds the rows that a rank receives (`max_rows`), a batch that brings more goes in several
passes: a dispatch sends as many tokens as have room; after their combine, as long as `has_more`, the next ones go
(`passes`).

**Order.** Received rows stand in (source rank, token) order. Results are summed in rank order, in float32,
and rounded once: the result is bitwise the same in every run, on every kind of group, through every exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from tokenyard.duties import Party, acting
from tokenyard.errors import ContractError, Corrupted, HandleError, PeerFailed
from tokenyard.exchange.batch import Arrival, Batch, BatchRoutes, Part, UnencodedRows
from tokenyard.exchange.passes import TooManyRows, more_parts, parts_for
from tokenyard.exchange.results import Results, ResultsAtHome, SumAhead, check_output, check_result, check_sum
from tokenyard.exchange.returns import beside_results
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Background, Pending
from tokenyard.group.one_thread import by_one_thread
from tokenyard.routing import Routes
from tokenyard.rows import CombinedRows, ExpertResult, RankRows, ReceivedRows, RoutingLogits

if TYPE_CHECKING:
    from tokenyard.exchange.exchange import Exchange


class RoundTrip:
    """The dispatches and combines of one batch, and which of them the other ranks still wait for this rank to make."""

    def __init__(
        self, exchange: Exchange, spec: ExchangeSpec, *, takes_slots: bool = False, forward: int = 0
    ) -> None:
        self.spec = spec  # what the exchange knows of the layer
        self.forward = forward  # in a backward, the round of the forward; 0: a forward
        # Whether the choices of the batch are counted as load of the experts: not those of a forward that is repeated.
        self.counts_load = not spec.of_gradients
        # The rows that came in the present pass, until the next one; None: none have come yet.
        self.arrived: Arrival | None = None
        self.first_round = 0  # the number of its first dispatch; 0 before that
        # Whether the others still wait for this rank's dispatch: the first one, or after a combine that of the next
        # pass. They wait for its combine as long as the arrival is in flight.
        self.owes_dispatch = True
        # Whether the caller dropped what `start` returned, so that nothing can finish it.
        self.is_dropped = False
        # Why it was given up, with all round trips that were under way; None: it was not.
        self.ended_by: str | None = None
        self._exchange, self._transport, self._trips = exchange, exchange.transport, exchange.trips
        self._one_thread = exchange.trips.one_thread
        self._takes_slots = takes_slots  # whether the experts accept empty slots among rows, with ids of -1
        # The phase that travels: one of them, or none. What its wait gives is in `arrival`, or in `_sums` or `_rows`.
        self._arriving: Pending[Arrival] | None = None
        self._returning: Pending[ResultsAtHome] | None = None
        self._error: BaseException | None = (
            None  # of a phase that was finished for another one, not yet raised here
        )
        self._batch: Batch | None = None  # the batch, or the part of one, that is arriving
        self._is_next = False  # whether it is a further pass of its batch
        self._is_checked = False  # whether the caller knows what is wrong with the arrival
        self._is_sent_back = False  # whether the results of the present pass were sent back
        # What the sum is written into (all passes of a batch into one tensor), and what is added to it.
        self._out: Tensor | None = None
        self._terms: Sequence[Tensor | Background[Tensor]] = ()
        self._reduces = True  # whether this exchange sums over ranks
        self._sums: CombinedRows | None = None
        self._rows: RankRows | None = None
        self._placed: dict[str, Tensor] = {}  # what came home of each choice, `[T, K · width]`

    @property
    def received(self) -> ReceivedRows:
        """The rows that came to this rank, valid until they are combined."""
        return self.arrival.received

    @property
    def has_more(self) -> bool:
        """Whether another pass of the same batch follows, on all ranks (`dispatch_next`)."""
        return self.arrival.has_more

    @property
    def travels(self) -> bool:
        """Whether one of its phases was started, and is not finished."""
        return self._arriving is not None or self._returning is not None

    @property
    def is_sent_back(self) -> bool:
        """Whether the results of all passes were sent back."""
        return self._is_sent_back and not self.owes_dispatch

    # -- The way out ---------------------------------------------------------------------------------------

    def dispatch(
        self,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
    ) -> ReceivedRows:
        """Send each row to every rank that owns one of its experts; return the rows that came to this rank.

        With `routes` of an earlier arrival (`trip.arrival.routes`), rows of the same tokens go to the same ranks. If
        the trip then `has_more`, there was no room for all rows: `dispatch_next` sends more of them after the combine.
        """
        self.send(rows, routes, extra)
        return self.receive()

    def dispatch_next(self) -> ReceivedRows:
        """Send more rows of a batch that was too large for one pass. Collective, as long as it `has_more`."""
        self.send_next()
        return self.receive()

    @by_one_thread
    def send(
        self,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """Start what `dispatch` does, and return while rows travel.

        `ahead`: the caller computes something before it waits.
        """
        self.owes_dispatch = self._is_next = False
        self._trips.begin_dispatch(self)
        self._out = None
        try:
            with acting(Party.SENDER):
                batch = self._exchange.batches.make(
                    self.spec,
                    rows,
                    routes,
                    {} if extra is None else extra,
                    ahead=ahead,
                    takes_slots=self._takes_slots,
                    forward=self.forward,
                )
                self._send(batch, ahead=ahead)
        except Exception as error:
            self._trips.fail_dispatch(self, error)
        self._trips.travels(self)

    @by_one_thread
    def send_next(self) -> None:
        """Start what `dispatch_next` does, and return while rows travel."""
        arrival, spec = self._checked(), self.spec
        part = arrival.part
        self.owes_dispatch = False
        self._trips.begin(spec.layer)
        if part is None or not arrival.has_more:
            raise HandleError(
                "all rows of this batch were dispatched",
                expected="a round trip that `has_more`",
                fix="dispatch the next batch",
                layer=spec.layer,
                rank=self._exchange.group.rank,
            )
        self._trips.in_flight.check_room(spec)
        assert spec.max_rows is not None
        self._is_next = True
        self._send_part(part.batch, arrival.tokens.stop, parts_for(part.left, spec.max_rows))
        self._trips.travels(self)

    def _send_part(self, batch: Batch, first: int, parts: int) -> None:
        """Cut the tokens of a batch from `first` on into `parts` parts, and send the first of these."""
        try:
            with acting(Party.SENDER):
                self._send(self._exchange.batches.make_part(batch, first, parts), ahead=False)
        except Exception as error:
            self._trips.fail_dispatch(self, error)

    def _send(self, batch: Batch, *, ahead: bool) -> None:
        pending = self._transport.send(batch)
        if ahead and self._exchange.works_ahead:
            pending = self._exchange.group.in_background(pending.wait)
        self._batch, self._arriving, self.arrived = batch, pending, None
        self._is_checked = self._is_sent_back = False

    @by_one_thread
    def receive(self) -> ReceivedRows:
        """Wait for the rows that come to this rank, and return them. Called again, it returns the same rows."""
        return self._checked().received

    def _checked(self) -> Arrival:
        """Wait for the rows that come to this rank; raise what is wrong with them, once."""
        if self._arriving is not None:
            self._arrive()
        arrival = self.arrival
        if not self._is_checked:
            self._is_checked = True
            try:
                arrival.check_counts()
                if arrival.problem is not None:
                    raise arrival.problem
            except Exception as error:  # the others receive it in the combine
                self._trips.give_up(arrival, error)
        return arrival

    @property
    def arrival(self) -> Arrival:
        """The rows that came in the present pass, and all that belongs to them; raises if none have come yet."""
        if self._error is not None:
            raise self._error
        if self.arrived is None:
            raise HandleError(
                "nothing was dispatched", expected="dispatch, then combine", fix="dispatch first"
            )
        return self.arrived

    def _arrive(self) -> None:
        """Wait for the rows that come here; if ranks announced too many, no row was sent: try again with fewer."""
        exchange, spec = self._exchange, self.spec
        stats = exchange.stats[spec.counted_as]
        while True:
            pending, batch = self._arriving, self._batch
            assert pending is not None
            assert batch is not None
            self._arriving = self._batch = None
            try:
                with stats.waiting("dispatch"):
                    arrival = pending.wait()
                break
            except TooManyRows as announced:
                assert spec.max_rows is not None
                part = batch.part or Part(batch=batch, first=0, parts=1)
                parts = more_parts(part.parts, announced.most, spec.max_rows)
                self._send_part(part.batch, part.first, parts)
            except BaseException as error:
                exchange.usability.end_wait(error, spec)
                raise
        if batch.part is not None:
            assert batch.announcements.bound is not None
            arrival = replace(arrival, part=replace(batch.part, left=batch.announcements.bound.left))
        self.arrived = arrival
        self.first_round = self.first_round or arrival.round
        self._trips.in_flight.add(arrival)
        reads = self._transport.reads_values
        if reads and self.counts_load and isinstance(batch.routes.routes, Routes):
            exchange.load.count(spec.layer, batch.routes.routes.topk_ids_TK)
        sent = batch.routes.counts if reads else self._transport.rows_sent(batch, arrival)
        nbytes = self._transport.bytes_sent(batch, sent)
        stats.count_dispatch(batch.num_tokens, sent, arrival.counts_W, nbytes, is_next=self._is_next)

    # -- The way back --------------------------------------------------------------------------------------

    def combine(
        self, result: ExpertResult, *, out: Tensor | None = None, add: Sequence[Tensor] = ()
    ) -> CombinedRows:
        """Bring every token's results home and sum them over ranks, in rank order, in float32.

        `add` (a residual, shared experts) is added before the one rounding to the input's dtype. The result
        is written into `out` if given; `combine(…, out=y, add=(y,))` adds it to y. If a batch goes in several passes,
        only the tokens of this pass are written, all into one tensor.
        """
        self.send_back(result, out=out, add=add)
        return self._combined()

    def send_back(
        self,
        result: ExpertResult,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor | Background[Tensor]] = (),
        returns: Mapping[str, Tensor] | None = None,
        ahead: bool = False,
    ) -> None:
        """Start what `combine` does, and return while results travel. The sum is made when they are waited for.

        `returns` are the payloads that the spec's `returns` declares: a row for each choice whose expert is here, in
        the order of received rows and choices. `placed` has them when they are home.

        `ahead`: the caller computes something before it waits. A term of `add` may still be computed in the background;
        the sum waits for it. If that job fails after results were sent, only this rank raises its error.
        """
        # The error of a job that has ended is raised now, when it can still be announced to the others.
        terms = [term.wait() if isinstance(term, Background) and term.has_ended else term for term in add]
        self._send_back(result, reduces=True, out=out, terms=terms, returns=returns or {}, ahead=ahead)

    def combine_unreduced(self, result: ExpertResult) -> RankRows:
        """Bring every token's results home, one row per (token, rank). Summing them is the caller's duty.

        If a batch goes in several passes, these are the results of this pass; `RankRows.joined` joins those of all.
        """
        self._send_back(result, reduces=False, out=None, terms=(), returns={}, ahead=False)
        self._wait_for_results()
        assert self._rows is not None
        return self._rows

    @by_one_thread
    def _send_back(
        self,
        result: ExpertResult,
        *,
        reduces: bool,
        out: Tensor | None,
        terms: Sequence[Tensor | Background[Tensor]],
        returns: Mapping[str, Tensor],
        ahead: bool,
    ) -> None:
        """Send results back; when they are home they are summed (`reduces`), or kept by rank."""
        arrival, exchange, transport = self._take(), self._exchange, self._transport
        spec, add = self.spec, [term for term in terms if isinstance(term, Tensor)]
        try:
            check_sum(
                arrival,
                reduces=reduces,
                out=out,
                add=add,
                most=transport.most_terms,
                device=exchange.group.device,
            )
            rows_RH, encoded = check_result(arrival, result), None
            if rows_RH is not None and not transport.encodes_results:
                encoded = spec.combine_wire.encode(rows_RH)
            beside = beside_results(arrival, returns) if spec.returns or returns else {}
            if beside and rows_RH is None:
                raise ContractError(
                    "a combine was given results in its buffer, and payloads beside them",
                    expected="results that the experts return, where payloads come home beside them",
                    fix="return rows",
                )
            if encoded is not None and beside:
                encoded = replace(encoded, payloads={**encoded.payloads, **beside})
            begins_sum = ahead and reduces and arrival.part is None
            results = Results(
                arrival=arrival,
                rows_RH=rows_RH,
                encoded=encoded,
                beside=beside,
                announcements=exchange.announcer.of_combine(
                    spec, arrival.round, arrival.routes.num_tokens, forward=arrival.forward
                ),
                sum_ahead=SumAhead(out_TH=out, add=add) if begins_sum else None,
            )
            pending = transport.send_back(results)
            if ahead and exchange.works_ahead:
                pending = exchange.group.in_background(pending.wait)
        except Exception as error:
            self._trips.fail_combine(arrival, error)
        self._returning, self._reduces, self._terms = pending, reduces, terms
        self._out = self._out if out is None else out
        self.owes_dispatch, self._is_sent_back = arrival.has_more, True
        self._trips.travels(self)

    def result(self) -> Tensor:
        """Wait for the results of this rank's tokens, and return their sum, when all passes were sent back."""
        return self._combined().y_TH

    def placed(self, name: str) -> Tensor:
        """What came home of this rank's choices under a name of the spec's `returns`; 0 for ids of -1. After `result`.

        `[T, K]` for a payload of one number for each choice, else `[T, K, width]`.
        """
        (payload,) = (payload for payload in self.spec.returns if payload.name == name)
        placed = self._placed[name]
        shape = (len(placed), self.spec.top_k, payload.width)
        return placed.view(shape).squeeze(2) if payload.width == 1 else placed.view(shape)

    def _combined(self) -> CombinedRows:
        self._wait_for_results()
        assert self._sums is not None
        return self._sums

    @by_one_thread
    def _wait_for_results(self) -> None:
        if self._returning is not None:
            self._come_home()
        elif self._error is not None:
            raise self._error

    def _come_home(self) -> None:
        """Wait for the results of this rank's tokens, and sum them, or keep them by rank."""
        arrival, pending, self._returning = self.arrived, self._returning, None
        self._trips.forget(self)
        assert arrival is not None
        assert pending is not None
        exchange, transport, spec = self._exchange, self._transport, self.spec
        stats = exchange.stats[spec.counted_as]
        with stats.waiting("combine"):
            for_others = True
            try:
                home = pending.wait()
                for_others = transport.waits_in_sum
                if self._reduces:
                    self._sums = CombinedRows(y_TH=self._sum(arrival, home))
                    if spec.returns:
                        self._place(arrival, home)
                else:
                    self._rows = _by_rank(arrival, home)
            except BaseException as error:
                exchange.usability.end_wait(error, spec, for_others=for_others)
                if isinstance(error, PeerFailed | Corrupted):
                    self._trips.tell_given_up(spec)
                raise
            self._trips.tell_given_up(spec)
        if not transport.reads_values and (counts := transport.counts_at_end(arrival)) is not None:
            arrival = replace(arrival, counts_W=tuple(counts[1]))
            nbytes = [rows * transport.region_bytes(spec).dispatch_row for rows in counts[0]]
            stats.count_rows(*counts, nbytes)
        stats.count_combine(transport.bytes_returned(arrival))
        self._terms = ()

    def _sum(self, arrival: Arrival, home: ResultsAtHome) -> Tensor:
        """The sum of the results at home, and of what the caller adds."""
        if (y_TH := home.summed()) is not None:
            return y_TH
        terms = [term if isinstance(term, Tensor) else self._late_term(arrival, term) for term in self._terms]
        if self._out is None:
            shape = (arrival.batch_tokens, self.spec.hidden_size)
            self._out = torch.empty(shape, dtype=self.spec.dtype, device=self._exchange.group.device)
        if arrival.part is None:
            return home.sum_into(self._out, terms)
        home.sum_into(self._out[arrival.tokens], [term[arrival.tokens] for term in terms])
        return self._out

    def _place(self, arrival: Arrival, home: ResultsAtHome) -> None:
        """Keep what came home of the choices of this pass."""
        for payload in arrival.spec.returns:
            placed_TK = home.placed(payload)
            if arrival.part is None:
                self._placed[payload.name] = placed_TK
                continue
            whole = self._placed.setdefault(
                payload.name, placed_TK.new_zeros(arrival.batch_tokens, placed_TK.shape[1])
            )
            whole[arrival.tokens] = placed_TK

    def _late_term(self, arrival: Arrival, term: Background[Tensor]) -> Tensor:
        """A term of a sum that was still computed when results were sent: wait for it, and check it."""
        tensor = term.wait()
        check_output(self.spec, tensor, arrival.batch_tokens, self._exchange.group.device)
        return tensor

    # -- Turns and errors ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish the phase that travels, if one does, before another one starts.

        An error is raised here, and again where the caller waits for this phase.
        """
        try:
            if self._arriving is not None:
                self._arrive()
            elif self._returning is not None:
                self._come_home()
        except BaseException as error:
            self._error = error
            raise

    @by_one_thread
    def refuse(self, error: Exception) -> NoReturn:
        """Take part in the combine of the arrival only to say that this rank has an error; raise it."""
        self._trips.fail_combine(self._take(), error)

    @by_one_thread
    def redirect(
        self, spec: ExchangeSpec, *, received: ReceivedRows | None = None, again: bool = False
    ) -> None:
        """Let the one arrival in flight be combined with another spec; `again`: after a combine that was refused."""
        arrival = self.arrival
        self.spec = spec
        self.arrived = replace(
            arrival,
            spec=spec,
            received=arrival.received if received is None else received,
            round=self._exchange.announcer.round + 1 if again else arrival.round,
        )
        self._trips.in_flight.clear()
        self._trips.in_flight.add(self.arrived)

    def _take(self) -> Arrival:
        """Take the arrival out of the queue of those in flight; raise if it cannot be combined now."""
        self._trips.begin(self.spec.layer)
        arrival = self._checked()
        self._trips.in_flight.take(arrival)
        return arrival


def _by_rank(arrival: Arrival, home: ResultsAtHome) -> RankRows:
    """The results at home, not summed, with the numbers of their tokens in the whole batch."""
    rows_by_rank, tokens_by_rank = home.by_rank()
    return RankRows(
        rows_by_rank=rows_by_rank,
        tokens_by_rank=tokens_by_rank
        if arrival.part is None
        else tuple(tokens + arrival.tokens.start for tokens in tokens_by_rank),
        num_tokens=arrival.batch_tokens,
        dtype=arrival.spec.dtype,
    )
