"""Shared experts in one call of a layer: they run while rows travel out, and while results travel back.

Where ranks are on several hosts, most of a round trip is a wait for its links, and they run in a thread of their own:
the layer goes on beside them, and waits for them before it sums. Elsewhere a round trip is work of the same cores, and
they run where they are called, between the start of the dispatch and its end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from torch import Tensor

from tokenyard.group import Group
from tokenyard.group.base import Background


class SharedExpertsCall:
    """Shared experts that are called once, and have ended at the end of this context, whatever was raised in it."""

    def __init__(self, shared: Callable[[Tensor], Tensor], group: Group, layer: str) -> None:
        self._shared, self._layer = shared, layer
        self.in_thread = group.num_hosts > 1 and group.device.type == "cpu"
        self._running: Background[Tensor] | None = None

    def __call__(self, x_TH: Tensor) -> Tensor | Background[Tensor]:
        if not self.in_thread:
            return self._shared(x_TH)
        self._running = Background(lambda: self._shared(x_TH), name=f"shared experts of {self._layer}")
        self._running.thread.start()
        return self._running

    def __enter__(self) -> SharedExpertsCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.thread.join()
