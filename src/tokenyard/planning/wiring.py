"""Wiring: which party does each duty of a layer. Every duty has exactly one party, or the layer cannot be wired.

A MoE layer is a chain of parts, several of which could do the same job, such as quantizing. If two of them do it, or
none, the result is silently wrong. `wire_layer` gives each job (`Duty`) to exactly one part (`Party`), from what the
parts declare that they can do. If a part declares that it cannot do what the layer asks for, the result is a `Reason`.

    duty             who has it
    QUANTIZE         the sender, if the wire is quantized; else the experts, if they compute on quantized rows
    PAD              whoever quantizes, if the format's alignment asks for it
    SWIZZLE          the receiver, if the experts want swizzled scales: only linear ones travel
    WEIGHT           the experts; the receiver, for kernels that do not finalize and where choices are summed at home
    REDUCE_EXPERTS   the experts; the receiver, for kernels that do not finalize; the exchange, with sum="choices"
    REDUCE_RANKS     the exchange; the caller, if the spec says so
    ROUTED_SCALING   the router; the caller, if ready routes are passed in
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from tokenyard import experts as experts_room
from tokenyard import formats
from tokenyard.duties import Duty, Party
from tokenyard.errors import Reason, TokenyardError
from tokenyard.exchange import ExchangeSpec, Transport
from tokenyard.experts import Experts, ExpertsSpec, activation
from tokenyard.experts.base import TOKEN_NUMBERS
from tokenyard.experts.spec import EXACT
from tokenyard.formats import Format, Payload
from tokenyard.formats.base import dtype_name
from tokenyard.planning.choosing import AUTO, choose_experts
from tokenyard.planning.gradients import GradientWiring, wire_gradients
from tokenyard.planning.spec import LARGEST_SIZE, LayerSpec, check_spec, is_size
from tokenyard.routing import placement_for


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """One layer, resolved and checked: every name is an object, every duty has its party."""

    spec: LayerSpec  # the layer, as the user described it
    exchange_spec: ExchangeSpec  # the description of the layer for the exchange
    exchange: type[Transport]  # the class that moves rows
    experts: type[Experts]  # the class that computes
    expert_rows: Format | None  # the format that the experts compute on; None: that in which rows arrive
    inner: Format | None  # the format of numbers between an expert's two products; None: exact
    duties: Mapping[Duty, Party]  # the one party that does each duty
    experts_reason: str | None = None  # why these experts were chosen; None: the layer names them
    gradients: GradientWiring | None = None  # what a backward needs, in a training plan

    @property
    def trains(self) -> bool:
        """Whether the layer is one of a training plan."""
        return self.gradients is not None

    @property
    def wire(self) -> Format:
        """The format in which rows travel out."""
        return self.exchange_spec.wire

    def experts_spec(self, rank: int) -> ExpertsSpec:
        """What the experts of one rank must compute."""
        num_local = self.exchange_spec.placement.num_local(rank)
        return _experts_spec(self.spec, self.expert_rows, self.inner, num_local, trains=self.trains)

    def fields(self) -> dict[str, Any]:
        """All that must be the same on every rank, as plain values by name."""
        spec, exchange_spec = self.spec, self.exchange_spec
        plain = {f.name: getattr(spec, f.name) for f in fields(spec)}
        plain |= {
            "dtype": dtype_name(spec.dtype),
            "max_tokens": exchange_spec.max_tokens,
            "wire": str(exchange_spec.wire),
            "combine_wire": str(exchange_spec.combine_wire),
            "expert_rows": str(self.expert_rows),
            "inner": EXACT if self.inner is None else str(self.inner),
            "activation": str(activation(spec.activation)),
            "router": None if spec.router is None else spec.router.fields(),
            "routed_scaling": exchange_spec.routed_scaling,
            "placement": exchange_spec.placement.fields(),
            "experts": f"{self.experts.name} ({self.experts.__qualname__})",
            "payloads": [[p.name, dtype_name(p.dtype), p.width] for p in spec.payloads],
            "gradient_wire": None if spec.gradient_wire is None else str(formats.get(spec.gradient_wire)),
            "duties": {duty.name: party.name for duty, party in self.duties.items()},
        }
        return plain


def wire_layer(
    spec: LayerSpec,
    *,
    index: int,
    world: int,
    exchange: type[Transport],
    max_tokens: int | None,
    max_rows: int | None = None,
    device: torch.device | None = None,
    num_layers: int = 1,
    training: bool = False,
) -> Wiring | Reason:
    """Resolve a layer's names and assign its duties, or give the reason why that cannot be done.

    `max_rows` bounds the rows that a rank receives in one pass; it is ignored if no more rows could come anyway.
    `device` is where the rows of the ranks live, if that is known. In a `training` plan of `num_layers` layers, the
    gradients of each have a round trip of their own.
    """
    if (reason := check_spec(spec)) is not None:
        return reason
    tokens = spec.max_tokens if spec.max_tokens is not None else max_tokens
    if tokens is None or not is_size(tokens):
        why = f"say how many tokens a rank brings at most (from 1 to {LARGEST_SIZE})"
        return Reason(field="max_tokens", value=tokens, why=why)
    own = formats.for_dtype(spec.dtype)
    wire, combine_wire = (own if f is None else formats.get(f) for f in (spec.wire, spec.combine_wire))
    expert_rows = None if spec.expert_rows is None else formats.get(spec.expert_rows)
    if spec.gradient_wire is not None:
        formats.get(
            spec.gradient_wire
        )  # raises if there is none of this name, also in plans that do not train
    if wire.quantized and expert_rows is not None and expert_rows.quantized and expert_rows != wire:
        why = f"the rows arrive as {wire}, and would be quantized a second time"
        return Reason(field="expert_rows", value=expert_rows, why=why)
    inner = None if spec.inner == EXACT else formats.get(spec.inner)
    experts_reason = None
    if spec.experts == AUTO:
        experts, experts_reason = choose_experts(
            _experts_spec(spec, expert_rows, inner, 1, trains=training), device
        )
    else:
        experts = experts_room.get(spec.experts)
    if wire.scale_layouts and experts.scale_layout not in wire.scale_layouts:
        why = f"{experts.name} experts want {experts.scale_layout} scales, which it does not have"
        return Reason(field="wire", value=wire, why=why)
    try:
        placement = placement_for(spec.placement, spec.num_experts, world)
    except TokenyardError as error:
        return Reason(field="placement", value=error.found, why=f"expected {error.expected}")
    exchange_spec = ExchangeSpec(
        layer=spec.name,
        index=index,
        hidden_size=spec.hidden_size,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        max_tokens=tokens,
        dtype=spec.dtype,
        wire=wire,
        combine_wire=combine_wire,
        placement=placement,
        routed_scaling=_scaling(spec),
        carries_logits=experts.routes_itself,
        extra=(*spec.payloads, *((_TOKEN_NUMBERS,) if spec.token_numbers else ())),
        reduces_ranks=spec.reduce_ranks == "exchange",
        sums_choices=spec.sum == "choices",
        max_rows=None if max_rows is None or max_rows >= world * tokens else max_rows,
        movable=spec.spare_experts > 0,
    )
    if exchange_spec.sums_choices and exchange_spec.carries_logits:
        why = "experts that route by themselves leave home in the dark about the choices that it should sum"
        return Reason(field="sum", value=spec.sum, why=why)
    reason = exchange.supports(exchange_spec) or experts.supports(
        _experts_spec(spec, expert_rows, inner, 1, trains=training)
    )
    gradients = None
    if reason is None and training:
        wired = wire_gradients(spec, exchange_spec, exchange, experts, device, num_layers=num_layers)
        gradients, reason = (None, wired) if isinstance(wired, Reason) else (wired, None)
    if reason is None and device is not None:
        reason = experts.runs_on(device)
        if reason is None and exchange_spec.sums_choices and device.type not in experts.batch_invariant:
            why = f"the bits of a row of {experts.name} experts on {device.type} depend on the rest of its batch"
            reason = Reason(field="sum", value=spec.sum, why=why)
    if reason is not None:
        return reason
    return Wiring(
        spec=spec,
        exchange_spec=exchange_spec,
        exchange=exchange,
        experts=experts,
        expert_rows=expert_rows,
        inner=inner,
        duties=_duties(spec, exchange_spec, experts, expert_rows),
        experts_reason=experts_reason,
        gradients=gradients,
    )


_TOKEN_NUMBERS = Payload(name=TOKEN_NUMBERS, dtype=torch.int64, width=1)


def _duties(
    spec: LayerSpec, exchange_spec: ExchangeSpec, experts: type[Experts], expert_rows: Format | None
) -> dict[Duty, Party]:
    """The party that does each duty."""
    quantizer, quantized = Party.NOBODY, None
    if exchange_spec.wire.quantized:
        quantizer, quantized = Party.SENDER, exchange_spec.wire
    elif expert_rows is not None and expert_rows.quantized:
        quantizer, quantized = Party.EXPERTS, expert_rows
    pads = quantized is not None and quantized.padded_size(spec.hidden_size) > spec.hidden_size
    swizzles = experts.scale_layout == "swizzled" and bool(exchange_spec.wire.scale_layouts)
    at_home = exchange_spec.sums_choices
    finisher = Party.EXPERTS if experts.finalizes and not at_home else Party.RECEIVER
    scaler = Party.CALLER if spec.router is None else Party.ROUTER
    return {
        Duty.QUANTIZE: quantizer,
        Duty.PAD: quantizer if pads else Party.NOBODY,
        Duty.SWIZZLE: Party.RECEIVER if swizzles else Party.NOBODY,
        Duty.WEIGHT: Party.EXPERTS if spec.weight_on == "input" else finisher,
        Duty.REDUCE_EXPERTS: Party.EXCHANGE if at_home else finisher,
        Duty.REDUCE_RANKS: Party.EXCHANGE if exchange_spec.reduces_ranks else Party.CALLER,
        Duty.ROUTED_SCALING: Party.NOBODY if exchange_spec.routed_scaling == 1.0 else scaler,
        Duty.WEIGHT_GRADIENT: Party.NOBODY,  # of a backward
    }


def _experts_spec(
    spec: LayerSpec,
    expert_rows: Format | None,
    inner: Format | None,
    num_local_experts: int,
    *,
    trains: bool,
) -> ExpertsSpec:
    return ExpertsSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_local_experts=num_local_experts,
        top_k=spec.top_k,
        activation=activation(spec.activation),
        bias=spec.bias,
        weights=spec.weights,
        dtype=spec.dtype,
        rows=expert_rows,
        inner=inner,
        weight_on=spec.weight_on,
        num_experts=spec.num_experts,
        batch_invariant=spec.sum == "choices",
        trains=trains,
    )


def _scaling(spec: LayerSpec) -> float:
    if spec.routed_scaling is not None:
        return spec.routed_scaling
    return 1.0 if spec.router is None else spec.router.routed_scaling
