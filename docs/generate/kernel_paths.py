"""What chooses each path of the fused experts' products: GPUs, formats, sizes and numbers of rows.

`tests/experts/test_fused_paths.py` compares this with what layers of all kinds launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from tokenyard.experts.fused.paths import Path

# The GPUs that Triton compiles other kernels for: those with e4m3 before Hopper, Hopper, and those after it.
GPUS = {"Ada": (8, 9), "Hopper": (9, 0), "later": (10, 0)}
_EVERY = tuple(GPUS)
_HOPPER = ("Hopper",)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What chooses a path."""

    path: Path
    kernels: tuple[str, ...]  # the functions that compute it
    why: str  # what it is for
    gpus: tuple[str, ...]  # the names of `GPUS` that choose it
    weights: tuple[str, ...]  # the formats of weights that choose it
    inner: tuple[str, ...] = ("exact",)  # inner formats of layers that choose it
    multiple: int = 1  # H and I of these layers are multiples of this
    above: float = 0  # it is chosen for more rows per expert than this, on average
    up_to: float = inf  # and for at most this many


_PLAIN_WEIGHTS = ("bf16", "fp16")
_FOUR_BITS = ("nvfp4", "mxfp4", "mxint4")
_BOTH = ("exact", "fp8_block128")

PACKED_CODES = Chosen(
    path=Path.PACKED_CODES,
    kernels=("packed_codes_product",),
    why="packed mxfp4 weights become e4m3 codes in registers: half the time of products of bf16",
    gpus=_HOPPER,
    weights=("mxfp4",),
    inner=("fp8_block128",),
    multiple=8,
    above=65,
)
PACKED_NUMBERS = Chosen(
    path=Path.PACKED_NUMBERS,
    kernels=("packed_numbers_product",),
    why="packed weights become bf16 in registers; some warps load, others multiply",
    gpus=_HOPPER,
    weights=("mxfp4",),
    multiple=8,
    above=28,
    up_to=40,
)
PACKED = Chosen(
    path=Path.PACKED,
    kernels=("packed_product",),
    why="packed weights become bf16 in registers; all warps load and multiply",
    gpus=_HOPPER,
    weights=_FOUR_BITS,
    inner=_BOTH,
    multiple=8,
)
EXPANDED = Chosen(
    path=Path.EXPANDED,
    kernels=("expand_matrices",),
    why="packed mxfp4 weights are expanded to blocks of e4m3, which `specialized` multiplies",
    gpus=_HOPPER,
    weights=("mxfp4",),
    inner=("fp8_block128",),
    multiple=128,
    above=154,
)
SPECIALIZED = Chosen(
    path=Path.SPECIALIZED,
    kernels=("specialized_products",),
    why="both products in one launch: some warps load, others multiply",
    gpus=_HOPPER,
    weights=(*_PLAIN_WEIGHTS, "fp8_block128", "mxfp4"),
    inner=_BOTH,
    multiple=8,
)
TMA = Chosen(
    path=Path.TMA,
    kernels=("tma_inner_tile", "tma_result_tile"),
    why="TMA loads matrices of 16-bit numbers, where `specialized` cannot",
    gpus=("Hopper", "later"),
    weights=_PLAIN_WEIGHTS,
    multiple=8,
    above=80,
)
ROWS_FIRST = Chosen(
    path=Path.ROWS_FIRST,
    kernels=("rows_first_tile", "rows_first_result_tile"),
    why="rows × outputs of e4m3, so that a thread's outputs share a scale, where `specialized` cannot",
    gpus=_EVERY,
    weights=("fp8_block128", "mxfp8"),
    inner=_BOTH,
    above=20,
)
PRODUCTS = Chosen(
    path=Path.PRODUCTS,
    kernels=("inner_tile", "result_tile"),
    why="outputs × rows, of any formats, on every GPU",
    gpus=_EVERY,
    weights=(*_PLAIN_WEIGHTS, "fp32", "fp8_block128", "mxfp8", *_FOUR_BITS),
    inner=_BOTH,
)
# In the order in which they are tried.
PATHS = (PACKED_CODES, PACKED_NUMBERS, PACKED, EXPANDED, SPECIALIZED, TMA, ROWS_FIRST, PRODUCTS)
