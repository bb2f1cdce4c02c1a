"""An exchange moves rows out to the ranks that own their experts, and results back: one class, over any transport.

    trip = exchange.dispatch(spec, rows, routes)     each row once to each *rank* that owns one of its experts
    trip.combine(expert rows) → CombinedRows         one row per (token, rank) back, summed in float32

This file has its lifetime: which layers it carries, from the plan's start to its end. What one call does is in
`round_trip`. The parts:

    Exchange ── Transport         moves the bytes
             ── RoundTrip         one call: dispatch and combine of one batch
             ── OpenRoundTrips    keeps the order of calls; makes an error on one rank reach all ranks
             ── BatchMaker        checks a batch, and cuts it where it is too large
             ── Announcer         makes what ranks tell each other at the start of each phase
             ── LayerStats, LoadCounter   count rows, bytes and seconds, and the choices of each expert

An exchange knows a group, placements and formats, but not what an expert is. `ExchangeSpec` is all that it is told of a
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar, final

from torch import Tensor

from tokenyard.duties import Party, acting
from tokenyard.exchange.announcement import Announcer
from tokenyard.exchange.batch import BatchRoutes, UnencodedRows
from tokenyard.exchange.batch_maker import BatchMaker
from tokenyard.exchange.integrity.watched import WatchedTransport
from tokenyard.exchange.open_trips import InFlightQueue, OpenRoundTrips, Usability
from tokenyard.exchange.round_trip import RoundTrip
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.stats import LayerStats, LoadCounter
from tokenyard.exchange.transport import Transport
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import COMPILING, ReadyKernels
from tokenyard.group import make_together
from tokenyard.group.base import Group
from tokenyard.group.one_thread import by_one_thread
from tokenyard.group.own_process import OwnProcess, in_own_process
from tokenyard.routing import Routes
from tokenyard.rows import RoutingLogits

Term = TypeVar("Term")  # what the sum of a combine adds: a tensor of the caller's


@final
class Exchange:
    """Moves rows for all layers of a plan, over one transport."""

    def __init__(
        self,
        transport: type[Transport],
        group: Group,
        *,
        in_flight: int = 1,
        plan_id: int = 0,
        paranoid: bool = False,
        sms: int | None = None,
    ) -> None:
        self.group = group  # the ranks that exchange
        chosen = transport.for_device(group.device)
        # What moves the bytes: in a paranoid plan a transport that checks what the chosen one moves.
        self.transport: Transport = (
            WatchedTransport(chosen, group, in_flight=in_flight)
            if paranoid
            else chosen(group, in_flight=in_flight)
        )
        self.transport.sms = sms
        self.stats: dict[str, LayerStats] = {}  # counters by layer
        self.kernels = ReadyKernels(group.device)  # the kernels of this rank's GPU that calls may launch
        self.load = LoadCounter(group.device)  # choices that fell on each expert
        self.usability = Usability(group.rank)  # whether the plan is open, and not broken
        self.announcer = Announcer(self.transport, self.usability, plan_id)  # makes announcements
        # Whether ranks receive each other's notices (`Announcer.notice`): if a dispatch waits for announcements.
        self.hears_notices = self.transport.reads_values
        # Whether a background thread does the waits of a phase while the caller computes.
        self.works_ahead = self.transport.works_ahead and group.device.type == "cpu"
        self._in_flight = InFlightQueue(in_flight, group.rank)  # what is dispatched and not combined yet
        # The order of calls, and the round trips that are under way.
        self.trips = OpenRoundTrips(self.transport, self.announcer, self.usability, self._in_flight)
        # Checks what is dispatched, and makes a batch of it.
        self.batches = BatchMaker(self.transport, self.announcer, self._in_flight, self.load, self.stats)
        self._one_thread = self.trips.one_thread

    @property
    def own_process(self) -> OwnProcess:
        """Refuses calls in processes that are forked from the one that made the plan."""
        return self.usability.own_process

    # -- The layers ----------------------------------------------------------------------------------------

    @in_own_process
    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on. Collective. Arrivals in flight are dropped: to combine one raises."""
        self.transport.serve(specs)
        self._served(specs)

    @in_own_process
    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers from now on, and give back memory that they do not need. Collective."""
        self.transport.trim(specs)
        self._served(specs)

    def _served(self, specs: Sequence[ExchangeSpec]) -> None:
        kept = {s.counted_as: self.stats.get(s.counted_as) or LayerStats(self.group.size) for s in specs}
        self.stats.clear()
        self.stats |= kept
        self.announcer.layers = [s.layer for s in specs]
        self.load.serve({s.layer: s.num_experts for s in specs})
        self._in_flight.clear()
        self.trips.end_all("the layers of the plan have changed")

    @in_own_process
    def switch(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry the same layers with other placements from the next dispatch on. All ranks call this, between calls."""
        self.transport.serve(specs)

    @in_own_process
    def warmup(self, specs: Sequence[ExchangeSpec], record: Callable[[], None] = lambda: None) -> None:
        """Prepare what the first round trips of these layers would otherwise wait for, such as kernels. Collective.

        `record` launches the kernels of their experts; nothing is launched in it, but their kernels are made ready.
        """

        def record_all() -> None:
            self.transport.record_launches(specs)
            record()

        if self.group.device.type == "cuda":
            make_together(
                self.group, "loading kernels", partial(self.kernels.add, record_all), seconds=COMPILING
            )
        self.transport.warmup(specs)

    @in_own_process
    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """A context in which the shape of an arrival does not depend on the routes, as a CUDA graph needs it."""
        return self.transport.fixed_shapes(max_tokens)

    @property
    def rounds(self) -> int:
        """The number of dispatches that all ranks took part in; between calls, the same on every rank."""
        return self.announcer.round

    @property
    def counts_choices(self) -> bool:
        """Whether `load` counts choices: from ids that the host reads, or by the transport while it sends rows."""
        return self.transport.reads_values or self.transport.counts_choices

    # -- Calls ---------------------------------------------------------------------------------------------

    def in_use(self, *, layer: str | None = None, alone: bool = False) -> AbstractContextManager[None]:
        """A context for one call of the plan, which all ranks make; raises if the plan is closed or broken.

        One thread at a time may be inside. `alone`: raise if a dispatch is in flight, because it would have to be
        combined before what this call dispatches.
        """
        return self.trips.in_use(layer=layer, alone=alone)

    def begin(
        self, spec: ExchangeSpec, *, takes_slots: bool = False, forward: int = 0
    ) -> AbstractContextManager[RoundTrip]:
        """A context for one round trip of one layer: an error inside, on one rank, is raised on all ranks.

        `takes_slots`: the experts accept empty slots among the received rows, with ids of -1. `forward`: in a backward,
        the round of the forward. Ranks that are in backwards of different forwards raise `Drifted`.
        """
        return self.trips.whole(RoundTrip(self, spec, takes_slots=takes_slots, forward=forward))

    def open(self, spec: ExchangeSpec, *, takes_slots: bool = False) -> RoundTrip:
        """Open a round trip of several calls, each inside of `trips.propagate_errors`; `trips.end` closes it."""
        return self.trips.add(RoundTrip(self, spec, takes_slots=takes_slots))

    def encode(self, spec: ExchangeSpec, x_TH: Tensor) -> EncodedRows | UnencodedRows:
        """Encode rows in the layer's wire; or leave them as they are, if the transport encodes them when it sends."""
        if self.transport.encodes(spec.wire):
            return UnencodedRows(format=spec.wire, x_TH=x_TH)
        with acting(Party.SENDER):
            return spec.wire.encode(x_TH)

    def dispatch(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor] | None = None,
    ) -> RoundTrip:
        """Make a round trip and dispatch a batch in it (`RoundTrip.dispatch`). Its `combine` brings the results home.

        Errors of the caller between the two reach the other ranks only inside of `begin`.
        """
        trip = RoundTrip(self, spec)
        trip.dispatch(rows, routes, extra)
        return trip

    def run_overlapped(self, job: Callable[[], Term]) -> Term:
        """Run a job that needs no received rows at the same time as the round trip that was started last.

        Its result may be used only as a term of the sum (`add` of the combine), which waits for it.
        """
        return self.transport.run_overlapped(job)

    @by_one_thread
    def is_between_calls(self) -> bool:
        """Finish the phase that travels; return whether no dispatch is in flight. Before a dispatch, ranks agree."""
        self.trips.settle()
        return self._in_flight.is_empty

    @by_one_thread
    def synchronize(self) -> None:
        """Wait for calls that returned before their work was done, and raise what went wrong in them."""
        with self.usability.waiting():
            self.transport.synchronize()

    @in_own_process
    def close(self) -> None:
        """Refuse all later calls, and give back shared memory.

        A background thread that still waits for other ranks uses that memory, so its end is awaited first; it comes
        within the deadline.
        """
        self.usability.close()
        self._in_flight.clear()
        self.trips.close()
        if self.transport.works_ahead:
            self.group.await_background()
        self.transport.close()
