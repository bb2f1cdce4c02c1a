"""Duties: jobs that exactly one party must do, the parties, and the ledger that counts which party did which duty.

A wiring gives every duty to one party. Whether exactly that party did it, once, can be seen only while a layer runs.
Code that does a duty therefore calls `record` with the number of rows, which adds them to the open ledger, if there is
one. The block `with acting(party)` says which *party* does all duties that are recorded inside it.

    with Ledger().open() as ledger:
        with acting(Party.SENDER):
            format.encode(x_TH)            # records QUANTIZE, T rows
    ledger.done[Duty.QUANTIZE]             # {Party.SENDER: T}

Without an open ledger nothing is counted, and a call of `record` costs one lookup of a context variable.
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

    # The hash of `Enum` is written in Python, and slow: every call of a layer looks duties up in dictionaries.
    __hash__ = object.__hash__

    QUANTIZE = "quantize"  # encode rows into a quantized format
    PAD = "pad"  # fill rows up to the width that a format asks for
    SWIZZLE = "swizzle"  # bring scales into the 128×4 layout that some kernels read
    WEIGHT = "weight"  # multiply by the routing weight
    REDUCE_EXPERTS = "reduce experts"  # sum a token's experts on one rank
    REDUCE_RANKS = "reduce ranks"  # sum a token's results over ranks
    ROUTED_SCALING = "routed scaling"  # multiply routing weights by the model's scaling factor
    WEIGHT_GRADIENT = "weight gradient"  # compute the gradient of the routing weight of a choice


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
    """Counts, for one round trip, on how many rows each party did each duty.

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
        """Add rows on which a party did a duty."""
        with self._lock:
            by_party = self.done[duty]
            by_party[party] = by_party.get(party, 0) + rows

    def rows(self, duty: Duty) -> dict[Party, int]:
        """By party, the rows on which it did this duty; parties with no rows are left out."""
        return {party: rows for party, rows in self.done[duty].items() if rows}

    @contextmanager
    def open(self) -> Iterator[Ledger]:
        """Count the duties that are done inside the block, on this thread and on threads that run in its context."""
        token = _ledger.set(self)
        try:
            yield self
        finally:
            _ledger.reset(token)


_ledger: ContextVar[Ledger | None] = ContextVar("ledger", default=None)
_party: ContextVar[Party] = ContextVar("party", default=Party.CALLER)


def record(duty: Duty, rows: int | Callable[[], int]) -> None:
    """Add to the open ledger, if any, that the acting party did a duty on `rows` rows.

    `rows` may be a function, where counting is costly: it is called only if a ledger is open.
    """
    ledger = _ledger.get()
    if ledger is not None:
        ledger.write(duty, _party.get(), rows() if callable(rows) else rows)


def record_weights(weights_N: Tensor) -> None:
    """Record that rows were multiplied by these routing weights. Weights of 1 change nothing, and are not counted."""
    record(Duty.WEIGHT, lambda: int((weights_N != 1).sum()))


class _Set(Generic[Value]):
    """A context manager that sets a context variable. A layer enters about ten a call; a generator costs 3 µs more."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[Value], value: Value) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


# The context manager that does nothing: one object for all calls.
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


def acting(party: Party) -> AbstractContextManager[None]:
    """Inside the block, duties are recorded in the open ledger as done by this party."""
    return NO_CONTEXT if _ledger.get() is None else _Set(_party, party)


def aside() -> AbstractContextManager[None]:
    """Inside the block, duties are not recorded: what is computed there is not part of a round trip."""
    return _Set(_ledger, None)
