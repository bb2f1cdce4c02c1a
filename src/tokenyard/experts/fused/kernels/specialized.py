"""Both products of e4m3 for many rows, on Hopper, in Triton's Gluon dialect: warps that load, and warps that multiply.

Of a block's twelve warps four load (`load_tiles`): weights by TMA, rows of the first product, which lie anywhere, by
asynchronous copies, those of the second by TMA. Two groups of four multiply (`multiply_tiles`), each 64 rows × 256
outputs, 128 and 128 in sums of their own. The tensor cores keep fewer bits of a sum of e4m3 than float32 has, so every
128 inputs are added, scaled, in float32: while one group adds, the other multiplies, and no barrier holds both.

Blocks stay, and take tiles in turn: of one expert all rows for 256 outputs, then the next 256, so that weights are
found in the level-2 cache. Where a tile has no more than 64 rows, the second group passes it by.

Rows that were copied are written to shared memory as ordinary stores are, and read by tensor cores, which see it by
another way: whoever multiplies waits for the copies, and puts a fence between (FENCE).
"""

from __future__ import annotations

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
start_box = getattr(tma, "async_load", tma.async_copy_global_to_shared)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage behind this one; from the first on again, the barriers' phase is the other."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def item_of(tiles, max_tiles, item, ACROSS: gl.constexpr):
    """Expert, first place, rows and column of an item: all tiles of an expert for one column, then for the next."""
    near = item // ACROSS  # some tile of the same expert
    first = gl.load(tiles + 3 * max_tiles + near)
    many = gl.load(tiles + 4 * max_tiles + near)
    nth = item - first * ACROSS
    column = nth // many
    tile = tiles + first + (nth - column * many)
    return gl.load(tile), gl.load(tile + max_tiles), gl.load(tile + 2 * max_tiles), column


@gluon.jit
def lines_of(order_N, slots_R, place, TOP_K: gl.constexpr, HAS_SLOTS: gl.constexpr):
    """The lines where the rows of some places stand."""
    pair = gl.load(order_N + place)
    line = gl.where(pair < 0, ~pair, pair) // TOP_K
    if HAS_SLOTS:
        line = gl.load(slots_R + line).to(gl.int32)
    return line


@gluon.jit
def load_tiles(
    x, x_boxes, x_scales, slots_R, w_boxes, w_scales, order_N, tiles, how_many, max_tiles, x_line, x_scale_stride,
    rows0, rows1, weights0, weights1, by_row, by_output, full, full1, empty,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, EXPERTS: gl.constexpr, FIRST: gl.constexpr, TOP_K: gl.constexpr,
    HAS_SLOTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring rows, weights and scales, 128 inputs a stage. `x_line`: 16-byte units from a row to the next."""
    BLOCKS: gl.constexpr = INPUTS // 128
    LINES: gl.constexpr = 2 * OUTPUTS if FIRST else OUTPUTS  # of an expert's matrix
    STEP: gl.constexpr = 128 if FIRST else 256
    ACROSS: gl.constexpr = (OUTPUTS + STEP - 1) // STEP
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))
    v = gl.arange(0, 128, layout=ONE)
    total = gl.load(how_many) * ACROSS
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, count, column = item_of(tiles, max_tiles, item, ACROSS)
        place = start + gl.minimum(v, count - 1)
        if FIRST:
            # In units of 16 bytes they fit into 32 bits: pointers are made at each step, and take no registers.
            near = start + gl.minimum(r, count - 1)
            far = start + gl.minimum(r + 64, count - 1)
            line0 = lines_of(order_N, slots_R, near, TOP_K, HAS_SLOTS) * x_line
            line1 = lines_of(order_N, slots_R, far, TOP_K, HAS_SLOTS) * x_line
            # Rows that are not there are zero: they cost neither memory nor power.
            is_row0 = (r < count)[:, None]
            is_row1 = (r + 64 < count)[:, None]
            place = lines_of(order_N, slots_R, place, TOP_K, HAS_SLOTS)
        row_scale = x_scales + place.to(gl.int64) * x_scale_stride
        output0 = expert * LINES + column * STEP
        output1 = output0 + (OUTPUTS if FIRST else 128)
        # Behind the last output of all (of the second product alone) weights are zero, and have the last scale.
        scale_line = gl.where(v < 64, output0, gl.minimum(output1, EXPERTS * LINES - 1)) // 128
        output_scale = w_scales + scale_line * BLOCKS
        for block in range(BLOCKS):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if FIRST:
                mbarrier.expect(bar, 128 * 128)
            else:
                mbarrier.expect(bar, 2 * 128 * 128)
                start_box(x_boxes, [start, block * 128], bar, rows0.index(stage))
                start_box(x_boxes, [start + 64, block * 128], bar, rows1.index(stage))
            start_box(w_boxes, [output0, block * 128], bar, weights0.index(stage))
            if FIRST:
                near_line = x + (block * 128 + line0.to(gl.int64) * 16)[:, None] + c[None, :]
                far_line = x + (block * 128 + line1.to(gl.int64) * 16)[:, None] + c[None, :]
                start_copy(rows0.index(stage), near_line, mask=is_row0)
                start_copy(rows1.index(stage), far_line, mask=is_row1)
            start_copy(by_row.index(stage), row_scale + block)
            start_copy(by_output.index(stage), output_scale + block)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            mbarrier.expect(full1.index(stage), 128 * 128)
            start_box(w_boxes, [output1, block * 128], full1.index(stage), weights1.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


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
    """`digits.quantize` of rows of 128 numbers, but that they are multiplied with the inverse of their scale."""
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
def store_codes(
    gate, up, expert, start, left_over, column, bias, weights_N, order_N, inner, inner_scales,
    OUTPUTS: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr, POWERS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """64 rows of the first product, activated and quantized, into `inner` at their places."""
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    STORE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    t = gl.arange(0, 64, layout=ROW)
    if WEIGHTED:
        pair = gl.load(order_N + start + t, mask=t < left_over, other=0)
        pair = gl.where(pair < 0, ~pair, pair)
        weight = gl.load(weights_N + pair, mask=t < left_over, other=0.0).to(gl.float32)[:, None]
        gate, up = gate * weight, up * weight
    if HAS_BIAS:
        own = bias + expert.to(gl.int64) * (2 * OUTPUTS) + column * 128
        i = gl.arange(0, 128, layout=gl.SliceLayout(0, MMA))
        gate += gl.load(own + i).to(gl.float32)[None, :]
        up += gl.load(own + OUTPUTS + i).to(gl.float32)[None, :]
    code, scale = quantize(activate(gate, up, ACTIVATION, LIMIT, ALPHA, SHIFT), POWERS)
    gl.store(inner_scales + (start + t) * (OUTPUTS // 128) + column, scale, mask=t < left_over)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, STORE))
    where = inner + (start + r).to(gl.int64)[:, None] * OUTPUTS + (column * 128 + c)[None, :]
    gl.store(where, gl.convert_layout(code, STORE), mask=(r < left_over)[:, None])


@gluon.jit
def deliver(
    value, expert, start, left_over, first, bias, weights_N, order_N, left, out, out_slots_R, out_stride,
    OUTPUTS: gl.constexpr, TOP_K: gl.constexpr, HAS_OUT_SLOTS: gl.constexpr, HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr, FINALIZE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """64 rows × 128 outputs of the second product: alone in their row, weighted, into `out`; else into `left`."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if HAS_BIAS:
        n = gl.arange(0, 128, layout=gl.SliceLayout(0, MMA))
        value += gl.load(bias + expert.to(gl.int64) * OUTPUTS + first + n).to(gl.float32)[None, :]
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, STORE))
    is_row = r < left_over
    place = gl.load(order_N + start + r, mask=is_row, other=0)
    pair = gl.where(place < 0, ~place, place)
    row = left + pair.to(gl.int64) * OUTPUTS + first
    if FINALIZE:
        line = pair // TOP_K
        if HAS_OUT_SLOTS:
            line = gl.load(out_slots_R + line, mask=is_row, other=0)
        home = out + line.to(gl.int64) * out_stride + first
        alone = is_row & (place >= 0)
        is_row = is_row & (place < 0)
    # In halves: what threads exchange takes 8 KB.
    low, high = value.to(left.dtype.element_ty).reshape([64, 2, 64]).permute([0, 2, 1]).split()
    for half in gl.static_range(2):
        wide = gl.convert_layout(low if half == 0 else high, STORE)
        gl.store(row[:, None] + (half * 64 + c)[None, :], wide, mask=is_row[:, None])
        if FINALIZE:
            weighted = wide.to(gl.float32)
            if WEIGHTED:
                weighted *= gl.load(weights_N + pair, mask=alone, other=0.0).to(gl.float32)[:, None]
            at_home = home[:, None] + (half * 64 + c)[None, :]
            gl.store(at_home, weighted.to(out.dtype.element_ty), mask=alone[:, None])


@gluon.jit
def multiply_tiles(
    rows, weights0, weights1, by_row, by_output, full, full1, empty,
    bias, weights_N, inner, inner_scales, left, out, out_slots_R, out_stride,
    order_N, tiles, how_many, max_tiles,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GROUP: gl.constexpr, FIRST: gl.constexpr, TOP_K: gl.constexpr,
    HAS_OUT_SLOTS: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, FINALIZE: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr, POWERS: gl.constexpr,
    FENCE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group's 64 rows of every tile: multiplied, and stored."""
    BLOCKS: gl.constexpr = INPUTS // 128
    STEP: gl.constexpr = 128 if FIRST else 256
    ACROSS: gl.constexpr = (OUTPUTS + STEP - 1) // STEP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    part = gl.zeros([64, 128], gl.float32, MMA)
    total = gl.load(how_many) * ACROSS
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, count, column = item_of(tiles, max_tiles, item, ACROSS)
        acc0 = gl.zeros([64, 128], gl.float32, MMA)
        acc1 = gl.zeros([64, 128], gl.float32, MMA)
        if count > GROUP * 64:
            for _ in range(BLOCKS):
                mbarrier.wait(full.index(stage), phase)
                if FENCE:
                    fence_async_shared()
                own = rows.index(stage)
                token = warpgroup_mma(
                    own, weights0.index(stage).permute((1, 0)), part, use_acc=False, is_async=True
                )
                scale = by_row.index(stage).slice(GROUP * 64, 64).load(ROW)
                scale0 = scale * by_output.index(stage).slice(0, 64).load(ROW)
                scale1 = scale * by_output.index(stage).slice(64, 64).load(ROW)
                part = warpgroup_mma_wait(0, [token])
                acc0 = add_scaled(part, scale0, acc0)
                # A branch: so the next product is not started before `part` is free, and needs no other registers.
                mbarrier.wait(full1.index(stage), phase)
                token = warpgroup_mma(
                    own, weights1.index(stage).permute((1, 0)), part, use_acc=False, is_async=True
                )
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
        first_row, left_over = start + GROUP * 64, count - GROUP * 64
        if FIRST:
            store_codes(
                acc0, acc1, expert, first_row, left_over, column, bias, weights_N, order_N, inner, inner_scales,
                OUTPUTS, HAS_BIAS, WEIGHTED, ACTIVATION, LIMIT, ALPHA, SHIFT, POWERS, MMA,
            )  # fmt: skip
        else:
            deliver(
                acc0, expert, first_row, left_over, column * 256, bias, weights_N, order_N,
                left, out, out_slots_R, out_stride,
                OUTPUTS, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, MMA,
            )  # fmt: skip
            if OUTPUTS % 256 == 0 or column * 256 + 128 < OUTPUTS:
                deliver(
                    acc1, expert, first_row, left_over, column * 256 + 128, bias, weights_N, order_N,
                    left, out, out_slots_R, out_stride,
                    OUTPUTS, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE, MMA,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["max_tiles"])
def specialized_product(
    x, x_boxes, x_scales, slots_R, w_boxes, w_scales, bias, weights_N, inner, inner_scales,
    left, out, out_slots_R, out_stride, order_N, tiles, how_many, max_tiles, x_line, x_scale_stride,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, EXPERTS: gl.constexpr, FIRST: gl.constexpr, TOP_K: gl.constexpr,
    HAS_SLOTS: gl.constexpr, HAS_OUT_SLOTS: gl.constexpr, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
    FINALIZE: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SHIFT: gl.constexpr, POWERS: gl.constexpr,
    FENCE: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One product of all experts. OUTPUTS: I of the first, H of the second; both sizes are multiples of 128."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], SHARED)
    rows1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], SHARED)
    weights0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], SHARED)
    weights1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], SHARED)
    by_row = gl.allocate_shared_memory(gl.float32, [STAGES, 128], LINE)
    by_output = gl.allocate_shared_memory(gl.float32, [STAGES, 128], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129)  # 128 threads that copy, and what TMA brings
        mbarrier.init(full1.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    if EARLY:
        depends("wait")
        depends("launch_dependents")
    gl.warp_specialize([
        (multiply_tiles, (
            rows0, weights0, weights1, by_row, by_output, full, full1, empty,
            bias, weights_N, inner, inner_scales, left, out, out_slots_R, out_stride,
            order_N, tiles, how_many, max_tiles,
            INPUTS, OUTPUTS, 0, FIRST, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE,
            ACTIVATION, LIMIT, ALPHA, SHIFT, POWERS, FENCE, STAGES)),
        (multiply_tiles, (
            rows1, weights0, weights1, by_row, by_output, full, full1, empty,
            bias, weights_N, inner, inner_scales, left, out, out_slots_R, out_stride,
            order_N, tiles, how_many, max_tiles,
            INPUTS, OUTPUTS, 1, FIRST, TOP_K, HAS_OUT_SLOTS, HAS_BIAS, WEIGHTED, FINALIZE,
            ACTIVATION, LIMIT, ALPHA, SHIFT, POWERS, FENCE, STAGES)),
        (load_tiles, (
            x, x_boxes, x_scales, slots_R, w_boxes, w_scales, order_N, tiles, how_many, max_tiles,
            x_line, x_scale_stride, rows0, rows1, weights0, weights1, by_row, by_output, full, full1, empty,
            INPUTS, OUTPUTS, EXPERTS, FIRST, TOP_K, HAS_SLOTS, STAGES)),
    ], [4, 4], [232, 40])  # fmt: skip
