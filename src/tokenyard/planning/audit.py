"""The audit of a round trip: what was done on its way, by whom, compared with what the wiring says.

A paranoid plan opens a ledger for each batch (`tokenyard.duties`). When the experts are done, the ledger must hold all
duties up to then, for all rows that need them, done by the party that the wiring names, and by no other. What
the exchange sums at home, it checks itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from tokenyard.duties import Duty, Ledger, Party
from tokenyard.errors import Corrupted
from tokenyard.exchange import RoundTrip
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes, ReceivedRows


def settle(wiring: Wiring, ledger: Ledger, num_tokens: int, routes: object, received: ReceivedRows) -> None:
    """Raise unless each duty was done by its party, on all its rows, once. `routes` is what the layer was given."""
    for duty, party in wiring.duties.items():
        done = ledger.rows(duty)
        due = _due(wiring, duty, party, num_tokens, routes, received)
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


def audit(
    wiring: Wiring, trip: RoundTrip, x_TH: Tensor, routes_or_logits: Routes | Tensor
) -> AbstractContextManager[None]:
    """Where the plan is paranoid, record what is done inside, and compare it with the wiring at the end."""
    return _audit(wiring, trip, x_TH, routes_or_logits) if wiring.exchange_spec.checksummed else nullcontext()


@contextmanager
def _audit(
    wiring: Wiring, trip: RoundTrip, x_TH: Tensor, routes_or_logits: Routes | Tensor
) -> Iterator[None]:
    with Ledger().open() as ledger:
        yield
        assert trip.arrival is not None
        settle(wiring, ledger, x_TH.shape[0], routes_or_logits, trip.arrival.received)
