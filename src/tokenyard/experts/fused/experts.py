"""Experts for NVIDIA GPUs: a few kernels that compute, from the rows that arrived, the results that `combine` reads.

    sort pairs, cut tiles ── W13 · x, activation ── W2 · inner, weight ── sum ── the exchange's combine region

Rows are read by index out of the receive buffer, in the format in which they travelled; weights stay quantized and
are decoded in registers; results are written to the combine region if the exchange offers one. The host reads no value
from the device, so a CUDA graph can capture all of it, and no kernel is compiled for a certain number of rows.

Memory beside the weights: for each of up to R · K pairs, I numbers of 16 bits between the products, and H numbers for
the results of rows that several experts take, which are summed as `UnfinalizedRows.finish` does. If the weights are in
blocks of e4m3, the 16 bits hold two e4m3 numbers, and 128 columns share a scale (`kernels.fp8_split`); with an inner
format they are 8 bits, one e4m3 code.

**How weights are held.** In the payloads of their format, with two exceptions: 4-bit weights are packed on Hopper
(`packing`), and mxfp8 weights become blocks of e4m3 on GPUs whose tensor cores multiply e4m3 (`recoding`). Rows of
mxfp8 are then recoded by a kernel of their own, into H bytes for each of the R rows (`kernels.row_blocks`).

**Long batches of mxfp4.** If the layer has an inner format, and rows arrive in mxfp8, products of e4m3 can be used,
which take half the time of those of bf16. From `tile_table.CODES_FROM` rows per expert on, packed weights are decoded
to e4m3 codes as they are multiplied (`kernels.packed_codes`). For still more rows they are expanded to blocks of e4m3
before, in memory that is free again when the call returns (`scratch_bytes`, `kernels.expanding`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from tokenyard.errors import ContractError, InputError, Reason
from tokenyard.experts.base import Experts, local_routes
from tokenyard.experts.fused import packing, recoding
from tokenyard.experts.fused.kernel_choice import (
    can_run_codes,
    can_run_expanded,
    can_run_packed,
    can_run_recoded,
    can_run_specialized,
    has_blocks,
    interprets,
    takes_e4m3,
)
from tokenyard.experts.fused.packing import PackedMatrix
from tokenyard.experts.fused.tile_configs import (
    CodesTileConfig,
    TileConfig,
    TileConfigs,
    choose_packed_tiles,
    choose_tiles,
    expected_pairs,
)
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import WEIGHT_DTYPES, ExpertWeights
from tokenyard.formats import FORMATS, Fp8Block128, QuantizedMatrix, for_dtype, weight_format
from tokenyard.formats.base import EncodedRows
from tokenyard.rows import ExpertRows, PlacedRows, ReceivedRows, UnfinalizedRows

if TYPE_CHECKING:
    from tokenyard.experts.fused.operands import Destination

# The names of the buffers that hold a matrix: as given, packed, or recoded.
_GIVEN = ("data", "scales")
_PACKED = ("words", "word_scales")
_RECODED = ("blocks", "block_scales")


class FusedExperts(Experts):
    """Experts computed by Triton kernels on a GPU."""

    name = "fused"
    # The weight formats that the kernels can decode.
    weight_formats = ("bf16", "fp16", "fp32", "fp8_block128", "mxfp8", "nvfp4", "mxfp4", "mxint4")
    inner_formats = (Fp8Block128.name,)
    devices = ("cuda",)
    batch_invariant = ("cuda",)  # by using the tiles of long batches for all batches
    skips_empty_slots = True
    tile_configs: TileConfigs | None = None  # tiles that a benchmark sets; None: chosen for each batch
    recodes: bool = True  # whether mxfp8 weights are held as blocks of e4m3 where that is faster
    expands: bool = True  # whether packed mxfp4 weights are expanded to such blocks for calls with many rows

    def __init__(self, spec: ExpertsSpec, weights: ExpertWeights, *, adopt: bool = False) -> None:
        super().__init__(spec, weights, adopt=adopt)
        self._hold_for_kernels()

    @property
    def is_packed(self) -> bool:
        """Whether weights are held in the order of Hopper's tensor cores."""
        return "w2_words" in self._buffers

    @property
    def is_recoded(self) -> bool:
        """Whether mxfp8 weights are held as blocks of e4m3 (`recoding`)."""
        return "w2_blocks" in self._buffers

    @property
    def is_expandable(self) -> bool:
        """Whether packed weights can be expanded to blocks of e4m3 within the error bound of `recoding`."""
        return "w2_bases" in self._buffers

    @property
    def has_codes(self) -> bool:
        """Whether packed weights can be decoded to e4m3 codes without rounding."""
        return "w2_largest" in self._buffers

    @property
    def held_format(self) -> str:
        """The format of the weights that the kernels read: that of the spec, or `fp8_block128` if they are recoded."""
        return "fp8_block128" if self.is_recoded else self.spec.weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weights with the model, and pack, recode or restore them as the kernels of the new device need."""
        super()._apply(fn, recurse)
        device = next(self.buffers()).device
        if (self.is_packed and device.type != "cuda") or (self.is_recoded and not takes_e4m3(device)):
            self._hold_as_given()
        self._hold_for_kernels()
        return self

    def _hold_as_given(self) -> None:
        """Replace packed or recoded weights by the payloads of their format."""
        for name in ("w13", "w2"):
            matrix = self._part(name, self.spec.shapes()[name])
            assert isinstance(matrix, QuantizedMatrix)
            held = _PACKED if self.is_packed else _RECODED
            for derived in (f"{name}_bases", f"{name}_largest"):
                if derived in self._buffers:
                    delattr(self, derived)
            self._replace(name, held, {payload: matrix.payloads[payload] for payload in _GIVEN})

    def _hold_for_kernels(self) -> None:
        """Pack or recode the weights, if that is faster on this device; the given payloads are dropped."""
        if self.is_packed or self.is_recoded:
            return
        is_packed = can_run_packed(self.spec, self.weights)
        if not is_packed and not (self.recodes and can_run_recoded(self.spec, self.weights)):
            return
        expands = is_packed and self.expands and can_run_expanded(self.spec, self.weights)
        largest = self._largest_scales(self.weights) if is_packed and can_run_codes(self.spec) else {}
        for name in ("w13", "w2"):
            matrix = self._part(name, self.spec.shapes()[name])
            assert isinstance(matrix, QuantizedMatrix)
            if largest:
                self.register_buffer(f"{name}_largest", largest[name], persistent=False)
            if expands:
                bases = recoding.block_scales(matrix, matrix.device)
                self.register_buffer(f"{name}_bases", bases, persistent=False)
            if is_packed:
                packed = self._pack(name, matrix)
                made = dict(zip(_PACKED, (packed.words, packed.scales), strict=True))
            else:
                made = dict(zip(_RECODED, recoding.recode(matrix).payloads.values(), strict=True))
            self._replace(name, _GIVEN, made)

    def _replace(self, name: str, old: Sequence[str], new: Mapping[str, Tensor]) -> None:
        """Replace the buffers `old` of a matrix by the buffers `new`."""
        for part in old:
            delattr(self, f"{name}_{part}")
        for part, tensor in new.items():
            self.register_buffer(f"{name}_{part}", tensor)

    def _pack(self, name: str, matrix: QuantizedMatrix) -> PackedMatrix:
        is_first = name == "w13"
        return packing.pack(matrix, gated=is_first, interleaved=is_first and self.spec.activation.interleaved)

    def _largest_scales(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """The largest scale of every line of both matrices; empty if e4m3 codes cannot hold all weights."""
        found: dict[str, Tensor] = {}
        for name in ("w13", "w2"):
            matrix, is_first = getattr(weights, name), name == "w13"
            interleaved = is_first and self.spec.activation.interleaved
            largest = packing.largest_scales(matrix, gated=is_first, interleaved=interleaved)
            if largest is None:
                return {}
            found[name] = largest
        return found

    def _packed(self, name: str) -> PackedMatrix:
        """The packed matrices of all experts, as views of the buffers."""
        buffers, is_first = dict(self.named_buffers(recurse=False)), name == "w13"
        return PackedMatrix(
            self.spec.weights,
            self.spec.shapes()[name],
            is_first,
            is_first and self.spec.activation.interleaved,
            buffers[f"{name}_words"],
            buffers[f"{name}_word_scales"],
            buffers.get(f"{name}_global_scale"),
            buffers.get(f"{name}_global_factor"),
        )

    def _blocks(self, name: str) -> QuantizedMatrix:
        """The recoded matrices of all experts, as views of the buffers."""
        data, scales = (self.get_buffer(f"{name}_{part}") for part in _RECODED)
        payloads = {"data": data, "scales": scales}
        return QuantizedMatrix(
            format=weight_format("fp8_block128"), shape=tuple(data.shape), payloads=payloads
        )

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedMatrix:
        if f"{name}_words" in self._buffers:
            given = packing.unpack(self._packed(name))
        elif f"{name}_blocks" in self._buffers:
            given = recoding.give_back(self._blocks(name))
        else:
            return super()._part(name, shape)
        format = weight_format(self.spec.weights)
        others = [payload for payload in format.payloads(*shape[1:]) if payload not in given]
        payloads = given | {payload: self.get_buffer(f"{name}_{payload}") for payload in others}
        return QuantizedMatrix(format=format, shape=shape, payloads=payloads)

    def movable(self) -> dict[str, Tensor]:
        if not (self.is_packed or self.is_recoded):
            return super().movable()
        return {name: self._by_expert(name, buffer) for name, buffer in self.named_buffers(recurse=False)}

    def _by_expert(self, name: str, buffer: Tensor) -> Tensor:
        """A view of a buffer with one row per expert. (A packed buffer is flat, and has a pad at its end.)"""
        experts, outputs = self.spec.shapes()["w13" if "13" in name else "w2"][:2]
        if len(buffer) == experts:
            return buffer
        each = packing.per_matrix(buffer, experts, outputs)
        return buffer[: experts * each].view(experts, each)

    def _seen_by_kernels(self) -> ExpertWeights:
        """The weights that the kernels read if they are not packed: as given, or recoded (no copies)."""
        if not self.is_recoded:
            return self.weights
        b13, b2 = self._buffers.get("b13"), self._buffers.get("b2")
        return ExpertWeights(w13=self._blocks("w13"), w2=self._blocks("w2"), b13=b13, b2=b2)

    def _expanded(self, *, early: bool) -> ExpertWeights:
        """Expand packed weights to blocks of e4m3, in memory of this call."""
        from tokenyard.experts.fused.launch_hopper import launch_expanded

        w13, w2 = (
            launch_expanded(self._packed(name), self.get_buffer(f"{name}_bases"), early=early)
            for name in ("w13", "w2")
        )
        return ExpertWeights(w13=w13, w2=w2, b13=self._buffers.get("b13"), b2=self._buffers.get("b2"))

    @torch.no_grad()
    def load_(self, weights: ExpertWeights) -> None:
        """Replace the weights in place, so that captured CUDA graphs use the new ones."""
        if not self.is_packed and not self.is_recoded:
            super().load_(weights)
            return
        self._check_new(weights)
        for name in ("w13", "w2"):
            self._check_form(name, getattr(weights, name))
        largest = self._largest_scales(weights) if self.has_codes else {}
        if self.has_codes and not largest:
            raise InputError(
                f"the new weights have an output whose scales differ by more than 2^{packing.CODE_RANGE}",
                expected="weights that become codes of e4m3 without being rounded, as those here do",
                fix="make new experts of these weights: they will be multiplied in another way",
            )
        for name in ("w13", "w2"):
            if self.has_codes:
                self.get_buffer(f"{name}_largest").copy_(largest[name])
            if self.is_recoded:
                recoding.recode_into(getattr(weights, name), self._blocks(name))
            else:
                matrix = self._pack(name, getattr(weights, name))
                if self.is_expandable:
                    bases = self.get_buffer(f"{name}_bases")
                    bases.copy_(recoding.block_scales(getattr(weights, name), bases.device))
                self.get_buffer(f"{name}_words").copy_(matrix.words)
                self.get_buffer(f"{name}_word_scales").copy_(matrix.scales)
        for name, tensor in weights.by_name().items():
            if not name.endswith(("_data", "_scales")):
                self.get_buffer(name).copy_(tensor)

    def _check_form(self, name: str, matrix: QuantizedMatrix) -> None:
        """Raise unless a new matrix can be packed or recoded like the one that it replaces."""
        if self.is_packed and not packing.can_pack(matrix):
            largest = packing.LARGEST_SCALE[self.spec.weights]
            beyond = "below zero" if self.spec.weights == "nvfp4" else f"beyond {largest}"
            raise InputError(
                f"{name} has scales {beyond}, or that are no numbers",
                expected="scales that packed weights can hold",
                fix="make new experts of these weights: they will not be packed",
            )
        expected = self.is_recoded or self.is_expandable
        if expected and not recoding.can_recode(matrix, next(self.buffers()).device):
            raise InputError(
                f"{name} has an output that would change by more than 2^-12 of its length, or is no number",
                expected="weights that blocks of 128 × 128 can hold: scales that are not too far apart",
                fix="make new experts of these weights: they will not be recoded",
            )

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

    @torch.no_grad()
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | PlacedRows | UnfinalizedRows:
        """Sort pairs, compute both products with the activation between them, and, with `finalize`, weight and sum."""
        from tokenyard.experts.fused import launch, launch_hopper, operands

        spec, routes = self.spec, local_routes(received)
        _check_device(received)
        rows, slots_R = self._rows(received)
        ids_RK = routes.ids_RK.to(torch.int32).contiguous()
        weights_RK = routes.weights_RK.contiguous()
        num_rows, top_k = ids_RK.shape
        if top_k != spec.top_k:
            raise InputError(
                f"the routes have {top_k} choices a row",
                expected=f"{spec.top_k}, as the layer was planned for",
                fix="pass the routes of this layer",
            )
        pairs = expected_pairs(
            num_rows,
            top_k,
            spec.num_local_experts,
            spec.num_experts,
            may_be_empty=received.may_be_empty,
        )
        tiles = self.choose_tiles(pairs, rows.format.name) if self.tile_configs is None else self.tile_configs
        to, result = self._destination(received, num_rows, finalize=finalize)
        # Before the launches, so that the host waits only for the rows that arrived, not for the products.
        index_N = None if finalize else routes.pairs
        device = rows.device
        if num_rows and spec.num_local_experts:
            early = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
            expands = self.is_packed and isinstance(tiles.inner, TileConfig)
            as_codes = isinstance(tiles.inner, CodesTileConfig)
            held = "fp8_block128" if expands or as_codes else self.held_format
            inner = operands.Inner.empty(spec, to.partial_sums, tiles, held=held)
            with launch.on_device(ids_RK):
                sorted_pairs = launch.sort_on_device(
                    ids_RK, spec.num_local_experts, tiles.inner.tile, early=early
                )
                call = operands.Launch(spec, tiles, sorted_pairs, weights_RK, early)
                if expands:
                    rows = launch.launch_row_blocks(rows, slots_R, num_rows, early=early)
                    slots_R = None
                elif self.is_packed and not as_codes and rows.format.name == "mxfp8":
                    rows = launch.launch_decoded_rows(rows, slots_R, num_rows, early=early)
                    slots_R = None
                if expands:
                    weights = self._expanded(early=early)
                    assert launch_hopper.can_specialize(rows, weights), rows.format
                    launch_hopper.launch_specialized(
                        call, rows, slots_R, weights, inner, to, finalize=finalize
                    )
                elif self.is_packed:
                    biases = (self._buffers.get("b13"), self._buffers.get("b2"))
                    largest = (self._buffers.get("w13_largest"), self._buffers.get("w2_largest"))
                    packed = launch_hopper.PackedCall(
                        self._packed("w13"), self._packed("w2"), *biases, *largest
                    )
                    if as_codes:
                        placed = launch.launch_placed_rows(call, rows, slots_R)
                        launch_hopper.launch_packed_codes(call, packed, placed, inner, to, finalize=finalize)
                    else:
                        x = rows.payloads["data"]
                        launch_hopper.launch_packed(call, packed, x, slots_R, inner, to, finalize=finalize)
                else:
                    if self._recodes_rows(rows.format.name):
                        rows, slots_R = launch.launch_row_blocks(rows, slots_R, num_rows, early=early), None
                    weights = self._seen_by_kernels()
                    wanted = tiles.specialized and can_run_specialized(spec, device)
                    if wanted and launch_hopper.can_specialize(rows, weights):
                        launch_hopper.launch_specialized(
                            call, rows, slots_R, weights, inner, to, finalize=finalize
                        )
                    else:
                        numbers = launch.before_rounding(spec, inner)
                        launch.launch_inner(call, rows, slots_R, weights, numbers)
                        launch.launch_rounding(call, numbers, inner)
                        launch.launch_result(call, weights, inner, to, finalize=finalize)
                if finalize:
                    launch.launch_sums(call, ids_RK, to)
        if result is not None:
            return result
        assert index_N is not None
        weights_N = weights_RK.reshape(-1)[index_N].float()
        return UnfinalizedRows(
            rows_NH=to.partial_sums[index_N],
            weights_N=torch.ones_like(weights_N) if spec.weight_on == "input" else weights_N,
            index_N=index_N.clone(),  # the routes keep their own tensor
            num_rows=num_rows,
            top_k=top_k,
        )

    def choose_tiles(self, pairs: float, rows: str) -> TileConfigs:
        """The tile configurations for a number of (row, expert) pairs and rows of a format."""
        experts, weights, invariant = self.spec.num_local_experts, self.held_format, self.spec.batch_invariant
        if invariant:
            pairs = math.inf  # one configuration for all batches
        if self.is_packed:
            in_codes = rows == "mxfp8" and not invariant
            expands = self.expands and self.is_expandable and in_codes
            codes = self.has_codes and in_codes
            return choose_packed_tiles(pairs, experts, weights, expands=expands, codes=codes)
        taken = weights if self._recodes_rows(rows) else rows
        specialized = can_run_specialized(self.spec, next(self.buffers()).device)
        tiles = choose_tiles(pairs, experts, weights, rows=taken, specialized=specialized)
        return tiles.without_tails() if invariant else tiles

    def _recodes_rows(self, rows: str) -> bool:
        """Whether rows of this format are recoded to blocks of e4m3, because the weights are such blocks."""
        return self.is_recoded and rows == "mxfp8"

    def _rows(self, received: ReceivedRows) -> tuple[EncodedRows, Tensor | None]:
        """The rows in a format that the kernels read, and the slot of each row, if they are in a workspace."""
        rows = received.rows
        as_arrived = self.spec.rows is None or rows.format == self.spec.rows
        taken = ("bf16", "mxfp8") if self.is_packed else FORMATS
        if as_arrived and rows.format.name in taken and rows.scale_layout == "linear":
            return rows, received.slots_R
        dtype = torch.bfloat16 if self.is_packed else self.spec.dtype
        return for_dtype(dtype).encode(self.incoming(received, dtype)), None

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
