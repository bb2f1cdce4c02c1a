"""What `hierarchical` asks of `one_sided` inside a host, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from tokenyard.exchange.batch import Arrival, Batch
from tokenyard.exchange.results import ResultsAtHome
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.group.base import Group, Pending
from tokenyard.rows import ReceivedRows


class InsideHost(Protocol):
    """A transport inside a host whose combine makes no announcements: `hierarchical` makes them in the whole group."""

    # Whether the transport finds the rank of each choice by its id, even if `BatchRoutes.choices` gives it.
    looks_up_ids: ClassVar[bool]
    counts_choices: ClassVar[bool]
    group: Group

    def serve(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def trim(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def record_launches(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def samples(self, spec: ExchangeSpec) -> Sequence[Callable[[int], ReceivedRows]]: ...
    def warmup(self, specs: Sequence[ExchangeSpec]) -> None: ...
    def close(self) -> None: ...
    def send(self, batch: Batch) -> Pending[Arrival]: ...

    def mark(self, round: int) -> None:
        """Tell the ranks of the host that this rank's results of a round are in their place."""

    def all_marked(self, round: int, seconds: float) -> bool:
        """Wait until all ranks of the host have marked a round; False if they have not after so many seconds."""

    def place_beside(self, arrival: Arrival, slots_R: Tensor, beside: Mapping[str, Tensor]) -> None:
        """Write what comes home beside results into these slots of this rank's combine region."""

    def at_home(self, arrival: Arrival) -> ResultsAtHome:
        """The results of this rank's tokens; all ranks have marked the round, or the sum itself waits for them."""

    def leave(self) -> None:
        """Take no further part, because of a loss elsewhere, and end the waits of others for this rank."""

    def departed(self) -> bool:
        """Whether the ranks that a `PeerLost` of this transport names are not lost, but have called `leave`."""
