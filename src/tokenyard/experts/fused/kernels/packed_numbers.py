"""The two products of packed 4-bit weights and rows of bf16, on Hopper's tensor cores, in Triton's Gluon dialect.

It computes what `kernels.packed` does, bit for bit, with specialized warps as in `kernels.packed_codes`. Blocks are
persistent, and take items from a counter: 64 · units · groups outputs × a tile of rows.

- `load_stages` (four warps) loads 128 inputs a stage: words by TMA, and scales by copies. Rows of the first product,
  which are scattered, are loaded by copies, and those of the second, which are contiguous, by TMA. In the second
  product the warps start the loads of words and scales of all stages before they wait for the rows of the first tile.
- `multiply_items` (groups of four warps): each group decodes the weights of its own 64 · units outputs into the
  register operand, 64 inputs at a time, while the tensor cores multiply the previous 64 inputs. There are two sets of
  operand registers, and a group waits only for the older product. The tensor cores add up all inputs.

A tile is computed with the smallest of a few widths that holds its rows; the loop is compiled for each width.
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

from tokenyard.experts.fused.kernels.items import (
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
from tokenyard.experts.fused.kernels.packed import (
    INT4,
    depends,
    finish_rows,
    scale_elements,
    start_copy,
    sums_layout,
)
from tokenyard.experts.fused.kernels.specialized_loads import lines_of, start_tma
from tokenyard.experts.fused.kernels.unpacking import decode_pairs, pair_operand

# Groups of four warps that multiply. C's experts with 32 rows each took 688 µs with three, 711 to 851 with others.
GROUPS = gl.constexpr(3)


class Tiles(NamedTuple):
    """The tiles of a product, from `tile_configs.NumbersTileConfig`."""

    units: int  # units of 64 outputs for each group of four warps
    widths: tuple[int, ...]  # rows of a tile
    run: int  # rows that are loaded together
    stages: int


class Stages(NamedTuple):
    """The pipeline stages in shared memory: loaded data, and barriers that say that a stage is full, or empty again."""

    rows: Any  # rows for 64 inputs, and for the next 64
    words: Any  # words of 64 outputs, and of the next
    scales: Any
    full: Any
    empty: Any
    items: Any  # items that were taken: a ring of two
    sent: Any
    received: Any
    stored: Any  # barriers that all groups have stored an item: a ring of two


@gluon.constexpr_function
def units_of(tiles):
    """How many units of 64 outputs an item has."""
    return GROUPS.value * tiles.units


@gluon.constexpr_function
def across_of(product, tiles):
    """How many items a tile has along its outputs."""
    return -(-product.lines // (64 * units_of(tiles)))


@gluon.constexpr_function
def room_for(rows):
    """Rows of a tile, rounded up to a power of two, as shapes in shared memory must be."""
    return 1 << (rows - 1).bit_length()


@gluon.constexpr_function
def runs_of(tiles):
    """The most runs of rows of a tile."""
    return -(-tiles.widths[-1] // tiles.run)


@gluon.jit
def load_weights(
    w_descriptor, weights, stages, stage, unit, step, is_last, PRODUCT: gl.constexpr, TILES: gl.constexpr
):
    """Load the words and scales of an item for 128 inputs, except those after the last outputs of an expert."""
    STEPS: gl.constexpr = PRODUCT.width // 128
    UNITS: gl.constexpr = units_of(TILES)
    # Units of the last item of a tile.
    LEFT: gl.constexpr = PRODUCT.lines // 64 - (across_of(PRODUCT, TILES) - 1) * UNITS
    E: gl.constexpr = scale_elements(PRODUCT.kind)
    bar = stages.full.index(stage)
    if LEFT == UNITS:
        mbarrier.expect(bar, 4096 * UNITS)
    else:
        mbarrier.expect(bar, 4096 * UNITS, pred=is_last == 0)
        mbarrier.expect(bar, 4096 * LEFT, pred=is_last)
    for n in gl.static_range(UNITS):
        line = (unit + n) * (STEPS * 32) + step * 32
        to = stages.words[n].index(stage)
        if n < LEFT:
            start_tma(w_descriptor, [line, 0], bar, to)
        else:
            start_tma(w_descriptor, [line, 0], bar, to, pred=is_last == 0)
    # 16 bytes for a pair of outputs, 8 of mxfp4.
    PAIRS: gl.constexpr = gl.BlockedLayout([1, E], [32, 1], [4, 1], [1, 0])
    pair = gl.arange(0, 32, layout=gl.SliceLayout(1, PAIRS))[:, None] * E
    pair += gl.arange(0, E, layout=gl.SliceLayout(0, PAIRS))[None, :]
    scales = weights.scales + (unit.to(gl.int64) * STEPS + step) * (32 * E)
    for n in gl.static_range(UNITS):
        to = stages.scales[n].index(stage)
        if n < LEFT:
            start_copy(to, scales + n * STEPS * 32 * E + pair)
        else:
            start_copy(to, scales + n * STEPS * 32 * E + pair, mask=(pair >= 0) & (is_last == 0))


@gluon.jit
def gather_rows(rows, lines, stages, stage, step, count, PRODUCT: gl.constexpr, TILES: gl.constexpr):
    """Copy 128 inputs of a tile's rows from their lines in memory; zeros after the last row and input."""
    RUN: gl.constexpr = TILES.run
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, RUN, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    for n in gl.static_range(len(lines)):
        if count > n * RUN:
            is_row = (r + n * RUN < count)[:, None]
            line = rows.data + (lines[n].to(gl.int64) * 8 + step * 128)[:, None] + c[None, :]
            for half in gl.static_range(2):
                there = is_row
                if PRODUCT.inputs % 128 != 0:
                    there = is_row & (step * 128 + half * 64 + c < PRODUCT.inputs)[None, :]
                start_copy(stages.rows[half].index(stage).slice(n * RUN, RUN), line + half * 64, mask=there)


@gluon.jit
def fetch_rows(x_descriptor, stages, stage, start, step, count, TILES: gl.constexpr):
    """Load 128 inputs of a tile's rows, which are contiguous, by TMA; zeros after the last input."""
    RUN: gl.constexpr = TILES.run
    RUNS: gl.constexpr = runs_of(TILES)
    bar = stages.full.index(stage)
    for n in gl.static_range(RUNS):
        mbarrier.expect(bar, 256 * RUN * (n + 1), pred=(count + RUN - 1) // RUN == n + 1)
    for n in gl.static_range(RUNS):
        for half in gl.static_range(2):
            to = stages.rows[half].index(stage).slice(n * RUN, RUN)
            start_tma(x_descriptor, [start + n * RUN, step * 128 + half * 64], bar, to, pred=count > n * RUN)


@gluon.jit
def load_stages(
    x_descriptor, w_descriptor, rows, weights, routes, tiles, stages,
    PRODUCT: gl.constexpr, BEFORE: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Load rows, words and scales, 128 inputs a stage, for all items of this block.

    In the second product wait for the rows of each tile. Count each item when the next one is multiplied.
    """
    STEPS: gl.constexpr = PRODUCT.width // 128
    ACROSS: gl.constexpr = across_of(PRODUCT, TILES)
    UNITS: gl.constexpr = units_of(TILES)
    STAGES: gl.constexpr = TILES.stages
    RUN: gl.constexpr = TILES.run
    RUNS: gl.constexpr = runs_of(TILES)
    AHEAD: gl.constexpr = 0 if PRODUCT.first else min(STAGES, STEPS)
    # The step in which the first stage of an item is free again, so all groups have stored the previous item.
    COUNT: gl.constexpr = min(STAGES, STEPS - 1)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, RUN, layout=gl.SliceLayout(1, COPY))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    items = tiles * ACROSS
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(1)
    expert, start, count, column, tile = tile_of(routes, item, items, ACROSS)
    uncounted = gl.to_tensor(-1)  # the counter of the previous item
    ahead = gl.to_tensor(0)  # stages whose weights are being loaded already
    if AHEAD > 0:
        unit = expert * (PRODUCT.lines // 64) + column * UNITS
        for step in range(gl.where(item < items, AHEAD, 0)):
            load_weights(
                w_descriptor, weights, stages, step, unit, step, column == ACROSS - 1, PRODUCT, TILES
            )
            async_copy.mbarrier_arrive(stages.full.index(step), increment_count=False)
        ahead += AHEAD
    while item < items:
        item = take_item(routes, stages, slot, slot_phase, PRODUCT)
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        next_expert, next_start, next_count, next_column, next_tile = tile_of(routes, item, items, ACROSS)
        if not PRODUCT.first:
            await_items(routes.tiles + tile_counter(routes, tile), enough_for(count, BEFORE))
        lines = ()
        if PRODUCT.first:
            for n in gl.static_range(RUNS):
                # Offsets in units of 16 bytes fit into 32 bits. Pointers are computed at each step, to save registers.
                place = start + gl.minimum(r + n * RUN, count - 1)
                lines = lines + (lines_of(rows, routes, place, PRODUCT.top_k) * (rows.stride // 8),)
        unit = expert * (PRODUCT.lines // 64) + column * UNITS
        for step in range(STEPS):
            mbarrier.wait(stages.empty.index(stage), phase)
            if (step == COUNT) & (uncounted >= 0):
                count_item(routes, stages, uncounted, slot, slot_phase)
            if PRODUCT.first:
                load_weights(
                    w_descriptor, weights, stages, stage, unit, step, column == ACROSS - 1, PRODUCT, TILES
                )
                gather_rows(rows, lines, stages, stage, step, count, PRODUCT, TILES)
                async_copy.mbarrier_arrive(stages.full.index(stage), increment_count=False)
            else:
                if ahead <= 0:
                    load_weights(
                        w_descriptor, weights, stages, stage, unit, step, column == ACROSS - 1, PRODUCT, TILES
                    )
                    async_copy.mbarrier_arrive(stages.full.index(stage), increment_count=False)
                ahead -= 1
                fetch_rows(x_descriptor, stages, stage, start, step, count, TILES)
            stage, phase = next_stage(stage, phase, STAGES)
        uncounted = tile_counter(routes, tile) if PRODUCT.first else expert_counter(routes, expert)
        expert, start, count, column, tile = next_expert, next_start, next_count, next_column, next_tile
    slot, slot_phase = next_stage(slot, slot_phase, 2)
    if uncounted >= 0:
        count_item(routes, stages, uncounted, slot, slot_phase)


@gluon.jit
def words_at(stages, stage, UNIT: gl.constexpr, HALF: gl.constexpr, PRODUCT: gl.constexpr):
    """The words and scales of 64 outputs and 64 inputs, of the first half of a stage or of the second: `[128, 4]`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    words = stages.words[UNIT].index(stage).slice(16 * HALF, 16).load(LINES)
    words = gl.convert_layout(words.reshape([128, 4]), LAYOUT, assert_trivial=True)
    # Four threads hold weights of the same outputs, so they have the same scales.
    FOUR: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    scales = stages.scales[UNIT].index(stage)
    if PRODUCT.kind == INT4:  # a tile of e2m1 scales is for all 128 inputs
        scales = scales.slice(4 * HALF, 4, dim=1)
    scales = scales.load(gl.SliceLayout(1, FOUR))
    scales, _ = gl.broadcast(scales[:, None, :], gl.zeros([32, 4, 4], scales.dtype, FOUR))
    return words, gl.convert_layout(scales.reshape([128, 4]), LAYOUT, assert_trivial=True)


@gluon.jit
def wait_for_older(sums, STARTED: gl.constexpr):
    """Wait for all products except the STARTED last ones."""
    return warpgroup_mma_wait(STARTED, sums) if len(sums) > 1 else (warpgroup_mma_wait(STARTED, sums),)


@gluon.jit
def multiply_tile(
    weights, routes, results, stages, expert, start, count, column, stage, phase,
    GROUP: gl.constexpr, PRODUCT: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Compute one group's outputs of a tile of up to ROWS rows."""
    STEPS: gl.constexpr = PRODUCT.width // 128
    UNITS: gl.constexpr = units_of(TILES)
    STAGES: gl.constexpr = TILES.stages
    MINE: gl.constexpr = TILES.units
    SUMS: gl.constexpr = sums_layout(ROWS, 4, False)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    sums = ()
    for _ in gl.static_range(MINE):
        sums = sums + (gl.zeros([64, ROWS], gl.float32, SUMS),)
    mbarrier.wait(stages.full.index(stage), phase)
    if PRODUCT.first:  # makes copied rows visible to the tensor cores
        fence_async_shared()
    words, scales = words_at(stages, stage, GROUP * MINE, 0, PRODUCT)
    pairs = decode_pairs(words, scales, 0, PRODUCT.kind, PRODUCT.spans)
    for step in range(STEPS):
        coming, coming_phase = next_stage(stage, phase, STAGES)
        for n in gl.static_range(2 * MINE):
            part = stages.rows[n % 2].index(stage)
            after = ()
            for m in gl.static_range(MINE):
                if m == n // 2:
                    a = pair_operand(pairs[0], pairs[1], pairs[2], pairs[3], OPERAND)
                    transposed = part.slice(0, ROWS).permute((1, 0))
                    after = after + (warpgroup_mma(a, transposed, sums[m], is_async=True),)
                else:
                    after = after + (sums[m],)
            # After the first product there is no older one, but the wait also keeps later code from moving before it.
            sums = wait_for_older(after, 1)
            if n < 2 * MINE - 1:
                words, scales = words_at(stages, stage, GROUP * MINE + (n + 1) // 2, (n + 1) % 2, PRODUCT)
            else:  # words of the next stage, while the last product of this one runs
                mbarrier.wait(stages.full.index(coming), coming_phase, pred=step < STEPS - 1)
                if PRODUCT.first:
                    fence_async_shared()
                words, scales = words_at(stages, coming, GROUP * MINE, 0, PRODUCT)
            pairs = decode_pairs(words, scales, (n + 1) % 2, PRODUCT.kind, PRODUCT.spans)
        # This wait returns at once. Its branch keeps ptxas from moving the decoding after the next wait, where nothing
        # would overlap with it.
        mbarrier.wait(stages.full.index(coming), coming_phase, pred=step < STEPS - 1)
        # No product may run across the loop's end: ptxas would make each product wait for the previous one.
        sums = wait_for_older(sums, 0)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = coming, coming_phase
    for u in gl.static_range(MINE):
        finish_rows(
            sums[u], weights, routes, results, expert, column * UNITS + GROUP * MINE + u, start, count, 0,
            PRODUCT, ROWS, 4, False,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def pass_by(stages, stage, phase, PRODUCT: gl.constexpr, TILES: gl.constexpr):
    """Release the stages of an item that has no outputs for this group."""
    for _ in range(PRODUCT.width // 128):
        mbarrier.wait(stages.full.index(stage), phase)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = next_stage(stage, phase, TILES.stages)
    return stage, phase


@gluon.jit
def multiply_items(
    weights, routes, tiles, results, stages, GROUP: gl.constexpr, PRODUCT: gl.constexpr, TILES: gl.constexpr
):
    """Compute and store one group's outputs of every item of this block."""
    ACROSS: gl.constexpr = across_of(PRODUCT, TILES)
    UNITS: gl.constexpr = units_of(TILES)
    WIDTHS: gl.constexpr = TILES.widths
    # Whether the last item of a tile has outputs for this group.
    ALWAYS: gl.constexpr = (ACROSS - 1) * UNITS + GROUP * TILES.units < PRODUCT.lines // 64
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    items = tiles * ACROSS
    item = gl.program_id(0)
    slot = gl.to_tensor(0)
    slot_phase = gl.to_tensor(0)
    expert, start, count, column, _ = tile_of(routes, item, items, ACROSS)
    while item < items:
        item = receive_item(stages, slot, slot_phase)
        next_expert, next_start, next_count, next_column, _ = tile_of(routes, item, items, ACROSS)
        passes = gl.to_tensor(False)
        if not ALWAYS:
            passes = column == ACROSS - 1
        if passes:
            stage, phase = pass_by(stages, stage, phase, PRODUCT, TILES)
        else:
            for v in gl.static_range(len(WIDTHS)):
                above = count > (WIDTHS[v - 1] if v > 0 else 0)
                if above & ((count <= WIDTHS[v]) | (v == len(WIDTHS) - 1)):
                    stage, phase = multiply_tile(
                        weights, routes, results, stages, expert, start, count, column, stage, phase,
                        GROUP, PRODUCT, TILES, WIDTHS[v],
                    )  # fmt: skip
        synchronize()
        mbarrier.arrive(stages.stored.index(slot))
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        expert, start, count, column = next_expert, next_start, next_count, next_column


@gluon.jit(do_not_specialize=["routes"])
def packed_numbers_product(
    x_descriptor, w_descriptor, rows, weights, routes, results,
    PRODUCT: gl.constexpr, BEFORE: gl.constexpr, TILES: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One product of all experts: the first gathers rows and stores activations by place, the second delivers.

    The second waits for the rows of each tile (BEFORE, a `Counted`), not for the kernels before.
    """
    STAGES: gl.constexpr = TILES.stages
    UNITS: gl.constexpr = units_of(TILES)
    E: gl.constexpr = scale_elements(PRODUCT.kind)
    ROOM: gl.constexpr = room_for(TILES.widths[-1])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SCALE: gl.constexpr = weights.scales.dtype.element_ty
    # Separate allocations, because Triton adds a barrier of the loading warps between two copies to the same one.
    rows_of, words, scales = (), (), ()
    for _ in gl.static_range(2):
        room = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROOM, 64], gl.NVMMASharedLayout(128, 16, 2))
        rows_of = rows_of + (room,)
    for _ in gl.static_range(UNITS):
        room = gl.allocate_shared_memory(gl.int32, [STAGES, 32, 32], gl.NVMMASharedLayout(128, 32, 2))
        words = words + (room,)
        scales = scales + (gl.allocate_shared_memory(SCALE, [STAGES, 32, E], PLAIN),)
    stages = Stages(
        rows=rows_of,
        words=words,
        scales=scales,
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        items=gl.allocate_shared_memory(gl.int32, [2, 1], LINE),
        sent=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        received=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        stored=gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for s in gl.static_range(STAGES):
        # Arrivals: one for words by TMA, and 128 threads' copies; in the second product, one for rows by TMA.
        mbarrier.init(stages.full.index(s), count=129 if PRODUCT.first else 130)
        mbarrier.init(stages.empty.index(s), count=GROUPS)
    for s in gl.static_range(2):
        mbarrier.init(stages.sent.index(s), count=1)
        mbarrier.init(stages.received.index(s), count=GROUPS)
        mbarrier.init(stages.stored.index(s), count=GROUPS)
    fence_async_shared()
    if EARLY:
        if PRODUCT.first:
            depends("wait")
    tiles = gl.load(routes.how_many)
    if EARLY:  # after this load, because no kernel waits for a block without an item
        depends("launch_dependents")
    gl.warp_specialize([
        (multiply_items, (weights, routes, tiles, results, stages, 0, PRODUCT, TILES)),
        (multiply_items, (weights, routes, tiles, results, stages, 1, PRODUCT, TILES)),
        (multiply_items, (weights, routes, tiles, results, stages, 2, PRODUCT, TILES)),
        (load_stages, (x_descriptor, w_descriptor, rows, weights, routes, tiles, stages, PRODUCT, BEFORE, TILES)),
    ], [4, 4, 4], [152, 152, 56])  # fmt: skip
