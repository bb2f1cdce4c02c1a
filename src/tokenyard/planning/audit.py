"""The audit of a round trip: compares the duties that each party did with those that the wiring gives it.

A paranoid plan opens a ledger for each batch (`tokenyard.duties`). After the experts have run, the ledger must show
that each duty up to then was done by the party that the wiring names, by no other, and on all rows that need it. The
sums that the exchange makes at home are checked by the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from tokenyard.duties import NO_CONTEXT, Duty, Ledger, Party
from tokenyard.errors import Corrupted
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes, ReceivedRows


def settle(
    wiring: Wiring,
    ledger: Ledger,
    dues: Mapping[Duty, int | None],
    duties: Mapping[Duty, Party] | None = None,
) -> None:
    """Raise unless each duty was done by its party, on as many rows as it is due on, once."""
    for duty, party in (wiring.duties if duties is None else duties).items():
        done, due = ledger.rows(duty), dues[duty]
        if not _fits(wiring, party, done, due):
            raise Corrupted(
                f"duty {duty.value!r} was done {_told(done)}",
                expected=f"{_told({} if not due else {party: due})}, as the wiring says",
                fix="let one party do it, the one that `print(plan)` names",
                place=duty.value,
            )


def _fits(wiring: Wiring, party: Party, done: dict[Party, int], due: int | None) -> bool:
    if party is Party.EXPERTS and not done and not wiring.experts.counts_duties:
        return True  # such a kernel does not record its duties; the type of its result says what it did
    if due is None:
        return set(done) <= {party}
    return done == ({party: due} if due else {})


def _due(
    wiring: Wiring, duty: Duty, party: Party, num_tokens: int, routes: object, received: ReceivedRows
) -> int | None:
    """The number of tokens, received rows or pairs on which a duty must be done; None if it is not known here."""
    if party in (Party.NOBODY, Party.CALLER, Party.EXCHANGE):  # the exchange has not summed yet
        return 0
    if duty is Duty.ROUTED_SCALING:
        if isinstance(routes, Routes):  # ready routes are scaled already
            return 0
        return received.num_rows if wiring.exchange_spec.carries_logits else num_tokens
    if duty in (Duty.WEIGHT, Duty.REDUCE_EXPERTS, Duty.WEIGHT_GRADIENT):
        if not isinstance(received.routes, LocalRoutes):
            return None
        pairs_RK = received.routes.ids_RK >= 0
        if duty is Duty.WEIGHT:
            pairs_RK = pairs_RK & (received.routes.weights_RK != 1)  # times 1 is not counted
        return int(pairs_RK.sum())
    return num_tokens if party is Party.SENDER else received.num_rows


def _told(done: dict[Party, int]) -> str:
    return " and ".join(f"on {rows} rows by the {party.value}" for party, rows in done.items()) or "by nobody"


class Audit:
    """Records the duties that are done for one batch of a paranoid plan, and compares them with the wiring."""

    def __init__(self, wiring: Wiring, duties: Mapping[Duty, Party] | None = None) -> None:
        self._wiring = wiring
        self._duties = wiring.duties if duties is None else duties  # those of a backward are others
        self._ledger = Ledger() if wiring.exchange_spec.checksummed else None
        self._dues: dict[Duty, int | None] = {}  # rows on which each duty was due, in all passes so far

    def recording(self) -> AbstractContextManager[object]:
        """Record the duties that are done inside the block, if the plan is paranoid."""
        return NO_CONTEXT if self._ledger is None else self._ledger.open()

    def settle(self, num_tokens: int, routes_or_logits: Routes | Tensor, received: ReceivedRows) -> None:
        """Raise unless each duty up to the end of the experts was done as the wiring says. Called in each pass."""
        if self._ledger is None:
            return
        tokens = 0 if self._dues else num_tokens  # the sender does its duties once, for all passes
        for duty, party in self._duties.items():
            due = _due(self._wiring, duty, party, tokens, routes_or_logits, received)
            before = self._dues.get(duty, 0)
            self._dues[duty] = None if due is None or before is None else before + due
        settle(self._wiring, self._ledger, self._dues, self._duties)
