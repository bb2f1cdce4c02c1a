"""The switch between hosts: it has one link to each, and counts, delays, slows down, loses or drops its frames.

Run as the first process of namespaces of its own (`network.py` starts it). It makes a host of each command that it is
given: namespaces for the network, processes, mounts and the name, with one end of a veth pair as `eth0`. When this
process ends, however it ends, the kernel ends all that is in there, and the links go with them.

Frames are read off the switch's ends of the links (AF_PACKET) with the header in which the kernel keeps what it left
to a network card that is not there: checksums to fill in, segments to cut. They are written out with the same header.

`netem` would delay and lose frames, too, but not every kernel has it.
"""

from __future__ import annotations

import heapq
import json
import random
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenyard_lab.hosts.host import STORE_PORT

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_OUTGOING, _ETH_P_ALL = 263, 15, 4, 3
_VNET_HEADER = 10  # bytes of the header before each frame
_ETHERNET_HEADER, _TCP, _SYN = 14, 6, 0x02
_LARGEST_FRAME = 1 << 17
_SOCKET_BUFFER = 1 << 23
_BROADCAST_BIT = 0x01
_HALF = 1 << 31  # of the numbers that TCP gives to bytes
_STORE = STORE_PORT.to_bytes(2, "big")
# Seconds between two checks of whether the hosts have ended.
_LOOK = 0.1


@dataclass
class Link:
    """What happens to the frames of one host, both ways."""

    delay: float = 0.0  # seconds, each way
    loss: float = 0.0  # the share of frames that are lost, each way
    rate: float = 0.0  # bytes per second, each way; 0: unlimited
    cut: bool = False
    forwarded: int = 0
    lost: int = 0
    # Bytes of TCP payload, by target host. Bytes that were sent again, and those of the store, are not counted.
    sent: dict[int, int] = field(default_factory=dict)
    # The time at which the link is free again, by its rate: from the host, and to it.
    free_at: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def passed(self, nbytes: int, way: int, at: float) -> float:
        """The time at which a frame that arrives `at` a time leaves this link, after all frames before it."""
        self.free_at[way] = max(self.free_at[way], at) + (nbytes / self.rate if self.rate else 0.0)
        return self.free_at[way] + self.delay


class Switch:
    """Forwards frames between the links of some hosts."""

    def __init__(self, hosts: int) -> None:
        self.links = [Link() for _ in range(hosts)]
        self._draw = random.Random(0)
        self._sockets: list[socket.socket] = []
        self._late: list[tuple[float, int, int, bytes]] = []
        # The next byte that was not seen yet of each TCP connection, each way.
        self._next: dict[bytes, int] = {}
        self._number = 0

    def plug_in(self, interface: str) -> socket.socket:
        """Take the switch's end of the next host's link."""
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
        end.bind((interface, 0))
        end.setblocking(False)
        self._sockets.append(end)
        return end

    def receive(self, host: int) -> None:
        """Receive the frames of a host, and queue each for its targets until it is due."""
        while True:
            try:
                frame, address = self._sockets[host].recvfrom(_LARGEST_FRAME)
            except OSError:  # no more frames, or the link is down
                return
            if address[2] == _PACKET_OUTGOING:
                continue
            for target in self._targets(frame, host):
                self._forward(frame, host, target)

    def _targets(self, frame: bytes, source: int) -> list[int]:
        address = frame[_VNET_HEADER : _VNET_HEADER + 6]
        if address[0] & _BROADCAST_BIT:
            return [host for host in range(len(self.links)) if host != source]
        return [address[5] - 1] if address == mac(address[5] - 1) else []

    def _forward(self, frame: bytes, source: int, target: int) -> None:
        ways = (self.links[source], self.links[target])
        if any(link.cut or self._draw.random() < link.loss for link in ways):
            self.links[source].lost += 1
            return
        self.links[source].forwarded += 1
        self.links[source].sent[target] = self.links[source].sent.get(target, 0) + self._new_bytes(frame)
        self._number += 1
        due = time.monotonic()
        for way, link in enumerate(ways):
            due = link.passed(len(frame) - _VNET_HEADER, way, due)
        heapq.heappush(self._late, (due, self._number, target, frame))

    def _new_bytes(self, frame: bytes) -> int:
        """The bytes of TCP's payload in a frame that no frame of the same connection had before."""
        found = tcp_payload(frame)
        if found is None:
            return 0
        connection, first, nbytes = found
        known = self._next.get(connection, first)
        new = (first + nbytes - known + _HALF) % (2 * _HALF) - _HALF  # numbers wrap around
        if connection not in self._next or new > 0:
            self._next[connection] = (first + nbytes) % (2 * _HALF)
        return max(0, new)

    def send_due(self) -> float:
        """Send the frames whose time has come; return the seconds until the next."""
        while self._late:
            wait = self._late[0][0] - time.monotonic()
            if wait > 0:
                return min(wait, _LOOK)
            _, _, target, frame = heapq.heappop(self._late)
            if not self.links[target].cut:
                try:
                    self._sockets[target].send(frame)
                except OSError:  # a full queue loses frames, as a real one does
                    self.links[target].lost += 1
        return _LOOK


def tcp_payload(frame: bytes) -> tuple[bytes, int, int] | None:
    """The connection of a frame, the number of its first byte there, and its bytes beside all headers.

    None if it is not TCP, or is for the store, which waiting ranks poll a number of times that depends on timing.
    """
    packet = frame[_VNET_HEADER + _ETHERNET_HEADER :]
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    header = (packet[0] & 15) * 4
    ports = packet[header : header + 4]
    if _STORE in (ports[:2], ports[2:]):
        return None
    total = int.from_bytes(packet[2:4], "big") or len(packet)  # short frames are padded
    first = int.from_bytes(packet[header + 4 : header + 8], "big")
    first += bool(packet[header + 13] & _SYN)  # the first byte has the number after that of SYN
    return packet[12:20] + ports, first, total - header - (packet[header + 12] >> 4) * 4


def mac(host: int) -> bytes:
    """The hardware address of a host's eth0."""
    return bytes([2, 0, 0, 0, 0, host + 1])


def ip(*arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments], check=True)


def start_host(index: int, command: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a host, which waits for its link."""
    namespaces = ["--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
    program = [sys.executable, "-m", "tokenyard_lab.hosts.host", str(index), str(folder), *command]
    host = subprocess.Popen(
        ["unshare", *namespaces, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    if host.stdout.readline() != "waiting for a link\n":
        raise RuntimeError(f"host {index} did not start")
    return host


def obey(switch: Switch, hosts: list[subprocess.Popen[str]], message: bytes) -> list[dict[str, Any]]:
    """Change links as a message says; return the state of all links."""
    for change in json.loads(message):
        host = change.pop("host")
        if change.pop("end", False):
            hosts[host].kill()  # and with it all that it started (--kill-child)
        down = change.pop("down", None)
        if down is not None:
            ip("link", "set", f"link{host}", "down" if down else "up")
        for name, value in change.items():
            setattr(switch.links[host], name, value)
    return [asdict(link) for link in switch.links]


def main(folder: Path) -> int:
    """Start the hosts, forward their frames until all have ended, and return the first exit status that is not 0."""
    job = json.loads((folder / "job.json").read_text())
    ip("link", "set", "lo", "up")
    switch, events = Switch(len(job["commands"])), selectors.DefaultSelector()
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # In the file system: every host reaches it, whatever becomes of its link.
    control.bind(str(folder / "switch"))
    events.register(control, selectors.EVENT_READ, None)
    hosts = []
    for index, command in enumerate(job["commands"]):
        host = start_host(index, command, folder)
        name, address = f"link{index}", mac(index).hex(":")
        peer = ["peer", "name", "eth0", "address", address, "netns", str(host.pid)]
        ip("link", "add", name, "type", "veth", *peer)
        ip("link", "set", name, "up")
        events.register(switch.plug_in(name), selectors.EVENT_READ, index)
        hosts.append(host)
    for host in hosts:
        assert host.stdin is not None
        host.stdin.write("here it is\n")
        host.stdin.close()
    while any(host.poll() is None for host in hosts):
        for key, _ in events.select(switch.send_due()):
            if key.data is not None:
                switch.receive(key.data)
                continue
            message, sender = control.recvfrom(_LARGEST_FRAME)
            control.sendto(json.dumps(obey(switch, hosts, message)).encode(), sender)
    # A host that was killed (a negative status) is not an error.
    return next((host.returncode for host in hosts if host.returncode > 0), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
