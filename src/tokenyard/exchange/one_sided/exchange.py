"""`one_sided`: ranks write rows straight into each other's memory, and read results straight out of it.

    dispatch   pushes: the i-th row for rank w goes into slot `me · max_tokens + i` of w's dispatch region
    combine    pulls: results stand in the combine region of the rank that computed them; their owners read them

Slots follow from the order of tokens, so placement is deterministic, and no rank has to ask another for room. A slot
that nobody wrote in this round is never read: each rank is told how many rows came from whom.

**Why nothing is overwritten too early.** Each of `in_flight` dispatches has a pair of regions, which it keeps until it
is combined. So a rank pushes into a region only after the combine of what stood there, in which it heard from every
rank; they said so after their experts had read it. A rank writes results only after their dispatch, in which it heard
from every rank; they said so after they had pulled what stood there before. Dispatch and combine regions never overlap,
so a fast rank may push its next layer while a slow one still pulls.

A rank that fails tells the others in place of rows; all raise, and the next round starts clean.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.errors import ContractError, Drifted, Reason
from tokenyard.exchange.announcement import Announcement, Phase, check_counts, check_failures, check_places
from tokenyard.exchange.base import Exchange
from tokenyard.exchange.one_sided.control import MOST_RANKS
from tokenyard.exchange.one_sided.guarded import WorkspaceWatch
from tokenyard.exchange.one_sided.signals import Signals, control_bytes
from tokenyard.exchange.spec import Dispatched, ExchangeSpec, Outgoing
from tokenyard.exchange.watch import Watch
from tokenyard.exchange.workspace import LayerBytes, Region, SlotLayout, WorkspaceLayout, as_bytes
from tokenyard.formats.base import EncodedRows
from tokenyard.group.base import Group
from tokenyard.routing import Routes
from tokenyard.rows import CombineBuffer, LocalRoutes, PlacedRows, ReceivedRows

# CPUs on which plain aligned stores become visible in the order in which they were made.
_ORDERED_CPUS = ("x86_64", "AMD64", "i686")


class Workspace:
    """One symmetric buffer per rank, mapped by all ranks, and the signals in it."""

    def __init__(self, group: Group, layout: WorkspaceLayout) -> None:
        self.layout = layout
        self.nbytes = layout.nbytes
        with torch.inference_mode(False):  # what is made there could not be written elsewhere
            self.buffers = group.share_memory(layout.nbytes)
        controls = [layout.control_region().of(buffer) for buffer in self.buffers]
        self.signals = Signals(controls, group)
        self._views: dict[tuple[SlotLayout, int, int], dict[str, Tensor]] = {}

    def dispatch(self, rank: int, spec: ExchangeSpec, flight: int) -> dict[str, Tensor]:
        """The payloads of all slots that a rank receives into."""
        return self._slots(spec.dispatch_slots, rank, self.layout.dispatch_region(flight))

    def combine(self, rank: int, spec: ExchangeSpec, flight: int) -> dict[str, Tensor]:
        """The payloads of all slots that a rank's results are read from."""
        return self._slots(spec.combine_slots, rank, self.layout.combine_region(flight))

    def _slots(self, slots: SlotLayout, rank: int, region: Region) -> dict[str, Tensor]:
        key = (slots, rank, region.offset)
        if key not in self._views:  # making them anew in every round costs a tenth of a small round trip
            with torch.inference_mode(False):
                self._views[key] = slots.views(region.of(self.buffers[rank]))
        return self._views[key]


class OneSidedExchange(Exchange):
    """Push out, pull back, through a workspace that all ranks map."""

    name = "one_sided"

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        if group.device.type == "cuda":
            return _reaches_gpus(group, hosts)
        if platform.machine() not in _ORDERED_CPUS:
            why = f"one_sided needs stores that stay in order, as on x86, not {platform.machine()}"
            return Reason(field="exchange", value=cls.name, why=why)
        if len(set(hosts)) > 1:
            why = f"one_sided shares memory, and the ranks run on {len(set(hosts))} hosts"
            return Reason(field="exchange", value=cls.name, why=why)
        return None

    @classmethod
    def on(cls, group: Group) -> type[Exchange]:
        if group.device.type != "cuda" or cls is not OneSidedExchange:
            return cls
        # Triton is needed only there.
        module: Any = importlib.import_module("tokenyard.exchange.one_sided.cuda")
        chosen: type[Exchange] = module.CudaOneSidedExchange
        return chosen

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        return LayerBytes(
            dispatch_row=sum(payload.nbytes for payload in spec.dispatch_slots.payloads),
            combine_row=sum(payload.nbytes for payload in spec.combine_slots.payloads),
            dispatch=spec.dispatch_slots.nbytes,
            combine=spec.combine_slots.nbytes,
        )

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        if group.device.type != "cuda":
            return None
        why = "the kernels that move rows between GPUs leave no seals, guards and poison"
        return Reason(field="paranoid", value=True, why=why)

    def __init__(self, group: Group, *, in_flight: int = 1, plan_id: int = 0, paranoid: bool = False) -> None:
        super().__init__(group, in_flight=in_flight, plan_id=plan_id, paranoid=paranoid)
        self._workspace: Workspace | None = None

    @classmethod
    def _paranoid_watch(cls, group: Group, in_flight: int) -> Watch:
        return WorkspaceWatch(group, in_flight)

    @property
    def workspace(self) -> Workspace:
        """The workspace of the layers that are served now."""
        if self._workspace is None:
            raise ContractError(
                "the exchange has no workspace", expected="a plan that is open", fix="make a new plan"
            )
        return self._workspace

    def serve(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers: in the workspace that is there if it suffices, else in a new one for the union."""
        needed = self.layout_for(specs)
        if self._workspace is None:
            self._make_workspace(needed)
        elif not self._workspace.layout.suffices_for(needed):
            self._make_workspace(self._workspace.layout.union(needed))
        super().serve(specs)

    def trim(self, specs: Sequence[ExchangeSpec]) -> None:
        """Carry these layers in a workspace that is no larger than they need."""
        needed = self.layout_for(specs)
        if self._workspace is None or self._workspace.layout != needed:
            self._make_workspace(needed)
        super().serve(specs)

    def _make_workspace(self, layout: WorkspaceLayout) -> None:
        """All or nothing: if a rank cannot allocate, all raise here, and the old workspace still serves."""
        made = Workspace(self.group, layout)
        self._watch.workspace_made(made, self._round)
        self._workspace = made

    def warmup(self, specs: Sequence[ExchangeSpec]) -> None:
        """Look at every layer's slots once: a workspace that one of them does not fit into is found now."""
        for spec in specs:
            with self._in_layer(spec):
                for flight in range(self._in_flight.capacity):
                    self._look_at(spec, flight)

    def _look_at(self, spec: ExchangeSpec, flight: int) -> None:
        """This rank's slots of a layer, out and back; raises where they do not fit."""
        self.workspace.dispatch(self.group.rank, spec, flight)
        self.workspace.combine(self.group.rank, spec, flight)

    @property
    def _control_bytes(self) -> int:
        """Bytes of flags and mail on a rank."""
        return control_bytes(self.group.size)

    def layout_for(self, specs: Sequence[ExchangeSpec]) -> WorkspaceLayout:
        """The smallest layout that serves these layers: the union of what they need."""
        needs = [self.region_bytes(spec) for spec in specs]
        return WorkspaceLayout(
            control=self._control_bytes,
            dispatch=max(need.dispatch for need in needs),
            combine=max(need.combine for need in needs),
            in_flight=self._in_flight.capacity,
            guard=self._watch.guard,
        )

    # -- The way out ---------------------------------------------------------------------------------------

    def _send_out(
        self, spec: ExchangeSpec, round: int, outgoing: Outgoing, loaded: None
    ) -> tuple[ReceivedRows, tuple[int, ...]]:
        by_rank = [
            self._announcement(spec, Phase.DISPATCH, round, outgoing.num_tokens, [count], None)
            for count in outgoing.counts
        ]
        heard = self._tell_and_hear(by_rank)
        check_counts(self.group, by_rank[self.group.rank], heard, spec.max_tokens)
        arrived = tuple(announcement.counts[0] for announcement in heard)
        return self._received(spec, arrived), arrived

    @torch.no_grad()  # weights may want a gradient; a workspace that remembered would hold every batch
    def _load_out(self, spec: ExchangeSpec, round: int, outgoing: Outgoing) -> None:
        """Push each row to every rank that owns one of its experts. Nobody reads it before being told."""
        routes = outgoing.routes
        assert isinstance(routes, Routes)  # `supports` refuses logits
        ids_NK, weights_NK = outgoing.local_routes(routes)
        whole = {**outgoing.rows.payloads, **outgoing.extra}
        first, start = self.group.rank * spec.max_tokens, 0
        for rank, tokens in enumerate(outgoing.tokens_by_rank):
            count = tokens.numel()
            if count == 0:
                continue
            slots = self.workspace.dispatch(rank, spec, self._in_flight.free)
            for name, tensor in whole.items():
                _gather_into(slots[name][first : first + count], tensor, tokens)
            slots["ids"][first : first + count] = ids_NK[start : start + count]
            slots["weights"][first : first + count] = weights_NK[start : start + count]
            start += count

    def _received(self, spec: ExchangeSpec, arrived: tuple[int, ...]) -> ReceivedRows:
        """What came, as views of the workspace: the rows, and the slots in which there are any."""
        slots = self.workspace.dispatch(self.group.rank, spec, self._in_flight.free)
        slots_R = torch.cat(
            [torch.arange(count) + source * spec.max_tokens for source, count in enumerate(arrived)]
        )
        names = [payload.name for payload in spec.wire.payloads(spec.hidden_size)]
        return ReceivedRows(
            rows=EncodedRows(
                format=spec.wire,
                hidden_size=spec.hidden_size,
                payloads={name: slots[name] for name in names},
            ),
            routes=LocalRoutes(ids_RK=slots["ids"][slots_R], weights_RK=slots["weights"][slots_R]),
            counts_W=arrived,
            extra={payload.name: slots[payload.name][slots_R] for payload in spec.further},
            slots_R=slots_R,
        )

    def bytes_sent(self, spec: ExchangeSpec, outgoing: Outgoing) -> list[int]:
        row = self.region_bytes(spec).dispatch_row
        return [tokens.numel() * row for tokens in outgoing.tokens_by_rank]

    # -- The way back --------------------------------------------------------------------------------------

    def combine_buffer(self, dispatched: Dispatched) -> CombineBuffer | None:
        """Where experts may write their results, without a copy. None, if the way back is quantized."""
        spec, slots_R = dispatched.spec, dispatched.received.slots_R
        if spec.combine_wire.quantized or slots_R is None:
            return None
        slots = self.workspace.combine(self.group.rank, spec, dispatched.flight)
        (payload,) = spec.combine_wire.payloads(spec.hidden_size)
        # Detached: experts may write what wants a gradient, and only this handle is to remember it.
        return CombineBuffer(rows_SH=slots[payload.name].detach(), slots_R=slots_R)

    def _is_placed(self, dispatched: Dispatched, result: object) -> bool:
        if not isinstance(result, PlacedRows):
            return False
        own = self.combine_buffer(dispatched)
        fits = own is not None and result.buffer.slots_R is own.slots_R
        if own is None or not fits or result.buffer.rows_SH.data_ptr() != own.rows_SH.data_ptr():
            raise ContractError(
                "combine was given rows that were placed in the buffer of another dispatch",
                expected="PlacedRows of `combine_buffer(dispatched)`, of this very dispatch",
                fix="ask for the buffer after each dispatch",
            )
        return True

    @torch.no_grad()
    def _load_back(self, dispatched: Dispatched, encoded: EncodedRows) -> None:
        """Write the results into this rank's combine region, from which their owners pull them."""
        spec = dispatched.spec
        slots = self.workspace.combine(self.group.rank, spec, dispatched.flight)
        start = 0
        for source, count in enumerate(dispatched.return_path.received_counts):
            first = source * spec.max_tokens
            for name, tensor in encoded.payloads.items():
                slots[name][first : first + count] = tensor[start : start + count]
            start += count

    def _send_back(self, dispatched: Dispatched, loaded: None) -> list[EncodedRows]:
        spec, path, round = dispatched.spec, dispatched.return_path, dispatched.round
        mine = self._announcement(spec, Phase.COMBINE, round, path.num_tokens, [], None)
        self._tell_and_hear([mine] * self.group.size)
        first = self.group.rank * spec.max_tokens
        return [
            EncodedRows(
                format=spec.combine_wire,
                hidden_size=spec.hidden_size,
                payloads={
                    name: slots[first : first + tokens.numel()]
                    for name, slots in self.workspace.combine(rank, spec, dispatched.flight).items()
                },
            )
            for rank, tokens in enumerate(path.tokens_by_rank)
        ]

    # -- Shared fate ---------------------------------------------------------------------------------------

    def _fail_out(self, spec: ExchangeSpec, round: int, error: BaseException) -> None:
        failed = self._announcement(spec, Phase.DISPATCH, round, 0, [0], error)
        self._tell_and_hear([failed] * self.group.size)

    def _fail_back(self, dispatched: Dispatched, error: BaseException) -> None:
        failed = self._announcement(dispatched.spec, Phase.COMBINE, dispatched.round, 0, [], error)
        self._tell_and_hear([failed] * self.group.size)

    def _tell_and_hear(self, by_rank: Sequence[Announcement]) -> list[Announcement]:
        """Tell each rank, hear from all. Every rank that was told is in this round, whatever comes of it."""
        signals, mine = self.workspace.signals, by_rank[self.group.rank]
        if signals.left:
            self._drift_apart()
            self.check_usable()
        for rank, announcement in enumerate(by_rank):
            signals.tell(rank, announcement)
        heard = signals.hear(mine)
        self._round = max(self._round, mine.round)
        if any(other.plan != mine.plan for other in heard):
            self._drift_apart()
        check_places(self.group, mine, heard, self._names)
        check_failures(self.group, mine, heard)
        return heard

    def _drift_apart(self) -> None:
        """Some ranks told of this plan, others of another one: it is not known any more in which round each one is."""
        self._break(
            Drifted(
                "the ranks were in different plans",
                expected="every rank of the group to call the layers of the same plans in the same order",
                fix="look for a branch that only some ranks take",
            )
        )

    def close(self) -> None:
        """No more rounds, and the workspace is given back."""
        super().close()
        self._workspace = None


def _gather_into(slots: Tensor, tensor: Tensor, tokens: Tensor) -> None:
    """Copy some rows of a payload into consecutive slots: one pass, row by row, as bytes."""
    source, target = as_bytes(tensor), slots.view(torch.uint8)
    if tokens.numel() == source.shape[0]:
        target.copy_(source)  # ascending and all of them: as they are
    else:
        torch.index_select(source, 0, tokens, out=target)


def _reaches_gpus(group: Group, hosts: Sequence[str]) -> Reason | None:
    """None, or why the kernels cannot serve a group of GPUs."""
    why = None
    if importlib.util.find_spec("triton") is None:
        why = "one_sided on GPUs needs Triton, which comes with torch for CUDA"
    elif torch.cuda.get_device_capability(group.device) < (8, 9):
        why = "one_sided on GPUs needs one that knows fp8: compute capability 8.9 or higher"
    elif len(set(hosts)) > 1:
        why = f"one_sided shares memory, and the ranks run on {len(set(hosts))} hosts"
    elif group.size > MOST_RANKS:
        why = f"one_sided on GPUs serves up to {MOST_RANKS} ranks, not {group.size}"
    return None if why is None else Reason(field="exchange", value="one_sided", why=why)
