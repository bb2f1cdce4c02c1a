"""Experts for NVIDIA GPUs: a few kernels that compute, from the rows that arrived, the results that `combine` reads.

    sort pairs, cut tiles ── W13 · x, activation ── W2 · inner, weight ── sum ── the exchange's combine region

Rows are read by index out of the receive buffer, in the format in which they travelled; weights stay quantized and
are decoded in registers; results are written to the combine region if the exchange offers one. The host reads no value
from the device, so a CUDA graph can capture all of it, and no kernel is compiled for a certain number of rows.

Memory in addition to the weights: for each of up to R · K pairs, I numbers of 16 bits between the products, and H
numbers for the results of rows that several experts take, which are summed as `UnfinalizedRows.finish` does. If the
weights are in blocks of e4m3, the 16 bits hold two e4m3 numbers, and 128 columns share a scale (`kernels.fp8_split`);
with an inner format they are 8 bits, one e4m3 code.

**How weights are held** is said in `kernel_weights`. If mxfp8 weights became blocks of e4m3, rows of mxfp8 are recoded
by a kernel of their own, into H bytes for each of the R rows (`kernels.row_blocks`).

**Long batches of mxfp4.** If the layer has an inner format, and rows arrive in mxfp8, products of e4m3 can be used,
which take half the time of those of bf16. From `tile_table.CODES_FROM` rows per expert on, packed weights are decoded
to e4m3 codes as they are multiplied (`kernels.packed_codes`). For still more rows they are expanded to blocks of e4m3
before, in memory that is free again when the call returns (`scratch_bytes`, `kernels.expanding`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenyard.errors import ContractError, InputError, Reason
from tokenyard.experts.base import Experts, local_routes
from tokenyard.experts.fused.boxes import UNITS
from tokenyard.experts.fused.kernel_choice import can_run_specialized, has_blocks, interprets
from tokenyard.experts.fused.kernel_weights import KernelWeights
from tokenyard.experts.fused.paths import Path, of_call
from tokenyard.experts.fused.tile_configs import (
    TileConfigs,
    choose_packed_tiles,
    choose_tiles,
    expected_pairs,
)
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import WEIGHT_DTYPES, ExpertWeights
from tokenyard.formats import FORMATS, Fp8Block128, for_dtype
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import aligned, kernel_device
from tokenyard.rows import ExpertRows, PlacedRows, ReceivedRows, UnfinalizedRows

if TYPE_CHECKING:
    from tokenyard.experts.fused.launch_hopper import PackedCall
    from tokenyard.experts.fused.operands import Destination, Launch


class FusedExperts(KernelWeights):
    """Experts computed by Triton kernels on a GPU."""

    name = "fused"
    # The weight formats that the kernels can decode.
    weight_formats = ("bf16", "fp16", "fp32", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "mxint4")
    inner_formats = (Fp8Block128.name,)
    devices = ("cuda",)
    batch_invariant = ("cuda",)  # by using the tiles of long batches for all batches
    skips_empty_slots = True
    tile_configs: TileConfigs | None = None  # tiles that a benchmark sets; None: chosen for each batch

    def _expanded(self, *, early: bool) -> ExpertWeights:
        """Expand packed weights to blocks of e4m3, in memory of this call."""
        from tokenyard.experts.fused.launch_hopper import launch_expanded

        w13, w2 = (
            launch_expanded(self._packed(name), self.get_buffer(f"{name}_bases"), early=early)
            for name in ("w13", "w2")
        )
        return ExpertWeights(w13=w13, w2=w2, b13=self._buffers.get("b13"), b2=self._buffers.get("b2"))

    @classmethod
    def scratch_bytes(cls, spec: ExpertsSpec) -> int:
        """A byte for each mxfp4 weight of a rank, if they are expanded to blocks of e4m3 for long batches; else 0.

        Only Hopper uses these bytes. A class with `expands = False` does not.
        """
        wanted = cls.expands and spec.weights == "mxfp4" and has_blocks(spec)
        return sum(math.prod(spec.shapes()[name]) for name in ("w13", "w2")) if wanted else 0

    @classmethod
    def runs_on(cls, device: torch.device) -> Reason | None:
        """None on a GPU, or where Triton interprets its kernels, if Triton is installed; else the reason.

        Only `runs_on` depends on the machine; `supports` gives the same answer everywhere.
        """
        why = None
        if super().runs_on(device) is not None and not interprets():
            why = f"its kernels need a GPU, and rows are on {device}"
        elif importlib.util.find_spec("triton") is None:
            why = "Triton is not installed"
        return None if why is None else Reason(field="experts", value=cls.name, why=why)

    @classmethod
    def record_launches(
        cls,
        spec: ExpertsSpec,
        received: Callable[[int], ReceivedRows],
        most_rows: int,
        *,
        finalize: bool,
        held: Experts | None = None,
    ) -> None:
        from tokenyard.experts.fused import prepared

        if spec.num_local_experts == 0:
            return
        for experts in prepared.stand_ins(cls, spec) if held is None else [prepared.stand_in_for(held)]:
            prepared.record_launches(experts, received, most_rows, finalize=finalize)

    @torch.no_grad()
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Sort pairs, compute both products with the activation between them, and, with `finalize`, weight and sum."""
        routes = local_routes(received)
        _check_device(received)
        # Before the launches, so that the host waits only for the rows that arrived, not for the products.
        index_N = None if finalize else routes.pairs
        to, result = self.launch(received, finalize=finalize)
        if result is not None:
            return result
        assert index_N is not None
        weights_N = routes.weights_RK.reshape(-1)[index_N].float()
        return UnfinalizedRows(
            rows_NH=to.partial_sums[index_N],
            weights_N=torch.ones_like(weights_N) if self.spec.weight_on == "input" else weights_N,
            index_N=index_N.clone(),  # the routes keep their own tensor
            num_rows=len(routes.ids_RK),
            top_k=self.spec.top_k,
        )

    def launch(
        self, received: ReceivedRows, *, finalize: bool
    ) -> tuple[Destination, ExpertRows | PlacedRows | None]:
        """Launch the kernels for received rows; return where they write, and the result if it is finalized."""
        from tokenyard.experts.fused import launch, operands

        spec, routes = self.spec, local_routes(received)
        rows, slots_R = self._rows(received)
        ids_RK, weights_RK = aligned(routes.ids_RK.to(torch.int32)), aligned(routes.weights_RK)
        num_rows, top_k = ids_RK.shape
        if top_k != spec.top_k:
            raise InputError(
                f"the routes have {top_k} choices a row",
                expected=f"{spec.top_k}, as the layer was planned for",
                fix="pass the routes of this layer",
            )
        tiles = self.tiles_for(num_rows, rows.format.name, may_be_empty=received.may_be_empty)
        to, result = self._destination(received, num_rows, finalize=finalize)
        if not num_rows or not spec.num_local_experts:
            return to, result
        device = kernel_device(rows.device)
        early = launch.starts_early(device)
        with launch.on_device(ids_RK):
            sorted_pairs = launch.sort_on_device(
                ids_RK, spec.num_local_experts, tiles.inner.tile, early=early
            )
            unit = UNITS[spec.weights] if self.is_boxed else 0
            call = operands.Launch(spec, tiles, sorted_pairs, weights_RK, to, early, finalize, unit)
            counted = self._launch_products(call, rows, slots_R)
            if finalize:
                launch.launch_sums(call, ids_RK, counted)
        return to, result

    def _launch_products(self, call: Launch, rows: EncodedRows, slots_R: Tensor | None) -> int:
        """Launch both products; return how many items the second one counts for each tile, for the sums."""
        from tokenyard.experts.fused import launch, launch_hopper

        device = kernel_device(rows.device)
        specialized = call.tile_configs.specialized and can_run_specialized(self.spec, device)
        path = of_call(call.tile_configs, packed=self.is_packed, specialized=specialized)
        if path is Path.PACKED_CODES:
            codes, scales = launch.launch_placed_rows(call, rows, slots_R)
            return launch_hopper.launch_packed_codes(call, self._packed_call(), codes, scales)
        if rows.format.name == "mxfp8":
            recodes, decodes = (
                path is Path.EXPANDED or self.is_recoded,
                self.is_packed or self._decodes_rows("mxfp8"),
            )
            if recodes or decodes:
                prepare = launch.launch_row_blocks if recodes else launch.launch_decoded_rows
                rows, slots_R = prepare(rows, slots_R, call.weights_RK.shape[0], early=call.early), None
        if path in (Path.PACKED_NUMBERS, Path.PACKED):
            return launch_hopper.launch_packed(call, self._packed_call(), rows.payloads["data"], slots_R)
        weights = self._expanded(early=call.early) if path is Path.EXPANDED else self._seen_by_kernels()
        if path is not Path.PRODUCTS and launch_hopper.can_specialize(rows, weights):
            return launch_hopper.launch_specialized(call, rows, slots_R, weights)
        assert path is not Path.EXPANDED, rows.format
        return launch.launch_products(call, rows, slots_R, weights)

    def _packed_call(self) -> PackedCall:
        """The packed weights, and what goes with them, as views of the buffers."""
        from tokenyard.experts.fused.launch_hopper import PackedCall

        others = (self._buffers.get(name) for name in ("b13", "b2", "w13_largest", "w2_largest"))
        return PackedCall(self._packed("w13"), self._packed("w2"), *others)

    def tiles_for(self, num_rows: int, rows: str, *, may_be_empty: bool) -> TileConfigs:
        """The tile configurations for a number of rows, which have the format `rows`."""
        if self.tile_configs is not None:
            return self.tile_configs
        spec = self.spec
        pairs = expected_pairs(
            num_rows, spec.top_k, spec.num_local_experts, spec.num_experts, may_be_empty=may_be_empty
        )
        return self.choose_tiles(pairs, rows)

    def choose_tiles(self, pairs: float, rows: str) -> TileConfigs:
        """The tile configurations for a number of (row, expert) pairs and rows of a format."""
        experts, weights, invariant = self.spec.num_local_experts, self.held_format, self.spec.batch_invariant
        if invariant:
            pairs = math.inf  # one configuration for all batches
        if self.is_packed:
            in_codes = rows == "mxfp8" and not invariant
            expands = self.expands and self.is_expandable and in_codes
            codes = self.has_codes and in_codes
            rounds = self.spec.inner is not None
            return choose_packed_tiles(pairs, experts, weights, expands=expands, codes=codes, rounds=rounds)
        taken = weights if self._recodes_rows(rows) or self._decodes_rows(rows) else rows
        specialized = can_run_specialized(self.spec, kernel_device(next(self.buffers()).device))
        tiles = choose_tiles(
            pairs, experts, weights, rows=taken, specialized=specialized, boxed=self.is_boxed
        )
        return tiles.without_tails() if invariant else tiles

    def _recodes_rows(self, rows: str) -> bool:
        """Whether rows of this format are recoded to blocks of e4m3, because the weights are such blocks."""
        return self.is_recoded and rows == "mxfp8"

    def _decodes_rows(self, rows: str) -> bool:
        """Whether rows of this format are decoded to bf16 before the products, which is exact.

        Specialized warps multiply rows in the format of the weights, and boxes are for them.
        """
        return self.is_boxed and self.spec.weights == "bf16" and rows == "mxfp8"

    def _rows(self, received: ReceivedRows) -> tuple[EncodedRows, Tensor | None]:
        """The rows in a format that the kernels read, and the slot of each row, if they are in a workspace."""
        rows = received.rows
        as_arrived = self.spec.rows is None or rows.format == self.spec.rows
        taken = ("bf16", "mxfp8") if self.is_packed else FORMATS
        if as_arrived and rows.format.name in taken and rows.scale_layout == "linear":
            return rows, received.slots_R
        dtype = torch.bfloat16 if self.is_packed else self.spec.dtype
        if rows.device.type == "meta":  # launches are recorded: there are no numbers to encode anew
            numbers_RH = torch.empty(received.num_rows, self.spec.hidden_size, dtype=dtype, device="meta")
        else:
            numbers_RH = self.incoming(received, dtype)
        return for_dtype(dtype).encode(numbers_RH), None

    def _destination(
        self, received: ReceivedRows, num_rows: int, *, finalize: bool
    ) -> tuple[Destination, ExpertRows | PlacedRows | None]:
        from tokenyard.experts.fused.operands import Destination

        spec, device = self.spec, received.rows.device
        dtype = WEIGHT_DTYPES.get(spec.weights, torch.bfloat16)
        partial_sums = torch.empty(num_rows * spec.top_k, spec.hidden_size, dtype=dtype, device=device)
        if not finalize:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ContractError(
                    "fused experts were captured without finalizing",
                    expected="results that are weighted and summed by the experts: only these have a fixed shape",
                    fix="run this layer outside of the CUDA graph",
                )
            return Destination(partial_sums, None, partial_sums), None
        buffer = received.results
        if buffer is not None:
            return Destination(buffer.rows_SH, buffer.slots_R, partial_sums), buffer.placed()
        # Rows without an expert on this rank have the result zero.
        out = torch.zeros(num_rows, spec.hidden_size, device=device)
        return Destination(out, None, partial_sums), ExpertRows(rows_RH=out)


def _check_device(received: ReceivedRows) -> None:
    device = received.rows.device
    if FusedExperts.runs_on(device) is not None:
        raise InputError(
            f"fused experts were given rows on {device}",
            expected="rows on a GPU",
            fix="use experts='grouped', which run anywhere",
        )
