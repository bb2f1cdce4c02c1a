"""Checks of batches, of results and of the tensors that these are written into, before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tokenyard.errors import ContractError, InputError, shown
from tokenyard.exchange.batch import Arrival, UnencodedRows
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.formats.base import EncodedRows, dtype_name, is_matrix
from tokenyard.routing import Routes
from tokenyard.rows import (
    ExpertResult,
    PlacedRows,
    RoutingLogits,
    check_choice_rows,
    check_expert_rows,
    describe,
)


def check_batch(
    spec: ExchangeSpec,
    rows: EncodedRows | UnencodedRows,
    routes: Routes | RoutingLogits,
    extra: Mapping[str, Tensor],
    device: torch.device,
    *,
    values: bool = True,
) -> Routes | RoutingLogits:
    """Raise unless a batch is what the layer was planned for; `values=False` does not check the range of ids."""
    if not isinstance(rows, (EncodedRows, UnencodedRows)):
        raise ContractError(
            f"dispatch was given {describe(rows)}",
            expected="EncodedRows",
            fix="encode with the layer's wire",
        )
    is_wire = rows.format is spec.wire or rows.format == spec.wire
    if not is_wire or rows.hidden_size != spec.hidden_size:
        raise InputError(
            f"the rows are {rows.format} of width {rows.hidden_size}",
            expected=f"{spec.wire} of width {spec.hidden_size}: the bytes that this layer was sized for",
            fix="encode with the layer's wire, or plan the layer for this format",
        )
    rows.check()
    num_tokens = rows.num_rows
    if num_tokens > spec.max_tokens:
        raise InputError(
            f"{num_tokens} tokens",
            expected=f"at most max_tokens={spec.max_tokens} on a rank",
            fix="send the batch in parts, or plan with a larger max_tokens",
        )
    check_device("x_TH", rows.device, device)
    check_extra(spec, extra, num_tokens, device)
    if spec.carries_logits:
        return check_logits(spec, routes, num_tokens)
    if not isinstance(routes, Routes):
        raise InputError(
            f"the routes are {describe(routes)}", expected="Routes", fix="pass Routes(topk_ids_TK=…, …)"
        )
    routes.check(
        spec.num_experts,
        top_k=spec.top_k,
        num_tokens=num_tokens,
        scaled_by=spec.routed_scaling,
        device=rows.device,
        values=values,
    )
    return routes


def check_device(what: str, found: torch.device, device: torch.device) -> None:
    """Raise unless a tensor is on the group's device: the CPU, or the GPU of the same index."""
    if found.type != device.type or (device.index is not None and found.index != device.index):
        raise InputError(f"{what} is on {found}", expected=str(device), fix="move it there first")


def check_extra(
    spec: ExchangeSpec, extra: Mapping[str, Tensor], num_tokens: int, device: torch.device
) -> None:
    """Raise unless the caller's further payloads are the declared ones."""
    if isinstance(extra, dict) and not extra and not spec.extra:
        return
    declared = {payload.name: payload for payload in spec.extra}
    if not isinstance(extra, Mapping) or set(extra) != set(declared):
        raise InputError(
            f"the further payloads are {shown(sorted(extra, key=str) if isinstance(extra, Mapping) else extra)}",
            expected=f"{sorted(declared)}, as the layer declares",
            fix="declare them in LayerSpec(payloads=…) and pass each one in every call",
        )
    for name, tensor in extra.items():
        declared[name].check(tensor, num_tokens)
        check_device(f"payload {name!r}", tensor.device, device)


def check_logits(spec: ExchangeSpec, routes: object, num_tokens: int) -> RoutingLogits:
    """Raise unless these are logits for experts that route by themselves."""
    logits_TE = routes.logits_RE if isinstance(routes, RoutingLogits) else None
    found = routes if logits_TE is None else logits_TE
    expected = (num_tokens, spec.num_experts)
    if not is_matrix(logits_TE) or tuple(logits_TE.shape) != expected or logits_TE.dtype != torch.float32:
        raise InputError(
            f"the layer's experts route by themselves, and were given {describe(found)}",
            expected=f"RoutingLogits of float32{list(expected)}",
            fix="pass the router's logits, not routes",
        )
    return RoutingLogits(logits_RE=logits_TE)


def check_output(spec: ExchangeSpec, tensor: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise unless a tensor has the shape, dtype and device of the result, to be `out` or a term of `add`."""
    expected = (num_tokens, spec.hidden_size)
    if not is_matrix(tensor) or tuple(tensor.shape) != expected or tensor.dtype != spec.dtype:
        raise InputError(
            f"a tensor to write into or to add is {describe(tensor)}",
            expected=f"{dtype_name(spec.dtype)}{list(expected)}: the shape and dtype of the input",
            fix="allocate it with torch.empty_like(x_TH)",
        )
    check_device("a tensor to write into or to add", tensor.device, device)


def check_writable(out: Tensor) -> None:
    """Raise unless a tensor can be written in place: no overlapping elements, no gradient, no inference tensor."""
    steps = sorted((step, count) for step, count in zip(out.stride(), out.shape, strict=True) if count > 1)
    # Each stride must be at least as large as what the dimension of the next smaller stride spans.
    overlaps = any(step < reach * count for (reach, count), (step, _) in pairwise([(1, 1), *steps]))
    if out.numel() and overlaps:
        found, fix = "whose elements share memory", "pass torch.empty_like(x_TH)"
    elif out.requires_grad:
        found, fix = "that wants a gradient", "pass out.detach(), or leave `out` away"
    elif out.is_inference() and not torch.is_inference_mode_enabled():
        found, fix = "made in inference mode", "call the layer in inference mode, too"
    else:
        return
    raise InputError(
        f"`out` is {describe(out)} {found}", expected="a tensor of its own that can be written", fix=fix
    )


def check_sum(
    arrival: Arrival,
    *,
    reduces: bool,
    out: Tensor | None,
    add: Sequence[Tensor],
    most: int | None,
    device: torch.device,
) -> None:
    """Raise unless the plan lets this party sum over ranks, and `out` and `add` have the shape of the result.

    `reduces`: whether the exchange was asked to sum; `most`: how many tensors it can add, None for any number.
    """
    spec = arrival.spec
    if reduces != spec.reduces_ranks:
        raise ContractError(
            f"the {'exchange' if reduces else 'caller'} was asked to reduce over ranks",
            expected=f"the {'exchange' if spec.reduces_ranks else 'caller'} to do it, as the plan says",
            fix='take them unreduced, or plan with reduce_ranks="exchange"'
            if reduces
            else 'let the exchange do it, or plan with reduce_ranks="caller"',
        )
    for tensor in ([] if out is None else [out]) + list(add):
        check_output(spec, tensor, arrival.batch_tokens, device)
    if out is not None:
        check_writable(out)
    if most is not None and len(add) > most:
        raise InputError(
            f"{len(add)} tensors to add",
            expected=f"at most {most} on a GPU",
            fix="add some of them before",
        )


def check_result(arrival: Arrival, result: ExpertResult) -> Tensor | None:
    """The result rows of an arrival, checked; None if the experts wrote them into the combine buffer themselves."""
    if isinstance(result, PlacedRows) and arrival.received.results is not None:
        if result.buffer is not arrival.received.results:
            raise ContractError(
                "combine was given rows that were placed in the buffer of another dispatch",
                expected="PlacedRows of `received.results`, of this very dispatch",
                fix="ask for the buffer after each dispatch",
            )
        return None
    if arrival.spec.sums_choices:
        return check_choice_rows(result, arrival.received).rows_NH
    return check_expert_rows(result, arrival.received).rows_RH
