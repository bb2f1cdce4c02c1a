"""Launches the kernels of an exchange. Their arguments are described in `operands`.

The number of tokens decides only the number of blocks: batches of all sizes launch the same compiled kernels. A
dispatch is one launch for a short batch, and `assign`, `push` and `signal_and_wait` for a long one.
`launch_each_kernel` launches the kernels of both on nothing: to record them, and to load them before any kernel waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.exchange.announcement import Phase
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transports.one_sided.cuda.control import STATUS_WORDS, ControlLayout, phase_number
from tokenyard.exchange.transports.one_sided.cuda.operands import (
    FEW_ROWS,
    MANY_ROWS,
    DispatchSlots,
    Encoding,
    Load,
    ReturnLayout,
    TileConfig,
    copied,
    expert_table,
    narrow,
    row_tiles,
)
from tokenyard.exchange.transports.one_sided.kernels import flags as flags_kernels
from tokenyard.exchange.transports.one_sided.kernels import pull as pull_kernels
from tokenyard.exchange.transports.one_sided.kernels import push as push_kernels
from tokenyard.exchange.workspace import SlotLayout, WorkspaceLayout
from tokenyard.formats import FORMATS, PlainFormat
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import aligned, launch
from tokenyard.routing import Placement

# The most tokens for which a dispatch is one launch, in which every block finds the slots of its own row.
LONGEST_WHOLE = 64
# The most blocks of a rank with which every block of `pull` waits for the other ranks itself (`MEETS`).
MOST_WAITING_BLOCKS = 128
# Ranks that share a GPU leave this share of its multiprocessors without such blocks. A multiprocessor changes how much
# of its memory is shared memory only when it is idle: experts, which need much of it, do not start beside blocks that
# need none, and these would wait for the results of those experts.
FREE_OF_WAITING = 0.5
# If the rank's multiprocessors are limited (`sms`): the elements, of several rows, that a block reads at a time, and
# how many such reads are in flight, in shared memory. 4 × 2,048 bf16 rows of 4,096 to four ranks of an H200, with one
# block for each, took 1.9 ms when nothing was read while rows were written, and take 1.35 ms.
PUSH_COLUMNS, PUSH_STAGES = 1 << 14, 3
# The same for results, in registers: their sums take 1.0 ms, 1.4 ms with twice as many, 2.4 ms through shared memory.
PULL_COLUMNS = 1 << 13
# Bytes of shared memory that a block must be able to have for that.
_SHARED_FOR_STAGES = 160 << 10


def most_waiting_blocks(ranks_on_gpu: int, processors: int) -> int:
    """The most blocks of a rank that may wait for the other ranks at a time, with this many ranks on its GPU.

    >>> most_waiting_blocks(1, 132), most_waiting_blocks(4, 132)
    (128, 16)
    """
    if ranks_on_gpu == 1:
        return MOST_WAITING_BLOCKS
    return min(MOST_WAITING_BLOCKS, int(processors * (1 - FREE_OF_WAITING)) // ranks_on_gpu)


def _chunks(tokens: int) -> int:
    """The number of chunks of `CHUNK` tokens (or slots) that cover this many, at least one."""
    return max(1, -(-tokens // int(push_kernels.CHUNK.value)))


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block can have on a device."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


class LayerLaunches:
    """What the launches of a layer have in common, made once: for a region, and for the most tokens of a rank."""

    def __init__(self, launcher: Launcher, slots: DispatchSlots) -> None:
        spec = slots.spec
        self.spec, self.flag, self.max_tokens = spec, slots.layer, slots.max_tokens
        self.tables = launcher.table(spec)
        self.layer = push_kernels.Layer(
            top_k=spec.top_k,
            k_wide=triton.next_power_of_2(spec.top_k),
            replicas=self.tables[0].shape[1],
            world=launcher.world,
            wide=launcher.wide,
            at_once=min(push_kernels.RANKS_AT_ONCE.value, launcher.wide),
        )
        self._counts = launcher.control.counts(slots.region)
        self._offsets = _offsets(spec.dispatch_slots, launcher.layout.dispatch_region(slots.region).offset)
        # By payload, None for the routes alone: where it goes in a dispatch region.
        self.places = {name: self._places(self._offsets, name) for name in (None, *self._offsets)}
        self.wire = Encoding.of(spec.wire)  # None: rows come encoded
        self.padded = spec.wire.padded_size(spec.hidden_size)
        # The dtype of rows that travel as they are; None if the wire is quantized.
        self.as_is = spec.wire.dtype if isinstance(spec.wire, PlainFormat) else None
        self.home = self._return_layout(launcher.layout.combine_region(slots.region).offset)
        self._cuts: dict[Any, tuple[TileConfig, push_kernels.Row]] = {}

    def _places(self, offsets: Mapping[str, int], data: str | None = "data") -> push_kernels.Places:
        """The offsets of a region's payloads in a workspace, in bytes; 0 for payloads that the region does not have."""
        return push_kernels.Places(
            data=0 if data is None else offsets[data],
            scales=offsets.get("scales", 0),
            globals=offsets.get("global_scale", 0),
            ids=offsets.get("ids", 0),
            weights=offsets.get("weights", 0),
            counts=self._counts,
        )

    def _return_layout(self, start: int) -> ReturnLayout:
        wire = self.spec.combine_wire
        encoding = Encoding.of(wire)
        if encoding is None:
            raise InputError(
                f"the combine wire is {wire}",
                expected=f"one that a kernel encodes and decodes: {', '.join(FORMATS)}",
                fix="choose one of these, or exchange='two_sided'",
                layer=self.spec.layer,
            )
        places = self._places(_offsets(self.spec.combine_slots, start))
        return ReturnLayout(encoding, places, wire.padded_size(self.spec.hidden_size))

    def loads(self, rows: EncodedRows | Tensor, extra: Mapping[str, Tensor]) -> list[Load]:
        """The payloads that `push` moves, one launch for each; the row itself last."""
        if isinstance(rows, EncodedRows):
            return [copied(name, tensor) for name, tensor in {**extra, **rows.payloads}.items()]
        if rows.dtype == self.as_is:
            row = copied("data", rows)
        else:
            assert self.wire is not None  # else the rows come encoded
            row = Load("data", aligned(rows), self.wire, self.padded)
        return [*(copied(name, tensor) for name, tensor in extra.items()), row]

    def push_cut(self, load: Load, rows: int, stages: int | None) -> tuple[TileConfig, push_kernels.Row]:
        """How a payload is cut in a launch of `rows` rows; `stages`: of loops over several rows, None without them."""
        key = (load.rows.dtype, load.rows.shape[1], rows > FEW_ROWS, rows > MANY_ROWS, stages)
        if key not in self._cuts:
            tiles = row_tiles(load.encoding, load.padded, rows)
            if stages is not None:
                tiles = load.encoding.several(tiles, PUSH_COLUMNS, stages)
            self._cuts[key] = tiles, load.encoding.row(load.rows.shape[1], load.padded, tiles)
        return self._cuts[key]

    def place_cut(self) -> tuple[TileConfig, push_kernels.Row]:
        """How results are cut where they are written."""
        if "place" not in self._cuts:
            tiles = self.home.place_tiles()
            row = self.home.encoding.row(self.spec.hidden_size, self.home.padded, tiles)
            self._cuts["place"] = tiles, row
        return self._cuts["place"]

    def pull_cut(self, tokens: int, *, limited: bool) -> tuple[TileConfig, TileConfig, push_kernels.Row]:
        """How sums are cut, with all blocks and with few, and what kernels are compiled for."""
        tiles = self.home.tiles(tokens)
        key = tiles.tile, limited
        if key not in self._cuts:
            few = self.home.encoding.several(tiles, PULL_COLUMNS) if limited else tiles
            self._cuts[key] = few, self.home.encoding.row(self.spec.hidden_size, self.home.padded, few)
        return tiles, *self._cuts[key]


def _offsets(layout: SlotLayout, start: int) -> dict[str, int]:
    """The offset of each payload of a region that starts at `start`."""
    return {p.name: start + at for p, at in zip(layout.payloads, layout.offsets, strict=True)}


class Launcher:
    """Launches kernels for one rank (or for several virtual ones) in one workspace."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        layout: WorkspaceLayout,
        control: ControlLayout,
        rank: int,
        deadline: float,
        max_tokens: int,
        *,
        ranks: int = 1,
        sms: int | None = None,
        most_waiting: int = MOST_WAITING_BLOCKS,
    ) -> None:
        self._most_waiting = most_waiting
        self.layout, self.control, self.rank, self.ranks = layout, control, rank, ranks
        self.sms, self._limited = (
            sms,
            sms is not None,
        )  # multiprocessors that a rank's kernels may take; None: all
        self.world, self.device = len(buffers), buffers[rank].device
        self.wide = triton.next_power_of_2(self.world)
        addresses = [buffer.data_ptr() for buffer in buffers]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        # In the host's memory: the host looks here without waiting for the device.
        self.host_status = torch.zeros(ranks, STATUS_WORDS, dtype=torch.int64, pin_memory=on_gpu)
        self.deadline = int(deadline * 1e9)
        # By layer: its placement, and the tables of it that kernels read.
        self._tables: dict[str, tuple[Placement, tuple[Tensor, Tensor]]] = {}
        # By layer, region and most tokens: what its launches have in common.
        self._layers: dict[tuple[str, int, int], LayerLaunches] = {}
        # The counts that the chunks of a batch exchange in `assign`, each with its round.
        self.max_tokens = max_tokens
        shape = (ranks * _chunks(max_tokens), self.world)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=self.device)
        # Triton's interpreter has no early launches, and neither have GPUs before Hopper.
        early = on_gpu and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self._early, self._options = early, {"launch_pdl": True} if early else {}
        staged = on_gpu and _shared_memory(self.device) >= _SHARED_FOR_STAGES
        self._push_stages = PUSH_STAGES if staged else 1

    def on_device(self) -> AbstractContextManager[Any]:
        """A context in which kernels are launched on the device of the workspace."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def layer(self, slots: DispatchSlots) -> LayerLaunches:
        """What the launches of a layer have in common; made anew only if its spec has changed."""
        key = (slots.spec.layer, slots.region, slots.max_tokens)
        known = self._layers.get(key)
        if known is None or known.spec is not slots.spec:
            known = self._layers[key] = LayerLaunches(self, slots)
        return known

    def launch_each_kernel(self, spec: ExchangeSpec) -> None:
        """Launch every kernel that a layer's round trips can launch, once; nothing is moved."""
        layer = self.layer(DispatchSlots(spec=spec, region=0, max_tokens=spec.max_tokens))
        x_TH = torch.zeros(1, spec.hidden_size, dtype=spec.dtype, device=self.device)
        ids_TK = torch.full((1, spec.top_k), -1, dtype=torch.int32, device=self.device)
        slots_TW = torch.full((1, self.world), -1, dtype=torch.int32, device=self.device)
        extra = {
            payload.name: torch.zeros(1, payload.width, dtype=payload.dtype, device=self.device)
            for payload in spec.extra
        }
        choice_counts = torch.zeros(spec.num_experts + 1, dtype=torch.int64, device=self.device)
        batch = push_kernels.Batch(ids_TK, ids_TK.float(), *layer.tables, slots_TW)
        # Rows may come encoded, or unencoded if a kernel can encode the wire: both are loaded.
        forms: list[EncodedRows | Tensor] = [
            spec.rows(spec.wire.empty_payloads(1, spec.hidden_size, self.device))
        ]
        if layer.wire is not None:
            forms.append(x_TH)
        most = spec.max_tokens * self.ranks
        for rows in forms:
            loads = layer.loads(rows, extra)
            if len(loads) == 1:
                for tokens in {min(FEW_ROWS + 1, most), 1}:
                    self._push(layer, loads[0], batch, -1, choice_counts, whole=True, sized_for=tokens)
            if len(loads) > 1 or spec.max_tokens > LONGEST_WHOLE:
                self._assign(layer, batch, -1, choice_counts)
                for tokens in {min(many, most) for many in (1, FEW_ROWS + 1, MANY_ROWS + 1)}:
                    for load in loads:
                        self._push(layer, load, batch, -1, None, whole=False, sized_for=tokens)
        self.signal_and_wait(-1, Phase.DISPATCH, early=self._early)
        if self._early:
            self.signal_and_wait(-1, Phase.DISPATCH)
        for dtype in {torch.float32, spec.dtype}:
            results = torch.zeros(0, spec.hidden_size, dtype=dtype, device=self.device)
            self._place(layer, results, dense=True, places_N=ids_TK.long() if spec.sums_choices else None)
        owners_TK = ids_TK if spec.sums_choices else None
        out_TH = x_TH.to(spec.sum_dtype or spec.dtype)
        pull = partial(self._pull, layer, slots_TW, add=(), tokens=-1, owners_TK=owners_TK)
        for tokens, meets in {(1, True), (1, False), (spec.max_tokens, False)}:
            pull(out_TH, meets=meets, sized_for=tokens)
            if self._limited and not meets:
                begun, ended = self._begun(out_TH), torch.zeros(1, dtype=torch.int32, device=self.device)
                pull(begun.totals, ended=ended, begun=begun, sized_for=tokens)
                pull(out_TH, begun=begun, limited=False, sized_for=tokens)

    def table(self, spec: ExchangeSpec) -> tuple[Tensor, Tensor]:
        """The tables of where a layer's experts are. A new placement overwrites the old one, as CUDA graphs read it."""
        placement = spec.placement
        if self.ranks > 1 and placement.has_replicas:
            raise InputError(
                f"a shared launch of {self.ranks} ranks, and {placement}",
                expected="experts without replicas: which one a token meets depends on its rank",
                fix="launch the ranks one by one",
            )
        known, table = self._tables.get(spec.layer, (None, None))
        if table is None or known != placement:
            made = expert_table(placement, self.rank, most_copies=self.world if spec.movable else 1)
            if table is not None and table[0].shape == made[0].shape:
                for old, new in zip(table, made, strict=True):
                    old.copy_(new)
            else:
                table = made[0].to(self.device), made[1].to(self.device)
            self._tables[spec.layer] = placement, table
        return table

    # -- Dispatch ------------------------------------------------------------------------------------------

    def dispatch(
        self,
        slots: DispatchSlots,
        rows: EncodedRows | Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        extra: Mapping[str, Tensor],
        *,
        choice_counts: Tensor | None = None,
        waits: bool = True,
    ) -> Tensor:
        """Push a batch to its ranks; return the slot of each token on each rank, `[T, W]`, -1 where it does not go.

        `choice_counts` `[1 + E]`: the batch's choices are added there, those of expert e at index 1 + e.
        """
        layer, tokens = self.layer(slots), ids_TK.shape[0] // self.ranks
        slots_TW = torch.empty(ids_TK.shape[0], self.world, dtype=torch.int32, device=self.device)
        ids_TK, weights_TK = aligned(narrow(ids_TK)), aligned(weights_TK.float())
        batch = push_kernels.Batch(ids_TK, weights_TK, *layer.tables, slots_TW)
        loads = layer.loads(rows, extra)
        if len(loads) == 1 and tokens <= LONGEST_WHOLE:
            self._push(layer, loads[0], batch, tokens, choice_counts, whole=True, waits=waits)
            return slots_TW
        self._assign(layer, batch, tokens, choice_counts)
        for load in loads:
            self._push(layer, load, batch, tokens, None, whole=False, waits=waits)
        self.signal_and_wait(layer.flag, Phase.DISPATCH, waits=waits, early=self._early)
        return slots_TW

    def signal_and_wait(
        self, layer: int, phase: Phase, *, fails: int = 0, waits: bool = True, early: bool = False
    ) -> None:
        """Publish that this rank has done its part of a phase, or that it failed (1), and wait for the others.

        `fails`: 0, 1 if it failed, or 2 if it failed only in case the kernels have found bad ids.
        """
        launch(flags_kernels.signal_and_wait, (self.ranks,),
            self.peers, self.host_status, self.rank, layer, phase_number(phase), int(fails), self.deadline,
            WORLD=self.world, WIDE=self.wide, TURNS=self.control.turns, WAITS=waits, EARLY=early, num_warps=1,
            **(self._options if early else {}),
        )  # fmt: skip

    def _blocks(self, items: int) -> int:
        """The number of blocks for these items: one each, but no more than the multiprocessors allowed (`sms`)."""
        return items if self.sms is None else min(items, self.sms)

    def _assign(
        self, layer: LayerLaunches, batch: push_kernels.Batch, tokens: int, choice_counts: Tensor | None
    ) -> None:
        chunks, others = _chunks(tokens), _chunks(layer.max_tokens) if tokens >= 0 else 1
        blocks = self._blocks(chunks + others)
        launch(push_kernels.assign, (blocks * self.ranks,),
            batch, self._counts, choice_counts, self.peers, self.host_status,
            *self._sizes(layer, tokens, blocks), *layer.places[None], chunks, others, _chunks(self.max_tokens),
            LAYER=layer.layer, EARLY=self._early, LIMITED=self._limited, num_warps=4, **self._options,
        )  # fmt: skip

    def _push(
        self,
        layer: LayerLaunches,
        load: Load,
        batch: push_kernels.Batch,
        tokens: int,
        choice_counts: Tensor | None,
        *,
        whole: bool,
        waits: bool = True,
        sized_for: int | None = None,
    ) -> None:
        """Push one payload. `sized_for`: where only the kernel is loaded, the number of rows for which it is chosen."""
        rows = tokens * self.ranks if sized_for is None else sized_for
        tiles, row = layer.push_cut(load, rows, self._push_stages if self._limited and not whole else None)
        row_parts = max(0, tokens) * tiles.parts
        others = _chunks(layer.max_tokens) if whole and tokens >= 0 else int(tokens <= 0)
        blocks = self._blocks(-(-row_parts // tiles.rows) + others)
        launch(push_kernels.push, (blocks * self.ranks,),
            load.rows, batch, choice_counts, self.peers, self.host_status,
            *self._sizes(layer, tokens, blocks), *layer.places[load.name], row_parts, others, layer.flag,
            load.encoding.global_scale, self.deadline, LAYER=layer.layer, ROW=row, TURNS=self.control.turns,
            WHOLE=whole, WAITS=waits, EARLY=self._early, LIMITED=self._limited,
            num_warps=tiles.warps, enable_fp_fusion=False, **self._options,
        )  # fmt: skip

    def _sizes(self, layer: LayerLaunches, tokens: int, blocks: int) -> push_kernels.Sizes:
        return push_kernels.Sizes(tokens, layer.max_tokens, self.rank, blocks, layer.spec.num_experts)

    # -- Combine -------------------------------------------------------------------------------------------

    def choices_at_home(self, spec: ExchangeSpec, slots_TW: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """`(slots_TK, owners_TK)`: where the result of each choice is, and on which rank; slot -1 for no expert."""
        experts, copies = self.table(spec)
        known_TK = (ids_TK >= 0) & (ids_TK < spec.num_experts)
        turn_T1 = ids_TK.clamp(min=0).long().sum(dim=1, keepdim=True)  # as the kernels' `owners`
        id_TK = torch.where(known_TK, ids_TK, 0).long()
        entry_TK = experts[id_TK, turn_T1 % copies[id_TK]]
        served_TK = known_TK & (entry_TK >= 0)
        owners_TK = torch.where(served_TK, entry_TK >> push_kernels.RANK_BITS.value, 0)
        choice_K = torch.arange(spec.top_k, device=self.device)
        slot_TK = slots_TW.gather(1, owners_TK.long()) * spec.top_k + choice_K
        return torch.where(served_TK, slot_TK, -1).int(), owners_TK.int()

    def sum(
        self,
        slots: DispatchSlots,
        home_slots: Tensor,
        out_TH: Tensor,
        add: Sequence[Tensor] = (),
        *,
        owners_TK: Tensor | None = None,
        just_placed: bool,
        waits: bool = True,
        one_block_waits: bool = False,
        before_adding: Callable[[], None] | None = None,
        ended: Tensor | None = None,
        reports_bad_ids: bool = False,
    ) -> None:
        """Wait for the other ranks, and write this rank's sums into `out_TH`; `just_placed`: `place` wrote the results.

        `home_slots`: the slot of each token on each rank; or, with `owners_TK`, of each choice (`choices_at_home`).
        `before_adding` is called in front of the launch that reads `add`, which may still be computed; `ended` becomes
        1 when it is. With `reports_bad_ids` ranks whose ids were bad say so where all meet, and no rank has a result.
        """
        layer, tokens = self.layer(slots), out_TH.shape[0] // self.ranks
        few = self._blocks(tokens * layer.home.tiles(tokens).parts) <= self._most_waiting
        apart = just_placed or one_block_waits or before_adding is not None or reports_bad_ids or not waits
        meets = few and not apart
        if not meets:
            early = self._early and not just_placed
            self.signal_and_wait(
                layer.flag, Phase.COMBINE, fails=2 * reports_bad_ids, waits=waits, early=early
            )
        pull = partial(self._pull, layer, home_slots, tokens=tokens, owners_TK=owners_TK)
        begun = None
        if before_adding is not None and add and self.sms is not None:
            # With few multiprocessors sums are slow. They start while the terms are computed; all finish them later.
            begun = self._begun(out_TH)
            pull(begun.totals, (), ended=ended, begun=begun)
        if before_adding is not None:
            before_adding()
        pull(out_TH, add, meets=meets, begun=begun, limited=begun is None)

    def _begun(self, out_TH: Tensor) -> pull_kernels.Begun:
        """Memory for the sums that a launch on few multiprocessors begins."""
        assert self.sms is not None
        return pull_kernels.Begun(
            torch.empty_like(out_TH, dtype=torch.float32),
            torch.empty(self.ranks * self.sms, dtype=torch.int32, device=self.device),
        )

    def place(
        self, slots: DispatchSlots, results: Tensor, *, dense: bool, places_N: Tensor | None = None
    ) -> None:
        """Write results into this rank's combine region; `places_N`: the place of each, if rows have one per choice."""
        self._place(self.layer(slots), results, dense=dense, places_N=places_N)

    def _place(self, layer: LayerLaunches, results: Tensor, *, dense: bool, places_N: Tensor | None) -> None:
        (tiles, row), rows = layer.place_cut(), results.shape[0] // self.ranks
        blocks = self._blocks(max(1, rows))
        launch(pull_kernels.place, (blocks * self.ranks,),
            aligned(results), places_N, self.peers, rows, layer.max_tokens, self.rank, blocks, int(dense),
            *layer.home.places, layer.home.encoding.global_scale, ROW=row, WORLD=self.world, WIDE=self.wide,
            LIMITED=self._limited, num_warps=tiles.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _pull(
        self,
        layer: LayerLaunches,
        home_slots: Tensor,
        out_TH: Tensor,
        add: Sequence[Tensor],
        tokens: int,
        *,
        owners_TK: Tensor | None = None,
        meets: bool = False,
        ended: Tensor | None = None,
        begun: pull_kernels.Begun | None = None,
        limited: bool = True,
        sized_for: int | None = None,
    ) -> None:
        """Launch `pull`: if `limited`, with few blocks that write into `begun` until `ended`; else with all blocks."""
        tiles, few, row = layer.pull_cut(tokens if sized_for is None else sized_for, limited=self._limited)
        blocks_before, limited = (
            self._blocks(max(1, -(-tokens // few.rows) * few.parts)),
            limited and self._limited,
        )
        blocks = blocks_before if limited else max(1, tokens * tiles.parts)
        terms, spec = [*map(aligned, add), out_TH, out_TH], layer.spec
        owners = home_slots if owners_TK is None else owners_TK
        launch(pull_kernels.pull, (blocks * self.ranks,),
            out_TH, terms[0], terms[1], home_slots, owners, self.peers, self.host_status, ended, begun,
            tokens, layer.max_tokens * spec.results_per_row, self.rank, blocks, blocks_before, layer.flag, len(add),
            *layer.home.places, layer.home.encoding.global_scale, self.deadline, ROW=row, WORLD=self.world,
            WIDE=self.wide, TURNS=self.control.turns, MEETS=meets, EARLY=self._early,
            CHOICES=0 if owners_TK is None else spec.top_k, LIMITED=limited,
            num_warps=few.warps if limited else tiles.warps, enable_fp_fusion=False, **self._options,
        )  # fmt: skip
