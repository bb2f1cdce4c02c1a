"""Rounds that ranks make together: they start at one moment, the slowest rank counts, and a wrong result raises."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tokenyard.errors import ContractError
from tokenyard.group import Group
from tokenyard.planning.spec import LayerSpec

# Seconds between the agreement on a start and the start: time for the slowest rank to learn of it.
LEAD = 0.01


def layer_spec(job: Any, **fields: Any) -> LayerSpec:
    """The spec of a job's layer: sizes are read from the job's fields, and further `fields` are added."""
    sizes = {name: getattr(job, name) for name in ("hidden_size", "num_experts", "top_k")}
    return LayerSpec(max_tokens=job.num_tokens, **sizes, **fields)


def start_together(group: Group, lead: float = LEAD) -> float:
    """Agree with all ranks on a moment, in this number of seconds, and sleep until it comes."""
    mine = torch.tensor([time.perf_counter()], dtype=torch.float64).view(torch.uint8)
    clocks = group.all_gather(mine, phase="start of a round").flatten().view(torch.float64)
    start = float(clocks.max()) + lead
    time.sleep(max(0.0, start - time.perf_counter()))
    return start


def slowest_ms(by_rank: Iterable[Sequence[float]]) -> list[float]:
    """Milliseconds of the slowest rank, round by round, from the seconds of each rank.

    >>> slowest_ms([[0.25, 0.5], [0.125, 1.0]])
    [250.0, 1000.0]
    """
    return [1e3 * max(seconds) for seconds in zip(*by_rank, strict=True)]


def check_bits(same: bool, found: str, expected: str, rank: int, by: str = "") -> None:
    """Raise unless a result had the `same` bits as expected; `by` names the command that finds differences."""
    if not same:
        fix = f"find the difference first{by}: a wrong result has no speed"
        raise ContractError(found, expected=expected, fix=fix, rank=rank)
