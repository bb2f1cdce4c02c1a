"""`MoELayer`: the steps that take a batch of tokens through router, dispatch, experts and combine.

x_TH ── router ──► routes
  │                  │
  └─► wire.encode ───┴─► dispatch ──► experts ──► combine ──► y_TH
       (payloads)        one copy      (rows        (float32 sum over
                         per rank       weighted     ranks, fixed order)
                                        and summed
                                        per rank)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from tokenyard.duties import NO_CONTEXT
from tokenyard.errors import PeerLost
from tokenyard.exchange import RoundTrip
from tokenyard.experts import Experts, ExpertWeights, SelfRoutingExperts
from tokenyard.experts.slots import ExpertSlots
from tokenyard.group.base import Background
from tokenyard.group.own_process import not_pickled
from tokenyard.layer import training
from tokenyard.layer.building import LocalIds, build_experts, built_for, check_fits, check_shared
from tokenyard.layer.call import Call, Inputs, SharedExpertsCall, check_rows, route, run_experts
from tokenyard.layer.compiled import (
    call_operator,
    outside_of_the_graph,
    refuse_gradients,
    refuse_training,
    register,
)
from tokenyard.layer.compiled_training import call_trained
from tokenyard.layer.pending import PendingBatch
from tokenyard.planning.audit import Audit
from tokenyard.planning.layer_kernels import load_kernels
from tokenyard.planning.planner import Plan, state_of, wiring_in
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import ExpertResult, RankRows


class MoELayer(nn.Module):
    """One layer of a plan, on this rank: what `plan.layer(name, weights)` makes.

    Every rank of the group calls it, a rank without tokens with T = 0. `weights` are those of this rank's experts,
    which `plan.layer` selects. They are copied, or with `adopt=True` used without a copy. `shared` experts run on this
    rank's own tokens, and their output is added once.

    `copy.deepcopy` of a layer shares its plan, and has weights of its own. All ranks call the copies in one order, too.
    """

    plan: Plan  # the plan that all ranks agreed on
    name: str  # the layer's name in the plan
    shared: Callable[[Tensor], Tensor] | None  # the shared experts, if there are any
    experts: Experts  # the experts of this rank, with their weights
    slots: ExpertSlots  # where the weights of each expert stand; some slots may be spare
    key: Tensor  # the number by which the operator in a compiled model finds the layer

    def __init__(
        self,
        plan: Plan,
        name: str,
        weights: ExpertWeights,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        adopt: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.name, self.shared = plan, name, shared
        self._wiring = wiring_in(plan, name)
        self._state = state_of(plan)
        check_shared(self._wiring, shared)
        self.experts = build_experts(self._wiring, plan.group.rank, weights, adopt=adopt)
        if plan.mesh is not None:
            from tokenyard.layer.mesh_parameters import hold_as_dtensors

            hold_as_dtensors(self.experts, plan.mesh, self._wiring.spec.num_experts)
        self._built_for = built_for(self._wiring, plan.group.rank)
        owned = plan.local_experts(name)
        self.slots = ExpertSlots(owned, len(owned) + self._wiring.spec.spare_experts)
        self._slot_of_L = self.slots.lookup(plan.group.device)  # None: the local id of an expert is its slot
        self.key = register(self)
        self._state.layers[name] = self
        self._load_kernels()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer, as `nn.Module` does; on a GPU its kernels are loaded before the first call."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._load_kernels()
        return self

    def _load_kernels(self) -> None:
        """Load the kernels of these experts that the plan has not loaded: it did not know how weights are held."""
        load_kernels(self.plan.exchange, self._wiring, self.experts)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        memo[id(self)] = made = type(self).__new__(type(self))
        # What the plan says of the layer is shared with the copy.
        memo |= {id(value): value for value in (self._wiring, self._built_for, self.experts.spec)}
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        made.key = register(made)
        self._state.add_copy(made)
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_pickled(
            "a layer",
            fix="save `layer.state_dict()`, and load it into a layer that is made with a plan; copy.deepcopy copies a "
            "layer within its process",
            layer=self.name,
            rank=self.plan.group.rank,
        )

    @property
    def open_backwards(self) -> weakref.WeakSet[object]:
        """Forwards of all layers of the plan whose backward is due."""
        return self._state.open_backwards

    @property
    def wiring(self) -> Wiring:
        """The layer's present wiring: it changes when the plan grows, or goes on without a rank."""
        wiring = self._state.wirings.get(self.name)
        if wiring is None:
            wiring = self.plan.wiring(self.name)  # raises: the plan was trimmed
        if wiring is not self._wiring:
            check_fits(wiring, self.plan.group.rank, self._built_for)
            self._wiring = wiring
        return wiring

    def switch(self, wiring: Wiring, came: dict[int, int]) -> None:
        """Use another placement from now on; `came` maps each expert that was copied to this rank to its slot.

        `plan.rebalance` calls this on all ranks.
        """
        rank, placement = self.plan.group.rank, wiring.exchange_spec.placement
        self.slots.switch(placement.local_experts(rank), came)
        self._slot_of_L = self.slots.lookup(self.plan.group.device, self._slot_of_L)
        if isinstance(self.experts, SelfRoutingExperts):
            self.experts.to_local = LocalIds(placement, rank, self._slot_of_L)
        self._wiring, self._built_for = wiring, built_for(wiring, rank)

    def forward(
        self,
        x_TH: Tensor,
        routes_or_logits: Routes | Tensor,
        *,
        payloads: Mapping[str, Tensor] | None = None,
        out: Tensor | None = None,
        add: Tensor | None = None,
        token_numbers: Tensor | None = None,
    ) -> Tensor:
        """Send tokens to their experts, and return the sum of the results, plus `add` if given, in `out` if given.

        `token_numbers` (int64 `[T]`) are those that `LayerSpec.token_numbers` declares.
        """
        inputs = Inputs(x_TH, routes_or_logits, payloads, out, add, token_numbers)
        if torch.compiler.is_compiling():  # a compiled model has one operator here, which calls the layer
            if self._wiring.gradients is not None and torch.is_grad_enabled():
                return call_trained(self, inputs)
            return call_operator(self, x_TH, routes_or_logits, inputs.extra or {}, out, add)
        return self._forward(inputs)

    def _forward(self, inputs: Inputs) -> Tensor:
        while self._state.survive:
            try:
                y_TH = self._call(inputs)
            except PeerLost as loss:
                self._state.go_on_after(loss, self.name)  # raises what is not survived
            else:
                self._state.calls += 1
                return y_TH
        return self._call(inputs)

    def _call(self, inputs: Inputs) -> Tensor:
        shared = None
        if self.shared is not None and inputs.terms is None:
            shared = SharedExpertsCall(self.shared, self.plan.group, self.name)
        with shared or NO_CONTEXT, self._begin() as trip:  # an error on one rank reaches all
            call = self._depart(trip, inputs, shared, ahead=shared is not None and not shared.in_thread)
            while not trip.is_sent_back:  # one pass, unless `max_rows` cuts the batch
                self._advance(trip, call)
            y_TH = trip.result()
        return self._differentiable(trip, call, y_TH) if torch.is_grad_enabled() else y_TH

    def _differentiable(self, trip: RoundTrip, call: Call, y_TH: Tensor) -> Tensor:
        """The result as a node of the graph; without a training plan, `backward` through it raises."""
        if call.tape is not None:
            return call.tape.attach(trip, call, y_TH)
        return refuse_gradients(self, y_TH, call.inputs)

    def _begin(self) -> AbstractContextManager[RoundTrip]:
        if self._state.changes is not None:
            self._state.changes.between_calls(self.name)  # experts that have moved are served from here on
        spec = self.wiring.exchange_spec
        return self._state.exchange.begin(spec, takes_slots=self.experts.skips_empty_slots)

    def _depart(
        self,
        trip: RoundTrip,
        inputs: Inputs,
        shared: Callable[[Tensor], Tensor | Background[Tensor]] | None = None,
        *,
        ahead: bool = False,
    ) -> Call:
        """Send rows out, and run the shared experts while they travel."""
        wiring, exchange = self._wiring, self._state.exchange
        tape = None
        if wiring.gradients is not None:
            inputs, tape = training.begin(self, trip, inputs)
        elif torch.is_grad_enabled():
            refuse_training(self, inputs)
        given = ([] if inputs.add is None else [inputs.add]) if inputs.terms is None else inputs.terms
        terms: list[Tensor | Background[Tensor]] = list(given)
        audit = Audit(wiring) if wiring.exchange_spec.checksummed else None
        call = Call(wiring, inputs, terms, audit, tape)
        with call.recording():  # a paranoid plan counts every duty
            check_rows(wiring, inputs.x_TH)
            routes = route(wiring, inputs.routes_or_logits)
            rows = exchange.encode(wiring.exchange_spec, inputs.x_TH.detach())
            trip.send(rows, routes, inputs.extra, ahead=ahead)
        if shared is not None:
            terms.insert(0, exchange.run_overlapped(partial(shared, inputs.x_TH)))
        return call

    def _run_experts(self, trip: RoundTrip, call: Call) -> ExpertResult:
        """Wait for the rows of this pass, and run the experts on them."""
        with call.recording():
            received = trip.receive()
            run = run_experts if call.tape is None else call.tape.run_experts
            result = run(call.wiring, self.experts, received, self._slot_of_L)
            if call.audit is not None:
                call.audit.settle(call.inputs.x_TH.shape[0], call.inputs.routes_or_logits, received)
        return result

    def _advance(self, trip: RoundTrip, call: Call, *, ahead: bool = False) -> None:
        """Run the experts on the rows of this pass, send the results back, and start the next pass, if there is one."""
        result = self._run_experts(trip, call)
        trip.send_back(result, out=call.inputs.out, add=call.terms, ahead=ahead)
        if trip.owes_dispatch:
            trip.send_next()

    def take_part(self) -> None:
        """Take part in a call that the other ranks make, without tokens of this rank."""
        self._call(self.no_tokens())

    def no_tokens(self) -> Inputs:
        """The batch of a rank that has no tokens."""
        spec, device = self.wiring.spec, self.plan.group.device
        ids_TK = torch.empty(0, spec.top_k, dtype=torch.int64, device=device)
        scaling = self.wiring.exchange_spec.routed_scaling
        return Inputs(
            x_TH=torch.empty(0, spec.hidden_size, dtype=spec.dtype, device=device),
            routes_or_logits=Routes(topk_ids_TK=ids_TK, topk_weights_TK=ids_TK.float(), scaled_by=scaling),
            payloads={p.name: torch.empty(0, p.width, dtype=p.dtype, device=device) for p in spec.payloads},
            token_numbers=ids_TK[:, 0] if spec.token_numbers else None,
        )

    @outside_of_the_graph  # of a compiled model
    def start(
        self,
        x_TH: Tensor,
        routes_or_logits: Routes | Tensor,
        *,
        payloads: Mapping[str, Tensor] | None = None,
        out: Tensor | None = None,
        add: Tensor | None = None,
        token_numbers: Tensor | None = None,
    ) -> PendingBatch:
        """Send tokens to their experts, and return while they travel. `finish` of the returned object does the rest.

        In a plan with `survive=True`, do not change rows and routes before `finish` returns: they may be sent again.
        """
        return PendingBatch(self, Inputs(x_TH, routes_or_logits, payloads, out, add, token_numbers))

    @outside_of_the_graph
    def unreduced(
        self, x_TH: Tensor, routes_or_logits: Routes | Tensor, *, payloads: Mapping[str, Tensor] | None = None
    ) -> RankRows:
        """Do what `forward` does up to the sum over ranks, which is left to the caller (`reduce_ranks="caller"`)."""
        with self._begin() as trip:
            call = self._depart(trip, Inputs(x_TH, routes_or_logits, payloads))
            passes = [trip.combine_unreduced(self._run_experts(trip, call))]
            while trip.owes_dispatch:  # of the next pass
                trip.send_next()
                passes.append(trip.combine_unreduced(self._run_experts(trip, call)))
            return RankRows.joined(passes)
