"""Which ranks share a host, and which of them takes the rows that a rank sends to that host.

A row that goes to another host goes to one rank of it, the *relay* of its source: the rank that has the same place
there (the first of a host sends to the first of every other one, the second to the second), so that all ranks share the
work. In a host of only n ranks, rank `p mod n` is the relay of place p of the others. On its own host every rank is its
own relay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HostMap:
    """The hosts of a group's ranks, numbered in the order of their first ranks.

    >>> hosts = HostMap((0, 0, 0, 1))
    >>> hosts.ranks, [hosts.relay(source, 1) for source in range(4)], [hosts.sources(rank) for rank in range(4)]
    (((0, 1, 2), (3,)), [3, 3, 3, 3], [(0, 3), (1,), (2,), (0, 1, 2, 3)])
    """

    host_of_rank: tuple[int, ...]  # the number of the host of each rank

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        hosts = range(max(self.host_of_rank) + 1)
        return tuple(
            tuple(rank for rank, other in enumerate(self.host_of_rank) if other == host) for host in hosts
        )

    def relay(self, source: int, host: int) -> int:
        """The rank of a host that takes the rows that rank `source` sends there."""
        own, there = self.ranks[self.host_of_rank[source]], self.ranks[host]
        return there[own.index(source) % len(there)]

    def sources(self, relay: int) -> tuple[int, ...]:
        """The ranks whose rows a rank takes, itself among them, in rank order."""
        host = self.host_of_rank[relay]
        return tuple(s for s in range(len(self.host_of_rank)) if self.relay(s, host) == relay)

    def most_sources(self, host: int) -> int:
        """The largest number of ranks whose rows one rank of a host takes, itself included."""
        return max(len(self.sources(rank)) for rank in self.ranks[host])


def number_hosts(names: Sequence[str]) -> tuple[int, ...]:
    """The number of the host of each rank, by its name.

    >>> number_hosts(["b", "b", "a", "b"])
    (0, 0, 1, 0)
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)
