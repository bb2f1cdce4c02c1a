"""What this process has in memory, as the kernel counts it."""

import re
from pathlib import Path


def resident(field: str) -> int:
    """Bytes of this process alone: `VmRSS` now, `VmHWM` at most so far. (`ru_maxrss` begins with its parent's.)"""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
