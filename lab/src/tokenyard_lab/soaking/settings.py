"""The settings of a soak."""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard.conformance.draws import RankKind
from tokenyard.exchange import Transport

# Seconds that a rank waits for another: far more than the slowest episode takes on a busy machine.
DEADLINE = 20.0
# A picture and a fit need some hundred points, not more.
_MOST_SAMPLES = 400
_SHORTEST_INTERVAL = 1.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long, on which ranks, and with what. Plain data: ranks get it, too."""

    ranks: int = 4
    kind: RankKind = "processes"
    # It ends after these seconds or episodes, whichever comes first. None: no such limit.
    seconds: float | None = None
    episodes: int | None = None
    exchanges: tuple[str | type[Transport], ...] = ("one_sided", "two_sided", "allgather")
    device: str = "cpu"
    seed: int = 0
    deadline: float = DEADLINE
    # Whether ranks are killed, and fresh ones take their places.
    losses: bool = True

    @property
    def loses_ranks(self) -> bool:
        """Whether ranks can be lost: one at least must be left."""
        return self.losses and self.ranks > 1

    @property
    def sample_every(self) -> float:
        """Seconds between two samples; without an end in time, one after every episode."""
        return 0.0 if self.seconds is None else max(_SHORTEST_INTERVAL, self.seconds / _MOST_SAMPLES)
