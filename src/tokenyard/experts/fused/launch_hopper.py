"""Launches the kernels for Hopper, in Triton's Gluon dialect: packed, expanded and specialized products.

The kernels are imported inside the functions that launch them, because not every Triton has the dialect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from tokenyard.experts.fused import packing
from tokenyard.experts.fused.kernels import arguments, fp8_split
from tokenyard.experts.fused.launch import before_rounding, launch_rounding
from tokenyard.experts.fused.operands import (
    Destination,
    Inner,
    Launch,
    Matrices,
    Rows,
    activation_constants,
    launch_options,
)
from tokenyard.experts.fused.packing import PackedMatrix
from tokenyard.experts.fused.tile_configs import (
    CodesTileConfig,
    NumbersTileConfig,
    PackedTileConfig,
    TileConfig,
)
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import QuantizedMatrix, weight_format
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import kernel_device, launch

if TYPE_CHECKING:
    from tokenyard.experts.fused.kernels.packed import PackedProduct

# By the most rows of a tile of `kernels.specialized`: the sizes of transposed tiles, in rows, and the pipeline stages.
# Larger tiles leave room in shared memory for fewer stages.
TRANSPOSED = {16: ((16,), 5), 32: ((16, 32), 5), 64: ((16, 32, 64), 4), 128: ((16,), 4)}


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(kernel_device(device)).multi_processor_count)


def launch_expanded(matrix: PackedMatrix, bases: Tensor, *, early: bool) -> QuantizedMatrix:
    """Expand packed mxfp4 matrices to blocks of e4m3, in memory of this call, which other layers can use afterwards."""
    from tokenyard.experts.fused.kernels import expanding

    experts, outputs, inputs = matrix.shape
    data = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=bases.device)
    units = experts * outputs // packing.OUTPUTS
    steps = triton.cdiv(inputs // packing.INPUTS, expanding.STEPS.value)
    launch(expanding.expand_matrices, (units * steps,),
        expanding.Packed(matrix.words, matrix.scales.view(torch.int16), bases), data,
        OUTPUTS=outputs, INPUTS=inputs, GATED=matrix.gated, EARLY=early, num_warps=4, **launch_options(early),
    )  # fmt: skip
    payloads = {"data": data, "scales": bases}
    return QuantizedMatrix(format=weight_format("fp8_block128"), shape=matrix.shape, payloads=payloads)


def tma_descriptor(tensor: Tensor, lines: int, width: int) -> Any:
    """A TMA descriptor of a tensor `[.., width]`, whose loads bring 128 bytes of each of `lines` lines."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat, step = tensor.view(-1, width), tensor.element_size()
    shared = gl.NVMMASharedLayout(128, 8 * step, 2)
    return TensorDescriptor(flat, list(flat.shape), [width, 1], [lines, 128 // step], shared)


def can_specialize(rows: EncodedRows, weights: ExpertWeights) -> bool:
    """Whether rows and weights have the format, alignment (16 bytes) and strides that `kernels.specialized` needs."""
    x, held = Rows.of(rows), [Matrices.of(matrix) for matrix in (weights.w13, weights.w2)]
    if any(matrix.format != x.format or matrix.data.dtype != x.data.dtype for matrix in held):
        return False
    step = x.data.element_size()
    aligned = [x.data.data_ptr(), x.data.stride(0) * step, *(matrix.data.data_ptr() for matrix in held)]
    # The offset of a row, in units of 16 bytes, must fit into 32 bits.
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
    """Launch both products as one kernel with specialized warps."""
    from tokenyard.experts.fused.kernels import items, specialized

    spec, max_tiles, config = call.spec, call.sorted.max_tiles, call.tile_configs.inner
    assert isinstance(config, TileConfig)
    widths, stages = TRANSPOSED[config.tile]
    transposed = widths if config.tail or config.tile < 128 else ()
    processors = _processors(rows.device)
    x, activation = Rows.of(rows), {name.lower(): value for name, value in activation_constants(spec).items()}
    H, I, interleaved = spec.hidden_size, spec.intermediate_size, spec.activation.interleaved  # noqa: E741
    w13, w2 = Matrices.of(weights.w13), Matrices.of(weights.w2)
    first, second = (
        items.Product(
            inputs=H if is_first else I, outputs=I if is_first else H, experts=spec.num_local_experts, top_k=spec.top_k,
            first=is_first, interleaved=is_first and interleaved,
            weighted=spec.weight_on == ("input" if is_first else "output"), finalize=finalize,
            powers=bool(inner.held == fp8_split.POWER_CODES), tile=config.tile, transposed=transposed,
            step=128 if is_first or config.tile < 128 else 256, deep=not is_first and config.tile < 128,
            boxed=call.unit > 0, **activation,
        )
        for is_first in (True, False)
    )  # fmt: skip
    most = max_tiles * (triton.cdiv(I, 128) + triton.cdiv(H, 128))
    launch(specialized.specialized_products, (max(1, min(most, processors)),),
        tma_descriptor(inner.data, min(config.tile, 64), I),
        tma_descriptor(w13.data, 128, call.unit or (2 * H if interleaved else H)),
        tma_descriptor(w2.data, 128, call.unit or I),
        x.given(slots_R),
        x._replace(data=inner.data, scales=inner.given().inner_scales).given(None),
        arguments.Weights(None, w13.scales, None, None, weights.b13),
        arguments.Weights(None, w2.scales, None, None, weights.b2),
        call.routes,
        inner.given(to),
        FIRST=first, SECOND=second, STAGES=stages, EARLY=call.early, num_warps=4, **call.options,
    )  # fmt: skip


class PackedCall(NamedTuple):
    """The packed matrices of both products, and their biases."""

    w13: PackedMatrix
    w2: PackedMatrix
    b13: Tensor | None
    b2: Tensor | None
    largest13: Tensor | None = None  # from `packing.largest_scales`, if weights can be decoded to codes
    largest2: Tensor | None = None


def launch_packed_codes(
    call: Launch,
    weights: PackedCall,
    rows: tuple[Tensor, Tensor],
    inner: Inner,
    to: Destination,
    *,
    finalize: bool,
) -> int:
    """Launch both products with packed weights that are decoded to e4m3 codes; `rows`: codes and scales by place.

    Returns the items that the second product counts for each tile, for `launch_sums`.
    """
    from tokenyard.experts.fused.kernels import packed_codes

    spec, config = call.spec, call.tile_configs.inner
    assert isinstance(config, CodesTileConfig)
    processors = _processors(inner.data.device)
    places = len(inner.data)
    numbers = inner._replace(data=inner.scales.new_empty(places, spec.intermediate_size))
    before, across = arguments.Counted(0), 0
    for is_first in (True, False):
        w, bias, largest = (
            (weights.w13, weights.b13, weights.largest13)
            if is_first
            else (weights.w2, weights.b2, weights.largest2)
        )
        product = _packed_product(call, w, is_first=is_first, finalize=finalize)
        codes, scales = rows if is_first else (inner.data, inner.scales)
        across = triton.cdiv(product.lines, 128)
        launch(packed_codes.packed_codes_product, (max(1, min(call.sorted.max_tiles * across, processors)),),
            tma_descriptor(codes, 64, product.width),
            tma_descriptor(w.words, 32, 32),
            scales,
            places,
            packed_codes.PackedWeights(w.scales.view(torch.int16), largest, bias),
            call.routes,
            (numbers if is_first else inner).given(to),
            PRODUCT=product, BEFORE=before, RUNS=config.runs, STAGES=config.stages, EARLY=call.early, num_warps=4,
            **call.options,
        )  # fmt: skip
        if is_first:
            before = launch_rounding(call, numbers, inner, across)
    return across


def _packed_product(call: Launch, w: PackedMatrix, *, is_first: bool, finalize: bool) -> PackedProduct:
    """The compile-time constants of a product of packed weights."""
    from tokenyard.experts.fused.kernels import packed, unpacking

    spec, (_, outputs, inputs) = call.spec, w.shape
    activation = {name.lower(): value for name, value in activation_constants(spec).items()}
    return packed.PackedProduct(
        kind=(unpacking.INT4 if w.format == "mxint4" else unpacking.E2M1).value,
        spans=4 if w.format == "nvfp4" else 2,
        inputs=inputs,
        width=packing.padded(inputs, packing.INPUTS),
        lines=packing.padded(outputs, packing.OUTPUTS),
        columns=outputs // 2 if is_first else outputs,
        top_k=spec.top_k,
        first=is_first,
        interleaved=is_first and spec.activation.interleaved,
        weighted=spec.weight_on == ("input" if is_first else "output"),
        finalize=finalize,
        **activation,
    )


def launch_packed(
    call: Launch,
    weights: PackedCall,
    x: Tensor,
    slots_R: Tensor | None,
    inner: Inner,
    to: Destination,
    *,
    finalize: bool,
) -> int:
    """Launch both products with packed weights and plain rows, each with the kernel of its tile configuration.

    Returns the items that the second product counts for each tile, for `launch_sums`.
    """
    numbers, before, items = before_rounding(call.spec, inner), arguments.Counted(0), 0
    for is_first in (True, False):
        config = call.tile_configs.inner if is_first else call.tile_configs.result
        matrix, bias = (weights.w13, weights.b13) if is_first else (weights.w2, weights.b2)
        data, slots = (x, slots_R) if is_first else (inner.data, None)
        rows = arguments.Rows(data, None, None, slots, data.stride(0), 0, 0)
        results = (numbers if is_first else inner).given(to)
        product = _packed_product(call, matrix, is_first=is_first, finalize=finalize)
        if isinstance(config, NumbersTileConfig):
            items = _launch_numbers(call, config, product, matrix, bias, rows, results, before)
        else:
            assert isinstance(config, PackedTileConfig)
            items = _launch_tiles(call, config, product, matrix, bias, rows, results, before)
        if is_first:
            before = launch_rounding(call, numbers, inner, items)
    # A block of `kernels.packed` would have to wait until its results are visible before it could count.
    return items if isinstance(call.tile_configs.result, NumbersTileConfig) else 0


def _launch_tiles(
    call: Launch, config: PackedTileConfig, product: PackedProduct, w: PackedMatrix, bias: Tensor | None,
    rows: arguments.Rows, results: arguments.Results, before: arguments.Counted,
) -> int:  # fmt: skip
    """Launch one product with a block for each item (`kernels.packed`); returns how many items a tile has."""
    from tokenyard.experts.fused.kernels import packed

    nothing, is_first = call.sorted.order_N, product.first
    y, slots = (results.inner, rows.slots_R) if is_first else (results.out, results.out_slots_R)
    registers = {} if config.registers is None else {"maxnreg": config.registers}
    has_global = w.global_scale is not None
    across: int = triton.cdiv(product.lines, config.out * config.groups)
    launch(packed.packed_product, (across, call.sorted.max_tiles),
        rows.data, nothing if slots is None else slots, w.words, _decoded_scales(w),
        w.global_scale if has_global else nothing, w.global_factor if has_global else nothing,
        nothing if bias is None else bias, call.weights_RK, y, call.sorted.order_N, results.partial_sums,
        call.sorted.tiles, call.sorted.how_many, call.sorted.max_tiles, rows.stride, y.stride(0),
        INPUTS=product.inputs, WIDTH=product.width, LINES=product.lines, COLUMNS=product.columns, TOP_K=product.top_k,
        KIND=product.kind, SPANS=product.spans, WIDTHS=config.widths, FIRST=is_first,
        INTERLEAVED=call.spec.activation.interleaved, HAS_SLOTS=slots is not None, HAS_GLOBAL=has_global,
        HAS_BIAS=bias is not None, WEIGHTED=product.weighted, FINALIZE=product.finalize,
        **activation_constants(call.spec),
        GROUPS=config.groups, AHEAD=config.ahead, STAGES=config.stages, BEFORE=before, EARLY=call.early,
        num_warps=config.warps, **registers, **call.options,
    )  # fmt: skip
    return across


def _launch_numbers(
    call: Launch, config: NumbersTileConfig, product: PackedProduct, w: PackedMatrix, bias: Tensor | None,
    rows: arguments.Rows, results: arguments.Results, before: arguments.Counted,
) -> int:  # fmt: skip
    """Launch one product with specialized warps (`kernels.packed_numbers`); returns how many items a tile has."""
    from tokenyard.experts.fused.kernels import packed_numbers

    processors = _processors(rows.data.device)
    across: int = triton.cdiv(product.lines, 64 * config.units * config.groups)
    w_descriptor = tma_descriptor(w.words, 32, 32)
    launch(packed_numbers.packed_numbers_product, (max(1, min(call.sorted.max_tiles * across, processors)),),
        w_descriptor if product.first else tma_descriptor(rows.data, config.run, product.inputs),
        w_descriptor,
        rows,
        arguments.Weights(None, _decoded_scales(w), w.global_scale, w.global_factor, bias),
        call.routes,
        results,
        PRODUCT=product,
        BEFORE=before,
        TILES=packed_numbers.Tiles(config.groups, config.units, config.widths, config.run, config.stages),
        EARLY=call.early, num_warps=4, **call.options,
    )  # fmt: skip
    return across


def _decoded_scales(w: PackedMatrix) -> Tensor:
    """The scales as kernels that decode weights to bf16 load them: those of mxfp4 as four int16 for 128 inputs."""
    return w.scales.view(torch.int16) if w.format == "mxfp4" else w.scales
