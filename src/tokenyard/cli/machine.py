"""This machine, and the provenance of a figure: date, hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenyard.version import __version__


def provenance() -> dict[str, Any]:
    """Date, hardware, versions and commit, for a file of measurements."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def wall_clock() -> float:
    """Seconds since 1970 by this host's clock. For comparing hosts; no wait uses it."""
    return datetime.now(UTC).timestamp()


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that results depend on; None where one is not installed."""
    found: dict[str, str | None] = {"tokenyard": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, memory and GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": _cpu(), "cores": usable_cores(), "memory_bytes": _memory(), "gpus": gpus}


def usable_cores() -> int:
    """The cores that this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def under_torchrun() -> bool:
    """Whether this process is a rank that `torchrun` has started."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def shared_memory_bytes() -> int | None:
    """The size of /dev/shm; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def git_commit() -> str | None:
    """The commit that the package runs from, `-dirty` where files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        # An installed package may be inside of another repository: there, git does not know this file.
        known = ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name]
        if subprocess.run(known, capture_output=True, timeout=10, check=False).returncode != 0:
            return None
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
