"""`one_sided` on CPUs and GPUs: what both declare, and what `hierarchical` asks of it inside a host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tokenyard.errors import Reason
from tokenyard.exchange.batch import Arrival, ResultsAtHome
from tokenyard.exchange.one_sided import declarations
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.workspace import LayerBytes
from tokenyard.group.base import Group


class OneSidedTransport(Transport):
    """Ranks push rows into each other's memory, and pull results out of it."""

    name = "one_sided"
    # Whether rows go where their ids say, also where choices are given (`BatchRoutes.choices`).
    looks_up_ids: ClassVar[bool] = False

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        return declarations.reaches(group, hosts)

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        return declarations.watches(group)

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        return declarations.slot_bytes(spec)

    # -- Inside a host: who exchanges announcements elsewhere sums without them here -----------------------

    @abstractmethod
    def mark(self, round: int) -> None:
        """Say that this rank's results of a round are in their place."""

    @abstractmethod
    def all_marked(self, round: int, seconds: float) -> bool:
        """Whether all ranks have said so, after so many seconds at most."""

    @abstractmethod
    def at_home(self, arrival: Arrival) -> ResultsAtHome:
        """The results of this rank's tokens, of which all ranks have said so, or which they are known to bring."""

    @abstractmethod
    def leave(self) -> None:
        """Take part no more, because of a loss elsewhere: nobody waits for this rank."""

    @abstractmethod
    def departed(self) -> bool:
        """Whether those whom a `PeerLost` of this transport names have left, and are not lost."""
