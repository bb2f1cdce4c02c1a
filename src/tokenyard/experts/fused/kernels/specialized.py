"""Both products in one launch, on Hopper, in Triton's Gluon dialect: some warps load, others multiply.

Four of a block's twelve warps load (`specialized_loads`), and two groups of four multiply. A tile of many rows is
multiplied as rows × outputs: each group has 64 rows × 256 outputs (`wide_codes`, `wide_numbers`). A tile of few rows is
transposed, weights × rows: each group has 64 + 64 outputs × all rows (`transposed_codes`, `transposed_numbers`), which
takes less time than loading the weights from memory.

- For e4m3 the tensor cores keep fewer bits of a sum than float32 has, so the scaled products of each 128 inputs are
  added in float32. While one group adds, the other multiplies, and no barrier synchronizes the two.
- For 16-bit numbers the tensor cores add up all inputs.

Blocks are persistent, and take items (`items`) in this order: all rows of an expert for some outputs, then for the next
outputs, so that weights are still in the level-2 cache; all of the first product, then all of the second. A block takes
its next item when the loads of the current one end, so that slow blocks take fewer items, and no block is idle between
the products.

Copies write rows to shared memory through the generic proxy, while tensor cores read it through the async proxy.
16-bit rows of wide tiles are therefore loaded into registers, and in the other cases a fence separates copies and
products. (Loading codes into registers, without the fence, took 3% more time on one H200.)

Measured on one H200, warm: with items in turn, and from a counter, V4-Pro's experts with 1,024 tokens a rank took 1,333
and 1,269 µs, with 8,192 tokens 7,550 and 6,970; V3's 1,020 and 962, 6,550 and 6,250. With a launch for each product,
and one for both, V4-Flash's with 8 tokens took 156 and 153 µs (fp8), 290 and 284 (bf16), on two GPUs.

Arguments are grouped as in `kernels.arguments`; matrices come by TMA alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenyard.experts.fused.kernels.items import (
    Stages,
    add_scaled,
    columns_of,
    next_stage,
    receive_place,
    synchronize,
)
from tokenyard.experts.fused.kernels.packed import depends
from tokenyard.experts.fused.kernels.specialized_loads import load_items
from tokenyard.experts.fused.kernels.specialized_stores import homes_of, store_tile


@gluon.jit
def transposed_operands(stages, stage, GROUP: gl.constexpr, PRODUCT: gl.constexpr, ROWS: gl.constexpr):
    """The operands of a transposed tile: a group's 64 + 64 lines of a stage's weights, transposed rows of each."""
    low = stages.weights.index(stage).slice(GROUP * 64, 64)
    high = stages.weights.index(stage).slice(128 + GROUP * 64, 64)
    near = stages.rows0.index(stage).slice(0, ROWS).permute((1, 0))
    far = near
    if PRODUCT.deep:
        far = stages.rows1.index(stage).slice(0, ROWS).permute((1, 0))
    return low, high, near, far


@gluon.jit
def transposed_codes(
    stages, stage, phase, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr
):
    """A group's two sums `[rows, 64]` of a transposed tile of e4m3; in a deep product both are the same sum."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    BY_LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
    NEAR: gl.constexpr = min(PRODUCT.tile, 64)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    BLOCKS: gl.constexpr = PRODUCT.inputs // 128
    nothing = gl.zeros([64, ROWS], gl.float32, SUMS)
    acc0, acc1 = nothing, nothing
    for _ in range((BLOCKS + 1) // 2 if PRODUCT.deep else BLOCKS):
        mbarrier.wait(stages.full.index(stage), phase)
        if PRODUCT.first:
            fence_async_shared()
        low, high, near, far = transposed_operands(stages, stage, GROUP, PRODUCT, ROWS)
        token0 = warpgroup_mma(low, near, nothing, use_acc=False, is_async=True)
        mbarrier.wait(stages.full1.index(stage), phase)
        token1 = warpgroup_mma(high, far, nothing, use_acc=False, is_async=True)
        by_row = stages.by_row.index(stage).slice(0, ROWS).load(BY_ROW)[None, :]
        scale0 = by_row * stages.by_output.index(stage).slice(0, 1).load(BY_LINE)[:, None]
        if PRODUCT.deep:
            by_row = stages.by_row.index(stage).slice(NEAR, ROWS).load(BY_ROW)[None, :]
        scale1 = by_row * stages.by_output.index(stage).slice(1, 1).load(BY_LINE)[:, None]
        acc0 = add_scaled(warpgroup_mma_wait(1, [token0]), scale0, acc0)
        if PRODUCT.deep:
            acc0 = add_scaled(warpgroup_mma_wait(0, [token1]), scale1, acc0)
            acc1 = acc0
        else:
            acc1 = add_scaled(warpgroup_mma_wait(0, [token1]), scale1, acc1)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return acc0.permute((1, 0)), acc1.permute((1, 0)), stage, phase


@gluon.jit
def transposed_numbers(
    stages, stage, phase, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr
):
    """A group's two sums `[rows, 64]` of a transposed tile of 16-bit numbers; if deep, both are the same sum."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BLOCKS: gl.constexpr = (PRODUCT.inputs + 63) // 64
    acc0 = gl.zeros([64, ROWS], gl.float32, SUMS)
    acc1 = gl.zeros([64, ROWS], gl.float32, SUMS)
    for _ in range((BLOCKS + 1) // 2 if PRODUCT.deep else BLOCKS):
        mbarrier.wait(stages.full.index(stage), phase)
        if PRODUCT.first:
            fence_async_shared()
        low, high, near, far = transposed_operands(stages, stage, GROUP, PRODUCT, ROWS)
        acc0 = warpgroup_mma(low, near, acc0, is_async=True)
        if PRODUCT.deep:
            acc0 = warpgroup_mma(high, far, acc0, is_async=True)
            acc0 = warpgroup_mma_wait(0, [acc0])
            acc1 = acc0
        else:
            acc1 = warpgroup_mma(high, far, acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, [acc0, acc1])
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return acc0.permute((1, 0)), acc1.permute((1, 0)), stage, phase


@gluon.jit
def wide_codes(
    rows, stages, stage, phase, count, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr
):
    """A group's two sums `[64, 128]` of a wide tile of e4m3."""
    BLOCKS: gl.constexpr = PRODUCT.inputs // 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    full, full1, empty = stages.full, stages.full1, stages.empty
    part = gl.zeros([64, 128], gl.float32, SUMS)
    acc0 = gl.zeros([64, 128], gl.float32, SUMS)
    acc1 = gl.zeros([64, 128], gl.float32, SUMS)
    if count > GROUP * 64:
        for _ in range(BLOCKS):
            mbarrier.wait(full.index(stage), phase)
            if PRODUCT.first:
                fence_async_shared()
            own = rows.index(stage)
            low = stages.weights.index(stage).slice(0, 128).permute((1, 0))
            high = stages.weights.index(stage).slice(128, 128).permute((1, 0))
            token = warpgroup_mma(own, low, part, use_acc=False, is_async=True)
            scale = stages.by_row.index(stage).slice(GROUP * 64, 64).load(ROW)
            scale0 = scale * stages.by_output.index(stage).slice(0, 1).load(ROW)
            scale1 = scale * stages.by_output.index(stage).slice(1, 1).load(ROW)
            part = warpgroup_mma_wait(0, [token])
            acc0 = add_scaled(part, scale0[:, None], acc0)
            # The branch of this wait keeps the next product from starting before `part` is free, in other registers.
            mbarrier.wait(full1.index(stage), phase)
            token = warpgroup_mma(own, high, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, [token])
            mbarrier.arrive(empty.index(stage))
            acc1 = add_scaled(part, scale1[:, None], acc1)
            stage, phase = next_stage(stage, phase, STAGES)
    else:
        for _ in range(BLOCKS):
            mbarrier.wait(full.index(stage), phase)
            mbarrier.wait(full1.index(stage), phase)
            mbarrier.arrive(empty.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
    return acc0, acc1, stage, phase


@gluon.jit
def wide_numbers(
    rows, stages, stage, phase, count, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr
):
    """A group's two sums `[64, 128]` of a wide tile of 16-bit numbers.

    Each step waits for its product; while one group waits, the other multiplies.
    """
    BLOCKS: gl.constexpr = (PRODUCT.inputs + 63) // 64
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    acc = gl.zeros([64, 256], gl.float32, SUMS)
    if count > GROUP * 64:
        for block in range(BLOCKS):
            mbarrier.wait(stages.full.index(stage), phase)
            if PRODUCT.first:
                own = rows.index(stage).load(gl.DotOperandLayout(0, SUMS, 2))
            else:
                own = rows.index(stage)
            transposed = stages.weights.index(stage).permute((1, 0))
            acc = warpgroup_mma(own, transposed, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(stages.empty.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
    else:
        for block in range(BLOCKS):
            mbarrier.wait(stages.full.index(stage), phase)
            mbarrier.arrive(stages.empty.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
    acc0, acc1 = acc.reshape([64, 2, 128]).permute([0, 2, 1]).split()
    return acc0, acc1, stage, phase


@gluon.jit
def multiply_item(
    rows, weights, routes, results, stages, expert, start, count, column, stage, phase, turn,
    transposed: gl.constexpr, wide: gl.constexpr, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store one group's part of an item: 64 rows × 256 outputs, or few rows × 128 outputs."""
    MOST: gl.constexpr = PRODUCT.transposed[-1] if len(PRODUCT.transposed) else 0
    for n in gl.static_range(len(PRODUCT.transposed)):
        if (count <= PRODUCT.transposed[n]) & (count > (PRODUCT.transposed[n - 1] if n else 0)):
            homes = homes_of(start, count, routes, results, PRODUCT, PRODUCT.transposed[n])
            acc0, acc1, stage, phase = transposed(
                stages, stage, phase, GROUP, PRODUCT, STAGES, PRODUCT.transposed[n]
            )
            store_tile(
                acc0, acc1, expert, start, count, column, turn, homes,
                weights, routes, results, stages, GROUP, PRODUCT,
            )  # fmt: skip
            turn += 1 if PRODUCT.first else 0
    if PRODUCT.tile > MOST:
        if count > MOST:
            first_row, left_over = start + GROUP * 64, count - GROUP * 64
            homes = homes_of(first_row, left_over, routes, results, PRODUCT, 64)
            acc0, acc1, stage, phase = wide(rows, stages, stage, phase, count, GROUP, PRODUCT, STAGES)
            store_tile(
                acc0, acc1, expert, first_row, left_over, column, turn, homes,
                weights, routes, results, stages, GROUP, PRODUCT,
            )  # fmt: skip
    return stage, phase, turn


@gluon.jit
def multiply_items(
    rows, weights13, weights2, routes, results, stages, transposed: gl.constexpr, wide: gl.constexpr,
    GROUP: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store one group's part of every item of this block."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)  # how many tiles of the first product were transposed
    tiles = gl.load(routes.how_many)
    items = tiles * (columns_of(FIRST) + columns_of(SECOND))
    item, expert, start, count, column = receive_place(stages, slot, slot_phase)
    while item < items:
        if item < tiles * columns_of(FIRST):
            stage, phase, turn = multiply_item(
                rows, weights13, routes, results, stages, expert, start, count, column, stage, phase, turn,
                transposed, wide, GROUP, FIRST, STAGES,
            )  # fmt: skip
        else:
            stage, phase, turn = multiply_item(
                rows, weights2, routes, results, stages, expert, start, count, column, stage, phase, turn,
                transposed, wide, GROUP, SECOND, STAGES,
            )  # fmt: skip
        synchronize()
        mbarrier.arrive(stages.stored.index(slot))
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        item, expert, start, count, column = receive_place(stages, slot, slot_phase)


@gluon.jit(do_not_specialize=["routes"])
def specialized_products(
    inner_descriptor, w13_descriptor, w2_descriptor, rows, between, weights13, weights2, routes, results,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Both products of all experts. H and I must be multiples of 128 for e4m3, and of 8 for 16-bit numbers."""
    KIND: gl.constexpr = rows.data.dtype.element_ty
    BITS: gl.constexpr = KIND.primitive_bitwidth
    TILE: gl.constexpr = FIRST.tile
    SCALED: gl.constexpr = weights13.scales is not None
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    near = gl.allocate_shared_memory(KIND, [STAGES, min(TILE, 64), 1024 // BITS], SHARED)
    far = near
    if TILE == 128 or SECOND.deep:
        far = gl.allocate_shared_memory(KIND, [STAGES, min(TILE, 64), 1024 // BITS], SHARED)
    stages = Stages(
        rows0=near,
        rows1=far,
        weights=gl.allocate_shared_memory(KIND, [STAGES, 256, 1024 // BITS], SHARED),
        by_row=gl.allocate_shared_memory(gl.float32, [STAGES, min(2 * TILE, 128) if SCALED else 1], LINE),
        by_output=gl.allocate_shared_memory(gl.float32, [STAGES, 2], LINE),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        full1=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        items=gl.allocate_shared_memory(gl.int32, [2, 8], LINE),
        sent=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        received=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        stored=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        largest=gl.allocate_shared_memory(gl.int32, [4, 64], LINE),
        found=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(stages.full.index(s), count=129)  # arrivals: one for TMA, and 128 threads' copies
        mbarrier.init(stages.full1.index(s), count=1)
        mbarrier.init(stages.empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(stages.sent.index(s), count=1)
        mbarrier.init(stages.received.index(s), count=2)
        mbarrier.init(stages.stored.index(s), count=2)
        mbarrier.init(stages.found.index(s), count=2)
    fence_async_shared()
    if EARLY:
        depends("wait")
        depends("launch_dependents")
    few: gl.constexpr = transposed_codes if SCALED else transposed_numbers
    wide: gl.constexpr = wide_codes if SCALED else wide_numbers
    gl.warp_specialize([
        (multiply_items, (near, weights13, weights2, routes, results, stages, few, wide, 0, FIRST, SECOND, STAGES)),
        (multiply_items, (far, weights13, weights2, routes, results, stages, few, wide, 1, FIRST, SECOND, STAGES)),
        (load_items, (inner_descriptor, w13_descriptor, w2_descriptor, rows, between, weights13, weights2, routes,
                      stages, FIRST, SECOND, STAGES)),
    ], [4, 4], [232, 40] if TILE == 128 else [200, 104])  # fmt: skip
