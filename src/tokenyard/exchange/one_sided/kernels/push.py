"""Dispatch: each row is read once, encoded once, and written to every rank that owns one of its experts.

Where a row goes follows from its place: the i-th token that rank r sends to rank w lies in slot `r · max_tokens +
i` of w's dispatch region. Nothing is decided by who comes first, so places are the same in every run. They are
found by counting the earlier tokens that go to the same rank:

- `assign` takes a chunk of tokens a block. It counts, tells the later chunks, waits for the counts of the earlier
  ones (blocks with smaller numbers, which a GPU starts first), and writes its tokens' slots and routes.
- `push` takes a row a block, or a part of it: reads it, encodes it, and writes it to its ranks.
  `flags.signal_and_wait` comes behind.
- In a short batch `push` does all of it (`WHOLE`): every block counts for its own token, further blocks write what
  else there is to write, and the block that ends last meets the other ranks. In a long one that would cost every
  block the time in which its stores arrive.

Routes are written as the receiver needs them: the ids of its own experts, -1 for all others, and -1 into every slot
that gets no row.

Kernels are launched before their predecessors have ended (`EARLY`): they wait for these themselves, `push` with the
row already on its way.

Several ranks of one process may share a launch; their batches stand one behind the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenyard.exchange.one_sided.kernels.flags import (
    ARRIVED,
    BAD_IDS,
    DISPATCH,
    ROUND,
    meet_others,
    report,
    words_of,
)
from tokenyard.exchange.one_sided.kernels.numerics import (
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
# Tokens whose ids are looked at together, and slots that are blanked together.
CHUNK = tl.constexpr(64)
# Where the table of experts has the rank of an expert; below it stands the expert's number there.
RANK_BITS = tl.constexpr(16)
LOCAL_BITS = tl.constexpr(0xFFFF)

COPY = tl.constexpr(0)
CAST = tl.constexpr(1)
MXFP8 = tl.constexpr(2)
NVFP4 = tl.constexpr(3)
FP8_BLOCK = tl.constexpr(4)


@triton.jit
def aligned(address, KIND: tl.constexpr):
    """An address, or several, as pointers to a kind of elements. Payloads begin at multiples of 128 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 16)


@triton.jit
def either(a, b):
    """Bits that one of two has."""
    return a | b


@triton.jit
def owners(ids, experts, copies, num_experts, REPLICAS: tl.constexpr):
    """For choices `[tokens, K]`: the table's entry of the expert that serves each; -1 for nobody, or a bad id."""
    known = (ids >= 0) & (ids < num_experts)
    if REPLICAS == 1:
        return tl.load(experts + ids, mask=known, other=-1)
    turn = tl.sum(tl.where(ids > 0, ids, 0).to(tl.int64), 1)
    count = tl.load(copies + ids, mask=known, other=1)
    return tl.load(experts + ids * REPLICAS + turn[:, None] % count, mask=known, other=-1)


@triton.jit
def going(
    ids, experts, copies, start, end, num_experts, first,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """How many of the tokens from `start` to `end`, a chunk at most, go to each of the ranks from `first` on."""
    token = start + tl.arange(0, CHUNK)
    choice = tl.arange(0, K_WIDE)
    there = (token < end)[:, None] & (choice < TOP_K)[None, :]
    chosen = tl.load(ids + token[:, None] * TOP_K + choice[None, :], mask=there, other=-1)
    entry = owners(chosen, experts, copies, num_experts, REPLICAS)
    rank = tl.where(entry >= 0, (entry >> RANK_BITS) - first, -1)
    bit = tl.where((rank >= 0) & (rank < AT_ONCE), 1 << rank, 0)
    goes = (tl.reduce(bit, 1, either)[:, None] >> tl.arange(0, AT_ONCE)[None, :]) & 1
    return tl.sum(goes, 0)


@triton.jit
def count_before(
    ids, experts, copies, token, num_experts, first,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """How many tokens before this one go to each of the ranks from `first` on."""
    before = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, token, CHUNK):
        before += going(
            ids, experts, copies, start, tl.minimum(start + CHUNK, token), num_experts, first,
            TOP_K, K_WIDE, REPLICAS, AT_ONCE,
        )  # fmt: skip
    return before


@triton.jit
def sum_before(counts, chunk, round, first, WORLD: tl.constexpr, AT_ONCE: tl.constexpr):
    """The tokens of all earlier chunks that go to some ranks, as soon as these chunks have told their counts."""
    w = tl.arange(0, AT_ONCE)
    before = tl.zeros([AT_ONCE], tl.int32)
    for c in range(0, chunk, CHUNK):
        row = c + tl.arange(0, CHUNK)
        there = (row < chunk)[:, None] & ((first + w) < WORLD)[None, :]
        at = counts + row[:, None] * WORLD + (first + w)[None, :]
        # A count carries its round above it: an old one is not taken for this one.
        oldest = round - 1
        while oldest < round:
            told = tl.load(at, mask=there, other=0, volatile=True) >> 32
            oldest = tl.min(tl.min(tl.where(there, told, round), 1), 0)
        before += tl.sum(tl.load(at, mask=there, other=0, volatile=True).to(tl.int32), 0)
    return before


@triton.jit
def write_routes(
    bases, slot, goes, here, entry, weight, ids_at, weights_at,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr,
):  # fmt: skip
    """Write a token's routes into its slot on each of some ranks: `here` is where its choices live, among these."""
    w = tl.arange(0, bases.shape[0])
    choice = tl.arange(0, K_WIDE)
    lives = here[None, :] == w[:, None]
    local = tl.where(lives, entry[None, :] & LOCAL_BITS, -1)
    mask = goes[:, None] & (choice < TOP_K)[None, :]
    at = (slot * TOP_K)[:, None] + choice[None, :]
    tl.store(aligned(bases + ids_at, tl.int32)[:, None] + at, local, mask=mask)
    tl.store(
        aligned(bases + weights_at, tl.float32)[:, None] + at,
        tl.where(lives, weight[None, :], 0.0),
        mask=mask,
    )


@triton.jit
def blank(bases, is_rank, begin, end, start, window, ids_at, TOP_K: tl.constexpr, K_WIDE: tl.constexpr):
    """Write -1 into those slots of a chunk from `start` on that lie between `begin`, for each rank, and `end`."""
    slot = start + tl.arange(0, CHUNK)
    choice = tl.arange(0, K_WIDE)
    empty = (slot[None, :] >= begin[:, None]) & (slot < end)[None, :] & is_rank[:, None]
    row = aligned(bases + ids_at, tl.int32)[:, None] + (window + slot).to(tl.int64)[None, :] * TOP_K
    mask = empty[:, :, None] & (choice < TOP_K)[None, None, :]
    nobody = tl.full([bases.shape[0], CHUNK, K_WIDE], -1, tl.int32)
    tl.store(row[:, :, None] + choice[None, None, :], nobody, mask=mask)


@triton.jit
def tell_counts(bases, is_rank, sent, rank, max_tokens, counts_at):
    """Tell some ranks how many rows this one sends them."""
    counts = (bases + counts_at).to(tl.pointer_type(tl.int32)) + 2 * rank
    tl.store(counts, sent, mask=is_rank)
    tl.store(counts + 1, tl.zeros([bases.shape[0]], tl.int32) + max_tokens, mask=is_rank)


@triton.jit
def report_bad_ids(mine, host, chosen, token, num_experts):
    """Tell of an id that no expert has. It goes nowhere."""
    bad = (chosen >= num_experts) | (chosen < -1)
    if tl.max(bad.to(tl.int32), 0) > 0:
        worst = tl.max(tl.where(bad, chosen, -(2**31)), 0).to(tl.int64)
        nothing = tl.zeros([], tl.int64)
        report(mine, host, tl.full([], BAD_IDS, tl.int32), nothing + token, worst, nothing)


@triton.jit
def count_choices(choice_counts, chosen, num_experts, COUNTS: tl.constexpr):
    """Count the choices of each expert behind the first number, if that is wanted."""
    if COUNTS:
        tl.atomic_add(
            choice_counts + 1 + chosen, 1, mask=(chosen >= 0) & (chosen < num_experts), sem="relaxed"
        )


@triton.jit(
    do_not_specialize=[
        "tokens", "max_tokens", "first_rank", "blocks", "chunks", "most_chunks", "num_experts", "ids_at", "weights_at",
        "counts_at",
    ]
)  # fmt: skip
def assign(
    ids, weights, experts, copies, slots, counts, choice_counts, peers, host,
    tokens, max_tokens, first_rank, blocks, chunks, most_chunks, num_experts, ids_at, weights_at, counts_at,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, WORLD: tl.constexpr, AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr, COUNTS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Find the slots of a chunk of tokens, and write all but their rows. The chunks reach up to `max_tokens`."""
    if tokens < 0:  # a rehearsal: the kernel is loaded before any other waits
        return
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    local = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    rank = first_rank + local
    ids += local.to(tl.int64) * tokens * TOP_K
    weights += local.to(tl.int64) * tokens * TOP_K
    slots += local.to(tl.int64) * tokens * WORLD
    counts += local * most_chunks * WORLD
    mine = words_of(tl.load(peers + rank))
    round = tl.load(mine + ROUND) + 1
    if LIMITED:
        for chunk in range(block, chunks, blocks):  # each waits for smaller ones only
            assign_chunk(
                ids, weights, experts, copies, slots, counts, choice_counts, peers, host, mine, chunk, rank, round,
                tokens, max_tokens, num_experts, ids_at, weights_at, counts_at,
                TOP_K, K_WIDE, REPLICAS, WORLD, AT_ONCE, COUNTS,
            )  # fmt: skip
    else:
        assign_chunk(
            ids, weights, experts, copies, slots, counts, choice_counts, peers, host, mine, block, rank, round,
            tokens, max_tokens, num_experts, ids_at, weights_at, counts_at,
            TOP_K, K_WIDE, REPLICAS, WORLD, AT_ONCE, COUNTS,
        )  # fmt: skip


@triton.jit
def assign_chunk(
    ids, weights, experts, copies, slots, counts, choice_counts, peers, host, mine, chunk, rank, round,
    tokens, max_tokens, num_experts, ids_at, weights_at, counts_at,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, WORLD: tl.constexpr, AT_ONCE: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """Find the slots of one chunk, as soon as those of the earlier ones are known."""
    w = tl.arange(0, AT_ONCE)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    choice = tl.arange(0, K_WIDE)
    there = (token < tokens)[:, None] & (choice < TOP_K)[None, :]
    chosen = tl.load(ids + token[:, None] * TOP_K + choice[None, :], mask=there, other=-1)
    entry = owners(chosen, experts, copies, num_experts, REPLICAS)
    weight = tl.load(weights + token[:, None] * TOP_K + choice[None, :], mask=there, other=0.0)
    count_choices(choice_counts, chosen, num_experts, COUNTS)
    report_bad_ids(
        mine, host, tl.reshape(chosen, [CHUNK * K_WIDE]), tl.cast(chunk * CHUNK, tl.int64), num_experts
    )
    is_last = chunk == tl.maximum(0, (tokens - 1) // CHUNK)
    for first in tl.static_range(0, WORLD, AT_ONCE):
        is_rank = first + w < WORLD
        here = tl.where(entry >= 0, (entry >> RANK_BITS) - first, -1)
        bit = tl.where((here >= 0) & (here < AT_ONCE), 1 << here, 0)
        goes = (tl.reduce(bit, 1, either)[:, None] >> w[None, :]) & 1
        count = tl.sum(goes, 0)
        tl.store(counts + chunk * WORLD + first + w, (round << 32) | count.to(tl.int64), mask=is_rank)
        before = tl.zeros([AT_ONCE], tl.int32)
        if chunk * CHUNK < tokens:
            before = sum_before(counts, chunk, round, first, WORLD, AT_ONCE)
        slot = before[None, :] + tl.cumsum(goes, 0) - goes
        at = token[:, None] * WORLD + (first + w)[None, :]
        tl.store(slots + at, tl.where(goes > 0, slot, -1), mask=(token < tokens)[:, None] & is_rank[None, :])
        bases = tl.load(peers + first + w, mask=is_rank, other=0)
        lives = here[:, None, :] == w[None, :, None]
        at = (rank * max_tokens + slot).to(tl.int64)[:, :, None] * TOP_K + choice[None, None, :]
        mask = (goes > 0)[:, :, None] & (choice < TOP_K)[None, None, :]
        number = tl.where(lives, (entry & LOCAL_BITS)[:, None, :], -1)
        tl.store(aligned(bases + ids_at, tl.int32)[None, :, None] + at, number, mask=mask)
        share = tl.where(lives, weight[:, None, :], 0.0)
        tl.store(aligned(bases + weights_at, tl.float32)[None, :, None] + at, share, mask=mask)
        # Behind the batch nobody writes; what the batch leaves free at its end, its last chunk knows.
        nowhere = tl.zeros([AT_ONCE], tl.int32) + tokens
        window = rank * max_tokens
        blank(bases, is_rank, nowhere, max_tokens, chunk * CHUNK, window, ids_at, TOP_K, K_WIDE)
        if is_last:
            sent = before + count
            tell_counts(bases, is_rank, sent, rank, max_tokens, counts_at)
            for start in range(tl.min(tl.where(is_rank, sent, tokens), 0), tokens, CHUNK):
                blank(bases, is_rank, sent, tokens, start, window, ids_at, TOP_K, K_WIDE)


@triton.jit(
    do_not_specialize=[
        "tokens", "max_tokens", "first_rank", "blocks", "row_parts", "others", "num_experts", "layer",
        "data_at", "scales_at", "global_at", "ids_at", "weights_at", "counts_at", "deadline",
    ]
)  # fmt: skip
def push(
    x, ids, weights, experts, copies, slots, choice_counts, peers, host,
    tokens, max_tokens, first_rank, blocks, row_parts, others, num_experts, layer,
    data_at, scales_at, global_at, ids_at, weights_at, counts_at, global_scale, deadline,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, OPTION: tl.constexpr,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, WORLD: tl.constexpr, WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr, WHOLE: tl.constexpr,
    WAITS: tl.constexpr, EARLY: tl.constexpr, COUNTS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Write the rows of a batch to their ranks. With `WHOLE` write all else, too, and meet the other ranks.

    A rank has `blocks`, one for each part of a row and for each of the other things; or fewer (`LIMITED`).
    """
    if tokens < 0:  # a rehearsal
        return
    local = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    rank = first_rank + local
    x += local.to(tl.int64) * tokens * HIDDEN
    slots += local.to(tl.int64) * tokens * WORLD
    if WHOLE:
        ids += local.to(tl.int64) * tokens * TOP_K
        weights += local.to(tl.int64) * tokens * TOP_K
    if LIMITED:
        for item in range(block, row_parts + others, blocks):
            push_item(
                x, ids, weights, experts, copies, slots, choice_counts, peers, host, item, rank,
                tokens, max_tokens, row_parts, num_experts,
                data_at, scales_at, global_at, ids_at, weights_at, counts_at, global_scale,
                HIDDEN, PADDED, FORMAT, KIND, OPTION, TOP_K, K_WIDE, REPLICAS, WORLD, AT_ONCE, TILE, PARTS, WHOLE,
                EARLY, COUNTS,
            )  # fmt: skip
    else:
        push_item(
            x, ids, weights, experts, copies, slots, choice_counts, peers, host, block, rank,
            tokens, max_tokens, row_parts, num_experts,
            data_at, scales_at, global_at, ids_at, weights_at, counts_at, global_scale,
            HIDDEN, PADDED, FORMAT, KIND, OPTION, TOP_K, K_WIDE, REPLICAS, WORLD, AT_ONCE, TILE, PARTS, WHOLE,
            EARLY, COUNTS,
        )  # fmt: skip
    if WHOLE:
        mine = words_of(tl.load(peers + rank))
        tl.debug_barrier()
        arrived = (mine + ARRIVED).to(tl.pointer_type(tl.int32))
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == blocks - 1:
            tl.store(arrived, 0)
            meet_others(mine, peers, rank, host, layer, deadline, DISPATCH, 0, WORLD, WIDE, TURNS, WAITS)


@triton.jit
def push_item(
    x, ids, weights, experts, copies, slots, choice_counts, peers, host, item, rank,
    tokens, max_tokens, row_parts, num_experts,
    data_at, scales_at, global_at, ids_at, weights_at, counts_at, global_scale,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, OPTION: tl.constexpr,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, WORLD: tl.constexpr, AT_ONCE: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Write a part of a row; behind the last one, with `WHOLE`, the counts, and what stands in slots without rows."""
    if EARLY:
        if WHOLE | (item >= row_parts):
            gdc_wait()
    if item < row_parts:
        token = item // PARTS
        part = item % PARTS
        row = x + tl.cast(token, tl.int64) * HIDDEN
        SHARE: tl.constexpr = (PADDED + PARTS - 1) // PARTS
        begin = part * SHARE
        h = tl.arange(0, TILE)
        # The row is on its way while its places are found.
        values = tl.load(row + begin + h, mask=begin + h < HIDDEN, other=0)
        if WHOLE:
            assign_one(
                ids, weights, experts, copies, slots, choice_counts, peers, host, token, part, rank, max_tokens,
                num_experts, ids_at, weights_at, TOP_K, K_WIDE, REPLICAS, WORLD, AT_ONCE, COUNTS,
            )  # fmt: skip
        elif EARLY:
            gdc_wait()
        g = global_scale
        if FORMAT == NVFP4:
            if OPTION == 0:  # one for each row: of all of the row, before any of it is encoded
                amax = finite_amax(values.to(tl.float32), TILE)
                for c in tl.static_range(TILE, PADDED, TILE):
                    more = tl.load(row + c + h, mask=c + h < HIDDEN, other=0)
                    amax = tl.maximum(amax, finite_amax(more.to(tl.float32), TILE))
                g = row_global_scale(amax)
        to = slots + token * WORLD
        ANY_SCALE: tl.constexpr = (FORMAT == NVFP4) & (OPTION == 0)
        if ANY_SCALE and not is_easy(g):
            # Rare: in a few steps that need no more registers than the usual way does.
            STEP: tl.constexpr = min(TILE, 1024)
            for first_column in range(0, SHARE, STEP):
                s = first_column + tl.arange(0, STEP)
                push_tile(
                    tl.load(row + s, mask=s < HIDDEN, other=0), g, to, peers, rank * max_tokens, first_column, SHARE,
                    data_at, scales_at, global_at, PADDED, FORMAT, KIND, OPTION, STEP, WORLD, False,
                )  # fmt: skip
        else:
            for c in tl.static_range(0, SHARE, TILE):
                now = values
                if c + TILE < SHARE:  # the next tile is on its way while this one is written
                    values = tl.load(row + begin + c + TILE + h, mask=begin + c + TILE + h < HIDDEN, other=0)
                push_tile(
                    now, g, to, peers, rank * max_tokens, begin + c, begin + SHARE, data_at, scales_at, global_at,
                    PADDED, FORMAT, KIND, OPTION, TILE, WORLD, ANY_SCALE or OPTION == 2,
                )  # fmt: skip
    elif WHOLE:
        w = tl.arange(0, AT_ONCE)
        start = (item - row_parts) * CHUNK
        for first in tl.static_range(0, WORLD, AT_ONCE):
            is_rank = first + w < WORLD
            bases = tl.load(peers + first + w, mask=is_rank, other=0)
            sent = count_before(
                ids, experts, copies, tokens, num_experts, first, TOP_K, K_WIDE, REPLICAS, AT_ONCE
            )
            blank(bases, is_rank, sent, max_tokens, start, rank * max_tokens, ids_at, TOP_K, K_WIDE)
            if start == 0:
                tell_counts(bases, is_rank, sent, rank, max_tokens, counts_at)


@triton.jit
def assign_one(
    ids, weights, experts, copies, slots, choice_counts, peers, host, token, part, rank, max_tokens, num_experts,
    ids_at, weights_at,
    TOP_K: tl.constexpr, K_WIDE: tl.constexpr, REPLICAS: tl.constexpr, WORLD: tl.constexpr, AT_ONCE: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """Find the slots of one token, and write its routes. Every block of the token does so, and reads them back."""
    choice = tl.arange(0, K_WIDE)
    chosen = tl.load(ids + token * TOP_K + choice, mask=choice < TOP_K, other=-1)
    weight = tl.load(weights + token * TOP_K + choice, mask=choice < TOP_K, other=0.0)
    entry = tl.reshape(owners(chosen[None, :], experts, copies, num_experts, REPLICAS), [K_WIDE])
    if part == 0:
        count_choices(choice_counts, chosen, num_experts, COUNTS)
    report_bad_ids(words_of(tl.load(peers + rank)), host, chosen, tl.cast(token, tl.int64), num_experts)
    w = tl.arange(0, AT_ONCE)
    for first in tl.static_range(0, WORLD, AT_ONCE):
        here = tl.where(entry >= 0, (entry >> RANK_BITS) - first, -1)
        goes = tl.max((here[None, :] == w[:, None]).to(tl.int32), 1) > 0
        before = count_before(
            ids, experts, copies, token, num_experts, first, TOP_K, K_WIDE, REPLICAS, AT_ONCE
        )  # fmt: skip
        is_rank = first + w < WORLD
        tl.store(slots + token * WORLD + first + w, tl.where(goes, before, -1), mask=is_rank)
        if part == 0:
            bases = tl.load(peers + first + w, mask=is_rank, other=0)
            slot = (rank * max_tokens + before).to(tl.int64)
            write_routes(bases, slot, goes, here, entry, weight, ids_at, weights_at, TOP_K, K_WIDE)
    tl.debug_barrier()


@triton.jit
def push_tile(
    values, g, slots, peers, window, column, end, data_at, scales_at, global_at,
    PADDED: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, OPTION: tl.constexpr, TILE: tl.constexpr,
    WORLD: tl.constexpr, EASY: tl.constexpr,
):  # fmt: skip
    """Encode a tile of a row, and write it to the ranks where the row goes."""
    if FORMAT == COPY:
        codes, scales = values, values
        GROUP: tl.constexpr = 1
    elif FORMAT == CAST:
        codes, scales = cast_within(values, KIND), values
        GROUP: tl.constexpr = 1
    elif FORMAT == MXFP8:
        codes, scales = encode_mxfp8(values.to(tl.float32), TILE, values.dtype == tl.float32)
        GROUP: tl.constexpr = 1
    elif FORMAT == NVFP4:
        codes, scales = encode_nvfp4(values.to(tl.float32), g, TILE, EASY)
        GROUP: tl.constexpr = 8
    else:
        codes, scales = encode_fp8_block(values.to(tl.float32), TILE, OPTION == 1)
        GROUP: tl.constexpr = 1
    if WORLD <= 8:
        for w in tl.static_range(WORLD):
            slot = tl.load(slots + w)
            store_tile(
                codes, scales, g, slot >= 0, tl.load(peers + w), (window + slot).to(tl.int64), column, end,
                data_at, scales_at, global_at, PADDED, FORMAT, KIND, OPTION, TILE, GROUP,
            )  # fmt: skip
    else:
        for w in range(WORLD):
            slot = tl.load(slots + w)
            if slot >= 0:
                store_tile(
                    codes, scales, g, slot >= 0, tl.load(peers + w), (window + slot).to(tl.int64), column, end,
                    data_at, scales_at, global_at, PADDED, FORMAT, KIND, OPTION, TILE, GROUP,
                )  # fmt: skip


@triton.jit
def store_tile(
    codes, scales, g, goes, base, slot, column, end, data_at, scales_at, global_at,
    PADDED: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, OPTION: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Write an encoded tile into a slot of one rank, if it goes there."""
    ROW: tl.constexpr = PADDED // GROUP
    if FORMAT == NVFP4:
        # A thread's words lie apart: wider stores would send them through shared memory first.
        data = (base + data_at).to(tl.pointer_type(KIND)) + slot * ROW
    else:
        data = aligned(base + data_at, KIND) + slot * ROW
    h = column // GROUP + tl.arange(0, TILE // GROUP)
    tl.store(data + h, codes, mask=(h < ROW) & (h < end // GROUP) & goes)
    if (FORMAT == MXFP8) | (FORMAT == NVFP4) | (FORMAT == FP8_BLOCK):
        BLOCK: tl.constexpr = 32 if FORMAT == MXFP8 else (16 if FORMAT == NVFP4 else 128)
        SCALE: tl.constexpr = scales.dtype
        there = aligned(base + scales_at, SCALE) + slot * (PADDED // BLOCK)
        s = column // BLOCK + tl.arange(0, TILE // BLOCK)
        tl.store(there + s, scales, mask=(s < PADDED // BLOCK) & (s < end // BLOCK) & goes)
    if FORMAT == NVFP4:
        if OPTION == 0:
            tl.store((base + global_at).to(tl.pointer_type(tl.float32)) + slot, g, mask=goes & (column == 0))
