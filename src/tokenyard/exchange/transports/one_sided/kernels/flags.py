"""Flags in device memory: publishing that something is written, waiting for the others, and giving up.

The words and their order are those of `one_sided.cpu.signals`; the rounds are counted here, on the device, so that a
captured graph can be replayed: a kernel that publishes reads the round from its rank's control region, and increments
it there.

A control region (`ControlLayout`) begins with these 64-bit words:

    0 STATE      the flag that this rank waits for now; 0 while it does not wait
    1 VERDICT    bit r: rank r is given up
    2 ROUND      dispatches made          3 COMBINED   combines made
    4 ARRIVED    blocks of the running dispatch that are done      5 PLACED    blocks that have begun a small combine
    6 LEFT       blocks that have ended a small combine
    8 STATUS     kind, flag, ranks (bit by bit), nanoseconds: the first thing that went wrong
   16 FLAGS      one word for each turn, phase and source rank

**Order.** Every block ends with a barrier and an atomic add (release, acquire). So the last block sees what the others
have written, and the flags that it publishes (release, at system scope) cover all of it. A kernel that waits reads
flags by atomics that acquire at system scope.

**Giving up.** A wait ends at its deadline, or when a verdict of another rank is found. Then the kernel writes the
missing ranks, except those that themselves wait for a missing rank, as the verdict into every rank's control region,
and into this rank's status. The status is written twice: on the device, where later kernels find it and do not wait
again, and in the host's memory, where the host finds it without waiting for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from tokenyard.exchange.transports.one_sided.cuda import control

STATE = tl.constexpr(control.STATE)
VERDICT = tl.constexpr(control.VERDICT)
ROUND = tl.constexpr(control.ROUND)
COMBINED = tl.constexpr(control.COMBINED)
ARRIVED = tl.constexpr(control.ARRIVED)
PLACED = tl.constexpr(control.PLACED)
LEFT = tl.constexpr(control.LEFT)
STATUS = tl.constexpr(control.STATUS)
FLAGS = tl.constexpr(control.FLAGS)

# The kinds of a status: the host's `Trouble`, which ends a round for all but the last of them.
BAD_IDS = tl.constexpr(control.Trouble.BAD_IDS.value)
FAILED = tl.constexpr(control.Trouble.FAILED.value)
DRIFTED = tl.constexpr(control.Trouble.DRIFTED.value)
LOST = tl.constexpr(control.Trouble.LOST.value)

DISPATCH = tl.constexpr(0)
COMBINE = tl.constexpr(1)


@triton.jit
def words_of(address):
    """A control region as 64-bit words."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def flags_of(control, phase, round, WORLD: tl.constexpr, TURNS: tl.constexpr):
    """Where the flags of a phase are in a control region, or in several.

    Rounds take turns, so that a rank that failed in one and has gone on to the next does not overwrite its flags.
    """
    return control + (FLAGS + ((round % TURNS) * 2 + phase) * WORLD)


@triton.jit
def report(mine, host, kind, flag, ranks, waited):
    """Write what went wrong, for later kernels and for the host.

    The first report is kept, except that one of bad ids, which does not end a round, is replaced by one that ends it.
    """
    none, bad_ids = tl.zeros([], tl.int64), tl.full([], BAD_IDS, tl.int64)
    before = tl.atomic_cas(mine + STATUS, none, kind.to(tl.int64), sem="relaxed", scope="gpu")
    if (before == BAD_IDS) & (kind >= FAILED):
        before = (
            tl.atomic_cas(mine + STATUS, bad_ids, kind.to(tl.int64), sem="relaxed", scope="gpu") - BAD_IDS
        )
    if before == 0:
        tl.store(mine + STATUS + 1, flag)
        tl.store(mine + STATUS + 2, ranks)
        tl.store(mine + STATUS + 3, waited)
        tl.store(host + 1, flag)
        tl.store(host + 2, ranks)
        tl.store(host + 3, waited)
        tl.debug_barrier()
        tl.atomic_xchg(host, kind.to(tl.int64), sem="release", scope="sys")


@triton.jit
def publish(peers, rank, flag, phase, WORLD: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr):
    """Publish a flag to every rank: all that this rank has written before is visible to whoever reads it."""
    w = tl.arange(0, WIDE)
    controls = words_of(tl.load(peers + w, mask=w < WORLD, other=0))
    flags = flags_of(controls, phase, flag >> 24, WORLD, TURNS) + rank
    value = tl.zeros([WIDE], tl.int64) + flag
    tl.atomic_xchg(flags, value, mask=w < WORLD, sem="release", scope="sys")


@triton.jit
def read_flags(mine, phase, round, WORLD: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr):
    """Read the flags of a phase in this rank's control region; what their ranks wrote before becomes visible."""
    w = tl.arange(0, WIDE)
    flags = flags_of(mine, phase, round, WORLD, TURNS) + w
    return tl.atomic_add(flags, tl.zeros([WIDE], tl.int64), mask=w < WORLD, sem="acquire", scope="sys")


@triton.jit
def behind(seen, flag, WORLD: tl.constexpr, WIDE: tl.constexpr):
    """The ranks whose flags have not reached the round of `flag`, as a bit mask."""
    w = tl.arange(0, WIDE)
    bit = tl.full([WIDE], 1, tl.int64) << w.to(tl.int64)
    return tl.sum(tl.where(((seen >> 24) < (flag >> 24)) & (w < WORLD), bit, 0), 0)


@triton.jit
def wait(
    mine,
    peers,
    rank,
    host,
    flag,
    deadline,
    phase,
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Wait until every rank has come to the round of a flag, no longer than the deadline (nanoseconds)."""
    seen = read_flags(mine, phase, flag >> 24, WORLD, WIDE, TURNS)
    missing = behind(seen, flag, WORLD, WIDE)
    if missing != 0:
        tl.atomic_xchg(mine + STATE, flag, sem="relaxed", scope="sys")
        started = globaltimer()
        waited = started - started
        verdict = tl.atomic_add(mine + VERDICT, tl.zeros([], tl.int64), sem="acquire", scope="sys")
        while (missing != 0) & (waited < deadline) & (verdict == 0):
            missing = behind(read_flags(mine, phase, flag >> 24, WORLD, WIDE, TURNS), flag, WORLD, WIDE)
            verdict = tl.atomic_add(mine + VERDICT, tl.zeros([], tl.int64), sem="acquire", scope="sys")
            waited = globaltimer() - started
        if missing != 0:
            give_up(mine, peers, host, flag, missing, waited, WORLD, WIDE, TURNS)
        tl.atomic_xchg(mine + STATE, tl.zeros([], tl.int64), sem="relaxed", scope="sys")
        seen = read_flags(mine, phase, flag >> 24, WORLD, WIDE, TURNS)
    check(mine, host, seen, flag, WORLD, WIDE)


@triton.jit
def check(mine, host, seen, flag, WORLD: tl.constexpr, WIDE: tl.constexpr):
    """Report a rank that has come to this round with another layer, or only to say that it failed."""
    w = tl.arange(0, WIDE)
    here = ((seen >> 24) == (flag >> 24)) & (w < WORLD)
    bit = tl.full([WIDE], 1, tl.int64) << w.to(tl.int64)
    failed = tl.sum(tl.where(here & ((seen & 2) != 0), bit, 0), 0)
    drifted = tl.sum(tl.where(here & ((seen & 0xFFFFFD) != (flag & 0xFFFFFD)), bit, 0), 0)
    if (failed | drifted) != 0:
        kind = tl.where(drifted != 0, DRIFTED, FAILED)
        report(mine, host, kind, flag, tl.where(drifted != 0, drifted, failed), tl.zeros([], tl.int64))


@triton.jit
def give_up(
    mine, peers, host, flag, missing, waited, WORLD: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr
):
    """Decide which missing ranks are lost, and write the verdict to every rank; or take one that is there already."""
    w = tl.arange(0, WIDE)
    excused = missing & 0
    for other in range(WORLD):
        theirs = words_of(tl.load(peers + other))
        state = tl.atomic_add(theirs + STATE, tl.zeros([], tl.int64), sem="acquire", scope="sys")
        flags = flags_of(theirs, state & 1, state >> 24, WORLD, TURNS) + w
        zeros = tl.zeros([WIDE], tl.int64)
        theirs_seen = tl.atomic_add(flags, zeros, mask=w < WORLD, sem="acquire", scope="sys")
        waits_for = ((theirs_seen >> 24) < (state >> 24)) & (w < WORLD) & (w != other)
        waits = (state != 0) & (tl.sum(waits_for.to(tl.int32), 0) > 0)
        excused |= tl.where(waits, tl.full([], 1, tl.int64) << other, 0)
    lost = missing & ~excused
    lost = tl.where(lost == 0, missing, lost)
    known = tl.atomic_cas(mine + VERDICT, tl.zeros([], tl.int64), lost, sem="acq_rel", scope="sys")
    lost = tl.where(known == 0, lost, known)
    for other in range(WORLD):
        theirs = words_of(tl.load(peers + other))
        tl.atomic_cas(theirs + VERDICT, tl.zeros([], tl.int64), lost, sem="release", scope="sys")
    report(mine, host, tl.full([], LOST, tl.int32), flag, lost, waited)


@triton.jit
def publish_and_wait(
    mine, peers, rank, host, layer, deadline, phase, fails,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Publish that this rank has done its part of a phase, and wait for the others.

    `fails`: 0; or 1 to publish that it failed; or 2 to do so only if it has reported bad ids.
    """
    status = tl.load(mine + STATUS)
    round = tl.load(mine + ROUND + phase) + 1
    if status < FAILED:  # else the round has failed, and no rank publishes any more in it
        tl.store(mine + ROUND + phase, round)
        says = (fails & 1) | ((fails >> 1) & (status == BAD_IDS).to(tl.int64))
        flag = (round << 24) | (layer << 2) | (phase + 2 * says)
        publish(peers, rank, flag, phase, WORLD, WIDE, TURNS)
        if WAITS:
            wait(mine, peers, rank, host, flag, deadline, phase, WORLD, WIDE, TURNS)


@triton.jit(do_not_specialize=["first_rank", "layer", "phase", "fails", "deadline"])
def signal_and_wait(
    peers, host, first_rank, layer, phase, fails, deadline,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr, WAITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Publish and wait (`publish_and_wait`) with one block per rank, behind the kernels that did the work."""
    if layer < 0:  # a launch that only loads the kernel
        return
    rank = first_rank + tl.program_id(0)
    mine = words_of(tl.load(peers + rank))
    if EARLY:
        gdc_wait()
    publish_and_wait(mine, peers, rank, host, layer, deadline, phase, fails, WORLD, WIDE, TURNS, WAITS)
    if EARLY:
        # Only now: blocks of the next kernel could fill a GPU that another rank shares, which is waited for here.
        gdc_launch_dependents()
