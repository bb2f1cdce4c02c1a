"""A CUDA stream beside the caller's, for kernels that move rows, or for what is computed at the same time.

    with side.fork() as done: …    launches on the side stream, behind all work of the caller's stream so far
    done.join()                    makes the current stream wait for that work; the host does not wait
    done.wait()                    makes the host wait for that work

**Memory.** The caller of `join` must keep the tensors that the side stream reads alive until then. Memory allocated on
the side stream is reused by later forks only. Each of these begins behind all earlier work of the caller's stream, and
so behind all kernels that read the old content. So no tensor needs `record_stream`.

**Captures.** A fork and its join are events: in a CUDA graph they become the edges between two branches. A fork inside
a capture must be joined inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

from tokenyard.group.devices import reserve_memory

Term = TypeVar("Term")


class Done:
    """The end of some work on a stream, for streams and the host to wait for."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self.reads: object = None  # tensors that the work reads, kept alive as long as this object is
        self.ended: torch.Tensor | None = None  # on the device, for kernels to read: 1 when the work is done

    def mark(self) -> None:
        """Make the work end here: at the present end of the current stream."""
        self._event.record()

    def join(self) -> None:
        """Make the current stream wait for the end of the work."""
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Make the host wait for the end of the work."""
        self._event.synchronize()


class SideStream:
    """A further stream of a rank, of a higher priority than the caller's, because other ranks wait for its work."""

    def __init__(self, device: torch.device, *, priority: int, large_pieces: int) -> None:
        # Torch's pool has separate streams for each priority, so that no other rank's thread uses this one.
        self._stream = torch.cuda.Stream(device, priority=priority)
        with torch.cuda.stream(self._stream):
            reserve_memory(device, large_pieces=large_pieces)

    @contextmanager
    def fork(self, after: Done | None = None) -> Iterator[Done]:
        """Launch on this stream inside, behind `after`, or by default behind all work of the current stream."""
        if after is None:
            after = Done()
            after.mark()
        done = Done()
        with torch.cuda.stream(self._stream):
            after.join()
            yield done
            done.mark()

    def synchronize(self) -> None:
        """Make the host wait for all work of this stream."""
        self._stream.synchronize()


class RankStreams:
    """The streams of a rank beside the caller's: one for rows and results, and one for jobs that overlap with them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communication = SideStream(device, priority=-2, large_pieces=0)
        self._computation = SideStream(device, priority=-1, large_pieces=4)
        self._begun: Done | None = None  # the work of the caller's stream before rows were last sent
        self.computed: Done | None = None  # the last job beside a round trip, until a sum waits for it

    def phase(self, *, ahead: bool) -> AbstractContextManager[Done]:
        """A context that launches a phase: on a side stream if the caller computes meanwhile, else on its stream."""
        self._begun = None
        if not ahead:
            return nullcontext(Done())
        self._begun = Done()
        self._begun.mark()
        return self._communication.fork(self._begun)

    def run_overlapped(self, job: Callable[[], Term], *, marks_end: bool) -> Term:
        """Run a job behind what the caller's stream did before rows were sent; `marks_end`: so that kernels see it."""
        with self._computation.fork(self._begun) as self.computed:
            if not marks_end:
                return job()
            self.computed.ended = torch.zeros(1, dtype=torch.int32, device=self._device)
            term = job()
            self.computed.ended.fill_(1)
            return term

    def join_computed(self) -> None:
        """Make the current stream wait for the job that runs beside the round trip, because its result is read now."""
        if self.computed is not None:
            self.computed.join()
        self.computed = None

    def synchronize(self) -> None:
        """Make the host wait for all work of these streams."""
        self._communication.synchronize()
        self._computation.synchronize()
