"""A soak: ranks run random work for minutes or hours; results must stay right, and memory must not grow.

    soak(Settings(ranks=4, kind="processes", seconds=1800))  →  Report

- `episodes`: what ranks do: random cases, plans that grow and shrink, subgroups side by side, ranks that are killed and
  come back. Every result is compared with the twin, bitwise, and with the oracle, within its bound.
- `worker`: what a rank does: an episode, a meeting, and from time to time a rest in which everything is measured.
- `measuring`: memory, descriptors, sockets, threads and processes, as the kernel counts them.
- `verdict`: decides which growth is a leak.
- `soak`: starts the ranks, watches them, and returns a report.
"""

from tokenyard_lab.soaking.settings import Settings
from tokenyard_lab.soaking.soak import Report, soak

__all__ = ["Report", "Settings", "soak"]
