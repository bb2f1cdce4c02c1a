"""Block formats: elements of few bits, and a scale for each block of columns.

`BlockCode` declares the block size and the dtypes of elements and scales.

Encoding takes several passes over the rows: amax, scale, round, cast. Over a whole batch each pass would go to main
memory; over a few rows at a time the float32 copies stay in the second-level cache, and one core encodes several times
faster. On a GPU every pass is a launch, so there the batch is one chunk.

An encoder reads the rows twice: first for the amax of all blocks, from which it computes the scales, then for the
elements. Computing the scales chunk by chunk would cost more in calls of torch than reading the rows again.

Rows are independent in every format, so chunking cannot change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tokenyard.formats import bits
from tokenyard.formats.base import EncodedRows, Format, Payload

# float32 elements per chunk, of which up to three buffers are in use. In MB/s of bf16 input on one core with
# 1.25 MB of second-level cache (T 512, H 7168, medians beside other work), mxfp8 / nvfp4: 2^16: 695 / 310,
# 2^17: 700 / 357, 2^18: 674 / 286. A chunk costs some ten calls of a few microseconds, whatever its size.
CHUNK_ELEMENTS = 1 << 17


def rows_per_chunk(num_rows: int, width: int, device: torch.device) -> int:
    """How many rows are encoded or decoded at a time.

    >>> rows_per_chunk(512, 7168, torch.device("cpu")), rows_per_chunk(512, 7168, torch.device("cuda"))
    (18, 512)
    """
    return max(1, CHUNK_ELEMENTS // width) if device.type == "cpu" else max(1, num_rows)


class Chunk(NamedTuple):
    """A few rows as float32 with zeros in the pad, and two spare buffers. The caller may overwrite all three."""

    rows: slice
    values_RP: Tensor
    spare_RP: Tensor
    spare2_RP: Tensor


def float32_chunks(x_TH: Tensor, padded_size: int) -> Iterator[Chunk]:
    """Yield the rows of `x_TH`, which is not changed, in chunks. All chunks use the same buffers.

    >>> x_TH = torch.ones(3, 5)
    >>> [(chunk.rows, chunk.values_RP.shape, chunk.values_RP.sum()) for chunk in float32_chunks(x_TH, 32)]
    [(slice(0, 3, None), torch.Size([3, 32]), tensor(15.))]
    """
    x_TH = x_TH.detach()
    num_rows, hidden_size = x_TH.shape
    step = min(rows_per_chunk(num_rows, padded_size, x_TH.device), num_rows)
    buffers = torch.empty(3, step, padded_size, dtype=torch.float32, device=x_TH.device).unbind()
    for start in range(0, num_rows, max(step, 1)):
        rows = slice(start, min(start + step, num_rows))
        if rows.stop - rows.start < step:
            buffers = tuple(buffer[: rows.stop - rows.start] for buffer in buffers)
        values_RP, spare_RP, spare2_RP = buffers
        if padded_size > hidden_size:
            values_RP[:, hidden_size:].zero_()
            values_RP[:, :hidden_size].copy_(x_TH[rows])
        else:
            values_RP.copy_(x_TH[rows])
        yield Chunk(rows, values_RP, spare_RP, spare2_RP)


def in_blocks(matrix: Tensor, block: int) -> Tensor:
    """A view of `[rows, columns]` as `[rows, columns / block, block]`.

    >>> in_blocks(torch.empty(0, 64), 32).shape
    torch.Size([0, 2, 32])
    """
    return matrix.view(matrix.shape[0], matrix.shape[1] // block, block)


def block_amax(x_TH: Tensor, padded_size: int, block: int) -> Tensor:
    """The largest magnitude of each block of columns, float32 `[T, P / block]`; NaN where a block holds one.

    >>> block_amax(torch.tensor([[1.0, -3.0, 0.5]]), padded_size=4, block=2)
    tensor([[3.0000, 0.5000]])
    """
    amax = torch.empty(x_TH.shape[0], padded_size // block, dtype=torch.float32, device=x_TH.device)
    # Without their sign, floats are ordered like the integers of their bits, NaN the largest. torch reduces
    # blocks of 32 floats with vectors (0.23 ns per element) but blocks of 16 without (1.29; as integers 0.44).
    kind = torch.float32 if block >= 32 else torch.int32
    for rows, values_RP, spare_RP, _ in float32_chunks(x_TH, padded_size):
        torch.bitwise_and(values_RP.view(torch.int32), 0x7FFFFFFF, out=spare_RP.view(torch.int32))
        torch.amax(in_blocks(spare_RP.view(kind), block), -1, out=amax[rows].view(kind))
    return amax


def mark_nan_blocks(data_RP: Tensor, is_nan: Tensor, block: int) -> None:
    """Write NaN, with the same bits on all devices, into all e4m3 elements of the blocks that `is_nan` marks.

    >>> data = torch.ones(1, 4).to(torch.float8_e4m3fn)
    >>> mark_nan_blocks(data, torch.tensor([[False, True]]), block=2)
    >>> data.float()
    tensor([[1., 1., nan, nan]])
    """
    if bits.some(is_nan):
        in_blocks(data_RP.view(torch.uint8), block).masked_fill_(is_nan.unsqueeze(-1), bits.E4M3_NAN_CODE)


def decode_blocks(
    to_float32: Callable[[Tensor], Tensor], data: Tensor, scales: Tensor, hidden_size: int, dtype: torch.dtype
) -> Tensor:
    """Elements (`to_float32(data)`) times the float32 scale of their block, cut to H columns.

    >>> data = torch.ones(1, 4).to(torch.float8_e4m3fn)
    >>> decode_blocks(bits.e4m3_to_float32, data, torch.tensor([[2.0, 4.0]]), 3, torch.float32)
    tensor([[2., 2., 4.]])
    """
    num_rows = data.shape[0]
    out_TH = torch.empty(num_rows, hidden_size, dtype=dtype, device=data.device)
    step = rows_per_chunk(num_rows, hidden_size, data.device)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        values_RP = to_float32(data[rows])
        in_blocks(values_RP, values_RP.shape[1] // scales.shape[1]).mul_(scales[rows].unsqueeze(-1))
        out_TH[rows] = values_RP[:, :hidden_size]
    return out_TH


def write_e2m1(x_TH: Tensor, step: Tensor, data: Tensor) -> None:
    """Write x / step as packed e2m1 codes into `data`, with one step per block. Blocks whose step is NaN get code 0.

    >>> data = torch.empty(1, 2, dtype=torch.uint8)
    >>> write_e2m1(torch.tensor([[1.0, 2.0, -6.0, 0.0]]), torch.tensor([[2.0, 1.0]]), data)
    >>> bits.e2m1_to_float32(data)
    tensor([[ 0.5000,  1.0000, -6.0000,  0.0000]])
    """
    padded_size, is_nan = 2 * data.shape[1], step.isnan()
    some_nan = bits.some(is_nan)
    for rows, values_RP, spare_RP, spare2_RP in float32_chunks(x_TH, padded_size):
        values = in_blocks(values_RP, padded_size // step.shape[1]).div_(step[rows].unsqueeze(-1))
        if some_nan:
            values.masked_fill_(is_nan[rows].unsqueeze(-1), 0.0)
        data[rows] = bits.pack_nibbles_(bits.e2m1_codes_(values_RP, spare_RP, spare2_RP))


class BlockCode(NamedTuple):
    """The parameters of a block format, for rows and for weights."""

    block: int  # columns that share one scale
    data: torch.dtype  # the dtype that holds the elements
    columns: int  # columns that one number of that dtype holds: 2 for two 4-bit codes in a byte
    scales: torch.dtype  # the dtype that holds the scales
    element_values: Callable[[Tensor], Tensor]  # converts elements to float32
    scale_values: Callable[[Tensor], Tensor]  # converts scales to float32

    def widths(self, padded_size: int) -> dict[str, tuple[torch.dtype, int]]:
        """The dtype and the width of each payload of a row."""
        return {
            "data": (self.data, padded_size // self.columns),
            "scales": (self.scales, padded_size // self.block),
        }


FP8_BLOCK128 = BlockCode(128, torch.float8_e4m3fn, 1, torch.float32, bits.e4m3_to_float32, Tensor.float)
MXFP8 = BlockCode(32, torch.float8_e4m3fn, 1, torch.uint8, bits.e4m3_to_float32, bits.e8m0_to_float32)
NVFP4 = BlockCode(16, torch.uint8, 2, torch.float8_e4m3fn, bits.e2m1_to_float32, bits.e4m3_to_float32)
MXFP4 = BlockCode(32, torch.uint8, 2, torch.uint8, bits.e2m1_to_float32, bits.e8m0_to_float32)
MXINT4 = BlockCode(32, torch.uint8, 2, torch.bfloat16, bits.int4_to_float32, Tensor.float)


@cache
def _payloads(code: BlockCode, padded_size: int) -> tuple[Payload, ...]:
    """The payloads of a row, cached because every call of a layer uses them several times."""
    widths = code.widths(padded_size)
    return tuple(Payload(name=name, dtype=dtype, width=width) for name, (dtype, width) in widths.items())


class BlockFormat(Format):
    """Rows whose elements have a scale for each block of columns."""

    _code: ClassVar[BlockCode]  # the block size, and the dtypes of elements and scales

    def payloads(self, hidden_size: int) -> tuple[Payload, ...]:
        return _payloads(self._code, self.padded_size(hidden_size))

    def decode(self, rows: EncodedRows, dtype: torch.dtype = torch.float32) -> Tensor:
        payloads = self.unswizzle(rows).payloads
        scales = self._scale_values(payloads)
        return decode_blocks(self._code.element_values, payloads["data"], scales, rows.hidden_size, dtype)

    def _scale_values(self, payloads: Mapping[str, Tensor]) -> Tensor:
        """The scales of encoded rows, as float32."""
        return self._code.scale_values(payloads["scales"])
