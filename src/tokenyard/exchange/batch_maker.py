"""Checks what a caller gives to a dispatch, and makes of it a batch, or a part of one, that a transport can send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tokenyard.errors import ContractError, InputError, shown
from tokenyard.exchange.announcement import Announcer
from tokenyard.exchange.batch import Batch, BatchRoutes, Part, UnencodedRows
from tokenyard.exchange.open_trips import InFlightQueue
from tokenyard.exchange.passes import first_part
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.stats import LayerStats, LoadCounter
from tokenyard.exchange.transport import Transport
from tokenyard.formats.base import EncodedRows, check_device, is_matrix
from tokenyard.routing import Routes
from tokenyard.rows import RoutingLogits, describe


class BatchMaker:
    """Makes the batches of the next round on one rank."""

    def __init__(
        self,
        transport: Transport,
        announcer: Announcer,
        in_flight: InFlightQueue,
        load: LoadCounter,
        stats: Mapping[str, LayerStats],
    ) -> None:
        self._transport, self._announcer, self._in_flight = transport, announcer, in_flight
        self._load, self._stats = load, stats
        self._group = transport.group

    def make(
        self,
        spec: ExchangeSpec,
        rows: EncodedRows | UnencodedRows,
        routes: Routes | RoutingLogits | BatchRoutes,
        extra: Mapping[str, Tensor],
        *,
        ahead: bool,
        takes_slots: bool,
        forward: int = 0,
    ) -> Batch:
        """Make a batch of rows, routes and further payloads; raise if they are not what the layer was planned for.

        `forward`: in a backward, the round of the forward.
        """
        transport = self._transport
        if isinstance(rows, UnencodedRows):
            rows.check()
            if not transport.encodes(spec.wire):
                rows = rows.format.encode(rows.x_TH)
        known, given = (routes, routes.routes) if isinstance(routes, BatchRoutes) else (None, routes)
        if known is not None and known.spec.placement != spec.placement:
            raise ContractError(
                f"the routes are those of layer {known.spec.layer!r}, whose experts are elsewhere",
                expected=f"routes of a layer with the placement of {spec.layer!r}",
                fix="pass Routes",
            )
        values = transport.reads_values and known is None
        checked = check_batch(spec, rows, given, extra, self._group.device, values=values)
        tokens = rows.num_rows
        if known is None:
            if spec.placement.lost_experts and isinstance(checked, Routes):
                checked = self._without_lost(spec, checked)
            known = BatchRoutes(spec=spec, routes=checked, num_tokens=tokens, rank=self._group.rank)
        counts = transport.counts(known) if transport.reads_values else [0] * self._group.size
        if spec.max_rows is not None:
            counts = [*counts, *([0] * len(counts))]  # nothing is left for later passes
        return Batch(
            spec=spec,
            round=self._announcer.round + 1,
            region=self._in_flight.free_region,
            forward=forward,
            rows=rows,
            extra=extra,
            routes=known,
            announcements=self._announcer.of_dispatch(spec, tokens, counts, forward=forward),
            choice_counts=self._load.counts(spec.layer) if transport.counts_choices else None,
            ahead=ahead,
            takes_slots=takes_slots,
        )

    def _without_lost(self, spec: ExchangeSpec, routes: Routes) -> Routes:
        """The routes without choices whose expert was lost with its rank.

        Which replicas serve a token depends on all of its ids. Only the remaining ones travel, and all ranks use these.
        """
        rank_TK, _ = spec.placement.resolve(routes.topk_ids_TK, self._group.rank)
        dropped_TK = (routes.topk_ids_TK >= 0) & (rank_TK < 0)
        self._stats[spec.counted_as].count_dropped(dropped_TK)
        return routes.without(dropped_TK, renormalize=spec.renormalizes_dropped)

    def make_part(self, batch: Batch, first: int, parts: int) -> Batch:
        """Cut the tokens of a batch from `first` on into `parts` parts, and make a batch of the first."""
        transport, routes = self._transport, batch.routes
        assert isinstance(batch.rows, EncodedRows)
        last = first + first_part(batch.num_tokens - first, parts)
        later = transport.counts(routes.of_tokens(last, batch.num_tokens))
        if not any(transport.loads(self._group.rank, later)):
            last = batch.num_tokens  # the tokens behind go to no rank: they need no further pass
        some = routes.of_tokens(first, last)
        counts = [*transport.counts(some), *later]
        return replace(
            batch,
            round=self._announcer.round + 1,
            region=self._in_flight.free_region,
            rows=batch.rows.slice(first, last),
            extra={name: payload[first:last] for name, payload in batch.extra.items()},
            routes=some,
            announcements=self._announcer.of_dispatch(
                batch.spec, last - first, counts, forward=batch.forward
            ),
            part=Part(batch=batch, first=first, parts=parts),
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
