"""Duties: jobs that exactly one party must do, who can do them, and the ledger in which what was done is written down.

A wiring gives every duty to one party. Whether that party did it, once, and nobody else did, shows only while a layer
runs: so the places where a duty is done write it down (`record`), by how many rows, where a ledger is open. A *party*
acts for the length of a block (`acting`); whatever is done inside is done by it.

    with Ledger().open() as ledger:
        with acting(Party.SENDER):
            format.encode(x_TH)            # records QUANTIZE, T rows
    ledger.done[Duty.QUANTIZE]             # {Party.SENDER: T}

Without an open ledger nothing is written, and a place pays for one look at a variable.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class Duty(Enum):
    """A job that exactly one party must do."""

    # That of `Enum` is written in Python, and every call of a layer looks duties up.
    __hash__ = object.__hash__

    QUANTIZE = "quantize"  # encode rows into a quantized format
    PAD = "pad"  # fill rows up to the width that a format asks for
    SWIZZLE = "swizzle"  # bring scales into the 128×4 layout that some kernels read
    WEIGHT = "weight"  # multiply by the routing weight
    REDUCE_EXPERTS = "reduce experts"  # sum a token's experts on one rank
    REDUCE_RANKS = "reduce ranks"  # sum a token's results over ranks
    ROUTED_SCALING = "routed scaling"  # multiply routing weights by the model's scaling factor


class Party(Enum):
    """Who does a job. `NOBODY` means that there is nothing to do."""

    CALLER = "caller"  # whoever calls the layer
    ROUTER = "router"  # the router of the layer
    SENDER = "sender"  # the layer, on the rank that holds a token
    EXCHANGE = "exchange"  # the exchange
    RECEIVER = "receiver"  # the layer, on the rank that holds an expert
    EXPERTS = "experts"  # the experts
    NOBODY = "–"  # there is nothing to do


class Ledger:
    """What was done in one round trip, by whom, and on how many rows.

    >>> with Ledger().open() as ledger, acting(Party.EXPERTS):
    ...     record(Duty.WEIGHT, 3)
    ...     record(Duty.WEIGHT, 4)
    >>> ledger.done[Duty.WEIGHT]
    {<Party.EXPERTS: 'experts'>: 7}
    """

    def __init__(self) -> None:
        self.done: dict[Duty, dict[Party, int]] = defaultdict(dict)
        self._lock = threading.Lock()  # experts compute in several threads

    def write(self, duty: Duty, party: Party, rows: int) -> None:
        """Some more rows."""
        with self._lock:
            by_party = self.done[duty]
            by_party[party] = by_party.get(party, 0) + rows

    def rows(self, duty: Duty) -> dict[Party, int]:
        """On how many rows a duty was done, by party; nobody who did nothing."""
        return {party: rows for party, rows in self.done[duty].items() if rows}

    @contextmanager
    def open(self) -> Iterator[Ledger]:
        """Write down what is done inside, on this thread and those that work for it."""
        token = _ledger.set(self)
        try:
            yield self
        finally:
            _ledger.reset(token)


_ledger: ContextVar[Ledger | None] = ContextVar("ledger", default=None)
_party: ContextVar[Party] = ContextVar("party", default=Party.CALLER)


def record(duty: Duty, rows: int | Callable[[], int]) -> None:
    """A duty was done on so many rows, by whoever acts. What is costly to count is counted only if it is written."""
    ledger = _ledger.get()
    if ledger is not None:
        ledger.write(duty, _party.get(), rows() if callable(rows) else rows)


def record_weights(weights_N: Tensor) -> None:
    """Rows were multiplied by these routing weights. A weight of 1 changes nothing, and does not count."""
    record(Duty.WEIGHT, lambda: int((weights_N != 1).sum()))


class _Set(Generic[Value]):
    """A context in which a variable has a value. A layer enters about ten in each call; a generator takes 3 µs more."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[Value], value: Value) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


# What is entered where a context has nothing to do: one for all calls.
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


def acting(party: Party) -> AbstractContextManager[None]:
    """What is done inside is done by this party, for the ledger that is open."""
    return NO_CONTEXT if _ledger.get() is None else _Set(_party, party)


def aside() -> AbstractContextManager[None]:
    """What is done inside belongs to no round trip, and is not written down."""
    return _Set(_ledger, None)
