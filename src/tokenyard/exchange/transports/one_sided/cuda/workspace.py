"""The workspace of `one_sided` on GPUs: one buffer per rank in device memory, and views of its parts."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transports.one_sided.cuda.control import ControlLayout
from tokenyard.exchange.transports.one_sided.cuda.launch import (
    MOST_WAITING_BLOCKS,
    Launcher,
    most_waiting_blocks,
)
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
from tokenyard.exchange.transports.one_sided.cuda.reports import KernelReports
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.group.base import Group
from tokenyard.group.devices import threads_on
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows


def _most_waiting(group: Group) -> int:
    """The most blocks of this rank that may wait for the other ranks at a time. Collective."""
    if group.device.type != "cuda":
        return MOST_WAITING_BLOCKS
    properties = torch.cuda.get_device_properties(group.device)
    gpus = group.gather_json(str(properties.uuid), phase="sharing memory")
    sharing = max(gpus.count(gpus[group.rank]), threads_on(group.device))
    return most_waiting_blocks(sharing, properties.multi_processor_count)


class DeviceWorkspace:
    """One symmetric buffer per rank in device memory, the launcher that works on it, and what its kernels report."""

    def __init__(
        self,
        group: Group,
        layout: WorkspaceLayout,
        control: ControlLayout,
        max_tokens: int,
        sms: int | None,
    ) -> None:
        self.layout, self.control, self.nbytes = layout, control, layout.nbytes
        self.buffers = group.share_memory(layout.nbytes)
        self.launcher = Launcher(
            self.buffers,
            layout,
            control,
            group.rank,
            group.deadline,
            max_tokens,
            sms=sms,
            most_waiting=_most_waiting(group),
        )
        self.reports = KernelReports(group, self.buffers, control, self.launcher.host_status)
        self._group = group
        # By layer, region, most tokens and rank: views of its slots, for dispatches and combines.
        self._views: dict[Any, tuple[ExchangeSpec, dict[str, Tensor], dict[str, Tensor]]] = {}

    def _slots(self, slots: DispatchSlots, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        spec = slots.spec
        key = (spec.layer, slots.region, slots.max_tokens, rank)
        known = self._views.get(key)
        if known is None or known[0] is not spec:
            used, buffer = len(self.buffers) * slots.max_tokens, self.buffers[rank]
            with torch.inference_mode(False):  # inference tensors could not be written outside of it
                out = spec.dispatch_slots.views(self.layout.dispatch_region(slots.region).of(buffer))
                back = spec.combine_slots.views(self.layout.combine_region(slots.region).of(buffer))
                out = {name: payload[:used] for name, payload in out.items()}
                back = {name: payload[: used * spec.results_per_row] for name, payload in back.items()}
            known = self._views[key] = spec, out, back
        return known[1:]

    def dispatch(self, slots: DispatchSlots, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots of a rank's dispatch region, into which others push rows."""
        return self._slots(slots, rank)[0]

    def combine(self, slots: DispatchSlots, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots of a rank's combine region, from which others pull results."""
        return self._slots(slots, rank)[1]

    def received(self, slots: DispatchSlots, counts: tuple[int, ...] | None) -> ReceivedRows:
        """The received rows as views of the workspace: `counts[w]` from rank w; or, given None, every slot as a row."""
        spec, views = slots.spec, self.dispatch(slots, self._group.rank)
        rows = spec.rows(views)
        extra = {payload.name: views[payload.name] for payload in spec.extra}
        if counts is None:
            return ReceivedRows(
                rows=rows,
                routes=LocalRoutes(ids_RK=views["ids"], weights_RK=views["weights"]),
                counts_W=(slots.max_tokens,) * self._group.size,
                extra=extra,
                may_be_empty=True,
                results=self.results_at(slots, None),
            )
        places = [torch.arange(n) + source * slots.max_tokens for source, n in enumerate(counts)]
        # From pageable memory: the copy has read it before `to` returns, and the host does not wait for the device.
        slots_R = torch.cat(places).to(views["ids"].device, non_blocking=True)
        return ReceivedRows(
            rows=rows,
            routes=LocalRoutes(ids_RK=views["ids"][slots_R], weights_RK=views["weights"][slots_R]),
            counts_W=counts,
            extra={name: payload[slots_R] for name, payload in extra.items()},
            slots_R=slots_R,
            results=self.results_at(slots, slots_R),
        )

    def sample(self, slots: DispatchSlots, num_rows: int, *, in_slots: bool) -> ReceivedRows:
        """Received rows as `received` gives them, on the meta device; `in_slots`: the first slots, empty or not."""
        meta = copy(self)
        meta._views = {}
        meta.buffers = [torch.empty(self.nbytes, dtype=torch.uint8, device="meta")] * len(self.buffers)
        if not in_slots:
            each = slots.max_tokens
            counts = [min(each, max(0, num_rows - each * rank)) for rank in range(len(self.buffers))]
            return meta.received(slots, tuple(counts))
        whole = meta.received(slots, None)
        assert isinstance(whole.routes, LocalRoutes)
        results = whole.results
        return replace(
            whole,
            rows=whole.rows.slice(0, num_rows),
            routes=LocalRoutes(
                ids_RK=whole.routes.ids_RK[:num_rows], weights_RK=whole.routes.weights_RK[:num_rows]
            ),
            results=None if results is None else replace(results, rows_SH=results.rows_SH[:num_rows]),
        )

    def results_at(self, slots: DispatchSlots, slots_R: Tensor | None) -> CombineBuffer | None:
        """The buffer into which experts may write results; None if these are encoded, or one for each choice."""
        if slots.spec.combine_wire.quantized or slots.spec.sums_choices:
            return None
        (rows_SH,) = self.combine(slots, self._group.rank).values()
        return CombineBuffer(rows_SH=rows_SH.detach(), slots_R=slots_R)
