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
_TRAINED = (
    "a layer of a training plan makes a node of autograd's graph; it runs outside of the compiled graph. Fix: compile "
    "without fullgraph=True"
)


@torch.compiler.disable(reason=_TRAINED)  # type: ignore[untyped-decorator]
def call_trained(forward: Callable[..., Any], *arguments: Any) -> Any:
    """Call a layer that is trained eagerly, between two graphs."""
    return forward(*arguments)


@torch.compiler.disable(reason=_UNREDUCED)  # type: ignore[untyped-decorator]
def call_unreduced(unreduced: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `unreduced` eagerly, between two graphs."""
    return unreduced(*arguments, **options)


@torch.compiler.disable(reason=_START)  # type: ignore[untyped-decorator]
def call_start(start: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `start` eagerly, between two graphs."""
    return start(*arguments, **options)
