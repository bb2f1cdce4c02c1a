"""A paranoid plan: a transport around another one, which checks every row at both ends, and every sum.

    send          checksums are added to a batch; what the others sent is compared with theirs
    send_back     the rows that the experts had are compared again, checksums are added to the results
    sum_into      each result that came home is compared with its checksums, the sum with its plain twin

An error found on the way out, or before results are sent, is announced in place of this rank's results. For errors
found at home, ranks exchange *reports* at the end of the round, so that an error on one rank is raised on all. If
the transport has a workspace, its guards are checked, too (`workspace_guards`).

In `hierarchical`, dispatched rows are checked from end to end. On the way back each relay checks the results of its
host's ranks and compares its sums with their plain twin; it adds its own checksums to the sums, which are checked at
home. A relay announces an error only in its report, because other ranks wait for its sums until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from tokenyard.duties import Duty, Ledger, aside
from tokenyard.errors import ContractError, Corrupted, PeerFailed, PeerLost, TokenyardError
from tokenyard.exchange.batch import Arrival, Batch, BatchRoutes, Failure
from tokenyard.exchange.integrity.checksums import (
    ResultNumbers,
    check_back,
    check_out,
    checksums_back,
    checksums_out,
)
from tokenyard.exchange.integrity.workspace_guards import GUARD_BYTES, WorkspaceGuards
from tokenyard.exchange.passes import TooManyRows
from tokenyard.exchange.results import Results, ResultsAtHome, RowsAtHome, SumWatch
from tokenyard.exchange.spec import CHECKSUMS, ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.hierarchical import HierarchicalTransport
from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport
from tokenyard.exchange.workspace import LayerBytes
from tokenyard.formats.base import EncodedRows, Payload
from tokenyard.group.base import Group, Pending
from tokenyard.rows import LocalRoutes, RankRows, ReceivedRows, describe

Result = TypeVar("Result")

# Bytes of the report at the end of a round: the text of an error, or nothing.
_REPORT_BYTES = 512


class WatchedTransport(Transport):
    """Checks every row at both ends of a transport, and compares every sum with its plain twin."""

    name = "watched"
    waits_in_sum = True

    def __init__(self, transport: type[Transport], group: Group, *, in_flight: int = 1) -> None:
        super().__init__(group, in_flight=in_flight, guard=GUARD_BYTES)
        self.inner = transport(group, in_flight=in_flight, guard=GUARD_BYTES)  # what moves the bytes
        self.encodes_results = transport.encodes_results  # type: ignore[misc]
        self._sums_in_hosts = transport.sums_in_hosts
        # Checks the workspace that the ranks (or those of a host) share; None if they share none.
        self.guards: WorkspaceGuards | None = None

    # -- What the transport itself does --------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        self.inner.serve(specs)
        self._guard_workspace()

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        self.inner.trim(specs)
        self._guard_workspace()

    def _guard_workspace(self) -> None:
        if self.guards is None:
            inner = self.inner
            shares = inner.inside if isinstance(inner, HierarchicalTransport) else inner
            self.guards = WorkspaceGuards(shares) if isinstance(shares, SharedMemoryTransport) else None
        if self.guards is not None:
            self.guards.guard_workspace()

    def in_workspace(self, arrival: Arrival) -> Arrival:
        return self.inner.in_workspace(arrival)

    def record_launches(self, specs: Sequence[ExchangeSpec]) -> None:
        self.inner.record_launches(specs)

    def samples(self, spec: ExchangeSpec) -> Sequence[Callable[[int], ReceivedRows]]:
        return self.inner.samples(spec)

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        self.inner.warmup(specs)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        return self.inner.fixed_shapes(max_tokens)

    def region_bytes(self, spec: ExchangeSpec) -> LayerBytes:  # type: ignore[override]  # of the transport inside
        return self.inner.region_bytes(spec)

    def num_counts(self, spec: ExchangeSpec) -> int:
        return self.inner.num_counts(spec)

    def counts(self, routes: BatchRoutes) -> list[int]:
        return self.inner.counts(routes)

    def loads(self, source: int, counts: Sequence[int]) -> Sequence[int]:
        return self.inner.loads(source, counts)

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        return self.inner.bytes_sent(batch, rows)

    def bytes_returned(self, arrival: Arrival) -> list[int]:
        return self.inner.bytes_returned(arrival)

    def fail(self, failure: Failure) -> None:
        if failure.arrival is None:
            self._round_failed(failure.region)
        self.inner.fail(failure)

    def lost(self) -> list[int]:
        return self.inner.lost()

    def close(self) -> None:
        self.inner.close()

    # -- The way out ---------------------------------------------------------------------------------------

    def send(self, batch: Batch) -> Pending[Arrival]:
        extra = {**batch.extra, CHECKSUMS: checksums_out(self.group.rank, batch)}
        pending = self.inner.send(replace(batch, extra=extra))

        def wait() -> Arrival:
            try:
                arrival = pending.wait()
            except TooManyRows:  # nothing has moved
                raise
            except BaseException:
                self._round_failed(batch.region)
                raise
            return self._checked(arrival)

        return Pending(wait)

    def _round_failed(self, region: int) -> None:
        if self.guards is not None:
            self.guards.round_failed(region)

    def _checked(self, arrival: Arrival) -> Arrival:
        """An arrival without its checksums, and with the error that their comparison shows, if any, as `problem`."""
        received = arrival.received
        checksums_RC = received.extra[CHECKSUMS].clone()
        extra = {name: payload for name, payload in received.extra.items() if name != CHECKSUMS}
        results = None if received.results is None else replace(received.results, is_watched=True)
        received = replace(received, extra=extra, results=results)
        arrival = replace(arrival, received=received, checksums_RC=checksums_RC)
        try:
            if self.guards is not None:
                self.guards.check_arrival(self.in_workspace(arrival))
            self._check_rows(arrival)
        except Exception as error:
            return replace(arrival, problem=error)
        return arrival

    def _check_rows(self, arrival: Arrival) -> None:
        assert arrival.checksums_RC is not None  # `_checked` has put it there
        check_out(arrival.spec, self.group.rank, arrival.round, arrival.received, arrival.checksums_RC)

    # -- The way back --------------------------------------------------------------------------------------

    def send_back(self, results: Results) -> Pending[ResultsAtHome]:
        arrival, encoded = results.arrival, results.encoded
        watch = _SumWatch(transport=self, arrival=arrival) if self._sums_in_hosts else None

        def look() -> None:
            self._check_rows(arrival)  # no part has written into them while the experts ran
            if self.guards is not None:
                there = self.in_workspace(arrival)
                if encoded is None:
                    by_experts = results.rows_RH is None
                    self.guards.add_checksums(there, self._checksums_back, by_experts=by_experts)
                self.guards.check_results(there)

        if encoded is not None:
            payloads = {**encoded.payloads, CHECKSUMS: self._checksums_back(arrival, encoded)}
            encoded = replace(encoded, payloads=payloads)
        results = replace(results, encoded=encoded, on_results_written=look, watch=watch)
        pending = self.inner.send_back(results)
        return Pending(lambda: self._watched(arrival, pending.wait(), watch))

    def _checksums_back(self, arrival: Arrival, encoded: EncodedRows) -> Tensor:
        assert arrival.checksums_RC is not None
        results_N = ResultNumbers(with_source=self._sums_in_hosts).of(arrival.checksums_RC)
        if arrival.spec.sums_choices:  # a number for each choice
            assert isinstance(arrival.received.routes, LocalRoutes)
            pairs_N, top_k = arrival.received.routes.pairs, arrival.spec.top_k
            results_N = results_N[pairs_N // top_k] * top_k + pairs_N % top_k
        return checksums_back(self.group.rank, arrival.round, results_N, encoded.payloads)

    def _watched(self, arrival: Arrival, home: ResultsAtHome, watch: _SumWatch | None) -> ResultsAtHome:
        if not isinstance(home, RowsAtHome):
            raise ContractError(
                f"{self.inner.name} brings results home as {describe(home)}",
                expected="RowsAtHome: a paranoid plan looks at every row",
                fix="return RowsAtHome from send_back, or refuse paranoid plans in `watches`",
            )
        return _WatchedRows(arrival=arrival, home=home, transport=self, watch=watch)

    def conclude(self, arrival: Arrival, came: int, end: Callable[[], Result]) -> Result:
        """Run the end of a round, and exchange reports: if `end` fails on any rank, all ranks raise."""
        result: Result | None = None
        error: Exception | None = None
        try:
            with Ledger().open() as ledger:
                result = end()
            _check_reduction(arrival.spec, came, ledger)
        except Exception as raised:
            error = raised
        if isinstance(error, TokenyardError):
            error.at(layer=arrival.spec.layer, rank=self.group.rank)
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_REPORT_BYTES]
        report = torch.frombuffer(bytearray(text.ljust(_REPORT_BYTES, b"\0")), dtype=torch.uint8)
        by_rank = self._gather_reports(report.to(self.group.device)).cpu()
        if error is not None:
            raise error
        for rank, other in enumerate(by_rank):
            if why := bytes(other.tolist()).rstrip(b"\0").decode(errors="replace"):
                raise PeerFailed(rank, why, phase="combine", rank=self.group.rank)
        assert result is not None
        return result

    def _gather_reports(self, report: Tensor) -> Tensor:
        try:
            return self.group.all_gather(report, phase="the end of combine")
        except PeerLost as lost:
            # A rank that has left because its wait in the transport ended is not lost: the transport knows who is.
            knows = self.guards is not None and self.guards.group is self.group  # else the group does
            if self.guards is not None and knows and (named := self.guards.found_lost(lost)):
                raise PeerLost(named, phase=lost.phase, waited=lost.waited, rank=self.group.rank) from lost
            raise


@dataclass(frozen=True, kw_only=True, eq=False)
class _WatchedRows(ResultsAtHome):
    """Results at home that are checked before they are used, and whose sum is compared with its twin."""

    arrival: Arrival
    home: RowsAtHome
    transport: WatchedTransport
    watch: _SumWatch | None

    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        def end() -> Tensor:
            tokens_T = torch.arange(len(out_TH), device=out_TH.device)
            return _checked_sum(self._opened(), out_TH, add, tokens_T, ResultNumbers())

        return self._conclude(end)

    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self._conclude(lambda: self._opened().by_rank())

    def placed(self, payload: Payload) -> Tensor:
        return self.home.placed(payload)  # `sum_into` has checked it, with the rows

    def _conclude(self, end: Callable[[], Result]) -> Result:
        came = sum(tokens_N.numel() for tokens_N in self.home.tokens_by_rank)
        return self.transport.conclude(self.arrival, came, end)

    def _opened(self) -> RowsAtHome:
        """The results at home, checked, without their checksums."""
        if self.watch is not None and self.watch.problem is not None:
            raise self.watch.problem
        spec, routes = self.arrival.spec, self.arrival.routes
        results_by_rank = routes.choices_by_rank if spec.sums_choices else self.home.tokens_by_rank
        numbers = ResultNumbers(per_token=spec.results_per_row)
        return _opened(self.home, self.arrival.round, results_by_rank, numbers)


@dataclass(kw_only=True, eq=False)
class _SumWatch(SumWatch):
    """Checks what this rank sums as a relay in one round."""

    transport: WatchedTransport
    arrival: Arrival
    problem: Exception | None = None  # the error that was found, until the report of this round

    def results(self, home: RowsAtHome, heads_NC: Tensor) -> ResultsAtHome:
        return _RelayedRows(watch=self, home=home, heads_NC=heads_NC)

    def with_checksums(self, sums: EncodedRows, tokens_N: Tensor) -> EncodedRows:
        checksums = checksums_back(self.transport.group.rank, self.arrival.round, tokens_N, sums.payloads)
        return replace(sums, payloads={**sums.payloads, CHECKSUMS: checksums})


@dataclass(frozen=True, kw_only=True, eq=False)
class _RelayedRows(ResultsAtHome):
    """Results of a host's ranks at a relay, which are checked before they are summed."""

    watch: _SumWatch
    home: RowsAtHome
    heads_NC: Tensor

    def sum_into(self, out_TH: Tensor, add: Sequence[Tensor]) -> Tensor:
        numbers = ResultNumbers(with_source=True)
        numbers_T = numbers.of(self.heads_NC)
        try:
            results_by_rank = [numbers_T[tokens_N] for tokens_N in self.home.tokens_by_rank]
            opened = _opened(self.home, self.watch.arrival.round, results_by_rank, numbers)
            with aside():  # the sum that is a duty is the one at home
                _checked_sum(opened, out_TH, add, numbers_T, numbers)
        except Exception as error:
            # Raised later: other ranks still wait for sums, or a rank failed, whose error is announced first.
            self.watch.problem = error
        return out_TH

    def by_rank(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.home.by_rank()

    def placed(self, payload: Payload) -> Tensor:
        return self.home.placed(payload)


def _opened(
    home: RowsAtHome, round: int, results_by_rank: Sequence[Tensor], numbers: ResultNumbers
) -> RowsAtHome:
    """Results without their checksums; raise unless they have these numbers and are what their ranks sent."""
    peers = home.ranks or range(len(home.rows_by_rank))
    rows_by_rank = [
        check_back(peer, round, results_N, rows, numbers)
        for peer, rows, results_N in zip(peers, home.rows_by_rank, results_by_rank, strict=True)
    ]
    return replace(home, rows_by_rank=rows_by_rank)


def _checked_sum(
    opened: RowsAtHome, out_TH: Tensor, add: Sequence[Tensor], numbers_T: Tensor, numbers: ResultNumbers
) -> Tensor:
    """Sum results, and compare the sum with its plain twin."""
    rows_in_order, tokens_in_order = opened.summands()
    with aside():  # this is the twin, not the sum
        due_TH = RankRows(
            rows_by_rank=tuple(rows.decode(torch.float32) for rows in rows_in_order),
            tokens_by_rank=tokens_in_order,
            num_tokens=len(out_TH),
            dtype=out_TH.dtype,
        ).sum()
    for term_TH in add:
        due_TH += term_TH.float()
    due_TH = due_TH.to(out_TH.dtype)
    y_TH = opened.sum_into(out_TH, add)
    if torch.equal(y_TH, due_TH):
        return y_TH
    wrong_T = ~((y_TH == due_TH) | (y_TH.isnan() & due_TH.isnan())).all(dim=1)
    if bool(wrong_T.any()):
        number = int(numbers_T[int(wrong_T.nonzero()[0])])
        raise Corrupted(
            f"the result of {numbers.name(number)} is not the sum of what came "
            f"{'to its relay' if numbers.with_source else 'home'} ({int(wrong_T.sum())} tokens are off)",
            expected="one row from each rank that has one of its experts, each added once, in rank order",
            token=numbers.token(number),
            place="sum over ranks",
        )
    return y_TH


def _check_reduction(spec: ExchangeSpec, came: int, ledger: Ledger) -> None:
    """Raise unless the exchange has summed each row that came home once, or none if that is another's duty."""
    sums = {Duty.REDUCE_RANKS: spec.reduces_ranks, Duty.REDUCE_EXPERTS: spec.sums_choices}
    for duty, is_here in sums.items():
        due, done = came if is_here else 0, sum(ledger.rows(duty).values())
        if done != due:
            other = "caller sums" if duty is Duty.REDUCE_RANKS else "experts have summed"
            raise Corrupted(
                f"duty {duty.value!r} was done on {done} rows",
                expected=f"{due}: {came} came home, and the "
                + ("exchange sums each once" if due or not came else f"{other} them"),
                fix="sum in one place, the one that the wiring names",
                place=duty.value,
            )
