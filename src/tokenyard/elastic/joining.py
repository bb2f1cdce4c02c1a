"""How a fresh rank joins a plan that is in use, while the other ranks call `Plan.grow`.

The fresh rank receives the settings of the plan and its placements, agrees on them with the other ranks, and makes its
layers with zero weights. Then it receives its experts from the other ranks. It takes part in calls of layers from the
switch of all ranks on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenyard.elastic.moving import Carrier, held_by_all
from tokenyard.elastic.rebalancing import HoldsExperts, Rebalance
from tokenyard.elastic.resizing import STAY, StayCheck, empty_weights, exchange_named, give_up, not_taken_in
from tokenyard.errors import HandleError, TokenyardError
from tokenyard.experts import ExpertWeights
from tokenyard.group import READMISSION, Group
from tokenyard.planning.agreement import agree_on_draft, make_plan_id
from tokenyard.planning.drafting import Draft, draft_ignoring_env
from tokenyard.planning.planner import Plan, state_of
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement

# Seconds between two checks whether the other ranks have switched.
_LOOK = 0.003


class Joining:
    """Receives the experts of this fresh rank from the other ranks."""

    def __init__(
        self, group: Group, question: str, present: Mapping[str, Placement], goals: Mapping[str, Placement]
    ) -> None:
        self._group, self._question, self._names = group, question, list(goals)
        self._present = {name: each for name, each in present.items() if each != goals[name]}
        self._goals = {name: goals[name] for name in self._present}

    def empty_weights(self, wiring: Wiring) -> ExpertWeights:
        """Zero weights for this rank's experts of a layer, into which those of other ranks are copied."""
        return empty_weights(wiring, self._group.rank)

    def take_over(self, layers: Mapping[str, HoldsExperts], seconds: float) -> None:
        """Receive the experts, and wait until the other ranks have switched. Collective over the grown group."""
        group = self._group
        names = list(self._names)
        held = held_by_all(group, layers, names, names, seconds=seconds)
        carrier = Carrier(group, self._question, check=StayCheck(group, self._question))
        try:
            move = Rebalance(
                group, carrier, layers, held, self._present, [self._goals], finish=lambda move: None
            )
            move.copy()
            carrier.meet()
            if self._answer(seconds) == STAY:
                raise not_taken_in(group.rank)
        except BaseException as error:
            give_up(group, self._question, error)
            carrier.close()
            raise
        # The other ranks free the memory of their old group after all ranks have confirmed the switch. A thread does
        # so here, while this rank serves layers.
        threading.Thread(target=_confirm_switch, args=[carrier], name="moving experts", daemon=True).start()

    def _answer(self, seconds: float) -> str:
        """What the other ranks have decided. After `seconds`, or if a rank has ended, decide that the plan stays."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(TokenyardError):  # the store did not answer: ask it again
                if (answer := self._group.decided(self._question)) is not None:
                    return answer
            if time.monotonic() > until or self._group.gone():
                return self._group.decide(self._question, STAY)
            time.sleep(_LOOK)


def _confirm_switch(carrier: Carrier) -> None:
    with contextlib.suppress(TokenyardError):  # a loss is raised by the next call of a layer
        carrier.meet()
    carrier.close()


def join_plan(layers: Sequence[LayerSpec], group: Group, *, seconds: float = READMISSION) -> Plan:
    """Join a plan in use, on a fresh rank, while the others call `plan.grow`. `group` is what `rejoin` returned.

    `layers` are those of the plan, in its order; placements and settings are taken from the other ranks. Afterwards
    make each layer, `plan.layer(name)` without weights, and call `take_over(plan)`, which receives the experts.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import torch
    >>> from tokenyard import ExpertWeights, LayerSpec, plan
    >>> from tokenyard.elastic import join_plan, take_over
    >>> from tokenyard.group import rejoin, thread_groups
    >>> moe = LayerSpec(name="moe", hidden_size=8, intermediate_size=4, num_experts=4, top_k=1, max_tokens=4)
    >>> def old(group):
    ...     agreed = plan([moe], group, exchange="one_sided")
    ...     weights = ExpertWeights(w13=torch.ones(4, 8, 8).bfloat16(), w2=torch.ones(4, 8, 4).bfloat16())
    ...     layer = agreed.layer("moe", weights)
    ...     agreed.grow(1)
    ...     return agreed.local_experts("moe")
    >>> def fresh(address):
    ...     agreed = join_plan([moe], rejoin(address, rank=1))
    ...     layer = agreed.layer("moe")
    ...     take_over(agreed)
    ...     return agreed.local_experts("moe")
    >>> (group,) = thread_groups(1)
    >>> with ThreadPoolExecutor(2) as pool:
    ...     ranks = pool.submit(old, group), pool.submit(fresh, group.address)
    ...     [rank.result() for rank in ranks]
    [[0, 1], [3, 2]]
    """
    with group.patience(seconds):
        introduced = group.gather_json(None, phase="growing")[0]
        tables = introduced["layers"]

        def placements(which: str) -> dict[str, Placement]:
            world = group.size
            return {
                spec.name: Placement.explicit(spec.num_experts, [*rows, *[()] * (world - len(rows))])
                for spec in layers
                if spec.name in tables and (rows := tables[spec.name][which])
            }

        def make() -> Draft:
            known = [_as_planned(spec, tables) for spec in layers]
            exchange = exchange_named(introduced["exchange"], group.rank)
            settings = introduced["settings"]
            return draft_ignoring_env(known, group.size, exchange=exchange, device=group.device, **settings)

        agreed, number = agree_on_draft(group, make)
        made = Plan(agreed, group, make_plan_id(agreed, number))
    joining = Joining(group, introduced["question"], placements("present"), placements("goal"))
    expect_experts(made, joining)
    return made


def expect_experts(plan: Plan, joining: Joining) -> None:
    """Refuse calls of a plan's layers until `take_over` has received this rank's experts."""
    state = state_of(plan)
    state.joining, state.exchange.usability.joining = joining, True


def take_over(plan: Plan, *, seconds: float = READMISSION) -> None:
    """Receive this fresh rank's experts from the others. Call it after the layers are made, and then call layers.

    `plan` is what `join_plan` returned. Raises if the other ranks give the move up, or do not switch within `seconds`
    after the experts have come.
    """
    state = state_of(plan)
    state.exchange.usability.own_process.check()
    joining, state.joining = state.joining, None
    if joining is None:
        raise HandleError(
            "take_over was called on a rank whose experts are there",
            expected="a plan that `join_plan` returned, once",
            fix="leave it out",
            rank=plan.group.rank,
        )
    try:
        joining.take_over(state.layers, seconds)
    except BaseException:
        plan.close()
        raise
    state.exchange.usability.joining = False


def _as_planned(spec: LayerSpec, tables: Mapping[str, Mapping[str, Any]]) -> LayerSpec:
    """A layer with the placement and the `max_tokens` of the other ranks; unchanged, if they have no such layer."""
    if spec.name not in tables:
        return spec
    table = tables[spec.name]
    placement = Placement.explicit(spec.num_experts, table["goal"])
    return replace(spec, placement=placement, max_tokens=spec.max_tokens or table["max_tokens"])
