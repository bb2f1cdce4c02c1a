"""W ranks of the one-sided exchange in one process, on one GPU: the kernels alone, without groups, plans and hosts.

Each rank has a workspace of its own. They run in one of two ways: *one launch for all ranks*, or *a stream per rank*,
where kernels of different ranks wait for each other as they would on different GPUs. Either way a dispatch or combine
can be captured in a CUDA graph.

`check` compares a dispatch and a combine of a whole batch with the kernels' twins, bit by bit. It compares
whole regions, not only rows, so that writes to a wrong place are noticed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.errors import ContractError
from tokenyard.exchange import ExchangeSpec, SharedMemoryTransport
from tokenyard.exchange.transports.one_sided.cuda.control import ControlLayout
from tokenyard.exchange.transports.one_sided.cuda.launch import Launcher
from tokenyard.exchange.transports.one_sided.cuda.operands import DispatchSlots
from tokenyard.exchange.transports.one_sided.kernels.twins import SentBatch, pull_twin, push_twin, slots_twin
from tokenyard.exchange.workspace import WorkspaceLayout
from tokenyard.formats import get
from tokenyard.routing import Placement
from tokenyard.rows import CombineBuffer, LocalRoutes, ReceivedRows
from tokenyard_lab.bench.dispatch_cells import PER_RANK, DispatchCell
from tokenyard_lab.bench.rank_rounds import check_bits
from tokenyard_lab.bench.shapes import Shape

# Seconds after which a kernel that waits for another rank gives up.
DEADLINE = 5.0
# The byte that fills a region before a check.
_POISON = 0xAB


def exchange_spec_of(cell: DispatchCell, shape: Shape) -> ExchangeSpec:
    """The spec of the exchange that a cell measures."""
    return ExchangeSpec(
        layer="moe",
        index=0,
        hidden_size=shape.hidden_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        max_tokens=cell.tokens,
        dtype=torch.bfloat16,
        wire=get(cell.wire),
        combine_wire=get(shape.combine_wire),
        placement=Placement.contiguous(shape.num_experts, cell.ranks),
    )


class Batch(SentBatch):
    """The batches of all ranks in one: the rows of rank r are the T rows from `r · T` on."""

    @classmethod
    def draw(cls, cell: DispatchCell, shape: Shape, device: torch.device, seed: int) -> Batch:
        """Random rows that go to uniformly random experts."""
        draw = torch.Generator(device).manual_seed(seed)
        tokens = cell.ranks * cell.tokens
        scores_TE = torch.rand(tokens, shape.num_experts, device=device, generator=draw)
        x_TH = torch.randn(tokens, shape.hidden_size, device=device, generator=draw, dtype=torch.bfloat16)
        weights_TK, ids_TK = scores_TE.topk(shape.top_k)
        return cls(x_TH=x_TH, ids_TK=ids_TK.int(), weights_TK=weights_TK)

    def part(self, rows: slice) -> SentBatch:
        """The batch of some ranks."""
        return SentBatch(x_TH=self.x_TH[rows], ids_TK=self.ids_TK[rows], weights_TK=self.weights_TK[rows])


@dataclass(frozen=True)
class _LaunchStream:
    """A launcher, the rows that it sends, and its stream (None: the current one)."""

    launcher: Launcher
    rows: slice
    stream: torch.cuda.Stream | None


class VirtualRanks:
    """The ranks of one cell, and what they dispatch and combine."""

    def __init__(
        self, cell: DispatchCell, shape: Shape, batches: Sequence[Batch], device: torch.device
    ) -> None:
        self.cell, self.batches, self.device = cell, batches, device
        self.exchange_spec = exchange_spec_of(cell, shape)
        self._control = ControlLayout(cell.ranks, 1)
        regions = SharedMemoryTransport.region_bytes(self.exchange_spec)
        self._layout = WorkspaceLayout(
            control=self._control.nbytes, dispatch=regions.dispatch, combine=regions.combine
        )
        self._buffers = [
            torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=device) for _ in range(cell.ranks)
        ]
        self._slots_out = DispatchSlots(spec=self.exchange_spec, region=0, max_tokens=cell.tokens)
        self._launch_streams = self._per_rank() if cell.launch == PER_RANK else self._all_ranks()
        # Kernels may wait only if the others run at the same time. Triton's interpreter runs one after the other.
        self._waits = device.type == "cuda"
        self.y_TH = torch.empty_like(batches[0].x_TH)
        self._slots: dict[int, Tensor] = {}  # by launch, of the batch that was sent last

    def _all_ranks(self) -> list[_LaunchStream]:
        world, tokens = self.cell.ranks, self.cell.tokens
        return [_LaunchStream(self._launcher(0, ranks=world), slice(0, world * tokens), None)]

    def _per_rank(self) -> list[_LaunchStream]:
        launches = []
        for rank, rows in enumerate(self._rows_by_rank()):
            launcher = self._launcher(rank, ranks=1)
            # A kernel that is loaded while another waits can end in a deadlock.
            launcher.launch_each_kernel(self.exchange_spec)
            launches.append(_LaunchStream(launcher, rows, torch.cuda.Stream(self.device)))
        torch.cuda.synchronize(self.device)
        return launches

    def _launcher(self, rank: int, ranks: int) -> Launcher:
        return Launcher(
            self._buffers, self._layout, self._control, rank, DEADLINE, self.cell.tokens, ranks=ranks
        )

    # -- What is measured ----------------------------------------------------------------------------------

    def dispatch(self, batch: Batch) -> None:
        """Send a batch of all ranks."""
        self._run([batch], dispatches=True, combines=False)

    def combine(self) -> None:
        """Combine the results in the workspaces, for the batch that was sent last, into `y_TH`."""
        self._run(self.batches[:1], dispatches=False, combines=True)

    def received(self, rank: int) -> ReceivedRows:
        """The rows that a rank's experts get: all slots of its workspace, with results where `combine` reads them."""
        exchange_spec, buffer = self.exchange_spec, self._buffers[rank]
        slots = exchange_spec.dispatch_slots.views(self._layout.dispatch_region(0).of(buffer))
        (results_SH,) = exchange_spec.combine_slots.views(self._layout.combine_region(0).of(buffer)).values()
        return ReceivedRows(
            rows=exchange_spec.rows(slots),
            routes=LocalRoutes(ids_RK=slots["ids"], weights_RK=slots["weights"]),
            counts_W=(self.cell.tokens,) * self.cell.ranks,
            may_be_empty=True,
            results=CombineBuffer(rows_SH=results_SH, slots_R=None),
        )

    def run(self) -> None:
        """Run the cell's operation for each batch. A combine alone combines the batch that was dispatched last."""
        self._run(self.batches, self.cell.operation != "combine", self.cell.operation != "dispatch")

    def _run(self, batches: Sequence[Batch], dispatches: bool, combines: bool) -> None:
        # Each launch stream forks once from the current one, and runs all batches in order, as a rank would.
        for number, launch in enumerate(self._launch_streams):
            if launch.stream is not None:
                launch.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(launch.stream):  # None: the current one
                for batch in batches:
                    if dispatches:
                        mine = batch.part(launch.rows)
                        self._slots[number] = launch.launcher.dispatch(
                            self._slots_out, mine.x_TH, mine.ids_TK, mine.weights_TK, {}, waits=self._waits
                        )
                    if combines:
                        slots_TW, y_TH = self._slots[number], self.y_TH[launch.rows]
                        launch.launcher.sum(
                            self._slots_out, slots_TW, y_TH, just_placed=False, waits=self._waits
                        )
        for launch in self._launch_streams:
            if launch.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(launch.stream)

    # -- Is it right? --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless a dispatch of the first batch, and a combine after it, have the bits of their twins."""
        first = self.batches[0]
        sent = [first.part(rows) for rows in self._rows_by_rank()]
        self._check_dispatch(first, sent)
        if self.cell.operation != "dispatch":
            self._check_combine(first, sent)

    def rows_sent(self) -> int:
        """Rows of a batch, counted once for each (token, rank): the mean over the batches."""
        counts = [int((slots_twin(self.exchange_spec, batch.ids_TK, 0) >= 0).sum()) for batch in self.batches]
        return round(sum(counts) / len(counts))

    def check_no_rank_gave_up(self) -> None:
        """Raise if a kernel reported trouble, such as a rank that it waited for in vain."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for launch in self._launch_streams:
            if bool(launch.launcher.host_status.any()):
                raise ContractError(
                    f"a kernel of {self.cell} reported {launch.launcher.host_status.tolist()}",
                    expected="kernels that find all ranks, and report nothing",
                    fix="a broken round has no speed: see `Trouble` in one_sided/control.py",
                )

    def _rows_by_rank(self) -> list[slice]:
        tokens = self.cell.tokens
        return [slice(rank * tokens, (rank + 1) * tokens) for rank in range(self.cell.ranks)]

    def _check_dispatch(self, batch: Batch, sent: list[SentBatch]) -> None:
        regions = [self._layout.dispatch_region(0).of(buffer) for buffer in self._buffers]
        for region in regions:
            region.fill_(_POISON)
        self._run([batch], dispatches=True, combines=False)
        self.check_no_rank_gave_up()
        wanted = [torch.full_like(region, _POISON) for region in regions]
        views = [self.exchange_spec.dispatch_slots.views(region) for region in wanted]
        counts = push_twin(self.exchange_spec, sent, views, self.cell.tokens)
        counts_bytes = slice(self._control.counts(0), self._control.counts(1))
        for rank, (region, want) in enumerate(zip(regions, wanted, strict=True)):
            announced = self._buffers[rank][counts_bytes].cpu().view(torch.int32)[::2]
            same = torch.equal(region, want) and torch.equal(announced, counts[rank])
            self._check_bits(same, "dispatch", rank)
        slots_TW = torch.cat(list(self._slots.values()))
        for rank, rows in enumerate(self._rows_by_rank()):
            slots = slots_twin(self.exchange_spec, batch.ids_TK[rows], rank)
            self._check_bits(torch.equal(slots_TW[rows], slots), "dispatch", rank)

    def _check_combine(self, batch: Batch, sent: list[SentBatch]) -> None:
        """Put random results into the workspaces, as experts would, and check their combine. They stay there."""
        draw = torch.Generator(self.device).manual_seed(11)
        regions = []
        for buffer in self._buffers:
            views = self.exchange_spec.combine_slots.views(self._layout.combine_region(0).of(buffer))
            shape = (self.exchange_spec.slots, self.exchange_spec.hidden_size)
            rows_SH = torch.randn(shape, device=self.device, generator=draw, dtype=torch.bfloat16)
            for name, payload in self.exchange_spec.combine_wire.encode(rows_SH).payloads.items():
                views[name].copy_(payload)
            regions.append(views)
        self.y_TH.fill_(torch.nan)
        self._run([batch], dispatches=False, combines=True)
        self.check_no_rank_gave_up()
        for rank, rows in enumerate(self._rows_by_rank()):
            home = torch.empty_like(self.y_TH[rows])
            pull_twin(self.exchange_spec, sent[rank].ids_TK, rank, regions, self.cell.tokens, home)
            self._check_bits(torch.equal(self.y_TH[rows], home), "combine", rank)

    def _check_bits(self, same: bool, operation: str, rank: int) -> None:
        found = f"{operation} gave other bits than its twin ({self.cell})"
        by = " (`tokenyard check --device cuda`)"
        check_bits(same, found, "what kernels/twins.py computes, bit by bit", rank, by)
