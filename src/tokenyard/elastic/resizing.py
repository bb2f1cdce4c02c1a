"""The next group of a plan, for `Plan.grow` and `Plan.shrink`: it is made in the background, and taken in one switch.

The change of ranks is part of a move of experts (`rebalancing`). The thread of the move first makes the next group of
the plan, and an exchange on it for the new placements. Then it copies experts, while the layers run on the old group.
When all ranks are ready, each of them switches to the new group and the new placements between two calls.

**One decision.** A rank may be lost when some ranks have switched to the next group and others have not. These ranks
must not wait for each other in different groups. A rank that is about to switch therefore first records this decision
where all ranks can read it (`Group.decide`), and so does a rank that will not switch any more. The first decision
is final, and all ranks follow it.

**Leaving.** In the background, the ranks wait until all have switched. Then they free what the old
group shared. A rank that leaves waits for this in `wait`: until then others may still read what it has sent. A rank
that has not switched after a deadline is not waited for any longer; the others find it lost in their next call.

**A rank that fails** decides that the plan stays as it is, and may not come to the next group. The other
ranks look for this decision while they wait for the ranks of the next group (`StayCheck`): nothing else shows that one
of these will not come.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tokenyard.elastic.moving import Carrier, HeldExperts, held_by_all
from tokenyard.elastic.rebalancing import HoldsExperts
from tokenyard.errors import HandleError, InputError, PeerLost, PlanError, TokenyardError, shown
from tokenyard.exchange import EXCHANGES, Exchange
from tokenyard.experts.weights import WEIGHT_DTYPES, ExpertWeights
from tokenyard.group import Group
from tokenyard.group.base import check_count
from tokenyard.planning.agreement import make_plan_id
from tokenyard.planning.drafting import Draft
from tokenyard.planning.state import make_exchange
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement

GO, STAY = "switch", "stay"
# Seconds between two checks whether a rank has decided that the plan stays as it is.
_LOOK = 0.1


class StayCheck:
    """A check to call while waiting for other ranks: raises once one has decided that the plan stays as it is."""

    def __init__(self, group: Group, question: str) -> None:
        self._group, self._question = group, question
        self._answer: str | None = None
        self._next_look = 0.0

    def __call__(self) -> None:
        if self._answer is None and time.monotonic() >= self._next_look:
            with contextlib.suppress(TokenyardError):  # the store of the group does not answer
                self._answer = self._group.decided(self._question)
            self._next_look = time.monotonic() + _LOOK
        if self._answer == STAY:
            who, lost = json.loads(self._group.decided(_by_whom(self._question)) or '["a rank", []]')
            given_up = f"{who} has given the change of ranks up"
            raise self._group.lost(lost, phase="moving experts", waited=0.0, detail=given_up)


def give_up(group: Group, question: str, error: BaseException | None, members: Sequence[int] = ()) -> None:
    """Decide, because this rank has failed, that the plan stays as it is, unless another rank has switched already.

    With it, this rank writes down which ranks it has lost, and the others raise `PeerLost` for the same ranks.
    `members`, if not empty, maps the ranks that `error` names to their numbers in the plan's group.
    """
    peers = error.peers if isinstance(error, PeerLost) else ()
    lost = [members[rank] if members else rank for rank in peers]
    with contextlib.suppress(TokenyardError):  # the store of the group does not answer
        group.decide(_by_whom(question), json.dumps([f"rank {group.rank}", lost]))
        group.decide(question, STAY)


def _by_whom(question: str) -> str:
    return f"{question}, given up by"


class NextGroup:
    """The group that a plan will have after a change of ranks, as one rank of the present group sees it."""

    group: Group | None  # None before it was made, and on a rank that leaves
    exchange: Exchange | None  # the exchange on that group; None as above
    draft: Draft  # the draft that the plan will serve there
    carrier: Carrier  # copies experts between the ranks

    def __init__(
        self,
        present: Group,
        question: str,
        members: Sequence[int],
        make_group: Callable[[Callable[[], None]], Group] | None,
        make_draft: Callable[[Group], tuple[Draft, int]],
        *,
        layers: Mapping[str, HoldsExperts],
        patience: float | None = None,
        decided_in: Group | None = None,
    ) -> None:
        self.members = list(members)  # the ranks of the present group that stay, in the order of the next
        self.leaves = make_group is None  # whether this rank is not in the next group
        self.group, self.exchange = None, None
        # By layer, where all ranks of the next group hold experts, the fresh ones included.
        self.held: dict[str, list[HeldExperts]] = {}
        self.left_behind: list[Callable[[], None]] = []  # functions that free what the old group shared
        self._present, self._question = present, question
        self._make_group, self._make_draft, self._layers = make_group, make_draft, layers
        self._patience = patience  # seconds for which fresh ranks are waited for; None if there are none
        self._decided_in = decided_in or present  # the group whose decisions fresh ranks can read, too
        self._answer: str | None = None
        self._stay_check = StayCheck(self._decided_in, question)
        self._old_group_until: float | None = None

    @property
    def admits(self) -> bool:
        """Whether fresh ranks come, behind those of the present group."""
        return self._patience is not None

    def prepare(self) -> None:
        """Make the group, agree on a draft with its ranks, and make the exchange. Collective over the next group."""
        if self._make_group is not None:
            self.group = self._make_group(self._check)
            with self.group.patience(self._patience or 0.0):
                self.draft, number = self._make_draft(self.group)
                self.exchange = make_exchange(self.draft, self.group, make_plan_id(self.draft, number))
            if self._patience is not None:
                names = [wiring.spec.name for wiring in self.draft.wirings]
                self.held = held_by_all(self.group, self._layers, names, names, seconds=self._patience)
        carried_by = self._present if self._patience is None else self.group
        assert carried_by is not None
        self.carrier = Carrier(carried_by, self._question, check=self._check)

    def all_have_copied(self) -> None:
        """Wait until fresh ranks have copied their experts: they make no dispatches that would announce it."""
        if self._patience is not None:
            self.carrier.meet()

    def take(self) -> bool:
        """Decide to switch to the next group, unless a rank has decided before; return whether all ranks switch."""
        self._answer = self._answer or self._decided_in.decide(self._question, GO)
        return self._answer == GO

    def refuse(self) -> bool:
        """Decide to stay with the present group, unless a rank has decided before; return whether all ranks stay."""
        self._answer = self._answer or self._decided_in.decide(self._question, STAY)
        return self._answer == STAY

    def free_old_group(self) -> None:
        """Wait until all ranks have switched, at most for the deadline, and free what the old group shared."""
        self._old_group_until = time.monotonic() + self._present.deadline
        with contextlib.suppress(TokenyardError):  # a loss is raised by the next call of a layer
            self.carrier.meet()
        self.carrier.close()
        for give_back in self.left_behind:
            give_back()

    def _check(self) -> None:
        """Raise if this rank need not wait for the others any longer."""
        self._stay_check()
        if self._old_group_until is not None and time.monotonic() > self._old_group_until:
            waited = self._present.deadline
            raise self._present.lost([], phase="leaving the group before", waited=waited)

    def close(self, *, error: BaseException | None = None) -> None:
        """Stay with the present group: end the waits of other ranks for the next group, and close it.

        `error` is the error of this rank.
        """
        # Before there is a carrier, an error of a shrinking plan names ranks as the next group numbers them.
        renumbered = not self.admits and not hasattr(self, "carrier")
        give_up(self._decided_in, self._question, error, self.members if renumbered else ())
        if self.group is not None:
            with contextlib.suppress(TokenyardError):
                self.group.lost_elsewhere([], phase="changing ranks", waited=0.0)
        if hasattr(self, "carrier"):
            self.carrier.close()
        if self.exchange is not None:
            self.exchange.close()
        if self.group is not None:
            self.group.close()


def placement_without(present: Placement, leaving: Sequence[int], slots: Sequence[int]) -> Placement:
    """A placement on the same ranks in which the leaving ones hold no experts; `slots` are the slots of each rank.

    Experts that only leaving ranks hold go to the staying ranks with the fewest experts. Further copies are kept where
    a rank still has a spare slot afterwards.

    >>> placement_without(Placement.contiguous(6, 3), [1], [4, 4, 4]).table
    ((0, 1, 2), (), (4, 5, 3))
    """
    table = [[] if rank in leaving else list(row) for rank, row in enumerate(present.table)]
    staying = [rank for rank in range(present.world) if rank not in leaving]
    moved = [expert for rank in leaving for expert in present.table[rank]]
    alone = [e for e in dict.fromkeys(moved) if not any(e in row for row in table)]
    for spare, experts in ((0, alone), (1, [e for e in moved if e not in alone] + alone)):
        for expert in experts:
            copies = sum(expert in row for row in table)
            if spare and copies >= min(len(present.owners(expert)), len(staying)):
                continue
            room = [r for r in staying if expert not in table[r] and slots[r] - len(table[r]) > spare]
            if room:
                table[min(room, key=lambda r: (len(table[r]), r))].append(expert)
            elif not spare:
                free = sum(slots[r] - len(present.table[r]) for r in staying)
                raise PlanError(
                    f"{len(alone)} experts live on ranks {list(leaving)} alone, and there is memory for {free} more",
                    expected="memory for them on the ranks that stay",
                    fix="declare more of it: LayerSpec(spare_experts=…)",
                )
    return Placement.explicit(present.num_experts, table)


def placement_with(present: Placement, count: int) -> Placement:
    """A placement on `count` further ranks, which get experts of the fullest ranks until all hold about equally many.

    >>> placement_with(Placement.contiguous(6, 2), 1).table
    ((0, 1), (3, 4), (2, 5))
    """
    table = [*map(list, present.table), *([] for _ in range(count))]
    while True:
        new = min(range(present.world, len(table)), key=lambda rank: len(table[rank]))
        donors = [
            (len(row), -rank) for rank, row in enumerate(table[: present.world]) if set(row) - set(table[new])
        ]
        if not donors or max(donors)[0] - len(table[new]) <= 1:
            return Placement.explicit(present.num_experts, table)
        donor = table[-max(donors)[1]]
        expert = next(expert for expert in reversed(donor) if expert not in table[new])
        donor.remove(expert)
        table[new].append(expert)


def widened(present: Placement, count: int) -> Placement:
    """The same placement with `count` further ranks that hold no experts yet."""
    return Placement.explicit(present.num_experts, [*present.table, *[()] * count])


def introduction(draft: Draft, question: str, goals: Mapping[str, Placement]) -> dict[str, Any]:
    """The description of a plan that fresh ranks receive, as plain values."""
    return {
        "question": question,
        "exchange": draft.exchange.name,
        "settings": draft.settings,
        "layers": {
            wiring.spec.name: {
                "max_tokens": wiring.exchange_spec.max_tokens,
                "present": wiring.exchange_spec.placement.table,
                "goal": goals[wiring.spec.name].table,
            }
            for wiring in draft.wirings
        },
    }


def exchange_named(name: str, rank: int) -> Any:
    """The exchange of this name; raise if fresh ranks could not find it by name, because it is a user's class."""
    if name not in EXCHANGES:
        raise PlanError(
            f"the plan's exchange is {name!r}",
            expected=f"one that a fresh rank finds by its name: {', '.join(EXCHANGES)}",
            fix="plan with one of these",
            rank=rank,
        )
    return EXCHANGES[name]


def empty_weights(wiring: Wiring, rank: int) -> ExpertWeights:
    """Zero weights for the experts that a rank is to have: memory into which other ranks' weights are copied."""
    spec = wiring.experts_spec(rank)
    dtype = WEIGHT_DTYPES.get(spec.weights, torch.float32)
    made = ExpertWeights(**{name: torch.zeros(shape, dtype=dtype) for name, shape in spec.shapes().items()})  # type: ignore[arg-type]
    return made if spec.weights in WEIGHT_DTYPES else made.quantize(spec.weights)


def check_leaving(ranks: Sequence[int], group: Group) -> list[int]:
    """The ranks that leave, in ascending order; raise unless some stay."""
    known = set(range(group.size))
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) < known:
        raise InputError(
            f"ranks {shown(list(ranks))} are to leave a group of {group.size}",
            expected=f"some of ranks 0 to {group.size - 1}, each once, and not all of them",
            fix="pass ranks as `plan.group` numbers them",
            rank=group.rank,
        )
    return sorted(ranks)


def check_grown(grown: object, present: Group) -> int:
    """The number of fresh ranks: `grown` itself, or how many ranks the group `grown` has more than the present one."""
    if not isinstance(grown, Group):
        return check_count(grown, present.rank)
    if grown.size <= present.size or grown.rank != present.rank:
        raise InputError(
            f"rank {present.rank} of {present.size} is rank {grown.rank} of {grown.size} in the group to grow into",
            expected=f"more than {present.size} ranks, the first of which are those of the plan, in their order",
            fix="number fresh ranks behind the present ones; or pass how many there are: plan.grow(2)",
            rank=present.rank,
        )
    return grown.size - present.size


def not_taken_in(rank: int) -> HandleError:
    """The error of a fresh rank that the other ranks did not take into their plan."""
    return HandleError(
        "the other ranks go on without this one",
        expected="all of them to be ready, and to switch",
        fix="see the error of `plan.grow` on those ranks, and join again",
        rank=rank,
    )
