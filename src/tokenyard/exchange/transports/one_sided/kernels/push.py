"""Dispatch: each row is read once, encoded once, and written to every rank that owns one of its experts.

The slot of a row follows from its position: the i-th token that rank r sends to rank w lies in slot `r · max_tokens +
i` of w's dispatch region. Slots do not depend on timing, so they are the same in every run. They are found by
counting the earlier tokens that go to the same rank:

- `assign` takes a chunk of tokens a block. It counts, publishes the counts for the later chunks, waits for the counts
  of the earlier ones (blocks with smaller numbers, which a GPU starts first), and writes its tokens' slots and
  routes. Further blocks wait for all counts, and write -1 into the ids of slots without rows.
- A block of `push` takes a row, or a part of one: it reads the row, encodes it, and writes it to its ranks.
  `flags.signal_and_wait` is launched behind.
- In a short batch `push` does all of this (`WHOLE`): every block counts for its own token, further blocks write counts
  and the ids of empty slots, and the block that ends last publishes and waits for the other ranks. In a long batch
  every block would have to wait for its stores to arrive.

Routes are written as the receiver needs them: the ids of its own experts, -1 for all others, and -1 into every slot
that gets no row.

Kernels are launched before their predecessors have ended (`EARLY`), and wait for these themselves; `push` starts to
load its row before it waits.

Several ranks of one process may share a launch; their batches follow each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.exchange.transports.one_sided.kernels.flags import (
    ARRIVED,
    BAD_IDS,
    DISPATCH,
    ROUND,
    publish_and_wait,
    report,
    words_of,
)
from tokenyard.exchange.transports.one_sided.kernels.numerics import (
    cast_within,
    encode_fp8_block,
    encode_mxfp8,
    encode_nvfp4,
    finite_amax,
    is_easy,
    row_global_scale,
)

# Ranks that a block serves at a time: more would not fit its registers.
RANKS_AT_ONCE = tl.constexpr(8)
# Tokens whose ids a block reads together, and slots whose ids it sets to -1 together.
CHUNK = tl.constexpr(64)
# An entry of the table of experts holds the rank above these bits, and the expert's local number in them.
RANK_BITS = tl.constexpr(16)
LOCAL_BITS = tl.constexpr(0xFFFF)

COPY = tl.constexpr(0)
CAST = tl.constexpr(1)
MXFP8 = tl.constexpr(2)
NVFP4 = tl.constexpr(3)
FP8_BLOCK = tl.constexpr(4)


class Batch(NamedTuple):
    """The routes of a batch: ids and weights, the tables of experts, and the slots that are computed from them."""

    ids: Any
    weights: Any
    experts: Any  # of each expert, the rank and its number there
    copies: Any
    slots: Any


class Sizes(NamedTuple):
    """The numbers that differ between batches. Passed one by one: in a tuple, Triton compiles anew for some."""

    tokens: Any  # below zero in a launch that only loads the kernel
    max_tokens: Any
    first_rank: Any
    blocks: Any  # of a rank
    num_experts: Any


class Places(NamedTuple):
    """The offsets of payloads in a workspace, in bytes."""

    data: Any
    scales: Any
    globals: Any
    ids: Any
    weights: Any
    counts: Any


class Layer(NamedTuple):
    """Constants of a layer that kernels are compiled for. `k_wide` and `wide` are top-k and ranks as powers of two."""

    top_k: int
    k_wide: int
    replicas: int
    world: int
    wide: int
    at_once: int  # ranks that are served together


class Row(NamedTuple):
    """How rows are read, encoded and cut into tiles."""

    hidden: int
    padded: int
    format: int
    kind: Any
    option: int
    tile: int
    parts: int  # blocks that share a row
    rows: int  # rows that a block moves at a time, more than one if a rank has few blocks
    stages: int  # pipeline stages: how many of these reads are in flight
    streams: bool  # whether more is written than a cache holds


@triton.jit
def aligned(address, KIND: tl.constexpr):
    """An address, or several, as pointers to a kind of elements. Payloads begin at multiples of 128 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def either(a, b):
    """Bitwise or, for a reduction."""
    return a | b


@triton.jit
def owners(ids, batch, num_experts, LAYER: tl.constexpr):
    """For choices `[tokens, K]`: the table's entry of the expert that serves each; -1 for no expert, or a bad id."""
    known = (ids >= 0) & (ids < num_experts)
    if LAYER.replicas == 1:
        return tl.load(batch.experts + ids, mask=known, other=-1)
    turn = tl.sum(tl.where(ids > 0, ids, 0).to(tl.int64), 1)
    count = tl.load(batch.copies + ids, mask=known, other=1)
    return tl.load(batch.experts + ids * LAYER.replicas + turn[:, None] % count, mask=known, other=-1)


@triton.jit
def count_before(batch, token, num_experts, first, LAYER: tl.constexpr):
    """How many tokens before this one go to each of the ranks from `first` on."""
    AT_ONCE: tl.constexpr = LAYER.at_once
    choice = tl.arange(0, LAYER.k_wide)
    before = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, token, CHUNK):
        earlier = start + tl.arange(0, CHUNK)
        there = (earlier < token)[:, None] & (choice < LAYER.top_k)[None, :]
        chosen = tl.load(batch.ids + earlier[:, None] * LAYER.top_k + choice[None, :], mask=there, other=-1)
        goes = going(owners(chosen, batch, num_experts, LAYER), first, LAYER)
        before += tl.sum(goes, 0)
    return before


@triton.jit
def going(entry, first, LAYER: tl.constexpr):
    """Which of the ranks from `first` on tokens go to, 0 or 1 each, by their choices' entries in the table."""
    rank = tl.where(entry >= 0, (entry >> RANK_BITS) - first, -1)
    bit = tl.where((rank >= 0) & (rank < LAYER.at_once), 1 << rank, 0)
    return (tl.reduce(bit, 1, either)[:, None] >> tl.arange(0, LAYER.at_once)[None, :]) & 1


@triton.jit
def sum_before(counts, chunk, round, first, LAYER: tl.constexpr):
    """Wait for the counts of all earlier chunks; return how many of their tokens go to each rank from `first` on."""
    AT_ONCE: tl.constexpr = LAYER.at_once
    w = tl.arange(0, AT_ONCE)
    before = tl.zeros([AT_ONCE], tl.int32)
    for c in range(0, chunk, CHUNK):
        row = c + tl.arange(0, CHUNK)
        there = (row < chunk)[:, None] & ((first + w) < LAYER.world)[None, :]
        at = counts + row[:, None] * LAYER.world + (first + w)[None, :]
        # The upper 32 bits of a count hold its round, so that an old count is not taken for a new one.
        oldest = round - 1
        while oldest < round:
            counted = tl.load(at, mask=there, other=0, volatile=True) >> 32
            oldest = tl.min(tl.min(tl.where(there, counted, round), 1), 0)
        before += tl.sum(tl.load(at, mask=there, other=0, volatile=True).to(tl.int32), 0)
    return before


@triton.jit
def write_routes(bases, slot, goes, here, entry, weight, places, LAYER: tl.constexpr):
    """Write a token's routes into its slot on each of some ranks; `here`: which of these owns each choice."""
    w = tl.arange(0, bases.shape[0])
    choice = tl.arange(0, LAYER.k_wide)
    is_owner = here[None, :] == w[:, None]
    local = tl.where(is_owner, entry[None, :] & LOCAL_BITS, -1)
    mask = goes[:, None] & (choice < LAYER.top_k)[None, :]
    at = (slot * LAYER.top_k)[:, None] + choice[None, :]
    tl.store(aligned(bases + places.ids, tl.int32)[:, None] + at, local, mask=mask)
    tl.store(
        aligned(bases + places.weights, tl.float32)[:, None] + at,
        tl.where(is_owner, weight[None, :], 0.0),
        mask=mask,
    )


@triton.jit
def blank(bases, is_rank, begin, end, start, window, places, LAYER: tl.constexpr):
    """Write ids of -1 into the slots of a chunk, from `start` on, that lie between each rank's `begin` and `end`."""
    K_WIDE: tl.constexpr = LAYER.k_wide
    slot = start + tl.arange(0, CHUNK)
    choice = tl.arange(0, K_WIDE)
    empty = (slot[None, :] >= begin[:, None]) & (slot < end)[None, :] & is_rank[:, None]
    row = aligned(bases + places.ids, tl.int32)[:, None] + (window + slot).to(tl.int64)[None, :] * LAYER.top_k
    mask = empty[:, :, None] & (choice < LAYER.top_k)[None, None, :]
    no_expert = tl.full([bases.shape[0], CHUNK, K_WIDE], -1, tl.int32)
    tl.store(row[:, :, None] + choice[None, None, :], no_expert, mask=mask)


@triton.jit
def write_counts(bases, is_rank, sent, rank, max_tokens, places):
    """Write into the memory of some ranks how many rows this one sends them."""
    counts = (bases + places.counts).to(tl.pointer_type(tl.int32)) + 2 * rank
    tl.store(counts, sent, mask=is_rank)
    tl.store(counts + 1, tl.zeros([bases.shape[0]], tl.int32) + max_tokens, mask=is_rank)


@triton.jit
def report_bad_ids(mine, host, chosen, token, num_experts):
    """Report an id that no expert has. The choice goes to no rank."""
    bad = (chosen >= num_experts) | (chosen < -1)
    if tl.max(bad.to(tl.int32), 0) > 0:
        worst = tl.max(tl.where(bad, chosen, -(2**31)), 0).to(tl.int64)
        nothing = tl.zeros([], tl.int64)
        report(mine, host, tl.full([], BAD_IDS, tl.int32), nothing + token, worst, nothing)


@triton.jit
def count_choices(choice_counts, chosen, num_experts):
    """Add 1 at index 1 + e for each choice of expert e; if `choice_counts` is None, count nothing."""
    if choice_counts is not None:
        tl.atomic_add(
            choice_counts + 1 + chosen, 1, mask=(chosen >= 0) & (chosen < num_experts), sem="relaxed"
        )


@triton.jit
def of_rank(batch, local, tokens, LAYER: tl.constexpr):
    """The part of a shared batch that belongs to one of its ranks."""
    choices = local.to(tl.int64) * tokens * LAYER.top_k
    slots = batch.slots + local.to(tl.int64) * tokens * LAYER.world
    return Batch(batch.ids + choices, batch.weights + choices, batch.experts, batch.copies, slots)


@triton.jit(
    do_not_specialize=[
        "tokens", "max_tokens", "first_rank", "blocks", "num_experts",
        "data_at", "scales_at", "global_at", "ids_at", "weights_at", "counts_at",
        "chunks", "others", "most_chunks",
    ]
)  # fmt: skip
def assign(
    batch, counts, choice_counts, peers, host,
    tokens, max_tokens, first_rank, blocks, num_experts,
    data_at, scales_at, global_at, ids_at, weights_at, counts_at, chunks, others, most_chunks,
    LAYER: tl.constexpr, EARLY: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Find the slots of a batch, and write its slots, routes and counts, and the ids of slots without rows.

    A block takes a chunk of tokens, or one of slots: a rank has `chunks + others` blocks, or fewer (`LIMITED`).
    """
    if tokens < 0:  # only loads the kernel, before any other waits
        return
    sizes = Sizes(tokens, max_tokens, first_rank, blocks, num_experts)
    places = Places(data_at, scales_at, global_at, ids_at, weights_at, counts_at)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    local = tl.program_id(0) // sizes.blocks
    block = tl.program_id(0) % sizes.blocks
    own = of_rank(batch, local, sizes.tokens, LAYER)
    counts += local * most_chunks * LAYER.world
    rank = sizes.first_rank + local
    # A chunk waits only for chunks with smaller numbers. If blocks are limited, the last one blanks all empty slots.
    if LIMITED:
        for chunk in range(block, chunks, sizes.blocks):
            assign_chunk(own, counts, choice_counts, peers, host, sizes, places, chunk, rank, LAYER)
        if block == sizes.blocks - 1:
            for nth in range(others):
                blank_chunk(counts, peers, sizes, places, nth, chunks, rank, LAYER)
    elif block < chunks:
        assign_chunk(own, counts, choice_counts, peers, host, sizes, places, block, rank, LAYER)
    else:
        blank_chunk(counts, peers, sizes, places, block - chunks, chunks, rank, LAYER)


@triton.jit
def blank_chunk(counts, peers, sizes, places, nth, chunks, rank, LAYER: tl.constexpr):
    """Wait for the counts of all chunks of tokens; write ids of -1 into the slots of a chunk that get no rows."""
    WORLD: tl.constexpr = LAYER.world
    AT_ONCE: tl.constexpr = LAYER.at_once
    round = tl.load(words_of(tl.load(peers + rank)) + ROUND) + 1
    w = tl.arange(0, AT_ONCE)
    for first in tl.static_range(0, WORLD, AT_ONCE):
        is_rank = first + w < WORLD
        bases = tl.load(peers + first + w, mask=is_rank, other=0)
        sent = sum_before(counts, chunks, round, first, LAYER)
        blank(bases, is_rank, sent, sizes.max_tokens, nth * CHUNK, rank * sizes.max_tokens, places, LAYER)


@triton.jit
def assign_chunk(batch, counts, choice_counts, peers, host, sizes, places, chunk, rank, LAYER: tl.constexpr):
    """Find the slots of one chunk, as soon as those of the earlier ones are known."""
    WORLD: tl.constexpr = LAYER.world
    AT_ONCE: tl.constexpr = LAYER.at_once
    K_WIDE: tl.constexpr = LAYER.k_wide
    tokens, max_tokens = sizes.tokens, sizes.max_tokens
    mine = words_of(tl.load(peers + rank))
    round = tl.load(mine + ROUND) + 1
    w = tl.arange(0, AT_ONCE)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    choice = tl.arange(0, K_WIDE)
    there = (token < tokens)[:, None] & (choice < LAYER.top_k)[None, :]
    at = token[:, None] * LAYER.top_k + choice[None, :]
    chosen = tl.load(batch.ids + at, mask=there, other=-1)
    entry = owners(chosen, batch, sizes.num_experts, LAYER)
    weight = tl.load(batch.weights + at, mask=there, other=0.0)
    count_choices(choice_counts, chosen, sizes.num_experts)
    flat = tl.reshape(chosen, [CHUNK * K_WIDE])
    report_bad_ids(mine, host, flat, tl.cast(chunk * CHUNK, tl.int64), sizes.num_experts)
    is_last = chunk == tl.maximum(0, (tokens - 1) // CHUNK)
    for first in tl.static_range(0, WORLD, AT_ONCE):
        is_rank = first + w < WORLD
        here = tl.where(entry >= 0, (entry >> RANK_BITS) - first, -1)
        goes = going(entry, first, LAYER)
        count = tl.sum(goes, 0)
        tl.store(counts + chunk * WORLD + first + w, (round << 32) | count.to(tl.int64), mask=is_rank)
        before = tl.zeros([AT_ONCE], tl.int32)
        if chunk * CHUNK < tokens:
            before = sum_before(counts, chunk, round, first, LAYER)
        slot = before[None, :] + tl.cumsum(goes, 0) - goes
        at = token[:, None] * WORLD + (first + w)[None, :]
        is_slot = (token < tokens)[:, None] & is_rank[None, :]
        tl.store(batch.slots + at, tl.where(goes > 0, slot, -1), mask=is_slot)
        bases = tl.load(peers + first + w, mask=is_rank, other=0)
        is_owner = here[:, None, :] == w[None, :, None]
        at = (rank * max_tokens + slot).to(tl.int64)[:, :, None] * LAYER.top_k + choice[None, None, :]
        mask = (goes > 0)[:, :, None] & (choice < LAYER.top_k)[None, None, :]
        number = tl.where(is_owner, (entry & LOCAL_BITS)[:, None, :], -1)
        tl.store(aligned(bases + places.ids, tl.int32)[None, :, None] + at, number, mask=mask)
        share = tl.where(is_owner, weight[:, None, :], 0.0)
        tl.store(aligned(bases + places.weights, tl.float32)[None, :, None] + at, share, mask=mask)
        if is_last:
            write_counts(bases, is_rank, before + count, rank, max_tokens, places)


@triton.jit(
    do_not_specialize=[
        "tokens", "max_tokens", "first_rank", "blocks", "num_experts",
        "data_at", "scales_at", "global_at", "ids_at", "weights_at", "counts_at",
        "row_parts", "others", "layer", "deadline",
    ]
)  # fmt: skip
def push(
    x, batch, choice_counts, peers, host,
    tokens, max_tokens, first_rank, blocks, num_experts,
    data_at, scales_at, global_at, ids_at, weights_at, counts_at, row_parts, others, layer, global_scale, deadline,
    LAYER: tl.constexpr, ROW: tl.constexpr, TURNS: tl.constexpr, WHOLE: tl.constexpr, WAITS: tl.constexpr,
    EARLY: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Write the rows of a batch to their ranks. With `WHOLE`, do all of the dispatch, and wait for the other ranks.

    A rank has a block for each part of a row and each chunk of slots to blank (`others`), or fewer (`LIMITED`).
    """
    if tokens < 0:  # only loads the kernel
        return
    sizes = Sizes(tokens, max_tokens, first_rank, blocks, num_experts)
    places = Places(data_at, scales_at, global_at, ids_at, weights_at, counts_at)
    local = tl.program_id(0) // sizes.blocks
    block = tl.program_id(0) % sizes.blocks
    rank = sizes.first_rank + local
    x += local.to(tl.int64) * sizes.tokens * ROW.hidden
    own = of_rank(batch, local, sizes.tokens, LAYER)
    # Two calls: in a loop that runs once, the compiler needs up to 16 registers more.
    if LIMITED and ROW.rows > 1:
        if EARLY:
            gdc_wait()
        push_rows(x, own.slots, peers, block, sizes, rank * max_tokens, places, LAYER, ROW)
    elif LIMITED:
        for item in range(block, row_parts + others, sizes.blocks):
            push_item(
                x, own, choice_counts, peers, host, sizes, places, item, row_parts, rank, global_scale,
                LAYER, ROW, WHOLE, EARLY,
            )  # fmt: skip
    else:
        push_item(
            x, own, choice_counts, peers, host, sizes, places, block, row_parts, rank, global_scale,
            LAYER, ROW, WHOLE, EARLY,
        )  # fmt: skip
    if WHOLE:
        mine = words_of(tl.load(peers + rank))
        tl.debug_barrier()
        arrived = (mine + ARRIVED).to(tl.pointer_type(tl.int32))
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == sizes.blocks - 1:
            tl.store(arrived, 0)
            publish_and_wait(
                mine, peers, rank, host, layer, deadline, DISPATCH, 0, LAYER.world, LAYER.wide, TURNS, WAITS
            )


@triton.jit
def push_rows(x, slots, peers, block, sizes, window, places, LAYER: tl.constexpr, ROW: tl.constexpr):
    """Write a block's share of the rows, copied or cast, several at a time, while the next ones are loaded."""
    WORLD: tl.constexpr = LAYER.world
    HIDDEN: tl.constexpr = ROW.hidden
    PADDED: tl.constexpr = ROW.padded
    TILE: tl.constexpr = ROW.tile
    PARTS: tl.constexpr = (PADDED + TILE - 1) // TILE
    items = tl.cdiv(sizes.tokens, ROW.rows) * PARTS
    for item in tl.range(block, items, sizes.blocks, num_stages=ROW.stages):
        row = (item // PARTS) * ROW.rows + tl.arange(0, ROW.rows)
        there = row < sizes.tokens
        h = (item % PARTS) * TILE + tl.arange(0, TILE)
        at = row.to(tl.int64)[:, None] * HIDDEN + h[None, :]
        values = tl.load(x + at, mask=there[:, None] & (h < HIDDEN)[None, :], other=0)
        if ROW.format == CAST:
            values = cast_within(values, ROW.kind)
        if WORLD <= 8:
            for w in tl.static_range(WORLD):
                store_rows(values, slots, peers, row, w, h, there, window, places, LAYER, ROW)
        else:
            for w in range(WORLD):
                store_rows(values, slots, peers, row, w, h, there, window, places, LAYER, ROW)


@triton.jit
def store_rows(
    values, slots, peers, row, w, h, there, window, places, LAYER: tl.constexpr, ROW: tl.constexpr
):
    """Write a tile of some rows into their slots of one rank, where they go there."""
    slot = tl.load(slots + row * LAYER.world + w, mask=there, other=-1)
    data = aligned(tl.load(peers + w) + places.data, ROW.kind)
    at = (window + slot).to(tl.int64)[:, None] * ROW.padded + h[None, :]
    tl.store(data + at, values, mask=(slot >= 0)[:, None] & (h < ROW.padded)[None, :])


@triton.jit
def push_item(
    x, batch, choice_counts, peers, host, sizes, places, item, row_parts, rank, global_scale,
    LAYER: tl.constexpr, ROW: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a part of a row; for items behind the last one, with `WHOLE`, write counts and ids of empty slots."""
    WORLD: tl.constexpr = LAYER.world
    AT_ONCE: tl.constexpr = LAYER.at_once
    HIDDEN: tl.constexpr = ROW.hidden
    PADDED: tl.constexpr = ROW.padded
    TILE: tl.constexpr = ROW.tile
    window = rank * sizes.max_tokens
    if EARLY:
        if WHOLE | (item >= row_parts):
            gdc_wait()
    if item < row_parts:
        token = item // ROW.parts
        part = item % ROW.parts
        row = x + tl.cast(token, tl.int64) * HIDDEN
        SHARE: tl.constexpr = (PADDED + ROW.parts - 1) // ROW.parts
        begin = part * SHARE
        h = tl.arange(0, TILE)
        # The row is loaded while its slots are found.
        values = tl.load(row + begin + h, mask=begin + h < HIDDEN, other=0)
        if WHOLE:
            assign_one(batch, choice_counts, peers, host, sizes, places, token, part, rank, LAYER)
        elif EARLY:
            gdc_wait()
        g = global_scale
        ANY_SCALE: tl.constexpr = (ROW.format == NVFP4) & (ROW.option == 0)
        if ANY_SCALE:  # one global scale for each row, from all of it, before any of it is encoded
            amax = finite_amax(values.to(tl.float32), TILE)
            for c in tl.static_range(TILE, PADDED, TILE):
                more = tl.load(row + c + h, mask=c + h < HIDDEN, other=0)
                amax = tl.maximum(amax, finite_amax(more.to(tl.float32), TILE))
            g = row_global_scale(amax)
        to = batch.slots + token * WORLD
        if ANY_SCALE and not is_easy(g):
            # Rare: encoded in smaller tiles, so that it needs no more registers than the usual way.
            STEP: tl.constexpr = min(TILE, 1024)
            for first in range(0, SHARE, STEP):
                s = first + tl.arange(0, STEP)
                some = tl.load(row + s, mask=s < HIDDEN, other=0)
                push_tile(some, g, to, peers, window, first, SHARE, places, LAYER, ROW, STEP, False)
        else:
            EASY: tl.constexpr = ANY_SCALE or ROW.option == 2
            for c in tl.static_range(0, SHARE, TILE):
                now = values
                if c + TILE < SHARE:  # the next tile is loaded while this one is written
                    values = tl.load(row + begin + c + TILE + h, mask=begin + c + TILE + h < HIDDEN, other=0)
                push_tile(now, g, to, peers, window, begin + c, begin + SHARE, places, LAYER, ROW, TILE, EASY)
    elif WHOLE:
        w = tl.arange(0, AT_ONCE)
        start = (item - row_parts) * CHUNK
        for first in tl.static_range(0, WORLD, AT_ONCE):
            is_rank = first + w < WORLD
            bases = tl.load(peers + first + w, mask=is_rank, other=0)
            sent = count_before(batch, sizes.tokens, sizes.num_experts, first, LAYER)
            blank(bases, is_rank, sent, sizes.max_tokens, start, window, places, LAYER)
            if start == 0:
                write_counts(bases, is_rank, sent, rank, sizes.max_tokens, places)


@triton.jit
def assign_one(batch, choice_counts, peers, host, sizes, places, token, part, rank, LAYER: tl.constexpr):
    """Find the slots of one token in every block of it, which reads them back; its first block writes the routes."""
    WORLD: tl.constexpr = LAYER.world
    AT_ONCE: tl.constexpr = LAYER.at_once
    K_WIDE: tl.constexpr = LAYER.k_wide
    choice = tl.arange(0, K_WIDE)
    chosen = tl.load(batch.ids + token * LAYER.top_k + choice, mask=choice < LAYER.top_k, other=-1)
    weight = tl.load(batch.weights + token * LAYER.top_k + choice, mask=choice < LAYER.top_k, other=0.0)
    entry = tl.reshape(owners(chosen[None, :], batch, sizes.num_experts, LAYER), [K_WIDE])
    if part == 0:
        count_choices(choice_counts, chosen, sizes.num_experts)
    mine = words_of(tl.load(peers + rank))
    report_bad_ids(mine, host, chosen, tl.cast(token, tl.int64), sizes.num_experts)
    w = tl.arange(0, AT_ONCE)
    for first in tl.static_range(0, WORLD, AT_ONCE):
        here = tl.where(entry >= 0, (entry >> RANK_BITS) - first, -1)
        goes = tl.max((here[None, :] == w[:, None]).to(tl.int32), 1) > 0
        before = count_before(batch, token, sizes.num_experts, first, LAYER)
        is_rank = first + w < WORLD
        at = batch.slots + token * WORLD + first + w
        tl.store(at, tl.where(goes, before, -1), mask=is_rank)
        if part == 0:
            bases = tl.load(peers + first + w, mask=is_rank, other=0)
            slot = (rank * sizes.max_tokens + before).to(tl.int64)
            write_routes(bases, slot, goes, here, entry, weight, places, LAYER)
    tl.debug_barrier()


@triton.jit
def encode_tile(values, g, ROW: tl.constexpr, TILE: tl.constexpr, EASY: tl.constexpr):
    """The codes of a tile of a row, and the scales of its blocks; the numbers again, where a format has no scales."""
    if ROW.format == COPY:
        codes, scales = values, values
    elif ROW.format == CAST:
        codes, scales = cast_within(values, ROW.kind), values
    elif ROW.format == MXFP8:
        codes, scales = encode_mxfp8(values.to(tl.float32), TILE, values.dtype == tl.float32)
    elif ROW.format == NVFP4:
        codes, scales = encode_nvfp4(values.to(tl.float32), g, TILE, EASY)
    else:
        codes, scales = encode_fp8_block(values.to(tl.float32), TILE, ROW.option == 1)
    return codes, scales


@triton.jit
def push_tile(
    values, g, slots, peers, window, column, end, places,
    LAYER: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, EASY: tl.constexpr,
):  # fmt: skip
    """Encode a tile of a row, and write it to the ranks where the row goes."""
    WORLD: tl.constexpr = LAYER.world
    codes, scales = encode_tile(values, g, ROW, TILE, EASY)
    if WORLD <= 8:
        for w in tl.static_range(WORLD):
            slot = tl.load(slots + w)
            at = (window + slot).to(tl.int64)
            store_tile(codes, scales, g, slot >= 0, tl.load(peers + w), at, column, end, places, ROW, TILE)
    else:
        for w in range(WORLD):
            slot = tl.load(slots + w)
            at = (window + slot).to(tl.int64)
            if slot >= 0:
                store_tile(
                    codes, scales, g, slot >= 0, tl.load(peers + w), at, column, end, places, ROW, TILE
                )


@triton.jit
def store_tile(
    codes, scales, g, goes, base, slot, column, end, places, ROW: tl.constexpr, TILE: tl.constexpr
):
    """Write an encoded tile into a slot of one rank, if it goes there."""
    GROUP: tl.constexpr = 8 if ROW.format == NVFP4 else 1
    WIDTH: tl.constexpr = ROW.padded // GROUP
    if ROW.format == NVFP4:
        # A thread's words lie apart: wider stores would send them through shared memory first.
        data = (base + places.data).to(tl.pointer_type(ROW.kind)) + slot * WIDTH
    else:
        data = aligned(base + places.data, ROW.kind) + slot * WIDTH
    h = column // GROUP + tl.arange(0, TILE // GROUP)
    # What a cache cannot hold leaves it first: rows of 14 KB to 5.3 of 8 ranks took 748 and 757 µs on an H200.
    POLICY: tl.constexpr = ".cs" if ROW.streams else ""
    tl.store(data + h, codes, mask=(h < WIDTH) & (h < end // GROUP) & goes, cache_modifier=POLICY)
    if (ROW.format == MXFP8) | (ROW.format == NVFP4) | (ROW.format == FP8_BLOCK):
        BLOCK: tl.constexpr = 32 if ROW.format == MXFP8 else (16 if ROW.format == NVFP4 else 128)
        SCALE: tl.constexpr = scales.dtype
        there = aligned(base + places.scales, SCALE) + slot * (ROW.padded // BLOCK)
        s = column // BLOCK + tl.arange(0, TILE // BLOCK)
        tl.store(there + s, scales, mask=(s < ROW.padded // BLOCK) & (s < end // BLOCK) & goes)
    if ROW.format == NVFP4:
        if ROW.option == 0:
            at = (base + places.globals).to(tl.pointer_type(tl.float32)) + slot
            tl.store(at, g, mask=goes & (column == 0))
