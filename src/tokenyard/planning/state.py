"""What the parts of a plan share: the ranks, the layers, and the exchange that serves them now.

A plan is made of parts: `ExpertMoves` moves experts between its ranks, `Recovery` goes on after a loss. They hold this
object, and not the plan: nothing refers back to a plan, so that its memory is given back as soon as nobody uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenyard.errors import HandleError, unknown_name
from tokenyard.exchange import Exchange
from tokenyard.group import Group
from tokenyard.planning.agreement import agree_on_draft
from tokenyard.planning.drafting import Draft, draft_as_told
from tokenyard.planning.rebalancing import HoldsExperts
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.wiring import Wiring


@dataclass(frozen=True, kw_only=True)
class WholePlan:
    """The group and the layers of a plan before ranks were lost. `readmit` restores them."""

    group: Group
    specs: dict[str, LayerSpec]
    lost: tuple[int, ...] = ()
    made_here: bool = False  # whether the group is the plan's own, to be closed by it

    def without(self, lost: Sequence[int]) -> WholePlan:
        """The same after further losses; `lost` are ranks as the present group numbers them."""
        left = [rank for rank in range(self.group.size) if rank not in self.lost]
        return replace(self, lost=tuple(sorted({*self.lost, *(left[rank] for rank in lost)})))


class PlanState:
    """What a plan serves now, and on which ranks."""

    group: Group  # the ranks that agreed
    exchange: Exchange  # what moves the rows
    draft: Draft  # the wiring of all layers, and its bytes
    wirings: dict[str, Wiring]  # the wiring of each layer, by name

    def __init__(self, draft: Draft, group: Group, plan_id: int, *, survive: bool) -> None:
        self.survive = survive  # whether a call goes on where a rank is lost in it
        # What has the experts of each layer on this rank: the `MoELayer` that was made last.
        self.layers: weakref.WeakValueDictionary[str, HoldsExperts] = weakref.WeakValueDictionary()
        self.whole = WholePlan(group=group, specs={spec.name: spec for spec in draft.specs})
        self.start(draft, group, plan_id)

    def start(self, draft: Draft, group: Group, plan_id: int) -> None:
        """Serve a draft, through an exchange of its own. Collective over the group."""
        self.take(make_exchange(draft, group, plan_id), draft)

    def take(self, exchange: Exchange, draft: Draft) -> None:
        """Serve a draft through an exchange that was made for it."""
        self.group, self.exchange = exchange.group, exchange
        self.adopt(draft)
        for stats in self.exchange.stats.values():
            stats.lost = list(self.whole.lost)

    def adopt(self, draft: Draft) -> None:
        """Serve the wirings of a draft from now on."""
        self.draft = draft
        self.wirings = {wiring.spec.name: wiring for wiring in draft.wirings}
        if not self.whole.lost:
            self.whole = replace(self.whole, specs={spec.name: spec for spec in draft.specs})

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        if layer not in self.wirings:
            raise unknown_name("layer of this plan", layer, self.wirings).at(rank=self.group.rank)
        return self.wirings[layer]

    def redraft(
        self, group: Group, specs: Callable[[], Sequence[LayerSpec]], **changes: Any
    ) -> tuple[Draft, int]:
        """What this plan would be with these layers, agreed on by all ranks of a group."""
        kept = {"exchange": self.draft.exchange, **self.draft.settings}
        return agree_on_draft(
            group,
            lambda: draft_as_told(specs(), group.size, device=group.device, **(kept | changes)),
            survive=self.survive,
        )

    def warmup(self) -> None:
        """Compile and load all kernels, before the first one that waits. Collective."""
        with self.exchange.in_use():
            self.exchange.warmup([wiring.exchange_spec for wiring in self.draft.wirings])

    def load(self, *, reset: bool) -> dict[str, list[int]]:
        """By layer, how many choices of all ranks' tokens fell on each expert. Collective over the group."""
        if not self.exchange.counts_choices:
            raise HandleError(
                f"the load of {self.exchange.transport.name} on {self.group.device.type} was asked for",
                expected="an exchange whose calls read the ids of a batch",
                fix="record routes (docs/guide/balancing.md), or plan with exchange='two_sided'",
                rank=self.group.rank,
            )
        with self.exchange.in_use():
            mine = {
                wiring.spec.name: self.exchange.load.of(wiring.spec.name)
                for wiring in self.draft.wirings
                if not wiring.exchange_spec.carries_logits
            }
            by_rank = self.group.gather_json(mine, phase="load")
            if reset:
                self.exchange.load.reset()
        return {
            layer: [sum(counts) for counts in zip(*(r[layer] for r in by_rank), strict=True)]
            for layer in mine
        }


def make_exchange(draft: Draft, group: Group, plan_id: int) -> Exchange:
    """An exchange that serves a draft, with all that its first calls need. Collective over the group."""
    made = Exchange(
        draft.exchange,
        group,
        in_flight=draft.in_flight,
        plan_id=plan_id,
        paranoid=draft.paranoid,
        sms=draft.sms,
    )
    specs = [wiring.exchange_spec for wiring in draft.wirings]
    made.serve(specs)
    with made.in_use():
        made.warmup(specs)
    return made
