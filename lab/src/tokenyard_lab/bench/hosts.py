"""How fast is a layer whose ranks are on several hosts? Each exchange over the same links, beside the floor.

Hosts are network namespaces of this machine (`tokenyard_lab.hosts`), whose links have a rate and a delay. Ranks are
processes. A round is one call of a layer on all ranks, whose experts only scale rows, so that the links take most
of the time. It starts at one moment for all ranks and ends when the last is done: namespaces share the clock.

**The floor** is the time of the bytes that must cross: of each token one row to each other host that has one of its
experts, and one result back, over the rate of the link that carries most; plus the delay of both ways.

**What is counted.** `crossed_MB` are the bytes that the switch counted on all links together in one call; `least_MB`
are the bytes of the floor. All exchanges run in the same processes, in turns. Every result is compared with the bits
of the one-process twin, with the hosts of the plan.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.conformance.cases import random_weights
from tokenyard.conformance.twin import twin
from tokenyard.errors import GroupError
from tokenyard.exchange import HostMap
from tokenyard.experts import Experts
from tokenyard.group import DistributedGroup, Group
from tokenyard.layer import MoELayer
from tokenyard.planning.drafting import draft
from tokenyard.planning.planner import plan
from tokenyard.planning.spec import LayerSpec
from tokenyard.routing import Placement, Routes
from tokenyard.rows import ExpertRows, LocalRoutes, PlacedRows, ReceivedRows
from tokenyard.temporary_folders import temporary_folder
from tokenyard_lab.bench.rank_rounds import LEAD, check_bits, layer_spec, slowest_ms, start_together
from tokenyard_lab.bench.records import Record, Spread
from tokenyard_lab.hosts.network import Links, start_ranks

NOTES = [
    "hosts are network namespaces of one machine, ranks are processes; the experts scale rows",
    "floor: one row out and one back for each (token, other host) over the rate of a link, and its delay",
    "target of hierarchical: half the time of two_sided",
]
EXCHANGES = ("two_sided", "hierarchical")
_INTERMEDIATE = 2
_BLOCK = 64  # rows that are scaled at a time: at H 2048, in float32, they fit a core's cache
# Seconds: a thin link may take long.
_DEADLINE = 120.0
_JOB, _FOUND = "bench.json", "rank{}.found"


class ScalingExperts(Experts):
    """Experts that scale rows: fast, and the bits of a row do not depend on the rest of the batch."""

    name = "scaling"

    @torch.no_grad()
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | PlacedRows:
        """Each row times the sum of its weights, each times a number of its expert; in the results' buffer, if any."""
        assert finalize
        routes, buffer = received.routes, received.results
        assert isinstance(routes, LocalRoutes)
        w2 = self.weights.w2
        assert isinstance(w2, Tensor)
        scale_R = torch.zeros(received.num_rows)
        for ids_R, weights_R in zip(routes.ids_RK.long().T, routes.weights_RK.T, strict=True):
            scale_R += torch.where(ids_R >= 0, weights_R * w2[ids_R, 0, 0].float(), 0.0)
        slots_R = torch.arange(received.num_rows) if received.slots_R is None else received.slots_R
        if buffer is None:
            rows_RH = self.incoming(received, torch.float32) * scale_R.unsqueeze(1)
            return ExpertRows(rows_RH=rows_RH)
        assert buffer.slots_R is not None
        for some_R, into_R, scales_R in zip(
            *(by_row.split(_BLOCK) for by_row in (slots_R, buffer.slots_R, scale_R)), strict=True
        ):
            rows_NH = self.incoming(replace(received, slots_R=some_R), torch.float32) * scales_R.unsqueeze(1)
            buffer.rows_SH.index_copy_(0, into_R, rows_NH.to(buffer.rows_SH.dtype))
        return buffer.placed()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A layer, the hosts of its ranks and their links. Every rank gets a copy."""

    ranks_by_host: Sequence[int] = (4, 4)
    num_tokens: int = 256
    hidden_size: int = 2048
    top_k: int = 8
    num_experts: int = 64
    wire: str = "bf16"
    exchanges: Sequence[str] = EXCHANGES
    rate: float = 200.0  # Mbit/s of each link, each way
    delay: float = 0.0  # ms from one host to another
    compute: float = 0.0  # ms that experts compute, in `hosts_overlap`
    rounds: int = 5

    def spec(self) -> LayerSpec:
        computing = {"experts": ScalingExperts, "intermediate_size": _INTERMEDIATE}
        return layer_spec(self, name="moe", wire=self.wire, **computing)

    @property
    def hosts(self) -> HostMap:
        """Which ranks share a host."""
        return HostMap(tuple(host for host, ranks in enumerate(self.ranks_by_host) for _ in range(ranks)))

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate of a link."""
        return self.rate * 1e6 / 8

    @property
    def lead(self) -> float:
        """Seconds between the agreement on a start and the start: the agreement has to cross the links in between."""
        return LEAD + 4 * self.delay / 1e3

    def rows(self, rank: int) -> Tensor:
        """The rows of one rank."""
        draw = torch.Generator().manual_seed(rank)
        return torch.randn(self.num_tokens, self.hidden_size, generator=draw).to(self.spec().dtype)

    def routes(self, rank: int) -> Routes:
        """The routes of one rank: uniformly random, without repetition."""
        draw = torch.Generator().manual_seed(1009 + rank)
        weights_TK, ids_TK = torch.rand(self.num_tokens, self.num_experts, generator=draw).topk(self.top_k)
        return Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK.softmax(-1))


def measure_hosts(job: Job) -> list[Record]:
    """Time one layer through each exchange, over links between hosts of this machine; a record for each."""
    return _records(job, found_by_ranks(job, "tokenyard_lab.bench.hosts"))


def found_by_ranks(job: Job, module: str) -> list[dict[str, Any]]:
    """Run a module of this package on every rank of a job, each on its host; return what each rank measured."""
    with temporary_folder("tokenyard-hosts-") as folder:
        (folder / _JOB).write_text(json.dumps(asdict(job)))
        longest = 300.0 + job.rounds * len(job.exchanges) * 10.0  # seconds, after which the hosts are ended
        reports = start_ranks(folder, job.ranks_by_host, ["-m", module, str(folder)], seconds=longest)
        if any(report.status for report in reports):
            raise GroupError(
                "ranks on hosts failed:\n" + "\n".join(report.log.strip() for report in reports),
                expected="ranks that end well",
                fix="read what they wrote",
            )
        return [
            json.loads((folder / _FOUND.format(rank)).read_text()) for rank in range(sum(job.ranks_by_host))
        ]


def rows_between(job: Job, source: int, target: int, *, once: bool) -> int:
    """Rows from one host to another: one for each token (`once`), or one for each rank that has an expert of it."""
    placement = Placement.contiguous(job.num_experts, sum(job.ranks_by_host))
    rows = 0
    for rank in job.hosts.ranks[source]:
        rank_TK, _ = placement.resolve(job.routes(rank).topk_ids_TK, rank)
        there = torch.stack([(rank_TK == other).any(-1) for other in job.hosts.ranks[target]])
        rows += int((there.any(0) if once else there).sum())
    return rows


def bytes_from_hosts(job: Job, *, once: bool) -> list[int]:
    """Bytes that each host sends to the others in one call: rows of its own tokens, and results for theirs."""
    exchange_spec = draft([job.spec()], sum(job.ranks_by_host), exchange="two_sided").wirings[0].exchange_spec
    out, back = exchange_spec.dispatch_layout.stride, exchange_spec.combine_layout.stride
    hosts = range(len(job.ranks_by_host))
    return [
        sum(
            rows_between(job, host, other, once=once) * out + rows_between(job, other, host, once=once) * back
            for other in hosts
            if other != host
        )
        for host in hosts
    ]


def _records(job: Job, by_rank: Sequence[dict[str, Any]]) -> list[Record]:
    least = bytes_from_hosts(job, once=True)
    floor = 1e3 * max(least) / job.rate_bytes_per_s + 2 * job.delay
    ms = {name: slowest_ms(rank["seconds"][name] for rank in by_rank) for name in job.exchanges}
    records = []
    for name in job.exchanges:
        peers = {other: Spread.of(ms[other]) for other in job.exchanges if other != name}
        halved = name == "hierarchical" and "two_sided" in ms
        records.append(
            Record(
                parameters={"tokens": job.num_tokens, "exchange": name},
                ours=Spread.of(ms[name]),
                floor=Spread(floor),
                peers=peers if halved else {},
                target=peers["two_sided"].median / 2 if halved else None,
                ratios={"two_sided / ours": Spread.ratio(ms["two_sided"], ms[name])} if halved else {},
                details={"crossed_MB": by_rank[0]["crossed"][name] / 1e6, "least_MB": sum(least) / 1e6},
            )
        )
    return records


# -- On a rank ---------------------------------------------------------------------------------------------


def _measure_rank(group: Group, job: Job, links: Links) -> dict[str, Any]:
    spec = job.spec()
    weights, x_TH, routes = random_weights(spec, 0), job.rows(group.rank), job.routes(group.rank)
    layers: dict[str, MoELayer] = {}
    expected = {}
    for name in job.exchanges:
        made = plan([spec], group, exchange=name)
        layers[name] = MoELayer(made, spec.name, weights.select(made.local_experts(spec.name)))
        expected[name] = twin(made.wiring(spec.name), weights, x_TH, routes, group.rank)
    set_links(group, job, links)
    seconds: dict[str, list[float]] = {name: [] for name in job.exchanges}
    crossed: dict[str, int] = dict.fromkeys(job.exchanges, 0)
    for number in range(-1, job.rounds):  # the first round warms up
        for name in job.exchanges[:: 1 if number % 2 else -1]:
            before = sum(links.sent().values())
            start = start_together(group, job.lead)
            y_TH = layers[name](x_TH, routes)
            took = time.perf_counter() - start
            group.barrier()
            found = f"{name} gave other bits than the one-process twin"
            check_bits(torch.equal(y_TH, expected[name]), found, "the same sums", group.rank)
            if number >= 0:
                seconds[name].append(took)
                crossed[name] = sum(links.sent().values()) - before
    return {"seconds": seconds, "crossed": crossed}


def set_links(group: Group, job: Job, links: Links) -> None:
    """Give all links the rate and the delay of a job."""
    if group.rank == 0:
        half = job.delay / 2e3  # a frame passes two links
        every = {"rate": job.rate_bytes_per_s, "delay": half}
        links.change(*({"host": host, **every} for host in range(len(job.ranks_by_host))))


def main(folder: Path, measure: Callable[[Group, Job, Links], dict[str, Any]]) -> None:
    """Run one rank on one host: measure, and write what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = DistributedGroup(deadline=_DEADLINE)
    found = measure(group, Job(**json.loads((folder / _JOB).read_text())), Links(folder))
    (folder / _FOUND.format(group.rank)).write_text(json.dumps(found))
    group.barrier()
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), _measure_rank)
