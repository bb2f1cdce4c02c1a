"""What an exchange is: it moves rows out to the ranks that own their experts, and results back.

    dispatch(spec, rows, routes) → Dispatched        each row once to each *rank* that owns one of its experts
    combine(dispatched, expert rows) → CombinedRows   one row per (token, rank) back, summed in float32

An exchange knows a group, placements and formats; what an expert is, it does not know. `ExchangeSpec` is all that it
is told of a layer. `Dispatched` is a frozen handle: it is combined once, in the order of dispatches, or it is
an error.

**Order.** Received rows stand in (source rank, token) order. Results are summed in rank order, in float32,
and rounded once: the result is bitwise the same in every run, on every kind of group, through every exchange.

**Shared fate.** Bad input, or an expert that raises, on one rank must reach the others, which wait. So every
phase starts with an announcement from each rank, "here is layer 3, round 17, so many rows", or "I failed,
because …". A rank that fails still announces that, then raises its own error; the others raise `PeerFailed`;
nothing is lost, and the group stays usable. On the way back the announcement travels in front of the rows, in
the same message. Ranks that are in different layers, phases or rounds find out here (`Drifted`).

**A loss.** A wait that ends without the others' answer (a rank is lost, or this one was interrupted) breaks the plan:
nobody knows what the others have received, and a late answer must not be taken for an answer to a later call. Every
call raises `PlanBroken` from then on; `Plan.go_on_without` and `Plan.readmit` make a new exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from tokenyard.errors import (
    ContractError,
    HandleError,
    InputError,
    PeerFailed,
    PeerLost,
    PlanBroken,
    Reason,
    TokenyardError,
)
from tokenyard.exchange.announcement import Announcement, Phase
from tokenyard.exchange.in_flight import InFlightQueue
from tokenyard.exchange.reduce import sum_over_ranks
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import (
    Dispatched,
    ExchangeSpec,
    Outgoing,
    ReturnPath,
    UnencodedRows,
    check_arrival,
    check_device,
    check_extra,
    check_logits,
    check_output,
    check_writable,
    tokens_by_rank,
)
from tokenyard.exchange.stats import LayerStats
from tokenyard.exchange.watch import ParanoidWatch, Watch
from tokenyard.exchange.workspace import LayerBytes
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Group
from tokenyard.group.one_thread import OneThread, by_one_thread
from tokenyard.routing import Routes
from tokenyard.rows import (
    CombinedRows,
    ExpertRows,
    PlacedRows,
    RankRows,
    ReceivedRows,
    RoutingLogits,
    check_expert_rows,
    describe,
)


class Exchange(ABC):
    """Moves rows for all layers of a plan. Subclasses say how a checked batch travels, out and back."""

    name: ClassVar[str]  # the name in `EXCHANGES`, or one of your own
    # Whether router logits can travel: every rank must then see every token.
    carries_logits: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> Reason | None:
        """None, or why this exchange cannot carry a layer."""
        if spec.carries_logits and not cls.carries_logits:
            why = f"{cls.name} sends a row only where its experts are, so routes must be known before"
            return Reason(field="experts", value="experts that route by themselves", why=why)
        return spec.wire.carries(spec.dtype) or spec.combine_wire.returns(spec.dtype)

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        """None, or why this exchange cannot serve the ranks of a group, which run on these hosts."""
        return None

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        """None, or why this exchange cannot watch itself on this group (`plan(paranoid=True)`)."""
        return None

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        """The memory that a round trip of a layer takes on one rank, at most."""
        return spec.nbytes

    @classmethod
    def on(cls, group: Group) -> type[Exchange]:
        """The class that does this exchange's work for a group: it may depend on where the rows are."""
        return cls

    def __init__(self, group: Group, *, in_flight: int = 1, plan_id: int = 0, paranoid: bool = False) -> None:
        self.group = group  # the ranks that exchange
        self._watch = self._paranoid_watch(group, in_flight) if paranoid else Watch()
        self.stats: dict[str, LayerStats] = {}  # counters by layer
        self._in_flight = InFlightQueue(in_flight, group.rank)
        self._plan_id = plan_id
        self._names: list[str] = []
        self._round = 0
        self._closed = False
        self._broken: BaseException | None = (
            None  # why a wait for the other ranks has ended without an answer
        )
        self._one_thread = OneThread("the plan")

    @classmethod
    def _paranoid_watch(cls, group: Group, in_flight: int) -> Watch:
        """What looks on where a plan was made to watch itself."""
        return ParanoidWatch(group)

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers, and give back what they do not need. Collective."""
        self.serve(specs)

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on. Collective; handles that are in flight raise afterwards."""
        self.stats = {c.layer: self.stats.get(c.layer) or LayerStats(self.group.size) for c in specs}
        self._names = list(self.stats)
        self._in_flight.land_all()

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:  # noqa: B027 (most have nothing to do)
        """Make ready whatever the first round trips of these layers would otherwise wait for. Collective."""

    def synchronize(self) -> None:  # noqa: B027
        """Raise what went wrong in calls that did not wait for it. Here every call does."""

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """Batches whose shapes do not depend on what is in them, for a CUDA graph."""
        raise HandleError(
            f"{self.name} on {self.group.device.type} was asked for fixed shapes",
            expected="one_sided on GPUs",
            fix="leave fixed_shapes out: here every call reads how many rows came",
            rank=self.group.rank,
        )

    # -- The way out ---------------------------------------------------------------------------------------

    def encode(self, spec: ExchangeSpec, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """Rows in the layer's wire; or as they are, by an exchange that encodes them on their way."""
        return spec.wire.encode(x_TH)

    @by_one_thread
    def dispatch(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Dispatched:
        """Send each row to every rank that owns one of its experts; return what the others sent here."""
        self._check_turn(spec)
        round, stats = self._round + 1, self.stats[spec.layer]
        extra = {} if extra is None else extra
        try:
            outgoing = self._watch.seal(spec, round, self._prepare(spec, rows, routes, extra))
            loaded = self._load_out(spec, round, outgoing)
        except Exception as error:
            self._fail(spec, error, partial(self._fail_out, spec, round, error))
        with stats.waiting("dispatch"), self._in_layer(spec), self._waiting():
            received, received_counts = self._send_out(spec, round, outgoing, loaded)
        path = ReturnPath(
            tokens_by_rank=outgoing.tokens_by_rank,
            received_counts=received_counts,
            num_tokens=outgoing.num_tokens,
        )
        dispatched = Dispatched(
            received=received,
            spec=spec,
            round=round,
            return_path=path,
            flight=self._in_flight.free,
        )
        self._in_flight.add(dispatched)
        stats.count_dispatch(
            outgoing.num_tokens, outgoing.counts, received_counts, self.bytes_sent(spec, outgoing)
        )
        return self._look_at_arrival(dispatched)

    def _look_at_arrival(self, dispatched: Dispatched) -> Dispatched:
        """Count what came, and let the watch see it. The others have gone on: they wait for this rank's combine."""
        try:
            check_arrival(dispatched)
            return self._in_flight.replace_newest(self._watch.arrived(dispatched))
        except Exception as error:
            self._fail(dispatched.spec, error, partial(self._in_flight.give_up, dispatched, error))

    @abstractmethod
    def _load_out(self, spec: ExchangeSpec, round: int, outgoing: Outgoing) -> Any:
        """Bring a checked batch into the form in which it travels. An error here still reaches all ranks."""

    @abstractmethod
    def _send_out(
        self, spec: ExchangeSpec, round: int, outgoing: Outgoing, loaded: Any
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        """Move a loaded batch; return what arrived, and how many rows this rank owes each source rank."""

    @abstractmethod
    def _fail_out(self, spec: ExchangeSpec, round: int, error: BaseException) -> None:
        """Take part in a dispatch only to say that this rank failed."""

    @abstractmethod
    def _load_back(self, dispatched: Dispatched, encoded: EncodedRows) -> Any:
        """Bring results into the form in which they travel. An error here still reaches all ranks."""

    @abstractmethod
    def _send_back(self, dispatched: Dispatched, loaded: Any) -> list[EncodedRows]:
        """Return loaded results to their source ranks; hand out what came home, by rank, in the order of my tokens.

        `loaded` is None where the experts wrote into the combine region themselves.
        """

    @abstractmethod
    def _fail_back(self, dispatched: Dispatched, error: BaseException) -> None:
        """Take part in a combine only to say that this rank failed."""

    @abstractmethod
    def bytes_sent(self, spec: ExchangeSpec, outgoing: Outgoing) -> list[int]:
        """Bytes that this rank puts on the wire for each rank in a dispatch."""

    def _check_turn(self, spec: ExchangeSpec) -> None:
        """Errors of this rank's own making, raised before anybody is told: the others are not in this call."""
        self.check_usable(layer=spec.layer)
        self._in_flight.check_room(spec)

    def _prepare(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits,
        extra: Mapping[str, Tensor],
    ) -> Outgoing:
        """Check everything that can be wrong with a batch, and find out where each row goes."""
        if isinstance(rows, UnencodedRows):
            rows.check()
            rows = rows.format.encode(rows.x_TH)
        routes = self._check_batch(spec, rows, routes, extra)
        if isinstance(routes, RoutingLogits):
            every = (torch.arange(rows.num_rows, device=rows.device),) * self.group.size
            return Outgoing(rows=rows, routes=routes, extra=extra, tokens_by_rank=every)
        routes = self._drop_lost(spec, routes)
        rank_TK, local_TK = spec.placement.resolve(routes.topk_ids_TK, self.group.rank)
        return Outgoing(
            rows=rows,
            routes=routes,
            extra=extra,
            tokens_by_rank=tokens_by_rank(rank_TK, self.group.size),
            resolved=(rank_TK, local_TK),
        )

    def _check_batch(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits,
        extra: Mapping[str, Tensor],
        *,
        values: bool = True,
    ) -> Routes | RoutingLogits:
        """Raise unless a batch is what the layer was planned for; `values=False` leaves out the range of the ids."""
        if not isinstance(rows, (EncodedRows, UnencodedRows)):
            raise ContractError(
                f"dispatch was given {describe(rows)}",
                expected="EncodedRows",
                fix="encode with the layer's wire",
            )
        if rows.format != spec.wire or rows.hidden_size != spec.hidden_size:
            raise InputError(
                f"the rows are {rows.format} of width {rows.hidden_size}",
                expected=f"{spec.wire} of width {spec.hidden_size}: the bytes that this layer was sized for",
                fix="encode with the layer's wire, or plan the layer for this format",
            )
        rows.check()
        num_tokens = rows.num_rows
        if num_tokens > spec.max_tokens:
            raise InputError(
                f"{num_tokens} tokens",
                expected=f"at most max_tokens={spec.max_tokens} on a rank",
                fix="send the batch in parts, or plan with a larger max_tokens",
            )
        check_device("x_TH", rows.device, self.group.device)
        check_extra(spec, extra, num_tokens, self.group.device)
        if spec.carries_logits:
            return check_logits(spec, routes, num_tokens)
        if not isinstance(routes, Routes):
            raise InputError(
                f"the routes are {describe(routes)}", expected="Routes", fix="pass Routes(topk_ids_TK=…, …)"
            )
        routes.check(
            spec.num_experts,
            top_k=spec.top_k,
            num_tokens=num_tokens,
            scaled_by=spec.routed_scaling,
            device=rows.device,
            values=values,
        )
        return routes

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

    @by_one_thread
    def combine(
        self,
        dispatched: Dispatched,
        result: ExpertRows | PlacedRows,
        *,
        out: Tensor | None = None,
        add: Sequence[Tensor] = (),
    ) -> CombinedRows:
        """Bring every token's results home and sum them over ranks, in rank order, in float32.

        `add` (a residual, shared experts) is added before the one rounding to the input's dtype. The result
        is written into `out` if given; `combine(…, out=y, add=(y,))` adds to what is there.
        """
        home = self._bring_home(dispatched, result, reduces=True, out=out, add=add)
        spec, path = dispatched.spec, dispatched.return_path
        if out is None:
            shape = (path.num_tokens, spec.hidden_size)
            out = torch.empty(shape, dtype=spec.dtype, device=self.group.device)
        with self._in_layer(spec), self._watch.conclusion(dispatched):
            home = self._watch.open_results(dispatched, home)
            due_TH = self._watch.due_sum(dispatched, home, add)
            y_TH = sum_over_ranks(home, path.tokens_by_rank, out, add)
            self._watch.check_sum(dispatched, due_TH, y_TH)
        return CombinedRows(y_TH=y_TH)

    @by_one_thread
    def combine_unreduced(self, dispatched: Dispatched, result: ExpertRows | PlacedRows) -> RankRows:
        """Bring every token's results home, one row per (token, rank). Summing them is the caller's duty."""
        home = self._bring_home(dispatched, result, reduces=False, out=None, add=())
        path = dispatched.return_path
        with self._in_layer(dispatched.spec), self._watch.conclusion(dispatched):
            home = self._watch.open_results(dispatched, home)
            # A copy even of float32 rows: what comes home must not be a view of a peer's memory.
            rows_by_rank = tuple(rows.decode(torch.float32).clone() for rows in home)
        return RankRows(
            rows_by_rank=rows_by_rank,
            tokens_by_rank=path.tokens_by_rank,
            num_tokens=path.num_tokens,
            dtype=dispatched.spec.dtype,
        )

    def _bring_home(
        self,
        dispatched: Dispatched,
        result: ExpertRows | PlacedRows,
        *,
        reduces: bool,
        out: Tensor | None,
        add: Sequence[Tensor],
    ) -> list[EncodedRows]:
        self._land(dispatched)
        spec, path = dispatched.spec, dispatched.return_path
        stats = self.stats[spec.layer]
        try:
            rows_RH = self._check_result(dispatched, result, reduces=reduces, out=out, add=add)
            loaded = None
            if rows_RH is not None:
                encoded = spec.combine_wire.encode(rows_RH)
                loaded = self._load_back(dispatched, self._watch.seal_results(dispatched, encoded))
            self._watch.leaving(dispatched, placed=rows_RH is None)
        except Exception as error:
            self._fail(spec, error, partial(self._fail_back, dispatched, error))
        with stats.waiting("combine"), self._in_layer(spec), self._in_turn(), self._waiting():
            home = self._send_back(dispatched, loaded)
        stats.count_combine([n * self.region_bytes(spec).combine_row for n in path.received_counts])
        return home

    def _check_result(
        self,
        dispatched: Dispatched,
        result: ExpertRows | PlacedRows,
        *,
        reduces: bool,
        out: Tensor | None,
        add: Sequence[Tensor],
    ) -> Tensor | None:
        """Raise unless a result, and what it is written into and added to, fit; its rows, None if they are placed."""
        spec = dispatched.spec
        if reduces != spec.reduces_ranks:
            raise ContractError(
                f"the {'exchange' if reduces else 'caller'} was asked to reduce over ranks",
                expected=f"the {'exchange' if spec.reduces_ranks else 'caller'} to do it, as the plan says",
                fix='take them unreduced, or plan with reduce_ranks="exchange"'
                if reduces
                else 'let the exchange do it, or plan with reduce_ranks="caller"',
            )
        for tensor in ([] if out is None else [out]) + list(add):
            check_output(spec, tensor, dispatched.return_path.num_tokens, self.group.device)
        if out is not None:
            check_writable(out)
        if self._is_placed(dispatched, result):
            return None
        return check_expert_rows(result, dispatched.received).rows_RH

    def _is_placed(self, dispatched: Dispatched, result: object) -> bool:
        """Whether a result stands in the combine region already. Exchanges without one know no such thing."""
        return False

    # -- Shared fate ---------------------------------------------------------------------------------------

    @contextmanager
    def round_trip(self, spec: ExchangeSpec) -> Iterator[RoundTrip]:
        """One round trip of one layer, in which an error on one rank reaches all ranks, wherever it happens."""
        with self.in_use(layer=spec.layer):
            self._in_flight.check_empty(spec)
            trip = RoundTrip(exchange=self, spec=spec)
            try:
                yield trip
            except BaseException as error:  # one that is interrupted owes the others a word, too
                if trip.dispatched is not None and trip.dispatched in self._in_flight:
                    self._fail(spec, error, partial(self._in_flight.give_up, trip.dispatched, error))
                if trip.owes_dispatch:
                    self._fail(spec, error, partial(self._fail_out, spec, self._round + 1, error))
                raise

    def _fail(self, spec: ExchangeSpec, error: BaseException, tell: Callable[[], None]) -> NoReturn:
        """Tell the others that this rank failed, then raise its error."""
        with self._in_layer(spec):
            if isinstance(error, TokenyardError):
                error.at(layer=spec.layer, rank=self.group.rank)
            if self._broken is None:
                with self._waiting():
                    tell()
                    self._tell_given_up()
            raise error

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """A combine, behind which those that were given up have their turn."""
        try:
            yield
        except PeerFailed:
            self._tell_given_up()
            raise
        self._tell_given_up()

    def _tell_given_up(self) -> None:
        """Take part in the combines of the oldest dispatches that were given up, only to say so."""
        for dispatched, error in self._in_flight.land_given_up():
            self._fail_back(dispatched, error)

    @contextmanager
    def _in_layer(self, spec: ExchangeSpec) -> Iterator[None]:
        """Errors of the group, which knows no layers, get the layer's name here. A loss breaks the plan."""
        try:
            yield
        except TokenyardError as error:
            error.at(layer=spec.layer, rank=self.group.rank)
            if isinstance(error, PeerLost):
                self._break(error)
            raise

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A wait for the other ranks. If it is interrupted, the plan is broken."""
        try:
            yield
        except TokenyardError:
            raise  # an answer of the others, or a loss
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, cause: BaseException) -> None:
        """Refuse all later calls: this one has ended without the others' answer."""
        self._broken = self._broken or cause

    def _land(self, dispatched: Dispatched) -> None:
        """Take a handle out of flight, or say why it cannot be combined."""
        self.check_usable(layer=dispatched.spec.layer if isinstance(dispatched, Dispatched) else None)
        self._in_flight.land(dispatched)

    def _announcement(
        self,
        spec: ExchangeSpec,
        phase: Phase,
        round: int,
        tokens: int,
        counts: list[int],
        error: BaseException | None,
    ) -> Announcement:
        return Announcement(
            plan=self._plan_id,
            layer=spec.index,
            phase=phase,
            round=round,
            tokens=tokens,
            counts=tuple(counts),
            error="" if error is None else f"{type(error).__name__}: {error}",
        )

    def check_open(self, *, layer: str | None = None) -> None:
        """Raise if the plan is closed."""
        if self._closed:
            raise HandleError(
                "the plan is closed",
                expected="an open plan",
                fix="make a new plan",
                layer=layer,
                rank=self.group.rank,
            )

    @contextmanager
    def in_use(self, *, layer: str | None = None) -> Iterator[None]:
        """A call of the plan that all its ranks make: by one thread at a time, and not after a loss."""
        with self._one_thread:
            self.check_usable(layer=layer)
            try:
                yield
            except PeerLost as error:
                self._break(error)
                raise

    def check_usable(self, *, layer: str | None = None) -> None:
        """Raise if the plan is closed, or broken."""
        self.check_open(layer=layer)
        if self._broken is not None:
            raise PlanBroken(self._broken, layer=layer, rank=self.group.rank)

    def close(self) -> None:
        """No more rounds."""
        self._closed = True
        self._in_flight.land_all()
