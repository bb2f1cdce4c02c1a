"""What `hierarchical` asks of `one_sided` inside a host, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from tokenyard.exchange.batch import Arrival, Batch, ResultsAtHome
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.group.base import Group, Pending


class InsideHost(Protocol):
    """A transport whose ranks may sum results without announcements: they exchange these elsewhere."""

    # Whether rows go where their ids say, also where choices are given (`BatchRoutes.choices`).
    looks_up_ids: ClassVar[bool]
    counts_choices: ClassVar[bool]
    group: Group

    def serve(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def trim(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def warmup(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def close(self) -> None: ...
    def send(self, batch: Batch) -> Pending[Arrival]: ...

    def mark(self, round: int) -> None:
        """Say that this rank's results of a round are in their place."""

    def all_marked(self, round: int, seconds: float) -> bool:
        """Whether all ranks have said so, after so many seconds at most."""

    def at_home(self, arrival: Arrival) -> ResultsAtHome:
        """The results of this rank's tokens, of which all ranks have said so, or which they are known to bring."""

    def leave(self) -> None:
        """Take part no more, because of a loss elsewhere: nobody waits for this rank."""

    def departed(self) -> bool:
        """Whether those whom a `PeerLost` of this transport names have left, and are not lost."""
