"""Ranks that `launch` starts meet over loopback: nothing of theirs can be reached from another machine."""

from __future__ import annotations

import ipaddress
import os

import psutil

import tokenyard as ty
from tests.models import batch, build, spec


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses and ports at which a process waits for connections."""
    sockets = psutil.Process(pid).net_connections("inet")
    return {tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN}


def look_around(group: ty.Group, parent: int) -> dict[str, set[tuple[str, int]]]:
    """One rank: who listens where, while everything that a layer and a subgroup connect is connected."""
    layer = spec()
    plan = ty.plan([layer], group, exchange="two_sided")
    build(plan, "moe")(*batch(layer, 3))
    pair = group.subgroup([0, 1]) if group.rank < 2 else group.subgroup([2])
    pair.barrier()
    group.barrier()
    found = {"rank": listening(os.getpid()), "parent": listening(parent)}
    group.barrier()  # nobody leaves before all have looked
    return found


def test_every_listening_socket_of_a_launch_is_on_loopback():
    before = listening(os.getpid())
    found = ty.launch(3, look_around, os.getpid(), ranks="processes")
    for by_process in found:
        assert by_process["rank"], "a rank of gloo listens somewhere, or this test sees nothing"
        new = by_process["parent"] - before
        assert len(new) == 1, "the store that the ranks meet in"
        for address, _ in by_process["rank"] | new:
            assert ipaddress.ip_address(address).is_loopback, found
        assert not new & listening(os.getpid())
