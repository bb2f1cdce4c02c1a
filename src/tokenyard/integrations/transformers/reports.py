"""Reports of a sharded model: the counters of all ranks, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

# Counters that a rank keeps for each rank of the group: a report has their sum.
_SUMMED = ("rows_sent", "rows_received", "dispatch_bytes", "combine_bytes")


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Counters of one layer since the model was sharded. Lists have an entry for each rank.

    Seconds are those of each rank's own clock. Those of dispatch and combine include the waiting for other ranks. On
    a GPU all three are the time that the host took to launch the work, unless it waited for the device.
    """

    layer: str  # the name of the layer
    rounds: int  # round trips
    tokens: list[int]  # tokens that a rank brought
    rows_sent: list[int]  # a row for each token and each rank that owns one of its experts, its own included
    rows_received: list[int]  # rows that a rank received
    dispatch_bytes: list[int]  # bytes that a rank put on the wire
    combine_bytes: list[int]  # bytes of results that a rank returned
    dispatch_s: list[float]  # seconds in dispatch
    experts_s: list[float]  # seconds in the experts
    combine_s: list[float]  # seconds in combine
    dropped: int  # choices whose expert was lost with its rank

    @property
    def busiest_rank(self) -> int:
        """The rank whose experts got the most rows."""
        return max(range(len(self.rows_received)), key=self.rows_received.__getitem__)

    @property
    def imbalance(self) -> float:
        """The rows of the busiest rank over the mean of all; 1 where all receive the same, or nothing."""
        total = sum(self.rows_received)
        return max(self.rows_received) * len(self.rows_received) / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"busiest_rank": self.busiest_rank, "imbalance": self.imbalance}


def layer_reports(layers: Sequence[str], by_rank: Sequence[dict[str, dict[str, Any]]]) -> list[LayerReport]:
    """Reports of some layers, from every rank's counters by layer."""
    return [_report(layer, [counters[layer] for counters in by_rank]) for layer in layers]


def _report(layer: str, ranks: Sequence[dict[str, Any]]) -> LayerReport:
    return LayerReport(
        layer=layer,
        rounds=max(counters["rounds"] for counters in ranks),
        tokens=[counters["tokens"] for counters in ranks],
        **{name: [sum(counters[name]) for counters in ranks] for name in _SUMMED},
        dispatch_s=[counters["wait_s"]["dispatch"] for counters in ranks],
        experts_s=[counters["experts_s"] for counters in ranks],
        combine_s=[counters["wait_s"]["combine"] for counters in ranks],
        dropped=sum(counters["dropped"] for counters in ranks),
    )


class Stopwatch:
    """Adds up the seconds that a module's calls take."""

    def __init__(self, module: nn.Module) -> None:
        self.seconds = 0.0
        self._forward = module.forward
        module.forward = self._timed  # hooks would take longer

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        started = time.monotonic()
        try:
            return self._forward(*arguments, **options)
        finally:
            self.seconds += time.monotonic() - started
