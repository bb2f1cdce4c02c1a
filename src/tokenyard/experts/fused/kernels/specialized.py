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
    tile: int  # the most rows of a tile: 128, or fewer, which are all turned
    turned: tuple[int, ...]  # tiles of at most so many rows are turned: weights × rows
    step: int  # what an item makes: 128 columns of gates and ups in the first product, 128 or 256 outputs in the second
    deep: bool  # 128 outputs: a stage has twice the inputs of half as many


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
    items: Any  # that were taken, and where they are: a ring of two
    told: Any
    heard: Any
    largest: Any  # numbers of the rows of a turned tile, found by each group: a ring of two
    found: Any


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage behind this one; from the first on again, the barriers' phase is the other."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.constexpr_function
def columns_of(product):
    """How many items a tile has."""
    return -(-product.outputs // product.step)


@gluon.jit
def tile_of(routes, item, items, across):
    """Expert, first place, rows and column of an item: all tiles of an expert for one column, then for the next.

    The tile's number comes last. Behind the last item there is none.
    """
    there = item < items
    near = item // across  # some tile of the same expert
    first = gl.load(routes.tiles + 3 * routes.max_tiles + near, mask=there, other=0)
    many = gl.load(routes.tiles + 4 * routes.max_tiles + near, mask=there, other=1)
    nth = item - first * across
    column = nth // many
    tile = first + (nth - column * many)
    where = routes.tiles + tile
    expert = gl.load(where, mask=there, other=0)
    start = gl.load(where + routes.max_tiles, mask=there, other=0)
    count = gl.load(where + 2 * routes.max_tiles, mask=there, other=0)
    return expert, start, count, column, tile


@gluon.jit
def place_of(routes, item, tiles, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """What `tile_of` says of an item: those of the first product stand before those of the second."""
    ACROSS: gl.constexpr = columns_of(FIRST)
    BEHIND: gl.constexpr = columns_of(SECOND)
    own, across, items = item, gl.to_tensor(ACROSS), tiles * ACROSS
    if item >= items:
        own, across, items = item - items, gl.to_tensor(BEHIND), tiles * BEHIND
    return tile_of(routes, own, items, across)


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
def tell_item(stages, slot, phase, item, expert, start, count, column, tile):
    """Tell the warps that multiply of an item that was taken, and where it is."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nth = gl.arange(0, 8, layout=NUMBERS)
    told = gl.where(nth == 0, item, gl.where(nth == 1, expert, gl.where(nth == 2, start, count)))
    told = gl.where(nth == 4, column, gl.where(nth == 5, tile, told))
    mbarrier.wait(stages.heard.index(slot), phase)
    stages.items.index(slot).store(told)
    synchronize()
    mbarrier.arrive(stages.told.index(slot))


@gluon.jit
def told_number(told, nth: gl.constexpr):
    """One of the numbers that were told; none is below zero."""
    return gl.max(gl.where(gl.arange(0, 8, layout=told.type.layout) == nth, told, 0), axis=0)


@gluon.jit
def hear_place(stages, slot, phase):
    """The item that was taken, and where it is."""
    mbarrier.wait(stages.told.index(slot), phase)
    told = stages.items.index(slot).load(gl.BlockedLayout([1], [32], [4], [0]))
    item, expert, start = told_number(told, 0), told_number(told, 1), told_number(told, 2)
    count, column, tile = told_number(told, 3), told_number(told, 4), told_number(told, 5)
    synchronize()
    mbarrier.arrive(stages.heard.index(slot))
    return item, expert, start, count, column, tile


@gluon.jit
def done_with(routes, tile):
    """Where it is counted how often a group has stored a part of a tile of the first product. The sort zeroed it."""
    return routes.tiles + 5 * routes.max_tiles + tile


@gluon.jit
def await_tile(routes, tile, PARTS: gl.constexpr):
    """Wait until all of a tile of the first product is stored; TMA sees it then.

    Items are taken in order, those of the first product before those of the second: whoever has to store it is at work,
    and waits for nobody.
    """
    counter = done_with(routes, tile)
    found = gl.atomic_add(counter, 0, sem="acquire")
    while found < PARTS:
        found = gl.atomic_add(counter, 0, sem="acquire")
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


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
    """Let TMA bring the weights of a stage, if they are wanted; say that it will bring rows, too, of two runs if `more`."""
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
    x_descriptor, w_descriptor, rows, weights, routes, stages, expert, start, count, column, tile, tiles,
    stage, phase, slot, slot_phase, PRODUCT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the rows, weights and scales of an item, 128 bytes of inputs a stage, and take the next one meanwhile."""
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
    v = gl.arange(0, 128, layout=ONE)
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
        await_tile(routes, tile, 2 * columns_of(FIRST))
    place = start + gl.minimum(v % 64 if PRODUCT.deep else v, count - 1)
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
        scale_line = gl.where((v < 64) | PRODUCT.deep, output0, gl.minimum(output1, last)) // 128
        output_scale = weights.scales + scale_line * SCALES
    item, next_expert, next_start, next_count, next_column, next_tile = tile, expert, start, count, column, tile
    for block in range(BLOCKS):
        if block == TAKE:
            # The sort has set the counter to zero. A block's first item has the block's own number.
            item = gl.num_programs(0) + gl.atomic_add(routes.how_many + 1, 1, sem="relaxed")
            next_expert, next_start, next_count, next_column, next_tile = place_of(
                routes, item, tiles, FIRST, SECOND
            )
        mbarrier.wait(stages.empty.index(stage), phase)
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
            if PRODUCT.deep:  # the second half of the inputs has scales of its own; behind the last weights are zero
                nth = gl.minimum(2 * block + v // 64, SCALES - 1)
                start_copy(stages.by_row.index(stage), row_scale + nth)
                start_copy(stages.by_output.index(stage), output_scale + nth)
            else:
                start_copy(stages.by_row.index(stage), row_scale + block)
                start_copy(stages.by_output.index(stage), output_scale + block)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        stage, phase = next_stage(stage, phase, STAGES)
    tell_item(stages, slot, slot_phase, item, next_expert, next_start, next_count, next_column, next_tile)
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
    item = gl.program_id(0)
    expert, start, count, column, tile = place_of(routes, item, tiles, FIRST, SECOND)
    while item < items:
        if item < tiles * columns_of(FIRST):
            item, expert, start, count, column, tile, stage, phase = load_item(
                w13_descriptor, w13_descriptor, rows, weights13, routes, stages, expert, start, count, column, tile,
                tiles, stage, phase, slot, slot_phase, FIRST, FIRST, SECOND, STAGES,
            )  # fmt: skip
        else:
            item, expert, start, count, column, tile, stage, phase = load_item(
                inner_descriptor, w2_descriptor, between, weights2, routes, stages, expert, start, count, column, tile,
                tiles, stage, phase, slot, slot_phase, SECOND, FIRST, SECOND, STAGES,
            )  # fmt: skip
        slot, slot_phase = next_stage(slot, slot_phase, 2)


@gluon.jit
def add_scaled(part, scale, acc):
    """acc + part * scale, where it is written: neither LLVM nor ptxas moves it behind the next wait."""
    s, _ = gl.broadcast(scale, part)
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
def largest_of(value):
    """The bits of the largest magnitude of every row."""
    return gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@gluon.jit
def largest_of_both(largest, stages, turn, GROUP: gl.constexpr):
    """The larger of what both groups have found for each row of their `turn`-th turned tile."""
    ROWS: gl.constexpr = largest.shape[0]
    slot = turn % 2
    stages.largest.index(2 * slot + GROUP).slice(0, ROWS).store(largest)
    synchronize()
    # Both arrive here, and both wait: no group is two tiles ahead, and overwrites what the other has yet to read.
    mbarrier.arrive(stages.found.index(slot))
    mbarrier.wait(stages.found.index(slot), turn // 2 % 2)
    other = stages.largest.index(2 * slot + 1 - GROUP).slice(0, ROWS).load(largest.type.layout)
    return gl.maximum(largest, other)


@gluon.jit
def quantize(value, largest, POWERS: gl.constexpr):
    """`fp8_split.quantize` of rows of 128 numbers, but that they are multiplied with the inverse of their scale.

    `largest`: the bits of a row's largest magnitude.
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
def store_activated(
    gate, up, expert, start, left_over, column, turn, weights, routes, results, stages,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """Rows × 128 columns of the first product, activated, into `inner` at their places: codes, or numbers.

    Of a turned tile each group has 64 of the columns.
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
    value = activate(gate, up, PRODUCT.activation, PRODUCT.limit, PRODUCT.alpha, PRODUCT.shift)
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


# Rows of results, 64 outputs at a time, eight a thread.
STORE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def halves_of(value):
    """Of 128 columns 64 and 64: what threads exchange takes 8 KB then. Of 64 columns all of them, twice."""
    if value.shape[1] == 128:
        low, high = value.reshape([value.shape[0], 2, 64]).permute([0, 2, 1]).split()
        return low, high
    else:
        return value, value


@gluon.jit
def homes_of(start, left_over, routes, results, PRODUCT: gl.constexpr, ROWS: gl.constexpr):
    """Of some rows of the second product: what stands in `order_N`, weights, and lines of `out`.

    They are asked for before a tile is multiplied, and needed behind it.
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
def deliver(
    value, expert, left_over, first, place, weight, home, weights, results, PRODUCT: gl.constexpr
):  # fmt: skip
    """Store rows × 64 or 128 outputs of the second product.

    Rows with one expert here go weighted into `out`, others into `partial_sums`.
    """
    OUTPUTS: gl.constexpr = PRODUCT.outputs
    ROWS: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    SUMS: gl.constexpr = value.type.layout
    partial_sums, out = results.partial_sums, results.out
    if weights.bias is not None:
        n = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
        own = weights.bias + expert.to(gl.int64) * OUTPUTS + n
        value += gl.load(own, mask=n < OUTPUTS, other=0.0).to(gl.float32)[None, :]
    is_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE)) < left_over
    row = partial_sums + gl.where(place < 0, ~place, place).to(gl.int64) * OUTPUTS
    if PRODUCT.finalize:
        alone = is_row & (place >= 0)
        is_row = is_row & (place < 0)
        at_home = out + home.to(gl.int64) * results.out_stride
    low, high = halves_of(value.to(partial_sums.dtype.element_ty))
    for half in gl.static_range(COLUMNS // 64):
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
    sums0, sums1, expert, start, left_over, column, turn, homes, weights, routes, results, stages,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """What is done with the sums of some rows × (128 + 128) outputs; of a turned tile, with a group's 64 + 64."""
    if PRODUCT.first:
        store_activated(
            sums0, sums1, expert, start, left_over, column, turn, weights, routes, results, stages, GROUP, PRODUCT
        )
    else:
        place, weight, home = homes
        first = column * PRODUCT.step
        own = first + (GROUP * 64 if sums0.shape[1] == 64 else 0)
        deliver(sums0, expert, left_over, own, place, weight, home, weights, results, PRODUCT)
        if PRODUCT.deep:
            pass
        elif PRODUCT.outputs % 256 == 0 or first + 128 < PRODUCT.outputs:
            deliver(sums1, expert, left_over, own + 128, place, weight, home, weights, results, PRODUCT)


@gluon.jit
def turned_operands(stages, stage, GROUP: gl.constexpr, PRODUCT: gl.constexpr, ROWS: gl.constexpr):
    """A group's 64 + 64 lines of a stage's weights, and for both the rows, turned."""
    low = stages.weights.index(stage).slice(GROUP * 64, 64)
    high = stages.weights.index(stage).slice(128 + GROUP * 64, 64)
    near = stages.rows0.index(stage).slice(0, ROWS).permute((1, 0))
    far = near
    if PRODUCT.deep:
        far = stages.rows1.index(stage).slice(0, ROWS).permute((1, 0))
    return low, high, near, far


@gluon.jit
def turned_codes(
    stages, stage, phase, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr
):
    """Sums `[rows, 64]` and `[rows, 64]` of a tile of few rows of e4m3; of a deep product, the same ones twice."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    BY_LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    BLOCKS: gl.constexpr = PRODUCT.inputs // 128
    nothing = gl.zeros([64, ROWS], gl.float32, SUMS)
    acc0, acc1 = nothing, nothing
    for _ in range((BLOCKS + 1) // 2 if PRODUCT.deep else BLOCKS):
        mbarrier.wait(stages.full.index(stage), phase)
        if PRODUCT.first:
            fence_async_shared()
        low, high, near, far = turned_operands(stages, stage, GROUP, PRODUCT, ROWS)
        token0 = warpgroup_mma(low, near, nothing, use_acc=False, is_async=True)
        mbarrier.wait(stages.full1.index(stage), phase)
        token1 = warpgroup_mma(high, far, nothing, use_acc=False, is_async=True)
        by_row = stages.by_row.index(stage).slice(0, ROWS).load(BY_ROW)[None, :]
        scale0 = by_row * stages.by_output.index(stage).slice(0, 64).load(BY_LINE)[:, None]
        if PRODUCT.deep:
            by_row = stages.by_row.index(stage).slice(64, ROWS).load(BY_ROW)[None, :]
        scale1 = by_row * stages.by_output.index(stage).slice(64, 64).load(BY_LINE)[:, None]
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
def turned_numbers(
    stages, stage, phase, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr
):
    """Sums `[rows, 64]` and `[rows, 64]` of a tile of few rows of 16-bit numbers; of a deep product, the same ones twice."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BLOCKS: gl.constexpr = (PRODUCT.inputs + 63) // 64
    acc0 = gl.zeros([64, ROWS], gl.float32, SUMS)
    acc1 = gl.zeros([64, ROWS], gl.float32, SUMS)
    for _ in range((BLOCKS + 1) // 2 if PRODUCT.deep else BLOCKS):
        mbarrier.wait(stages.full.index(stage), phase)
        if PRODUCT.first:
            fence_async_shared()
        low, high, near, far = turned_operands(stages, stage, GROUP, PRODUCT, ROWS)
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
def wide_codes(rows, stages, stage, phase, count, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Sums `[64, 128]` and `[64, 128]` of a group's rows of e4m3."""
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
            scale0 = scale * stages.by_output.index(stage).slice(0, 64).load(ROW)
            scale1 = scale * stages.by_output.index(stage).slice(64, 64).load(ROW)
            part = warpgroup_mma_wait(0, [token])
            acc0 = add_scaled(part, scale0[:, None], acc0)
            # A branch: so the next product is not started before `part` is free, and needs no other registers.
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
def wide_numbers(rows, stages, stage, phase, count, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Sums `[64, 128]` and `[64, 128]` of a group's rows of 16-bit numbers.

    Each step waits for its product: while one group waits, the other multiplies.
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
            turned = stages.weights.index(stage).permute((1, 0))
            acc = warpgroup_mma(own, turned, acc, is_async=True)
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
    turned: gl.constexpr, wide: gl.constexpr, GROUP: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group's part of an item, multiplied, and stored: 64 rows × 256 outputs, or few rows × 128."""
    MOST: gl.constexpr = PRODUCT.turned[-1] if len(PRODUCT.turned) else 0
    for n in gl.static_range(len(PRODUCT.turned)):
        if (count <= PRODUCT.turned[n]) & (count > (PRODUCT.turned[n - 1] if n else 0)):
            homes = homes_of(start, count, routes, results, PRODUCT, PRODUCT.turned[n])
            acc0, acc1, stage, phase = turned(stages, stage, phase, GROUP, PRODUCT, STAGES, PRODUCT.turned[n])
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
    rows, weights13, weights2, routes, results, stages, turned: gl.constexpr, wide: gl.constexpr,
    GROUP: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group's part of every item of this block."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)  # how many tiles of the first product were turned
    tiles = gl.load(routes.how_many)
    items = tiles * (columns_of(FIRST) + columns_of(SECOND))
    item = gl.program_id(0)
    expert, start, count, column, tile = place_of(routes, item, tiles, FIRST, SECOND)
    while item < items:
        if item < tiles * columns_of(FIRST):
            stage, phase, turn = multiply_item(
                rows, weights13, routes, results, stages, expert, start, count, column, stage, phase, turn,
                turned, wide, GROUP, FIRST, STAGES,
            )  # fmt: skip
            synchronize()
            gl.atomic_add(done_with(routes, tile), 1, sem="release")
        else:
            stage, phase, turn = multiply_item(
                rows, weights2, routes, results, stages, expert, start, count, column, stage, phase, turn,
                turned, wide, GROUP, SECOND, STAGES,
            )  # fmt: skip
        item, expert, start, count, column, tile = hear_place(stages, slot, slot_phase)
        slot, slot_phase = next_stage(slot, slot_phase, 2)


@gluon.jit(do_not_specialize=["routes"])
def specialized_products(
    inner_descriptor, w13_descriptor, w2_descriptor, rows, between, weights13, weights2, routes, results,
    FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Both products of all experts. Of e4m3, both sizes are multiples of 128; of 16-bit numbers, of 8."""
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
        by_row=gl.allocate_shared_memory(gl.float32, [STAGES, 128 if SCALED else 1], LINE),
        by_output=gl.allocate_shared_memory(gl.float32, [STAGES, 128 if SCALED else 1], LINE),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        full1=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        items=gl.allocate_shared_memory(gl.int32, [2, 8], LINE),
        told=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        heard=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        largest=gl.allocate_shared_memory(gl.int32, [4, 64], LINE),
        found=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(stages.full.index(s), count=129)  # what TMA brings, and 128 threads
        mbarrier.init(stages.full1.index(s), count=1)
        mbarrier.init(stages.empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(stages.told.index(s), count=1)
        mbarrier.init(stages.heard.index(s), count=2)
        mbarrier.init(stages.found.index(s), count=2)
    fence_async_shared()
    if EARLY:
        depends("wait")
        depends("launch_dependents")
    turned: gl.constexpr = turned_codes if SCALED else turned_numbers
    wide: gl.constexpr = wide_codes if SCALED else wide_numbers
    gl.warp_specialize([
        (multiply_items, (near, weights13, weights2, routes, results, stages, turned, wide, 0, FIRST, SECOND, STAGES)),
        (multiply_items, (far, weights13, weights2, routes, results, stages, turned, wide, 1, FIRST, SECOND, STAGES)),
        (load_items, (inner_descriptor, w13_descriptor, w2_descriptor, rows, between, weights13, weights2, routes,
                      stages, FIRST, SECOND, STAGES)),
    ], [4, 4], [232, 40] if TILE == 128 else [200, 104])  # fmt: skip
