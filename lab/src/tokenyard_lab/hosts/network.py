"""Hosts on one machine: each has its own network, processes and name, and one link to a switch.

    run_on_hosts(folder, [[…command of host 0…], [… of host 1…]])
    start_ranks(folder, [2, 2], ["serve.py"])  # two hosts of two ranks

This needs user namespaces, or root. `why_not` says what is missing.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenyard
import tokenyard_lab
from tokenyard.errors import GroupError, InputError
from tokenyard_lab.hosts.host import STORE_PORT, address_of, name_of

_OWN = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# As any user; or as root, where user namespaces are not allowed.
_WAYS = [["unshare", "--user", "--map-root-user", *_OWN], ["unshare", *_OWN]]
# Tries what a host needs: a link, and further namespaces inside of the namespaces.
_TRY = (
    "ip link add link0 type veth peer name eth0 && unshare --net --pid --mount --uts --fork --mount-proc true"
)
# Characters of a host's log that an error quotes.
_QUOTED = 4000


@dataclass(frozen=True)
class HostReport:
    """The result of one host's command."""

    status: int  # the exit status
    seconds: float  # how long it ran
    left: list[str]  # processes that it left behind
    network: int  # the number of its network namespace
    log: str  # what it wrote to stdout and stderr


@cache
def _way() -> tuple[list[str] | None, str]:
    """The command that makes namespaces on this machine, or None and the reason why there is none."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return None, f"the program {program} is not installed"
    said = ""
    for way in _WAYS:
        tried = subprocess.run([*way, "sh", "-c", _TRY], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return way, ""
        said = said or tried.stderr.strip()
    return None, f"hosts cannot be made here: {said}"


def why_not() -> str:
    """Why there can be no hosts on this machine, in the kernel's words; empty if there can."""
    return _way()[1]


def check_hosts() -> list[str]:
    """The command that makes namespaces; raise where this machine has none."""
    way, reason = _way()
    if way is None:
        raise InputError(
            reason,
            expected="Linux with `unshare` and `ip` (util-linux, iproute2), and user namespaces or root",
            fix="install them, run as root, or measure on real hosts under torchrun",
        )
    return way


def run_on_hosts(
    folder: Path, commands: Sequence[Sequence[str]], *, seconds: float = 200.0
) -> list[HostReport]:
    """Run a command on each of some hosts, and wait for all. After `seconds` everything is ended."""
    way = check_hosts()
    (folder / "job.json").write_text(json.dumps({"commands": commands}))
    names = [f"{address_of(host)} {name_of(host)}" for host in range(len(commands))]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    switch = [sys.executable, "-m", "tokenyard_lab.hosts.switch", str(folder)]
    # Hosts run the packages that run here, from wherever they are started.
    packages = (tokenyard.__file__, tokenyard_lab.__file__)
    paths = [*(str(Path(path).resolve().parents[1]) for path in packages), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # In a session of its own: the terminal's signals do not reach it. If `unshare` is killed, all is (--kill-child).
    try:
        subprocess.run([*way, *switch], env=environment, timeout=seconds, check=True, start_new_session=True)
    except subprocess.TimeoutExpired as late:
        logs = [f"{log.name}:\n{log.read_text(errors='replace')[-_QUOTED:]}" for log in folder.glob("*.log")]
        raise GroupError(
            "\n".join([f"hosts did not end within {seconds:.0f} s", *logs]),
            expected="commands that end",
            fix="read what they wrote",
        ) from late
    return [_report(folder, name_of(host)) for host in range(len(commands))]


def _report(folder: Path, name: str) -> HostReport:
    """The report that a host wrote. A host that was killed has written only its log."""
    written, log = folder / f"{name}.json", (folder / f"{name}.log").read_text(errors="replace")
    if not written.exists():
        return HostReport(status=-signal.SIGKILL, seconds=0.0, left=[], network=0, log=log)
    return HostReport(**json.loads(written.read_text()), log=log)


def start_ranks(
    folder: Path,
    ranks_by_host: Sequence[int],
    program: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float = 200.0,
) -> list[HostReport]:
    """Start ranks on hosts as Slurm does, without a supervisor: if one rank ends, the others are not ended.

    Rank 0 holds the store. A program is a Python file or `-m` and a module, with its arguments.
    """
    common = {"WORLD_SIZE": sum(ranks_by_host), "MASTER_ADDR": address_of(0), "MASTER_PORT": STORE_PORT}
    commands, first = [], 0
    for ranks in ranks_by_host:
        lines = []
        for local in range(ranks):
            variables = common | {"RANK": first + local, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}
            given = {name: str(value) for name, value in variables.items()} | dict(environment or {})
            lines.append(shlex.join([*rank_environment("eth0", given), sys.executable, *program]) + " &")
        # The status of the host is that of any rank that failed.
        script = [
            *lines,
            "status=0",
            "for rank in $(jobs -p); do wait $rank || status=$?; done",
            "exit $status",
        ]
        commands.append(["bash", "-c", "\n".join(script)])
        first += ranks
    return run_on_hosts(folder, commands, seconds=seconds)


def rank_environment(interface: str | None, further: Mapping[str, str] | None) -> list[str]:
    """The command that sets the variables of a rank."""
    variables = {
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        "OMP_NUM_THREADS": "1",
        **(further or {}),
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items())]


class Links:
    """Changes the links of all hosts, from a process on any of them. Messages to the switch bypass the network."""

    def __init__(self, folder: Path) -> None:
        self._switch = str(folder / "switch")

    def change(self, *changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Change links; each change names its host. Return the state of all links."""
        with tempfile.TemporaryDirectory() as mine, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.bind(f"{mine}/mouth")
            mouth.sendto(json.dumps(changes).encode(), self._switch)
            answer: list[dict[str, Any]] = json.loads(mouth.recv(1 << 16))
            return answer

    def sent(self) -> dict[tuple[int, int], int]:
        """The bytes that have crossed so far, from each host to each other: TCP payload without the store's."""
        return {
            (source, int(target)): crossed
            for source, link in enumerate(self.change())
            for target, crossed in link["sent"].items()
        }
