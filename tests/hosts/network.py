"""Hosts for tests: each has its own network, processes and name, and hangs with one link on a switch that can fail.

    run_on_hosts(folder, [[…command of host 0…], [… of host 1…]])

Nothing needs to be allowed but user namespaces, or to be root. `why_not` says what is in the way where neither is.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.hosts.host import address_of, name_of

_OWN = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# As any user; or as root, where user namespaces are not allowed.
_WAYS = [["unshare", "--user", "--map-root-user", *_OWN], ["unshare", *_OWN]]
# What a host needs: a link, and namespaces in the namespaces.
_TRY = (
    "ip link add link0 type veth peer name eth0 && unshare --net --pid --mount --uts --fork --mount-proc true"
)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class HostReport:
    """What became of one host's command."""

    status: int
    seconds: float
    left: list[str]  # processes that it left behind
    network: int  # the number of its network namespace
    log: str


@cache
def _way() -> tuple[list[str] | None, str]:
    """How namespaces are made here, or why they are not."""
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


def run_on_hosts(
    folder: Path, commands: list[list[str]], *, seed: int = 0, seconds: float = 200.0
) -> list[HostReport]:
    """Run a command on each of some hosts, and wait for all. After so many seconds everything is ended."""
    way, reason = _way()
    assert way is not None, reason
    (folder / "job.json").write_text(json.dumps({"commands": commands, "seed": seed}))
    names = [f"{address_of(host)} {name_of(host)}" for host in range(len(commands))]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    switch = [sys.executable, str(Path(__file__).with_name("switch.py")), str(folder)]
    # A session of its own: what stops the tests by hand ends this with them (--kill-child), and nothing else does.
    try:
        subprocess.run([*way, *switch], cwd=ROOT, timeout=seconds, check=True, start_new_session=True)
    except subprocess.TimeoutExpired as late:
        logs = [f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}" for log in folder.glob("*.log")]
        raise AssertionError(f"hosts hang: {late}\n" + "\n".join(logs)) from late
    return [
        HostReport(
            **json.loads((folder / f"{name_of(host)}.json").read_text()),
            log=(folder / f"{name_of(host)}.log").read_text(errors="replace"),
        )
        for host in range(len(commands))
    ]


def torchrun(
    folder: Path, ranks_by_host: list[int], job: str, *, interface: str | None = "eth0"
) -> list[HostReport]:
    """Start ranks on hosts as an engine does, and let each run a job of `ranks.py`.

    gloo is told the interface; or with None it finds it by the host's name.
    """
    environment = {
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    commands = [
        [
            "env",
            *(f"{name}={value}" for name, value in environment.items()),
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(ranks_by_host)), "--node-rank", str(host), "--nproc-per-node", str(ranks)),
            *("--master-addr", address_of(0), "--master-port", "29500"),
            *(str(Path(__file__).with_name("ranks.py")), job, str(folder)),
        ]
        for host, ranks in enumerate(ranks_by_host)
    ]
    return run_on_hosts(folder, commands)


class Links:
    """The links of all hosts, as a process on any of them changes them: the switch hears it past the network."""

    def __init__(self, folder: Path) -> None:
        self._switch = str(folder / "switch")

    def change(self, *changes: dict[str, Any]) -> list[dict[str, Any]]:
        """Change links, each by its host; return how all are then."""
        with tempfile.TemporaryDirectory() as mine, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.bind(f"{mine}/mouth")
            mouth.sendto(json.dumps(changes).encode(), self._switch)
            answer: list[dict[str, Any]] = json.loads(mouth.recv(1 << 16))
            return answer

    def cut(self, host: int, *, down: bool = False) -> None:
        """Cut a host's link: frames vanish; or the host sees, too, that its link is down."""
        self.change({"host": host, "cut": True, **({"down": True} if down else {})})

    def mend(self, host: int) -> None:
        """Undo a cut."""
        self.change({"host": host, "cut": False, "down": False})
