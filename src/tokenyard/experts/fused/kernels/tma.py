"""Both products for many rows of 16-bit numbers, as rows × outputs, with matrices loaded by TMA.

One thread starts the load of a block of a matrix, which arrives in shared memory in the layout that tensor cores read.
It needs no addresses, no registers, and half the instructions of copies by all threads. TMA loads the weights, and the
rows of the second product, which are contiguous. The rows of the first product are gathered by all threads.

After the end of a matrix a block holds zeros. A tile may read rows of the next tile; their results are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.experts.fused.kernels.epilogues import activate_rows
from tokenyard.experts.fused.kernels.products import rows_of
from tokenyard.experts.fused.kernels.rows_first import deliver_rows


@triton.jit
def multiplied(rows, weights, sums, KIND: tl.constexpr):
    """Add the products of some inputs to the sums `[rows, outputs]`."""
    if KIND == tl.float32:
        return tl.dot(rows.to(KIND), tl.trans(weights.to(KIND)), sums, input_precision="ieee")
    else:
        return tl.dot(rows, tl.trans(weights), sums)


@triton.jit
def tma_inner_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the first product, activate it, and store it in `inner` at the places of `order_N`.

    `w_descriptor` sees matrices as [expert, gate or up, column, input].
    """
    H: tl.constexpr = LAYER.hidden
    I: tl.constexpr = LAYER.intermediate
    BLOCK: tl.constexpr = TILES.block
    COLUMNS: tl.constexpr = TILES.out // 2
    place, is_row, pair, line = rows_of(rows, routes, start, count, TILE, LAYER.top_k)
    row = rows.data + line.to(tl.int64) * rows.stride
    first_column = column * COLUMNS
    gate = tl.zeros([TILE, COLUMNS], tl.float32)
    up = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, H, BLOCK):
        h = first + tl.arange(0, BLOCK)
        # Rows after the last are zero, which costs neither memory traffic nor power.
        if H % BLOCK == 0:
            some = tl.load(row[:, None] + h[None, :], mask=is_row[:, None], other=0.0)
        else:
            some = tl.load(row[:, None] + h[None, :], mask=is_row[:, None] & (h < H)[None, :], other=0.0)
        gates = tl.reshape(w_descriptor.load([expert, 0, first_column, first]), [COLUMNS, BLOCK])
        ups = tl.reshape(w_descriptor.load([expert, 1, first_column, first]), [COLUMNS, BLOCK])
        gate = multiplied(some, gates, gate, LAYER.kind)
        up = multiplied(some, ups, up, LAYER.kind)
    i = first_column + tl.arange(0, COLUMNS)
    near = tl.minimum(i, I - 1)
    if LAYER.interleaved:
        gates, ups = 2 * near, 2 * near + 1
    else:
        gates, ups = near, I + near
    value = activate_rows(gate, up, pair, expert, gates, ups, weights, routes, LAYER)
    where = results.inner + place.to(tl.int64)[:, None] * I + i[None, :]
    tl.store(where, value.to(results.inner.dtype.element_ty), mask=(i < I)[None, :] & is_row[:, None])


@triton.jit
def tma_result_tile(
    x_descriptor, w_descriptor, rows, weights, routes, results, expert, start, count, column,
    LAYER: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the second product, and store its results. `x_descriptor` loads TILE rows."""
    OUT: tl.constexpr = TILES.out
    sums = tl.zeros([TILE, OUT], tl.float32)
    for first in range(0, LAYER.intermediate, TILES.block):
        some = tl.reshape(w_descriptor.load([expert, column * OUT, first]), [OUT, TILES.block])
        sums = multiplied(x_descriptor.load([start, first]), some, sums, LAYER.kind)
    t = tl.arange(0, TILE)
    place = tl.load(routes.order_N + start + tl.minimum(t, count - 1))
    deliver_rows(sums, place, t < count, expert, column * OUT, weights, routes, results, LAYER, OUT)
