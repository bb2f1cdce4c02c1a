"""The workspace of `one_sided` on GPUs: one buffer per rank in device memory, and views of its parts."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.transports.one_sided.cuda.control import STATUS, WORD, ControlLayout
from tokenyard.exchange.transports.one_sided.cuda.launch import (
    MOST_WAITING_BLOCKS,
    Launcher,
    most_waiting_blocks,
)
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
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
    """One symmetric buffer per rank in device memory, and the launcher that works on it."""

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
        # In the host's memory, by region and rank: rows that came, the rank's `max_tokens`, and rows that went there.
        self.host_counts = torch.zeros(
            control.in_flight, group.size, 3, dtype=torch.int32, pin_memory=group.device.type == "cuda"
        )
        self._group, self._mine = group, self.buffers[group.rank]
        self.status = self._mine[STATUS * WORD : STATUS * WORD + self.launcher.host_status[0].nbytes]

    def dispatch(self, slots: DispatchSlots, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots of a rank's dispatch region, into which others push rows."""
        region = self.layout.dispatch_region(slots.region)
        return self._first(slots, slots.spec.dispatch_slots.views(region.of(self.buffers[rank])))

    def combine(self, slots: DispatchSlots, rank: int) -> dict[str, Tensor]:
        """The payloads of the slots of a rank's combine region, from which others pull results."""
        region = self.layout.combine_region(slots.region)
        views = slots.spec.combine_slots.views(region.of(self.buffers[rank]))
        return self._first(slots, views, slots.spec.results_per_row)

    def _first(self, slots: DispatchSlots, views: dict[str, Tensor], per_slot: int = 1) -> dict[str, Tensor]:
        used = len(self.buffers) * slots.max_tokens * per_slot
        return {name: payload[:used] for name, payload in views.items()}

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
        return CombineBuffer(rows_SH=rows_SH, slots_R=slots_R)

    def counts(self, region: int) -> Tensor:
        """What each rank told this one in a dispatch, `[W, 2]`: the rows that it sends, and its `max_tokens`."""
        start = self.control.counts(region)
        return self._mine[start : self.control.counts(region + 1)].view(torch.int32).view(-1, 2)

    def words(self, buffer: Tensor | None = None) -> Tensor:
        """The 64-bit words of this rank's control region, or of the one in another rank's buffer."""
        return self.layout.control_region().of(self._mine if buffer is None else buffer).view(torch.int64)

    def text(self, rank: int, phase: Phase) -> Tensor:
        """The bytes in which a rank writes why it failed in a phase."""
        return self.control.text(list(Phase).index(phase)).of(self.buffers[rank])

    def read_text(self, rank: int, phase: Phase) -> str:
        """Why a rank failed in a phase."""
        return bytes(self.text(rank, phase).cpu().tolist()).rstrip(b"\0").decode(errors="replace")
