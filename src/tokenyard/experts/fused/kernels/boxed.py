"""Both products for many rows of 16-bit numbers: rows × outputs, with matrices that come in boxes (TMA).

A box is asked for by one thread, and arrives in shared memory as tensor cores read it: no addresses, no registers, and
half the instructions of copies that every thread takes part in. Weights come so, and the rows of the second product,
which stand one after the other. Those of the first are gathered: each thread copies its part of them.

What a box holds behind the end of a matrix is zero. A tile may read rows of the next one: they are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.experts.fused.kernels.products import activate, rows_of, tile_of
from tokenyard.experts.fused.kernels.rows_first_result import deliver_rows


@triton.jit
def multiplied(rows, weights, sums, KIND: tl.constexpr):
    """Sums `[rows, outputs]` and the products of some more inputs."""
    if KIND == tl.float32:
        return tl.dot(rows.to(KIND), tl.trans(weights.to(KIND)), sums, input_precision="ieee")
    else:
        return tl.dot(rows, tl.trans(weights), sums)


@triton.jit
def boxed_inner_tile(
    x, slots_R, w13, b13, weights_N, inner, order_N, expert, start, count, column, x_stride,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the first product, activated, into `inner` at the places of `order_N`."""
    place, is_row, pair, line = rows_of(order_N, slots_R, start, count, TILE, TOP_K, HAS_SLOTS)
    row = x + line.to(tl.int64) * x_stride
    first_column = column * COLUMNS
    gate = tl.zeros([TILE, COLUMNS], tl.float32)
    up = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, H, BLOCK):
        h = first + tl.arange(0, BLOCK)
        # Rows that are not there are zero: they cost neither memory nor power.
        if H % BLOCK == 0:
            rows = tl.load(row[:, None] + h[None, :], mask=is_row[:, None], other=0.0)
        else:
            rows = tl.load(row[:, None] + h[None, :], mask=is_row[:, None] & (h < H)[None, :], other=0.0)
        gates = tl.reshape(w13.load([expert, 0, first_column, first]), [COLUMNS, BLOCK])
        ups = tl.reshape(w13.load([expert, 1, first_column, first]), [COLUMNS, BLOCK])
        gate = multiplied(rows, gates, gate, KIND)
        up = multiplied(rows, ups, up, KIND)
    if WEIGHTED:
        weight = tl.load(weights_N + pair).to(tl.float32)[:, None]
        gate, up = gate * weight, up * weight
    i = first_column + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        bias = b13 + expert.to(tl.int64) * (2 * I)
        at, step = (2 * i, 1) if INTERLEAVED else (i, I)
        gate += tl.load(bias + at, mask=i < I, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + at + step, mask=i < I, other=0.0).to(tl.float32)[None, :]
    value = activate(gate, up, ACTIVATION, True, LIMIT, ALPHA, SHIFT)
    where = inner + place.to(tl.int64)[:, None] * I + i[None, :]
    tl.store(where, value.to(inner.dtype.element_ty), mask=(i < I)[None, :] & is_row[:, None])


@triton.jit(do_not_specialize=["how_many", "max_tiles"])
def boxed_inner(
    x, slots_R, w13, b13, weights_N, inner, order_N, tiles, how_many, max_tiles, x_stride,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first product of all experts, gated. `w13` is seen as [expert, gate or up, column, input]."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    expert, start, count = tile_of(tiles, max_tiles, tl.program_id(0), ACROSS)  # early, as in `products`
    total = tl.load(how_many) * ACROSS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        column = item % ACROSS
        next_expert, next_start, next_count = tile_of(tiles, max_tiles, item + tl.num_programs(0), ACROSS)
        if (TAIL > 0) & (count <= TAIL):
            boxed_inner_tile(
                x, slots_R, w13, b13, weights_N, inner, order_N, expert, start, count, column, x_stride,
                H, I, TOP_K, KIND, HAS_SLOTS, HAS_BIAS, WEIGHTED, ACTIVATION, INTERLEAVED, LIMIT, ALPHA, SHIFT,
                COLUMNS, TAIL if TAIL > 0 else TILE, BLOCK,
            )  # fmt: skip
        else:
            boxed_inner_tile(
                x, slots_R, w13, b13, weights_N, inner, order_N, expert, start, count, column, x_stride,
                H, I, TOP_K, KIND, HAS_SLOTS, HAS_BIAS, WEIGHTED, ACTIVATION, INTERLEAVED, LIMIT, ALPHA, SHIFT,
                COLUMNS, TILE, BLOCK,
            )  # fmt: skip
        expert, start, count = next_expert, next_start, next_count


@triton.jit
def boxed_result_tile(
    inner, w2, b2, weights_N, left, out, out_slots_R, out_stride, order_N, expert, start, count, column,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    HAS_OUT_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, FINALIZE: tl.constexpr,
    OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the second product, delivered."""
    sums = tl.zeros([TILE, OUT], tl.float32)
    for first in range(0, I, BLOCK):
        weights = tl.reshape(w2.load([expert, column * OUT, first]), [OUT, BLOCK])
        sums = multiplied(inner.load([start, first]), weights, sums, KIND)
    t = tl.arange(0, TILE)
    place = tl.load(order_N + start + tl.minimum(t, count - 1))
    deliver_rows(
        sums, place, t < count, column * OUT, b2 + expert.to(tl.int64) * H, weights_N, left, out, out_slots_R,
        out_stride, H, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, OUT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["how_many", "max_tiles"])
def boxed_result(
    inner, tail, w2, b2, weights_N, left, out, out_slots_R, out_stride, order_N, tiles, how_many, max_tiles,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    HAS_OUT_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, FINALIZE: tl.constexpr,
    OUT: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The second product of all experts. `inner` and `tail` are the same rows, in boxes of TILE and of TAIL."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    ACROSS: tl.constexpr = (H + OUT - 1) // OUT
    expert, start, count = tile_of(tiles, max_tiles, tl.program_id(0), ACROSS)  # early, as in `products`
    total = tl.load(how_many) * ACROSS
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        column = item % ACROSS
        next_expert, next_start, next_count = tile_of(tiles, max_tiles, item + tl.num_programs(0), ACROSS)
        if (TAIL > 0) & (count <= TAIL):
            boxed_result_tile(
                tail, w2, b2, weights_N, left, out, out_slots_R, out_stride, order_N, expert, start, count, column,
                H, I, TOP_K, KIND, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, OUT, TAIL if TAIL > 0 else TILE, BLOCK,
            )  # fmt: skip
        else:
            boxed_result_tile(
                inner, w2, b2, weights_N, left, out, out_slots_R, out_stride, order_N, expert, start, count, column,
                H, I, TOP_K, KIND, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, OUT, TILE, BLOCK,
            )  # fmt: skip
        expert, start, count = next_expert, next_start, next_count
