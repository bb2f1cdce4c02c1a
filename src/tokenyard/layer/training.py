"""A differentiable call of a layer, and its backward.

    forward    dispatch x_TH          ── experts ──►  combine  y_TH
    backward   dispatch dy_TH  (same  ── experts' ──► combine  dx_TH, and the gradient of each routing weight
               routes)                   gradients of the weights stay

A forward is a whole round trip, and so is its backward. Nothing stays in flight between them, so that layers may be
called again before, in any order that is the same on all ranks. The forward runs as in inference, and has its bits;
beside that it keeps what its backward needs (`Tape`). At its end it makes one node of the graph (`_Node`).

- Every rank makes the node, whatever requires a gradient there: a backward is collective, and the others would wait.
- What is kept goes through `save_for_backward`, where checkpointing, offloading and version counters see it.
- `ctx.saved_tensors` may run a forward again, with round trips of its own. It is read before the round trip of the
  backward begins; its error is raised inside of that, so that all ranks hear it.
- A backward announces the round of its forward: ranks that are in backwards of different forwards raise `Drifted`.
- A forward that is computed again must have the routes of the first one: their checksum is compared.

Gradients are those of the sum of all ranks' losses. Nothing is divided here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tokenyard.duties import NO_CONTEXT, Party, acting
from tokenyard.errors import ContractError, HandleError, InputError
from tokenyard.exchange import BatchRoutes, RoundTrip
from tokenyard.experts import Experts, ExpertWeights
from tokenyard.experts.base import TOKEN_NUMBERS
from tokenyard.experts.weights import local_part
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Background
from tokenyard.layer.call import Call, Inputs, run_experts, without_autocast
from tokenyard.planning.audit import Audit
from tokenyard.planning.gradients import AGAIN, WEIGHT_GRADIENTS, GradientWiring
from tokenyard.planning.wiring import Wiring
from tokenyard.routing import Routes
from tokenyard.rows import (
    ChoiceRows,
    ExpertResult,
    ExpertRows,
    LocalRoutes,
    ReceivedRows,
    UnfinalizedRows,
    check_choice_rows,
)

if TYPE_CHECKING:
    from tokenyard.layer.moe_layer import MoELayer


def as_autocast(wiring: Wiring, inputs: Inputs) -> Inputs:
    """The inputs of a call under autocast in the dtype of the layer, if that is the one to which autocast casts."""
    dtype = wiring.spec.dtype
    device = inputs.x_TH.device.type if isinstance(inputs.x_TH, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype:
        return inputs

    def cast_one(tensor: Any) -> Any:
        return tensor.to(dtype) if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor

    return inputs._replace(x_TH=cast_one(inputs.x_TH), add=cast_one(inputs.add))


def begin(layer: MoELayer, trip: RoundTrip, inputs: Inputs) -> tuple[Inputs, Tape | None]:
    """Begin a call of a layer of a training plan: its inputs, and what keeps the call if it is differentiated."""
    inputs = as_autocast(layer.wiring, inputs)
    if is_recomputed():  # its choices were counted the first time
        trip.counts_load = False
    return inputs, Tape(layer, inputs) if torch.is_grad_enabled() else None


def is_recomputed() -> bool:
    """Whether a forward runs inside of a backward: activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, eq=False)
class KeptPass:
    """What one pass of a forward keeps of the rows that came to this rank."""

    rows: EncodedRows | None  # the rows as they travelled; None: they travel again in the backward
    routes: LocalRoutes
    counts_W: tuple[int, ...]
    token_numbers: Tensor | None
    product: Tensor | None  # what the experts keep of their pairs; None: it is computed again

    @classmethod
    def of(cls, received: ReceivedRows, product: Tensor, keep: str) -> KeptPass:
        """Copies of what is kept: rows in the workspace are valid only until they are combined."""
        routes, numbers = received.routes, received.extra.get(TOKEN_NUMBERS)
        assert isinstance(routes, LocalRoutes)
        rows = None
        if keep != "nothing":
            dense = received.dense()  # a copy, if there are empty slots
            copied = received.slots_R is not None
            rows = (
                dense
                if copied
                else replace(dense, payloads={n: p.clone() for n, p in dense.payloads.items()})
            )
        return cls(
            rows=rows,
            routes=LocalRoutes(ids_RK=routes.ids_RK.clone(), weights_RK=routes.weights_RK.clone()),
            counts_W=received.counts_W,
            token_numbers=None if numbers is None else numbers.clone(),
            product=product if keep == "products" else None,
        )

    def tensors(self) -> list[Tensor]:
        """Its tensors, in the order in which `again` takes them."""
        payloads = [] if self.rows is None else list(self.rows.payloads.values())
        optional = [tensor for tensor in (self.token_numbers, self.product) if tensor is not None]
        return [self.routes.ids_RK, self.routes.weights_RK, *payloads, *optional]

    def without_tensors(self) -> KeptPass:
        """The same without memory: `again` puts the tensors back."""
        empty = torch.empty(0)
        rows = self.rows
        return KeptPass(
            rows=None if rows is None else replace(rows, payloads=dict.fromkeys(rows.payloads, empty)),
            routes=LocalRoutes(ids_RK=empty, weights_RK=empty),
            counts_W=self.counts_W,
            token_numbers=None if self.token_numbers is None else empty,
            product=None if self.product is None else empty,
        )

    def again(self, saved: Iterator[Tensor]) -> KeptPass:
        """The same with the tensors that were saved."""
        routes = LocalRoutes(ids_RK=next(saved), weights_RK=next(saved))
        rows = self.rows
        if rows is not None:
            rows = replace(rows, payloads={name: next(saved) for name in rows.payloads})
        numbers = None if self.token_numbers is None else next(saved)
        product = None if self.product is None else next(saved)
        return KeptPass(rows, routes, self.counts_W, numbers, product)

    def received(self, rows: EncodedRows) -> ReceivedRows:
        """The rows as the experts received them in the forward."""
        extra = {} if self.token_numbers is None else {TOKEN_NUMBERS: self.token_numbers}
        return ReceivedRows(rows=rows, routes=self.routes, counts_W=self.counts_W, extra=extra)


class Tape:
    """What one call keeps for its backward."""

    def __init__(self, layer: MoELayer, inputs: Inputs) -> None:
        self._layer = layer
        self.weights = _local_weights(layer)  # with their graphs
        self._passes: list[KeptPass] = []
        for name, tensor in (inputs.payloads or {}).items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise HandleError(
                    f"payload {name!r} requires a gradient",
                    expected="further payloads without one: they are not differentiated",
                    fix=f"pass {name}.detach()",
                )
        if inputs.out is not None:
            raise InputError(
                "`out` was given to a call that is differentiated",
                expected="a result of its own, which belongs to the graph",
                fix="leave `out` away, or call the layer under torch.no_grad()",
            )

    def run_experts(
        self, wiring: Wiring, experts: Experts, received: ReceivedRows, slot_of_L: Tensor | None = None
    ) -> ExpertResult:
        """Run the experts on the rows of a pass, as `run_experts` does, and keep what their backward needs."""
        kept: list[Tensor] = []

        def compute(received: ReceivedRows, *, finalize: bool) -> Any:
            experts._check_held(received)
            with acting(Party.EXPERTS):
                result, product = experts.compute_kept(received, self.weights, finalize=finalize)
            kept.append(product)
            return experts.checked(result, received, finalize=finalize)

        result = run_experts(wiring, experts, received, slot_of_L, compute)
        self._passes.append(KeptPass.of(received, kept[0], wiring.spec.keep))
        return result

    def attach(self, trip: RoundTrip, call: Call, y_TH: Tensor) -> Tensor:
        """The result of a call as one node of the graph."""
        layer, arrival = self._layer, trip.arrival
        batch = arrival.routes if arrival.part is None else arrival.part.batch.routes
        routes = batch.routes
        assert isinstance(routes, Routes)
        terms = [term.wait() if isinstance(term, Background) else term for term in call.terms]
        made = _Made(
            layer=layer,
            y_TH=y_TH,
            forward=trip.first_round,
            passes=self._passes,
            routes=routes,
            placement=call.wiring.exchange_spec.placement,
            names=tuple(self.weights.parts()),
            num_terms=len(terms),
        )
        weights = cast("list[Tensor]", list(self.weights.parts().values()))
        anchor = torch.zeros((), requires_grad=True)  # makes a node on every rank
        return cast(
            Tensor,
            cast(Any, _Node).apply(made, anchor, call.inputs.x_TH, routes.topk_weights_TK, *terms, *weights),
        )


def _local_weights(layer: MoELayer) -> ExpertWeights:
    """The weights of this rank's experts, with the graph that leads to the parameters."""
    shapes = layer.experts.spec.shapes()
    parts = {name: local_part(getattr(layer.experts, name)) for name in shapes}
    for name, part in parts.items():
        if tuple(part.shape) != shapes[name]:
            raise InputError(
                f"{name} holds {list(part.shape)} on this rank",
                expected=f"{list(shapes[name])}: all of this rank's experts, whole",
                fix="where FSDP shards the layer, call layer(…), which gathers its weights; before layer.start(…) call "
                "layer.unshard()",
            )
    return ExpertWeights(**parts)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Made:
    """What a node is made of beside the tensors whose gradients it computes."""

    layer: MoELayer
    y_TH: Tensor
    forward: int  # the round of the forward
    passes: Sequence[KeptPass]
    routes: Routes  # of all tokens of this rank, without choices of lost experts
    placement: object
    names: tuple[str, ...]  # of the weights
    num_terms: int  # tensors that were added to the sum


class OpenBackward:
    """Stands for a forward whose backward is due: as long as its graph lives, and its backward has not run."""


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, made: _Made, anchor: Tensor, x_TH: Tensor, weights_TK: Tensor, *others: Tensor
    ) -> Tensor:
        layer, weights = made.layer, others[made.num_terms :]
        keeps_nothing = any(kept.rows is None for kept in made.passes)
        kept = [tensor for one in made.passes for tensor in one.tensors()]
        own = [made.routes.topk_ids_TK, weights_TK, *([x_TH] if keeps_nothing else [])]
        ctx.save_for_backward(*own, *weights, *kept)
        ctx.layer, ctx.forward_round, ctx.placement = layer, made.forward, made.placement
        ctx.names, ctx.num_terms, ctx.keeps_nothing = made.names, made.num_terms, keeps_nothing
        ctx.passes = [one.without_tensors() for one in made.passes]
        ctx.checksum, ctx.scaled_by = _checksum(made.routes.topk_ids_TK), made.routes.scaled_by
        ctx.due = OpenBackward()
        layer.open_backwards.add(ctx.due)
        return made.y_TH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        layer: MoELayer = ctx.layer
        try:
            saved: tuple[Tensor, ...] | Exception = ctx.saved_tensors  # may call the layer again
        except Exception as error:  # the other ranks must be told
            saved = error
        wiring = layer.wiring
        assert wiring.gradients is not None
        carried = wiring.gradients.exchange_spec
        with (
            layer.plan.exchange.begin(carried, forward=ctx.forward_round) as trip,
            without_autocast(dy_TH.device.type),
        ):
            if isinstance(saved, Exception):
                raise saved
            backward = _Backward(ctx, wiring, wiring.gradients, trip, list(saved))
            dx_TH, dweights_TK, sums = backward.run(dy_TH)
        layer.open_backwards.discard(ctx.due)
        wants_x, wants_weights, *wants = ctx.needs_input_grad[2:]
        terms = [dy_TH if wanted else None for wanted in wants[: ctx.num_terms]]
        return (
            None,
            None,
            dx_TH if wants_x else None,
            dweights_TK if wants_weights else None,
            *terms,
            *(sums.get(name) for name in ctx.names),
        )


def run_backward(node: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
    """Run the backward of a call whose result has this node."""
    return _Node.backward(node, dy_TH)


class _Backward:
    """One backward of a call, inside of its round trip."""

    def __init__(
        self, ctx: Any, wiring: Wiring, gradients: GradientWiring, trip: RoundTrip, saved: list[Tensor]
    ) -> None:
        self._layer: MoELayer = ctx.layer
        self._wiring, self._gradients, self._trip = wiring, gradients, trip
        tensors = iter(saved)
        self._ids_TK, self._weights_TK = next(tensors), next(tensors).detach()
        self._x_TH = next(tensors).detach() if ctx.keeps_nothing else None
        named = {name: next(tensors).detach() for name in ctx.names}
        self._weights = ExpertWeights(**named)  # type: ignore[arg-type]
        self._passes = [one.again(tensors) for one in ctx.passes]
        self._scaled_by = ctx.scaled_by
        wants = dict(zip(ctx.names, ctx.needs_input_grad[4 + ctx.num_terms :], strict=True))
        self._sums = {
            name: torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            for name, weight in named.items()
            if wants[name]
        }
        self._check(ctx)

    def _check(self, ctx: Any) -> None:
        """Raise unless the forward that was kept, or computed again, is the one whose gradients are due."""
        if _checksum(self._ids_TK) != ctx.checksum:
            raise ContractError(
                "the forward was computed again with other routes than the first time",
                expected="the same routes in both",
                fix="save the routes, and compute only what follows them again; with torch.utils.checkpoint keep "
                "preserve_rng_state=True",
            )
        if self._wiring.exchange_spec.placement != ctx.placement:
            raise ContractError(
                "experts are elsewhere than in the forward",
                expected="the same placement in forward and backward",
                fix="make the forward again",
            )

    def run(self, dy_TH: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """The gradients of this rank's rows and routing weights, and those of the weights of its experts."""
        layer, spec, trip = self._layer, self._gradients.exchange_spec, self._trip
        exchange = layer.plan.exchange
        audit = Audit(self._wiring, self._gradients.duties) if spec.checksummed else None
        with NO_CONTEXT if audit is None else audit.recording():
            rows = exchange.encode(spec, dy_TH.to(spec.dtype).contiguous())
            again = {}
            if self._x_TH is not None:
                with acting(Party.NOBODY):
                    encoded = self._wiring.wire.encode(self._x_TH)
                again = {AGAIN + name: payload for name, payload in encoded.payloads.items()}
            routes = Routes(
                topk_ids_TK=self._ids_TK, topk_weights_TK=self._weights_TK, scaled_by=self._scaled_by
            )
            batch = BatchRoutes(
                spec=spec, routes=routes, num_tokens=len(self._ids_TK), rank=layer.plan.group.rank
            )
            trip.send(rows, batch, again)
        for kept in self._passes:
            with NO_CONTEXT if audit is None else audit.recording():
                came = trip.receive()
                result, dweights_N = self._pass(kept, came)
                if audit is not None:
                    audit.settle(len(dy_TH), routes, came)
            trip.send_back(result, returns={WEIGHT_GRADIENTS: dweights_N})
            if trip.owes_dispatch:
                trip.send_next()
        dx_TH = trip.result()
        dweights_TK = trip.placed(WEIGHT_GRADIENTS)
        parts = self._weights.by_name()
        sums = {name: total.to(parts[name].dtype) for name, total in self._sums.items()}
        return dx_TH, dweights_TK.to(self._weights_TK.dtype), sums

    def _pass(self, kept: KeptPass, came: ReceivedRows) -> tuple[ExpertResult, Tensor]:
        """The gradients of the rows of one pass, as a combine takes them, and those of their routing weights."""
        spec = self._gradients.exchange_spec
        assert isinstance(came.routes, LocalRoutes)
        if came.counts_W != kept.counts_W or not torch.equal(came.routes.ids_RK, kept.routes.ids_RK):
            raise ContractError(
                "gradients came along other routes than the rows of the forward",
                expected="the same rows from each rank",
                fix="report it: the announcements of the ranks agree, and their batches do not",
            )
        rows = kept.rows
        if rows is None:
            payloads = {
                p.name: came.extra[AGAIN + p.name] for p in self._wiring.wire.payloads(spec.hidden_size)
            }
            rows = EncodedRows(format=self._wiring.wire, hidden_size=spec.hidden_size, payloads=payloads)
        dy_RH = came.dense().decode(torch.float32)
        with acting(Party.EXPERTS):
            found = self._layer.experts.differentiate(
                kept.received(rows), kept.product, dy_RH, self._weights, self._sums
            )
        pairs_N = came.routes.pairs
        with acting(Party.RECEIVER):
            pairs = UnfinalizedRows(
                rows_NH=found.rows_NH,
                weights_N=torch.ones_like(found.weights_N),
                index_N=pairs_N,
                num_rows=came.num_rows,
                top_k=spec.top_k,
            )
            result: ChoiceRows | ExpertRows = (
                check_choice_rows(ChoiceRows(rows_NH=found.rows_NH), came)
                if spec.sums_choices
                else pairs.finish()
            )
        return result, found.weights_N.unsqueeze(1)


def _checksum(ids_TK: Tensor) -> int:
    """A checksum of routes, and of their number."""
    return zlib.crc32(ids_TK.long().cpu().contiguous().numpy().tobytes())
