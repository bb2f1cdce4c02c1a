"""The work queue of persistent blocks on Hopper: they take items from a counter, and their warps pass them on.

An item is a tile of rows × some of the outputs. The loading warps of a block take the next item from the counter while
they load the data of the current one, and pass its number to the multiplying warps through shared memory.

`take_item` and `receive_item` serve launches of one product. If a launch computes both products, the items of the
second follow those of the first (`place_of`).

A counter per tile says how many items of the first product are stored (`count_item`). Before warps load the rows of a
tile for the second product, they wait for this counter (`await_items`), and for nothing else. So blocks that find no
item of the first product begin with the second, in the same launch or in the next one. Launches of one product also
count the items of the second, by expert, for `kernels.summing`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tokenyard.experts.fused.kernels.arguments import AWAIT

# Newer versions of Triton have another name for it.
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


class Product(NamedTuple):
    """The compile-time constants of a product. `outputs` is I for the first product, H for the second."""

    inputs: int
    outputs: int
    experts: int
    top_k: int
    first: bool
    interleaved: bool  # whether gate and up rows of the first product alternate
    weighted: bool
    finalize: bool
    activation: int
    limit: float
    alpha: float
    shift: float
    powers: bool  # whether scales between the products are powers of two
    tile: int  # the most rows of a tile: 128, or fewer; then all tiles are transposed
    transposed: tuple[int, ...]  # the rows of tiles that are transposed: weights × rows
    step: int  # outputs of an item: 128 columns (gate and up) in the first product, 128 or 256 in the second
    deep: bool  # whether a stage holds 128 outputs with twice the inputs, instead of 256 outputs
    boxed: bool  # whether the weights are held box by box (`fused.boxes`)


class Stages(NamedTuple):
    """The pipeline stages in shared memory: loaded data, and barriers that say that a stage is full, or empty again."""

    rows0: Any
    rows1: Any
    weights: Any  # weights of 256 outputs
    by_row: Any
    by_output: Any
    full: Any
    full1: Any  # like `full`, for the second half of the weights, if they have scales
    empty: Any
    items: Any  # items that were taken, with their places: a ring of two
    sent: Any
    received: Any
    stored: Any  # barriers that both groups have stored an item: a ring of two
    largest: Any  # the largest magnitude of each row of a transposed tile, by group: a ring of two
    found: Any


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next stage and its phase: after the last stage the first one follows, with the other barrier phase."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def add_scaled(part, scale, acc):
    """acc + part * scale, in inline assembly, so that neither LLVM nor ptxas moves it after the next wait."""
    s, _ = gl.broadcast(scale, part)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, s, acc], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def columns_of(product):
    """How many items a tile has: its outputs over `step`."""
    return -(-product.outputs // product.step)


@gluon.jit
def tile_of(routes, item, items, across):
    """The expert, first place, row count and column of an item, and the number of its tile.

    Items are ordered by expert, then by column, then by tile. After the last item, the row count is 0.
    """
    there = item < items
    near = item // across  # the number of some tile of the item's expert
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
    """What `tile_of` gives, if the items of the first product are followed by those of the second."""
    ACROSS: gl.constexpr = columns_of(FIRST)
    BEHIND: gl.constexpr = columns_of(SECOND)
    own, across, items = item, gl.to_tensor(ACROSS), tiles * ACROSS
    if item >= items:
        own, across, items = item - items, gl.to_tensor(BEHIND), tiles * BEHIND
    return tile_of(routes, own, items, across)


@gluon.jit
def take_item(routes, stages, slot, phase, PRODUCT: gl.constexpr):
    """Take the next item from the counter (beyond the last, if none is left), and pass it to the multiplying warps."""
    # The sort has set the counters to zero. The first item of block n is item n, so the counter adds to these.
    counter = routes.how_many + (1 if PRODUCT.first else 2)
    item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    mbarrier.wait(stages.received.index(slot), phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stages.items.index(slot).store(gl.full([1], 0, gl.int32, ONE) + item)
    synchronize()
    mbarrier.arrive(stages.sent.index(slot))
    return item


@gluon.jit
def receive_item(stages, slot, phase):
    """Receive the item that `take_item` took."""
    mbarrier.wait(stages.sent.index(slot), phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    item = gl.max(stages.items.index(slot).load(ONE), axis=0)
    mbarrier.arrive(stages.received.index(slot))
    return item


@gluon.jit
def send_item(stages, slot, phase, item, expert, start, count, column):
    """Pass an item and its place to the multiplying warps."""
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nth = gl.arange(0, 8, layout=NUMBERS)
    numbers = gl.where(nth == 0, item, gl.where(nth == 1, expert, gl.where(nth == 2, start, count)))
    numbers = gl.where(nth == 4, column, numbers)
    mbarrier.wait(stages.received.index(slot), phase)
    stages.items.index(slot).store(numbers)
    synchronize()
    mbarrier.arrive(stages.sent.index(slot))


@gluon.jit
def uniform(number):
    """The same number, marked for ptxas as equal in all threads of a warp.

    Values that depend on it then stay in uniform registers; without this, the loops of `specialized` are 20% longer.
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
def received_number(numbers, nth: gl.constexpr):
    """One of the numbers that `send_item` passed, none of which is below zero."""
    return uniform(gl.max(gl.where(gl.arange(0, 8, layout=numbers.type.layout) == nth, numbers, 0), axis=0))


@gluon.jit
def receive_place(stages, slot, phase):
    """Receive the item, and its place, that `send_item` passed."""
    mbarrier.wait(stages.sent.index(slot), phase)
    numbers = stages.items.index(slot).load(gl.BlockedLayout([1], [32], [4], [0]))
    item, expert, start = (
        received_number(numbers, 0),
        received_number(numbers, 1),
        received_number(numbers, 2),
    )
    count, column = received_number(numbers, 3), received_number(numbers, 4)
    synchronize()
    mbarrier.arrive(stages.received.index(slot))
    return item, expert, start, count, column


@gluon.jit
def enough_for(count, BEFORE: gl.constexpr):
    """How many items are counted for a tile of `count` rows when all of its rows are there; BEFORE is a `Counted`."""
    return BEFORE.items + (count + (BEFORE.rows - 1)) // BEFORE.rows * BEFORE.parts


@gluon.jit
def tile_counter(routes, tile):
    """The index, in `routes.tiles`, of the counter of a tile's finished items of the first product."""
    return 5 * routes.max_tiles + tile


@gluon.jit
def expert_counter(routes, expert):
    """The index, in `routes.tiles`, of the counter of an expert's finished items of the second product."""
    return 6 * routes.max_tiles + 4 + 2 * expert


@gluon.jit
def count_item(routes, stages, counter, slot, phase):
    """Wait until all groups have stored an item, and count it.

    The loading warps do this, so that multiplying warps need not wait until the stores are visible to the whole GPU.
    """
    mbarrier.wait(stages.stored.index(slot), phase)
    gl.atomic_add(routes.tiles + counter, 1, sem="release")


@gluon.jit
def await_items(counter, enough):
    """Wait until `enough` items of a tile are counted. What they stored is then visible, also to TMA.

    There is no deadlock. If a launch computes both products, items are taken in order, those of the first product
    before those of the second, and only by running blocks. So every item that is waited for belongs to a block that
    runs, and that does not wait itself. If each product has a launch, a launch begins only when all blocks of the one
    before run, or have ended.
    """
    enough = gl.to_tensor(enough)
    gl.inline_asm_elementwise(AWAIT, "=r,l,r", [counter, enough], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
