"""A CUDA stream beside the caller's: what travels, or what is computed meanwhile, runs there.

    with side.fork() as done: …    launched on the side stream, behind all that the caller's was given so far
    done.join()                    the current stream goes on behind it; the host waits for nothing
    done.wait()                    the host waits for it

**Memory.** What is read on the side stream is kept until `join`, by whoever will call it. What is allocated there is
used again by a later fork, which begins behind all that the caller's stream was given before: also behind whatever read
the old content. So no tensor has to be marked as used by two streams.

**Captures.** A fork and its join are events: in a CUDA graph they become the edges between two branches. What was
forked inside a capture is joined inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenyard.group.devices import reserve_memory


class Done:
    """The end of what a side stream was given, for those that wait for it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self.reads: object = None  # kept as long as this is
        self.ended: torch.Tensor | None = None  # on the device, for kernels that look: 1 when it is done

    def mark(self) -> None:
        """It ends here, on the current stream."""
        self._event.record()

    def join(self) -> None:
        """Let what the current stream is given from now on run behind it."""
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Return when it is done."""
        self._event.synchronize()


class SideStream:
    """One stream more for a rank. Of a higher priority than the caller's: what others wait for goes first."""

    def __init__(self, device: torch.device, *, priority: int, large_pieces: int) -> None:
        # Priorities have streams of their own in torch's supply: no other rank's thread is on this one.
        self._stream = torch.cuda.Stream(device, priority=priority)
        with torch.cuda.stream(self._stream):
            reserve_memory(device, large_pieces=large_pieces)

    @contextmanager
    def fork(self, after: Done | None = None) -> Iterator[Done]:
        """Run what is launched inside on this stream, behind `after`, or all that the current stream was given."""
        if after is None:
            after = Done()
            after.mark()
        done = Done()
        with torch.cuda.stream(self._stream):
            after.join()
            yield done
            done.mark()

    def synchronize(self) -> None:
        """Return when all that it was given is done."""
        self._stream.synchronize()
