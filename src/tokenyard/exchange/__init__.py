"""Exchanges: they move rows between the ranks of a group.

An `Exchange` runs round trips; a transport under it moves the bytes. `EXCHANGES` is the registry of transports
between ranks: planner, errors, docs and tests read it. `resolve` also takes the names by which engines call such
backends today.
"""

from __future__ import annotations

import logging

from tokenyard.errors import check_part, unknown_name
from tokenyard.exchange.announcement import Announcement, Announcements
from tokenyard.exchange.batch import Arrival, Batch, BatchRoutes, Failure, received_rows
from tokenyard.exchange.exchange import Exchange
from tokenyard.exchange.results import Results, ResultsAtHome, RowsAtHome
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.allgather import AllgatherTransport
from tokenyard.exchange.transports.hierarchical import HierarchicalTransport
from tokenyard.exchange.transports.host_map import HostMap, number_hosts
from tokenyard.exchange.transports.local import LocalTransport
from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport
from tokenyard.exchange.transports.two_sided import TwoSidedTransport
from tokenyard.group.base import Pending

# The transports between ranks, by the names of their exchanges. Beside them, `local` serves a group of one rank.
EXCHANGES: dict[str, type[Transport]] = {
    cls.name: cls
    for cls in (AllgatherTransport, TwoSidedTransport, HierarchicalTransport, SharedMemoryTransport)
}

# The names that engines use, and the exchanges that do that job, the nearest first. All exchanges give the
# same bits, so the next one may stand in where the nearest does not exist.
ALIASES: dict[str, tuple[str, ...]] = {
    "flashinfer_nvlink_one_sided": ("one_sided", "two_sided"),
    "flashinfer_nvlink_two_sided": ("two_sided",),
    "allgather_reducescatter": ("allgather",),
}

_log = logging.getLogger("tokenyard")


def resolve(name: str | type[Transport]) -> type[Transport]:
    """The transport class of an exchange, given by its name, by an engine's name for it, or as the class itself.

    >>> resolve("allgather_reducescatter").name
    'allgather'
    """
    if not isinstance(name, str):
        check_part("exchange", name, Transport)
        return name
    if name in EXCHANGES:
        return EXCHANGES[name]
    if name == LocalTransport.name:
        return LocalTransport
    for choice in ALIASES.get(name, ()):
        if choice in EXCHANGES:
            _log.info("exchange %r is served by %r", name, choice)
            return EXCHANGES[choice]
    raise unknown_name("exchange", name, [*EXCHANGES, LocalTransport.name, *ALIASES])


__all__ = [
    "ALIASES",
    "EXCHANGES",
    "AllgatherTransport",
    "Announcement",
    "Announcements",
    "Arrival",
    "Batch",
    "BatchRoutes",
    "Exchange",
    "ExchangeSpec",
    "Failure",
    "HierarchicalTransport",
    "HostMap",
    "LocalTransport",
    "Pending",
    "Results",
    "ResultsAtHome",
    "RoundTrip",
    "RowsAtHome",
    "SharedMemoryTransport",
    "Transport",
    "TwoSidedTransport",
    "number_hosts",
    "received_rows",
    "resolve",
]
