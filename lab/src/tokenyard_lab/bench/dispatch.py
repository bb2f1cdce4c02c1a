"""How fast do rows travel? Dispatch and combine of one layer, beside bare gloo and beside the floor.

**What is timed.** One round trip: `dispatch` of encoded rows, then `combine` of results that are ready, with all
checks, announcements and sums that a layer pays too. Routes are uniformly random and different on every rank.

**What is not.** Encoding the rows (it has its own figure, `encode_ms`, from the same rounds) and the experts: the
results are made once, before. If an exchange lets experts write into its workspace
(`received.results`), they are there already, as after experts that write there.

**What it is compared with.** `gloo` is a bare `all_to_all_single` out and one back, of as many bytes as `two_sided`
sends. Bytes are packed, counts known and buffers allocated before; nothing is unpacked or summed. The floor: every rank
copies as many bytes as its rows take, out and back, between buffers of its own, all ranks at once; each byte is read
once and written once. (An exchange that reads a row once for several ranks, or sums while it reads, could be faster.)

**Why it is fair.** All contestants run in the same processes, in alternating rounds whose order rotates, so that a
busy neighbor slows down all of them alike; ratios are taken round by round. A round starts at one moment for all
ranks (they agree on it, then sleep until it comes: a barrier would let the first ranks go while others are still
in it) and ends when the last rank is done. Processes of one host share the clock. Every result of every round is
compared with the bits that `two_sided` gave for the same batch; the first that differs ends the measurement.

**What watching costs.** With `paranoid=True` every exchange takes part twice, plain and watched
(`plan(paranoid=True)`), and both get results as a tensor, as experts on a CPU return them, not in the workspace. A
watched exchange has a record of its own.

This is memory on one host. It says nothing about a link between hosts or GPUs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.exchange import EXCHANGES, Exchange, ExchangeSpec, RoundTrip, resolve
from tokenyard.formats import EncodedRows
from tokenyard.group import Group, launch
from tokenyard.planning.drafting import EXCHANGE_VARIABLE, PARANOID_VARIABLE, draft
from tokenyard.planning.planner import plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Routes
from tokenyard.rows import ExpertRows, LocalRoutes, PlacedRows, ReceivedRows
from tokenyard_lab.bench.rank_rounds import check_bits, layer_spec, slowest_ms, start_together
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.bench.shapes import check_rounds, check_top_k

NOTE = (
    "gloo moves ready bytes; the floor: each rank copies the same bytes; memory on one host, not the speed of a link; "
    "encoding is not in the time"
)
REFERENCE = "two_sided"
WATCHED = ", watched"  # suffix to the name of an exchange
WARM_UP = 3  # rounds that are not counted: they allocate pages, connect, build tables
# One round trip; returns the moment at which this rank had its rows.
Trip = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A layer, its batches, and how often they are sent. Every rank gets a copy."""

    num_tokens: int = 512
    hidden_size: int = 2048
    top_k: int = 8
    num_experts: int = 64
    wire: str = "bf16"
    combine_wire: str = "bf16"
    exchanges: Sequence[str] | None = None  # None: all that support the layer between these ranks
    rounds: int = 30
    paranoid: bool = False  # whether each is measured a second time, watched

    @property
    def named(self) -> list[str]:
        """The exchanges that are asked for, by the names that they are registered with."""
        return list(dict.fromkeys(resolve(name).name for name in self.exchanges or ()))

    def spec(self) -> LayerSpec:
        wires = {"wire": self.wire, "combine_wire": self.combine_wire}
        # Any intermediate size: there are no experts here.
        return layer_spec(self, name="moe", intermediate_size=self.hidden_size, **wires)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What one rank measured: seconds from the common start until its rows were there, and until it was done."""

    seconds: dict[str, list[tuple[float, float]]]
    sent_bytes: dict[str, tuple[int, int]]  # (out, back) in one round trip, by exchange
    threads: int


def measure_dispatch(
    job: Job, world: int = 4, kind: Literal["threads", "processes"] = "processes"
) -> list[Record]:
    """Time dispatch and combine of one layer through every exchange (or those named) on `world` ranks.

    One record per exchange, in ms of a round trip. Peer and floor are beside it; threads have no gloo. Ratios are
    taken round by round: `gloo / ours` is above 1 where ours is faster, `ours / floor` is 1 at best.
    Of the details `out_ms` lasts until the last rank has its rows, and `back_ms` is the rest; bytes are what all ranks
    together put on the wire in one round trip. With `paranoid` a record follows for each exchange that watches itself.

    >>> job = Job(num_tokens=8, hidden_size=64, top_k=2, num_experts=4, exchanges=["two_sided"], rounds=2)
    >>> records = measure_dispatch(job, 2, "threads")
    >>> [(record.parameters["exchange"], record.details["dispatch_bytes"] <= 16 * 2 * 160) for record in records]
    [('two_sided', True)]
    """
    _check(job)
    for name in [REFERENCE, *job.named]:
        draft([job.spec()], world, exchange=name)  # raises if it does not fit, before ranks are started
    threads = max(1, _usable_cores() // world)
    by_rank = launch(world, _measure_rank, job, ranks=kind, threads_per_rank=threads)
    return _records(job, world, by_rank)


def _check(job: Job) -> None:
    check_top_k(job.top_k, job.num_experts)
    check_rounds(job.rounds)
    if forced := os.environ.get(EXCHANGE_VARIABLE):
        raise InputError(
            f"{EXCHANGE_VARIABLE}={forced} overrides the exchange of every plan",
            expected="plans with different exchanges to compare",
            fix=f"unset {EXCHANGE_VARIABLE}, and name the exchanges to measure",
        )
    if os.environ.get(PARANOID_VARIABLE, "0") != "0":
        raise InputError(
            f"{PARANOID_VARIABLE} makes every plan watch itself",
            expected="plans that do not, to compare with",
            fix=f"unset {PARANOID_VARIABLE}, and ask for both: --paranoid",
        )


def _usable_cores() -> int:
    """The cores that this process may run on, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- On a rank ---------------------------------------------------------------------------------------------


class _Batch:
    """One rank's rows, routes and ready results: the same in every round and for every exchange."""

    def __init__(self, exchange_spec: ExchangeSpec, job: Job, rank: int) -> None:
        draw = torch.Generator().manual_seed(1009 + rank)
        self.x_TH = torch.randn(job.num_tokens, job.hidden_size, generator=draw).to(exchange_spec.dtype)
        scores_TE = torch.rand(job.num_tokens, job.num_experts, generator=draw)
        weights_TK, ids_TK = scores_TE.topk(job.top_k)
        self.routes = Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK.softmax(-1))
        self.rows: EncodedRows = exchange_spec.wire.encode(self.x_TH)
        self._draw = draw

    def results(self, num_rows: int) -> Tensor:
        """Results for this number of received rows, as experts of this rank would return them."""
        width, dtype = self.x_TH.shape[1], self.x_TH.dtype
        return torch.randn(num_rows, width, generator=self._draw).to(dtype)


class _Ours:
    """Round trips of a batch through one exchange. With `places`, results are in its workspace, if it has one."""

    def __init__(
        self, exchange: Exchange, exchange_spec: ExchangeSpec, batch: _Batch, *, places: bool
    ) -> None:
        self.exchange, self.exchange_spec, self.batch, self.places = exchange, exchange_spec, batch, places
        self.y_TH = torch.empty_like(batch.x_TH)
        self.results_RH: Tensor | None = None
        self._written: set[int] = set()

    def __call__(self) -> float:
        dispatched = self._dispatch()
        out = time.perf_counter()
        self._combine(dispatched)
        return out

    def explore(self, results_RH: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Make a round trip that is not timed; return copies of what arrived here, and of the combined output."""
        dispatched = self._dispatch()
        arrived = _contents(dispatched.received)
        self.results_RH = (
            self.batch.results(dispatched.received.num_rows) if results_RH is None else results_RH
        )
        self._combine(dispatched)
        return arrived, self.y_TH.clone()

    def _dispatch(self) -> RoundTrip:
        return self.exchange.dispatch(self.exchange_spec, self.batch.rows, self.batch.routes)

    def _combine(self, dispatched: RoundTrip) -> None:
        assert self.results_RH is not None
        result: ExpertRows | PlacedRows = ExpertRows(rows_RH=self.results_RH)
        buffer = dispatched.received.results if self.places else None
        if buffer is not None:
            if buffer.rows_SH.data_ptr() not in self._written:  # only in rounds that are not counted
                buffer.rows_SH[buffer.slots_R] = self.results_RH.to(buffer.rows_SH.dtype)
                self._written.add(buffer.rows_SH.data_ptr())
            result = buffer.placed()
        dispatched.combine(result, out=self.y_TH)


def _contents(received: ReceivedRows) -> list[Tensor]:
    """Copies of all that arrived, with zeros as the weights of choices whose experts are elsewhere."""
    routes = received.routes
    assert isinstance(routes, LocalRoutes)
    weights_RK = torch.where(routes.ids_RK >= 0, routes.weights_RK, 0.0)
    payloads = [payload.contiguous().view(torch.uint8) for payload in received.dense().payloads.values()]
    return [tensor.clone() for tensor in (*payloads, routes.ids_RK, weights_RK)]


def _measure_rank(group: Group, job: Job) -> _Measured:
    spec = job.spec()
    exchanges = job.named or _able(group, spec)
    names = dict.fromkeys([REFERENCE, *exchanges])
    plans = {name: plan([spec], group, exchange=name) for name in names}
    can_be_watched = [name for name in exchanges if resolve(name).watches(group) is None]
    watched = [name + WATCHED for name in can_be_watched] if job.paranoid else []
    plans |= {
        name: plan([spec], group, exchange=name.removesuffix(WATCHED), paranoid=True) for name in watched
    }
    exchange_specs = {name: made.wiring(spec.name).exchange_spec for name, made in plans.items()}
    batch = _Batch(exchange_specs[REFERENCE], job, group.rank)
    ours = {
        name: _Ours(made.exchange, exchange_specs[name], batch, places=not job.paranoid)
        for name, made in plans.items()
    }

    arrived, y_TH = ours[REFERENCE].explore(None)
    for name, trip in ours.items():
        found, home_TH = trip.explore(ours[REFERENCE].results_RH)
        same = len(found) == len(arrived) and all(map(torch.equal, found, arrived))
        _check_bits(name, same and torch.equal(home_TH, y_TH), "in its first round", group.rank)
    stats = {name: plans[name].stats()[spec.name] for name in names}
    sent_bytes = {
        name: (sum(s.dispatch_bytes) // s.rounds, sum(s.combine_bytes) // s.rounds)
        for name, s in stats.items()
    }
    rounds = stats[REFERENCE].rounds
    send = [count // rounds for count in stats[REFERENCE].rows_sent]
    receive = [count // rounds for count in stats[REFERENCE].rows_received]

    trips: dict[str, Trip] = {name: ours[name] for name in [*exchanges, *watched]}
    if dist.is_initialized():
        trips["gloo"] = _bare_gloo(exchange_specs[REFERENCE], send, receive)
    trips["floor"] = _floor(exchange_specs[REFERENCE], sum(send))
    trips["encode"] = _encode(exchange_specs[REFERENCE], batch)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in trips}
    for number in range(-WARM_UP, job.rounds):
        turn = number % len(trips)
        for name in [*list(trips)[turn:], *list(trips)[:turn]]:
            start = start_together(group)
            out = trips[name]()
            done = time.perf_counter()
            if name in ours:
                _check_bits(name, torch.equal(ours[name].y_TH, y_TH), f"in round {number}", group.rank)
                ours[name].y_TH.fill_(torch.nan)  # so that a round that writes nothing is noticed, too
            if number >= 0:
                seconds[name].append((out - start, done - start))
    for made in plans.values():
        made.close()
    return _Measured(seconds=seconds, sent_bytes=sent_bytes, threads=torch.get_num_threads())


def _able(group: Group, spec: LayerSpec) -> list[str]:
    """The exchanges that support this layer between these ranks, which are all on this host."""
    exchange_spec = draft([spec], group.size, exchange=REFERENCE).wirings[0].exchange_spec
    hosts = [group.host()] * group.size
    return [
        n
        for n, cls in EXCHANGES.items()
        if (cls.supports(exchange_spec) or cls.reaches(group, hosts)) is None
    ]


def _check_bits(name: str, same: bool, when: str, rank: int) -> None:
    found = f"exchange {name} gave other bits than {REFERENCE} {when}"
    check_bits(same, found, "the same rows and the same sums from every exchange", rank, " (`tokenyard run`)")


def _trip(out: Callable[[], object], back: Callable[[], object]) -> Trip:
    """A round trip of a function for the way out, and one for the way back."""

    def trip() -> float:
        out()
        moment = time.perf_counter()
        back()
        return moment

    return trip


def _bare_gloo(exchange_spec: ExchangeSpec, send: list[int], receive: list[int]) -> Trip:
    """A round trip of packed bytes by gloo's `all_to_all_single`, to every rank and back."""

    def way(width: int, sent: list[int], received: list[int]) -> Callable[[], object]:
        sends, arrives = ([rows * width for rows in counts] for counts in (sent, received))
        source, target = (torch.ones(sum(nbytes), dtype=torch.uint8) for nbytes in (sends, arrives))
        return lambda: dist.all_to_all_single(target, source, arrives, sends)

    there, back = exchange_spec.dispatch_layout.stride, exchange_spec.combine_layout.stride
    return _trip(way(there, send, receive), way(back, receive, send))


def _floor(exchange_spec: ExchangeSpec, num_rows: int) -> Trip:
    """A round trip of copies between two buffers, of as many bytes as this rank's rows take, out and back."""

    def way(width: int) -> Callable[[], object]:
        source, target = (torch.ones(num_rows * width, dtype=torch.uint8) for _ in range(2))
        return lambda: target.copy_(source)

    return _trip(way(exchange_spec.dispatch_layout.stride), way(exchange_spec.combine_layout.stride))


def _encode(exchange_spec: ExchangeSpec, batch: _Batch) -> Trip:
    """The encoding that the sender does before dispatch, on all ranks at once; there is no way back."""
    return _trip(lambda: exchange_spec.wire.encode(batch.x_TH), lambda: None)


# -- All ranks together ------------------------------------------------------------------------------------


def _records(job: Job, world: int, by_rank: list[_Measured]) -> list[Record]:
    # A phase of a round ends when the last rank is done with it.
    names = list(by_rank[0].seconds)
    out, ms = (
        {name: slowest_ms([ends[way] for ends in rank.seconds[name]] for rank in by_rank) for name in names}
        for way in range(2)
    )
    peers = {"gloo": Spread.of(ms["gloo"])} if "gloo" in ms else {}
    records = []
    for name in [name for name in names if name not in ("gloo", "floor", "encode")]:
        plain = name.removesuffix(WATCHED)
        ratios = {"ours / floor": Spread.ratio(ms[name], ms["floor"])}
        if peers:
            ratios["gloo / ours"] = Spread.ratio(ms["gloo"], ms[name])
        if name != plain:
            ratios["watched / plain"] = Spread.ratio(ms[name], ms[plain])
        out_bytes, back_bytes = (
            sum(way) for way in zip(*(rank.sent_bytes[plain] for rank in by_rank), strict=True)
        )
        details = {
            "out_ms": statistics.median(out[name]),
            "back_ms": statistics.median(done - sent for sent, done in zip(out[name], ms[name], strict=True)),
            "encode_ms": statistics.median(ms["encode"]),
            "bytes_per_token": (out_bytes + back_bytes) / (world * job.num_tokens),
            "dispatch_bytes": out_bytes,
            "combine_bytes": back_bytes,
            "threads": by_rank[0].threads,
        }
        records.append(
            Record(
                parameters={"tokens": job.num_tokens, "wire": job.wire, "exchange": name},
                ours=Spread.of(ms[name]),
                floor=Spread.of(ms["floor"]),
                peers=peers,
                ratios=ratios,
                details=details,
            )
        )
    return records
