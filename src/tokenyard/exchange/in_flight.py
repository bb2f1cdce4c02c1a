"""Arrivals that are not combined yet: each is combined once, in the order of the dispatches, or given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tokenyard.errors import ContractError, HandleError
from tokenyard.exchange.batch import Arrival
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.rows import describe


class InFlightQueue:
    """What one rank has dispatched and not yet combined, the oldest first. All ranks have the same ones."""

    def __init__(self, capacity: int, rank: int) -> None:
        self.capacity = capacity
        self._rank = rank
        self._waiting: deque[Arrival] = deque()
        # By round: the error of an arrival that will not be combined. It is announced when that is the oldest one.
        self._given_up: dict[int, BaseException] = {}

    def __contains__(self, arrival: object) -> bool:
        return any(waiting is arrival for waiting in self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self._waiting

    @property
    def oldest(self) -> Arrival | None:
        """The arrival that must be combined next; None if nothing is in flight."""
        return self._waiting[0] if self._waiting else None

    @property
    def free_region(self) -> int:
        """The first pair of regions that nothing in flight uses: the same one on every rank."""
        if not self._waiting:
            return 0
        used = {arrival.region for arrival in self._waiting}
        return next(region for region in range(self.capacity) if region not in used)

    @property
    def has_room(self) -> bool:
        """Whether one more dispatch may be in flight."""
        return len(self._waiting) < self.capacity

    def check_room(self, spec: ExchangeSpec) -> None:
        """Raise if no further dispatch may be in flight."""
        if not self.has_room:
            waiting = ", ".join(repr(arrival.spec.layer) for arrival in self._waiting)
            raise HandleError(
                f"{len(self._waiting)} dispatch in flight already (of {waiting})",
                expected=f"at most {self.capacity}",
                fix=f"combine it first, or plan(..., in_flight={self.capacity + 1})",
                layer=spec.layer,
                rank=self._rank,
            )

    def check_empty(self, layer: str | None) -> None:
        """Raise if a dispatch is in flight: it would have to be combined before a whole round trip of this layer."""
        if self._waiting:
            earlier = self._waiting[0].spec.layer
            raise HandleError(
                f"a dispatch of layer {earlier!r} is in flight, and is combined only after this call",
                expected="each dispatch to be combined in the order of the dispatches",
                fix=f"combine the dispatch of {earlier!r} first; inside a round trip, no other layer can be called",
                layer=layer,
                rank=self._rank,
            )

    def add(self, arrival: Arrival) -> None:
        """Append an arrival, as the newest one."""
        self._waiting.append(arrival)

    def take(self, arrival: Arrival) -> None:
        """Take an arrival out of the queue; raise if it is not the oldest one, or not in flight."""
        if not isinstance(arrival, Arrival):
            raise ContractError(
                f"combine was given {describe(arrival)} as its handle",
                expected="the Arrival that dispatch returned",
                fix="pass dispatch's return value",
            )
        if not self._waiting or self._waiting[0] is not arrival:
            known = arrival in self
            raise HandleError(
                "an earlier dispatch is still in flight" if known else "this handle is not in flight",
                expected="each dispatch to be combined once, in the order of the dispatches",
                fix="combine the oldest dispatch first" if known else "dispatch again",
                layer=arrival.spec.layer,
                rank=self._rank,
            )
        self._waiting.popleft()

    def give_up(self, arrival: Arrival, error: BaseException) -> None:
        """Note that an arrival will not be combined, and why. Does nothing if it is not in flight."""
        if arrival in self:
            self._given_up[arrival.round] = error

    def take_given_up(self) -> Iterator[tuple[Arrival, BaseException]]:
        """Take the oldest arrivals out, with their errors, until one comes that was not given up."""
        while self._waiting and self._waiting[0].round in self._given_up:
            oldest = self._waiting.popleft()
            yield oldest, self._given_up.pop(oldest.round)

    def clear(self) -> None:
        """Forget all arrivals."""
        self._waiting.clear()
        self._given_up.clear()
