"""Launches the kernels that run on every GPU.

Nothing here reads a value from the device, and no kernel is compiled for a certain number of rows: a batch of another
size launches the same kernels with another grid, or with other tiles.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenyard.experts.fused.kernels import (
    arguments,
    decoding,
    fp8_split,
    products,
    row_blocks,
    rows_first,
    sorting,
    summing,
)
from tokenyard.experts.fused.kernels import tma as tma_kernels
from tokenyard.experts.fused.operands import (
    Inner,
    Launch,
    Matrices,
    Rows,
    SortedOnDevice,
    launch_options,
)
from tokenyard.experts.fused.paths import Path, of_product
from tokenyard.experts.fused.tile_configs import SPLIT_BLOCK, TileConfig
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import Fp8Block128, QuantizedMatrix, for_dtype
from tokenyard.formats.base import EncodedRows
from tokenyard.gpu_kernels import kernel_device, launch

# Pairs of a chunk. In a batch of one chunk, every block counts all pairs itself.
CHUNK = 1024
# The most blocks that share the experts of a chunk.
SHARED_BY = 4
# Rows of a batch from which on a block sums 16 rows instead of one. Blocks of one row, and of 16, on one H200:
# 4,538 rows of V4-Flash took 11.8 and 15.0 µs, 36,304 rows 81.5 and 81.8, 36,446 of V4-Pro 181 and 135, 43,332 of V3
# 309 and 240.
LONG_SUMS = 16384

# Rows that a block recodes or rounds at a time, in batches of at least MANY_ROWS rows; else one. With 1, 2, 4 and 8
# rows at a time V4-Flash's experts of mxfp4 with 1,024 tokens a rank took 598.9, 594.5, 594.2 and 601.6 µs.
ROWS_AT_A_TIME = 4
MANY_ROWS = 2048

# Triton's interpreter patches the Triton language while it runs a kernel, so ranks that are threads take turns.
_INTERPRETER = threading.RLock()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on the tensor's GPU; for CPU tensors, the lock of the interpreter."""
    if tensor.is_meta:
        return nullcontext()  # launches are recorded
    return torch.cuda.device(tensor.device) if tensor.is_cuda else _INTERPRETER


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on a device may start before their predecessors have ended: on GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def sort_on_device(ids_RK: Tensor, experts: int, tile: int, *, early: bool) -> SortedOnDevice:
    """Sort the pairs of a batch by expert and cut them into tiles, on the device: the host reads no value."""
    (rows, top_k), device = ids_RK.shape, ids_RK.device
    pairs, choices = rows * top_k, triton.next_power_of_2(top_k)
    bins, chunks = triton.next_power_of_2(experts + 1), triton.cdiv(rows, CHUNK // choices)
    # A multiple of 16, because Triton compiles another kernel for integers and addresses that are not divisible by it.
    max_tiles = 16 * triton.cdiv(min(pairs, pairs // tile + experts), 16)
    order_N = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(6 * max_tiles + 3 + 2 * experts, dtype=torch.int32, device=device)
    how_many = tiles[6 * max_tiles : 6 * max_tiles + 1]  # counters follow it
    sizes, options = (experts, bins, top_k, choices, CHUNK), launch_options(early)
    if chunks == 1:
        launch(sorting.sort_pairs, (experts,),
            ids_RK, order_N, tiles, how_many, rows, max_tiles, *sizes, tile, early, num_warps=4, **options,
        )  # fmt: skip
        return SortedOnDevice(order_N, tiles, how_many, max_tiles, None)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    launch(sorting.count_chunks, (chunks,), ids_RK, counts, rows, *sizes, early, num_warps=4, **options)
    share = 4 * triton.cdiv(experts, 4 * SHARED_BY)
    launch(sorting.place_chunks, (chunks, triton.cdiv(experts, share)),
        ids_RK, counts, order_N, tiles, how_many, rows, max_tiles, *sizes, tile, early, share,
        num_warps=4, **options,
    )  # fmt: skip
    return SortedOnDevice(order_N, tiles, how_many, max_tiles, counts)


def blocks_for(items: int, device: torch.device) -> int:
    """How many blocks to launch for up to `items` items: one for each, or fewer, which then take several in turn."""
    device = kernel_device(device)
    return max(1, min(items, 4 if device.type == "cpu" else processors(device) * 16))


def rows_at_a_time(rows: int) -> int:
    """How many rows of a batch a block recodes or rounds at a time."""
    return ROWS_AT_A_TIME if rows >= MANY_ROWS else 1


def launch_tiles(
    call: Launch,
    compute: Any,
    config: TileConfig,
    given: tuple[arguments.Rows | None, arguments.Weights, arguments.Results],
    layer: arguments.Layer,
    tiles: arguments.Tiles,
    descriptors: tuple[Any, Any, Any] = (None, None, None),
) -> None:
    """Launch one product, whose tiles the kernel function `compute` computes."""
    rows, weights, results = given
    items, stages = call.sorted.max_tiles * tiles.across, config.stages * config.block // tiles.block
    launch(arguments.every_tile, (blocks_for(items, results.inner.device),),
        *descriptors, rows, weights, call.routes, results, compute=compute, LAYER=layer, TILES=tiles,
        EARLY=call.early, num_warps=config.warps, num_stages=stages, **call.options,
    )  # fmt: skip


def launch_row_blocks(
    rows: EncodedRows, slots_R: Tensor | None, num_rows: int, *, early: bool
) -> EncodedRows:
    """Recode received rows of mxfp8 to contiguous rows of fp8_block128."""
    format, hidden_size = Fp8Block128(), rows.hidden_size
    blocks = format.empty_payloads(num_rows, hidden_size, rows.device)
    _launch_recoding(rows, slots_R, (blocks["data"], blocks["scales"]), num_rows, early=early)
    return EncodedRows(format=format, hidden_size=hidden_size, payloads=blocks)


def launch_placed_rows(call: Launch, rows: EncodedRows, slots_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Recode received rows of mxfp8 for `kernels.packed_codes`: codes by place, scales by block and place."""
    width, places = Fp8Block128().padded_size(rows.hidden_size), call.sorted.order_N.shape[0]
    codes = torch.empty(places, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(width // SPLIT_BLOCK, places, device=rows.device)
    _launch_recoding(rows, slots_R, (codes, scales), places, early=call.early, placed=call)
    return codes, scales


def _launch_recoding(
    rows: EncodedRows,
    slots_R: Tensor | None,
    to: tuple[Tensor, Tensor],
    num_rows: int,
    *,
    early: bool,
    placed: Launch | None = None,
) -> None:
    """Launch `recode_rows` for received rows in their order, or for those of the places of a call."""
    data, scales = rows.payloads["data"], rows.payloads["scales"]
    columns = min(1024, triton.next_power_of_2(Fp8Block128().padded_size(rows.hidden_size)))
    at_a_time = rows_at_a_time(num_rows)
    order_N = tiles = how_many = max_tiles = top_k = None
    if placed is not None:
        order_N, tiles, how_many, max_tiles, _ = placed.routes
        top_k = placed.spec.top_k
    items = triton.cdiv(num_rows, at_a_time) * triton.cdiv(rows.hidden_size, columns)
    launch(row_blocks.recode_rows, (blocks_for(items, rows.device),),
        data, scales, data if slots_R is None else slots_R, *to,
        order_N, tiles, how_many, num_rows, max_tiles, data.stride(0), scales.stride(0),
        H=rows.hidden_size, TOP_K=top_k, HAS_SLOTS=slots_R is not None, ROWS=at_a_time, COLUMNS=columns, EARLY=early,
        num_warps=4, **launch_options(early),
    )  # fmt: skip


def launch_decoded_rows(
    rows: EncodedRows, slots_R: Tensor | None, num_rows: int, *, early: bool
) -> EncodedRows:
    """Decode received rows of mxfp8 to contiguous rows of bf16."""
    hidden_size = rows.hidden_size
    data, scales = rows.payloads["data"], rows.payloads["scales"]
    numbers = torch.empty(num_rows, hidden_size, dtype=torch.bfloat16, device=rows.device)
    columns = min(1024, max(32, triton.next_power_of_2(hidden_size)))
    launch(row_blocks.decode_rows, (blocks_for(num_rows * triton.cdiv(hidden_size, columns), rows.device),),
        data, scales, data if slots_R is None else slots_R, numbers, num_rows, data.stride(0), scales.stride(0),
        H=hidden_size, HAS_SLOTS=slots_R is not None, COLUMNS=columns, EARLY=early,
        num_warps=4, **launch_options(early),
    )  # fmt: skip
    return for_dtype(torch.bfloat16).encode(numbers)


def before_rounding(spec: ExpertsSpec, inner: Inner) -> Inner:
    """The output of the first product: a float32 buffer, if `launch_rounding` will round it to codes; else `inner`."""
    if spec.inner is None or not inner.is_numbers:
        return inner
    return inner._replace(data=torch.empty_like(inner.data, dtype=torch.float32))


def launch_rounding(call: Launch, numbers: Inner, inner: Inner, items: int = 0) -> arguments.Counted:
    """Round the numbers between the products to the layer's inner format, if it has one, or encode them in it.

    The first product counts `items` items for each tile, or none. Returns what is counted when a tile's rows are there.
    """
    if numbers is inner:
        return arguments.Counted(items)
    assert isinstance(call.spec.inner, Fp8Block128), call.spec.inner
    columns, at_a_time = call.spec.intermediate_size, rows_at_a_time(inner.data.shape[0])
    wide = max(SPLIT_BLOCK, min(1024, triton.next_power_of_2(columns)))
    across, tile = triton.cdiv(columns, wide), call.tile_configs.inner.tile
    parts = call.sorted.max_tiles * triton.cdiv(tile, at_a_time) * across
    launch(fp8_split.round_numbers, (blocks_for(parts, inner.data.device),),
        numbers.data, inner.data, inner.given().inner_scales,
        call.sorted.tiles, call.sorted.how_many, call.sorted.max_tiles, inner.data.shape[0],
        I=columns, TILE=tile, ITEMS=items, ROWS=at_a_time, COLUMNS=wide, POWERS=call.spec.inner.power_of_two_scales,
        EARLY=call.early, num_warps=4, **call.options,
    )  # fmt: skip
    return arguments.Counted(items, at_a_time, across)


def can_use_tma(matrix: Tensor | QuantizedMatrix, spec: ExpertsSpec, *, boxed: bool = False) -> bool:
    """Whether `kernels.tma` can load these matrices: plain 16-bit ones, aligned to 16 bytes, on Hopper or later.

    It reads matrices that are held line by line, not box by box.
    """
    if boxed or not isinstance(matrix, Tensor) or matrix.element_size() != 2 or not spec.activation.gated:
        return False
    device = kernel_device(matrix.device)
    if device.type == "cuda" and not starts_early(device):
        return False
    sizes = (spec.hidden_size, spec.intermediate_size)
    return all(size % 8 == 0 for size in sizes) and matrix.data_ptr() % 16 == 0 and matrix.is_contiguous()


def launch_products(call: Launch, rows: EncodedRows, slots_R: Tensor | None, weights: ExpertWeights) -> int:
    """Launch both products with kernels of plain Triton; returns 0, since these count no items."""
    inner = Inner.empty(call, held=weights.w2.format.name if isinstance(weights.w2, QuantizedMatrix) else "")
    numbers = before_rounding(call.spec, inner)
    _launch_inner(call, Rows.of(rows), slots_R, weights, numbers)
    launch_rounding(call, numbers, inner)
    _launch_result(call, weights, inner)
    return 0


def _launch_inner(
    call: Launch, x: Rows, slots_R: Tensor | None, weights: ExpertWeights, inner: Inner
) -> None:
    """`inner = activation(W13 · x + b13)` for all pairs, in the order of `order_N`."""
    spec, config, act, w = call.spec, call.tile_configs.inner, call.spec.activation, Matrices.of(weights.w13)
    assert isinstance(config, TileConfig)
    H, I, out, block = spec.hidden_size, spec.intermediate_size, config.out, config.block  # noqa: E741
    columns, given = out // 2, w.given(weights.b13)
    descriptors: tuple[Any, Any, Any] = (None, None, None)
    alike = x.data.dtype == w.data.dtype
    tma = alike and config.tma and can_use_tma(weights.w13, spec, boxed=call.unit > 0)
    blocks = x.format == w.format == decoding.FP8_BLOCK.value and act.gated
    path, compute = of_product(config, tma=tma, blocks=blocks), products.inner_tile
    if path is Path.TMA:
        compute = tma_kernels.tma_inner_tile
        strides = [2 * I * H, H, 2 * H, 1] if act.interleaved else [2 * I * H, I * H, H, 1]
        shape = [w.data.shape[0], 2, I, H]
        descriptors = None, None, TensorDescriptor(w.data, shape, strides, [1, 1, columns, block])
        given = given._replace(data=None)
    elif path is Path.ROWS_FIRST:
        compute = rows_first.rows_first_tile
    else:
        out = out if act.gated or inner.is_numbers else columns
        columns = out // 2 if act.gated else out
        if block > SPLIT_BLOCK and (x.format != w.format or H % block):
            block = SPLIT_BLOCK  # one block of scales at a time
    tiles = arguments.Tiles(
        triton.cdiv(I, columns), out, config.tile, config.tail, block,
        x.width, w.width, w.stride, w.scale_width, call.unit,
    )  # fmt: skip
    layer = call.layer(x.format, w.format, inner)
    launch_tiles(call, compute, config, (x.given(slots_R), given, inner.given()), layer, tiles, descriptors)


def _launch_result(call: Launch, weights: ExpertWeights, inner: Inner) -> None:
    """`W2 · inner + b2`: weighted into `to.out`, or, for rows with several experts, by pair into `to.partial_sums`."""
    spec, config, w = call.spec, call.tile_configs.result, Matrices.of(weights.w2)
    assert isinstance(config, TileConfig)
    out, given = config.out, w.given(weights.b2)
    descriptors: tuple[Any, Any, Any] = (None, None, None)
    tma = inner.is_numbers and config.tma and can_use_tma(weights.w2, spec, boxed=call.unit > 0)
    path = of_product(config, tma=tma, blocks=not inner.is_numbers)
    compute = products.result_tile
    if path is Path.TMA:
        compute = tma_kernels.tma_result_tile
        most = (config.tile, config.tail or config.tile)
        rows, tail = (TensorDescriptor.from_tensor(inner.data, [many, config.block]) for many in most)
        descriptors = rows, tail, TensorDescriptor.from_tensor(w.data, [1, out, config.block])
        given = given._replace(data=None)
    elif path is Path.ROWS_FIRST:
        compute, out = rows_first.rows_first_result_tile, 2 * SPLIT_BLOCK
    tiles = arguments.Tiles(
        triton.cdiv(spec.hidden_size, out), out, config.tile, config.tail, config.block,
        w.width, w.width, w.stride, w.scale_width, call.unit,
    )  # fmt: skip
    layer = call.layer(decoding.PLAIN.value, w.format, inner)
    launch_tiles(call, compute, config, (None, given, inner.given(call.to)), layer, tiles, descriptors)


def launch_sums(call: Launch, ids_RK: Tensor, items: int) -> None:
    """Sum the rows that several experts take, out of `to.partial_sums` into `to.out`.

    The second product counts `items` items for each tile, or none; then the kernel waits for the whole product. With
    1,024 tokens a rank V4-Flash's experts of mxfp4 took 553 µs if sums waited for the row's experts, and 561 if not.
    Product and sum are rounded separately (no fused multiply-add), as in `UnfinalizedRows.finish`.
    """
    spec, to, rows = call.spec, call.to, ids_RK.shape[0]
    if rows < LONG_SUMS:
        rows_of_a_block, (columns, warps) = 1, (4096, 8) if spec.hidden_size % 4096 == 0 else (2048, 4)
    else:
        rows_of_a_block, columns, warps = 16, 1024, 4
    columns = min(columns, triton.next_power_of_2(spec.hidden_size))
    grid = (triton.cdiv(rows, rows_of_a_block), triton.cdiv(spec.hidden_size, columns))
    launch(summing.sum_rows, grid,
        to.partial_sums, call.weights_RK, ids_RK, to.out, ids_RK if to.slots_R is None else to.slots_R,
        call.sorted.how_many, rows, to.out.stride(0),
        H=spec.hidden_size, TOP_K=spec.top_k, CHOICES=triton.next_power_of_2(spec.top_k),
        EXPERTS=spec.num_local_experts, HAS_OUT_SLOTS=to.slots_R is not None, WEIGHTED=spec.weight_on == "output",
        COLUMNS=columns, ROWS=rows_of_a_block, ITEMS=items if rows < LONG_SUMS else 0, EARLY=call.early,
        num_warps=warps, enable_fp_fusion=False, **call.options,
    )  # fmt: skip
