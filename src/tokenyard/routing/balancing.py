"""Placements for uneven load: how many copies each expert gets, and which ranks hold them.

The *load* of an expert is the number of choices that fall on it. If all ranks bring equally many tokens, the copies of
an expert share its load evenly (the rule of `Placement`). The load of a rank is then the sum of load / copies over the
experts that it holds. A call takes as long as its busiest rank: `imbalance` is its load over the mean, 1 at best.

`balance` searches for a placement in these steps:

1. **Copies.** The expert with the largest load per copy gets one copy more, until all copies are given out.
2. **Packing.** Copies, the heaviest first, go to the least loaded rank that has a free slot and does not hold the
   expert yet.
3. **Swaps.** The busiest rank moves a copy to another rank, or swaps two, where this lowers the larger of both loads
   most; again and again, until nothing helps.
4. **Near the present one.** Copies are added to the present placement and dropped from it, until each expert has the
   number of step 1. Then they are swapped until the placement is within 1% of that of step 3. If that succeeds, fewer
   experts move.

Steps 1 and 2 alone are the published greedy algorithm, and the result of `balance` is never worse than theirs. But the
published algorithm may put two copies of an expert on one rank, which is better if few experts have nearly all load.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenyard.errors import InputError, shown
from tokenyard.routing.placement import Placement

Loads = NDArray[np.float64]
Holds = NDArray[np.bool_]  # [W, E]: whether a rank holds an expert

# Placements whose busiest ranks differ by less than this share are equally good: the one with fewer moves is taken.
_AS_GOOD = 0.01
# Without a goal, a swap must lower the load of the busiest rank by at least this share, to be worth its time.
_LEAST_GAIN = 5e-4
_ANY_GAIN = 1e-9


@dataclass(frozen=True, kw_only=True)
class Move:
    """The copy of an expert's weights from a rank that holds them to a rank that is to hold them."""

    expert: int  # the global id
    source: int  # a rank that holds it now: of the same host, if one does
    target: int  # the rank that gets it


def rank_loads(load_E: Sequence[float], placement: Placement) -> list[float]:
    """The load of each rank, if copies share their expert's load evenly.

    >>> rank_loads([6, 2, 2, 2], Placement.explicit(4, [[0, 1], [0, 2, 3]]))
    [5.0, 7.0]
    """
    load = _checked_load(load_E, placement.num_experts)
    loads: list[float] = _loads(load, _holds(placement)).tolist()
    return loads


def imbalance(loads: Sequence[float]) -> float:
    """The largest load over the mean: 1 where all are equal, or nothing was counted.

    >>> imbalance([5.0, 7.0])
    1.1666666666666667
    """
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean > 0 else 1.0


def balance(
    load_E: Sequence[float],
    present: Placement,
    *,
    copies: int | None = None,
    slots: int | Sequence[int] | None = None,
    hosts: Sequence[int] | None = None,
) -> Placement:
    """A placement for this load that is near the present one.

    `copies` are the copies of experts beyond one of each, over all ranks; by default as many as there are now. `slots`
    are the experts that a rank has memory for, for all ranks or for each; by default as many as it takes to hold all
    copies, the same on every rank. `hosts` names the host of each rank: where two placements are equally good, the one
    that moves fewer experts between hosts is taken.

    An expert that stays on a rank keeps its local index, as long as the rank does not hold fewer experts than before.

    >>> present = Placement.contiguous(4, 2)
    >>> rank_loads([9, 5, 3, 1], present)
    [14.0, 4.0]
    >>> better = balance([9, 5, 3, 1], present)
    >>> better.table, rank_loads([9, 5, 3, 1], better)
    (((0, 3), (2, 1)), [10.0, 8.0])
    >>> better = balance([9, 5, 3, 1], present, slots=3, copies=1)
    >>> better.table, rank_loads([9, 5, 3, 1], better)
    (((0, 1), (2, 3, 0)), [9.5, 8.5])
    """
    search = _Search.of(load_E, present, copies=copies, slots=slots, hosts=hosts)
    greedy = search.pack(search.copies_E)
    packed = search.swap(greedy)
    goal = min(search.busiest(packed) * (1 + _AS_GOOD), search.busiest(greedy))
    near = search.swap(search.adapt(search.copies_E), goal=goal)
    # The renumbered one is a candidate even if its load is slightly above the goal: only the rounding of sums differs.
    good = [search.renumber(packed), *([near] if search.busiest(near) <= goal else [])]
    best = min(good, key=lambda holds: (*search.moved(holds), search.busiest(holds)))
    if search.serves(search.present) and search.busiest(search.present) <= goal:
        best = search.present
    return _placement(present, best)


def moves(present: Placement, wanted: Placement, hosts: Sequence[int] | None = None) -> tuple[Move, ...]:
    """The experts that must be copied from rank to rank to get from one placement to another.

    >>> moves(Placement.contiguous(4, 2), Placement.explicit(4, [[0, 2], [1, 3]]))
    (Move(expert=2, source=1, target=0), Move(expert=1, source=0, target=1))
    """
    host_of = _checked_hosts(hosts, present.world)
    found = []
    for target, experts in enumerate(wanted.table):
        for expert in sorted(set(experts) - set(present.table[target])):
            holders = [rank for rank, _ in present.owners(expert)]
            if holders:
                source = min(holders, key=lambda rank: (host_of[rank] != host_of[target], rank))
                found.append(Move(expert=expert, source=source, target=target))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    """The inputs of a search for a placement, and its steps. A placement is a [W, E] matrix of what ranks hold."""

    load: Loads  # [E]
    slots: NDArray[np.int64]  # [W], the experts that a rank has room for
    copies_E: NDArray[np.int64]  # the copies that each expert gets
    host: NDArray[np.int64]  # [W]
    present: Holds

    @classmethod
    def of(
        cls,
        load_E: Sequence[float],
        present: Placement,
        *,
        copies: int | None,
        slots: int | Sequence[int] | None,
        hosts: Sequence[int] | None,
    ) -> _Search:
        load = _checked_load(load_E, present.num_experts)
        held = sum(map(len, present.table))
        total = held if copies is None else present.num_experts + copies
        room = _checked_slots(slots, total, present.world)
        if not present.num_experts <= total <= room.sum():
            raise InputError(
                f"{total} copies of {present.num_experts} experts on ranks with room for {room.sum()}",
                expected=f"from {present.num_experts} copies, one of each, to as many as there is room for",
                fix="raise `slots`, or lower `copies`",
            )
        return cls(
            load=load,
            slots=room,
            copies_E=_copies(load, total, present.world),
            host=_checked_hosts(hosts, present.world),
            present=_holds(present),
        )

    # -- What a placement is worth -------------------------------------------------------------------------

    def busiest(self, holds: Holds) -> float:
        """The load of the busiest rank."""
        return float(_loads(self.load, holds).max())

    def serves(self, holds: Holds) -> bool:
        """Whether every expert has a rank, no more copies exist than asked for, and every rank has room."""
        fits = bool((holds.sum(axis=1) <= self.slots).all())
        return fits and bool(holds.any(axis=0).all()) and bool(holds.sum() <= self.copies_E.sum())

    def moved(self, holds: Holds) -> tuple[int, int]:
        """The number of copies that must travel between hosts, and between ranks, to get from the present placement."""
        new = holds & ~self.present
        there = np.zeros_like(holds)
        for host in np.unique(self.host):
            there[self.host == host] = self.present[self.host == host].any(axis=0)
        return int((new & ~there).sum()), int(new.sum())

    # -- The steps -----------------------------------------------------------------------------------------

    def pack(self, copies_E: NDArray[np.int64]) -> Holds:
        """Step 2: distribute all copies over empty ranks."""
        holds = np.zeros_like(self.present)
        loads = np.zeros(len(self.slots))
        share = self.load / copies_E
        for expert in np.argsort(-share, kind="stable"):
            for _ in range(copies_E[expert]):
                self._place(holds, loads, int(expert), float(share[expert]))
        return holds

    def adapt(self, copies_E: NDArray[np.int64]) -> Holds:
        """The present placement with these numbers of copies: the busiest ranks drop some, the idlest ones add some."""
        holds = self.present.copy()
        share = self.load / copies_E
        loads = holds @ share
        for expert, surplus in enumerate(holds.sum(axis=0) - copies_E):
            for _ in range(surplus):
                busiest = np.where(holds[:, expert], loads, -np.inf).argmax()
                holds[busiest, expert] = False
                loads[busiest] -= share[expert]
        for rank, room in enumerate(self.slots):
            for expert in np.flatnonzero(holds[rank])[room:]:
                holds[rank, expert] = False
                loads[rank] -= share[expert]
        missing = copies_E - holds.sum(axis=0)
        for expert in np.argsort(-share, kind="stable"):
            for _ in range(missing[expert]):
                self._place(holds, loads, int(expert), float(share[expert]))
        return holds

    def _place(self, holds: Holds, loads: Loads, expert: int, share: float) -> None:
        """Add a copy of an expert to the least loaded rank that has room and does not hold it."""
        room = holds.sum(axis=1) < self.slots
        can = room & ~holds[:, expert]
        if can.any():
            rank = int(np.where(can, loads, np.inf).argmin())
        else:  # ranks with room hold the expert already: one of them takes another expert from a rank that does not
            giver, taken, taker = next(
                (int(giver), int(taken), int(taker))
                for giver in np.flatnonzero(~holds[:, expert])
                for taker in np.flatnonzero(room)
                for taken in np.flatnonzero(holds[giver] & ~holds[taker])
            )
            holds[giver, taken], holds[taker, taken] = False, True
            weight = self.load[taken] / self.copies_E[taken]
            loads[giver] -= weight
            loads[taker] += weight
            rank = giver
        holds[rank, expert] = True
        loads[rank] += share

    def swap(self, holds: Holds, *, goal: float | None = None) -> Holds:
        """Step 3: move and swap copies of the busiest rank until its load is at most `goal`, or nothing helps."""
        holds, least = holds.copy(), _LEAST_GAIN if goal is None else _ANY_GAIN
        share = self.load / np.maximum(holds.sum(axis=0), 1)
        while True:
            loads = holds @ share
            busiest = int(loads.argmax())
            if goal is not None and loads[busiest] <= goal:
                break
            given = np.flatnonzero(holds[busiest])
            # What the busiest rank gets in return: a copy of another rank, or nothing (-1), if that rank has room.
            rank_N, taken_N = np.nonzero(holds)
            spare = np.flatnonzero(holds.sum(axis=1) < self.slots)
            rank_N = np.concatenate([rank_N, spare])
            taken_N = np.concatenate([taken_N, np.full(len(spare), -1)])
            back_N = np.where(taken_N < 0, 0.0, share[taken_N])
            less = share[given][:, None] - back_N[None, :]  # load that the busiest rank loses
            larger = np.maximum(loads[busiest] - less, loads[rank_N][None, :] + less)
            refused = holds[:, given][rank_N].T | ((taken_N >= 0) & holds[busiest, taken_N])[None, :]
            larger = np.where(refused, np.inf, larger)
            best = np.unravel_index(larger.argmin(), larger.shape)
            if not larger[best] < loads[busiest] * (1 - least):
                break
            gives, rank, takes = given[best[0]], rank_N[best[1]], taken_N[best[1]]
            holds[busiest, gives], holds[rank, gives] = False, True
            if takes >= 0:
                holds[rank, takes], holds[busiest, takes] = False, True
        return holds

    def renumber(self, holds: Holds) -> Holds:
        """The same rows of the matrix under other rank numbers: each goes to the rank that holds most of it already."""
        near = np.zeros(holds.shape)
        for host in np.unique(self.host):
            near[self.host == host] = self.present[self.host == host].any(axis=0)
        kept = holds.astype(float) @ (self.present + near / 10).T  # [share, rank]
        # Ranks with different numbers of slots do not exchange their rows.
        kept[self.slots[:, None] != self.slots[None, :]] = -np.inf
        renumbered = np.zeros_like(holds)
        shares, ranks = np.ones(len(holds), dtype=bool), np.ones(len(holds), dtype=bool)
        for place in np.argsort(-kept, axis=None, kind="stable"):
            share, rank = divmod(int(place), len(holds))
            if shares[share] and ranks[rank]:
                renumbered[rank] = holds[share]
                shares[share] = ranks[rank] = False
        return renumbered


def _copies(load: Loads, total: int, world: int) -> NDArray[np.int64]:
    """Step 1: the number of copies of each expert, at most one for each rank."""
    copies = np.ones(len(load), dtype=np.int64)
    queue = [(-value, expert) for expert, value in enumerate(load.tolist()) if world > 1]
    heapq.heapify(queue)
    while queue and copies.sum() < total:  # without a queue, every rank holds every expert
        _, expert = heapq.heappop(queue)
        copies[expert] += 1
        if copies[expert] < world:
            heapq.heappush(queue, (-load[expert] / copies[expert], expert))
    return copies


def _loads(load: Loads, holds: Holds) -> Loads:
    """The load of each rank. The load of experts that no rank holds is left out."""
    loads: Loads = holds @ (load / np.maximum(holds.sum(axis=0), 1))
    return loads


def _holds(placement: Placement) -> Holds:
    holds = np.zeros((placement.world, placement.num_experts), dtype=bool)
    for rank, experts in enumerate(placement.table):
        holds[rank, list(experts)] = True
    return holds


def _placement(present: Placement, holds: Holds) -> Placement:
    """The matrix as a placement, in which new experts get the local ids of those that leave."""
    table = []
    for rank, before in enumerate(present.table):
        wanted = set(np.flatnonzero(holds[rank]).tolist())
        new = sorted(wanted - set(before))
        places = [expert if expert in wanted else (new.pop(0) if new else None) for expert in before]
        table.append([expert for expert in places if expert is not None] + new)
    return Placement.explicit(present.num_experts, table)


def _checked_load(load_E: Sequence[float], num_experts: int) -> Loads:
    try:
        load = np.asarray(load_E, dtype=np.float64)
    except (TypeError, ValueError):
        load = np.full(num_experts, np.nan)
    if load.shape != (num_experts,) or not np.isfinite(load).all() or (load < 0).any():
        raise InputError(
            f"a load of {shown(load_E)}",
            expected=f"{num_experts} numbers from 0 on: for each expert, the choices that fall on it",
            fix="count the choices of each expert of this layer",
        )
    return load


def _checked_slots(slots: int | Sequence[int] | None, total: int, world: int) -> NDArray[np.int64]:
    given = -(-total // world) if slots is None else slots
    per_rank = [given] * world if isinstance(given, int) else list(given)
    if len(per_rank) != world or any(not isinstance(room, int) or room < 0 for room in per_rank):
        raise InputError(
            f"slots={shown(slots)}",
            expected=f"a number of experts, or one for each of the {world} ranks",
            fix="pass how many experts a rank has memory for",
        )
    return np.asarray(per_rank, dtype=np.int64)


def _checked_hosts(hosts: Sequence[int] | None, world: int) -> NDArray[np.int64]:
    if hosts is None:
        return np.zeros(world, dtype=np.int64)
    if len(hosts) != world:
        raise InputError(
            f"hosts={shown(hosts)}",
            expected=f"the host of each of the {world} ranks",
            fix="pass one number for each rank, the same for ranks of one host",
        )
    return np.asarray(hosts, dtype=np.int64)
