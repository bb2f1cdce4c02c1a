"""Hosts: which ranks can share memory, and ranks of one machine that act as ranks on several hosts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from tokenyard.errors import InputError, shown

# A name that is added to that of the host. Ranks of one machine with different values count as ranks on different
# hosts: for tests, and for containers that share a machine but should not share memory.
HOST_VARIABLE = "TOKENYARD_HOST"


def this_host() -> str:
    """The name of this host: processes with the same name see each other, and can share memory.

    It holds the machine's boot id and the PID namespace. Two containers of one machine are two hosts, because neither
    sees the processes of the other.
    """
    given = os.environ.get(HOST_VARIABLE)
    further = f"/{given}" if given else ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
        return f"{machine}/{os.stat('/proc/self/ns/pid').st_ino}{further}"
    except OSError:
        return os.uname().nodename + further


def lacking_for_processes() -> str | None:
    """None, or what this system lacks that ranks need if they are processes.

    They share memory that has no name (`memfd_create`), and look in `/proc` for it and for who lives: that is Linux.
    Ranks that are threads need neither.
    """
    lacking = [] if hasattr(os, "memfd_create") else ["os.memfd_create"]
    lacking += [] if os.path.isdir("/proc/self/fd") else ["/proc"]
    return " and ".join(lacking) or None


def check_processes() -> None:
    """Raise if ranks cannot be processes on this system."""
    if lacking := lacking_for_processes():
        raise InputError(
            f"ranks as processes, on a system without {lacking} ({platform.system()})",
            expected="Linux, or ranks that are threads: these run here, through every exchange that supports the CPU",
            fix="launch(…, ranks='threads'); on the command line `--kind threads`, `--ranks threads` or `--threads`",
        )


def hosts_of_ranks(hosts: int | Sequence[int], world: int) -> list[int]:
    """The host of each rank, for a number of hosts with consecutive ranks, or for a list of the ranks on each host.

    >>> hosts_of_ranks(2, 5), hosts_of_ranks([1, 3], 4)
    ([0, 0, 0, 1, 1], [0, 1, 1, 1])
    """
    if isinstance(hosts, int) and not isinstance(hosts, bool) and 1 <= hosts <= world:
        ranks = [world // hosts + (host < world % hosts) for host in range(hosts)]
    else:
        ranks = list(hosts) if isinstance(hosts, Sequence) and not isinstance(hosts, str) else []
    if not all(isinstance(count, int) and count >= 1 for count in ranks) or sum(ranks) != world:
        raise InputError(
            f"hosts is {shown(hosts)}, for {world} ranks",
            expected=f"from 1 to {world} hosts, or the number of ranks of each, {world} in all",
            fix="pass hosts=2, say, or leave it out, for one host",
        )
    return [host for host, count in enumerate(ranks) for _ in range(count)]


def loopback_interface() -> str | None:
    """The name of the loopback interface, which local ranks talk over."""
    return next((name for name in ("lo", "lo0") if os.path.exists(f"/sys/class/net/{name}")), None)
