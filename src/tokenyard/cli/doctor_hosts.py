"""`tokenyard doctor --hosts`, under torchrun: whether hosts can work together, and how fast their links are.

    torchrun --nnodes 2 … -m tokenyard doctor --hosts

First all ranks must reach each other. Then they compare versions and clocks; the first rank of each host sends bytes to
the first ranks of all others, one pair after the other; and a tiny layer runs over all ranks.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

from tokenyard.cli.doctor import Finding, tiny_layer

if TYPE_CHECKING:
    from tokenyard.group import Group

# Bytes that are sent to measure a link, and round trips of one byte.
_SENT = 1 << 21
_PINGS = 5
# A link beyond one of these limits is a finding. 100 Mbit/s: a row of 14 KB (H = 7168 in bf16) takes a millisecond.
LEAST_RATE = 12.5e6  # bytes per second
MOST_LATENCY = 0.005  # seconds, of one way
# A link that is slower than the median of all by more than this factor is a finding, too: every call waits for it.
MOST_UNEVEN = 4.0
# Seconds by which clocks may be apart. No wait uses them, but logs are compared by them.
MOST_APART = 1.0
_DEADLINE = 60.0  # seconds
# Of the tiny layer, as in `doctor`: bf16 rounds to 8 bits, a few times over.
_MOST_OFF = 0.02


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one host measured of its connection to another."""

    source: str
    target: str
    latency: float  # seconds, of one way
    rate: float  # bytes per second


def join() -> Group:
    """The group of all ranks that torchrun has started; raises where they cannot reach each other."""
    from datetime import timedelta

    import torch.distributed as dist

    from tokenyard.cli.machine import under_torchrun
    from tokenyard.errors import GroupError, InputError
    from tokenyard.group import DistributedGroup

    if not under_torchrun():
        raise InputError(
            "--hosts without torchrun",
            expected="ranks on the hosts that are to be examined",
            fix="torchrun --nnodes 2 --node-rank … --nproc-per-node … --master-addr … -m tokenyard doctor --hosts",
        )
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_DEADLINE))
        return DistributedGroup(device="cpu", deadline=_DEADLINE)
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GroupError(
            f"the ranks do not reach each other: {said}",
            expected="a store at --master-addr and --master-port, and all ports between the hosts open",
            fix="set GLOO_SOCKET_IFNAME to the interface of that network on every host; open its ports; look at the "
            "logs of the other hosts",
        ) from error


def examine_hosts(group: Group) -> list[Finding]:
    """All findings, the same on every rank. Collective."""
    from tokenyard.cli.machine import versions, wall_clock
    from tokenyard.version import PROTOCOL

    hosts = group.hosts()
    names = [f"host {number}" for number in range(len(hosts))]
    mine = {"versions": {**versions(), "protocol": str(PROTOCOL)}, "name": platform.node()}
    facts = group.gather_json(mine, phase="facts of hosts")
    group.barrier()  # all ranks read their clocks at the same moment, up to a latency
    clocks = group.gather_json(wall_clock(), phase="clocks")
    leaders = [ranks[0] for ranks in hosts]
    links = _measured_links(group, leaders, names)
    layer_error = max(group.gather_json(tiny_layer(group, "auto"), phase="a tiny layer"))
    return [
        *_reach(hosts, [facts[leader]["name"] for leader in leaders]),
        *judge_versions([fact["versions"] for fact in facts]),
        judge_clocks([clocks[leader] for leader in leaders]),
        *judge_links(links),
        Finding(
            section="layer",
            name=f"{group.size} ranks",
            ok=layer_error < _MOST_OFF,
            detail=f"{layer_error:.2%} off the float64 result",
            core=True,
        ),
    ]


def _measured_links(group: Group, leaders: Sequence[int], names: Sequence[str]) -> list[Link]:
    """Measure every ordered pair of hosts, one after the other; return all links on every rank. Collective."""
    measured: list[dict[str, Any]] = []
    if group.rank in leaders and len(leaders) > 1:
        between = group.subgroup(leaders, name=f"{group.name}/leaders")
        for source, target in permutations(range(len(leaders)), 2):
            latency, rate = _measure(between, source, target)
            if group.rank == leaders[source]:  # the others only took part
                link = Link(source=names[source], target=names[target], latency=latency, rate=rate)
                measured.append(vars(link))
        between.close()
    with group.patience(10 * _DEADLINE):
        by_rank = group.gather_json(measured, phase="links between hosts")
    return [Link(**fields) for leader in leaders for fields in by_rank[leader]]


def _measure(between: Group, source: int, target: int) -> tuple[float, float]:
    """The latency of one way, and bytes per second, measured by `source`. All ranks of `between` take part."""
    import torch

    def send(nbytes: int, sender: int, receiver: int) -> None:
        sent, received = [0] * between.size, [0] * between.size
        if between.rank == sender:
            sent[receiver] = nbytes
        if between.rank == receiver:
            received[sender] = nbytes
        rows = torch.zeros(sum(sent), 1, dtype=torch.uint8)
        between.all_to_all_rows(rows, sent, received, phase="measuring a link")

    def round_trip(nbytes: int) -> float:
        between.barrier()
        start = time.perf_counter()
        send(nbytes, source, target)
        send(1, target, source)
        return time.perf_counter() - start

    there_and_back = min(round_trip(1) for _ in range(_PINGS))
    carrying = max(1e-9, min(round_trip(_SENT) for _ in range(2)) - there_and_back)
    return there_and_back / 2, _SENT / carrying


# -- Findings ----------------------------------------------------------------------------------------------


def _reach(hosts: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[Finding]:
    for number, (ranks, name) in enumerate(zip(hosts, names, strict=True)):
        listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        detail = f"{name}: {listed}, reached by all"
        yield Finding(section="reach", name=f"host {number}", ok=True, detail=detail, core=True)


def judge_versions(by_rank: Sequence[dict[str, str | None]]) -> Iterator[Finding]:
    """A finding for each library: its version, or which ranks have which if they differ."""
    for name in dict.fromkeys(name for versions in by_rank for name in versions):
        found = [str(versions.get(name)) for versions in by_rank]
        ok = len(set(found)) == 1
        detail = found[0]
        if not ok:
            ranks = {one: [str(rank) for rank, other in enumerate(found) if other == one] for one in found}
            detail = "; ".join(f"{one} on ranks {', '.join(there)}" for one, there in ranks.items())
            detail += ": install the same everywhere"
        yield Finding(section="versions", name=name, ok=ok, detail=detail)


def judge_clocks(by_host: Sequence[float]) -> Finding:
    """The finding on how far the clocks of hosts are apart."""
    apart = max(by_host) - min(by_host)
    detail = f"at most {apart:.2f} s apart"
    if apart > MOST_APART:
        early, late = by_host.index(min(by_host)), by_host.index(max(by_host))
        detail = f"host {late} is {apart:.1f} s ahead of host {early}: let NTP set them, or logs cannot be compared"
    return Finding(section="clock", name="wall clock", ok=apart <= MOST_APART, detail=detail)


def judge_links(links: Sequence[Link]) -> Iterator[Finding]:
    """A finding for each link, compared with the limits above and with the median of all links."""
    from tokenyard.units import size

    median = statistics.median(link.rate for link in links) if links else 0.0
    for link in links:
        wrong = []
        if link.latency > MOST_LATENCY:
            wrong.append(
                f"more than {1e3 * MOST_LATENCY:.0f} ms: overlap batches (in_flight=2), or place ranks nearer"
            )
        if link.rate < LEAST_RATE:
            wrong.append(
                f"less than {size(int(LEAST_RATE))}/s: is GLOO_SOCKET_IFNAME the interface of the fast network?"
            )
        elif link.rate * MOST_UNEVEN < median:
            wrong.append(
                f"the median link carries {size(int(median))}/s: look at this host's interface and cable"
            )
        detail = "; ".join([f"{1e3 * link.latency:.2f} ms, {size(int(link.rate))}/s", *wrong])
        yield Finding(section="links", name=f"{link.source} to {link.target}", ok=not wrong, detail=detail)
