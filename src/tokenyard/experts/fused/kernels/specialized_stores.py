"""The stores of `kernels.specialized`: sums are activated, quantized and stored, or delivered as results.

A sum of a group is 64 rows × 128 outputs, or, in a transposed tile, its few rows × 64 outputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tokenyard.experts.fused.kernels.epilogues import activate, deliver
from tokenyard.experts.fused.kernels.items import synchronize

# The layout of stores: 64 outputs of some rows, eight outputs per thread.
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def divide(a, b):
    """a / b, rounded to the nearest."""
    return gl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def largest_of(value):
    """The bits of the largest magnitude of every row."""
    return gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@gluon.jit
def largest_of_both(largest, stages, turn, GROUP: gl.constexpr):
    """The larger of both groups' `largest` for each row of their `turn`-th transposed tile."""
    ROWS: gl.constexpr = largest.shape[0]
    slot = turn % 2
    stages.largest.index(2 * slot + GROUP).slice(0, ROWS).store(largest)
    synchronize()
    # Both groups arrive and wait here, so no group is two tiles ahead and overwrites values that the other still reads.
    mbarrier.arrive(stages.found.index(slot))
    mbarrier.wait(stages.found.index(slot), turn // 2 % 2)
    other = stages.largest.index(2 * slot + 1 - GROUP).slice(0, ROWS).load(largest.type.layout)
    return gl.maximum(largest, other)


@gluon.jit
def quantize(value, largest, POWERS: gl.constexpr):
    """`fp8_split.quantize` for rows of 128 numbers, which multiplies with 1 / scale instead of dividing.

    `largest` holds the bits of each row's largest magnitude.
    """
    is_nan = largest > 0x7F800000
    largest = gl.maximum(gl.minimum(largest, 0x7F7FFFFF), 0x2EDBE6FF).to(gl.float32, bitcast=True)
    scale = divide(largest, gl.full_like(largest, 448.0))
    if POWERS:
        scale = ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    inverse = divide(gl.full_like(scale, 1.0), scale)
    code = (value * inverse[:, None]).to(gl.float8e4nv)
    return code, gl.where(is_nan, float("nan"), scale)


@gluon.jit
def halves_of(value):
    """Split 128 columns into 64 and 64, so that a layout conversion takes only 8 KB; 64 columns are returned twice."""
    if value.shape[1] == 128:
        low, high = value.reshape([value.shape[0], 2, 64]).permute([0, 2, 1]).split()
        return low, high
    else:
        return value, value


@gluon.jit
def store_activated(
    gate, up, expert, start, left_over, column, turn, weights, routes, results, stages,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """Activate rows × 128 columns of the first product, and store them in `inner`, as codes or numbers.

    In a transposed tile each group has 64 of the columns.
    """
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    ROWS: gl.constexpr = gate.shape[0]
    COLUMNS: gl.constexpr = gate.shape[1]
    SUMS: gl.constexpr = gate.type.layout
    first = column * 128 + (GROUP * 64 if COLUMNS == 64 else 0)
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    if PRODUCT.weighted:
        pair = gl.load(routes.order_N + start + t, mask=t < left_over, other=0)
        pair = gl.where(pair < 0, ~pair, pair)
        weight = gl.load(routes.weights_N + pair, mask=t < left_over, other=0.0).to(gl.float32)[:, None]
        gate, up = gate * weight, up * weight
    if weights.bias is not None:
        i = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
        own = weights.bias + expert.to(gl.int64) * (2 * OUTPUTS)
        if PRODUCT.interleaved:
            at, step = 2 * i, 1
        else:
            at, step = i, OUTPUTS
        gate += gl.load(own + at, mask=i < OUTPUTS, other=0.0).to(gl.float32)[None, :]
        up += gl.load(own + step + at, mask=i < OUTPUTS, other=0.0).to(gl.float32)[None, :]
    value = activate(gate, up, PRODUCT)
    if results.inner_scales is not None:
        largest = largest_of(value)
        if COLUMNS == 64:
            largest = largest_of_both(largest, stages, turn, GROUP)
        code, scale = quantize(value, largest, PRODUCT.powers)
        where = results.inner_scales + (start + t) * (OUTPUTS // 128) + column
        gl.store(where, scale, mask=t < left_over)
        CODES: gl.constexpr = gl.BlockedLayout([1, 16], [512 // COLUMNS, COLUMNS // 16], [4, 1], [1, 0])
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, CODES))
        c = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, CODES))
        where = results.inner + (start + r).to(gl.int64)[:, None] * OUTPUTS + c[None, :]
        gl.store(where, gl.convert_layout(code, CODES), mask=(r < left_over)[:, None])
    else:
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
        row = results.inner + (start + r).to(gl.int64)[:, None] * OUTPUTS
        low, high = halves_of(value.to(results.inner.dtype.element_ty))
        for half in gl.static_range(COLUMNS // 64):
            c = first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
            there = (r < left_over)[:, None]
            if OUTPUTS % 128 != 0:
                there = there & (c < OUTPUTS)[None, :]
            gl.store(row + c[None, :], gl.convert_layout(low if half == 0 else high, STORE), mask=there)


@gluon.jit
def homes_of(start, left_over, routes, results, PRODUCT: gl.constexpr, ROWS: gl.constexpr):
    """The entries of `order_N`, the weights, and the lines of `out` of some rows of the second product.

    They are loaded before a tile is multiplied, so that they are there when it is stored.
    """
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    place, weight, home = r, r, r
    if not PRODUCT.first:
        place = gl.load(routes.order_N + start + r, mask=r < left_over, other=0)
        if PRODUCT.finalize:
            pair = gl.where(place < 0, ~place, place)
            home = pair // PRODUCT.top_k
            if results.out_slots_R is not None:
                home = gl.load(results.out_slots_R + home, mask=r < left_over, other=0).to(gl.int32)
            if PRODUCT.weighted:
                alone = (r < left_over) & (place >= 0)
                weight = gl.load(routes.weights_N + pair, mask=alone, other=0.0)
    return place, weight, home


@gluon.jit
def deliver_halves(value, expert, left_over, first, homes, weights, routes, results, PRODUCT: gl.constexpr):
    """Add the bias to rows × 64 or 128 outputs of the second product, and store them (`deliver`)."""
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    ROWS: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    SUMS: gl.constexpr = value.type.layout
    place, weight, home = homes
    if weights.bias is not None:
        n = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
        own = weights.bias + expert.to(gl.int64) * OUTPUTS + n
        value += gl.load(own, mask=n < OUTPUTS, other=0.0).to(gl.float32)[None, :]
    is_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE)) < left_over
    low, high = halves_of(value.to(results.partial_sums.dtype.element_ty))
    for half in gl.static_range(COLUMNS // 64):
        wide = gl.convert_layout(low if half == 0 else high, STORE)
        c = first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
        is_output = None
        if OUTPUTS % 128 != 0:
            is_output = c < OUTPUTS
        deliver(
            wide, place, is_row, c, is_output, (home, weight), routes, results,
            OUTPUTS, PRODUCT.top_k, PRODUCT.weighted, PRODUCT.finalize, 1,
        )  # fmt: skip


@gluon.jit
def store_tile(
    sums0, sums1, expert, start, left_over, column, turn, homes, weights, routes, results, stages,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """Activate or deliver two sums: of some rows × (128 + 128) outputs, or, in a transposed tile, 64 + 64 outputs."""
    if PRODUCT.first:
        store_activated(
            sums0,
            sums1,
            expert,
            start,
            left_over,
            column,
            turn,
            weights,
            routes,
            results,
            stages,
            GROUP,
            PRODUCT,
        )
    else:
        first = column * PRODUCT.step
        own = first + (GROUP * 64 if sums0.shape[1] == 64 else 0)
        deliver_halves(sums0, expert, left_over, own, homes, weights, routes, results, PRODUCT)
        if PRODUCT.deep:
            pass
        elif PRODUCT.outputs % 256 == 0 or first + 128 < PRODUCT.outputs:
            deliver_halves(sums1, expert, left_over, own + 128, homes, weights, routes, results, PRODUCT)
