"""Row metadata, made on the device: pairs sorted by expert, and the tiles that the products are cut into.

A pair is a received row and one of its choices, `row * top_k + choice`; those without an expert here (-1) are left
out. `order_N` holds the pairs by expert, and by their own order within an expert; a pair p whose row has other experts
here stands as ~p, below zero. A tile is at most TILE pairs of one expert: `tiles` holds its expert, its first place in
`order_N`, how many pairs it has, the first tile of its expert and how many tiles that has, and a zero, from which it is
counted how much of the tile is done: one line of int32 for each of the six. `how_many` is the number of tiles. Behind
that stand two counters, zero, from which blocks take what they compute. Nothing of this is read by the host.

Short batches take one launch, in which each block counts everything, and places the pairs of one expert. Longer ones
are counted first, chunk by chunk; then a few blocks place the pairs of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Chunks whose counts are read at a time, and tiles that are written.
LINES = tl.constexpr(16)
AT_A_TIME = tl.constexpr(32)


@triton.jit
def load_chunk(
    ids_N, num_rows, chunk, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The pairs of a chunk, their experts (-1 where there is none), and whether they are alone in their row.

    A chunk is some whole rows, each as if it had CHOICES pairs, a power of two.
    """
    row = chunk * (CHUNK // CHOICES) + tl.arange(0, CHUNK // CHOICES)
    choice = tl.arange(0, CHOICES)
    pair = row[:, None] * TOP_K + choice[None, :]
    is_pair = (row < num_rows)[:, None] & (choice < TOP_K)[None, :]
    expert = tl.load(ids_N + pair, mask=is_pair, other=-1)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)
    alone = tl.expand_dims(tl.sum((expert >= 0).to(tl.int32), axis=1), 1) == 1
    alone = tl.broadcast_to(alone, [CHUNK // CHOICES, CHOICES])
    return tl.reshape(pair, [CHUNK]), tl.reshape(expert, [CHUNK]), tl.reshape(alone, [CHUNK])


@triton.jit
def count_experts(expert, BINS: tl.constexpr):
    """How many pairs each expert has; the last bin counts those that nobody has."""
    return tl.histogram(tl.where(expert < 0, BINS - 1, expert), BINS)


@triton.jit(do_not_specialize=["num_rows"])
def count_chunks(
    ids_N, counts_CB, num_rows, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The counts of each chunk, one block a chunk."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    _, expert, _ = load_chunk(ids_N, num_rows, chunk, EXPERTS, TOP_K, CHOICES, CHUNK)
    tl.store(counts_CB + chunk * BINS + tl.arange(0, BINS), count_experts(expert, BINS))


@triton.jit
def unsigned(place):
    """The pair that stands in `order_N`, whether its row has others or not."""
    return tl.where(place < 0, ~place, place)


@triton.jit(do_not_specialize=["how_many", "num_rows", "max_tiles"])
def sort_pairs(
    ids_N, order_N, tiles, how_many, num_rows, max_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert, of a batch of one chunk, and cut them into tiles: one block an expert."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    mine, bins = tl.program_id(0), tl.arange(0, BINS)
    pair, expert, alone = load_chunk(ids_N, num_rows, 0, EXPERTS, TOP_K, CHOICES, CHUNK)
    totals = tl.where(bins < EXPERTS, count_experts(expert, BINS), 0)
    tiles_B = (totals + TILE - 1) // TILE
    start = tl.sum(tl.where(bins < mine, totals, 0))
    rows = tl.sum(tl.where(bins == mine, totals, 0))
    first_tile = tl.sum(tl.where(bins < mine, tiles_B, 0))
    if mine == 0:
        tl.store(how_many, tl.sum(tiles_B))
        tl.store(how_many + 1 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    tile = tl.arange(0, AT_A_TIME)
    for first in range(0, tl.cdiv(rows, TILE), AT_A_TIME):
        offset = (first + tile) * TILE
        is_tile = offset < rows
        where = tiles + first_tile + first + tile
        tl.store(where, tl.zeros_like(tile) + mine, mask=is_tile)
        tl.store(where + max_tiles, start + offset, mask=is_tile)
        tl.store(where + 2 * max_tiles, tl.minimum(rows - offset, TILE), mask=is_tile)
        tl.store(where + 3 * max_tiles, tl.zeros_like(tile) + first_tile, mask=is_tile)
        tl.store(where + 4 * max_tiles, tl.zeros_like(tile) + tl.cdiv(rows, TILE), mask=is_tile)
        tl.store(where + 5 * max_tiles, tl.zeros_like(tile), mask=is_tile)
    is_mine = expert == mine
    nth = tl.cumsum(is_mine.to(tl.int32), 0)
    tl.store(order_N + start + nth - 1, tl.where(alone, pair, ~pair), mask=is_mine)


@triton.jit
def of_expert(numbers_B, is_expert):
    """The numbers of some experts, `[n]`."""
    return tl.sum(tl.where(is_expert, numbers_B[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["how_many", "num_rows", "max_tiles"])
def place_chunks(
    ids_N, counts_CB, order_N, tiles, how_many, num_rows, max_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one chunk and SHARE experts, and some tiles of all. All chunks are counted."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    mine, chunks = tl.program_id(0), tl.num_programs(0)
    bins, lines = tl.arange(0, BINS), tl.arange(0, LINES)
    found = tl.zeros([LINES, BINS], tl.int32)
    earlier = tl.zeros([LINES, BINS], tl.int32)
    for first in range(0, chunks, LINES):
        line = (first + lines)[:, None]
        counts = tl.load(counts_CB + line * BINS + bins[None, :], mask=line < chunks, other=0)
        found += counts
        earlier += tl.where(line < mine, counts, 0)
    totals = tl.where(bins < EXPERTS, tl.sum(found, axis=0), 0)
    start = tl.cumsum(totals, 0) - totals
    pair, expert, alone = load_chunk(ids_N, num_rows, mine, EXPERTS, TOP_K, CHOICES, CHUNK)
    # Of four experts at once: a chunk has less than 2^16 pairs.
    first_expert = tl.program_id(1) * SHARE
    shift = ((expert - first_expert) % 4 * 16).to(tl.int64)
    nth = tl.zeros([CHUNK], tl.int32)
    for four in range(SHARE // 4):
        is_one = (expert >= 0) & ((expert - first_expert) // 4 == four) & (expert >= first_expert)
        so_far = tl.cumsum(tl.where(is_one, tl.full([CHUNK], 1, tl.int64) << shift, 0), 0)
        nth = tl.where(is_one, (so_far >> shift).to(tl.int32) & 0xFFFF, nth)
    place = tl.gather(start + tl.sum(earlier, axis=0), tl.maximum(expert, 0), 0) + nth - 1
    tl.store(order_N + place, tl.where(alone, pair, ~pair), mask=nth > 0)
    tiles_B = (totals + TILE - 1) // TILE
    behind = tl.cumsum(tiles_B, 0)
    all_tiles = tl.sum(tiles_B)
    block, blocks = mine * tl.num_programs(1) + tl.program_id(1), chunks * tl.num_programs(1)
    if block == 0:
        tl.store(how_many, all_tiles)
        tl.store(how_many + 1 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    for first in range(block * AT_A_TIME, all_tiles, blocks * AT_A_TIME):
        tile = first + tl.arange(0, AT_A_TIME)
        owner = tl.sum((behind[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        is_owner = bins[None, :] == owner[:, None]
        first_tile = of_expert(behind - tiles_B, is_owner)
        offset = (tile - first_tile) * TILE
        is_tile, where = tile < all_tiles, tiles + tile
        tl.store(where, owner, mask=is_tile)
        tl.store(where + max_tiles, of_expert(start, is_owner) + offset, mask=is_tile)
        left_over = of_expert(totals, is_owner) - offset
        tl.store(where + 2 * max_tiles, tl.minimum(left_over, TILE), mask=is_tile)
        tl.store(where + 3 * max_tiles, first_tile, mask=is_tile)
        tl.store(where + 4 * max_tiles, of_expert(tiles_B, is_owner), mask=is_tile)
        tl.store(where + 5 * max_tiles, tl.zeros_like(tile), mask=is_tile)
