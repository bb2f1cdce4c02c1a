"""What the loading warps of `kernels.specialized` do: bring rows, weights and scales to shared memory, and take items.

Weights come by TMA. So do the rows of the second product, which stand one behind the other; those of the first lie
anywhere, and are copied by all threads. A stage has 128 bytes of inputs: of 128 + 128 outputs; or of 128 outputs, and
the next 128 bytes of them (`Product.deep`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from tokenyard.experts.fused.kernels.items import (
    await_tile,
    columns_of,
    count_item,
    next_stage,
    place_of,
    tell_item,
    uniform,
)
from tokenyard.experts.fused.kernels.packed import start_copy

# Younger Tritons have another name for it.
start_tma = getattr(tma, "async_load", tma.async_copy_global_to_shared)


@gluon.jit
def lines_of(rows, routes, place, TOP_K: gl.constexpr):
    """The lines where the rows of some places stand."""
    pair = gl.load(routes.order_N + place)
    line = gl.where(pair < 0, ~pair, pair) // TOP_K
    if rows.slots_R is not None:
        line = gl.load(rows.slots_R + line).to(gl.int32)
    return line


@gluon.jit
def ask_for_weights(
    w_descriptor, stages, stage, output0, output1, block, wanted, more, PRODUCT: gl.constexpr, SCALED: gl.constexpr
):  # fmt: skip
    """Let TMA bring the weights of a stage, if they are wanted, and say how many bytes of rows it will bring, too.

    `more`: whether a tile has more than 64 rows.
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
    if PRODUCT.deep:
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
    """Bring the rows, weights and scales of an item, 128 bytes of inputs a stage, and take the next one meanwhile.

    `uncounted`: the tile of the item before, of the first product, which is counted when it is stored; or -1. That item
    and the next one have the same slot.
    """
    SCALED: gl.constexpr = weights.scales is not None
    WIDE: gl.constexpr = 1024 // rows.data.dtype.element_ty.primitive_bitwidth  # inputs of a stage
    UNIT: gl.constexpr = WIDE // 8  # of 16 bytes
    INPUTS: gl.constexpr = PRODUCT.inputs
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    SCALES: gl.constexpr = (INPUTS + WIDE - 1) // WIDE  # of a line
    BLOCKS: gl.constexpr = (SCALES + 1) // 2 if PRODUCT.deep else SCALES
    LINES: gl.constexpr = 2 * OUTPUTS if PRODUCT.first else OUTPUTS  # of an expert's matrix
    STEP: gl.constexpr = PRODUCT.step
    COPY: gl.constexpr = gl.BlockedLayout([1, UNIT], [4, 8], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # The next item is taken late, so that blocks that are slow take no item that others could begin before them.
    TAKE: gl.constexpr = max(BLOCKS - STAGES, 0)
    r = gl.arange(0, min(PRODUCT.tile, 64), layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    # Scales of rows; of a deep product twice, for the first half of the inputs and for the second.
    NEAR: gl.constexpr = min(PRODUCT.tile, 64)
    v = gl.arange(0, 2 * NEAR if PRODUCT.deep else PRODUCT.tile, layout=ONE)
    two = gl.arange(0, 2, layout=ONE)
    # Of weights that take turns, a line holds a gate, and its up behind it.
    output0 = expert * (LINES // 2 if PRODUCT.interleaved else LINES) + column * STEP
    output1 = output0 + (OUTPUTS if PRODUCT.first else 128)
    AHEAD: gl.constexpr = 0 if PRODUCT.first else min(STAGES, BLOCKS)
    if not PRODUCT.first:
        # The weights do not depend on the first product, the rows do.
        ahead_stage, ahead_phase = stage, phase
        for s in gl.static_range(AHEAD):
            mbarrier.wait(stages.empty.index(ahead_stage), ahead_phase)
            fence_async_shared()  # where rows were copied, TMA writes now
            ask_for_weights(
                w_descriptor, stages, ahead_stage, output0, output1, s, True, count > 64, PRODUCT, SCALED
            )
            ahead_stage, ahead_phase = next_stage(ahead_stage, ahead_phase, STAGES)
        if uncounted >= 0:
            count_item(routes, stages, uncounted, slot, slot_phase)
        await_tile(routes, tile, columns_of(FIRST))
    place = start + gl.minimum(v % NEAR if PRODUCT.deep else v, count - 1)
    if PRODUCT.first:
        # In units of 16 bytes they fit into 32 bits: pointers are made at each step, and take no registers.
        near = start + gl.minimum(r, count - 1)
        line0 = lines_of(rows, routes, near, PRODUCT.top_k) * (rows.stride // UNIT)
        # Rows that are not there are zero: they cost neither memory nor power.
        is_row0 = (r < count)[:, None]
        if PRODUCT.tile == 128:
            far = start + gl.minimum(r + 64, count - 1)
            line1 = lines_of(rows, routes, far, PRODUCT.top_k) * (rows.stride // UNIT)
            is_row1 = (r + 64 < count)[:, None]
        if SCALED:
            place = lines_of(rows, routes, place, PRODUCT.top_k)
    if SCALED:
        row_scale = rows.scales + place.to(gl.int64) * rows.scale_stride
        # Behind the last output of all (of the second product alone) weights are zero, and have the last scale.
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
            # This item's first stage is free again: so the item before is stored.
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
                # Either half of the inputs has scales of its own; behind the last one weights are zero.
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
    tell_item(stages, slot, slot_phase, item, next_expert, next_start, next_count, next_column)
    return item, next_expert, next_start, next_count, next_column, next_tile, stage, phase


@gluon.jit
def load_items(
    inner_descriptor, w13_descriptor, w2_descriptor, rows, between, weights13, weights2, routes, stages,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring what every item of this block needs."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(1)
    tiles = gl.load(routes.how_many)
    items = tiles * (columns_of(FIRST) + columns_of(SECOND))
    # The sort has set the counter to zero. No block has an item before it runs: some may have to wait for room on the
    # GPU, and nobody waits for them.
    item = uniform(gl.atomic_add(routes.how_many + 1, 1, sem="relaxed"))
    expert, start, count, column, tile = place_of(routes, item, tiles, FIRST, SECOND)
    tell_item(stages, slot, slot_phase, item, expert, start, count, column)
    slot, slot_phase = next_stage(slot, slot_phase, 2)
    uncounted = gl.to_tensor(-1)
    while item < items:
        if item < tiles * columns_of(FIRST):
            here = tile
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
