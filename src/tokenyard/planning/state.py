"""`PlanState`: what the parts of a plan share, that is the present group, wirings and exchange.

What changes a plan (`tokenyard.elastic`) refers to this object and not to the plan. Without such a reference cycle, the
plan's memory is freed with the last reference to it. The layers of a plan use this object, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenyard.errors import HandleError, PeerLost, unknown_name
from tokenyard.exchange import Exchange, ExchangeSpec
from tokenyard.group import Group
from tokenyard.planning.agreement import agree_on_draft
from tokenyard.planning.drafting import Draft, draft_ignoring_env
from tokenyard.planning.layer_kernels import record_experts
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.wiring import Wiring

if TYPE_CHECKING:
    from tokenyard.elastic.changes import PlanChanges
    from tokenyard.elastic.joining import Joining
    from tokenyard.elastic.rebalancing import HoldsExperts


@dataclass(frozen=True, kw_only=True)
class WholePlan:
    """The group and the layers of a plan before ranks were lost. `readmit` restores them."""

    group: Group
    specs: dict[str, LayerSpec]
    lost: tuple[int, ...] = ()
    made_here: bool = False  # whether the plan made the group, and must close it

    def without(self, lost: Sequence[int]) -> WholePlan:
        """The same with further lost ranks, given as the present group numbers them (without those lost before)."""
        left = [rank for rank in range(self.group.size) if rank not in self.lost]
        return replace(self, lost=tuple(sorted({*self.lost, *(left[rank] for rank in lost)})))


class PlanState:
    """The group, exchange and wirings that a plan has at present."""

    group: Group  # the ranks that agreed on the draft
    exchange: Exchange  # the exchange that moves the rows of all layers
    draft: Draft  # the wiring of all layers, and the bytes that they need
    wirings: dict[str, Wiring]  # the wiring of each layer, by name
    # What changes the plan while it serves, as a weak reference (`weakref.proxy`); None before the first change.
    changes: PlanChanges | None = None
    joining: Joining | None = None  # receives the experts of a fresh rank, which have not come yet
    calls = 0  # calls of layers that have succeeded on this rank; counted in plans with `survive` only

    def __init__(
        self, draft: Draft, group: Group, plan_id: int, *, survive: bool, made_group: bool = False
    ) -> None:
        self.survive = survive  # whether a call of a layer succeeds even if a rank is lost in it
        self._made_group = group if made_group else None  # the group, if it was made for this plan
        self._layers: weakref.WeakValueDictionary[str, HoldsExperts] = weakref.WeakValueDictionary()
        self.copies: weakref.WeakSet[HoldsExperts] = weakref.WeakSet()  # of layers, with weights of their own
        # Forwards whose backward is due: their graphs live, and their backwards have not run.
        self.open_backwards: weakref.WeakSet[object] = weakref.WeakSet()
        self.whole = WholePlan(
            group=group, specs={spec.name: spec for spec in draft.specs}, made_here=made_group
        )
        self.start(draft, group, plan_id)

    def start(self, draft: Draft, group: Group, plan_id: int) -> None:
        """Make an exchange for a draft, and serve the draft with it. Collective over the group."""
        self.take(make_exchange(draft, group, plan_id), draft)

    def take(self, exchange: Exchange, draft: Draft) -> None:
        """Serve a draft through an exchange that was made for it."""
        self.group, self.exchange = exchange.group, exchange
        self.adopt(draft)
        for stats in self.exchange.stats.values():
            stats.lost = list(self.whole.lost)

    def adopt(self, draft: Draft) -> None:
        """Use the wirings of a draft from now on, with the present exchange."""
        self.draft = draft
        self.wirings = {wiring.spec.name: wiring for wiring in draft.wirings}
        if not self.whole.lost:
            self.whole = replace(self.whole, specs={spec.name: spec for spec in draft.specs})

    @property
    def layers(self) -> weakref.WeakValueDictionary[str, HoldsExperts]:
        """By layer name, the object that holds its experts on this rank: the `MoELayer` that was made last.

        If that is gone, and a copy of it is there (`copy.deepcopy`), it is the copy.
        """
        for copied in list(self.copies):
            if self._layers.setdefault(copied.name, copied) is copied:
                self.copies.discard(copied)
        return self._layers

    @property
    def copied(self) -> list[str]:
        """The names of layers that have copies beside them."""
        names = dict.fromkeys(self.layers)  # first: a copy whose layer is gone is no copy any more
        return [name for name in names if any(copied.name == name for copied in self.copies)]

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        if layer not in self.wirings:
            raise unknown_name("layer of this plan", layer, self.wirings).at(rank=self.group.rank)
        return self.wirings[layer]

    def redraft(
        self, group: Group, specs: Callable[[], Sequence[LayerSpec]], **changes: Any
    ) -> tuple[Draft, int]:
        """A draft of these layers with this plan's settings, and its number, agreed on by all ranks. Collective."""
        kept = {"exchange": self.draft.exchange, **self.draft.settings}
        return agree_on_draft(
            group,
            lambda: draft_ignoring_env(specs(), group.size, device=group.device, **(kept | changes)),
            survive=self.survive,
        )

    def extend(self, layers: Sequence[LayerSpec], max_tokens: int | None) -> None:
        """See `Plan.extend`."""
        with self.exchange.in_use():
            self._reshape([*self.draft.specs, *layers], max_tokens, self.exchange.serve)

    def trim(self, keep: Sequence[str] | None) -> None:
        """See `Plan.trim`."""
        with self.exchange.in_use():
            for name in keep or ():
                self.wiring(name)
            specs = [spec for spec in self.draft.specs if keep is None or spec.name in keep]
            self._reshape(specs, None, self.exchange.trim)

    def _reshape(
        self,
        specs: Sequence[LayerSpec],
        max_tokens: int | None,
        serve: Callable[[Sequence[ExchangeSpec]], None],
    ) -> None:
        reshaped, _ = self.redraft(self.group, lambda: specs, max_tokens=max_tokens)
        serve(reshaped.exchange_specs)
        self.adopt(reshaped)
        make_ready(self.exchange, self.draft)

    def check_still(self, what: str) -> None:
        """Raise if experts are moving: `what` must wait until they have."""
        if self.changes is not None:
            self.changes.check_still(what)

    def add_copy(self, layer: HoldsExperts) -> None:
        """Note a copy of a layer, which has weights of its own (`copy.deepcopy`): experts cannot move meanwhile."""
        self.check_still("copy.deepcopy of a layer")
        if self.joining is not None:
            self.exchange.usability.check()
        self.copies.add(layer)

    def go_on_after(self, loss: PeerLost, layer: str) -> None:
        """Go on without ranks that were lost in a call of `layer`, so that it can be repeated; else raise the loss.

        Collective over the ranks that are left. Some of these may have finished that call and be in the next one: they
        take part once more, without rows, in the call that the other ranks repeat.
        """
        if self.changes is None:
            raise loss
        self.changes.go_on_after(loss, layer)

    def close(self) -> None:
        """Give back what the ranks share, and close the group if it was made for this plan."""
        self.exchange.close()
        if self._made_group is not None:
            self._made_group.close()

    def __deepcopy__(self, memo: object) -> PlanState:
        return self  # a copy of a layer belongs to the same plan

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
    """Make an exchange that serves a draft, and warm up its kernels. Collective over the group."""
    made = Exchange(
        draft.exchange,
        group,
        in_flight=draft.in_flight,
        plan_id=plan_id,
        paranoid=draft.paranoid,
        sms=draft.sms,
    )
    made.serve(draft.exchange_specs)
    with made.in_use():
        make_ready(made, draft)
    return made


def make_ready(exchange: Exchange, draft: Draft) -> None:
    """Compile and load all kernels that calls of a draft's layers may launch. Collective over the group."""
    exchange.warmup(draft.exchange_specs, partial(record_experts, exchange, draft.wirings))
