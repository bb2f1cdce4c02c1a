"""`overlapped`: a batch in parts. While the experts compute one part, the rows or the results of another travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import HandleError, InputError
from tokenyard.formats.base import is_matrix
from tokenyard.layer.call import Inputs
from tokenyard.layer.compiled import refuse_gradients
from tokenyard.layer.moe_layer import MoELayer
from tokenyard.routing import Routes
from tokenyard.rows import describe


def overlapped(
    layer: MoELayer,
    x_TH: Tensor,
    routes_or_logits: Routes | Tensor,
    *,
    parts: int = 2,
    payloads: Mapping[str, Tensor] | None = None,
    out: Tensor | None = None,
    add: Tensor | None = None,
    token_numbers: Tensor | None = None,
) -> Tensor:
    """Call a layer on a batch in parts: one part is computed while others travel. `parts` is the same on all ranks.

    The result is bitwise that of `layer(part)` for one part after the other. The plan must have been made with
    `in_flight=parts` or more. On a rank with fewer tokens than parts, some parts are empty. Each part may have up to
    `max_tokens` tokens.

    >>> import torch
    >>> from tokenyard import ExpertWeights, LayerSpec, MoELayer, Routes, launch, plan
    >>> from tokenyard.layer import overlapped
    >>> spec = LayerSpec(name="moe", hidden_size=32, intermediate_size=16, num_experts=4, top_k=1, max_tokens=8)
    >>> weights = ExpertWeights(w13=torch.ones(4, 32, 32).bfloat16(), w2=torch.ones(4, 32, 16).bfloat16())
    >>> def main(group):
    ...     agreed = plan([spec], group, in_flight=2)
    ...     layer = MoELayer(agreed, "moe", weights.select(agreed.local_experts("moe")))
    ...     x_TH = torch.ones(5 - group.rank, 32).bfloat16()
    ...     routes = Routes(topk_ids_TK=torch.zeros(len(x_TH), 1).int(), topk_weights_TK=torch.ones(len(x_TH), 1))
    ...     return torch.equal(overlapped(layer, x_TH, routes), layer(x_TH, routes))
    >>> launch(2, main)
    [True, True]
    """
    _check_parts(layer, parts)
    further = dict(payloads or {})
    _check_rows(layer, {"x_TH": x_TH, "routes": routes_or_logits, **further, "out": out, "add": add})
    # The parts of a call that is differentiated are nodes of the graph. Else they are written into one tensor.
    joins = out is None and layer.wiring.gradients is not None and torch.is_grad_enabled()
    y_TH = out
    if y_TH is None and not joins:
        y_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    started = []
    for start, end in _bounds(len(x_TH), parts):
        pending = layer.start(
            x_TH[start:end],
            _cut(routes_or_logits, start, end),
            payloads={name: tensor[start:end] for name, tensor in further.items()},
            out=None if y_TH is None else y_TH.detach()[start:end],
            add=None if add is None else add[start:end],
            token_numbers=None if token_numbers is None else token_numbers[start:end],
        )
        started.append(pending)
    for pending in started:
        pending.compute()
    parts_of_y = [pending.finish() for pending in started]
    if y_TH is None:
        return torch.cat(parts_of_y)
    return refuse_gradients(layer, y_TH, Inputs(x_TH, routes_or_logits, add=add))


def _check_parts(layer: MoELayer, parts: int) -> None:
    """Raise unless the plan allows this many parts in flight. All ranks have the same plan, and raise together."""
    most = layer.plan.draft.in_flight
    if not isinstance(parts, int) or parts < 1:
        raise InputError(
            f"parts is {parts!r}",
            expected="a number of parts, from 1",
            fix="leave it out, for 2",
            layer=layer.name,
            rank=layer.plan.group.rank,
        )
    if parts > most:
        raise HandleError(
            f"{parts} parts of a batch overlap",
            expected=f"at most {most}, which the plan lets be in flight",
            fix=f"plan(..., in_flight={parts})",
            layer=layer.name,
            rank=layer.plan.group.rank,
        )


def _check_rows(layer: MoELayer, given: Mapping[str, Any]) -> None:
    """Raise on all ranks unless every given tensor is a matrix with a row for each token."""
    num_tokens = len(given["x_TH"]) if is_matrix(given["x_TH"]) else None
    for name, value in given.items():
        parts = [value.topk_ids_TK, value.topk_weights_TK] if isinstance(value, Routes) else [value]
        for part in parts:
            if not (is_matrix(part) and len(part) == num_tokens) and (part is not None or name == "x_TH"):
                exchange = layer.plan.exchange
                with exchange.trips.propagate_errors(exchange.open(layer.wiring.exchange_spec)):
                    raise InputError(
                        f"of a batch that is cut into parts, {name} is {describe(part)}",
                        expected="a matrix with a row for each token"
                        + ("" if num_tokens is None else f", {num_tokens}"),
                        fix="pass what the layer itself takes for the whole batch",
                    )


def _bounds(num_tokens: int, parts: int) -> list[tuple[int, int]]:
    """The first token of each part, and the one behind its last. The lengths of parts differ by at most one token.

    >>> _bounds(5, 2), _bounds(1, 2)
    ([(0, 3), (3, 5)], [(0, 1), (1, 1)])
    """
    return [(-(-part * num_tokens // parts), -(-(part + 1) * num_tokens // parts)) for part in range(parts)]


def _cut(routes_or_logits: Routes | Tensor, start: int, end: int) -> Routes | Tensor:
    if isinstance(routes_or_logits, Tensor):
        return routes_or_logits[start:end]
    return routes_or_logits.of_tokens(slice(start, end))
