"""A layer of a training plan under `torch.compile`: two operators, and a ticket that goes from one to the other.

    y_TH, ticket = torch.ops.tokenyard.moe_layer_forward(x_TH, routes, …, key)
    gradients    = torch.ops.tokenyard.moe_layer_backward_trip(dy_TH, ticket, …, key)

What a forward keeps for its backward has sizes that depend on the routes, which no compiler knows. It stays with the
first operator, under the number that the ticket holds: a tensor of one element. When the last graph that could run the
backward is gone, so is the ticket's memory, and with it what was kept.

Both operators have an ordered effect: all ranks make their forwards and backwards in one order. The work is that of an
eager call (`training`), whose node of autograd's graph is what the ticket stands for. Shared experts, and what is
added, belong to the compiled graph. Logits are routed outside of it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard.layer import training
from tokenyard.layer.call import Inputs
from tokenyard.layer.compiled import ORDERED, layer_of
from tokenyard.routing import Routes

# The nodes of forwards whose backward may come, by the numbers of their tickets.
_held: dict[int, Any] = {}
_tickets = itertools.count(1)


def call_trained(layer: Any, inputs: Inputs) -> Tensor:
    """Call a layer of a training plan with gradients enabled: this call stands in the compiled graph."""
    routes = inputs.routes_or_logits
    if not isinstance(routes, Routes) or inputs.out is not None:
        from tokenyard.layer import graph_break  # loads the compiler, which takes a second

        return cast(Tensor, graph_break.call_trained(layer._forward, inputs))
    terms = [] if inputs.add is None else [inputs.add]
    if layer.shared is not None:
        terms.insert(0, layer.shared(inputs.x_TH))
    payloads = inputs.extra or {}
    weights = list(layer.experts.parameters())
    if layer.plan.mesh is not None:  # the operator takes this rank's parts of DTensors
        weights = [weight.to_local() for weight in weights]
    y_TH, _ = torch.ops.tokenyard.moe_layer_forward(
        inputs.x_TH,
        routes.topk_ids_TK,
        routes.topk_weights_TK,
        routes.scaled_by,
        list(payloads),
        list(payloads.values()),
        terms,
        weights,
        layer.key,
    )
    return cast(Tensor, y_TH)


@torch.library.custom_op(
    "tokenyard::moe_layer_forward",
    mutates_args=(),
    schema="(Tensor x_TH, Tensor topk_ids_TK, Tensor topk_weights_TK, float scaled_by, str[] payload_names, "
    "Tensor[] payloads, Tensor[] terms, Tensor[] weights, Tensor key) -> (Tensor, Tensor)",
)
def moe_layer_forward(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    scaled_by: float,
    payload_names: Sequence[str],
    payloads: Sequence[Tensor],
    terms: Sequence[Tensor],
    weights: Sequence[Tensor],
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    """Call the layer, and keep the node of its backward under a new ticket."""
    layer = layer_of(key)
    with torch.enable_grad():
        routes = Routes(
            topk_ids_TK=topk_ids_TK,
            topk_weights_TK=topk_weights_TK.detach().requires_grad_(),
            scaled_by=scaled_by,
        )
        y_TH: Tensor = layer._forward(
            Inputs(
                x_TH.detach().requires_grad_(),
                routes,
                dict(zip(payload_names, payloads, strict=True)),
                terms=tuple(term.detach() for term in terms),
            )
        )
    ticket = next(_tickets)
    _held[ticket] = y_TH.grad_fn
    # The memory of the tensor belongs to this array.
    paper = np.array([ticket])
    weakref.finalize(paper, _held.pop, ticket, None)
    return y_TH.detach(), torch.from_numpy(paper)


@moe_layer_forward.register_fake
def _(x_TH: Tensor, topk_ids_TK: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TH, memory_format=torch.contiguous_format), topk_ids_TK.new_empty(
        1, dtype=torch.int64
    )


@torch.library.custom_op(
    "tokenyard::moe_layer_backward_trip",
    mutates_args=(),
    schema="(Tensor dy_TH, Tensor ticket, Tensor topk_weights_TK, Tensor[] weights, Tensor key) -> Tensor[]",
)
def moe_layer_backward_trip(
    dy_TH: Tensor, ticket: Tensor, topk_weights_TK: Tensor, weights: Sequence[Tensor], key: Tensor
) -> list[Tensor]:
    """The gradients of the rows, of the routing weights, and of the weights of the experts, frozen ones too."""
    node = _held[int(ticket)]
    _, _, dx_TH, dweights_TK, *others = training.run_backward(node, dy_TH)
    assert dx_TH is not None  # the forward has asked for both
    assert dweights_TK is not None
    found = others[len(others) - len(weights) :]
    return [
        dx_TH,
        dweights_TK,
        *(torch.zeros_like(w) if dw is None else dw for w, dw in zip(weights, found, strict=True)),
    ]


@moe_layer_backward_trip.register_fake
def _(
    dy_TH: Tensor, ticket: Tensor, topk_weights_TK: Tensor, weights: Sequence[Tensor], key: Tensor
) -> list[Tensor]:
    dx_TH = torch.empty_like(dy_TH, memory_format=torch.contiguous_format)
    return [dx_TH, torch.empty_like(topk_weights_TK), *(torch.empty_like(weight) for weight in weights)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, topk_weights_TK, _, _, payloads, terms, weights, key = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.counts = len(payloads), len(terms), len(weights)
    ctx.save_for_backward(output[1], topk_weights_TK, key, *weights)


def _differentiate(ctx: Any, dy_TH: Tensor, _: Tensor) -> tuple[Any, ...]:
    ticket, topk_weights_TK, key, *weights = ctx.saved_tensors
    payloads, terms, _ = ctx.counts
    dx_TH, dweights_TK, *others = moe_layer_backward_trip(dy_TH, ticket, topk_weights_TK, weights, key)
    names: list[None] | None = None if payloads else []  # torch takes an empty list for one of tensors
    return dx_TH, None, dweights_TK, None, names, [None] * payloads, [dy_TH] * terms, others, None


moe_layer_forward.register_autograd(_differentiate, setup_context=_remember)
moe_layer_forward.register_effect(ORDERED)
moe_layer_backward_trip.register_effect(ORDERED)
