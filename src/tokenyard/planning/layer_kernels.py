"""Which GPU kernels the experts of a plan's layers can launch, so that they are ready before the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tokenyard.duties import Duty, Party
from tokenyard.exchange import Exchange
from tokenyard.experts import Experts, ExpertsSpec
from tokenyard.gpu_kernels import is_aligned
from tokenyard.planning.wiring import Wiring


def record_experts(exchange: Exchange, wirings: Sequence[Wiring]) -> None:
    """Record the launches of the experts of these layers, in whatever form they will hold their weights.

    Equal layers are recorded once.
    """
    known: set[Any] = set()
    for wiring in wirings:
        spec = wiring.experts_spec(exchange.group.rank)
        spec = replace(spec, num_local_experts=spec.num_local_experts + wiring.spec.spare_experts)
        if _kind(wiring, spec) not in known:
            known.add(_kind(wiring, spec))
            _record(exchange, wiring, spec, None)


def load_kernels(exchange: Exchange, wiring: Wiring, experts: Experts) -> None:
    """Load the kernels of experts whose weights are on a GPU, where a plan did not know in which form they are held."""
    buffers = dict(experts.named_buffers())
    if exchange.usability.is_closed or not buffers or any(not buffer.is_cuda for buffer in buffers.values()):
        return
    held = tuple((name, buffer.dtype, is_aligned(buffer)) for name, buffer in buffers.items())
    record = partial(_record, exchange, wiring, experts.spec, experts)
    exchange.kernels.add(record, of=(_kind(wiring, experts.spec), held))


def _kind(wiring: Wiring, spec: ExpertsSpec) -> Any:
    """What is equal for layers whose experts launch the same kernels."""
    layer = wiring.exchange_spec
    return wiring.experts, spec, _finalizes(wiring), layer.wire, layer.combine_wire, layer.nbytes


def _record(exchange: Exchange, wiring: Wiring, spec: ExpertsSpec, held: Experts | None) -> None:
    layer = wiring.exchange_spec
    most_rows = layer.placement.world * layer.max_tokens
    for received in exchange.transport.samples(layer):
        wiring.experts.record_launches(spec, received, most_rows, finalize=_finalizes(wiring), held=held)


def _finalizes(wiring: Wiring) -> bool:
    """Whether the experts of a layer weight and sum their results."""
    return wiring.duties[Duty.REDUCE_EXPERTS] is Party.EXPERTS
