"""Items: what blocks that stay take one after the other, and how their warps tell each other, on Hopper.

An item is a tile of rows, and some of the outputs. A block that is done takes the next one from a counter: its loading
warps do that, while they bring what the item before needs, and tell the warps that multiply.

`take_item` and `hear_item` are of one product. Where a launch computes both, items of the second product stand behind
those of the first (`place_of`), and of each tile it is counted how much of the first product is stored (`count_item`):
whoever loads its rows for the second waits for that (`await_tile`), and for nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Younger Tritons have another name for it.
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
    stored: Any  # items, by both groups: a ring of two
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
def tell_item(stages, slot, phase, item, expert, start, count, column):
    """Tell the warps that multiply of an item that was taken, and where it is."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nth = gl.arange(0, 8, layout=NUMBERS)
    told = gl.where(nth == 0, item, gl.where(nth == 1, expert, gl.where(nth == 2, start, count)))
    told = gl.where(nth == 4, column, told)
    mbarrier.wait(stages.heard.index(slot), phase)
    stages.items.index(slot).store(told)
    synchronize()
    mbarrier.arrive(stages.told.index(slot))


@gluon.jit
def uniform(number):
    """The same number, of which ptxas knows that all threads of a warp have it.

    What depends on it stays in registers that these threads share: else the loops of `specialized` are 20% longer.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def told_number(told, nth: gl.constexpr):
    """One of the numbers that were told; none is below zero."""
    return uniform(gl.max(gl.where(gl.arange(0, 8, layout=told.type.layout) == nth, told, 0), axis=0))


@gluon.jit
def hear_place(stages, slot, phase):
    """The item that was taken, and where it is."""
    mbarrier.wait(stages.told.index(slot), phase)
    told = stages.items.index(slot).load(gl.BlockedLayout([1], [32], [4], [0]))
    item, expert, start = told_number(told, 0), told_number(told, 1), told_number(told, 2)
    count, column = told_number(told, 3), told_number(told, 4)
    synchronize()
    mbarrier.arrive(stages.heard.index(slot))
    return item, expert, start, count, column


@gluon.jit
def count_item(routes, stages, tile, slot, phase):
    """Count an item of the first product that both groups have stored; the sort has set the counter to zero.

    The loading warps do it, while others multiply: a fence waits until all of the GPU sees what was stored.
    """
    mbarrier.wait(stages.stored.index(slot), phase)
    gl.atomic_add(routes.tiles + 5 * routes.max_tiles + tile, 1, sem="release")


@gluon.jit
def await_tile(routes, tile, ITEMS: gl.constexpr):
    """Wait until all items of a tile of the first product are stored; TMA sees them then.

    Items are taken in order, by blocks that run, those of the first product before those of the second: whoever has to
    store one is at work, and waits for nobody.
    """
    counter = routes.tiles + 5 * routes.max_tiles + tile
    found = gl.atomic_add(counter, 0, sem="acquire")
    while found < ITEMS:
        found = gl.atomic_add(counter, 0, sem="acquire")
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
