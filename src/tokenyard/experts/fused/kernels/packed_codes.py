"""The two products of packed mxfp4 weights and rows of e4m3, on Hopper's tensor cores, in Triton's Gluon dialect.

As in `kernels.packed` the weights are the register operand, but they are decoded to e4m3 codes (`decode_codes`), in
units of their output's largest scale, and rows are codes with a scale for 128 inputs: a product takes half the time of
one of bf16, without expanding the weights beforehand. The rows' inputs are permuted within 16 (`packing.code_order`).

As in `kernels.specialized` blocks are persistent, and take items from a counter: 128 outputs × a tile of up to 256
rows. Four warps of a block load rows, words and scales to shared memory, 128 inputs a stage (`load_stages`). Two groups
of four warps compute 64 outputs each, 128 rows at a time, and add up the scaled products of each 128 inputs in float32
(`multiply_items`): while one group decodes and adds, the other multiplies. (Products of 64 rows took as long as those
of 128, since reading the register operand takes the same time.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenyard.experts.fused import packing
from tokenyard.experts.fused.kernels.items import (
    add_scaled,
    await_items,
    count_item,
    enough_for,
    expert_counter,
    next_stage,
    receive_item,
    synchronize,
    take_item,
    tile_counter,
    tile_of,
)
from tokenyard.experts.fused.kernels.packed import depends, finish_rows, start_copy, sums_layout
from tokenyard.experts.fused.kernels.specialized_loads import start_tma
from tokenyard.experts.fused.kernels.unpacking import code_operand, decode_codes

CODES0, CODES1 = (gl.constexpr(codes) for codes in packing.LARGEST_CODES)
FACTOR0, FACTOR1 = (gl.constexpr(factor) for factor in packing.CODE_FACTORS)
HELD_POWER = gl.constexpr(packing.E2M1_POWER)
# The exponent of a line's factor is the byte of its largest scale minus this, because codes are raised, and
# `finish_tile` multiplies with LEFT_OVER.
LOWERED = gl.constexpr(packing.CODES_RAISED + int(packing.LEFT_OVER).bit_length() - 1)


class PackedWeights(NamedTuple):
    """The scales and bias of the packed matrices of a product, whose words TMA loads."""

    scales: Any
    largest: Any  # the byte of the largest scale of each line
    bias: Any
    global_scale: Any = None  # mxfp4 has none
    global_factor: Any = None


class Stages(NamedTuple):
    """The pipeline stages in shared memory: loaded data, and barriers that say that a stage is full, or empty again."""

    rows: Any
    row_scales: Any
    words: Any  # words of 64 outputs, and of the next 64
    scales: Any
    full: Any
    empty: Any
    items: Any  # items that were taken: a ring of two
    sent: Any
    received: Any
    stored: Any  # barriers that both groups have stored an item: a ring of two


@gluon.jit
def load_stages(
    x_descriptor, w_descriptor, row_scales, scale_stride, weights, routes, tiles, stages,
    PRODUCT: gl.constexpr, BEFORE: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load rows and words by TMA, and scales by copies, 128 inputs a stage, for all items of this block.

    In the second product wait for the rows of each tile. Count each item when the next one is multiplied.
    """
    # The step in which the first stage of an item is free again, so both groups have stored the previous item.
    COUNT: gl.constexpr = min(STAGES, PRODUCT.width // 128 - 1)
    STEPS: gl.constexpr = PRODUCT.width // 128
    ACROSS: gl.constexpr = (PRODUCT.lines + 127) // 128
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    v = gl.arange(0, 64 * (4 if RUNS == 3 else RUNS), layout=ONE)
    pair = gl.arange(0, 32, layout=gl.SliceLayout(1, PAIR))[:, None] * 4
    pair += gl.arange(0, 4, layout=gl.SliceLayout(0, PAIR))[None, :]
    items = tiles * ACROSS
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(1)
    expert, start, count, column, tile = tile_of(routes, item, items, ACROSS)
    uncounted = gl.to_tensor(-1)  # the counter of the previous item
    while item < items:
        item = take_item(routes, stages, slot, slot_phase, PRODUCT)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        next_expert, next_start, next_count, next_column, next_tile = tile_of(routes, item, items, ACROSS)
        if not PRODUCT.first:
            await_items(routes.tiles + tile_counter(routes, tile), enough_for(count, BEFORE))
        runs = (count + 63) // 64
        row_scale = row_scales + start + v
        unit = expert * (PRODUCT.lines // 64) + column * 2
        scales = weights.scales + unit.to(gl.int64) * (STEPS * 128)
        for step in range(STEPS):
            mbarrier.wait(stages.empty.index(stage), phase)
            if (step == COUNT) & (uncounted >= 0):
                count_item(routes, stages, uncounted, slot, slot_phase)
            bar = stages.full.index(stage)
            for n in gl.static_range(RUNS):
                mbarrier.expect(bar, 8192 * (n + 2), pred=runs == n + 1)
            for n in gl.static_range(2):
                line = (unit + n) * (STEPS * 32) + step * 32
                start_tma(w_descriptor, [line, 0], bar, stages.words.index(2 * stage + n))
            for n in gl.static_range(RUNS):
                to = stages.rows.index(stage).slice(n * 64, 64)
                start_tma(x_descriptor, [start + n * 64, step * 128], bar, to, pred=n < runs)
            for n in gl.static_range(2):
                start_copy(stages.scales.index(2 * stage + n), scales + (n * STEPS + step) * 128 + pair)
            start_copy(stages.row_scales.index(stage), row_scale + step * scale_stride, mask=v < count)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)
        uncounted = tile_counter(routes, tile) if PRODUCT.first else expert_counter(routes, expert)
        expert, start, count, column, tile = next_expert, next_start, next_count, next_column, next_tile
    slot, slot_phase = next_stage(slot, slot_phase, 2)
    if uncounted >= 0:
        count_item(routes, stages, uncounted, slot, slot_phase)


@gluon.jit
def offsets_of(largest):
    """The offsets of the code tables of outputs g and g + 8, for each thread of a group: `[128, 4]`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    t = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    nth = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    held = gl.load(largest + t // 32 * 16 + nth // 2 * 8 + t % 32 // 4) + HELD_POWER
    return gl.where(nth % 2 == 0, CODES0 - held * FACTOR0, CODES1 - held * FACTOR1)


@gluon.jit
def codes_at(stages, stage, offsets, GROUP: gl.constexpr):
    """A group's weights of a stage as e4m3 codes: for 64 inputs those of outputs g and g + 8, then for the next 64."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    own = stages.words.index(2 * stage + GROUP)
    low, high = own.slice(0, 16).load(LINES), own.slice(16, 16).load(LINES)
    low = gl.convert_layout(low.reshape([128, 4]), LAYOUT, assert_trivial=True)
    high = gl.convert_layout(high.reshape([128, 4]), LAYOUT, assert_trivial=True)
    # Four threads hold weights of the same outputs, so they have the same scales.
    FOUR: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    scales = stages.scales.index(2 * stage + GROUP).load(gl.SliceLayout(1, FOUR))
    scales, _ = gl.broadcast(scales[:, None, :], gl.zeros([32, 4, 4], gl.int16, FOUR))
    scales = gl.convert_layout(scales.reshape([128, 4]), LAYOUT, assert_trivial=True)
    a0, b0 = decode_codes(low, scales, offsets, 0)
    a1, b1 = decode_codes(high, scales, offsets, 1)
    return a0, b0, a1, b1


@gluon.constexpr_function
def product_layout(rows):
    """The register layout of a group's sums `[64, rows]`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 32])


@gluon.jit
def start_product(codes, stages, stage, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Start the product of a group's weights and ROWS rows of a stage, from row FIRST on."""
    MMA: gl.constexpr = product_layout(ROWS)
    own = gl.convert_layout(codes, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
    transposed = stages.rows.index(stage).slice(FIRST, ROWS).permute((1, 0))
    return warpgroup_mma(own, transposed, gl.zeros([64, ROWS], gl.float32, MMA), use_acc=False, is_async=True)


@gluon.jit
def add_product(token, stages, stage, acc, FIRST: gl.constexpr, ROWS: gl.constexpr, OTHERS: gl.constexpr):
    """Wait for a product, and add it, scaled, to acc; OTHERS products that were started later may still run."""
    part = warpgroup_mma_wait(OTHERS, [token])
    scale = stages.row_scales.index(stage).slice(FIRST, ROWS).load(gl.SliceLayout(0, product_layout(ROWS)))
    return add_scaled(part, scale[None, :], acc)


@gluon.jit
def multiply_tile(
    weights, routes, results, stages, expert, start, count, column, stage, phase,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one group's 64 outputs of a tile of up to RUNS · 64 rows."""
    # Rows of the first accumulator, 128 or 64, and of the second.
    N0: gl.constexpr = 64 if RUNS == 1 else 128
    N1: gl.constexpr = 64 * RUNS - N0
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(N0), 4)
    block = column * 2 + GROUP
    largest = weights.largest + expert * PRODUCT.lines + block * 64
    offsets = offsets_of(largest)
    acc0 = gl.zeros([64, N0], gl.float32, product_layout(N0))
    acc1 = gl.zeros([64, N1 if N1 else N0], gl.float32, product_layout(N1 if N1 else N0))
    for _ in range(PRODUCT.width // 128):
        mbarrier.wait(stages.full.index(stage), phase)
        a0, b0, a1, b1 = codes_at(stages, stage, offsets, GROUP)
        codes = code_operand(a0, b0, a1, b1, 4, OPERAND)
        token0 = start_product(codes, stages, stage, 0, N0)
        if N1 == 64:  # both at once: there are registers for it
            token1 = start_product(codes, stages, stage, N0, N1)
            acc0 = add_product(token0, stages, stage, acc0, 0, N0, 1)
            acc1 = add_product(token1, stages, stage, acc1, N0, N1, 0)
        else:
            acc0 = add_product(token0, stages, stage, acc0, 0, N0, 0)
            if N1 > 0:
                token1 = start_product(codes, stages, stage, N0, N1)
                acc1 = add_product(token1, stages, stage, acc1, N0, N1, 0)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    finish_codes(acc0, weights, largest, routes, results, expert, block, start, count, 0, PRODUCT, N0)
    if N1 > 0:
        finish_codes(acc1, weights, largest, routes, results, expert, block, start, count, N0, PRODUCT, N1)
    return stage, phase


@gluon.jit
def finish_codes(
    acc, weights, largest, routes, results, expert, block, start, count, offset,
    PRODUCT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Scale the sums of a group's outputs and some rows by the outputs' largest scales, and finish them."""
    SUMS: gl.constexpr = sums_layout(ROWS, 4, False)
    held = gl.load(largest + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)))
    factor = (gl.maximum(held - LOWERED, 1) << 23).to(gl.float32, bitcast=True)[:, None]
    sums = gl.convert_layout(acc, SUMS, assert_trivial=True) * factor
    finish_rows(sums, weights, routes, results, expert, block, start, count, offset, PRODUCT, ROWS, 4, False)


@gluon.jit
def multiply_items(
    weights, routes, tiles, results, stages,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store one group's 64 outputs of every item of this block."""
    ACROSS: gl.constexpr = (PRODUCT.lines + 127) // 128
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    items = tiles * ACROSS
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    while item < items:
        expert, start, count, column, _ = tile_of(routes, item, items, ACROSS)
        for n in gl.static_range(RUNS):
            if (count > 64 * n) & ((count <= 64 * (n + 1)) | (n == RUNS - 1)):
                stage, phase = multiply_tile(
                    weights, routes, results, stages, expert, start, count, column, stage, phase,
                    GROUP, PRODUCT, n + 1, STAGES,
                )  # fmt: skip
        synchronize()
        mbarrier.arrive(stages.stored.index(slot))
        item = receive_item(stages, slot, slot_phase)
        slot, slot_phase = next_stage(slot, slot_phase, 2)


@gluon.jit(do_not_specialize=["routes", "scale_stride"])
def packed_codes_product(
    x_descriptor, w_descriptor, row_scales, scale_stride, weights, routes, results,
    PRODUCT: gl.constexpr, BEFORE: gl.constexpr, RUNS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One product of all experts: the first stores activations by place, the second delivers results.

    The second waits for the rows of each tile (BEFORE, a `Counted`), not for the kernels before.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    stages = Stages(
        rows=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64 * (4 if RUNS == 3 else RUNS), 128], SHARED),
        row_scales=gl.allocate_shared_memory(gl.float32, [STAGES, 64 * (4 if RUNS == 3 else RUNS)], LINE),
        words=gl.allocate_shared_memory(gl.int32, [2 * STAGES, 32, 32], gl.NVMMASharedLayout(128, 32, 2)),
        scales=gl.allocate_shared_memory(gl.int16, [2 * STAGES, 32, 4], PLAIN),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        items=gl.allocate_shared_memory(gl.int32, [2, 1], LINE),
        sent=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        received=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        stored=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(stages.full.index(s), count=129)  # arrivals: one for TMA, and 128 threads' copies
        mbarrier.init(stages.empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(stages.sent.index(s), count=1)
        mbarrier.init(stages.received.index(s), count=2)
        mbarrier.init(stages.stored.index(s), count=2)
    fence_async_shared()
    if EARLY:
        if PRODUCT.first:
            depends("wait")
    tiles = gl.load(routes.how_many)
    if EARLY:  # after this load, because no kernel waits for a block without an item
        depends("launch_dependents")
    gl.warp_specialize([
        (multiply_items, (weights, routes, tiles, results, stages, 0, PRODUCT, RUNS, STAGES)),
        (multiply_items, (weights, routes, tiles, results, stages, 1, PRODUCT, RUNS, STAGES)),
        (load_stages, (x_descriptor, w_descriptor, row_scales, scale_stride, weights, routes, tiles,
                       stages, PRODUCT, BEFORE, RUNS, STAGES)),
    ], [4, 4], [232, 40])  # fmt: skip
