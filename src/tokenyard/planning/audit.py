"""The audit of a round trip: what was done on its way, by whom, compared with what the wiring says.

A paranoid plan opens a ledger for each batch (`tokenyard.duties`). When the experts are done, the ledger must hold all
duties up to then, for all rows that need them, done by the party that the wiring names, and by no other. What
the exchange sums at home, it checks itself.
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


def settle(wiring: Wiring, ledger: Ledger, dues: Mapping[Duty, int | None]) -> None:
    """Raise unless each duty was done by its party, on as many rows as it is due on, once."""
    for duty, party in wiring.duties.items():
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
        return True  # such a kernel does not count what it does; the type of its result says it
    if due is None:
        return set(done) <= {party}
    return done == ({party: due} if due else {})


def _due(
    wiring: Wiring, duty: Duty, party: Party, num_tokens: int, routes: object, received: ReceivedRows
) -> int | None:
    """On how many rows (tokens, received rows, or pairs of a row and an expert) a duty is due; None: not known here."""
    if party in (Party.NOBODY, Party.CALLER, Party.EXCHANGE):  # the exchange has not summed yet
        return 0
    if duty is Duty.ROUTED_SCALING:
        if isinstance(routes, Routes):  # ready routes are scaled already
            return 0
        return received.num_rows if wiring.exchange_spec.carries_logits else num_tokens
    if duty in (Duty.WEIGHT, Duty.REDUCE_EXPERTS):
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
    """What is done for one batch of a paranoid plan, recorded part by part, and compared with the wiring at the end."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._ledger = Ledger() if wiring.exchange_spec.checksummed else None
        self._dues: dict[Duty, int | None] = {}  # after the first pass: on how many rows each duty was due

    def recording(self) -> AbstractContextManager[object]:
        """Record what is done inside, where the plan is paranoid."""
        return NO_CONTEXT if self._ledger is None else self._ledger.open()

    def settle(self, num_tokens: int, routes_or_logits: Routes | Tensor, received: ReceivedRows) -> None:
        """Raise unless each duty up to the experts' was done as the wiring says. Called in each pass of the batch."""
        if self._ledger is None:
            return
        tokens = 0 if self._dues else num_tokens  # the sender does its duties once, for all passes
        for duty, party in self._wiring.duties.items():
            due = _due(self._wiring, duty, party, tokens, routes_or_logits, received)
            before = self._dues.get(duty, 0)
            self._dues[duty] = None if due is None or before is None else before + due
        settle(self._wiring, self._ledger, self._dues)
