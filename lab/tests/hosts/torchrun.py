"""Ranks on hosts that `torchrun` starts, as an engine does."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenyard_lab.hosts.host import STORE_PORT, address_of
from tokenyard_lab.hosts.network import HostReport, rank_environment, run_on_hosts


def torchrun(
    folder: Path,
    ranks_by_host: Sequence[int],
    program: Sequence[str],
    *,
    interface: str | None = "eth0",
    environment: Mapping[str, str] | None = None,
    seconds: float = 200.0,
) -> list[HostReport]:
    """Start ranks on hosts as an engine does: each runs a program, with its arguments.

    gloo is told the interface; or with None it finds it by the host's name.
    """
    commands = [
        [
            *rank_environment(interface, environment),
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(ranks_by_host)), "--node-rank", str(host), "--nproc-per-node", str(ranks)),
            *("--master-addr", address_of(0), "--master-port", str(STORE_PORT)),
            *program,
        ]
        for host, ranks in enumerate(ranks_by_host)
    ]
    return run_on_hosts(folder, commands, seconds=seconds)
