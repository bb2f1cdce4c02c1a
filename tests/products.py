"""Products of values that a test is run with: every value in `make test`, every combination in `make test-all`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def product(*axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """All combinations of some axes, for `pytest.mark.parametrize`; a mapping has the names of its values.

    As many as the longest axis has values stay in `make test`: every value of every axis comes in one of them, and many
    pairs of values. The others are marked as long.
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(_name(v), v) for v in axis] for axis in axes
    ]
    every = list(itertools.product(*(range(len(axis)) for axis in named)))
    short = _spread(every, max(map(len, named)))
    return [
        pytest.param(
            *(named[axis][value][1] for axis, value in enumerate(chosen)),
            id="-".join(named[axis][value][0] for axis, value in enumerate(chosen)),
            marks=() if chosen in short else pytest.mark.long,
        )
        for chosen in every
    ]


def _spread(every: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Some combinations: each has the most new values, then the most new pairs, then the values that came least."""
    chosen: list[tuple[int, ...]] = []
    values: Counter[Any] = Counter()
    pairs: set[Any] = set()

    def worth(one: tuple[int, ...]) -> tuple[int, int, int]:
        came = [values[each] for each in enumerate(one)]
        return came.count(0), len(_pairs(one) - pairs), -sum(came)

    for _ in range(count):
        best = max(every, key=worth)
        chosen.append(best)
        values.update(enumerate(best))
        pairs |= _pairs(best)
    return chosen


def _pairs(one: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(one), 2))


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value))


def on_threads_and_processes(exchanges: Iterable[str]) -> list[Any]:
    """Each exchange with each kind of ranks. `make test` has all of them on threads, and two on processes."""
    return [
        pytest.param(
            exchange, ranks, marks=() if ranks == "threads" or exchange in _SHORT else pytest.mark.long
        )
        for exchange in exchanges
        for ranks in ("threads", "processes")
    ]


_SHORT = ("one_sided", "two_sided")  # through shared memory, and through messages
