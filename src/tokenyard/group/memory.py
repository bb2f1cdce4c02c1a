"""How much memory is available, to be checked before a workspace is allocated.

Linux grants more memory than there is, and kills a process when it runs out. A workspace that is far too large (a
wrong `max_tokens`, say) must be an error on every rank instead. Therefore the bytes that all ranks of a host are about
to allocate are compared with what the kernel says is available, and with the limits of the control groups of this
process (those of a container).
"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def too_much(nbytes: int, ranks: int) -> str | None:
    """None, or why `ranks` processes of this host cannot have `nbytes` of memory each."""
    free = available_memory()
    if free is None or nbytes * ranks <= free:
        return None
    return f"{nbytes} bytes cannot be allocated by each of {ranks} ranks ({free} bytes are available)"


def available_memory() -> int | None:
    """Bytes that this process can still allocate before memory runs out; None if the system does not say."""
    limits = [_of_the_machine(), *_of_control_groups()]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _of_the_machine() -> int | None:
    """The memory that is available without swapping, and free swap space."""
    kilobytes = _table(Path("/proc/meminfo"))
    if "MemAvailable:" not in kilobytes:
        return None
    return 1024 * (kilobytes["MemAvailable:"] + kilobytes.get("SwapFree:", 0))


def _of_control_groups() -> list[int | None]:
    """Bytes left in each control group of this process. Cached pages of files count as free: they can be dropped."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    left: list[int | None] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "?", ""][:3]
        if controllers == "":  # the one tree of version 2
            here = _CGROUPS / path.strip("/")
            left += [_left_in(folder, "memory.max", "memory.current") for folder in (here, *here.parents)]
        elif "memory" in controllers.split(","):
            here = _CGROUPS / "memory" / path.strip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            left += [_left_in(folder, *names) for folder in (here, _CGROUPS / "memory")]
    return left


def _left_in(folder: Path, limit: str, usage: str) -> int | None:
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or used is None:
        return None
    held = _table(folder / "memory.stat")
    return most - used + held.get("active_file", 0) + held.get("inactive_file", 0)


def _number(file: Path) -> int | None:
    """The number that a file holds; None if there is no such file, or it says `max`."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _table(file: Path) -> dict[str, int]:
    """The numbers of a file whose lines are a name and a number, by name."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
