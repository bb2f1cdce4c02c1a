"""Launching the kernels: what rows, weights and routes mean to them.

Nothing here reads a value from the device, and nothing is compiled for a number of rows: a batch of another size
launches the same kernels, on other grids, or kernels of another cut.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenyard.experts.base import ExpertsSpec, ExpertWeights
from tokenyard.experts.fused import packing
from tokenyard.experts.fused.cuts import SPLIT_BLOCK, Cut, Cuts, PackedCut
from tokenyard.experts.fused.kernels import (
    arguments,
    boxed,
    decoding,
    digits,
    products,
    row_blocks,
    rows_first,
    rows_first_result,
    sorting,
    summing,
)
from tokenyard.experts.fused.packing import PackedMatrix
from tokenyard.formats import Fp8Block128, QuantizedMatrix, for_dtype, weight_format
from tokenyard.formats.base import EncodedRows

# Pairs of a chunk; of one chunk, every block counts all by itself.
CHUNK = 1024
# The most blocks that share the experts of a chunk.
SHARED_BY = 4

_FORMATS = {
    "fp8_block128": decoding.FP8_BLOCK,
    "mxfp8": decoding.MXFP8,
    "nvfp4": decoding.NVFP4,
    "mxfp4": decoding.MXFP4,
    "mxint4": decoding.MXINT4,
}
_ACTIVATIONS = {
    "swiglu": products.SWIGLU,
    "gelu": products.GELU,
    "gelu_tanh": products.GELU_TANH,
    "relu2": products.RELU2,
    "swiglu_clamped": products.SWIGLU_CLAMPED,
}
_ROWS_FIRST = (decoding.PLAIN.value, decoding.FP8_BLOCK.value)
_KINDS = {"fp16": tl.float16, "fp32": tl.float32}


def _activation(spec: ExpertsSpec) -> dict[str, Any]:
    """The activation as both kinds of kernels take it."""
    activation = spec.activation
    constants = {"limit": 0.0, "alpha": 0.0, "up_shift": 0.0} | dict(activation.parameters)
    return {
        "ACTIVATION": _ACTIVATIONS[activation.name].value,
        "LIMIT": constants["limit"],
        "ALPHA": constants["alpha"],
        "SHIFT": constants["up_shift"],
    }


def launch_options(early: bool) -> dict[str, bool]:
    """How a kernel is launched that may start before its predecessor has ended."""
    return {"launch_pdl": True} if early else {}


class Matrices(NamedTuple):
    """The matrices of one product as the kernels take them."""

    format: int
    data: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    global_factor: Tensor | None
    stride: int  # elements of a line of `data`
    width: int  # inputs, with the pad
    scale_width: int

    @classmethod
    def of(cls, matrix: Tensor | QuantizedMatrix) -> Matrices:
        """Plain matrices, or those of a format."""
        if isinstance(matrix, Tensor):
            width = matrix.shape[-1]
            return cls(decoding.PLAIN.value, matrix, None, None, None, width, width, 1)
        data, scales = matrix.payloads["data"], matrix.payloads["scales"]
        format, stride = matrix.format, data.shape[-1]
        width = stride if format.name == "fp8_block128" else format.padded_size(matrix.shape[-1])
        global_scale, factor = (matrix.payloads.get(name) for name in ("global_scale", "global_factor"))
        return cls(
            _FORMATS[format.name].value, data, scales, global_scale, factor, stride, width, scales.shape[-1]
        )

    def given(self, bias: Tensor | None) -> arguments.Weights:
        """What a kernel is given of them."""
        return arguments.Weights(self.data, self.scales, self.global_scale, self.global_factor, bias)


class Rows(NamedTuple):
    """Rows as the kernels take them."""

    format: int
    data: Tensor
    scales: Tensor | None
    globals: Tensor | None
    width: int
    global_stride: int

    @classmethod
    def of(cls, rows: EncodedRows) -> Rows:
        """Rows in a format, with linear scales."""
        payloads = rows.payloads
        data = payloads["data"]
        if not rows.format.quantized:
            return cls(decoding.PLAIN.value, data, None, None, data.shape[1], 0)
        width = rows.format.padded_size(rows.hidden_size)
        format, scales = _FORMATS[rows.format.name].value, payloads["scales"]
        if rows.format.name != "nvfp4":
            return cls(format, data, scales, None, width, 0)
        g = payloads.get("global_scale")
        stride = 0 if g is None else g.stride(0)
        if g is None:
            g = torch.full((1,), rows.format.global_scale, device=data.device)  # type: ignore[attr-defined]
        return cls(format, data, scales, g, width, stride)

    def given(self, slots_R: Tensor | None) -> arguments.Rows:
        """What a kernel is given of them."""
        stride, scale_stride = self.data.stride(0), 0 if self.scales is None else self.scales.stride(0)
        return arguments.Rows(
            self.data, self.scales, self.globals, slots_R, stride, scale_stride, self.global_stride
        )


@dataclass(frozen=True)
class SortedOnDevice:
    """The pairs of a batch by expert, and their tiles, on the device."""

    order_N: Tensor
    tiles: Tensor
    how_many: Tensor
    max_tiles: int
    # Held until the call ends: kernels that start early may write to memory that is free while the sort still reads it.
    counts: Tensor | None


# Triton's interpreter changes the language while it runs a kernel: ranks that are threads take turns.
_INTERPRETER = threading.RLock()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the tensor's GPU. (The interpreter has none.)"""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else _INTERPRETER


def sort_on_device(ids_RK: Tensor, experts: int, tile: int, *, early: bool) -> SortedOnDevice:
    """Sort the pairs of a batch by expert and cut them into tiles, without looking at them."""
    (rows, top_k), device = ids_RK.shape, ids_RK.device
    pairs, choices = rows * top_k, triton.next_power_of_2(top_k)
    bins, chunks = triton.next_power_of_2(experts + 1), triton.cdiv(rows, CHUNK // choices)
    max_tiles = min(pairs, pairs // tile + experts)
    order_N = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(5 * max_tiles + 1, dtype=torch.int32, device=device)
    how_many = tiles[5 * max_tiles :]
    sizes, launch = (experts, bins, top_k, choices, CHUNK), launch_options(early)
    if chunks == 1:
        sorting.sort_pairs[(experts,)](
            ids_RK, order_N, tiles, how_many, rows, max_tiles, *sizes, tile, early, num_warps=4, **launch
        )
        return SortedOnDevice(order_N, tiles, how_many, max_tiles, None)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    sorting.count_chunks[(chunks,)](ids_RK, counts, rows, *sizes, early, num_warps=4, **launch)
    share = 4 * triton.cdiv(experts, 4 * SHARED_BY)
    sorting.place_chunks[(chunks, triton.cdiv(experts, share))](
        ids_RK,
        counts,
        order_N,
        tiles,
        how_many,
        rows,
        max_tiles,
        *sizes,
        tile,
        early,
        share,
        num_warps=4,
        **launch,
    )
    return SortedOnDevice(order_N, tiles, how_many, max_tiles, counts)


def product_kind(weights: str, device: torch.device) -> Any:
    """The type in which numbers are multiplied. (The interpreter knows float32 alone.)"""
    return tl.float32 if device.type == "cpu" else _KINDS.get(weights, tl.bfloat16)


def blocks_for(items: int, device: torch.device) -> int:
    """How many blocks to launch for at most so many items: one each, or some that take them in turn."""
    if device.type == "cpu":
        return max(1, min(items, 4))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(items, processors * 16))


class Launch(NamedTuple):
    """What both products share in one call."""

    spec: ExpertsSpec
    cuts: Cuts
    sorted: SortedOnDevice
    weights_RK: Tensor
    early: bool

    @property
    def options(self) -> Mapping[str, bool]:
        """How a kernel is launched that may start before its predecessor has ended."""
        return launch_options(self.early)

    @property
    def routes(self) -> arguments.Routes:
        """What a kernel is given of the routes."""
        found = self.sorted
        return arguments.Routes(found.order_N, found.tiles, found.how_many, found.max_tiles, self.weights_RK)

    def layer(self, rows: int, weights: int, inner: Inner, *, finalize: bool = True) -> arguments.Layer:
        """What products of rows and weights in these formats are compiled for."""
        spec, activation = self.spec, self.spec.activation
        return arguments.Layer(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            top_k=spec.top_k,
            experts=spec.num_local_experts,
            rows=rows,
            weights=weights,
            kind=product_kind(spec.weights, inner.data.device),
            weight_on_input=spec.weight_on == "input",
            finalize=finalize,
            gated=activation.gated,
            interleaved=activation.interleaved,
            inner=inner.held.value,
            **{name.lower(): value for name, value in _activation(spec).items()},
        )


class Inner(NamedTuple):
    """What stands between the products, by place: numbers `[pairs, I]`, or their digits or codes (`kernels.digits`).

    Digits are e4m3 `[pairs, 2, width]`, high and low, codes `[pairs, width]`, and scales float32
    `[pairs, width / 128]`: columns are padded to whole blocks of 128.
    """

    data: Tensor
    scales: Tensor
    held: Any  # as the kernels call it

    @classmethod
    def empty(cls, spec: ExpertsSpec, left: Tensor, cuts: Cuts, *, held: str) -> Inner:
        """Room for as many pairs as `left` has: in numbers of its type; for weights in blocks of e4m3, in e4m3."""
        pairs, columns = left.shape[0], spec.intermediate_size
        if held != "fp8_block128":
            data = left.new_empty(pairs, columns)
            return cls(data, data, digits.NUMBERS)
        assert cuts.can_split, cuts
        blocks = triton.cdiv(columns, SPLIT_BLOCK)
        scales = left.new_empty(pairs, blocks, dtype=torch.float32)
        if spec.inner is None:
            data = left.new_empty(pairs, 2, blocks * SPLIT_BLOCK, dtype=torch.float8_e4m3fn)
            return cls(data, scales, digits.DIGITS)
        assert isinstance(spec.inner, Fp8Block128), spec.inner
        data = left.new_empty(pairs, blocks * SPLIT_BLOCK, dtype=torch.float8_e4m3fn)
        return cls(data, scales, digits.POWER_CODES if spec.inner.power_of_two_scales else digits.CODES)

    @property
    def is_numbers(self) -> bool:
        """Whether these are numbers of 16 or 32 bits, and not e4m3."""
        return bool(self.held == digits.NUMBERS)

    def given(self, to: Destination | None = None) -> arguments.Results:
        """What a kernel is given of what it leaves here; the second product, of where it leaves its results, too."""
        scales = None if self.is_numbers else self.scales
        if to is None:
            return arguments.Results(self.data, scales, None, None, None, 0)
        return arguments.Results(self.data, scales, to.left, to.out, to.slots_R, to.out.stride(0))


def launch_tiles(
    call: Launch,
    compute: Any,
    cut: Cut,
    given: tuple[arguments.Rows | None, arguments.Weights, arguments.Results],
    layer: arguments.Layer,
    tiles: arguments.Tiles,
    boxes: tuple[Any, Any, Any] = (None, None, None),
) -> None:
    """A product whose tiles a function of the kernels computes."""
    rows, weights, results = given
    items, stages = call.sorted.max_tiles * tiles.across, cut.stages * cut.block // tiles.block
    arguments.every_tile[(blocks_for(items, results.inner.device),)](
        *boxes, rows, weights, call.routes, results, compute=compute, LAYER=layer, TILES=tiles,
        EARLY=call.early, num_warps=cut.warps, num_stages=stages, **call.options,
    )  # fmt: skip


def launch_row_blocks(
    rows: EncodedRows, slots_R: Tensor | None, num_rows: int, *, early: bool
) -> EncodedRows:
    """Received rows of mxfp8 as rows of fp8_block128, one after the other."""
    device, hidden_size = rows.device, rows.hidden_size
    format = Fp8Block128()
    blocks = EncodedRows(
        format=format,
        hidden_size=hidden_size,
        payloads=format.empty_payloads(num_rows, hidden_size, device),
    )
    data, scales = rows.payloads["data"], rows.payloads["scales"]
    columns = min(1024, triton.next_power_of_2(format.padded_size(hidden_size)))
    row_blocks.recode_rows[(blocks_for(num_rows * triton.cdiv(hidden_size, columns), device),)](
        data, scales, data if slots_R is None else slots_R,
        blocks.payloads["data"], blocks.payloads["scales"], num_rows, data.stride(0), scales.stride(0),
        H=hidden_size, HAS_SLOTS=slots_R is not None, COLUMNS=columns, EARLY=early,
        num_warps=4, **launch_options(early),
    )  # fmt: skip
    return blocks


def launch_decoded_rows(
    rows: EncodedRows, slots_R: Tensor | None, num_rows: int, *, early: bool
) -> EncodedRows:
    """Received rows of mxfp8 as bf16 numbers, one after the other."""
    hidden_size = rows.hidden_size
    data, scales = rows.payloads["data"], rows.payloads["scales"]
    numbers = torch.empty(num_rows, hidden_size, dtype=torch.bfloat16, device=rows.device)
    columns = min(1024, max(32, triton.next_power_of_2(hidden_size)))
    row_blocks.decode_rows[(blocks_for(num_rows * triton.cdiv(hidden_size, columns), rows.device),)](
        data, scales, data if slots_R is None else slots_R, numbers, num_rows, data.stride(0), scales.stride(0),
        H=hidden_size, HAS_SLOTS=slots_R is not None, COLUMNS=columns, EARLY=early,
        num_warps=4, **launch_options(early),
    )  # fmt: skip
    return for_dtype(torch.bfloat16).encode(numbers)


def launch_expanded(matrix: PackedMatrix, bases: Tensor, *, early: bool) -> QuantizedMatrix:
    """Packed mxfp4 matrices as blocks of e4m3: memory for this call, which those of other layers get afterwards."""
    from tokenyard.experts.fused.kernels import expanding

    experts, outputs, inputs = matrix.shape
    data = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=bases.device)
    units = experts * outputs // packing.OUTPUTS
    steps = triton.cdiv(inputs // packing.INPUTS, expanding.STEPS.value)
    expanding.expand_matrices[(units * steps,)](
        expanding.Packed(matrix.words, matrix.scales.view(torch.int16), bases), data,
        OUTPUTS=outputs, INPUTS=inputs, GATED=matrix.gated, EARLY=early, num_warps=4, **launch_options(early),
    )  # fmt: skip
    payloads = {"data": data, "scales": bases}
    return QuantizedMatrix(format=weight_format("fp8_block128"), shape=matrix.shape, payloads=payloads)


def before_rounding(spec: ExpertsSpec, inner: Inner) -> Inner:
    """Where the first product leaves its numbers, if they are rounded to those of codes: in float32. Else `inner`."""
    if spec.inner is None or not inner.is_numbers:
        return inner
    return inner._replace(data=torch.empty_like(inner.data, dtype=torch.float32))


def launch_rounding(call: Launch, numbers: Inner, inner: Inner) -> None:
    """Round numbers between the products to those of the layer's format, where it has one."""
    if numbers is inner:
        return
    assert isinstance(call.spec.inner, Fp8Block128), call.spec.inner
    columns = call.spec.intermediate_size
    wide = max(SPLIT_BLOCK, min(1024, triton.next_power_of_2(columns)))
    items = inner.data.shape[0] * triton.cdiv(columns, wide)
    digits.round_numbers[(blocks_for(items, inner.data.device),)](
        numbers.data, inner.data, call.sorted.tiles, call.sorted.how_many, call.sorted.max_tiles,
        I=columns, COLUMNS=wide, POWERS=call.spec.inner.power_of_two_scales, EARLY=call.early,
        num_warps=4, **call.options,
    )  # fmt: skip


def can_box(matrix: Tensor | QuantizedMatrix, spec: ExpertsSpec) -> bool:
    """Whether the products of plain matrices can have them in boxes: TMA is Hopper's, and steps by 16 bytes."""
    if not isinstance(matrix, Tensor) or matrix.element_size() != 2 or not spec.activation.gated:
        return False
    if matrix.is_cuda and torch.cuda.get_device_capability(matrix.device)[0] < 9:
        return False
    sizes = (spec.hidden_size, spec.intermediate_size)
    return all(size % 8 == 0 for size in sizes) and matrix.data_ptr() % 16 == 0 and matrix.is_contiguous()


def _boxed_inner(
    call: Launch, x: Rows, slots_R: Tensor | None, weights: ExpertWeights, inner: Inner, cut: Cut
) -> None:
    spec, w13 = call.spec, weights.w13
    assert isinstance(w13, Tensor)
    H, I, columns = spec.hidden_size, spec.intermediate_size, cut.out // 2  # noqa: E741
    strides = [2 * I * H, H, 2 * H, 1] if spec.activation.interleaved else [2 * I * H, I * H, H, 1]
    boxes = TensorDescriptor(w13, [w13.shape[0], 2, I, H], strides, [1, 1, columns, cut.block])
    given = (x.given(slots_R), arguments.Weights(None, None, None, None, weights.b13), inner.given())
    layer = call.layer(x.format, decoding.PLAIN.value, inner)
    tiles = arguments.Tiles(triton.cdiv(I, columns), cut.out, cut.tile, cut.tail, cut.block, H, H, H, 1)
    launch_tiles(call, boxed.boxed_inner_tile, cut, given, layer, tiles, (None, None, boxes))


def _boxed_result(
    call: Launch, weights: ExpertWeights, inner: Inner, to: Destination, cut: Cut, *, finalize: bool
) -> None:
    w2, H, I = weights.w2, call.spec.hidden_size, call.spec.intermediate_size  # noqa: E741
    assert isinstance(w2, Tensor)
    rows, tail = (
        TensorDescriptor.from_tensor(inner.data, [most, cut.block])
        for most in (cut.tile, cut.tail or cut.tile)
    )
    boxes = TensorDescriptor.from_tensor(w2, [1, cut.out, cut.block])
    given = (None, arguments.Weights(None, None, None, None, weights.b2), inner.given(to))
    layer = call.layer(decoding.PLAIN.value, decoding.PLAIN.value, inner, finalize=finalize)
    tiles = arguments.Tiles(triton.cdiv(H, cut.out), cut.out, cut.tile, cut.tail, cut.block, I, I, I, 1)
    launch_tiles(call, boxed.boxed_result_tile, cut, given, layer, tiles, (rows, tail, boxes))


def launch_inner(
    call: Launch, rows: EncodedRows, slots_R: Tensor | None, weights: ExpertWeights, inner: Inner
) -> None:
    """`inner = activation(W13 · x + b13)` for all pairs, in the order of `order_N`."""
    spec, cut, act = call.spec, call.cuts.inner, call.spec.activation
    assert isinstance(cut, Cut)
    x, w = Rows.of(rows), Matrices.of(weights.w13)
    if cut.boxes and can_box(weights.w13, spec) and x.data.dtype == w.data.dtype:
        _boxed_inner(call, x, slots_R, weights, inner, cut)
        return
    out = cut.out if act.gated or inner.is_numbers else cut.out // 2
    columns = out // 2 if act.gated else out
    block, compute = cut.block, products.inner_tile
    if cut.rows_first and act.gated and x.format == w.format and x.format in _ROWS_FIRST:
        compute = rows_first.rows_first_tile
    elif block > SPLIT_BLOCK and (x.format != w.format or spec.hidden_size % block):
        block = SPLIT_BLOCK  # one at a time
    tiles = arguments.Tiles(
        triton.cdiv(spec.intermediate_size, columns), out, cut.tile, cut.tail, block,
        x.width, w.width, w.stride, w.scale_width,
    )  # fmt: skip
    given = (x.given(slots_R), w.given(weights.b13), inner.given())
    launch_tiles(call, compute, cut, given, call.layer(x.format, w.format, inner), tiles)


def can_specialize(rows: EncodedRows, weights: ExpertWeights) -> bool:
    """Whether rows and weights stand as `kernels.specialized` reads them: 16 bytes at a time, by TMA and by copies."""
    x, held = Rows.of(rows), [Matrices.of(matrix) for matrix in (weights.w13, weights.w2)]
    if any(matrix.format != x.format or matrix.data.dtype != x.data.dtype for matrix in held):
        return False
    step = x.data.element_size()
    aligned = [x.data.data_ptr(), x.data.stride(0) * step, *(matrix.data.data_ptr() for matrix in held)]
    # Where a row begins is counted in 16 bytes, in 32 bits.
    near = x.data.shape[0] * x.data.stride(0) * step < 2**35
    lines = x.data.stride(1) == 1 and (x.scales is None or x.scales.stride(1) == 1)
    whole = all(matrix.data.is_contiguous() for matrix in held)
    return all(place % 16 == 0 for place in aligned) and near and lines and whole


def launch_specialized(
    call: Launch,
    rows: EncodedRows,
    slots_R: Tensor | None,
    weights: ExpertWeights,
    inner: Inner,
    to: Destination,
    *,
    finalize: bool,
) -> None:
    """Both products, by warps that load and warps that multiply."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Boxes

    from tokenyard.experts.fused.kernels import specialized

    spec, max_tiles = call.spec, call.sorted.max_tiles
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    x, activation = Rows.of(rows), {name.lower(): value for name, value in _activation(spec).items()}
    step = x.data.element_size()
    shared = gl.NVMMASharedLayout(128, 8 * step, 2)

    def boxes(tensor: Tensor, lines: int, width: int) -> Any:
        flat = tensor.view(-1, width)
        return Boxes(flat, list(flat.shape), [width, 1], [lines, 128 // step], shared)

    for is_first in (True, False):
        w, bias = (weights.w13, weights.b13) if is_first else (weights.w2, weights.b2)
        held, sizes = Matrices.of(w), (spec.hidden_size, spec.intermediate_size)
        inputs, outputs = sizes if is_first else sizes[::-1]
        between = x._replace(data=inner.data, scales=inner.given().inner_scales)
        interleaved = is_first and spec.activation.interleaved
        w_boxes = boxes(held.data, 128, 2 * inputs if interleaved else inputs)
        items = max_tiles * triton.cdiv(outputs, 128 if is_first else 256)
        specialized.specialized_product[(max(1, min(items, processors)),)](
            w_boxes if is_first else boxes(inner.data, 64, inputs),
            w_boxes,
            x.given(slots_R) if is_first else between.given(None),
            arguments.Weights(None, held.scales, None, None, bias),
            call.routes,
            inner.given(to),
            PRODUCT=specialized.Product(
                inputs=inputs, outputs=outputs, experts=spec.num_local_experts, top_k=spec.top_k, first=is_first,
                interleaved=interleaved, weighted=spec.weight_on == ("input" if is_first else "output"),
                finalize=finalize, powers=bool(inner.held == digits.POWER_CODES), **activation,
            ),
            STAGES=4, EARLY=call.early, num_warps=4, **call.options,
        )  # fmt: skip


class Destination(NamedTuple):
    """Where results go: rows `[S, H]`, the slot of each received row, and what sums are made of."""

    out: Tensor
    slots_R: Tensor | None
    left: Tensor  # results by pair


def launch_result(
    call: Launch, weights: ExpertWeights, inner: Inner, to: Destination, *, finalize: bool
) -> None:
    """`W2 · inner + b2`: weighted into `to.out`, or, where a row has several experts, into `to.left`, by pair."""
    spec, cut = call.spec, call.cuts.result
    assert isinstance(cut, Cut)
    if cut.boxes and inner.is_numbers and can_box(weights.w2, spec):
        _boxed_result(call, weights, inner, to, cut, finalize=finalize)
        return
    w = Matrices.of(weights.w2)
    by_rows = cut.rows_first and not inner.is_numbers
    compute = rows_first_result.rows_first_result_tile if by_rows else products.result_tile
    out = 2 * SPLIT_BLOCK if by_rows else cut.out
    across = triton.cdiv(spec.hidden_size, out)
    tiles = arguments.Tiles(
        across, out, cut.tile, cut.tail, cut.block, w.width, w.width, w.stride, w.scale_width
    )
    layer = call.layer(decoding.PLAIN.value, w.format, inner, finalize=finalize)
    launch_tiles(call, compute, cut, (None, w.given(weights.b2), inner.given(to)), layer, tiles)


def launch_sums(call: Launch, ids_RK: Tensor, to: Destination) -> None:
    """Sum the rows that several experts take, out of `to.left` into `to.out`.

    A product and a sum are two roundings, as in `UnfinalizedRows.finish`.
    """
    spec, rows = call.spec, ids_RK.shape[0]
    columns, warps = (4096, 8) if spec.hidden_size % 4096 == 0 else (2048, 4)
    columns = min(columns, triton.next_power_of_2(spec.hidden_size))
    items = rows * triton.cdiv(spec.hidden_size, columns)
    summing.sum_rows[(blocks_for(items, ids_RK.device),)](
        to.left, call.weights_RK, ids_RK, to.out, ids_RK if to.slots_R is None else to.slots_R, rows, to.out.stride(0),
        H=spec.hidden_size, TOP_K=spec.top_k, CHOICES=triton.next_power_of_2(spec.top_k),
        EXPERTS=spec.num_local_experts, HAS_OUT_SLOTS=to.slots_R is not None, WEIGHTED=spec.weight_on == "output",
        COLUMNS=columns, EARLY=call.early, num_warps=warps, enable_fp_fusion=False, **call.options,
    )  # fmt: skip


class PackedCall(NamedTuple):
    """The packed matrices of both products, and their biases."""

    w13: PackedMatrix
    w2: PackedMatrix
    b13: Tensor | None
    b2: Tensor | None


def launch_packed(
    call: Launch,
    weights: PackedCall,
    x: Tensor,
    slots_R: Tensor | None,
    inner: Inner,
    to: Destination,
    *,
    finalize: bool,
) -> None:
    """Both products, with packed weights and plain rows."""
    spec, numbers = call.spec, before_rounding(call.spec, inner)
    H, I = spec.hidden_size, spec.intermediate_size  # noqa: E741

    def launch(
        cut: Cut | PackedCut, w: PackedMatrix, bias: Tensor | None, rows: Tensor, slots: Tensor | None, y: Tensor,
        weighted: bool, is_first: bool,
    ) -> None:  # fmt: skip
        from tokenyard.experts.fused.kernels import packed, unpacking

        assert isinstance(cut, PackedCut)
        nothing, (_, outputs, inputs) = call.sorted.order_N, w.shape
        lines = packing.padded(outputs, packing.OUTPUTS)
        registers = {} if cut.registers is None else {"maxnreg": cut.registers}
        has_global = w.global_scale is not None
        # Those of e2m1 as four numbers for 128 inputs.
        scales = w.scales.view(torch.int16) if w.format == "mxfp4" else w.scales
        packed.packed_product[(triton.cdiv(lines, cut.out * cut.groups), call.sorted.max_tiles)](
            rows, nothing if slots is None else slots, w.words, scales,
            w.global_scale if has_global else nothing, w.global_factor if has_global else nothing,
            nothing if bias is None else bias, call.weights_RK, y, call.sorted.order_N, to.left,
            call.sorted.tiles, call.sorted.how_many, call.sorted.max_tiles, rows.stride(0), y.stride(0),
            INPUTS=inputs, WIDTH=packing.padded(inputs, packing.INPUTS), LINES=lines,
            COLUMNS=I if is_first else H, TOP_K=spec.top_k,
            KIND=unpacking.INT4 if w.format == "mxint4" else unpacking.E2M1, SPANS=4 if w.format == "nvfp4" else 2,
            WIDTHS=cut.widths, FIRST=is_first, INTERLEAVED=spec.activation.interleaved,
            HAS_SLOTS=slots is not None, HAS_GLOBAL=has_global, HAS_BIAS=bias is not None, WEIGHTED=weighted,
            FINALIZE=finalize, **_activation(spec),
            GROUPS=cut.groups, AHEAD=cut.ahead, STAGES=cut.stages, EARLY=call.early,
            num_warps=cut.warps, **registers, **call.options,
        )  # fmt: skip

    first, second = call.cuts.inner, call.cuts.result
    launch(first, weights.w13, weights.b13, x, slots_R, numbers.data, spec.weight_on == "input", True)
    launch_rounding(call, numbers, inner)
    launch(second, weights.w2, weights.b2, inner.data, to.slots_R, to.out, spec.weight_on == "output", False)
