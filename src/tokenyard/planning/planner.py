"""Plans: the checked wiring of all layers, agreed on by all ranks, before the first token.

    plan(layers, group, exchange="one_sided", max_tokens=512)

1. resolves every layer's wiring, or raises `PlanError` with choices that do work (each was tried);
2. computes the bytes that serve all layers: the largest dispatch region, the largest combine region;
3. compares itself across the group: ranks that disagree **all** raise `PlanMismatch`, nobody hangs. An error
   on one rank reaches the others too.

The first half without a group is a draft (`tokenyard.planning.drafting`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tokenyard.errors import HandleError, InputError, PeerLost, shown
from tokenyard.exchange import Exchange, ExchangeSpec, Transport
from tokenyard.exchange.stats import LayerStats
from tokenyard.experts import ExpertWeights
from tokenyard.group import READMISSION, Group
from tokenyard.planning.agreement import agree_on_draft, make_plan_id
from tokenyard.planning.choosing import AUTO
from tokenyard.planning.drafting import Draft, draft
from tokenyard.planning.expert_moves import ExpertMoves
from tokenyard.planning.rebalancing import HoldsExperts, Rebalance
from tokenyard.planning.recovery import Recovery
from tokenyard.planning.resizing import empty_weights
from tokenyard.planning.spec import LayerSpec
from tokenyard.planning.state import PlanState
from tokenyard.planning.surviving import check_survives
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement

if TYPE_CHECKING:
    from tokenyard.planning.joining import Joining

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
        """The ranks that agreed."""
        return self._state.group

    @property
    def exchange(self) -> Exchange:
        """What moves the rows."""
        return self._state.exchange

    @property
    def draft(self) -> Draft:
        """The wiring of all layers, and its bytes."""
        return self._state.draft

    @property
    def layers(self) -> weakref.WeakValueDictionary[str, HoldsExperts]:
        """What has the experts of each layer on this rank: the `MoELayer` that was made last."""
        return self._state.layers

    @property
    def survive(self) -> bool:
        """Whether a call goes on where a rank is lost in it."""
        return self._state.survive

    def extend(self, layers: Sequence[LayerSpec], *, max_tokens: int | None = None) -> None:
        """Serve further layers, too, with the plan's `max_rows`. Collective over the group, and over nobody else.

        The workspace is kept where it suffices, else rebuilt for the union of all layers; layers stay valid, and a
        dispatch that was in flight must be made again. If a rank cannot allocate, all raise, and the plan is as it
        was.
        """
        self._moves.under_way.check_still("extend")
        with self.exchange.in_use():
            self._reshape([*self.draft.specs, *layers], max_tokens, self.exchange.serve)

    def trim(self, keep: Sequence[str] | None = None) -> None:
        """Give back what the layers do not need; with `keep`, forget all layers but these. Collective."""
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

    def warmup(self) -> None:
        """Compile and load all kernels, before the first one that waits. Collective; a new plan has done so."""
        self._state.warmup()

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """Inside, layers on GPUs wait for nothing, and may be captured in a CUDA graph.

        Experts then get `W · max_tokens` rows, empty ones with ids of -1. `max_tokens`: of any rank, in these calls;
        the same on every rank. What goes wrong is raised by a later call, or by `synchronize`.
        """
        return self.exchange.fixed_shapes(max_tokens)

    def synchronize(self) -> None:
        """Wait for the device, and raise what went wrong in calls that did not."""
        self.exchange.synchronize()

    def go_on_without(self, lost: Sequence[int], *, renormalize: bool = False) -> None:
        """Serve all layers on the ranks that are left. Collective over these, after `PeerLost`.

        Ranks are renumbered in their order. What exchanges share is made anew: a lost rank that wakes up finds
        nothing to write into. Experts that were lost, and have no replica elsewhere, are dropped from the routes and
        counted (`stats`); with `renormalize` a token's other weights make up for them. Experts that route by
        themselves leave lost ones out, uncounted, and cannot renormalize.
        """
        self._recovery.go_on_without(lost, renormalize=renormalize)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that are gone, as the whole group numbered them."""
        return self._state.whole.lost

    def count_call(self) -> None:
        """One more call of a layer has ended well on this rank."""
        self._recovery.calls += 1

    def go_on_after(self, loss: PeerLost, layer: str) -> None:
        """Go on without ranks that were lost in a call of a layer, which this rank then makes again; or raise the loss.

        Collective over the ranks that are left. Some of them may have finished that call, and be in the next one: they
        take part in the others' once more, without rows.
        """
        self._recovery.go_on_after(loss, layer)

    def readmit(
        self, lost: Sequence[int] = (), *, group: Group | None = None, seconds: float = READMISSION
    ) -> None:
        """Serve all layers on all ranks again, fresh ones in the places of the lost. Collective over all of these.

        The ranks that are left call this: after `go_on_without`, or at once with the ranks that `PeerLost` names. A
        fresh process calls `rejoin(group.address, rank=…)`, makes the same plan, and loads the same weights. Then
        every result is bitwise what it was before. If nobody comes within so many seconds, `PeerLost` says who is
        missing, and the plan is as it was.

        `group` is for several plans of one group: call `group.readmit` once, and pass the new group to each plan, in
        the order in which they were made. It is also the way for groups that cannot readmit (NCCL).
        """
        self._recovery.readmit(lost, group=group, seconds=seconds)

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        return self._state.wiring(layer)

    def local_experts(self, layer: str) -> list[int]:
        """The global ids of the experts of a layer that this rank owns, in the order of its weights."""
        return list(self.wiring(layer).exchange_spec.placement.local_experts(self.group.rank))

    def stats(self) -> dict[str, LayerStats]:
        """What this rank has sent, received and waited, by layer."""
        return self.exchange.stats

    def gather_stats(self) -> list[dict[str, dict[str, Any]]]:
        """`stats` of every rank, as plain values, in rank order. Collective over the group."""
        with self.exchange.in_use():
            mine = {layer: stats.as_dict() for layer, stats in self.stats().items()}
            return self.group.gather_json(mine, phase="gather_stats")

    def load(self, *, reset: bool = False) -> dict[str, list[int]]:
        """By layer, how many choices of all ranks' tokens fell on each expert. Collective over the group.

        Dispatches are counted since the plan was made, or since the last call with `reset`. Layers whose experts route
        by themselves are left out: only these experts know their choices.
        """
        return self._state.load(reset=reset)

    def rebalance(
        self,
        placements: Mapping[str, str | Placement] | None = None,
        *,
        threshold: float = 1.1,
        wait: bool = True,
    ) -> Rebalance:
        """Move experts to other ranks, and serve the new placements. Collective.

        `placements` are those that layers shall have, by layer. Without them each layer whose busiest rank has more
        than `threshold` times the mean load gets the one that `balance` finds for the load since the last time, with
        as many copies of hot experts as there is memory for. Experts come through memory that layers declare
        (`LayerSpec.spare_experts`).

        With `wait=False` it returns at once, and experts move while the layers are called; then all ranks switch
        between two calls. A rank that is lost on the way leaves the others with the placements that they had, and
        `PeerLost`. `stats` has the pause of each switch.
        """
        return self._moves.rebalance(placements, threshold=threshold, wait=wait)

    def autobalance(self, *, every: int | None, threshold: float = 1.1) -> None:
        """Look at the load after so many calls of layers, again and again, and `rebalance` in the background.

        Collective. `every` counts the calls of all layers together; None ends it. `stats` says what was found, moved
        and gained. Raises where nothing could ever be moved.
        """
        self._moves.autobalance(every=every, threshold=threshold)

    def shrink(self, ranks: Sequence[int], *, wait: bool = True) -> Rebalance:
        """Let ranks go: their experts move to the others, which go on as a smaller group. Collective, on CPUs.

        Experts come through the memory that layers declare (`LayerSpec.spare_experts`); no output changes where
        `sum="choices"`. With `wait=False` it returns at once, and all ranks switch between two calls. A rank that
        leaves calls layers until `is_done` of what is returned, then `wait` of it; its plan is closed then. The others
        are renumbered in their order.
        """
        return self._moves.shrink(ranks, wait=wait)

    def grow(self, ranks: int | Group, *, seconds: float = READMISSION, wait: bool = True) -> Rebalance:
        """Take so many fresh ranks in, behind the present ones, and move experts to them. Collective, on CPUs.

        Each fresh process calls `rejoin(address, rank=…)` with the address of `plan.group`, and `join_plan`. They are
        waited for so many seconds; if they do not come, `PeerLost` says who is missing, and the plan is as it was. With
        `wait=False` it returns at once, and all ranks switch between two calls. `ranks` may be the larger group, where
        somebody else has made it.
        """
        return self._moves.grow(ranks, seconds=seconds, wait=wait)

    def empty_weights(self, layer: str) -> ExpertWeights:
        """Weights for this rank's experts of a layer, all zero: on a fresh rank, to which the experts are to come."""
        return empty_weights(self.wiring(layer), self.group.rank)

    def join(self, joining: Joining) -> None:
        """Refuse calls until this rank has taken its experts over. `join_plan` calls it."""
        self._joining, self.exchange.usability.joining = joining, True

    def take_over(self, *, seconds: float = READMISSION) -> None:
        """On a fresh rank, after it has made its layers: receive its experts, and serve with the others from then on.

        If they do not switch within so many seconds after they are ready, or give the move up, this raises.
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

    def between_calls(self, layer: str) -> None:
        """What a layer calls before each of its calls: experts that have moved are served from then on."""
        self._moves.between_calls(layer)

    def close(self) -> None:
        """Give the memory back. Every later call of this plan raises; the group stays usable.

        A batch that was started and not finished is given up; a thread that waits for its rows ends first.
        """
        self._moves.under_way.close()
        self.exchange.close()

    def __str__(self) -> str:
        return str(self.draft)


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
    dispatches may wait for their combine at a time. `max_rows` bounds the rows that a rank receives at a time, and the
    memory for them; a batch that brings more goes in several passes, on all ranks. On GPUs, `sms` bounds the
    multiprocessors that the exchange of a rank takes; the others are left to what is computed while rows travel.

    `TOKENYARD_EXCHANGE` in the environment overrides `exchange`. A `paranoid` plan watches every row, region and duty
    while its layers run, and raises `Corrupted` when one is not what it must be; `TOKENYARD_PARANOID=1` in the
    environment asks for it, too. With `survive`, a rank that is lost in a call of a layer costs time, not the call: the
    others go on without it, and send their rows again. Every expert must then be on two ranks, and layers have
    `sum="choices"`.

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
    """The plan of a draft that every rank makes for itself: `plan`, where the draft is needed before. Collective."""
    agreed, number = agree_on_draft(group, make, survive=survive)
    made = Plan(agreed, group, make_plan_id(agreed, number), survive=survive)
    if group.rank == 0:
        _log.info("%s", made)
    return made


def wiring_in(plan: object, layer: str) -> Wiring:
    """The wiring of a layer of a plan; raise unless it is an open plan."""
    if not isinstance(plan, Plan):
        raise InputError(
            f"the plan of layer {shown(layer)} is {shown(plan)}",
            expected="a Plan, which all ranks have agreed on",
            fix="pass plan(layers, group, …), and the name of the layer after it",
        )
    plan.exchange.usability.check_open()
    return plan.wiring(layer)
