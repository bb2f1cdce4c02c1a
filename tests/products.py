"""Products of values that a test is run with: every value in `make test`, every combination in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def product(*axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """All combinations of some axes, for `pytest.mark.parametrize`; a mapping has the names of its values.

    As many as the longest axis has values stay in `make test`, in which every value of every axis comes once at least.
    The others are marked as long.
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(_name(v), v) for v in axis] for axis in axes
    ]
    longest = max(map(len, named))
    short = {tuple(number % len(axis) for axis in named) for number in range(longest)}
    return [
        pytest.param(
            *(value for _, value in chosen),
            id="-".join(name for name, _ in chosen),
            marks=() if numbers in short else pytest.mark.long,
        )
        for numbers, chosen in zip(
            itertools.product(*(range(len(axis)) for axis in named)), itertools.product(*named), strict=True
        )
    ]


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value))
