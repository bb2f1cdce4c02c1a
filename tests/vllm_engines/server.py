"""vLLM's OpenAI server with the plugin, as a process of its own, on CPU cores of this machine.

The server listens on 127.0.0.1. Whatever it and its workers write goes to a temporary folder. When the block ends, the
server and all processes that it started have ended, too.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tokenyard.errors import GroupError
from tokenyard.temporary_folders import temporary_folder

# Seconds for a server to start, and to end when it is asked to. A start took 40 s on two idle cores.
STARTING, ENDING = 600.0, 20.0
# Ports below those that the system hands out by itself.
_PORTS = range(12000, 28000)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    url: str  # of the OpenAI API
    process: subprocess.Popen[bytes]
    log: Path  # the output of the server and its workers

    def log_text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")


def engine_environment(folder: Path, ranks: int = 2) -> dict[str, str]:
    """The environment of an engine whose ranks each have a CPU core, and which writes into a folder only."""
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return os.environ | {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


@contextmanager
def serve(
    model: Path, *options: str, settings: Mapping[str, str], ranks: int = 2, name: str = "shipped"
) -> Iterator[Server]:
    """A server of a model, whose experts are shared by the ranks. `settings` are the plugin's variables."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(model),
        "--served-model-name",
        name,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--tensor-parallel-size", str(ranks), "--enable-expert-parallel", *options]
    with temporary_folder("tokenyard-vllm-") as folder, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**engine_environment(folder, ranks), **settings},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = Server(url=f"http://127.0.0.1:{port}", process=process, log=folder / "log")
        try:
            _wait_for(server)
            yield server
        finally:
            end_session(process)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which are in a session of its own: kindly, then for sure."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for(server: Server) -> None:
    until = time.monotonic() + STARTING
    while server.process.poll() is None and time.monotonic() < until:
        with suppress(URLError, OSError), urlopen(f"{server.url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    lines = server.log_text().splitlines()
    errors = [line for line in lines if "Error" in line]
    raise GroupError(
        f"vLLM's server did not start: {errors[0] if errors else 'it said nothing of an error'}",
        expected=f"an answer within {STARTING:.0f} s",
        fix="read the lines before it in its log:\n" + "\n".join(lines[-40:]),
    )
