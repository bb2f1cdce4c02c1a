"""The calls that break a graph of `torch.compile`. Importing this module loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_UNREDUCED = (
    "MoELayer.unreduced returns rows by rank, whose number is known only when they are home; it runs outside of "
    'the graph. Fix: compile without fullgraph=True, or plan with reduce_ranks="exchange" and call the layer'
)
_START = (
    "MoELayer.start returns while rows travel, and what it returns is finished by a later call; it runs outside of "
    "the graph. Fix: compile without fullgraph=True, or call the layer, which is one operator of the graph"
)


@torch.compiler.disable(reason=_UNREDUCED)  # type: ignore[untyped-decorator]
def call_unreduced(unreduced: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `unreduced` eagerly, between two graphs."""
    return unreduced(*arguments, **options)


@torch.compiler.disable(reason=_START)  # type: ignore[untyped-decorator]
def call_start(start: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `start` eagerly, between two graphs."""
    return start(*arguments, **options)
