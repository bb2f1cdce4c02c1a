"""Combine: a rank writes results into its combine region, and the ranks that own the tokens read and sum them.

`place` writes (and encodes) this rank's results into its combine region, unless the experts have done so
themselves; `flags.signal_and_wait` publishes that they are there, and waits until all others are. `pull` reads one
row per (token, rank), or per choice of a token, adds in float32, in the order of ranks (or choices), from zero, adds
the caller's terms, and rounds once. In a small batch whose results are in place `pull` publishes and waits for the
other ranks itself (`MEETS`): every block waits then, so all blocks of all ranks on a GPU must fit on it together.

If multiprocessors are limited (`sms`) and a term is still computed, a launch with few blocks (`LIMITED`) begins: it
writes sums in float32 until that computation has `ended`, and notes how many tiles each block has summed. From then on
the GPU is free, and a second launch with all blocks adds the terms to these sums, and makes the remaining ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tokenyard.exchange.transports.one_sided.kernels.flags import (
    COMBINE,
    COMBINED,
    FAILED,
    LEFT,
    PLACED,
    STATUS,
    publish,
    wait,
    words_of,
)
from tokenyard.exchange.transports.one_sided.kernels.numerics import (
    decode_fp8_block,
    decode_mxfp8,
    decode_nvfp4,
    encode_nvfp4,
    finite_amax,
    is_easy,
    row_global_scale,
)
from tokenyard.exchange.transports.one_sided.kernels.push import (
    CAST,
    FP8_BLOCK,
    MXFP8,
    NVFP4,
    Places,
    aligned,
    encode_tile,
    store_tile,
)


class Begun(NamedTuple):
    """The sums that a launch with few blocks has made, and which a second launch continues."""

    totals: Any  # the sums, in float32
    tiles: Any  # how many tiles each block has summed


@triton.jit(
    do_not_specialize=[
        "rows", "max_tokens", "first_rank", "blocks", "dense",
        "data_at", "scales_at", "global_at", "ids_at", "weights_at", "counts_at",
    ]
)  # fmt: skip
def place(
    results, given, peers, rows, max_tokens, first_rank, blocks, dense,
    data_at, scales_at, global_at, ids_at, weights_at, counts_at, global_scale,
    ROW: tl.constexpr, WORLD: tl.constexpr, WIDE: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Write results into this rank's combine region, a block for each, or fewer blocks (`LIMITED`).

    `dense`: one result per row that was received, in their order. Otherwise one per slot, empty ones included. Where a
    row has a result for each of its choices, `given` says where each goes; else it is None.
    """
    if rows <= 0:  # only loads the kernel, or no row was received
        return
    places = Places(data_at, scales_at, global_at, ids_at, weights_at, counts_at)
    local = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    base = tl.load(peers + first_rank + local)
    results += local.to(tl.int64) * rows * ROW.hidden
    if LIMITED:
        for result in range(block, rows, blocks):
            place_result(
                results, given, base, result, max_tokens, dense, places, global_scale, ROW, WORLD, WIDE
            )
    else:
        place_result(results, given, base, block, max_tokens, dense, places, global_scale, ROW, WORLD, WIDE)


@triton.jit
def place_result(
    results, given, base, result, max_tokens, dense, places, global_scale,
    ROW: tl.constexpr, WORLD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write one result into its slot of the combine region, if it belongs to a row."""
    w = tl.arange(0, WIDE)
    counts = (base + places.counts).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + 2 * w, mask=w < WORLD, other=0)
    if given is not None:
        slot = tl.load(given + result)
        there = slot >= 0
    elif dense != 0:
        source = tl.sum((tl.cumsum(count, 0) <= result).to(tl.int32), 0)
        slot = source * max_tokens + result - tl.sum(tl.where(w < source, count, 0), 0)
        there = source < WORLD
    else:
        slot = result
        there = slot % max_tokens < tl.sum(tl.where(w == result // max_tokens, count, 0), 0)
    if there:
        row = results + tl.cast(result, tl.int64) * ROW.hidden
        if ROW.format == NVFP4:
            place_nvfp4(row, base, slot.to(tl.int64), global_scale, places, ROW)
        else:
            place_row(row, base, slot.to(tl.int64), places, ROW)


@triton.jit
def place_nvfp4(row, base, slot, g, places, ROW: tl.constexpr):
    """Encode one result as nvfp4, and write it into its slot."""
    TILE: tl.constexpr = ROW.tile
    PADDED: tl.constexpr = ROW.padded
    h = tl.arange(0, TILE)
    values = tl.load(row + h, mask=h < ROW.hidden, other=0)
    ANY_SCALE: tl.constexpr = ROW.option == 0
    if ANY_SCALE:  # one global scale for each row, from all of it, before any of it is encoded
        amax = finite_amax(values.to(tl.float32), TILE)
        for c in tl.static_range(TILE, PADDED, TILE):
            more = tl.load(row + c + h, mask=c + h < ROW.hidden, other=0)
            amax = tl.maximum(amax, finite_amax(more.to(tl.float32), TILE))
        g = row_global_scale(amax)
    if ANY_SCALE and not is_easy(g):
        # Rare: encoded in smaller tiles, so that it needs no more registers than the usual way.
        STEP: tl.constexpr = min(TILE, 1024)
        for first in range(0, PADDED, STEP):
            s = first + tl.arange(0, STEP)
            some = tl.load(row + s, mask=s < ROW.hidden, other=0)
            codes, scales = encode_nvfp4(some.to(tl.float32), g, STEP, False)
            store_tile(codes, scales, g, slot >= 0, base, slot, first, PADDED, places, ROW, STEP)
    else:
        for c in tl.static_range(0, PADDED, TILE):
            if c > 0:
                values = tl.load(row + c + h, mask=c + h < ROW.hidden, other=0)
            codes, scales = encode_nvfp4(values.to(tl.float32), g, TILE, ANY_SCALE or ROW.option == 2)
            store_tile(codes, scales, g, slot >= 0, base, slot, c, PADDED, places, ROW, TILE)


@triton.jit
def place_row(row, base, slot, places, ROW: tl.constexpr):
    """Encode one result, and write it into its slot."""
    for c in tl.static_range(0, ROW.padded, ROW.tile):
        h = c + tl.arange(0, ROW.tile)
        values = tl.load(row + h, mask=h < ROW.hidden, other=0)
        codes, scales = encode_tile(values, None, ROW, ROW.tile, False)
        store_tile(codes, scales, None, True, base, slot, c, ROW.padded, places, ROW, ROW.tile)


@triton.jit
def pull_nvfp4(base, slot, tile, there, g, places, ROW: tl.constexpr):
    """A tile of a row in a slot as nvfp4, as float32; zeros where there is none."""
    PADDED: tl.constexpr = ROW.padded
    data = aligned(base + places.data, ROW.kind) + slot * (PADDED // 8)
    h = tile * (ROW.tile // 8) + tl.arange(0, ROW.tile // 8)
    words = tl.load(data + h, mask=(h < PADDED // 8) & there, other=0)
    s = tile * (ROW.tile // 16) + tl.arange(0, ROW.tile // 16)
    scales = aligned(base + places.scales, tl.float8e4nv) + slot * (PADDED // 16)
    if ROW.option == 0:
        g = tl.load((base + places.globals).to(tl.pointer_type(tl.float32)) + slot, mask=there, other=1.0)
    return decode_nvfp4(words, tl.load(scales + s, mask=(s < PADDED // 16) & there, other=0.0), g, ROW.tile)


@triton.jit(
    do_not_specialize=[
        "tokens", "max_tokens", "first_rank", "blocks_per_rank", "blocks_before", "layer", "terms",
        "data_at", "scales_at", "global_at", "ids_at", "weights_at", "counts_at", "deadline",
    ]
)  # fmt: skip
def pull(
    out, term, other_term, slots, owners, peers, host, ended, begun,
    tokens, max_tokens, first_rank, blocks_per_rank, blocks_before, layer, terms,
    data_at, scales_at, global_at, ids_at, weights_at, counts_at, global_scale, deadline,
    ROW: tl.constexpr, WORLD: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr, MEETS: tl.constexpr,
    EARLY: tl.constexpr, CHOICES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Read each token's results from the ranks that it went to, and write their sum: a tile of it in each block.

    `slots` `[tokens, WORLD]` says which slot of each rank holds a token's result, -1 for none. Where each of a token's
    CHOICES has a result, it is `[tokens, CHOICES]`, `owners` says on which rank, and `max_tokens` counts results.

    With `LIMITED` there are fewer blocks than tiles. These stop when `ended` is 1, and write into `begun` how many
    tiles each has summed. Without it, `begun` is what `blocks_before` of each rank have summed. Both are None where a
    launch is the only one.
    """
    if tokens < 0:  # only loads the kernel
        return
    places = Places(data_at, scales_at, global_at, ids_at, weights_at, counts_at)
    local = tl.program_id(0) // blocks_per_rank
    block = tl.program_id(0) % blocks_per_rank
    rank = first_rank + local
    mine = words_of(tl.load(peers + rank))
    if EARLY:
        gdc_wait()
    status = tl.load(mine + STATUS)
    if MEETS:
        # `placed` counts blocks that have begun, `left` those that are done: the last of these resets both.
        placed = (mine + PLACED).to(tl.pointer_type(tl.int32))
        left = (mine + LEFT).to(tl.pointer_type(tl.int32))
        round = tl.load(mine + COMBINED) + 1
        flag = (round << 24) | (layer << 2) | COMBINE
        if status < FAILED:
            if tl.atomic_add(placed, 1, sem="relaxed", scope="gpu") == 0:
                publish(peers, rank, flag, COMBINE, WORLD, WIDE, TURNS)
            wait(mine, peers, rank, host, flag, deadline, COMBINE, WORLD, WIDE, TURNS)
            tl.debug_barrier()
            status = tl.load(mine + STATUS, volatile=True)
    if LIMITED:
        stops, summed = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for number in range(block, tl.cdiv(tokens, ROW.rows) * ROW.parts, blocks_per_rank):
            if stops == 0:
                if ended is not None:  # loaded while a tile is summed
                    stops = tl.load(ended, volatile=True)
                if ROW.rows > 1:
                    pull_tiles(
                        out, term, other_term, slots, owners, peers, number, local, rank, status, tokens, max_tokens,
                        terms, places, ROW, WORLD, CHOICES,
                    )  # fmt: skip
                else:
                    pull_tile(
                        out, term, other_term, slots, owners, peers, None, 0, number, local, rank, status, tokens,
                        max_tokens, terms, places, global_scale, ROW, WORLD, CHOICES,
                    )  # fmt: skip
                summed += 1
        if begun is not None:
            tl.store(begun.tiles + tl.program_id(0), summed)
    elif block < tokens * ROW.parts:
        pull_tile(
            out, term, other_term, slots, owners, peers, begun, blocks_before, block, local, rank, status, tokens,
            max_tokens, terms, places, global_scale, ROW, WORLD, CHOICES,
        )  # fmt: skip
    if MEETS:
        tl.debug_barrier()
        if tl.atomic_add(left, 1, sem="acq_rel", scope="gpu") == blocks_per_rank - 1:
            # If the round had failed before, no block counted in `placed`: nothing was published, and the round stays.
            tl.store(mine + COMBINED, tl.where(tl.load(placed) > 0, round, round - 1))
            tl.store(placed, 0)
            tl.store(left, 0)


@triton.jit
def pull_tile(
    out, term, other_term, slots, owners, peers, begun, blocks_before, number, local, rank, status, tokens, max_tokens,
    terms, places, global_scale, ROW: tl.constexpr, WORLD: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Write one tile of the sum of one token; a tile that `begun` holds is not summed again."""
    HIDDEN: tl.constexpr = ROW.hidden
    PARTS: tl.constexpr = ROW.parts
    token = local.to(tl.int64) * tokens + number // PARTS
    # A part is a tile: blocks of one token read its row side by side.
    h = (number % PARTS) * ROW.tile + tl.arange(0, ROW.tile)
    at = token * HIDDEN + h
    if begun is None:
        total = sum_tile(
            slots, owners, peers, number % PARTS, token, rank, max_tokens, places, global_scale, ROW, WORLD, CHOICES
        )  # fmt: skip
    else:
        before = number // PARTS // ROW.rows * PARTS + number % PARTS  # as tiles were numbered there
        summed = tl.load(begun.tiles + local * blocks_before + before % blocks_before)
        if before // blocks_before < summed:
            total = tl.load(begun.totals + at, mask=h < HIDDEN, other=0.0)
        else:
            total = sum_tile(
                slots, owners, peers, number % PARTS, token, rank, max_tokens, places, global_scale, ROW, WORLD,
                CHOICES,
            )  # fmt: skip
    # If the round failed, write NaN, so that the output is not taken for a result.
    total = tl.where(status < FAILED, total, float("nan"))
    if terms >= 1:
        total += tl.load(term + at, mask=h < HIDDEN, other=0.0).to(tl.float32)
    if terms >= 2:
        total += tl.load(other_term + at, mask=h < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=h < HIDDEN)


@triton.jit
def sum_tile(
    slots, owners, peers, part, token, rank, max_tokens, places, global_scale,
    ROW: tl.constexpr, WORLD: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """One tile of the sum of one token's results, in float32."""
    PADDED: tl.constexpr = ROW.padded
    FORMAT: tl.constexpr = ROW.format
    TILE: tl.constexpr = ROW.tile
    TERMS: tl.constexpr = CHOICES if CHOICES > 0 else WORLD
    slots += token * TERMS
    h = part * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for w in tl.static_range(TERMS):
        slot = tl.load(slots + w)
        if CHOICES > 0:
            base = tl.load(peers + tl.load(owners + token * TERMS + w))
        else:
            base = tl.load(peers + w)
        at = (rank * max_tokens + slot).to(tl.int64)
        if FORMAT == NVFP4:
            total += pull_nvfp4(base, at, part, slot >= 0, global_scale, places, ROW)
        else:
            data = aligned(base + places.data, ROW.kind) + at * PADDED
            values = tl.load(data + h, mask=(h < PADDED) & (slot >= 0), other=0.0)
        if FORMAT == MXFP8:
            s = part * (TILE // 32) + tl.arange(0, TILE // 32)
            there = (base + places.scales).to(tl.pointer_type(tl.uint8)) + at * (PADDED // 32)
            scales = tl.load(there + s, mask=(s < PADDED // 32) & (slot >= 0), other=0)
            total += decode_mxfp8(values, scales, TILE)
        elif FORMAT == CAST:
            total += values.to(tl.float32)
        elif FORMAT == FP8_BLOCK:
            s = part * (TILE // 128) + tl.arange(0, TILE // 128)
            there = (base + places.scales).to(tl.pointer_type(tl.float32)) + at * (PADDED // 128)
            scales = tl.load(there + s, mask=(s < PADDED // 128) & (slot >= 0), other=0.0)
            total += decode_fp8_block(values, scales, TILE)
    return total


@triton.jit
def pull_tiles(
    out, term, other_term, slots, owners, peers, number, local, rank, status, tokens, max_tokens, terms,
    places, ROW: tl.constexpr, WORLD: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Write one tile of the sums of some tokens, whose combine wire is a plain dtype; else like `pull_tile`."""
    HIDDEN: tl.constexpr = ROW.hidden
    PADDED: tl.constexpr = ROW.padded
    TILE: tl.constexpr = ROW.tile
    PARTS: tl.constexpr = ROW.parts
    ROWS: tl.constexpr = ROW.rows
    TERMS: tl.constexpr = CHOICES if CHOICES > 0 else WORLD
    row = (number // PARTS) * ROWS + tl.arange(0, ROWS)
    there = row < tokens
    token = local.to(tl.int64) * tokens + row
    h = (number % PARTS) * TILE + tl.arange(0, TILE)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for w in tl.static_range(TERMS):
        slot = tl.load(slots + token * TERMS + w, mask=there, other=-1)
        if CHOICES > 0:
            owner = tl.load(owners + token * TERMS + w, mask=there, other=0)
            data = aligned(tl.load(peers + owner) + places.data, ROW.kind)[:, None]
        else:
            data = aligned(tl.load(peers + w) + places.data, ROW.kind)
        at = (rank * max_tokens + slot).to(tl.int64)[:, None] * PADDED + h[None, :]
        mask = (h < PADDED)[None, :] & (slot >= 0)[:, None]
        total += tl.load(data + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.where(status < FAILED, total, float("nan"))
    at = token[:, None] * HIDDEN + h[None, :]
    mask = there[:, None] & (h < HIDDEN)[None, :]
    if terms >= 1:
        total += tl.load(term + at, mask=mask, other=0.0).to(tl.float32)
    if terms >= 2:
        total += tl.load(other_term + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
