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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tokenyard.errors import HandleError, InputError, shown
from tokenyard.exchange import Exchange, Transport
from tokenyard.exchange.stats import LayerStats
from tokenyard.experts import ExpertWeights
from tokenyard.group import READMISSION, Group, GroupLike, as_group
from tokenyard.group.own_process import not_pickled
from tokenyard.planning.agreement import agree_on_draft, make_plan_id
from tokenyard.planning.choosing import AUTO
from tokenyard.planning.drafting import Draft, draft
from tokenyard.planning.sharding import check_shards
from tokenyard.planning.spec import LayerSpec, is_size
from tokenyard.planning.state import PlanState
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Placement

if TYPE_CHECKING:
    from tokenyard.elastic import Rebalance
    from tokenyard.elastic.changes import PlanChanges
    from tokenyard.elastic.expert_moves import ExpertMoves
    from tokenyard.layer import MoELayer

_log = logging.getLogger("tokenyard")


class Plan:
    """All layers of a model on one rank, agreed on with the other ranks. Made by `plan`."""

    # The mesh over which the weights of experts are sharded, as DTensors; None: they are tensors of this rank alone.
    mesh: DeviceMesh | None = None

    def __init__(
        self, draft: Draft, group: Group, plan_id: int, *, survive: bool = False, made_group: bool = False
    ) -> None:
        self._state = PlanState(draft, group, plan_id, survive=survive, made_group=made_group)
        self._changes: PlanChanges | None = None
        if survive:
            self._changing()

    def _changing(self) -> PlanChanges:
        """The object that changes the plan while it serves, made for the first change: most plans do without."""
        state = self._here
        if self._changes is None:
            from tokenyard.elastic.changes import PlanChanges

            self._changes = PlanChanges(state)
        return self._changes

    def _moves(self) -> ExpertMoves:
        """What moves experts; raises in a training plan."""
        if self.training:
            raise HandleError(
                "experts of a training plan were to move",
                expected="experts that stay: gradients, and what an optimizer holds of them, would not move with them",
                fix="save the weights, make a plan with the other placement, and load them",
                rank=self.group.rank,
            )
        return self._changing().moves

    @property
    def _here(self) -> PlanState:
        """The state of the plan; raises in a process that is forked from the one that made the plan."""
        self._state.exchange.usability.own_process.check()
        return self._state

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

    def layer(
        self,
        name: str,
        weights: ExpertWeights | None = None,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        adopt: bool = False,
    ) -> MoELayer:
        """Make a layer of the plan, with the weights of this rank's experts.

        `weights` are those of all experts of the layer, in their order, of which this rank's are selected; or those of
        this rank's experts, in the order of `local_experts`. On a rank that joins a plan in use (`join_plan`) they are
        left out, and come from the other ranks. `shared` and `adopt` are those of `MoELayer`.
        """
        from tokenyard.layer.moe_layer import MoELayer
        from tokenyard.layer.rank_weights import rank_weights

        wiring = wiring_in(self, name)
        if weights is None and self._state.joining is not None:
            weights = self._state.joining.empty_weights(wiring)
        selected = rank_weights(wiring, self.group.rank, weights)
        return MoELayer(self, name, selected, shared=shared, adopt=adopt)

    @property
    def training(self) -> bool:
        """Whether the weights of its layers are parameters, and calls have a backward."""
        return self._state.draft.training

    def gradient_divisor(self, replicas: int = 1) -> int:
        """The number by which gradients of experts are divided to be those of the mean of all ranks' losses.

        Gradients of experts are those of the sum of the losses of this group's ranks; the library never divides. Where
        `replicas` groups train copies of the same experts, each on tokens of its own, their gradients are summed, too,
        and the divisor is the number of all ranks. FSDP divides by the size of its own mesh: give it this number,
        `layer.set_gradient_divide_factor(plan.gradient_divisor(replicas))`.
        """
        if not is_size(replicas):
            raise InputError(
                f"replicas is {shown(replicas)}",
                expected="how many groups train copies of these experts, at least 1",
                fix="pass the size of the mesh dimension over which experts are replicated or sharded by FSDP",
                rank=self.group.rank,
            )
        return self.group.size * replicas

    def wiring(self, layer: str) -> Wiring:
        """The wiring of a layer."""
        return self._state.wiring(layer)

    def local_experts(self, layer: str) -> list[int]:
        """The global ids of the experts of a layer that this rank owns, in the order of its weights."""
        return list(self.wiring(layer).exchange_spec.placement.local_experts(self.group.rank))

    def extend(self, layers: Sequence[LayerSpec], *, max_tokens: int | None = None) -> None:
        """Add layers to the plan, with its `max_rows`. Collective over the group.

        The workspace is kept if it is large enough, else rebuilt for all layers together. Existing layers stay valid; a
        dispatch that was in flight must be made again. If a rank cannot allocate, all ranks raise, and the plan is as
        it was.
        """
        self._here.check_still("extend")
        self._state.extend(layers, max_tokens)

    def trim(self, keep: Sequence[str] | None = None) -> None:
        """Free memory that the layers do not need; with `keep`, first drop all layers but these. Collective."""
        self._here.check_still("trim")
        self._state.trim(keep)

    def fixed_shapes(self, max_tokens: int | None = None) -> AbstractContextManager[None]:
        """Inside the block, the host does not wait in calls of layers on GPUs: they may be captured in a CUDA graph.

        Experts then get `W · max_tokens` rows, of which empty ones have ids of -1. `max_tokens` is the most tokens that
        any rank brings in these calls, the same number on every rank. Errors in these calls are raised by a later call,
        or by `synchronize`.
        """
        return self._here.exchange.fixed_shapes(max_tokens)

    def synchronize(self) -> None:
        """Wait for the device, and raise the errors of calls that did not wait for it."""
        self._here.exchange.synchronize()

    def stats(self) -> dict[str, LayerStats]:
        """By layer, the rows and bytes that this rank has sent and received, and the time that it waited."""
        return self._here.exchange.stats

    def load(self, *, reset: bool = False) -> dict[str, list[int]]:
        """By layer, how many choices of all ranks' tokens fell on each expert. Collective over the group.

        The counts are those since the plan was made, or since the last call with `reset`. Layers whose experts route
        by themselves are left out: the exchange does not see their choices.
        """
        return self._here.load(reset=reset)

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
        return self._moves().rebalance(placements, threshold=threshold, wait=wait)

    def autobalance(self, *, every: int | None, threshold: float = 1.1) -> None:
        """Check the load after every `every` calls of layers, and `rebalance` in the background if it is uneven.

        Collective. `every` counts the calls of all layers together; None turns this off. `stats` has the imbalance that
        was found, the experts that were moved, and the imbalance that the new placement promises. Raises if nothing
        could ever be moved in this plan.
        """
        self._moves().autobalance(every=every, threshold=threshold)

    def shrink(self, ranks: Sequence[int], *, wait: bool = True) -> Rebalance:
        """Remove ranks from the plan: their experts move to the others, which go on as a smaller group. On CPUs only.

        Collective. Experts are copied into memory that layers declare (`LayerSpec.spare_experts`); with
        `sum="choices"` no output changes. With `wait=False` it returns at once, and all ranks switch between two calls.
        A rank that leaves calls layers until `is_done` of the returned move is true, then its `wait`, which closes the
        plan on that rank. The other ranks are renumbered in their order.
        """
        return self._moves().shrink(ranks, wait=wait)

    def grow(self, ranks: int | Group, *, seconds: float = READMISSION, wait: bool = True) -> Rebalance:
        """Add this many fresh ranks, numbered behind the present ones, and move experts to them. On CPUs only.

        Collective. Each fresh process calls `rejoin(address, rank=…)` with the address of `plan.group`, and then
        `join_plan`. If they do not come within `seconds`, `PeerLost` names the missing ones, and the plan is as it was.
        With `wait=False` it returns at once, and all ranks switch between two calls. In place of a number, `ranks` may
        be the larger group itself, if the caller has made it.
        """
        return self._moves().grow(ranks, seconds=seconds, wait=wait)

    def go_on_without(self, lost: Sequence[int], *, renormalize: bool = False) -> None:
        """Serve all layers on the ranks that are left after `PeerLost`. Collective over these ranks.

        They are renumbered in their order. Connections and shared memory are made anew, so that a lost rank that wakes
        up cannot write into them. Experts that were lost and have no replica elsewhere are dropped from the routes, and
        these choices are counted (`stats`); with `renormalize` a token's other weights are raised to the same sum.
        Experts that route by themselves leave lost experts out, uncounted, and cannot renormalize.
        """
        self._changing().recovery.go_on_without(lost, renormalize=renormalize)

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
        self._changing().recovery.readmit(lost, group=group, seconds=seconds)

    def close(self) -> None:
        """Free the memory of the plan. Every later call of it raises; the group stays usable.

        A group that the plan has made of a process group is closed; the process group stays usable. A batch that was
        started and not finished is given up, after the thread that waits for its rows has ended.
        """
        state = self._here
        if self._changes is not None:
            self._changes.close()
        state.close()

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
    group: GroupLike,
    *,
    exchange: str | type[Transport] = AUTO,
    max_tokens: int | None = None,
    in_flight: int = 1,
    max_rows: int | None = None,
    sms: int | None = None,
    paranoid: bool = False,
    survive: bool = False,
    training: bool = False,
) -> Plan:
    """Check the layers, agree with the other ranks of the group, and set up the exchange. Collective.

    `group` is a `Group`, a process group of torch.distributed, or a `DeviceMesh` of one dimension. Of the latter two
    the plan makes a `DistributedGroup`, which `plan.close` closes.

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

    In a `training` plan the weights of experts are parameters, and calls with gradients enabled have a backward: one
    more round trip, in which all ranks take part. Gradients are those of the sum of all ranks' losses. If `group` is a
    `DeviceMesh`, the parameters are DTensors that are sharded over it, else plain ones of this rank's experts.

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
    ranks = as_group(group)
    mesh = mesh_of(group) if training else None

    def make() -> Draft:
        made = draft(
            layers,
            ranks.size,
            exchange=exchange,
            max_tokens=max_tokens,
            in_flight=in_flight,
            max_rows=max_rows,
            sms=sms,
            paranoid=paranoid,
            training=training,
            device=ranks.device,
        )
        if survive:
            from tokenyard.elastic.surviving import check_survives

            check_survives(made, ranks.device)
        return made

    return plan_draft(make, ranks, survive=survive, made_group=ranks is not group, mesh=mesh)


def plan_draft(
    make: Callable[[], Draft],
    group: Group,
    *,
    survive: bool = False,
    made_group: bool = False,
    mesh: DeviceMesh | None = None,
) -> Plan:
    """The plan of a draft that each rank makes by calling `make`, once all ranks agree on it. Collective.

    `made_group`: the group was made for this plan, and is closed with it, or now if no plan comes of it. `mesh`: the
    mesh over which the weights of a training plan are DTensors.
    """

    def draft_on_mesh() -> Draft:
        drafted = make()
        if mesh is None:
            return drafted
        check_shards(drafted, group.device)
        return replace(drafted, dtensors=True)

    try:
        agreed, number = agree_on_draft(group, draft_on_mesh, survive=survive)
        plan_id = make_plan_id(agreed, number)
        made = Plan(agreed, group, plan_id, survive=survive, made_group=made_group)
        made.mesh = mesh
    except BaseException:
        if made_group:
            group.close()
        raise
    if group.rank == 0:
        _log.info("%s", made)
    return made


def mesh_of(group: GroupLike) -> DeviceMesh | None:
    """What a plan is given as a group, if it is a mesh: the weights of a training plan are DTensors on it."""
    return group if isinstance(group, DeviceMesh) else None


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


def state_of(plan: Plan) -> PlanState:
    """What the layers of a plan, and what changes it, need of it."""
    return plan._state


def gather_stats(plan: Plan) -> list[dict[str, dict[str, Any]]]:
    """`plan.stats()` of every rank, as plain values, in rank order. Collective over the group.

    >>> from tokenyard import LayerSpec, launch, plan
    >>> moe = LayerSpec(name="moe", hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
    >>> stats = launch(2, lambda group: gather_stats(plan([moe], group, max_tokens=16)))[0]
    >>> [by_layer["moe"]["rounds"] for by_layer in stats]
    [0, 0]
    """
    with plan.exchange.in_use():
        mine = {layer: stats.as_dict() for layer, stats in plan.stats().items()}
        return plan.group.gather_json(mine, phase="gather_stats")
