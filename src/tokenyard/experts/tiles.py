"""Products with quantized weights, which are decoded a tile at a time and never as a whole.

A tile is some outputs of one expert. It is decoded to float32, which holds every format's numbers exactly, is
multiplied with all rows of that expert while it is in the cache, and dropped:

    for each expert that is hit, for each tile of its outputs:   y[its rows, tile] = x[its rows] · decode(tile)ᵀ

If the bits of a row must not depend on its batch (`batch_invariant`), a tile is multiplied with one row at a time, by
one thread, in equally aligned memory. In a BLAS product of several rows, the bits of a row change with the number of
rows and with its position among them (seen at [4, 33] · [33, 7]). This costs less than one might expect, since a tile
is in the cache: [256, 2048] took 38 µs for one row and 317 µs for 8 at once, on one busy core. Plain weights are then
widened tile by tile, too.

Tiles are independent, so a CPU's threads share them, one tile each at a time: all cores are busy whether one
expert has all rows or each has one. Beside the weights and the rows, memory holds one tile per thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.experts import workers
from tokenyard.formats import QuantizedMatrix

# Elements of a tile: 2 MiB of float32. mxint4, 32 experts of [2048, 2048] and [2048, 1024], K 8, on 2 busy cores, in
# milliseconds at 128 Ki, 256 Ki, 512 Ki elements: 1 token 224, 114, 100; 128 tokens 1182, 608, 436.
TILE_ELEMENTS = 512 * 1024


class Tile(NamedTuple):
    """Outputs `first` to `last` of one expert, for the rows `run`."""

    expert: int
    run: slice
    first: int
    last: int


def tiles(runs: Sequence[tuple[int, slice]], outputs: int, inputs: int) -> list[Tile]:
    """The tiles of all experts that are hit, given their runs of rows.

    >>> [tile[2:] for tile in tiles([(3, slice(0, 5))], outputs=300, inputs=4096)]
    [(0, 128), (128, 256), (256, 300)]
    """
    step = max(1, TILE_ELEMENTS // inputs)
    return [
        Tile(expert, run, first, min(first + step, outputs))
        for expert, run in runs
        for first in range(0, outputs, step)
    ]


def product_by_tiles(
    x_ND: Tensor,
    matrix: Tensor | QuantizedMatrix,
    bias: Tensor | None,
    runs: Sequence[tuple[int, slice]],
    *,
    row_by_row: bool = False,
) -> Tensor:
    """`x · wᵀ + b` in float32 `[rows, outputs]`, for rows sorted by expert; `runs` are the rows of each expert."""
    _, outputs, inputs = matrix.shape
    y_NO = x_ND.new_empty(x_ND.shape[0], outputs)
    of_expert = {expert: matrix[expert] for expert, _ in runs}

    def compute(tile: Tile) -> None:
        w_oD = _tile(of_expert[tile.expert], tile)
        out = y_NO[tile.run, tile.first : tile.last]
        if row_by_row:
            for y_o, x_D in zip(out, x_ND[tile.run], strict=True):
                y_o.copy_(torch.mv(w_oD, x_D.clone()))  # a copy, so that every vector has the same alignment
        else:
            torch.mm(x_ND[tile.run], w_oD.t(), out=out)
        if bias is not None:
            out += bias[tile.expert, tile.first : tile.last].float()

    items = tiles(runs, outputs, inputs)
    threads = torch.get_num_threads() if x_ND.device.type == "cpu" else 1
    if threads > 1 and (len(items) > 1 or row_by_row):
        workers.for_each(compute, items, threads)
    else:
        for tile in items:
            compute(tile)
    return y_NO


def _tile(matrix: Tensor | QuantizedMatrix, tile: Tile) -> Tensor:
    """The outputs of a tile from an expert's matrix, decoded or widened to float32 in new memory."""
    if isinstance(matrix, QuantizedMatrix):
        return matrix.tile(tile.first, tile.last).contiguous()
    some_oD = matrix[tile.first : tile.last]
    return torch.empty(some_oD.shape, dtype=torch.float32, device=matrix.device).copy_(some_oD)
