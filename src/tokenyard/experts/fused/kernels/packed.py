"""The two products with packed 4-bit weights, on Hopper's tensor cores, in Triton's Gluon dialect.

The weights are the register operand: each thread loads 16 bytes of them, several steps ahead, and decodes them in place
with a mask and one bf16 operation for two weights (see `tokenyard.experts.fused.kernels.unpacking`). Rows are copied to
shared memory asynchronously. A tile is computed with the smallest of a few widths (`WIDTHS`) that holds its rows; the
loop is compiled for each width.

With few rows each warp multiplies by itself (`mma.sync`), and also loads the rows into registers. With many, four warps
multiply together (`wgmma`), and the tensor cores read the rows from shared memory through the async proxy. Each step
therefore has a fence between copies and products, and a wait for the previous products.

Each product has a launch. Blocks of the second start when all blocks of the first have started. They load weights, and
wait until the rows of their own tile are counted (`kernels.items`).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from tokenyard.experts.fused import packing
from tokenyard.experts.fused.kernels.epilogues import activate, deliver
from tokenyard.experts.fused.kernels.items import await_items, enough_for, synchronize, tile_counter
from tokenyard.experts.fused.kernels.unpacking import INT4, decode

# Newer versions of Triton have another name for it.
start_copy = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
LEFT_OVER = gl.constexpr(packing.LEFT_OVER)
# Rows of a tile up to which each warp multiplies by itself.
FEW_ROWS = gl.constexpr(16)
# In place of a pair, where a tile has no row.
NO_ROW = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def depends(op: gl.constexpr):
    """Programmatic dependent launch: `wait` for the kernel before, or let the next one start (`launch_dependents`)."""
    gl.inline_asm_elementwise(
        "griddepcontrol." + op + "; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def scale_elements(kind):
    """How many numbers hold the scales of two outputs for 128 inputs: bf16 for int4, 16 or 32 bits for e2m1."""
    return 8 if kind == INT4 else 4


@gluon.jit
def load_weights(
    words,
    scales,
    step,
    ok,
    KIND: gl.constexpr,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The words and scales of 128 inputs: (words, words, scales, scales) of 64 each, for each group of outputs.

    For int4, each of the two scales is `[T, 4]` of bf16; for e2m1, both are the same tile `[T, 4]` of all 128 inputs.
    After the last input words and scales are zero, and so the weights are zero.
    """
    T: gl.constexpr = 32 * WARPS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    t = gl.arange(0, T, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    fourth = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    off = (t // 128) * (WIDTH // 64 * 512) + (t % 128) * 4 + fourth
    # Four threads have the same outputs, and so the same scales.
    E: gl.constexpr = scale_elements(KIND)
    SCALES: gl.constexpr = gl.BlockedLayout([1, E], [32, 1], [WARPS, 1], [1, 0])
    ts = gl.arange(0, T, layout=gl.SliceLayout(1, SCALES))[:, None]
    off_scales = (ts // 128) * (WIDTH // 128 * 32 * E) + (ts % 128) // 4 * E
    off_scales += gl.arange(0, E, layout=gl.SliceLayout(0, SCALES))[None, :]
    out = ()
    for m in gl.static_range(GROUPS):
        p = words + m * (WARPS // 4 * (WIDTH // 64) * 512) + step * 1024
        w0 = gl.load(p + off, mask=ok, other=0, eviction_policy="evict_first")
        w1 = gl.load(p + 512 + off, mask=ok, other=0, eviction_policy="evict_first")
        q = scales + m * (WARPS // 4 * (WIDTH // 128) * 32 * E) + step * 32 * E
        s0 = gl.load(q + off_scales, mask=ok, other=0, eviction_policy="evict_first")
        s1 = s0
        if KIND == INT4:
            s0, s1 = s0.reshape([T, 2, 4]).permute([0, 2, 1]).split()
            s0 = gl.convert_layout(s0, LAYOUT, assert_trivial=True)
            s1 = gl.convert_layout(s1, LAYOUT, assert_trivial=True)
        out = out + (w0, w1, s0, s1)
    return out


@gluon.jit
def copy_rows(
    buffers, pointers, columns, NB: gl.constexpr, stage: gl.constexpr, step, ok, INPUTS: gl.constexpr
):
    """Start copying 128 inputs of the tile's rows into a stage's buffers; zeros after the last input."""
    for b in gl.static_range(NB):
        for c in gl.static_range(2):
            mask = ok
            if INPUTS % 128 != 0:
                mask = ok & (step * 128 + c * 64 + columns[b] < INPUTS)
            start_copy(buffers[(2 * stage + c) * NB + b], pointers[b] + step * 128 + c * 64, mask=mask)
    async_copy.commit_group()


@gluon.jit
def wait_for_products(acc):
    """Wait for all products that were started."""
    return hopper.warpgroup_mma_wait(0, acc) if len(acc) > 1 else (hopper.warpgroup_mma_wait(0, acc),)


@gluon.constexpr_function
def sums_layout(rows, warps, few):
    """The register layout of sums `[16 · warps, rows]`."""
    if few:
        return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.jit
def nothing(WARPS: gl.constexpr, N: gl.constexpr, FEW: gl.constexpr):
    """Accumulators that are zero."""
    return gl.zeros([WARPS * 16, N], gl.float32, sums_layout(N, WARPS, FEW))


class PackedProduct(NamedTuple):
    """The compile-time constants of a product of packed weights."""

    kind: int  # of weights: a constant of `kernels.unpacking`
    spans: int  # spans (of one scale each) in 64 inputs
    inputs: int
    width: int  # inputs, with the pad
    lines: int  # outputs, with the pad
    columns: int  # I of the first, H of the second
    top_k: int
    first: bool
    interleaved: bool
    weighted: bool
    finalize: bool
    activation: int
    limit: float
    alpha: float
    shift: float


class Tiles(NamedTuple):
    """The tiles of a product, from `tile_configs.PackedTileConfig`."""

    widths: tuple[tuple[int, int], ...]  # rows of a tile, in one or two accumulators
    groups: int
    ahead: int
    stages: int


@gluon.jit
def finish_rows(
    sums, weights, routes, results, expert, part, start, count, offset,
    PRODUCT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Finish the sums `[16 · WARPS, ROWS]` of a product: scale, add the bias, activate or weight, and store them."""
    COLUMNS: gl.constexpr = PRODUCT.columns
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    LAYOUT: gl.constexpr = sums_layout(ROWS, WARPS, FEW)
    t = offset + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    is_row = t < count
    place = gl.load(routes.order_N + start + t, mask=is_row, other=0)
    pair = gl.where(place < 0, ~place, place)
    j = part * (WARPS * 16) + gl.arange(0, WARPS * 16, layout=gl.SliceLayout(1, LAYOUT))
    if PRODUCT.first:
        i = j // 16 * 8 + j % 8
        half = j // 8 % 2
        output = 2 * i + half if PRODUCT.interleaved else half * COLUMNS + i
        is_output = i < COLUMNS
        OUTPUTS: gl.constexpr = 2 * COLUMNS
    else:
        output = j
        is_output = j < COLUMNS
        OUTPUTS: gl.constexpr = COLUMNS
    value = sums * LEFT_OVER
    if weights.global_scale is not None:
        side = expert * 2 + (output >= (OUTPUTS + 1) // 2).to(gl.int32)
        value = (
            value * (gl.load(weights.global_factor + side) / gl.load(weights.global_scale + side))[:, None]
        )
    if PRODUCT.first:
        if PRODUCT.weighted:
            value = value * gl.load(routes.weights_N + pair, mask=is_row, other=0.0).to(gl.float32)[None, :]
    if weights.bias is not None:
        where = weights.bias + expert.to(gl.int64) * OUTPUTS + output
        value += gl.load(where, mask=is_output, other=0.0).to(gl.float32)[:, None]
    if PRODUCT.first:
        gate, up = value.reshape([WARPS, 2, 8, ROWS]).permute([0, 2, 3, 1]).split()
        value = activate(gate, up, PRODUCT).reshape([WARPS * 8, ROWS])
        value = gl.convert_layout(value.to(results.inner.dtype.element_ty), STORE)
        i = part * (WARPS * 8) + gl.arange(0, WARPS * 8, layout=gl.SliceLayout(1, STORE))
        t = offset + gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORE))
        where = results.inner + (start + t).to(gl.int64)[None, :] * COLUMNS + i[:, None]
        gl.store(where, value, mask=(i < COLUMNS)[:, None] & (t < count)[None, :])
    else:
        if PRODUCT.finalize:
            # Each thread stores eight outputs, which are neighbors in memory.
            value = gl.convert_layout(value.to(results.partial_sums.dtype.element_ty), STORE)
            j = gl.convert_layout(j, gl.SliceLayout(1, STORE))
            place = gl.convert_layout(gl.where(is_row, place, NO_ROW), gl.SliceLayout(0, STORE))
            is_row, is_output = place != NO_ROW, j < COLUMNS
        deliver(
            value, place, is_row, j, is_output, None, routes, results,
            COLUMNS, PRODUCT.top_k, PRODUCT.weighted, PRODUCT.finalize, 0,
        )  # fmt: skip


@gluon.jit
def tile_product(
    rows, words, scales, weights, routes, results, counter, expert, block, start, count,
    PRODUCT: gl.constexpr, TILES: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, BEFORE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Compute one tile: 16 · WARPS · groups outputs × up to N0 + N1 rows."""
    KIND: gl.constexpr = PRODUCT.kind
    SPANS: gl.constexpr = PRODUCT.spans
    WIDTH: gl.constexpr = PRODUCT.width
    INPUTS: gl.constexpr = PRODUCT.inputs
    GROUPS: gl.constexpr = TILES.groups
    AHEAD: gl.constexpr = TILES.ahead
    STAGES: gl.constexpr = TILES.stages
    STEPS: gl.constexpr = WIDTH // 128
    NB: gl.constexpr = 2 if N1 > 0 else 1
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    FEW: gl.constexpr = N0 <= FEW_ROWS and N1 == 0
    LAYOUT0: gl.constexpr = sums_layout(N0, WARPS, FEW)
    LAYOUT1: gl.constexpr = sums_layout(N1 if N1 else N0, WARPS, FEW)
    OPERAND0: gl.constexpr = gl.DotOperandLayout(0, LAYOUT0, 2)
    OPERAND1: gl.constexpr = gl.DotOperandLayout(0, LAYOUT1, 2)
    held = ()
    for d in gl.static_range(AHEAD):
        held = held + load_weights(words, scales, d, (count > 0) & (d < STEPS), KIND, GROUPS, WIDTH, WARPS)
    if not PRODUCT.first:  # the weights do not depend on the kernels before, the rows do
        await_items(counter, enough_for(count, BEFORE))
    buffers = ()
    for i in gl.static_range(2 * STAGES):
        for b in gl.static_range(NB):
            buffers = buffers + (
                gl.allocate_shared_memory(
                    gl.bfloat16, [N1 if b else N0, 64], gl.NVMMASharedLayout(128, 16, 2)
                ),
            )
    pointers, columns, acc = (), (), ()
    # The stride is a multiple of 8; this shows it to the compiler, so that rows are copied 16 bytes at a time.
    x_stride = rows.stride // 8 * 8
    for b in gl.static_range(NB):
        t = gl.arange(0, N1 if b else N0, layout=gl.SliceLayout(1, COPY))
        line = start + gl.minimum(b * N0 + t, count - 1)
        if PRODUCT.first:
            line = gl.load(routes.order_N + line)
            line = gl.where(line < 0, ~line, line) // PRODUCT.top_k
            if rows.slots_R is not None:
                line = gl.load(rows.slots_R + line)
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))[None, :]
        columns = columns + (column,)
        pointers = pointers + (rows.data + line.to(gl.int64)[:, None] * x_stride + column,)
    for m in gl.static_range(GROUPS):
        for b in gl.static_range(NB):
            acc = acc + (nothing(WARPS, N1 if b else N0, FEW),)
    for i in gl.static_range(STAGES - 1):
        copy_rows(buffers, pointers, columns, NB, i, i, (count > 0) & (i < STEPS), INPUTS)
    for first in range(0, STEPS, STAGES):
        for d in gl.static_range(STAGES):
            step = first + d
            early = ()
            for m in gl.static_range(GROUPS):  # decoded while the previous products run
                early = early + (decode(held[4 * m], held[4 * m + 2], 0, KIND, SPANS, WARPS, OPERAND0),)
            if not FEW:
                acc = wait_for_products(acc)
            async_copy.wait_group(STAGES - 2)
            synchronize()  # right after the wait for copies, or the compiler adds another barrier there
            if not FEW:  # makes the copies of all threads visible to the tensor cores
                hopper.fence_async_shared()
            copy_rows(buffers, pointers, columns, NB, (d + STAGES - 1) % STAGES, step + STAGES - 1,
                      step + STAGES - 1 < STEPS, INPUTS)  # fmt: skip
            for c in gl.static_range(2):
                after = ()
                if FEW:
                    few_rows = buffers[2 * d + c].permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT0, 2))
                for m in gl.static_range(GROUPS):
                    if c == 0:
                        a = early[m]
                    else:
                        a = decode(held[4 * m + 1], held[4 * m + 3], 1, KIND, SPANS, WARPS, OPERAND0)
                    for b in gl.static_range(NB):
                        if FEW:
                            after = after + (ampere.mma_v2(a, few_rows, acc[m]),)
                        else:
                            ab = gl.convert_layout(a, OPERAND1, assert_trivial=True) if b else a
                            transposed = buffers[(2 * d + c) * NB + b].permute((1, 0))
                            after = after + (
                                hopper.warpgroup_mma(ab, transposed, acc[m * NB + b], is_async=True),
                            )
                acc = after
            held = held[4 * GROUPS :] + load_weights(
                words, scales, step + AHEAD, step + AHEAD < STEPS, KIND, GROUPS, WIDTH, WARPS
            )
    if not FEW:
        acc = wait_for_products(acc)
    for m in gl.static_range(GROUPS):
        for b in gl.static_range(NB):
            finish_rows(
                acc[m * NB + b], weights, routes, results, expert, block * GROUPS + m, start, count, b * N0,
                PRODUCT, N1 if b else N0, WARPS, FEW,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["routes"])
def packed_product(
    rows, weights, routes, results, PRODUCT: gl.constexpr, TILES: gl.constexpr, BEFORE: gl.constexpr,
    EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One product of all experts: the first gathers rows and stores activations by place, the second delivers.

    The second waits for the rows of its tile (BEFORE, a `Counted`), not for the kernels before.
    """
    if EARLY:
        if PRODUCT.first:
            depends("wait")
    block, tile = gl.program_id(0), gl.program_id(1)
    # When the second product starts, all blocks of the first have waited for the sort, so its output is there.
    # All loads start at once; after the last tile they give arbitrary values.
    expert = gl.load(routes.tiles + tile)
    start = gl.load(routes.tiles + routes.max_tiles + tile)
    count = gl.load(routes.tiles + 2 * routes.max_tiles + tile)
    if tile >= gl.load(routes.how_many):
        return
    if EARLY:  # not before a block without a tile has ended, because no kernel waits for its item
        depends("launch_dependents")
    counter = routes.tiles + tile_counter(routes, tile)
    WIDTH: gl.constexpr = PRODUCT.width
    WIDTHS: gl.constexpr = TILES.widths
    u0 = expert.to(gl.int64) * (PRODUCT.lines // 64) + block * (num_warps // 4 * TILES.groups)
    words = weights.data + u0 * (WIDTH // 64 * 512)
    scales = weights.scales + u0 * (WIDTH // 128 * 32 * scale_elements(PRODUCT.kind))
    for v in gl.static_range(len(WIDTHS)):
        if (count > (WIDTHS[v - 1][0] + WIDTHS[v - 1][1] if v else 0)) & (
            count <= WIDTHS[v][0] + WIDTHS[v][1]
        ):
            tile_product(
                rows, words, scales, weights, routes, results, counter, expert, block, start, count,
                PRODUCT, TILES, WIDTHS[v][0], WIDTHS[v][1], BEFORE, num_warps,
            )  # fmt: skip
    if PRODUCT.first:
        synchronize()
        gl.atomic_add(counter, 1, sem="release")
