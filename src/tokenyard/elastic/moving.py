"""Copying experts between ranks: the steps of a move, and how the bytes travel.

A rank has a slot for each of its experts, and some spare ones (`LayerSpec.spare_experts`). Experts that move to a rank
are written into its spare slots, which no layer reads. If more experts come than there are spare slots, the move takes
several *steps*. Each step ends in a placement that has all experts; the switch to it frees the slots of experts that
have left.

Bytes travel in pieces of at most `PIECE`. Within a host, a rank maps the memory in which the others hold their experts,
and copies its new experts from there, once, without waiting for another rank. Before that, all ranks exchange where
their experts are (`HeldExperts`). An expert keeps its slot until all ranks have copied it, and no rank writes into a
slot that another one reads.

Between hosts, each rank sends one *stream* through the group in each step: the weights of the experts that other ranks
get from it, one after another.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenyard.errors import PeerLost, PlanError, shown
from tokenyard.experts import Experts
from tokenyard.experts.slots import ExpertSlots
from tokenyard.group import Group, make_together
from tokenyard.group.shared_memory import Address, address_of, map_memory
from tokenyard.routing import Move, Placement

# Bytes that travel at a time.
PIECE = 16 * 1024 * 1024


def steps(present: Placement, wanted: Placement, slots: Sequence[int]) -> list[Placement]:
    """The placements that lead from the present to the wanted one, which is the last, on ranks with `slots` slots each.

    In each step a rank gets as many of its missing experts as it has spare slots for. Then each rank drops the experts
    that it is not to have, if they are on one of the ranks that are to have them.

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
    """The experts that come to each rank in one step; first those that leave the ranks with the fewest spare slots."""
    came: list[list[int]] = []
    for rank, row in enumerate(wanted.table):
        missing = [expert for expert in row if expert not in table[rank]]

        def kept(expert: int) -> int:
            """The spare slots of the fullest rank that an expert leaves. As a sort key it puts full ranks first."""
            leaving = [r for r, held in enumerate(table) if expert in held and expert not in wanted.table[r]]
            return min((slots[r] - len(table[r]) for r in leaving), default=wanted.num_experts)

        missing.sort(key=kept)
        came.append(missing[: max(0, slots[rank] - len(table[rank]))])
    return came


def _no_room(found: str) -> PlanError:
    return PlanError(
        found,
        expected="memory for the experts that arrive and for those that are there",
        fix="declare more of it: LayerSpec(spare_experts=…)",
    )


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One expert's part of one weight tensor, in the stream of the rank that sends it."""

    layer: str
    tensor: str  # the name of the tensor
    expert: int
    source: int
    targets: tuple[int, ...]  # the ranks that it goes to
    start: int  # its offset in the stream, in bytes
    nbytes: int

    def in_piece(self, number: int, piece: int) -> tuple[int, int] | None:
        """The bytes of this part that are in a piece of the stream, as (first, behind the last); None if none are."""
        first = max(number * piece - self.start, 0)
        last = min((number + 1) * piece - self.start, self.nbytes)
        return (first, last) if first < last else None


Views = Callable[[Parcel], Tensor]


def streams(
    world: int, paths: Mapping[str, Sequence[Move]], widths: Mapping[str, Mapping[str, int]]
) -> list[list[Parcel]]:
    """The stream of each rank, for the moves of each layer; `widths` has an expert's bytes, by layer and tensor."""
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


@dataclass(frozen=True, kw_only=True)
class HeldExperts:
    """Where a rank holds its experts of a layer: their slots, its host, and the memory. Ranks exchange it."""

    slots: ExpertSlots
    host: str
    memory: Mapping[str, Address | None]  # by tensor; None where other processes cannot map it

    @classmethod
    def of(cls, slots: ExpertSlots, tensors: Mapping[str, Tensor], host: str) -> HeldExperts:
        """Where this rank holds its experts."""
        memory = {name: address_of(tensor) for name, tensor in tensors.items()}
        return cls(slots=slots, host=host, memory=memory)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, to be sent to the other ranks."""
        return {"slots": self.slots.as_dict(), "host": self.host, "memory": self.memory}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeldExperts:
        """The object that another rank has sent as plain values."""
        return cls(slots=ExpertSlots(**values["slots"]), host=values["host"], memory=values["memory"])

    def is_mapped_by(self, other: HeldExperts) -> bool:
        """Whether the other rank can map the memory of these experts: both are on one host, and it is mappable."""
        return self.host == other.host and None not in self.memory.values()

    def arrivals(self, path: Sequence[Move], rank: int) -> dict[int, int]:
        """For each expert that moves to `rank` on this path, the slot into which it is copied."""
        arriving = [move.expert for move in path if move.target == rank]
        return self.slots.places(arriving)


class HasWeights(Protocol):
    """A layer whose experts can be copied."""

    experts: Experts  # the experts of this rank, with their weights
    slots: ExpertSlots  # the slot of each expert in these weights


def held_by_all(
    group: Group,
    layers: Mapping[str, HasWeights],
    named: Sequence[str],
    order: Sequence[str],
    *,
    seconds: float | None = None,
    copied: Sequence[str] = (),
) -> dict[str, list[HeldExperts]]:
    """By layer, in `order`, where each rank holds its experts. Layers in `named` must be in use on all ranks.

    Layers in `copied` have copies on this rank: their weights would not move with those of the layer.

    Collective. The other ranks are waited for `seconds`, or the group's deadline if that is longer.
    """

    def mine() -> dict[str, HeldExperts]:
        if copied:
            raise PlanError(
                "this layer has a copy (copy.deepcopy), whose experts would stay where they are",
                expected="one set of weights for each layer where experts move",
                fix="free the copy first, or give it a plan of its own",
                layer=copied[0],
                rank=group.rank,
            )
        for name in named:
            if name not in layers:
                raise PlanError(
                    "no MoELayer of this rank has the experts of this layer",
                    expected="a layer made with this plan, and in use",
                    fix="rebalance layers that exist: plan.rebalance({name: placement})",
                    layer=name,
                )
        host = group.host()
        return {
            name: HeldExperts.of(layer.slots, layer.experts.movable(), host) for name, layer in layers.items()
        }

    _, by_rank = make_together(
        group,
        "making room for experts",
        mine,
        seconds=seconds or group.deadline,
        note=lambda made: {name: one.as_dict() for name, one in made.items()},
    )
    everywhere = [name for name in order if all(name in one for one in by_rank)]
    held = {name: [HeldExperts.from_dict(one[name]) for one in by_rank] for name in everywhere}
    for name, by_form in held.items():
        forms = {rank: ", ".join(sorted(one.memory)) for rank, one in enumerate(by_form)}
        if len(set(forms.values())) > 1:
            raise PlanError(
                f"the ranks hold the weights of this layer in different forms: {shown(forms)}",
                expected="one form on all ranks: moves copy the bytes of weights",
                fix="choose experts that hold weights as they are given: LayerSpec(experts='grouped')",
                layer=name,
                rank=group.rank,
            )
    return held


class Carrier:
    """Copies experts between the ranks of a plan: out of mapped memory of other ranks, or through a group of its own.

    Mappings and group are made when they are first needed, and kept for later moves. `check` is called repeatedly while
    the ranks of the new group wait for each other, and may raise.
    """

    def __init__(self, of: Group, name: str = "moves", *, check: Callable[[], None] = lambda: None) -> None:
        self._of, self._name, self._check = of, name, check
        self._group: Group | None = None
        self._mapped: dict[tuple[int, int], Tensor] = {}  # memory of other ranks, by process and inode

    def keep(self, held: Iterable[HeldExperts]) -> None:
        """Unmap the memory of other ranks, except what the ranks hold their experts in now."""
        used = {_key(address) for one in held for address in one.memory.values() if address is not None}
        self._mapped = {key: memory for key, memory in self._mapped.items() if key in used}

    def fetch(
        self, held: HeldExperts, name: str, expert: int, into: Tensor, check: Callable[[], None]
    ) -> None:
        """Copy an expert's part of a tensor out of the memory of a rank. `check` is called before each piece."""
        address = held.memory[name]
        assert address is not None
        if (key := _key(address)) not in self._mapped:
            self._mapped[key] = map_memory(address)
        start = address["start"] + held.slots.of(expert) * len(into)
        source = self._mapped[key][start : start + len(into)]
        for first in range(0, len(into), PIECE):
            check()
            into[first : first + PIECE] = source[first : first + PIECE]

    def carry(
        self, sent: Sequence[Sequence[Parcel]], read: Views, write: Views, check: Callable[[], None]
    ) -> None:
        """Send the stream of each rank through the group, and write the parts that come to this rank. Collective.

        `read` and `write` return the bytes of a part on this rank, to be sent and to be written into. `check` is called
        before each piece, and may raise.
        """
        longest = max((parts[-1].start + parts[-1].nbytes for parts in sent if parts), default=0)
        if not longest:
            return
        group = self._found(check)
        for number in range(-(-longest // PIECE)):
            check()
            _move_piece(group, _Piece(number, PIECE, sent), read, write)

    def meet(self) -> None:
        """Wait until all ranks have called this. Collective."""
        self._found().barrier(phase="moving experts")

    def _found(self, check: Callable[[], None] = lambda: None) -> Group:
        """The group through which experts travel, made when it is first needed."""

        def check_both() -> None:
            self._check()
            check()

        if self._group is None:
            name = f"{self._of.name}/{self._name}"
            everybody = range(self._of.size)
            self._group = self._of.subgroup(everybody, name=name, purpose=self._name, check=check_both)
        return self._group

    def abandon(self) -> None:
        """Take no further part in the group, and end the waits of the other ranks for this one."""
        if self._group is not None:
            self._group.lost_elsewhere([self._group.rank], phase="moving experts", waited=0.0)

    def close(self) -> None:
        """Unmap the memory of other ranks, and close the group."""
        self._mapped = {}
        group, self._group = self._group, None
        if group is not None:
            group.close()


def not_held(group: Group, source: int, error: OSError) -> PeerLost | None:
    """`PeerLost` for rank `source` if `error`, from mapping its memory, says that the memory is gone; else None.

    The memory is gone if the process of that rank has ended, or has freed its experts.
    """
    if error.errno not in (0, errno.ENOENT, errno.ESRCH):
        return None
    why = f"its memory cannot be mapped: {error.strerror}"
    return group.lost([source], phase="moving experts", waited=0.0, detail=why)


def _key(address: Address) -> tuple[int, int]:
    return address["pid"], address["inode"]


@dataclass(frozen=True)
class _Piece:
    """One piece of every rank's stream."""

    number: int
    size: int  # bytes
    sent: Sequence[Sequence[Parcel]]

    def parts(self, source: int, target: int) -> Iterator[tuple[Parcel, int, int]]:
        """The parts that one rank sends to another in this piece, each with the range of its bytes that are in it."""
        for parcel in self.sent[source]:
            bounds = parcel.in_piece(self.number, self.size)
            if bounds is not None and target in parcel.targets:
                yield parcel, *bounds


def _move_piece(group: Group, piece: _Piece, read: Views, write: Views) -> None:
    mine, ranks = group.rank, range(group.size)
    sent = [[read(parcel)[a:b] for parcel, a, b in piece.parts(mine, target)] for target in ranks]
    due = [sum(b - a for _, a, b in piece.parts(source, mine)) for source in ranks]
    rows = [part for parts in sent for part in parts]
    arrived = group.all_to_all_rows(
        torch.cat(rows).unsqueeze(1) if rows else torch.empty(0, 1, dtype=torch.uint8, device=group.device),
        [sum(len(part) for part in parts) for parts in sent],
        due,
        phase="moving experts",
    )
    start = 0
    for source in ranks:
        for parcel, first, last in piece.parts(source, mine):
            write(parcel)[first:last] = arrived[start : start + last - first, 0]
            start += last - first


def bytes_of(part: Tensor) -> Tensor:
    """The bytes of one expert's part of a tensor; without a copy where it is contiguous."""
    return part.contiguous().reshape(-1).view(torch.uint8)


def width(tensor: Tensor) -> int:
    """Bytes of one expert's part of a tensor."""
    return tensor.dtype.itemsize * torch.Size(tensor.shape[1:]).numel()
