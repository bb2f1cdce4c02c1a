"""Both products for many rows, on Hopper, in Triton's Gluon dialect: warps that load, and warps that multiply.

Of a block's twelve warps four load (`load_tiles`): weights by TMA, rows of the first product, which lie anywhere, by
asynchronous copies, those of the second by TMA; 128 bytes of each a stage. Two groups of four multiply, each 64 rows ×
256 outputs.

- `multiply_codes`: rows and weights of e4m3, 128 and 128 outputs in sums of their own. The tensor cores keep fewer bits
  of a sum of e4m3 than float32 has, so every 128 inputs are added, scaled, in float32: while one group adds, the other
  multiplies, and no barrier holds both.
- `multiply_numbers`: rows and weights of 16 bits. The tensor cores add up all inputs.

Blocks stay, and take items, which are tiles of rows and columns, in this order: of one expert all rows for 256 outputs,
then the next 256, so that weights are found in the level-2 cache. Where a tile has no more than 64 rows, the second
group passes it by, so items take unequal times: a block that is done takes the next one from a counter (`take_item`).
Its loading warps do that, while they bring what the item before needs, and tell the others (`hear_item`).

Rows that were copied are written to shared memory as ordinary stores are; tensor cores see it by another way. So 16-bit
rows of the first product go from there through registers, and a fence stands between the copies and the products of
codes, whose warps have no registers left. (Codes through registers took 3% more time on one H200, with a fence less.)

Measured on one H200, warm, with blocks that take items in turn, and from a counter: V4-Pro's experts with 1,024 tokens
a rank took 1,333 and 1,269 µs, with 8,192 tokens 7,550 and 6,970; V3's 1,020 and 962, 6,550 and 6,250.

Arguments are grouped as in `kernels.arguments`; matrices come by TMA alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenyard.experts.fused.kernels.packed import activate, depends, start_copy

# Younger Tritons have another name for it.
start_tma = getattr(tma, "async_load", tma.async_copy_global_to_shared)
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


class Product(NamedTuple):
    """What a product is compiled for. `outputs`: I of the first, H of the second."""

    inputs: int
    outputs: int
    experts: int
    top_k: int
    first: bool
    interleaved: bool  # gates and ups of the first product take turns
    weighted: bool
    finalize: bool
    activation: int
    limit: float
    alpha: float
    shift: float
    powers: bool  # scales between the products are powers of two


class Stages(NamedTuple):
    """Shared memory: what was brought, and barriers that say so, or that it may be overwritten."""

    rows0: Any
    rows1: Any
    weights: Any  # of 256 outputs
    by_row: Any
    by_output: Any
    full: Any
    full1: Any  # for the second half of the weights, where sums are apart
    empty: Any
    items: Any  # that were taken: a ring of two
    told: Any
    heard: Any


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage behind this one; from the first on again, the barriers' phase is the other."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def columns_of(PRODUCT: gl.constexpr):
    """How many items a tile has: the first product makes 128 columns of gates and ups, the second 256 outputs."""
    STEP: gl.constexpr = 128 if PRODUCT.first else 256
    return (PRODUCT.outputs + STEP - 1) // STEP


@gluon.jit
def items_of(routes, PRODUCT: gl.constexpr):
    """How many items all blocks have."""
    return gl.load(routes.how_many) * columns_of(PRODUCT)


@gluon.jit
def tile_of(routes, item, items, ACROSS: gl.constexpr):
    """Expert, first place, rows and column of an item: all tiles of an expert for one column, then for the next.

    Each is asked for while the one before is computed; behind the last there is none.
    """
    there = item < items
    near = item // ACROSS  # some tile of the same expert
    first = gl.load(routes.tiles + 3 * routes.max_tiles + near, mask=there, other=0)
    many = gl.load(routes.tiles + 4 * routes.max_tiles + near, mask=there, other=1)
    nth = item - first * ACROSS
    column = nth // many
    tile = routes.tiles + first + (nth - column * many)
    expert = gl.load(tile, mask=there, other=0)
    start = gl.load(tile + routes.max_tiles, mask=there, other=0)
    count = gl.load(tile + 2 * routes.max_tiles, mask=there, other=0)
    return expert, start, count, column


@gluon.jit
def take_item(routes, stages, slot, phase, PRODUCT: gl.constexpr):
    """The next item that no block has; a number behind the last, if there is none. The other warps are told."""
    # The sort has set the counters to zero. A block's first item has the block's own number.
    counter = routes.how_many + (1 if PRODUCT.first else 2)
    item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(stages.heard.index(slot), phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stages.items.index(slot).store(gl.full([1], 0, gl.int32, ONE) + item)
    synchronize()
    mbarrier.arrive(stages.told.index(slot))
    return item


@gluon.jit
def hear_item(stages, slot, phase):
    """The item that was taken."""
    mbarrier.wait(stages.told.index(slot), phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    item = gl.max(stages.items.index(slot).load(ONE), axis=0)
    mbarrier.arrive(stages.heard.index(slot))
    return item


@gluon.jit
def lines_of(rows, routes, place, TOP_K: gl.constexpr):
    """The lines where the rows of some places stand."""
    pair = gl.load(routes.order_N + place)
    line = gl.where(pair < 0, ~pair, pair) // TOP_K
    if rows.slots_R is not None:
        line = gl.load(rows.slots_R + line).to(gl.int32)
    return line


@gluon.jit
def load_tiles(
    x_descriptor, w_descriptor, rows, weights, routes, stages, PRODUCT: gl.constexpr, STAGES: gl.constexpr
):
    """Bring rows, weights and scales, 128 bytes of inputs a stage."""
    SCALED: gl.constexpr = weights.scales is not None
    WIDE: gl.constexpr = 1024 // rows.data.dtype.element_ty.primitive_bitwidth  # inputs of a stage
    UNIT: gl.constexpr = WIDE // 8  # of 16 bytes
    INPUTS: gl.constexpr = PRODUCT.inputs
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    BLOCKS: gl.constexpr = (INPUTS + WIDE - 1) // WIDE
    LINES: gl.constexpr = 2 * OUTPUTS if PRODUCT.first else OUTPUTS  # of an expert's matrix
    STEP: gl.constexpr = 128 if PRODUCT.first else 256
    COPY: gl.constexpr = gl.BlockedLayout([1, UNIT], [4, 8], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    v = gl.arange(0, 128, layout=ONE)
    items = items_of(routes, PRODUCT)
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(1)
    expert, start, count, column = tile_of(routes, item, items, columns_of(PRODUCT))
    while item < items:
        item = take_item(routes, stages, slot, slot_phase, PRODUCT)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        next_expert, next_start, next_count, next_column = tile_of(routes, item, items, columns_of(PRODUCT))
        place = start + gl.minimum(v, count - 1)
        if PRODUCT.first:
            # In units of 16 bytes they fit into 32 bits: pointers are made at each step, and take no registers.
            near = start + gl.minimum(r, count - 1)
            far = start + gl.minimum(r + 64, count - 1)
            line0 = lines_of(rows, routes, near, PRODUCT.top_k) * (rows.stride // UNIT)
            line1 = lines_of(rows, routes, far, PRODUCT.top_k) * (rows.stride // UNIT)
            # Rows that are not there are zero: they cost neither memory nor power.
            is_row0 = (r < count)[:, None]
            is_row1 = (r + 64 < count)[:, None]
            if SCALED:
                place = lines_of(rows, routes, place, PRODUCT.top_k)
        # Of weights that take turns, a line holds a gate, and its up behind it.
        output0 = expert * (LINES // 2 if PRODUCT.interleaved else LINES) + column * STEP
        output1 = output0 + (OUTPUTS if PRODUCT.first else 128)
        if SCALED:
            row_scale = rows.scales + place.to(gl.int64) * rows.scale_stride
            # Behind the last output of all (of the second product alone) weights are zero, and have the last scale.
            last: gl.constexpr = PRODUCT.experts * LINES - 1
            scale_line = gl.where(v < 64, output0, gl.minimum(output1, last)) // 128
            output_scale = weights.scales + scale_line * BLOCKS
        for block in range(BLOCKS):
            mbarrier.wait(stages.empty.index(stage), phase)
            bar = stages.full.index(stage)
            mbarrier.expect(bar, 128 * 128 * ((1 if SCALED else 2) + (0 if PRODUCT.first else 1)))
            if not PRODUCT.first:
                start_tma(x_descriptor, [start, block * WIDE], bar, stages.rows0.index(stage))
                start_tma(x_descriptor, [start + 64, block * WIDE], bar, stages.rows1.index(stage))
            low = stages.weights.index(stage).slice(0, 128)
            high = stages.weights.index(stage).slice(128, 128)
            start_tma(w_descriptor, [output0, block * WIDE], bar, low)
            if PRODUCT.interleaved:
                start_tma(w_descriptor, [output0, INPUTS + block * WIDE], bar, high)
            elif not SCALED:
                start_tma(w_descriptor, [output1, block * WIDE], bar, high)
            if PRODUCT.first:
                near_line = rows.data + (block * WIDE + line0.to(gl.int64) * UNIT)[:, None] + c[None, :]
                far_line = rows.data + (block * WIDE + line1.to(gl.int64) * UNIT)[:, None] + c[None, :]
                if INPUTS % WIDE == 0:
                    start_copy(stages.rows0.index(stage), near_line, mask=is_row0)
                    start_copy(stages.rows1.index(stage), far_line, mask=is_row1)
                else:
                    is_input = (block * WIDE + c < INPUTS)[None, :]
                    start_copy(stages.rows0.index(stage), near_line, mask=is_row0 & is_input)
                    start_copy(stages.rows1.index(stage), far_line, mask=is_row1 & is_input)
            if SCALED:
                start_copy(stages.by_row.index(stage), row_scale + block)
                start_copy(stages.by_output.index(stage), output_scale + block)
            if SCALED or PRODUCT.first:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            if SCALED:
                bar1 = stages.full1.index(stage)
                mbarrier.expect(bar1, 128 * 128)
                start_tma(w_descriptor, [output1, block * WIDE], bar1, high)
            stage, phase = next_stage(stage, phase, STAGES)
        expert, start, count, column = next_expert, next_start, next_count, next_column


@gluon.jit
def add_scaled(part, scale, acc):
    """acc + part * scale, where it is written: neither LLVM nor ptxas moves it behind the next wait."""
    s, _ = gl.broadcast(scale[:, None], part)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, s, acc], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def divide(a, b):
    """a / b, to the nearest."""
    return gl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def quantize(value, POWERS: gl.constexpr):
    """`fp8_split.quantize` of rows of 128 numbers, but that they are multiplied with the inverse of their scale."""
    largest = gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_nan = largest > 0x7F800000
    largest = gl.maximum(gl.minimum(largest, 0x7F7FFFFF), 0x2EDBE6FF).to(gl.float32, bitcast=True)
    scale = divide(largest, gl.full_like(largest, 448.0))
    if POWERS:
        scale = ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    inverse = divide(gl.full_like(scale, 1.0), scale)
    code = (value * inverse[:, None]).to(gl.float8e4nv)
    return code, gl.where(is_nan, float("nan"), scale)


@gluon.jit
def store_activated(
    gate, up, expert, start, left_over, column, weights, routes, results, PRODUCT: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """64 rows × 128 columns of the first product, activated, into `inner` at their places: codes, or numbers."""
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    if PRODUCT.weighted:
        pair = gl.load(routes.order_N + start + t, mask=t < left_over, other=0)
        pair = gl.where(pair < 0, ~pair, pair)
        weight = gl.load(routes.weights_N + pair, mask=t < left_over, other=0.0).to(gl.float32)[:, None]
        gate, up = gate * weight, up * weight
    if weights.bias is not None:
        i = column * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, MMA))
        own = weights.bias + expert.to(gl.int64) * (2 * OUTPUTS)
        if PRODUCT.interleaved:
            at, step = 2 * i, 1
        else:
            at, step = i, OUTPUTS
        gate += gl.load(own + at, mask=i < OUTPUTS, other=0.0).to(gl.float32)[None, :]
        up += gl.load(own + step + at, mask=i < OUTPUTS, other=0.0).to(gl.float32)[None, :]
    value = activate(gate, up, PRODUCT.activation, PRODUCT.limit, PRODUCT.alpha, PRODUCT.shift)
    if results.inner_scales is not None:
        code, scale = quantize(value, PRODUCT.powers)
        where = results.inner_scales + (start + t) * (OUTPUTS // 128) + column
        gl.store(where, scale, mask=t < left_over)
        CODES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, CODES))
        c = column * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, CODES))
        where = results.inner + (start + r).to(gl.int64)[:, None] * OUTPUTS + c[None, :]
        gl.store(where, gl.convert_layout(code, CODES), mask=(r < left_over)[:, None])
    else:
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
        row = results.inner + (start + r).to(gl.int64)[:, None] * OUTPUTS
        # In halves: what threads exchange takes 8 KB.
        low, high = value.to(results.inner.dtype.element_ty).reshape([64, 2, 64]).permute([0, 2, 1]).split()
        for half in gl.static_range(2):
            c = column * 128 + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
            there = (r < left_over)[:, None]
            if OUTPUTS % 128 != 0:
                there = there & (c < OUTPUTS)[None, :]
            gl.store(row + c[None, :], gl.convert_layout(low if half == 0 else high, STORE), mask=there)


# 64 rows of results, 64 outputs at a time, eight a thread.
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def homes_of(start, left_over, routes, results, PRODUCT: gl.constexpr):
    """Of 64 rows of the second product: what stands in `order_N`, weights, and lines of `out`.

    They are asked for before a tile is multiplied, and needed behind it.
    """
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
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
def deliver(
    value, expert, left_over, first, place, weight, home, weights, results, PRODUCT: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Store 64 rows × 128 outputs of the second product.

    Rows with one expert here go weighted into `out`, others into `partial_sums`.
    """
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    partial_sums, out = results.partial_sums, results.out
    if weights.bias is not None:
        n = first + gl.arange(0, 128, layout=gl.SliceLayout(0, MMA))
        own = weights.bias + expert.to(gl.int64) * OUTPUTS + n
        value += gl.load(own, mask=n < OUTPUTS, other=0.0).to(gl.float32)[None, :]
    is_row = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE)) < left_over
    row = partial_sums + gl.where(place < 0, ~place, place).to(gl.int64) * OUTPUTS
    if PRODUCT.finalize:
        alone = is_row & (place >= 0)
        is_row = is_row & (place < 0)
        at_home = out + home.to(gl.int64) * results.out_stride
    # In halves: what threads exchange takes 8 KB.
    low, high = value.to(partial_sums.dtype.element_ty).reshape([64, 2, 64]).permute([0, 2, 1]).split()
    for half in gl.static_range(2):
        wide = gl.convert_layout(low if half == 0 else high, STORE)
        c = first + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
        here = is_row[:, None]
        if OUTPUTS % 128 != 0:
            here = here & (c < OUTPUTS)[None, :]
        gl.store(row[:, None] + c[None, :], wide, mask=here)
        if PRODUCT.finalize:
            weighted = wide.to(gl.float32)
            if PRODUCT.weighted:
                weighted *= weight.to(gl.float32)[:, None]
            there = alone[:, None]
            if OUTPUTS % 128 != 0:
                there = there & (c < OUTPUTS)[None, :]
            gl.store(at_home[:, None] + c[None, :], weighted.to(out.dtype.element_ty), mask=there)


@gluon.jit
def store_tile(
    sums0, sums1, expert, start, left_over, column, place, weight, home, weights, routes, results,
    PRODUCT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """What is done with the sums of 64 rows × (128 + 128) outputs."""
    if PRODUCT.first:
        store_activated(
            sums0, sums1, expert, start, left_over, column, weights, routes, results, PRODUCT, MMA
        )
    else:
        first = column * 256
        deliver(sums0, expert, left_over, first, place, weight, home, weights, results, PRODUCT, MMA)
        if PRODUCT.outputs % 256 == 0 or first + 128 < PRODUCT.outputs:
            deliver(
                sums1, expert, left_over, first + 128, place, weight, home, weights, results, PRODUCT, MMA
            )


@gluon.jit
def multiply_codes(
    rows, weights, routes, results, stages, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr
):
    """One group's 64 rows of every tile, of e4m3: multiplied, and stored."""
    BLOCKS: gl.constexpr = PRODUCT.inputs // 128
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    full, full1, empty = stages.full, stages.full1, stages.empty
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    part = gl.zeros([64, 128], gl.float32, MMA)
    items = items_of(routes, PRODUCT)
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    expert, start, count, column = tile_of(routes, item, items, columns_of(PRODUCT))
    while item < items:
        first_row, left_over = start + GROUP * 64, count - GROUP * 64
        place, weight, home = homes_of(first_row, left_over, routes, results, PRODUCT)
        acc0 = gl.zeros([64, 128], gl.float32, MMA)
        acc1 = gl.zeros([64, 128], gl.float32, MMA)
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
                scale0 = scale * stages.by_output.index(stage).slice(0, 64).load(ROW)
                scale1 = scale * stages.by_output.index(stage).slice(64, 64).load(ROW)
                part = warpgroup_mma_wait(0, [token])
                acc0 = add_scaled(part, scale0, acc0)
                # A branch: so the next product is not started before `part` is free, and needs no other registers.
                mbarrier.wait(full1.index(stage), phase)
                token = warpgroup_mma(own, high, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, [token])
                mbarrier.arrive(empty.index(stage))
                acc1 = add_scaled(part, scale1, acc1)
                stage, phase = next_stage(stage, phase, STAGES)
        else:
            for _ in range(BLOCKS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.wait(full1.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)
        item = hear_item(stages, slot, slot_phase)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        next_expert, next_start, next_count, next_column = tile_of(routes, item, items, columns_of(PRODUCT))
        store_tile(
            acc0, acc1, expert, first_row, left_over, column, place, weight, home,
            weights, routes, results, PRODUCT, MMA,
        )  # fmt: skip
        expert, start, count, column = next_expert, next_start, next_count, next_column


@gluon.jit
def multiply_numbers(
    rows, weights, routes, results, stages, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr
):
    """One group's 64 rows of every tile, of 16-bit numbers: multiplied, and stored.

    Each step waits for its product: while one group waits, the other multiplies.
    """
    BLOCKS: gl.constexpr = (PRODUCT.inputs + 63) // 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    full, empty = stages.full, stages.empty
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    items = items_of(routes, PRODUCT)
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    expert, start, count, column = tile_of(routes, item, items, columns_of(PRODUCT))
    while item < items:
        first_row, left_over = start + GROUP * 64, count - GROUP * 64
        place, weight, home = homes_of(first_row, left_over, routes, results, PRODUCT)
        acc = gl.zeros([64, 256], gl.float32, MMA)
        if count > GROUP * 64:
            for block in range(BLOCKS):
                mbarrier.wait(full.index(stage), phase)
                if PRODUCT.first:
                    own = rows.index(stage).load(gl.DotOperandLayout(0, MMA, 2))
                else:
                    own = rows.index(stage)
                turned = stages.weights.index(stage).permute((1, 0))
                acc = warpgroup_mma(own, turned, acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)
        else:
            for block in range(BLOCKS):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = next_stage(stage, phase, STAGES)
        acc0, acc1 = acc.reshape([64, 2, 128]).permute([0, 2, 1]).split()
        HALF: gl.constexpr = acc0.type.layout
        item = hear_item(stages, slot, slot_phase)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        next_expert, next_start, next_count, next_column = tile_of(routes, item, items, columns_of(PRODUCT))
        store_tile(
            acc0, acc1, expert, first_row, left_over, column, place, weight, home,
            weights, routes, results, PRODUCT, HALF,
        )  # fmt: skip
        expert, start, count, column = next_expert, next_start, next_count, next_column


@gluon.jit(do_not_specialize=["routes"])
def specialized_product(
    x_descriptor, w_descriptor, rows, weights, routes, results,
    PRODUCT: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One product of all experts. Of e4m3, both sizes are multiples of 128; of 16-bit numbers, of 8."""
    KIND: gl.constexpr = rows.data.dtype.element_ty
    BITS: gl.constexpr = KIND.primitive_bitwidth
    SCALED: gl.constexpr = weights.scales is not None
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    stages = Stages(
        rows0=gl.allocate_shared_memory(KIND, [STAGES, 64, 1024 // BITS], SHARED),
        rows1=gl.allocate_shared_memory(KIND, [STAGES, 64, 1024 // BITS], SHARED),
        weights=gl.allocate_shared_memory(KIND, [STAGES, 256, 1024 // BITS], SHARED),
        by_row=gl.allocate_shared_memory(gl.float32, [STAGES, 128 if SCALED else 1], LINE),
        by_output=gl.allocate_shared_memory(gl.float32, [STAGES, 128 if SCALED else 1], LINE),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        full1=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        items=gl.allocate_shared_memory(gl.int32, [2, 1], LINE),
        told=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        heard=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for s in gl.static_range(STAGES):
        # What TMA brings, and 128 threads, where they copy.
        mbarrier.init(stages.full.index(s), count=129 if SCALED or PRODUCT.first else 1)
        mbarrier.init(stages.full1.index(s), count=1)
        mbarrier.init(stages.empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(stages.told.index(s), count=1)
        mbarrier.init(stages.heard.index(s), count=2)
    fence_async_shared()
    if EARLY:
        depends("wait")
        depends("launch_dependents")
    if SCALED:
        gl.warp_specialize([
            (multiply_codes, (stages.rows0, weights, routes, results, stages, 0, PRODUCT, STAGES)),
            (multiply_codes, (stages.rows1, weights, routes, results, stages, 1, PRODUCT, STAGES)),
            (load_tiles, (x_descriptor, w_descriptor, rows, weights, routes, stages, PRODUCT, STAGES)),
        ], [4, 4], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply_numbers, (stages.rows0, weights, routes, results, stages, 0, PRODUCT, STAGES)),
            (multiply_numbers, (stages.rows1, weights, routes, results, stages, 1, PRODUCT, STAGES)),
            (load_tiles, (x_descriptor, w_descriptor, rows, weights, routes, stages, PRODUCT, STAGES)),
        ], [4, 4], [232, 40])  # fmt: skip
