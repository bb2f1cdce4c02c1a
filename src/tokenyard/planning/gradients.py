"""The wiring of a backward: how gradients travel, who does each duty, and what a training plan cannot have.

A backward is one more round trip, along the routes of the forward: gradients of results go out to the experts, and
those of rows come home. The gradients of routing weights, a float32 number of each choice, come home beside them, and
are placed, never summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tokenyard import formats
from tokenyard.duties import Duty, Party
from tokenyard.errors import Reason
from tokenyard.exchange import ExchangeSpec, Transport
from tokenyard.experts import Experts
from tokenyard.formats import Payload, weight_format
from tokenyard.planning.spec import LayerSpec

# The payload that comes home: the gradient of each choice's routing weight.
WEIGHT_GRADIENTS = "weight_gradients"
# What precedes the names of a row's payloads where the row travels again beside its gradient (`keep="nothing"`).
AGAIN = "again_"


@dataclass(frozen=True, kw_only=True)
class GradientWiring:
    """The round trip of a layer's gradients, and the one party that does each duty in it."""

    exchange_spec: ExchangeSpec  # the description of the round trip for the exchange
    duties: Mapping[Duty, Party]  # the one party that does each duty


def wire_gradients(
    spec: LayerSpec,
    forward: ExchangeSpec,
    exchange: type[Transport],
    experts: type[Experts],
    device: torch.device | None,
    *,
    num_layers: int,
) -> GradientWiring | Reason:
    """The wiring of a layer's gradients, or why the layer cannot be trained."""
    if (reason := _refusal(spec, forward, experts, device)) is not None:
        return reason
    wire = formats.for_dtype(spec.dtype) if spec.gradient_wire is None else formats.get(spec.gradient_wire)
    again: tuple[Payload, ...] = ()
    if spec.keep == "nothing":
        again = tuple(replace(p, name=AGAIN + p.name) for p in forward.wire.payloads(spec.hidden_size))
    carried = replace(
        forward,
        index=num_layers + forward.index,
        wire=wire,
        combine_wire=wire,
        extra=again,
        returns=(Payload(name=WEIGHT_GRADIENTS, dtype=torch.float32, width=1),),
        of_gradients=True,
    )
    if (reason := exchange.supports(carried)) is not None:
        return replace(reason, field="gradient_wire") if "wire" in reason.field else reason
    if device is not None and (reason := exchange.trains_on(device)) is not None:
        return reason
    pads = wire.quantized and wire.padded_size(spec.hidden_size) > spec.hidden_size
    at_home = forward.sums_choices
    duties = {
        Duty.QUANTIZE: Party.SENDER if wire.quantized else Party.NOBODY,
        Duty.PAD: Party.SENDER if pads else Party.NOBODY,
        Duty.SWIZZLE: Party.NOBODY,
        Duty.WEIGHT: Party.EXPERTS,
        Duty.REDUCE_EXPERTS: Party.EXCHANGE if at_home else Party.RECEIVER,
        Duty.REDUCE_RANKS: Party.EXCHANGE,
        Duty.ROUTED_SCALING: Party.NOBODY,
        Duty.WEIGHT_GRADIENT: Party.EXPERTS,
    }
    return GradientWiring(exchange_spec=carried, duties=duties)


def _refusal(
    spec: LayerSpec, forward: ExchangeSpec, experts: type[Experts], device: torch.device | None
) -> Reason | None:
    """None, or what a training plan cannot have."""
    if weight_format(spec.weights).quantized:
        why = "a quantized weight has no gradient: training plans hold plain weights"
        return Reason(field="weights", value=spec.weights, why=why)
    if spec.dtype == torch.float16:
        why = "gradients beyond 65504 would saturate, and a GradScaler would not see the overflow"
        return Reason(field="dtype", value="float16", why=why)
    if experts.routes_itself:
        why = "experts that route by themselves are not differentiated"
        return Reason(field="experts", value=experts.name, why=why)
    if not experts.trains or (device is not None and device.type not in experts.trains):
        where = "nowhere" if not experts.trains else f"on {' and '.join(experts.trains)}"
        there = "" if device is None else f", and rows are on {device.type}"
        why = f"{experts.name} experts are differentiated {where}{there}"
        return Reason(field="experts", value=experts.name, why=why)
    if spec.spare_experts:
        why = "experts of a training plan do not move: their gradients, and the optimizer's state, would stay behind"
        return Reason(field="spare_experts", value=spec.spare_experts, why=why)
    if forward.placement.has_replicas:
        why = "copies of an expert would be trained apart from each other"
        return Reason(field="placement", value=spec.placement, why=why)
    if not forward.reduces_ranks:
        why = "results that the caller sums have no gradient"
        return Reason(field="reduce_ranks", value=spec.reduce_ranks, why=why)
    if spec.router is not None and spec.top_k == 1 and spec.router.renormalize:
        why = "with top_k=1 a renormalized weight is always 1, and the gradient of the router always 0"
        return Reason(field="router", value=str(spec.router), why=why)
    return None
