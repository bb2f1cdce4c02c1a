"""A table of the kernels that compute the experts' products, and of what chooses each, from `kernel_paths`."""

from __future__ import annotations

from math import inf

from docs.generate.kernel_paths import GPUS, PATHS, Chosen
from tokenyard_lab.markdown import markdown_table

_SIZES = {1: "any", 8: "multiples of 8", 128: "multiples of 128"}
_GPUS = {"Ada": "Ada", "Hopper": "Hopper", "later": "after Hopper"}


def paths_in_markdown() -> str:
    """A line for each path, in the order in which they are tried."""
    columns = ("kernels", "what they do", "GPUs", "weights", "inner format", "H and I", "rows per expert")
    return markdown_table(columns, [_line(path) for path in PATHS])


def _line(path: Chosen) -> tuple[str, ...]:
    gpus = "all" if path.gpus == tuple(GPUS) else ", ".join(_GPUS[name] for name in path.gpus)
    few = "any" if path.above == 0 else f"above {path.above:g}"
    rows = few if path.up_to == inf else f"{few}, up to {path.up_to:g}"
    weights, inner = (", ".join(f"`{name}`" for name in names) for names in (path.weights, path.inner))
    return f"`{path.path.value}`", path.why, gpus, weights, inner, _SIZES[path.multiple], rows
