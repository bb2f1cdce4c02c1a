"""How bytes and numbers of things are written for people.

KB, MB, GB and TB are powers of 1000, as in rates (MB/s) and on disks.
"""

from __future__ import annotations

KB, MB = 1e3, 1e6


def size(nbytes: float) -> str:
    """A number of bytes with its unit, as text.

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


def count(number: int, noun: str) -> str:
    """A number and its noun, in the plural where the number is not 1.

    >>> count(1, "rank"), count(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {noun}" + ("s" if number != 1 else "")


def span(names: list[str]) -> str:
    """The names of several layers in one line: the first, the last, and how many there are.

    >>> span(["moe.0"]), span(["moe.0", "moe.1", "moe.2"])
    ('moe.0', 'moe.0 … moe.2 (3 layers)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} layers)"
