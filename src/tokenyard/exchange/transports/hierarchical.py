"""`hierarchical`: a row crosses to another host once, and is forwarded inside it; one sum for each host comes back.

    source ──► relay on each host that has an expert of the token ──► ranks of that host
    source ◄── relay: the sum over the ranks of its host          ◄── ranks of that host
                 torch.distributed                                  one_sided

It is made of two other exchanges. Between hosts rows travel in messages, as in `two_sided`, but one row for each
(token, host), to the source's *relay* there (`host_map`). Inside a host each relay sends its own tokens and those that
came to it from other hosts, together, in one round trip of `one_sided` between the ranks of the host. Quantized rows
are not decoded in between.

**The order of the sum.** The results of a host's ranks, each rounded to the layer's dtype, are added by the relay in
float32, in rank order; that sum is rounded to the combine wire, also if it stays on the host. The sums of hosts are
added at home in float32, in the order of hosts, and rounded once.

**Phases.** In each phase all ranks of all hosts announce, in front of the rows that cross: an error on one rank ends
the phase on all of them, before a row is forwarded or a sum is used. In the dispatch the ranks of a host meet once
more, when relays have forwarded their rows. In the combine each rank marks that its results are in place, and a relay
sums when all ranks of its host have. If that takes long, a rank may have drifted, or be lost: then the relay announces
first, and sends its sums after all announcements were received. On GPUs sums always follow the announcements: rows do
so there anyway, and the kernel that sums waits for the other ranks itself.

**Overlap.** If the caller computes between the start of a phase and its end, a background thread forwards the rows that
have crossed, and makes the sums.

**A loss** on either level ends the waits of both. A rank that misses another one inside its host asks the whole group
who is lost; a rank that learns of a loss in the group leaves the shared memory of its host, so that no rank waits for
it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import PeerFailed, PeerLost, Reason, shown
from tokenyard.exchange.announcement import Announcement, Announcements, not_due
from tokenyard.exchange.batch import (
    Arrival,
    Batch,
    BatchRoutes,
    Failure,
    choices_by_part,
    numbered,
    tokens_by_rank,
)
from tokenyard.exchange.results import Results, ResultsAtHome, RowsAtHome, SumWatch
from tokenyard.exchange.returns import ChoicePlaces
from tokenyard.exchange.spec import CHECKSUM_HEAD, CHECKSUMS, TOKEN, ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.forwarding import Forwarding, host_map, inside_spec
from tokenyard.exchange.transports.messages import HOME, Mailbox, Outgoing
from tokenyard.exchange.transports.one_sided import declarations
from tokenyard.exchange.transports.one_sided.cpu.transport import SharedMemoryTransport
from tokenyard.exchange.transports.one_sided.inside_host import InsideHost
from tokenyard.exchange.workspace import LayerBytes
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import COMPILING
from tokenyard.group import make_together
from tokenyard.group.base import Group, Pending
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows

CROSSING = "crossing"  # the room for rows that come from other hosts
# Seconds that a relay waits for the results of its host's ranks before it announces without sums. If the experts of a
# rank take longer than others by more than this, sums need a second message.
_LONGEST_WAIT = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class _WayBack:
    """What a rank keeps of a dispatch for its combine, as a relay and as a source."""

    inside: Arrival  # the rows that came from the relays of this host
    counts_by_source: dict[int, int]  # rows of each rank that this one is the relay of, in rank order
    tokens_by_host: tuple[Tensor, ...]  # this rank's own tokens that have an expert on each host
    # In a paranoid plan: source rank, token and round of each row that this rank has forwarded, from its checksums.
    heads_NC: Tensor | None


class HierarchicalTransport(Transport[_WayBack]):
    """Sends each row once to each host, in a message, and forwards it inside the host by `one_sided`."""

    name = "hierarchical"
    bounds_rows = True
    encodes_results = True
    returns_choices = False
    sums_in_hosts = True
    works_ahead = True

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> Reason | None:
        if not spec.reduces_ranks:
            why = "hierarchical sums the results of a host's ranks before they come home"
            return Reason(field="reduce_ranks", value="caller", why=why)
        return super().supports(spec)

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        refused = super().reaches(group, hosts) or declarations.reaches(group, hosts, in_each=True)
        return None if refused is None else replace(refused, value=cls.name)

    @classmethod
    def for_device(cls, device: torch.device) -> type[Transport]:
        return DeviceHierarchicalTransport if device.type == "cuda" and cls is HierarchicalTransport else cls

    @classmethod
    def why_not_auto(cls, hosts: Sequence[str]) -> Reason | None:
        if len(set(hosts)) < len(hosts):
            return None
        why = "no two ranks share a host: hierarchical would send the rows of two_sided"
        return Reason(field="exchange", value=cls.name, why=why)

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        return declarations.watches(group)

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        """Bytes of the workspace of the host that needs most, and bytes of a row between hosts."""
        hosts = host_map(spec)
        inside = [declarations.slot_bytes(inside_spec(spec, hosts, host)) for host in range(len(hosts.ranks))]
        return LayerBytes(
            dispatch_row=spec.dispatch_layout.stride,
            combine_row=spec.combine_layout.stride,
            dispatch=max(need.dispatch for need in inside),
            combine=max(need.combine for need in inside),
        )

    def __init__(self, group: Group, *, in_flight: int = 1, guard: int = 0) -> None:
        super().__init__(group, in_flight=in_flight, guard=guard)
        self._forwarding: dict[int, Forwarding] = {}  # by the number of a layer
        self._inside: InsideHost | None = None
        self._mailbox: Mailbox | None = None

    # -- The two levels ------------------------------------------------------------------------------------

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        self._share(specs, lambda inside, layers: inside.serve(layers))

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        self._share(specs, lambda inside, layers: inside.trim(layers))

    def _share(
        self,
        specs: Sequence[ExchangeSpec],
        serve: Callable[[InsideHost, Sequence[ExchangeSpec]], None],
    ) -> None:
        """Share memory inside every host. If one host cannot, all ranks raise, and the old layers are still served."""
        if self._inside is None:
            self.hosts = host_map(specs[0])  # which ranks share a host
            # The number of this rank's own host.
            self.host = self.hosts.host_of_rank[self.group.rank]
            here = self.group.subgroup(
                self.hosts.ranks[self.host], name=f"{self.group.name}/host {self.host}"
            )
            one_sided: Any = SharedMemoryTransport.for_device(self.group.device)
            self._inside = one_sided(here, in_flight=self.in_flight, guard=self.guard)
            self._mailbox = Mailbox(self.group)
            # One more: the choices of nobody.
            self._host_of_rank = torch.tensor([*self.hosts.host_of_rank, -1], device=self.group.device)
        inside = self._inside
        wanted = {spec.index: Forwarding.of(spec, self.hosts, self.host, self.group.device) for spec in specs}

        def share() -> None:
            with suppress(PeerFailed):  # the rank that failed tells the whole group
                serve(inside, [forwarding.spec for forwarding in wanted.values()])

        try:
            make_together(self.group, "sharing memory", share, seconds=self.group.deadline)
        except Exception:
            if self._forwarding:
                inside.serve([forwarding.spec for forwarding in self._forwarding.values()])
            raise
        self._forwarding = wanted
        self.mailbox.serve(specs, self.num_counts)

    @property
    def inside(self) -> InsideHost:
        """What moves rows inside this rank's host."""
        assert self._inside is not None, "a plan serves its layers before it sends rows"
        return self._inside

    @property
    def mailbox(self) -> Mailbox:
        """What moves rows between hosts."""
        assert self._mailbox is not None, "a plan serves its layers before it sends rows"
        return self._mailbox

    def record_launches(self, specs: Sequence[ExchangeSpec]) -> None:
        self.inside.record_launches([self._forwarding[spec.index].spec for spec in specs])

    def samples(self, spec: ExchangeSpec) -> Sequence[Callable[[int], ReceivedRows]]:
        return self.inside.samples(self._forwarding[spec.index].spec)[:1]

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        self.inside.warmup([self._forwarding[spec.index].spec for spec in specs])

    def close(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside.group.close()
            self.mailbox.clear()

    @contextmanager
    def _waiting_in_group(self) -> Iterator[None]:
        """A context for a wait for all ranks. After a loss, this rank leaves its host's shared memory."""
        try:
            yield
        except PeerLost:
            self.inside.leave()
            raise

    @contextmanager
    def _waiting_in_host(self) -> Iterator[None]:
        """A context for a wait for the ranks of this host. After a loss, the whole group finds out who is lost."""
        here = self.inside.group
        here.deadline = self.group.deadline
        try:
            yield
        except PeerLost as error:
            ranks = self.hosts.ranks[self.host]
            missed = [] if self.inside.departed() else [ranks[peer] for peer in error.peers]
            raise self.group.lost_elsewhere(missed, phase=error.phase, waited=error.waited) from error

    # -- The way out ---------------------------------------------------------------------------------------

    def send(self, batch: Batch) -> Pending[Arrival[_WayBack]]:
        tokens_by_host = self._tokens_by_host(batch.routes)
        if batch.ahead and self.group.device.type == "cpu":
            batch = (
                batch.copied()
            )  # rows go on inside the host later, and the caller may change them meanwhile
        by_host = [tokens.numel() for tokens in tokens_by_host]
        stride = batch.spec.dispatch_layout.stride
        rows, bounded = self._rows_for_relays(by_host), batch.announcements.bound is not None
        outgoing = Outgoing(self.mailbox, stride, rows, CROSSING, bounded=bounded)
        self._write(batch, tokens_by_host, outgoing.packets_by_rank)
        crossing = outgoing.start(batch.announcements, self._arriving)

        def receive() -> Arrival[_WayBack]:
            with self._waiting_in_group():
                came = crossing.wait()
            forwarded, by_source = self._forwarded(batch, came.packets_by_rank, came.heard)
            with self._waiting_in_host():
                inside = self.inside.send(forwarded).wait()
            announced = [announcement.counts[self.group.rank] for announcement in came.heard]
            heads_NC = None
            if batch.spec.checksummed:
                heads_NC = forwarded.extra[CHECKSUMS][:, :CHECKSUM_HEAD]
            way_back = _WayBack(
                inside=inside, counts_by_source=by_source, tokens_by_host=tokens_by_host, heads_NC=heads_NC
            )
            return batch.arrived(self._received(inside, announced), announced, way_back)

        return Pending(receive)

    def _tokens_by_host(self, routes: BatchRoutes) -> tuple[Tensor, ...]:
        """For each host, the tokens (ascending) of this rank that have an expert there."""
        return tokens_by_rank(self._host_of_rank[routes.resolved[0]], len(self.hosts.ranks))

    def num_counts(self, spec: ExchangeSpec) -> int:
        return self.group.size + len(self.hosts.ranks)

    def counts(self, routes: BatchRoutes) -> list[int]:
        """Rows for each rank, and rows that cross to each host."""
        return [*routes.counts, *(tokens.numel() for tokens in self._tokens_by_host(routes))]

    def loads(self, source: int, counts: Sequence[int]) -> Sequence[int]:
        """The rows for each rank, and those that each rank forwards as a relay."""
        relayed = [0] * self.group.size
        for host, count in enumerate(counts[self.group.size :]):
            if host != self.hosts.host_of_rank[source]:
                relayed[self.hosts.relay(source, host)] = count
        return [*counts[: self.group.size], *relayed]

    def _rows_for_relays(self, by_host: Sequence[int]) -> list[int]:
        """Rows for each rank as a relay, given the rows that cross to each host."""
        rows = [0] * self.group.size
        for host, count in enumerate(by_host):
            if host != self.host:
                rows[self.hosts.relay(self.group.rank, host)] = count
        return rows

    @torch.no_grad()
    def _write(
        self, batch: Batch, tokens_by_host: Sequence[Tensor], packets_by_rank: Sequence[Tensor]
    ) -> None:
        """Write the packets for the relays of other hosts, with global ids."""
        routes = batch.routes.routes
        assert isinstance(routes, Routes)
        for host, token_N in enumerate(tokens_by_host):
            if host != self.host:
                own_routes = {
                    "ids": routes.topk_ids_TK[token_N].int(),
                    "weights": routes.topk_weights_TK[token_N].float(),
                }
                packets = packets_by_rank[self.hosts.relay(self.group.rank, host)]
                batch.spec.dispatch_layout.write_some([packets], batch.payloads, [token_N], own_routes)

    def _arriving(self, heard: Sequence[Announcement]) -> list[int]:
        """Rows that come from each rank of another host whose relay this rank is; 0 from all others."""
        sources = self.hosts.sources(self.group.rank)
        return [
            announcement.counts[self.group.size + self.host]
            if source in sources and source != self.group.rank
            else 0
            for source, announcement in enumerate(heard)
        ]

    def _forwarded(
        self, batch: Batch, packets_by_rank: Sequence[Tensor], heard: Sequence[Announcement]
    ) -> tuple[Batch, dict[int, int]]:
        """The batch that this rank sends inside its host, of its own tokens and those that came; and rows by source."""
        return self._forwarding[batch.spec.index].make_batch(batch, packets_by_rank, heard, self.inside)

    def _received(self, inside: Arrival, announced: Sequence[int]) -> ReceivedRows:
        """The rows that relays forwarded to this rank, put into (source rank, token) order."""
        counts = list(announced)
        starts = [0] * self.group.size  # where the rows of each source begin, relay after relay
        end = 0
        for relay, came in zip(self.hosts.ranks[self.host], inside.counts_W, strict=True):
            first = end
            for source in self.hosts.sources(relay):
                starts[source] = end
                end += counts[source]
            if end - first != came:  # rows are missing: none are taken, and `Arrival.check_counts` raises
                for source in self.hosts.sources(relay):
                    starts[source], counts[source] = first, 0
            end = first + came
        order_R = numbered(starts, counts).to(self.group.device)
        received = inside.received
        assert isinstance(received.routes, LocalRoutes)
        assert received.slots_R is not None
        assert received.results is not None
        slots_R = received.slots_R[order_R]
        return ReceivedRows(
            rows=received.rows,
            routes=LocalRoutes(
                ids_RK=received.routes.ids_RK[order_R], weights_RK=received.routes.weights_RK[order_R]
            ),
            counts_W=tuple(counts),
            extra={name: payload[order_R] for name, payload in received.extra.items()},
            slots_R=slots_R,
            results=CombineBuffer(rows_SH=received.results.rows_SH, slots_R=slots_R),
        )

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        """Bytes of packets for relays of other hosts, and of rows of this rank's own tokens inside its host."""
        inside = declarations.slot_bytes(self._forwarding[batch.spec.index].spec).dispatch_row
        sent = [0] * self.group.size
        for host, tokens in enumerate(self._tokens_by_host(batch.routes)):
            relay = self.hosts.relay(self.group.rank, host)
            sent[relay] = tokens.numel() * batch.spec.dispatch_layout.stride
        for rank in self.hosts.ranks[self.host]:
            sent[rank] = rows[rank] * inside
        return sent

    # -- The way back --------------------------------------------------------------------------------------

    def send_back(self, results: Results[_WayBack]) -> Pending[ResultsAtHome]:
        arrival = results.arrival
        if results.rows_RH is not None:
            self._place(arrival, results.rows_RH)
        if results.beside:
            assert arrival.received.slots_R is not None
            self.inside.place_beside(arrival.way_back.inside, arrival.received.slots_R, results.beside)
        results.on_results_written()
        self.inside.mark(arrival.round)

        def finish() -> ResultsAtHome:
            with self._waiting_in_group():
                return self._exchange_sums(arrival, results.announcements, results.watch)

        return Pending(finish)

    def _exchange_sums(
        self, arrival: Arrival[_WayBack], announcements: Announcements, watch: SumWatch | None
    ) -> ResultsAtHome:
        """Send the sums of this host to their sources, and wait for those of this rank's tokens."""
        stride, none = arrival.spec.combine_layout.stride, [0] * self.group.size
        sent, due = self._sums_for_sources(arrival), self._due(arrival)
        is_late = not self.inside.all_marked(arrival.round, _LONGEST_WAIT)
        outgoing = Outgoing(self.mailbox, stride, none if is_late else sent, into=HOME)
        if not is_late:
            own = self._sum(arrival, outgoing.packets_by_rank, watch)
        mine = replace(announcements.mine, counts=(*(none if is_late else sent), int(is_late)))
        came = outgoing.start(replace(announcements, say=lambda: mine), partial(self._announced, due)).wait()
        sums_by_rank = came.packets_by_rank
        late = [bool(word.counts[-1]) for word in came.heard]
        if any(late):  # all ranks have announced, so the results of all of them are in their place
            send = sent if is_late else none
            receive = [count if follows else 0 for count, follows in zip(due, late, strict=True)]
            packets = torch.empty(sum(send), stride, dtype=torch.uint8, device=self.group.device)
            if is_late:
                own = self._sum(arrival, packets.split(send), watch)
            followed = self.group.all_to_all_rows(packets, send, receive, phase="combine").split(receive)
            sums_by_rank = [
                part if follows else sums
                for sums, part, follows in zip(sums_by_rank, followed, late, strict=True)
            ]
        return self._at_home(arrival, sums_by_rank, own)

    def _announced(self, due: Sequence[int], heard: Sequence[Announcement]) -> list[int]:
        """The sums that come with each rank's announcement: all that are due, or none if they are sent later."""
        counts = []
        for rank, (word, count) in enumerate(zip(heard, due, strict=True)):
            announced = word.counts[self.group.rank] if len(word.counts) == self.group.size + 1 else -1
            if announced != (0 if word.counts[-1:] == (1,) else count):
                raise not_due(
                    rank,
                    f"sums {shown(list(word.counts))}",
                    expected=f"{count} for rank {self.group.rank}, or that they follow",
                    rank=self.group.rank,
                )
            counts.append(announced)
        return counts

    @torch.no_grad()
    def _place(self, arrival: Arrival[_WayBack], rows_RH: Tensor) -> None:
        """Write results where the relays of this host read them."""
        buffer = arrival.received.results
        assert buffer is not None
        assert buffer.slots_R is not None
        wire = self._forwarding[arrival.spec.index].spec.combine_wire
        (data,) = wire.encode(rows_RH.detach()).payloads.values()
        buffer.rows_SH[buffer.slots_R] = data

    def _sums_for_sources(self, arrival: Arrival[_WayBack]) -> list[int]:
        """The sums that this rank, as a relay, returns to each rank of another host."""
        sent = [0] * self.group.size
        for source, count in arrival.way_back.counts_by_source.items():
            if source != self.group.rank:
                sent[source] = count
        return sent

    @torch.no_grad()
    def _sum(
        self, arrival: Arrival[_WayBack], packets_by_rank: Sequence[Tensor], watch: SumWatch | None
    ) -> EncodedRows:
        """Write the sums over this host's ranks for sources elsewhere into packets; return this rank's own."""
        spec, way_back = arrival.spec, arrival.way_back
        counts = way_back.counts_by_source
        dtype = way_back.inside.spec.sum_dtype
        assert dtype is not None
        num_rows, width = sum(counts.values()), spec.hidden_size * dtype.itemsize
        sums_NH = self.mailbox.room("sums", num_rows * width).view(dtype).view(num_rows, spec.hidden_size)
        home = self.inside.at_home(way_back.inside)
        if watch is not None:
            assert isinstance(home, RowsAtHome)
            assert way_back.heads_NC is not None
            home = watch.results(replace(home, ranks=self.hosts.ranks[self.host]), way_back.heads_NC)
        with self._waiting_in_host():
            home.sum_into(sums_NH, ())
        beside = {payload.name: home.placed(payload) for payload in spec.returns}
        own, start = None, 0
        for source, count in counts.items():
            part_NH = sums_NH[start : start + count]
            if source == self.group.rank:
                tokens_N = way_back.tokens_by_host[self.host]
                own = _beside(
                    spec.combine_wire.encode(part_NH.index_select(0, tokens_N)),
                    {name: numbers[start : start + count][tokens_N] for name, numbers in beside.items()},
                )
                own = own if watch is None else watch.with_checksums(own, tokens_N)
            elif count:
                sums = _beside(
                    spec.combine_wire.encode(part_NH),
                    {name: numbers[start : start + count] for name, numbers in beside.items()},
                )
                if watch is not None:
                    assert way_back.heads_NC is not None
                    sums = watch.with_checksums(sums, way_back.heads_NC[start : start + count, TOKEN])
                spec.combine_layout.write(packets_by_rank[source], sums.payloads)
            start += count
        assert own is not None  # every rank is its own relay
        return own

    def _due(self, arrival: Arrival[_WayBack]) -> list[int]:
        """The number of sums that each relay returns to this rank."""
        return self._rows_for_relays([tokens.numel() for tokens in arrival.way_back.tokens_by_host])

    def _at_home(
        self, arrival: Arrival[_WayBack], arrived: Sequence[Tensor], own: EncodedRows
    ) -> ResultsAtHome:
        """The sums of all hosts for this rank's own tokens, as results at home."""
        spec = arrival.spec
        sums_by_host = []
        for host in range(len(self.hosts.ranks)):
            packets = arrived[self.hosts.relay(self.group.rank, host)]
            payloads = own.payloads if host == self.host else spec.combine_layout.unpack(packets)
            sums_by_host.append(replace(own, payloads=payloads))
        return RowsAtHome(
            rows_by_rank=sums_by_host,
            tokens_by_rank=arrival.way_back.tokens_by_host,
            ranks=tuple(self.hosts.relay(self.group.rank, host) for host in range(len(sums_by_host))),
            places=self._places(arrival) if spec.returns else None,
        )

    def _places(self, arrival: Arrival[_WayBack]) -> ChoicePlaces:
        """Where the numbers belong that come from each host beside its sums."""
        host_TK = self._host_of_rank[arrival.routes.resolved[0]]
        return ChoicePlaces(
            names=tuple(payload.name for payload in arrival.spec.returns),
            num_tokens=arrival.routes.num_tokens,
            top_k=arrival.spec.top_k,
            choices_by_part=choices_by_part(host_TK, len(self.hosts.ranks)),
            tokens_by_part=arrival.way_back.tokens_by_host,
        )

    def bytes_returned(self, arrival: Arrival[_WayBack]) -> list[int]:
        """Bytes of sums for the sources on other hosts whose relay this rank is, and of results inside its host."""
        inside = declarations.slot_bytes(self._forwarding[arrival.spec.index].spec).combine_row
        returned = [0] * self.group.size
        for source, count in arrival.way_back.counts_by_source.items():
            returned[source] = count * arrival.spec.combine_layout.stride
        for rank in self.hosts.ranks[self.host]:
            returned[rank] = arrival.counts_W[rank] * inside
        return returned

    def in_workspace(self, arrival: Arrival[_WayBack]) -> Arrival:
        """An arrival with the rows that the relays of this host sent."""
        inside = arrival.way_back.inside
        return replace(arrival, spec=inside.spec, counts_W=inside.counts_W)

    # -- Failures ------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        if failure.arrival is not None:
            # So that no relay waits for these results: sums of this round are not used.
            self.inside.mark(failure.arrival.round)
        with self._waiting_in_group():
            self.mailbox.announce(failure.announcements).wait()


def _beside(rows: EncodedRows, beside: Mapping[str, Tensor]) -> EncodedRows:
    """Sums, with the payloads that come home beside them."""
    return replace(rows, payloads={**rows.payloads, **beside}) if beside else rows


class DeviceHierarchicalTransport(HierarchicalTransport):
    """`hierarchical` between GPUs: kernels move rows inside a host, and rows have no bound (`max_rows`)."""

    bounds_rows = False

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        """Load the kernels of all hosts before one of them waits: ranks may share a GPU."""
        with self.group.patience(COMPILING):
            super().warmup(specs)
            self.group.barrier(phase="loading kernels")
