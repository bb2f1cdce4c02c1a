"""How bytes are written for people: KB, MB, GB and TB are powers of 1000, as in rates (MB/s) and on disks."""

from __future__ import annotations

KB, MB = 1e3, 1e6


def size(nbytes: float) -> str:
    """Bytes for people.

    >>> size(512), size(2048), size(3_500_000), size(-7e12)
    ('512 bytes', '2.0 KB', '3.5 MB', '-7.0 TB')
    """
    if round(abs(nbytes)) < KB:
        return f"{nbytes:.0f} bytes"
    for unit in ("KB", "MB", "GB", "TB"):
        nbytes /= KB
        if round(abs(nbytes), 1) < KB or unit == "TB":
            break
    return f"{nbytes:,.1f} {unit}"
