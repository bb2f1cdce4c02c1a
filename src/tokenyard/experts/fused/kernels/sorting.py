"""Row metadata, made on the device: pairs sorted by expert, and the tiles that the products are cut into.

A pair is a received row and one of its choices, `row * top_k + choice`; those without an expert here (-1) are left
out. `order_N` holds the pairs by expert, and by their own order within an expert; a pair p whose row has other experts
here stands as ~p, below zero. A tile is at most TILE pairs of one expert: `tiles` holds its expert, its first place in
`order_N`, how many pairs it has, the first tile of its expert and how many tiles that has, one line of int32 for each
of the five, and `how_many` the number of tiles. Nothing of this is read by the host.

Short batches take one launch, in which each block counts everything. Longer ones are counted first, chunk by chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Chunks whose counts are read at a time.
LINES = tl.constexpr(16)


@triton.jit
def load_chunk(ids_N, num_pairs, chunk, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """The pairs of a chunk and their experts; -1 where there is none."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids_N + pair, mask=pair < num_pairs, other=-1)
    return pair, tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)


@triton.jit
def count_experts(expert, BINS: tl.constexpr):
    """How many pairs each expert has; the last bin counts those that nobody has."""
    return tl.histogram(tl.where(expert < 0, BINS - 1, expert), BINS)


@triton.jit(do_not_specialize=["num_pairs"])
def count_chunks(
    ids_N, counts_CB, num_pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The counts of each chunk, one block a chunk."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    _, expert = load_chunk(ids_N, num_pairs, chunk, EXPERTS, CHUNK)
    tl.store(counts_CB + chunk * BINS + tl.arange(0, BINS), count_experts(expert, BINS))


@triton.jit
def unsigned(place):
    """The pair that stands in `order_N`, whether its row has others or not."""
    return tl.where(place < 0, ~place, place)


@triton.jit
def experts_of(ids_N, row, ok, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """How many experts take each of some rows."""
    count = tl.zeros_like(row)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_N + row * TOP_K + k, mask=ok, other=-1)
        count += ((expert >= 0) & (expert < EXPERTS)).to(tl.int32)
    return count


@triton.jit
def is_alone(ids_N, pair, expert, ok, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    """Whether a pair is the only one of its row, for the pairs of a chunk. Only those that are `ok` are asked for."""
    if CHUNK % TOP_K == 0:  # rows are whole, and a power of two long
        there = tl.reshape((expert >= 0).to(tl.int32), [CHUNK // TOP_K, TOP_K])
        count = tl.expand_dims(tl.sum(there, axis=1), 1)
        return tl.reshape(tl.broadcast_to(count, [CHUNK // TOP_K, TOP_K]), [CHUNK]) == 1
    else:
        return experts_of(ids_N, pair // TOP_K, ok, EXPERTS, TOP_K) == 1


@triton.jit(do_not_specialize=["how_many", "num_pairs", "max_tiles"])
def sort_pairs(
    ids_N, counts_CB, order_N, tiles, how_many, num_pairs, max_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, TOP_K: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Place the pairs of one expert, some of the chunks in each block; the first block also cuts them into tiles."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    mine, part = tl.program_id(0), tl.program_id(1)
    chunks = tl.cdiv(num_pairs, CHUNK)
    share = tl.cdiv(chunks, PARTS)
    bins = tl.arange(0, BINS)
    before = 0  # pairs of this expert in the chunks of earlier parts
    if COUNTED:
        totals = tl.zeros([BINS], tl.int32)
        lines = tl.arange(0, LINES)
        for first in range(0, chunks, LINES):
            line = first + lines
            found = tl.load(
                counts_CB + line[:, None] * BINS + bins[None, :], mask=(line < chunks)[:, None], other=0
            )
            totals += tl.sum(found, axis=0)
            earlier = (line < part * share)[:, None] & (bins == mine)[None, :]
            before += tl.sum(tl.where(earlier, found, 0))
    else:
        _, expert = load_chunk(ids_N, num_pairs, 0, EXPERTS, CHUNK)
        totals = count_experts(expert, BINS)
    totals = tl.where(bins < EXPERTS, totals, 0)
    tiles_B = (totals + TILE - 1) // TILE
    start = tl.sum(tl.where(bins < mine, totals, 0))
    rows = tl.sum(tl.where(bins == mine, totals, 0))
    if part == 0:
        first_tile = tl.sum(tl.where(bins < mine, tiles_B, 0))
        if mine == 0:
            tl.store(how_many, tl.sum(tiles_B))
        tile = tl.arange(0, 32)
        for first in range(0, tl.cdiv(rows, TILE), 32):
            offset = (first + tile) * TILE
            is_tile = offset < rows
            where = tiles + first_tile + first + tile
            tl.store(where, tl.zeros_like(tile) + mine, mask=is_tile)
            tl.store(where + max_tiles, start + offset, mask=is_tile)
            tl.store(where + 2 * max_tiles, tl.minimum(rows - offset, TILE), mask=is_tile)
            tl.store(where + 3 * max_tiles, tl.zeros_like(tile) + first_tile, mask=is_tile)
            tl.store(where + 4 * max_tiles, tl.zeros_like(tile) + tl.cdiv(rows, TILE), mask=is_tile)
    place = start + before
    for chunk in range(part * share, tl.minimum((part + 1) * share, chunks)):
        pair, expert = load_chunk(ids_N, num_pairs, chunk, EXPERTS, CHUNK)
        is_mine = expert == mine
        nth = tl.cumsum(is_mine.to(tl.int32), 0)
        alone = is_alone(ids_N, pair, expert, is_mine, EXPERTS, TOP_K, CHUNK)
        tl.store(order_N + place + nth - 1, tl.where(alone, pair, ~pair), mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32))
