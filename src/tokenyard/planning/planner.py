"""Plans: the checked wiring of all layers, agreed on by all ranks, before the first token.

    plan(layers, group, exchange="one_sided", max_tokens=512)

1. resolves every layer's wiring, or raises `PlanError` with choices that do work (each was tried);
2. computes the bytes that serve all layers: the largest dispatch region, the largest combine region;
3. compares itself across the group: ranks that disagree **all** raise `PlanMismatch`, nobody hangs. An error
   on one rank reaches the others too.

Steps 1 and 2 need no group: their result is a draft (`tokenyard.planning.drafting`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tokenyard.elastic.expert_moves import ExpertMoves
from tokenyard.elastic.rebalancing import HoldsExperts, Rebalance
from tokenyard.elastic.recovery import Recovery
from tokenyard.elastic.resizing import empty_weights
from tokenyard.elastic.surviving import check_survives
from tokenyard.errors import HandleError, InputError, PeerLost, shown
from tokenyard.exchange import Exchange, ExchangeSpec, Transport
from tokenyard.exchange.stats import LayerStats
from tokenyard.experts import ExpertWeights
from tokenyard.group import READMISSION, Group
from tokenyard.group.own_process import OwnProcess, in_own_process, not_pickled
from tokenyard.planning.agreement import agree_on_draft, make_plan_id
from tokenyard.planning.choosing import AUTO
from tokenyard.planning.drafting import Draft, draft
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.state import PlanState
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement

if TYPE_CHECKING:
    from tokenyard.elastic.joining import Joining

_log = logging.getLogger("tokenyard")


class Plan:
    """All layers of a model on one rank, agreed on with the other ranks. Made by `plan`."""

    def __init__(self, draft: Draft, group: Group, plan_id: int, *, survive: bool = False) -> None:
        self._state = PlanState(draft, group, plan_id, survive=survive)
        self._moves = ExpertMoves(self._state)
        self._recovery = Recovery(self._state, self._moves.under_way)
        self._joining: Joining | None = None

    @property
    def group(self) -> Group:
        """The ranks that agreed on the plan."""
        return self._state.group

    @property
    def exchange(self) -> Exchange:
        """The exchange that moves the rows of all layers."""
        return self._state.exchange

    @property
    def draft(self) -> Draft:
        """The wiring of all layers, and the bytes that they need."""
        return self._state.draft

    @property
    def layers(self) -> weakref.WeakValueDictionary[str, HoldsExperts]:
        """By layer name, the object that holds its experts on this rank: the `MoELayer` that was made last.

        If that is gone, and a copy of it is there (`copy.deepcopy`), it is the copy.
        """
        return self._state.layers

    @property
    def own_process(self) -> OwnProcess:
        """Refuses calls in processes that are forked from the one that made the plan."""
        return self._state.exchange.usability.own_process

    @property
    def survive(self) -> bool:
        """Whether a call of a layer still succeeds if a rank is lost in it."""
        return self._state.survive

    @in_own_process
    def extend(self, layers: Sequence[LayerSpec], *, max_tokens: int | None = None) -> None:
        """Add layers to the plan, with its `max_rows`. Collective over the group.

        The workspace is kept if it is large enough, else rebuilt for all layers together. Existing layers stay valid; a
        dispatch that was in flight must be made again. If a rank cannot allocate, all ranks raise, and the plan is as
        it was.
        """
        self._moves.under_way.check_still("extend")
        with self.exchange.in_use():
            self._reshape([*self.draft.specs, *layers], max_tokens, self.exchange.serve)

    @in_own_process
    def trim(self, keep: Sequence[str] | None = None) -> None:
        """Free memory that the layers do not need; with `keep`, first drop all layers but these. Collective."""
        self._moves.under_way.check_still("trim")
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
        reshaped, _ = self._state.redraft(self.group, lambda: specs, max_tokens=max_tokens)
        serve([wiring.exchange_spec for wiring in reshaped.wirings])
        self._state.adopt(reshaped)
        self.warmup()

    @in_own_process
    def warmup(self) -> None:
        """Compile and load all kernels before one runs that waits for other ranks. Collective; `plan` has done so."""
        self._state.warmup()

    @in_own_process
    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """Inside the block, the host does not wait in calls of layers on GPUs: they may be captured in a CUDA graph.

        Experts then get `W · max_tokens` rows, of which empty ones have ids of -1. `max_tokens` is the most tokens that
        any rank brings in these calls, the same number on every rank. Errors in these calls are raised by a later call,
        or by `synchronize`.
        """
        return self.exchange.fixed_shapes(max_tokens)

    @in_own_process
    def synchronize(self) -> None:
        """Wait for the device, and raise the errors of calls that did not wait for it."""
        self.exchange.synchronize()

    @in_own_process
    def go_on_without(self, lost: Sequence[int], *, renormalize: bool = False) -> None:
        """Serve all layers on the ranks that are left after `PeerLost`. Collective over these ranks.

        They are renumbered in their order. Connections and shared memory are made anew, so that a lost rank that wakes
        up cannot write into them. Experts that were lost and have no replica elsewhere are dropped from the routes, and
        these choices are counted (`stats`); with `renormalize` a token's other weights are raised to the same sum.
        Experts that route by themselves leave lost experts out, uncounted, and cannot renormalize.
        """
        self._recovery.go_on_without(lost, renormalize=renormalize)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost, by their numbers in the group before any loss."""
        return self._state.whole.lost

    @in_own_process
    def count_call(self) -> None:
        """Count a call of a layer that succeeded on this rank."""
        self._recovery.calls += 1

    @in_own_process
    def go_on_after(self, loss: PeerLost, layer: str) -> None:
        """Go on without ranks that were lost in a call of `layer`, so that it can be repeated; else raise the loss.

        Collective over the ranks that are left. Some of these may have finished that call and be in the next one: they
        take part once more, without rows, in the call that the other ranks repeat.
        """
        self._recovery.go_on_after(loss, layer)

    @in_own_process
    def readmit(
        self, lost: Sequence[int] = (), *, group: Group | None = None, seconds: float = READMISSION
    ) -> None:
        """Serve all layers on all ranks again, with fresh ranks in place of the lost ones. Collective over all of them.

        The ranks that are left call this, after `go_on_without`, or at once with the ranks that `PeerLost` names. Each
        fresh process calls `rejoin(group.address, rank=…)`, makes the same plan, and loads the same weights. Results
        are then bitwise what they were before the loss. If a fresh rank does not come within `seconds`, `PeerLost`
        names it, and the plan is as it was.

        `group` is for several plans of one group: call `group.readmit` once, and pass the new group to each plan, in
        the order in which the plans were made. It also serves groups that cannot readmit (NCCL): pass a new group.
        """
        self._recovery.readmit(lost, group=group, seconds=seconds)

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        return self._state.wiring(layer)

    def local_experts(self, layer: str) -> list[int]:
        """The global ids of the experts of a layer that this rank owns, in the order of its weights."""
        return list(self.wiring(layer).exchange_spec.placement.local_experts(self.group.rank))

    @in_own_process
    def stats(self) -> dict[str, LayerStats]:
        """By layer, the rows and bytes that this rank has sent and received, and the time that it waited."""
        return self.exchange.stats

    @in_own_process
    def gather_stats(self) -> list[dict[str, dict[str, Any]]]:
        """`stats` of every rank, as plain values, in rank order. Collective over the group."""
        with self.exchange.in_use():
            mine = {layer: stats.as_dict() for layer, stats in self.stats().items()}
            return self.group.gather_json(mine, phase="gather_stats")

    @in_own_process
    def load(self, *, reset: bool = False) -> dict[str, list[int]]:
        """By layer, how many choices of all ranks' tokens fell on each expert. Collective over the group.

        The counts are those since the plan was made, or since the last call with `reset`. Layers whose experts route
        by themselves are left out: the exchange does not see their choices.
        """
        return self._state.load(reset=reset)

    @in_own_process
    def rebalance(
        self,
        placements: Mapping[str, str | Placement] | None = None,
        *,
        threshold: float = 1.1,
        wait: bool = True,
    ) -> Rebalance:
        """Move experts to other ranks, and serve the new placements. Collective.

        `placements` are the new placements, by layer. Without them, each layer whose busiest rank has more than
        `threshold` times the mean load gets the placement that `balance` finds for the load since the last rebalance,
        with as many copies of hot experts as there is memory for. Experts are copied into memory that layers declare
        (`LayerSpec.spare_experts`).

        With `wait=False` it returns at once, and experts move while the layers are called; all ranks then switch
        between two calls. If a rank is lost during the move, the others keep their placements and raise `PeerLost`.
        `stats` has the pause of each switch.
        """
        return self._moves.rebalance(placements, threshold=threshold, wait=wait)

    @in_own_process
    def autobalance(self, *, every: int | None, threshold: float = 1.1) -> None:
        """Check the load after every `every` calls of layers, and `rebalance` in the background if it is uneven.

        Collective. `every` counts the calls of all layers together; None turns this off. `stats` has the imbalance that
        was found, the experts that were moved, and the imbalance that the new placement promises. Raises if nothing
        could ever be moved in this plan.
        """
        self._moves.autobalance(every=every, threshold=threshold)

    @in_own_process
    def shrink(self, ranks: Sequence[int], *, wait: bool = True) -> Rebalance:
        """Remove ranks from the plan: their experts move to the others, which go on as a smaller group. On CPUs only.

        Collective. Experts are copied into memory that layers declare (`LayerSpec.spare_experts`); with
        `sum="choices"` no output changes. With `wait=False` it returns at once, and all ranks switch between two calls.
        A rank that leaves calls layers until `is_done` of the returned move is true, then its `wait`, which closes the
        plan on that rank. The other ranks are renumbered in their order.
        """
        return self._moves.shrink(ranks, wait=wait)

    @in_own_process
    def grow(self, ranks: int | Group, *, seconds: float = READMISSION, wait: bool = True) -> Rebalance:
        """Add this many fresh ranks, numbered behind the present ones, and move experts to them. On CPUs only.

        Collective. Each fresh process calls `rejoin(address, rank=…)` with the address of `plan.group`, and then
        `join_plan`. If they do not come within `seconds`, `PeerLost` names the missing ones, and the plan is as it was.
        With `wait=False` it returns at once, and all ranks switch between two calls. In place of a number, `ranks` may
        be the larger group itself, if the caller has made it.
        """
        return self._moves.grow(ranks, seconds=seconds, wait=wait)

    def empty_weights(self, layer: str) -> ExpertWeights:
        """Zero weights for this rank's experts of a layer: a fresh rank makes its layers with them (`take_over`)."""
        return empty_weights(self.wiring(layer), self.group.rank)

    @in_own_process
    def join(self, joining: Joining) -> None:
        """Refuse calls of layers until `take_over` has received this rank's experts. `join_plan` calls it."""
        self._joining, self.exchange.usability.joining = joining, True

    @in_own_process
    def take_over(self, *, seconds: float = READMISSION) -> None:
        """Receive this fresh rank's experts from the others. Call it after the layers are made, and then call layers.

        Raises if the other ranks give the move up, or do not switch within `seconds` after the experts have come.
        """
        joining, self._joining = self._joining, None
        if joining is None:
            raise HandleError(
                "take_over was called on a rank whose experts are there",
                expected="a plan that `join_plan` returned, once",
                fix="leave it out",
                rank=self.group.rank,
            )
        try:
            joining.take_over(self.layers, seconds)
        except BaseException:
            self.close()
            raise
        self.exchange.usability.joining = False

    def add_copy(self, layer: HoldsExperts) -> None:
        """Note a copy of a layer, which has weights of its own (`copy.deepcopy`): experts cannot move meanwhile."""
        self._moves.under_way.check_still("copy.deepcopy of a layer")
        if self._joining is not None:
            self.exchange.usability.check()
        self._state.copies.add(layer)

    def between_calls(self, layer: str) -> None:
        """Switch to experts that have finished moving, if all ranks are ready. A layer calls this before each call."""
        self.own_process.check(layer=layer)
        self._moves.between_calls(layer)

    @in_own_process
    def close(self) -> None:
        """Free the memory of the plan. Every later call of it raises; the group stays usable.

        A batch that was started and not finished is given up, after the thread that waits for its rows has ended.
        """
        self._moves.under_way.close()
        self.exchange.close()

    def __deepcopy__(self, memo: object) -> Plan:
        return self  # a copy of a model calls the layers of the same plan

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_pickled(
            "the plan", fix="make the plan on each rank, from the same layers", rank=self.group.rank
        )

    def __str__(self) -> str:
        kernels = self.exchange.kernels
        ready = f"\n  {kernels.device}: {kernels.readiness}" if kernels.readiness.kernels else ""
        return f"{self.draft}{ready}"


def plan(
    layers: Sequence[LayerSpec],
    group: Group,
    *,
    exchange: str | type[Transport] = AUTO,
    max_tokens: int | None = None,
    in_flight: int = 1,
    max_rows: int | None = None,
    sms: int | None = None,
    paranoid: bool = False,
    survive: bool = False,
) -> Plan:
    """Check the layers, agree with the other ranks of the group, and set up the exchange. Collective.

    `exchange` is a name of `EXCHANGES`, `local`, or a class. `auto` takes `local` on one CPU rank, `one_sided` where
    the ranks share memory, `hierarchical` where they do so inside hosts, else the next one that reaches all of them.
    `max_tokens` is the most tokens that a rank brings in one call, for layers that do not set their own. `in_flight`
    is the most dispatches that may wait for their combine at a time. `max_rows` bounds the rows that a rank receives at
    a time, and the memory for them; a larger batch goes in several passes, on all ranks. On GPUs, `sms` bounds the
    multiprocessors that the exchange of a rank uses; the others are left to what is computed while rows travel.

    `TOKENYARD_EXCHANGE` in the environment overrides `exchange`. A `paranoid` plan checks every row, region and duty
    while its layers run, and raises `Corrupted` when one is not what it must be; `TOKENYARD_PARANOID=1` in the
    environment makes every plan paranoid. With `survive`, a call of a layer in which a rank is lost still succeeds:
    the others go on without that rank, and send their rows again. This requires every expert on two ranks, and layers
    with `sum="choices"`.

    >>> from tokenyard import LayerSpec, launch, plan
    >>> moe = LayerSpec(name="moe", hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, wire="nvfp4")
    >>> head = LayerSpec(name="head", hidden_size=48, intermediate_size=16, num_experts=3, top_k=1)
    >>> print(launch(2, lambda group: str(plan([moe, head], group, max_tokens=16)))[0])
    plan of 2 layers on 2 ranks, exchange one_sided (auto: the ranks share memory), 1 in flight
      moe: H 64, I 32, E 8, K 2; grouped (auto: on CPUs), bf16 weights, 8 experts on 2 ranks, contiguous
        wire nvfp4 (56 bytes a row), back bf16 (128); up to 16 tokens a rank
        quantize: sender, weight: experts, reduce experts: experts, reduce ranks: exchange
        at most 1.8 KB out + 4.1 KB back on a rank
      head: H 48, I 16, E 3, K 1; grouped (auto: on CPUs), bf16 weights, 3 experts on 2 ranks, contiguous
        wire bf16 (104 bytes a row), back bf16 (96); up to 16 tokens a rank
        weight: experts, reduce experts: experts, reduce ranks: exchange
        at most 3.3 KB out + 3.1 KB back on a rank
      all layers share 7.4 KB a rank (largest out 3.3 KB + largest back 4.1 KB)
    """

    if not isinstance(group, Group):
        raise InputError(
            f"the group is {shown(group)}",
            expected="a Group: each rank makes the plan with its own",
            fix="call plan inside a function that `launch` runs on every rank, or pass DistributedGroup()",
        )

    def make() -> Draft:
        made = draft(
            layers,
            group.size,
            exchange=exchange,
            max_tokens=max_tokens,
            in_flight=in_flight,
            max_rows=max_rows,
            sms=sms,
            paranoid=paranoid,
            device=group.device,
        )
        if survive:
            check_survives(made, group.device)
        return made

    return plan_draft(make, group, survive=survive)


def plan_draft(make: Callable[[], Draft], group: Group, *, survive: bool = False) -> Plan:
    """The plan of a draft that each rank makes by calling `make`, once all ranks agree on it. Collective."""
    agreed, number = agree_on_draft(group, make, survive=survive)
    made = Plan(agreed, group, make_plan_id(agreed, number), survive=survive)
    if group.rank == 0:
        _log.info("%s", made)
    return made


def wiring_in(plan: object, layer: str) -> Wiring:
    """The wiring of a layer in a plan; raise unless `plan` is a plan, and open."""
    if not isinstance(plan, Plan):
        raise InputError(
            f"the plan of layer {shown(layer)} is {shown(plan)}",
            expected="a Plan, which all ranks have agreed on",
            fix="pass plan(layers, group, …), and the name of the layer after it",
        )
    plan.exchange.usability.check_open()
    return plan.wiring(layer)
