"""Sorts pairs by expert on the device, and cuts them into the tiles of the products.

A pair is a received row and one of its choices, `row * top_k + choice`; those without an expert here (-1) are left out.
`order_N` holds the pairs sorted by expert, and in ascending order within an expert; a pair p whose row has other
experts on this rank is stored as ~p, which is negative. A place is an index into `order_N`. A tile is at most TILE
pairs of one expert. `tiles` has six lines of int32, with an entry for each tile: its expert, its first place, its
number of pairs, the first tile of its expert, the number of tiles of its expert, and a counter of finished items of the
first product. `how_many` is the number of tiles. Two counters, from which blocks take items, follow it, and then, for
each expert, its number of tiles and a counter of finished items of the second product. The sort sets all counters to
zero. The host reads none of this.

A batch of one chunk takes one launch, in which each block counts all pairs, and places those of one expert. For longer
batches a first launch counts the pairs of each chunk, and in a second one a few blocks place the pairs of each chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Chunks whose counts are read at a time, and tiles that are written at a time.
LINES = tl.constexpr(16)
AT_A_TIME = tl.constexpr(32)


@triton.jit
def load_chunk(
    ids_N, num_rows, chunk, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The pairs of a chunk, their experts (-1 where there is none), and whether they are alone in their row.

    A chunk is CHUNK / CHOICES whole rows; CHOICES is TOP_K rounded up to a power of two.
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
    """How many pairs each expert has; the last bin counts those without an expert on this rank."""
    return tl.histogram(tl.where(expert < 0, BINS - 1, expert), BINS)


@triton.jit(do_not_specialize=["num_rows"])
def count_chunks(
    ids_N, counts_CB, num_rows, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in each chunk, one block per chunk."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    _, expert, _ = load_chunk(ids_N, num_rows, chunk, EXPERTS, TOP_K, CHOICES, CHUNK)
    tl.store(counts_CB + chunk * BINS + tl.arange(0, BINS), count_experts(expert, BINS))


@triton.jit
def unsigned(place):
    """The pair of an entry of `order_N`, which is ~pair if its row has other experts here."""
    return tl.where(place < 0, ~place, place)


@triton.jit(do_not_specialize=["how_many", "num_rows", "max_tiles"])
def sort_pairs(
    ids_N, order_N, tiles, how_many, num_rows, max_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sort a batch of one chunk: each block places the pairs of one expert, and cuts them into tiles."""
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
    tl.store(how_many + 3 + 2 * mine, tl.cdiv(rows, TILE))
    tl.store(how_many + 4 + 2 * mine, 0)
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
    """The entries of `numbers_B` for some experts, `[n]`, which `is_expert` marks."""
    return tl.sum(tl.where(is_expert, numbers_B[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["how_many", "num_rows", "max_tiles"])
def place_chunks(
    ids_N, counts_CB, order_N, tiles, how_many, num_rows, max_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one chunk and SHARE experts, and write some of all tiles; `count_chunks` has run before."""
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
    # Four experts are counted in one int64, 16 bits each: a chunk has less than 2^16 pairs.
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
        tl.store(how_many + 3 + 2 * bins, tiles_B, mask=bins < EXPERTS)
        tl.store(how_many + 4 + 2 * bins, tl.zeros_like(bins), mask=bins < EXPERTS)
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
