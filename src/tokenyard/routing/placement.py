"""Which rank owns which expert, and which rank a token's choice goes to.

A *placement* is a table: for each rank of the EP group, the global expert ids that it holds, in local order.
Everything else is derived from that table: the local experts of a rank, the owners of an expert, and the lookup
tensors that turn the router's global ids into (rank, local id) pairs.

    contiguous(7, 3)      rank 0: 0 1 2   rank 1: 3 4   rank 2: 5 6
    round_robin(7, 3)     rank 0: 0 3 6   rank 1: 1 4   rank 2: 2 5

An expert may be on several ranks (*replicas*, for experts that are hot). A token's choice then goes to
exactly one of them, by a rule that depends only on the source rank and the token's own ids:

1. if the source rank holds the expert, the choice stays there, and no row travels;
2. otherwise it goes to replica number (n + sum of the token's ids that are not -1) mod (number of replicas),
   with replicas counted in rank order. n is the number, from 0, of the source rank among the ranks that do not
   hold the expert.

Because of n, replicas share the load of all source ranks even if most tokens have the same ids.

A token therefore gets the same replicas whatever other tokens are in its batch, and wherever it is among
them: padding, slicing or reordering a batch changes no result. If an id occurs twice in one row of routes, both
choices go to the same replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import InputError, shown, unknown_name
from tokenyard.rows import describe

# More than any model and any group has. Tables of all experts and all ranks are made, and a mistyped number must not
# fill the memory.
MOST_EXPERTS = 65536
MOST_RANKS = 65536


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Per rank, the global ids of the experts that it holds. Made by the constructors below, checked once.

    >>> placement = Placement.contiguous(7, 3)
    >>> placement.table
    ((0, 1, 2), (3, 4), (5, 6))
    >>> placement.local_experts(1), placement.owners(4)
    ((3, 4), ((1, 1),))
    >>> print(placement)
    7 experts on 3 ranks, contiguous
    """

    num_experts: int  # E, the experts of the layer
    table: tuple[tuple[int, ...], ...]  # for each rank, the global ids of its experts, in local order
    # True after a rank was lost: experts without an owner are then not an error, and are dropped from routes.
    allow_lost: bool = False

    def __post_init__(self) -> None:
        # Lists and NumPy integers are accepted, and converted to tuples of ints, which can be hashed and sent as JSON.
        try:
            object.__setattr__(self, "num_experts", index(self.num_experts))
            object.__setattr__(self, "table", tuple(tuple(map(index, experts)) for experts in self.table))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"num_experts={shown(self.num_experts)} and a table of which {error}",
                expected="whole numbers: for each rank, a list of expert ids",
                fix="write the table as [[0, 1], [2, 3]]: one list per rank",
            ) from error
        _check_sizes(self.num_experts, self.world)
        for rank, experts in enumerate(self.table):
            _check_experts_of_rank(rank, experts, self.num_experts)
        orphans = self.lost_experts
        if orphans and not self.allow_lost:
            raise InputError(
                f"no rank owns expert{'s' if len(orphans) > 1 else ''} {_list_of(orphans)}",
                expected=f"an owner for each of the {self.num_experts} experts",
                fix="add the missing ids to a rank's row of the table",
            )

    @classmethod
    def contiguous(cls, num_experts: int, world: int) -> Placement:
        """Each rank holds a block of consecutive ids. The first E mod W ranks hold one more; with W > E, the last none.

        >>> Placement.contiguous(2, 3).table
        ((0,), (1,), ())
        """
        _check_sizes(num_experts, world)
        share, remainder = divmod(num_experts, world)
        starts = [rank * share + min(rank, remainder) for rank in range(world + 1)]
        table = tuple(tuple(range(starts[rank], starts[rank + 1])) for rank in range(world))
        return cls(num_experts=num_experts, table=table)

    @classmethod
    def round_robin(cls, num_experts: int, world: int) -> Placement:
        """Expert e on rank e mod W.

        >>> Placement.round_robin(7, 3).table
        ((0, 3, 6), (1, 4), (2, 5))
        """
        _check_sizes(num_experts, world)
        table = tuple(tuple(range(rank, num_experts, world)) for rank in range(world))
        return cls(num_experts=num_experts, table=table)

    @classmethod
    def explicit(cls, num_experts: int, table: Sequence[Sequence[int]]) -> Placement:
        """Any table: row w lists the experts of rank w, in local order. An id on several ranks is replicated.

        >>> Placement.explicit(3, [[2, 0], [1, 0]]).owners(0)
        ((0, 1), (1, 1))
        """
        return cls(num_experts=num_experts, table=table)  # type: ignore[arg-type] # made of tuples there

    @classmethod
    def replicated(cls, base: Placement, replicas: Mapping[int, Sequence[int]]) -> Placement:
        """`base`, and further copies: `replicas` maps an expert to the ranks that hold it *as well*.

        Copies come behind a rank's own experts, in the order of their ids, so that one set of replicas always
        gives the same table.

        >>> Placement.replicated(Placement.contiguous(4, 2), {0: [1], 3: [0]}).table
        ((0, 1, 3), (2, 3, 0))
        """
        try:
            copies = sorted(
                (index(expert), [index(rank) for rank in ranks]) for expert, ranks in replicas.items()
            )
            table = [list(experts) for experts in base.table]
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(
                f"replicas are {shown(replicas)}, added to {describe(base)} ({error})",
                expected="a Placement, and for each expert the ranks that hold it as well",
                fix="write replicas as {expert: [rank, …]}",
            ) from error
        for expert, ranks in copies:
            for rank in ranks:
                if not 0 <= rank < base.world:
                    raise InputError(
                        f"a replica of expert {expert} on rank {rank}",
                        expected=f"ranks from 0 to {base.world - 1}",
                        fix="place replicas on ranks of the EP group",
                    )
                table[rank].append(expert)
        return cls.explicit(base.num_experts, table)

    def without(self, lost_ranks: Iterable[int]) -> Placement:
        """The placement of the ranks that are left, renumbered. Experts without another replica are lost.

        >>> Placement.explicit(3, [[0], [1, 0], [2]]).without([0, 2])
        Placement(num_experts=3, table=((1, 0),), allow_lost=True)
        """
        lost = set(lost_ranks)
        table = tuple(experts for rank, experts in enumerate(self.table) if rank not in lost)
        return Placement(num_experts=self.num_experts, table=table, allow_lost=True)

    @cached_property
    def lost_experts(self) -> list[int]:
        """The experts that no rank owns."""
        return sorted(set(range(self.num_experts)).difference(*self.table))

    @property
    def world(self) -> int:
        """W, the number of ranks."""
        return len(self.table)

    @cached_property
    def has_replicas(self) -> bool:
        """Whether any expert is on more than one rank."""
        return sum(map(len, self.table)) > self.num_experts - len(self.lost_experts)

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """The global ids of a rank's experts, in local order."""
        self._check_rank(rank)
        return self.table[rank]

    def num_local(self, rank: int) -> int:
        """L, the number of experts on a rank; 0 is allowed."""
        return len(self.local_experts(rank))

    def owners(self, expert: int) -> tuple[tuple[int, int], ...]:
        """The (rank, local index) pairs of an expert, in rank order: one, or one per replica."""
        if not 0 <= expert < self.num_experts:
            raise InputError(
                f"expert {expert}",
                expected=f"ids from 0 to {self.num_experts - 1}",
                fix="pass global expert ids",
            )
        return self._owners[expert]

    def owners_seen_by(self, source_rank: int) -> list[tuple[tuple[int, int], ...]]:
        """The owners of each expert by rule 2: a token whose ids have the sum s goes to number s mod their count.

        For an expert that the source rank holds itself, only that copy is listed: rule 1 then costs nothing per token.
        """
        seen: list[tuple[tuple[int, int], ...]] = []
        for owners in self._owners:
            holders = [rank for rank, _ in owners]
            if source_rank in holders:
                seen.append((owners[holders.index(source_rank)],))
            else:
                first = (source_rank - sum(rank < source_rank for rank in holders)) % max(1, len(owners))
                seen.append(owners[first:] + owners[:first])
        return seen

    def resolve(self, topk_ids_TK: Tensor, source_rank: int) -> tuple[Tensor, Tensor]:
        """Where each choice of each token goes: `(rank_TK int64, local_TK int32)`, -1 where the id is -1.

        The ids must be in range (`Routes.check`); this is not checked here, because the host would have to wait
        for a GPU. The lookup tensors are built on the first call for a device and source rank, then reused; make
        that call before a CUDA graph is captured.

        >>> placement = Placement.replicated(Placement.contiguous(4, 3), {0: [1]})
        >>> placement.table
        ((0, 1), (2, 0), (3,))
        >>> rank_TK, local_TK = placement.resolve(torch.tensor([[0, 3], [0, 2], [1, -1]]), source_rank=2)
        >>> rank_TK.tolist(), local_TK.tolist()
        ([[1, 2], [0, 1], [0, -1]], [[1, 0], [0, 0], [1, -1]])
        """
        if topk_ids_TK.dtype not in (torch.int32, torch.int64) or topk_ids_TK.dim() != 2:
            raise InputError(
                f"topk_ids_TK is {describe(topk_ids_TK)}",
                expected="a matrix [T, K] of int32 or int64",
                fix="pass the ids of checked Routes",
            )
        self._check_rank(source_rank)
        # A lookup has one row more than there are experts: id -1 reads that last row.
        if not self.has_replicas:
            rank_E, local_E = self._single_lookup(topk_ids_TK.device)
            return rank_E[topk_ids_TK], local_E[topk_ids_TK]
        count_E, rank_EC, local_EC = self._replica_lookup(topk_ids_TK.device, source_rank)
        id_sum_T1 = topk_ids_TK.clamp(min=0).sum(dim=1, keepdim=True, dtype=torch.int64)
        replica_TK = id_sum_T1 % count_E[topk_ids_TK]
        return rank_EC[topk_ids_TK, replica_TK], local_EC[topk_ids_TK, replica_TK]

    def local_ids(self, topk_ids_TK: Tensor) -> Tensor:
        """The local ids (int32, a new tensor) of choices in a placement on one rank; no id may be -1.

        >>> Placement.explicit(3, [[2, 0, 1]]).local_ids(torch.tensor([[0, 2]])).tolist()
        [[1, 0]]
        """
        if self._in_order:
            return topk_ids_TK.to(torch.int32, copy=True)
        return self.resolve(topk_ids_TK, 0)[1]

    def fields(self) -> dict[str, Any]:
        """The placement as plain values, for a plan's fingerprint.

        >>> Placement.round_robin(3, 2).fields()
        {'num_experts': 3, 'table': [[0, 2], [1]]}
        """
        return {"num_experts": self.num_experts, "table": [list(experts) for experts in self.table]}

    def __str__(self) -> str:
        kind = next(
            (name for name, make in PLACEMENTS.items() if make(self.num_experts, self.world) == self), None
        )
        copies = sum(map(len, self.table)) - self.num_experts + len(self.lost_experts)
        kind = kind or ("explicit" if not copies else f"{copies} replica{'s' if copies > 1 else ''}")
        kind += f", {len(self.lost_experts)} lost" if self.lost_experts else ""
        return f"{self.num_experts} experts on {self.world} rank{'s' if self.world > 1 else ''}, {kind}"

    def __getstate__(self) -> dict[str, Any]:
        # Lookup tensors are not pickled: another process may have other devices.
        return {"num_experts": self.num_experts, "table": self.table, "allow_lost": self.allow_lost}

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise InputError(
                f"rank {rank}",
                expected=f"ranks from 0 to {self.world - 1}",
                fix="pass the rank within the EP group",
            )

    @cached_property
    def _in_order(self) -> bool:
        """Whether one rank holds all experts, in the order of their ids."""
        return self.table == (tuple(range(self.num_experts)),)

    @cached_property
    def _owners(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        owners: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.table):
            for local, expert in enumerate(experts):
                owners[expert].append((rank, local))
        return tuple(map(tuple, owners))

    @cached_property
    def _lookups(self) -> dict[tuple[torch.device, int | None], tuple[Tensor, ...]]:
        return {}

    def _single_lookup(self, device: torch.device) -> tuple[Tensor, ...]:
        key = (device, None)
        if key not in self._lookups:
            pairs = [owners[0] if owners else (-1, -1) for owners in self._owners] + [(-1, -1)]
            self._lookups[key] = (
                torch.tensor([rank for rank, _ in pairs], dtype=torch.int64, device=device),
                torch.tensor([local for _, local in pairs], dtype=torch.int32, device=device),
            )
        return self._lookups[key]

    def _replica_lookup(self, device: torch.device, source_rank: int) -> tuple[Tensor, ...]:
        """For each expert, the number of its copies, their ranks and their local ids, as in `owners_seen_by`.

        C in the shapes is the most copies of an expert.
        """
        key = (device, source_rank)
        if key not in self._lookups:
            seen = [owners or ((-1, -1),) for owners in (*self.owners_seen_by(source_rank), ())]
            width = max(map(len, seen))
            padded = [pairs + pairs[:1] * (width - len(pairs)) for pairs in seen]
            self._lookups[key] = (
                torch.tensor([len(pairs) for pairs in seen], dtype=torch.int64, device=device),
                torch.tensor(
                    [[rank for rank, _ in pairs] for pairs in padded], dtype=torch.int64, device=device
                ),
                torch.tensor(
                    [[local for _, local in pairs] for pairs in padded], dtype=torch.int32, device=device
                ),
            )
        return self._lookups[key]


# The placements that have a name: each takes (num_experts, world).
PLACEMENTS = {"contiguous": Placement.contiguous, "round_robin": Placement.round_robin}


def placement_for(spec: str | Placement, num_experts: int, world: int) -> Placement:
    """The placement that a spec means, for a layer of `num_experts` experts on `world` ranks.

    >>> print(placement_for("round_robin", 64, 8))
    64 experts on 8 ranks, round_robin
    """
    if isinstance(spec, str):
        if spec not in PLACEMENTS:
            raise unknown_name("placement", spec, PLACEMENTS)
        return PLACEMENTS[spec](num_experts, world)
    if not isinstance(spec, Placement):
        raise InputError(
            f"placement is {describe(spec)}",
            expected=f"a Placement, or one of {', '.join(PLACEMENTS)}",
            fix="build the placement with Placement.explicit(num_experts, table)",
        )
    if (spec.num_experts, spec.world) != (num_experts, world):
        raise InputError(
            f"a placement of {spec}",
            expected=f"{num_experts} experts on {world} rank{'s' if world > 1 else ''}, as in this layer",
            fix="build the placement for this layer's experts and this EP group's ranks",
        )
    return spec


def _check_sizes(num_experts: int, world: int) -> None:
    """Raise unless there is at least one expert and one rank, and no more than the limits above."""
    for found, most in ((num_experts, MOST_EXPERTS), (world, MOST_RANKS)):
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
            raise InputError(
                f"a placement of {shown(num_experts)} experts on {shown(world)} ranks",
                expected=f"from 1 to {MOST_EXPERTS} experts, on 1 to {MOST_RANKS} ranks",
                fix="pass the layer's number of experts and the EP group's size",
            )


def _check_experts_of_rank(rank: int, experts: tuple[int, ...], num_experts: int) -> None:
    outside = [expert for expert in experts if not 0 <= expert < num_experts]
    if outside:
        raise InputError(
            f"rank {rank} holds expert {outside[0]}",
            expected=f"ids from 0 to {num_experts - 1}",
            fix="pass global expert ids, counted from 0",
        )
    if len(set(experts)) < len(experts):
        twice = Counter(experts).most_common(1)[0][0]
        raise InputError(
            f"rank {rank} holds expert {twice} more than once",
            expected="each expert at most once on a rank",
            fix="put replicas on different ranks",
        )


def _list_of(ids: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
