"""Exchanges: they move rows between the ranks of a group.

`EXCHANGES` is the registry; planner, errors, docs and tests read it. `resolve` also takes the names by which
engines call such backends today.
"""

from __future__ import annotations

import logging

from tokenyard.errors import check_part, unknown_name
from tokenyard.exchange.allgather import AllgatherExchange
from tokenyard.exchange.base import Exchange
from tokenyard.exchange.one_sided import OneSidedExchange
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import Dispatched, ExchangeSpec
from tokenyard.exchange.two_sided import TwoSidedExchange

# The exchanges by name.
EXCHANGES: dict[str, type[Exchange]] = {
    cls.name: cls for cls in (AllgatherExchange, TwoSidedExchange, OneSidedExchange)
}

# The names that engines use, and the exchanges that do that job, the nearest first. All exchanges give the
# same bits, so the next one may stand in where the nearest does not exist.
ALIASES: dict[str, tuple[str, ...]] = {
    "flashinfer_nvlink_one_sided": ("one_sided", "two_sided"),
    "flashinfer_nvlink_two_sided": ("two_sided",),
    "allgather_reducescatter": ("allgather",),
}

_log = logging.getLogger("tokenyard")


def resolve(name: str | type[Exchange]) -> type[Exchange]:
    """The exchange of a name, or of an engine's name for it.

    >>> resolve("allgather_reducescatter").name
    'allgather'
    """
    if not isinstance(name, str):
        check_part("exchange", name, Exchange)
        return name
    if name in EXCHANGES:
        return EXCHANGES[name]
    for choice in ALIASES.get(name, ()):
        if choice in EXCHANGES:
            _log.info("exchange %r is served by %r", name, choice)
            return EXCHANGES[choice]
    raise unknown_name("exchange", name, [*EXCHANGES, *ALIASES])


__all__ = [
    "ALIASES",
    "EXCHANGES",
    "AllgatherExchange",
    "Dispatched",
    "Exchange",
    "ExchangeSpec",
    "OneSidedExchange",
    "RoundTrip",
    "TwoSidedExchange",
    "resolve",
]
