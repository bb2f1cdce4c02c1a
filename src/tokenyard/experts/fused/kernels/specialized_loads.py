"""The loading warps of `kernels.specialized`: they load rows, weights and scales to shared memory, and take items.

TMA loads the weights, and the rows of the second product, which are contiguous. The rows of the first product are
scattered, and all threads copy them. A stage holds 128 bytes of inputs for 256 outputs, or 256 bytes of inputs for 128
outputs (`Product.deep`): two boxes of 128 outputs × 128 bytes. If weights are held box by box (`Product.boxed`,
`fused.boxes`), the TMA descriptor has lines of 128 bytes, and a box is 128 of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from tokenyard.experts.fused.kernels.items import (
    await_items,
    columns_of,
    count_item,
    next_stage,
    place_of,
    send_item,
    tile_counter,
    uniform,
)
from tokenyard.experts.fused.kernels.packed import start_copy

# Newer versions of Triton have another name for it.
start_tma = getattr(tma, "async_load", tma.async_copy_global_to_shared)


@gluon.jit
def lines_of(rows, routes, place, TOP_K: gl.constexpr):
    """The lines in memory of the rows of some places."""
    pair = gl.load(routes.order_N + place)
    line = gl.where(pair < 0, ~pair, pair) // TOP_K
    if rows.slots_R is not None:
        line = gl.load(rows.slots_R + line).to(gl.int32)
    return line


@gluon.jit
def ask_for_weights(
    w_descriptor, stages, stage, output0, output1, block, wanted, more, PRODUCT: gl.constexpr, SCALED: gl.constexpr
):  # fmt: skip
    """Start TMA loads of a stage's weights, if `wanted`, and set the barrier's bytes for them and for rows by TMA.

    `more`: whether the tile has more than 64 rows.
    """
    WIDE: gl.constexpr = 128 if SCALED else 64
    NEAR: gl.constexpr = 128 * 128 * (1 if SCALED else 2)
    ROWS: gl.constexpr = 0 if PRODUCT.first else 128 * min(PRODUCT.tile, 64) * (2 if PRODUCT.deep else 1)
    bar = stages.full.index(stage)
    bar1 = bar
    if PRODUCT.tile == 128 and not PRODUCT.first:
        mbarrier.expect(bar, NEAR + 2 * ROWS, pred=wanted & more)
        mbarrier.expect(bar, NEAR + ROWS, pred=wanted & (more == 0))
    else:
        mbarrier.expect(bar, NEAR + ROWS, pred=wanted)
    if SCALED:
        bar1 = stages.full1.index(stage)
        mbarrier.expect(bar1, 128 * 128, pred=wanted)
    low = stages.weights.index(stage).slice(0, 128)
    high = stages.weights.index(stage).slice(128, 128)
    if PRODUCT.boxed:
        BOXES: gl.constexpr = PRODUCT.inputs // WIDE  # beside each other
        if PRODUCT.deep:
            box0 = output0 * BOXES + block * 256
            box1 = box0 + 128
            if BOXES % 2 == 1:
                # The box that follows the last one has other outputs. After the end of all matrices TMA loads zeros.
                END: gl.constexpr = PRODUCT.experts * PRODUCT.outputs * BOXES
                box1 = gl.where(gl.to_tensor(block) * 2 + 1 < BOXES, box1, END)
        else:
            box0, box1 = output0 * BOXES + block * 128, output1 * BOXES + block * 128
        start_tma(w_descriptor, [box0, 0], bar, low, pred=wanted)
        start_tma(w_descriptor, [box1, 0], bar1, high, pred=wanted)
    elif PRODUCT.deep:
        start_tma(w_descriptor, [output0, block * (2 * WIDE)], bar, low, pred=wanted)
        start_tma(w_descriptor, [output0, block * (2 * WIDE) + WIDE], bar1, high, pred=wanted)
    else:
        start_tma(w_descriptor, [output0, block * WIDE], bar, low, pred=wanted)
        if PRODUCT.interleaved:
            start_tma(w_descriptor, [output0, PRODUCT.inputs + block * WIDE], bar1, high, pred=wanted)
        else:
            start_tma(w_descriptor, [output1, block * WIDE], bar1, high, pred=wanted)


@gluon.jit
def load_item(
    x_descriptor, w_descriptor, rows, weights, routes, stages, expert, start, count, column, tile, tiles, uncounted,
    stage, phase, slot, slot_phase, PRODUCT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load the rows, weights and scales of an item, 128 bytes of inputs a stage, and take the next item meanwhile.

    `uncounted` is the counter of the previous item, if that is of the first product and not counted yet, else -1. The
    previous item and the next one have the same slot.
    """
    SCALED: gl.constexpr = weights.scales is not None
    WIDE: gl.constexpr = 1024 // rows.data.dtype.element_ty.primitive_bitwidth  # inputs of a stage
    UNIT: gl.constexpr = WIDE // 8  # inputs in 16 bytes
    INPUTS: gl.constexpr = PRODUCT.inputs
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    SCALES: gl.constexpr = (INPUTS + WIDE - 1) // WIDE  # of a line
    BLOCKS: gl.constexpr = (SCALES + 1) // 2 if PRODUCT.deep else SCALES
    LINES: gl.constexpr = 2 * OUTPUTS if PRODUCT.first else OUTPUTS  # of an expert's matrix
    STEP: gl.constexpr = PRODUCT.step
    COPY: gl.constexpr = gl.BlockedLayout([1, UNIT], [4, 8], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # The next item is taken late, so that a slow block does not take an item that another could begin earlier.
    TAKE: gl.constexpr = max(BLOCKS - STAGES, 0)
    r = gl.arange(0, min(PRODUCT.tile, 64), layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    # Scales of rows; a deep product has two for each row, for the two halves of a stage's inputs.
    NEAR: gl.constexpr = min(PRODUCT.tile, 64)
    v = gl.arange(0, 2 * NEAR if PRODUCT.deep else PRODUCT.tile, layout=ONE)
    two = gl.arange(0, 2, layout=ONE)
    # For interleaved weights, the TMA descriptor has lines of a gate followed by its up.
    output0 = expert * (LINES // 2 if PRODUCT.interleaved else LINES) + column * STEP
    output1 = output0 + (OUTPUTS if PRODUCT.first else 128)
    AHEAD: gl.constexpr = 0 if PRODUCT.first else min(STAGES, BLOCKS)
    if not PRODUCT.first:
        # The weights do not depend on the first product, the rows do.
        ahead_stage, ahead_phase = stage, phase
        for s in gl.static_range(AHEAD):
            mbarrier.wait(stages.empty.index(ahead_stage), ahead_phase)
            fence_async_shared()  # TMA now writes where rows were copied before
            ask_for_weights(
                w_descriptor, stages, ahead_stage, output0, output1, s, True, count > 64, PRODUCT, SCALED
            )
            ahead_stage, ahead_phase = next_stage(ahead_stage, ahead_phase, STAGES)
        if uncounted >= 0:
            count_item(routes, stages, uncounted, slot, slot_phase)
        await_items(routes.tiles + tile_counter(routes, tile), columns_of(FIRST))
    place = start + gl.minimum(v % NEAR if PRODUCT.deep else v, count - 1)
    if PRODUCT.first:
        # Offsets in units of 16 bytes fit into 32 bits. Pointers are computed at each step, to save registers.
        near = start + gl.minimum(r, count - 1)
        line0 = lines_of(rows, routes, near, PRODUCT.top_k) * (rows.stride // UNIT)
        # Rows after the last are zero, which costs neither memory traffic nor power.
        is_row0 = (r < count)[:, None]
        if PRODUCT.tile == 128:
            far = start + gl.minimum(r + 64, count - 1)
            line1 = lines_of(rows, routes, far, PRODUCT.top_k) * (rows.stride // UNIT)
            is_row1 = (r + 64 < count)[:, None]
        if SCALED:
            place = lines_of(rows, routes, place, PRODUCT.top_k)
    if SCALED:
        row_scale = rows.scales + place.to(gl.int64) * rows.scale_stride
        # After the very last output (only in the second product) weights are zero, and the last scale is used.
        last: gl.constexpr = PRODUCT.experts * LINES - 1
        scale_line = gl.where((two == 0) | PRODUCT.deep, output0, gl.minimum(output1, last)) // 128
        output_scale = weights.scales + scale_line * SCALES
    item, next_tile = tile, tile
    next_expert, next_start, next_count, next_column = expert, start, count, column
    for block in range(BLOCKS):
        if block == TAKE:
            item = uniform(gl.atomic_add(routes.how_many + 1, 1, sem="relaxed"))
            next_expert, next_start, next_count, next_column, next_tile = place_of(
                routes, item, tiles, FIRST, SECOND
            )
        mbarrier.wait(stages.empty.index(stage), phase)
        if PRODUCT.first and BLOCKS > STAGES:
            # This item's first stage is free again, so both groups have stored the previous item.
            if (block == STAGES) & (uncounted >= 0):
                count_item(routes, stages, uncounted, slot, slot_phase)
        bar = stages.full.index(stage)
        ask_for_weights(
            w_descriptor, stages, stage, output0, output1, block, block >= AHEAD, count > 64, PRODUCT, SCALED
        )
        if PRODUCT.deep:
            start_tma(x_descriptor, [start, block * (2 * WIDE)], bar, stages.rows0.index(stage))
            start_tma(x_descriptor, [start, block * (2 * WIDE) + WIDE], bar, stages.rows1.index(stage))
        elif not PRODUCT.first:
            start_tma(x_descriptor, [start, block * WIDE], bar, stages.rows0.index(stage))
            if PRODUCT.tile == 128:
                far_rows = stages.rows1.index(stage)
                start_tma(x_descriptor, [start + 64, block * WIDE], bar, far_rows, pred=count > 64)
        else:
            near_line = rows.data + (block * WIDE + line0.to(gl.int64) * UNIT)[:, None] + c[None, :]
            is_input = (block * WIDE + c < INPUTS)[None, :]
            if INPUTS % WIDE == 0:
                start_copy(stages.rows0.index(stage), near_line, mask=is_row0)
            else:
                start_copy(stages.rows0.index(stage), near_line, mask=is_row0 & is_input)
            if PRODUCT.tile == 128:
                far_line = rows.data + (block * WIDE + line1.to(gl.int64) * UNIT)[:, None] + c[None, :]
                if INPUTS % WIDE == 0:
                    start_copy(stages.rows1.index(stage), far_line, mask=is_row1)
                else:
                    start_copy(stages.rows1.index(stage), far_line, mask=is_row1 & is_input)
        if SCALED:
            if PRODUCT.deep:
                # Each half of the inputs has its own scales; after the last one weights are zero.
                of_row, of_output = 2 * block + v // NEAR, 2 * block + two
                start_copy(stages.by_row.index(stage), row_scale + gl.minimum(of_row, SCALES - 1))
                start_copy(stages.by_output.index(stage), output_scale + gl.minimum(of_output, SCALES - 1))
            else:
                start_copy(stages.by_row.index(stage).slice(0, PRODUCT.tile), row_scale + block)
                start_copy(stages.by_output.index(stage), output_scale + block)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        stage, phase = next_stage(stage, phase, STAGES)
    if PRODUCT.first and BLOCKS <= STAGES:
        if uncounted >= 0:
            count_item(routes, stages, uncounted, slot, slot_phase)
    send_item(stages, slot, slot_phase, item, next_expert, next_start, next_count, next_column)
    return item, next_expert, next_start, next_count, next_column, next_tile, stage, phase


@gluon.jit
def load_items(
    inner_descriptor, w13_descriptor, w2_descriptor, rows, between, weights13, weights2, routes, stages,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take items, and load the data of each, until none is left."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(1)
    tiles = gl.load(routes.how_many)
    items = tiles * (columns_of(FIRST) + columns_of(SECOND))
    # The sort has set the counter to zero. A block takes its first item only when it runs, so that no block waits for
    # an item of one that does not run yet.
    item = uniform(gl.atomic_add(routes.how_many + 1, 1, sem="relaxed"))
    expert, start, count, column, tile = place_of(routes, item, tiles, FIRST, SECOND)
    send_item(stages, slot, slot_phase, item, expert, start, count, column)
    slot, slot_phase = next_stage(slot, slot_phase, 2)
    uncounted = gl.to_tensor(-1)
    while item < items:
        if item < tiles * columns_of(FIRST):
            here = tile_counter(routes, tile)
            item, expert, start, count, column, tile, stage, phase = load_item(
                w13_descriptor, w13_descriptor, rows, weights13, routes, stages, expert, start, count, column, tile,
                tiles, uncounted, stage, phase, slot, slot_phase, FIRST, FIRST, SECOND, STAGES,
            )  # fmt: skip
            uncounted = here
        else:
            item, expert, start, count, column, tile, stage, phase = load_item(
                inner_descriptor, w2_descriptor, between, weights2, routes, stages, expert, start, count, column, tile,
                tiles, uncounted, stage, phase, slot, slot_phase, SECOND, FIRST, SECOND, STAGES,
            )  # fmt: skip
            uncounted = gl.to_tensor(-1)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
    if uncounted >= 0:
        count_item(routes, stages, uncounted, slot, slot_phase)
