"""Launches the kernels for Hopper, in Triton's Gluon dialect: packed, expanded and specialized products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenyard.experts.fused import packing
from tokenyard.experts.fused.kernels import (
    arguments,
    expanding,
    fp8_split,
    items,
    packed,
    packed_codes,
    packed_numbers,
    specialized,
    unpacking,
)
from tokenyard.experts.fused.launch import before_rounding, launch_rounding, processors
from tokenyard.experts.fused.operands import (
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

# By the most rows of a tile of `kernels.specialized`: the sizes of transposed tiles, in rows, and the pipeline stages.
# Larger tiles leave room in shared memory for fewer stages.
TRANSPOSED = {16: ((16,), 5), 32: ((16, 32), 5), 64: ((16, 32, 64), 4), 128: ((16,), 4)}


def _persistent(items: int, device: torch.device) -> int:
    """How many persistent blocks to launch for up to `items` items: no more than a GPU has multiprocessors."""
    return max(1, min(items, processors(kernel_device(device))))


def launch_expanded(matrix: PackedMatrix, bases: Tensor, *, early: bool) -> QuantizedMatrix:
    """Expand packed mxfp4 matrices to blocks of e4m3, in memory of this call, which other layers can use afterwards."""
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
    call: Launch, rows: EncodedRows, slots_R: Tensor | None, weights: ExpertWeights
) -> int:
    """Launch both products as one kernel with specialized warps; returns 0, since it counts no items for the sums."""
    spec, max_tiles, config, held = call.spec, call.sorted.max_tiles, call.tile_configs.inner, "fp8_block128"
    assert isinstance(config, TileConfig)
    widths, stages = TRANSPOSED[config.tile]
    transposed = widths if config.tail or config.tile < 128 else ()
    x, w13, w2 = Rows.of(rows), Matrices.of(weights.w13), Matrices.of(weights.w2)
    H, I, interleaved = spec.hidden_size, spec.intermediate_size, spec.activation.interleaved  # noqa: E741
    inner = Inner.empty(call, held=held if isinstance(weights.w2, QuantizedMatrix) else "")
    first, second = (
        items.Product(
            inputs=H if is_first else I, outputs=I if is_first else H, experts=spec.num_local_experts, top_k=spec.top_k,
            first=is_first, interleaved=is_first and interleaved,
            weighted=spec.weight_on == ("input" if is_first else "output"), finalize=call.finalize,
            powers=bool(inner.held == fp8_split.POWER_CODES), tile=config.tile, transposed=transposed,
            step=128 if is_first or config.tile < 128 else 256, deep=not is_first and config.tile < 128,
            boxed=call.unit > 0, **activation_constants(spec),
        )
        for is_first in (True, False)
    )  # fmt: skip
    most = max_tiles * (triton.cdiv(I, 128) + triton.cdiv(H, 128))
    launch(specialized.specialized_products, (_persistent(most, rows.device),),
        tma_descriptor(inner.data, min(config.tile, 64), I),
        tma_descriptor(w13.data, 128, call.unit or (2 * H if interleaved else H)),
        tma_descriptor(w2.data, 128, call.unit or I),
        x.given(slots_R),
        x._replace(data=inner.data, scales=inner.given().inner_scales).given(None),
        w13.given(weights.b13)._replace(data=None),
        w2.given(weights.b2)._replace(data=None),
        call.routes,
        inner.given(call.to),
        FIRST=first, SECOND=second, STAGES=stages, EARLY=call.early, num_warps=4, **call.options,
    )  # fmt: skip
    return 0


class PackedCall(NamedTuple):
    """The packed matrices of both products, and their biases."""

    w13: PackedMatrix
    w2: PackedMatrix
    b13: Tensor | None
    b2: Tensor | None
    largest13: Tensor | None = None  # from `packing.largest_scales`, if weights can be decoded to codes
    largest2: Tensor | None = None


def launch_packed_codes(call: Launch, weights: PackedCall, codes: Tensor, code_scales: Tensor) -> int:
    """Launch both products with packed weights that are decoded to e4m3 codes; rows are codes and scales by place.

    Returns the items that the second product counts for each tile, for `launch_sums`.
    """
    spec, config, inner = call.spec, call.tile_configs.inner, Inner.empty(call, held="fp8_block128")
    assert isinstance(config, CodesTileConfig)
    places = len(inner.data)
    numbers = inner._replace(data=inner.scales.new_empty(places, spec.intermediate_size))
    first = weights.w13, weights.b13, weights.largest13, codes, code_scales, numbers
    second = weights.w2, weights.b2, weights.largest2, inner.data, inner.scales, inner
    before, across = arguments.Counted(0), 0
    for is_first, (w, bias, largest, x, scales, to) in ((True, first), (False, second)):
        product = _packed_product(call, w, is_first=is_first)
        across = triton.cdiv(product.lines, 128)
        launch(packed_codes.packed_codes_product, (_persistent(call.sorted.max_tiles * across, x.device),),
            tma_descriptor(x, 64, product.width),
            tma_descriptor(w.words, 32, 32),
            scales,
            places,
            packed_codes.PackedWeights(w.scales.view(torch.int16), largest, bias),
            call.routes,
            to.given(call.to),
            PRODUCT=product, BEFORE=before, RUNS=config.runs, STAGES=config.stages, EARLY=call.early, num_warps=4,
            **call.options,
        )  # fmt: skip
        if is_first:
            before = launch_rounding(call, numbers, inner, across)
    return across


def _packed_product(call: Launch, w: PackedMatrix, *, is_first: bool) -> packed.PackedProduct:
    """The compile-time constants of a product of packed weights."""
    spec, (_, outputs, inputs) = call.spec, w.shape
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
        finalize=call.finalize,
        **activation_constants(spec),
    )


def launch_packed(call: Launch, weights: PackedCall, x: Tensor, slots_R: Tensor | None) -> int:
    """Launch both products with packed weights and plain rows, each with the kernel of its tile configuration.

    Returns the items that the second product counts for each tile, for `launch_sums`.
    """
    configs, inner = call.tile_configs, Inner.empty(call, held="")
    numbers, before, across = before_rounding(call.spec, inner), arguments.Counted(0), 0
    first = configs.inner, weights.w13, weights.b13, x, slots_R, numbers
    second = configs.result, weights.w2, weights.b2, inner.data, None, inner
    for is_first, (config, w, bias, data, slots, to) in ((True, first), (False, second)):
        product = _packed_product(call, w, is_first=is_first)
        rows = arguments.Rows(data, None, None, slots, data.stride(0), 0, 0)
        # The scales of mxfp4 are loaded as four int16 for 128 inputs.
        scales = w.scales.view(torch.int16) if w.format == "mxfp4" else w.scales
        given = arguments.Weights(w.words, scales, w.global_scale, w.global_factor, bias)
        if isinstance(config, NumbersTileConfig):
            across = triton.cdiv(product.lines, 64 * packed_numbers.GROUPS.value * config.units)
            w_descriptor = tma_descriptor(w.words, 32, 32)
            launch(packed_numbers.packed_numbers_product, (_persistent(call.sorted.max_tiles * across, data.device),),
                w_descriptor if is_first else tma_descriptor(data, config.run, product.inputs), w_descriptor,
                rows, given._replace(data=None), call.routes, to.given(call.to), PRODUCT=product, BEFORE=before,
                TILES=packed_numbers.Tiles(config.units, config.widths, config.run, config.stages),
                EARLY=call.early, num_warps=4, **call.options,
            )  # fmt: skip
        else:
            assert isinstance(config, PackedTileConfig)
            across = triton.cdiv(product.lines, config.out * config.groups)
            registers = {} if config.registers is None else {"maxnreg": config.registers}
            launch(packed.packed_product, (across, call.sorted.max_tiles),
                rows, given, call.routes, to.given(call.to), PRODUCT=product, BEFORE=before,
                TILES=packed.Tiles(config.widths, config.groups, config.ahead, config.stages),
                EARLY=call.early, num_warps=config.warps, **registers, **call.options,
            )  # fmt: skip
        if is_first:
            before = launch_rounding(call, numbers, inner, across)
    # A block of `kernels.packed` would have to wait until its results are visible before it could count.
    return across if isinstance(configs.result, NumbersTileConfig) else 0
