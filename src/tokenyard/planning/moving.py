"""Copying experts between ranks: in which steps, and how the bytes travel.

A rank has a slot for each of its experts, and some spare ones (`LayerSpec.spare_experts`). Experts that come are
written into spare slots, from which nobody reads; nothing else changes. Where more come than there are spare slots,
they come in several *steps*, each of which ends in a placement that has all experts: its switch frees the slots of
those that leave.

In each step a rank sends a *stream*: the weights of the experts that leave it, one after another, each once however
many ranks want it. Streams are cut into pieces of at most `PIECE` bytes. Where all ranks share memory, a rank writes
its piece there and the others copy out what is theirs; there is room for two pieces, and the ranks meet once for each.
Elsewhere pieces travel through the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import PlanError
from tokenyard.group import Group
from tokenyard.routing import Move, Placement, moves

# Bytes of a rank's stream that travel at a time. A rank shares memory for two such pieces.
PIECE = 16 * 1024 * 1024


def steps(present: Placement, wanted: Placement, slots: Sequence[int]) -> list[Placement]:
    """The placements between two, the last of which is the wanted one, for ranks that have so many slots.

    In each step a rank gets as many of its experts as it has spare slots for; then experts that it shall not have are
    dropped, if they are where they shall be.

    >>> present = Placement.explicit(4, [[0, 1], [2, 3]])
    >>> wanted = Placement.explicit(4, [[2, 3], [0, 1]])
    >>> [placement.table for placement in steps(present, wanted, [3, 3])]
    [((1, 2), (3, 0)), ((2, 3), (0, 1))]
    """
    table, found = [list(row) for row in present.table], []
    goal = [set(row) for row in wanted.table]
    for rank, row in enumerate(wanted.table):
        if len(row) > slots[rank]:
            raise _no_room(f"rank {rank} is to hold {len(row)} experts, and has memory for {slots[rank]}")
    while any(set(row) != goal[rank] for rank, row in enumerate(table)):
        came = _arrivals(table, wanted, slots)
        after = [[*row, *came[rank]] for rank, row in enumerate(table)]
        there = {expert for rank, row in enumerate(after) for expert in row if expert in goal[rank]}
        after = [[e for e in row if e in goal[rank] or e not in there] for rank, row in enumerate(after)]
        if after == table:
            full = [
                rank for rank, row in enumerate(table) if len(row) == slots[rank] and goal[rank] - set(row)
            ]
            raise _no_room(f"ranks {full} have no spare slot for experts that are to come to them")
        table = after
        found.append(Placement.explicit(present.num_experts, table))
    return [*found[:-1], wanted]


def _arrivals(table: list[list[int]], wanted: Placement, slots: Sequence[int]) -> list[list[int]]:
    """The experts that come to each rank in one step. Those that free a slot where they leave come first."""
    came: list[list[int]] = []
    for rank, row in enumerate(wanted.table):
        missing = [expert for expert in row if expert not in table[rank]]

        def kept(expert: int) -> int:
            """How many spare slots there are where an expert leaves: the fullest rank first."""
            leaving = [r for r, held in enumerate(table) if expert in held and expert not in wanted.table[r]]
            return min((slots[r] - len(table[r]) for r in leaving), default=wanted.num_experts)

        missing.sort(key=kept)
        came.append(missing[: max(0, slots[rank] - len(table[rank]))])
    return came


def _no_room(found: str) -> PlanError:
    return PlanError(
        found,
        expected="memory for the experts that come, beside those that are there",
        fix="declare more of it: LayerSpec(spare_experts=…)",
    )


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One expert's part of one tensor, in the stream of the rank that sends it."""

    layer: str
    tensor: str  # the name of the tensor
    expert: int
    source: int
    targets: tuple[int, ...]  # the ranks that it goes to
    start: int  # bytes of the stream in front of it
    nbytes: int

    def in_piece(self, number: int, piece: int) -> tuple[int, int] | None:
        """The first byte, and the one behind the last, that a piece has of this part; None if it has none."""
        first = max(number * piece - self.start, 0)
        last = min((number + 1) * piece - self.start, self.nbytes)
        return (first, last) if first < last else None


Views = Callable[[Parcel], Tensor]


def streams(
    world: int, paths: Mapping[str, Sequence[Move]], widths: Mapping[str, Mapping[str, int]]
) -> list[list[Parcel]]:
    """What each rank sends, for the moves of each layer and the bytes of one expert in each of its tensors."""
    sent: list[list[Parcel]] = [[] for _ in range(world)]
    lengths = [0] * world
    for layer, path in paths.items():
        targets: dict[tuple[int, int], list[int]] = {}
        for move in path:
            targets.setdefault((move.source, move.expert), []).append(move.target)
        for (source, expert), ranks in targets.items():
            for name, nbytes in widths[layer].items():
                sent[source].append(
                    Parcel(
                        layer=layer,
                        tensor=name,
                        expert=expert,
                        source=source,
                        targets=tuple(ranks),
                        start=lengths[source],
                        nbytes=nbytes,
                    )
                )
                lengths[source] += nbytes
    return sent


class Carrier:
    """What carries streams between the ranks of a plan: a group of its own, and memory that they share.

    Both are made when they are first needed, and kept for later moves.
    """

    def __init__(self, of: Group) -> None:
        self._of = of
        self._group: Group | None = None
        self._shared = False
        self._size = 0
        self._buffers: list[Tensor] = []

    def carry(
        self, sent: Sequence[Sequence[Parcel]], read: Views, write: Views, check: Callable[[], None]
    ) -> None:
        """Copy what ranks send to where it shall be. Collective.

        `read` and `write` give the bytes of a part here, to be sent and to be filled. `check` is called before each
        piece, and may raise.
        """
        longest = max((parts[-1].start + parts[-1].nbytes for parts in sent if parts), default=0)
        if not longest:
            return
        size = min(PIECE, longest)
        if self._group is None:
            self._group = self._of.subgroup(range(self._of.size), name=f"{self._of.name}/moves")
            self._shared = len(self._group.hosts()) == 1
        if self._shared and self._size < size:
            self._buffers, self._size = self._group.share_memory(2 * size), size
        move_piece = (
            _through_memory(self._group, self._buffers, size) if self._shared else _through_group(self._group)
        )
        for number in range(-(-longest // size)):
            check()
            move_piece(number, _Piece(number, size, sent), read, write)

    def abandon(self) -> None:
        """End the waits of the other ranks, too: this one takes part no more."""
        if self._group is not None:
            self._group.lost_elsewhere([self._group.rank], phase="moving experts", waited=0.0)

    def close(self) -> None:
        """Give back what is shared."""
        self._buffers, self._size = [], 0
        group, self._group = self._group, None
        if group is not None:
            group.close()


@dataclass(frozen=True)
class _Piece:
    """One piece of every rank's stream."""

    number: int
    size: int  # bytes
    sent: Sequence[Sequence[Parcel]]

    def parts(self, source: int, target: int | None = None) -> Iterator[tuple[Parcel, int, int]]:
        """The parts that a rank sends in this piece (to one rank, if given), each with the bytes that are in it."""
        for parcel in self.sent[source]:
            bounds = parcel.in_piece(self.number, self.size)
            if bounds is not None and (target is None or target in parcel.targets):
                yield parcel, *bounds

    def place(self, parcel: Parcel, first: int, last: int) -> slice:
        """Where some bytes of a part stand in the piece."""
        start = parcel.start + first - self.number * self.size
        return slice(start, start + last - first)


def _through_memory(
    group: Group, buffers: Sequence[Tensor], size: int
) -> Callable[[int, _Piece, Views, Views], None]:
    mine = group.rank

    def move_piece(number: int, piece: _Piece, read: Views, write: Views) -> None:
        # A half is written again two pieces later: then all have met once more, after they had read it.
        half = slice(number % 2 * size, number % 2 * size + size)
        for parcel, first, last in piece.parts(mine):
            buffers[mine][half][piece.place(parcel, first, last)] = read(parcel)[first:last]
        group.barrier(phase="moving experts")
        for source in range(group.size):
            for parcel, first, last in piece.parts(source, mine):
                write(parcel)[first:last] = buffers[source][half][piece.place(parcel, first, last)]

    return move_piece


def _through_group(group: Group) -> Callable[[int, _Piece, Views, Views], None]:
    mine, ranks = group.rank, range(group.size)

    def move_piece(number: int, piece: _Piece, read: Views, write: Views) -> None:
        sent = [[read(parcel)[a:b] for parcel, a, b in piece.parts(mine, target)] for target in ranks]
        due = [sum(b - a for _, a, b in piece.parts(source, mine)) for source in ranks]
        rows = [part for parts in sent for part in parts]
        arrived = group.all_to_all_rows(
            torch.cat(rows).unsqueeze(1) if rows else torch.empty(0, 1, dtype=torch.uint8),
            [sum(len(part) for part in parts) for parts in sent],
            due,
            phase="moving experts",
        )
        start = 0
        for source in ranks:
            for parcel, first, last in piece.parts(source, mine):
                write(parcel)[first:last] = arrived[start : start + last - first, 0]
                start += last - first

    return move_piece


def bytes_of(part: Tensor) -> Tensor:
    """The bytes of one expert's part of a tensor; without a copy where it is contiguous."""
    return part.contiguous().reshape(-1).view(torch.uint8)


def width(tensor: Tensor) -> int:
    """Bytes of one expert's part of a tensor."""
    return tensor.dtype.itemsize * torch.Size(tensor.shape[1:]).numel()


def paths_between(
    before: Mapping[str, Placement], after: Mapping[str, Placement]
) -> dict[str, tuple[Move, ...]]:
    """The experts of each layer that must be copied from rank to rank."""
    return {layer: moves(before[layer], placement) for layer, placement in after.items()}
