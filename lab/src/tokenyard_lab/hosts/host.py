"""The first process of a host: it brings the link up, runs the host's command, and reports how it ended.

The switch starts it in namespaces of its own. The report also lists processes that the command left behind.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

# Seconds that children of a command may take to end after it.
_GRACE = 5.0
# How TCP finds the rate of a link. `reno` is in every kernel. BBR, the default of some machines, holds back where both
# directions are full: a call of `hierarchical` in `bench hosts` took 621 ms with it, and 421 to 482 ms with reno.
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
# The port of the store through which ranks find each other, on the first host.
STORE_PORT = 29500


def address_of(host: int) -> str:
    """The address of a host's eth0."""
    return f"10.77.0.{host + 1}"


def name_of(host: int) -> str:
    """The name of a host."""
    return f"host{host}"


def others() -> list[str]:
    """The command lines of all other processes of this host."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:  # it has just ended
                continue
            if command:  # a process that has ended and is not waited for has none
                found.append(command)
    return found


def main(index: int, folder: Path, command: list[str]) -> int:
    """Run a command on this host, and write a report with its exit status."""
    print("waiting for a link", flush=True)
    sys.stdin.readline()
    socket.sethostname(name_of(index))
    for arguments in (
        ["mount", "--bind", str(folder / "hosts"), "/etc/hosts"],  # hosts know each other's names
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"{address_of(index)}/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
    ):
        subprocess.run(arguments, check=True)
    _CONGESTION_CONTROL.write_text("reno")
    started = time.monotonic()
    with open(folder / f"{name_of(index)}.log", "wb") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        ).returncode
    seconds = time.monotonic() - started
    until = time.monotonic() + _GRACE
    while others() and time.monotonic() < until:
        time.sleep(0.05)
    network = os.stat("/proc/self/ns/net").st_ino
    report = {"status": status, "seconds": seconds, "left": others(), "network": network}
    (folder / f"{name_of(index)}.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
