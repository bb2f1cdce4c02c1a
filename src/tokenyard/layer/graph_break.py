"""The calls that break a graph of `torch.compile`. Importing this module loads the compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# By the method of `MoELayer`: why it runs outside of the graph, and what to do.
_REASONS = {
    "unreduced": "MoELayer.unreduced returns rows by rank, whose number is known only when they are home; it runs "
    "outside of the graph. Fix: compile without fullgraph=True, or plan with reduce_ranks='exchange' and call the "
    "layer",
    "start": "MoELayer.start returns while rows travel, and what it returns is finished by a later call; it runs "
    "outside of the graph. Fix: compile without fullgraph=True, or call the layer, which is one operator there",
}


@functools.cache
def outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method eagerly, between two graphs."""

    def call(*arguments: Any, **options: Any) -> Any:
        return method(*arguments, **options)

    disabled: Callable[..., Any] = torch.compiler.disable(call, reason=_REASONS[method.__name__])
    return disabled
