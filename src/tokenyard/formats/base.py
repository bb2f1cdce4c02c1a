"""What a format is: how a row is encoded, and how many bytes that takes.

A *format* declares its payloads (data, scales) for a hidden size: name, dtype and width of each. The size of the
workspace, the layout of a row on the wire, and the check of every tensor that arrives all follow from this one
declaration. No other code computes the width of a padded row.

    x_TH ── pad to a multiple of `alignment` ── quantize per block ──► EncodedRows(payloads of P columns)
    EncodedRows ── dequantize ── cut off the pad ──► x_TH

Rules that all formats keep:

- The encoding of a row depends on that row alone, never on its neighbors in the batch.
- Encoding converts to float32, clamps, then casts. Scales are computed on the bits of float32, so that a GPU
  kernel can give bitwise equal ones.
- `encode` never changes its input, and `decode(encode(x))` has the width of `x`, whatever the padding.
- Scales are encoded *linear*, `[rows, P / block]`. Only linear scales can travel row by row; a kernel that
  wants the 128×4 swizzled layout gets it after the exchange (`EncodedRows.swizzled`).
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeGuard

import torch
from torch import Tensor

from tokenyard.duties import Duty, aside, record
from tokenyard.errors import InputError, Reason, shown

ScaleLayout = Literal["linear", "swizzled"]
# What ±Inf decodes to. "the largest of …" is the largest finite magnitude there, up to the rounding of a scale.
InfBecomes = Literal[
    "Inf",
    "the largest number",
    "Inf, or the largest number if cast",
    "the largest of its row",
    "the largest of its matrix",
    "the largest code",
]

# The dtypes that a caller's rows may have.
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# The dtypes that further payloads of a caller may have: those of which torch can copy rows on every device.
PAYLOAD_DTYPES = (
    *ROW_DTYPES,
    torch.float64,
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `'bfloat16'`."""
    return str(dtype).removeprefix("torch.")


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast numbers to `dtype`. Those beyond its finite range, Inf included, become ± its largest number; NaN stays.

    >>> saturated(torch.tensor([1e5, -3.0]), torch.float16)
    tensor([ 6.5504e+04, -3.0000e+00], dtype=torch.float16)
    """
    if x.dtype == dtype:
        return x
    largest = _largest(dtype)
    wide = x if x.dtype == torch.float32 else x.float()
    return wide.clamp(-largest, largest).to(dtype)


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def is_tensor(
    value: object,
    *,
    shape: tuple[int | None, ...],
    dtypes: Sequence[object] | None = None,
    device: torch.device | None = None,
) -> TypeGuard[Tensor]:
    """Whether `value` is a tensor of this shape (None: any size), of one of these dtypes, on this device.

    >>> is_tensor(torch.zeros(3, 2), shape=(None, 2), dtypes=(torch.float32,)), is_tensor(None, shape=())
    (True, False)
    """
    return (
        isinstance(value, Tensor)
        and value.dim() == len(shape)
        and all(wanted in (None, found) for found, wanted in zip(value.shape, shape, strict=True))
        and (dtypes is None or value.dtype in dtypes)
        and (device is None or same_device(value.device, device))
    )


def same_device(found: torch.device, expected: torch.device) -> bool:
    """Whether a device is the one that was expected: `cuda` means any GPU, `cuda:1` that one."""
    return found.type == expected.type and expected.index in (None, found.index)


def is_matrix(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a strided tensor of two dimensions, neither sparse nor nested."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dim() == 2


def kind_of(tensor: Tensor) -> str:
    """How an error names a tensor: its dtype, its shape, and its layout where that is not the usual one."""
    layout = "" if tensor.layout == torch.strided else f", {str(tensor.layout).removeprefix('torch.')}"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{layout}"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One tensor of an encoded row, `[rows, width]` of `dtype`.

    >>> Payload(name="scales", dtype=torch.uint8, width=224).nbytes
    224
    """

    name: str  # the name, such as `data` or `scales`
    dtype: torch.dtype  # the dtype of its elements
    width: int  # elements of one row

    @property
    def nbytes(self) -> int:
        """Bytes that one row of this payload takes."""
        return self.width * self.dtype.itemsize

    def check(self, tensor: Tensor, num_rows: int) -> None:
        """Raise unless a tensor has the declared dtype and the shape `[num_rows, width]`."""
        fits = is_matrix(tensor) and tensor.dtype == self.dtype
        if not fits or tuple(tensor.shape) != (num_rows, self.width):
            found = kind_of(tensor) if isinstance(tensor, Tensor) else shown(tensor)
            raise InputError(
                f"payload {self.name!r} is {found}",
                expected=f"{dtype_name(self.dtype)}[{num_rows}, {self.width}], as its format declares",
                fix="encode the rows with the format that the layer was planned for",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedRows:
    """Rows in a format: its payloads by name, and the width of the rows before they were padded."""

    format: Format  # the format of the rows
    hidden_size: int  # H, the width before padding, which decoding restores
    payloads: Mapping[str, Tensor]  # the tensors by name, `[rows, width]`
    scale_layout: ScaleLayout = "linear"  # `linear`, or `swizzled` in tiles of 128×4

    @property
    def num_rows(self) -> int:
        """The number of rows: the first dimension of the first payload, which is never swizzled."""
        return next(iter(self.payloads.values())).shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the payloads."""
        return next(iter(self.payloads.values())).device

    def check(self) -> None:
        """Raise unless every payload has the dtype and shape that the format declares, and scales are linear."""
        declared = self.format.payloads(self.hidden_size)
        if list(self.payloads) != [p.name for p in declared]:
            raise InputError(
                f"the rows carry payloads {list(self.payloads)}",
                expected=f"{[p.name for p in declared]}, as {self.format} declares",
                fix=f"encode the rows with {self.format}.encode",
            )
        if self.scale_layout != "linear":
            raise InputError(
                f"the rows carry {self.scale_layout} scales",
                expected="linear scales: only these can travel row by row",
                fix="swizzle after the exchange, or call `.linear()` first",
            )
        num_rows = self.num_rows
        for payload in declared:
            payload.check(self.payloads[payload.name], num_rows)

    def slice(self, first: int, last: int) -> EncodedRows:
        """Rows `first` to `last`, as views. Their scales must be linear: swizzled ones cannot be cut by rows."""
        payloads = {name: payload[first:last] for name, payload in self.payloads.items()}
        return replace(self, payloads=payloads)

    def select(self, index_N: Tensor) -> EncodedRows:
        """A copy of some rows."""
        payloads = {name: pick(payload, index_N) for name, payload in self.payloads.items()}
        return replace(self, payloads=payloads)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rows as numbers, `[rows, hidden_size]`, without the pad."""
        return self.format.decode(self, dtype)

    def swizzled(self) -> EncodedRows:
        """The same rows with 128×4 swizzled scales. Raises if they are swizzled already."""
        swizzled = self.format.swizzle(self)
        if swizzled.scale_layout == "swizzled":
            record(Duty.SWIZZLE, self.num_rows)
        return swizzled

    def linear(self) -> EncodedRows:
        """The same rows with linear scales; `self` if they are linear already."""
        return self.format.unswizzle(self)


class Format(ABC):
    """A way to encode rows. Subclasses are frozen dataclasses: formats with equal parameters encode alike.

    `str(format)` is its spelling in specs (`mxfp8(alignment=256)`), which `tokenyard.formats.get` reads.
    """

    name: ClassVar[str]  # the name in `FORMATS`
    # Columns that share one scale; 1 where there are no scales.
    block: ClassVar[int] = 1
    # Whether encoding a bf16 row loses bits; the duty QUANTIZE must then be assigned to a party.
    quantized: ClassVar[bool] = True
    # The layouts that its scales can have; none where there are no scales.
    scale_layouts: ClassVar[tuple[ScaleLayout, ...]] = ()
    # The dtypes of rows that may be encoded into this format for a dispatch.
    wire_dtypes: ClassVar[tuple[torch.dtype, ...]] = ROW_DTYPES
    # The dtypes of results that may be encoded into this format for a combine.
    combine_dtypes: ClassVar[tuple[torch.dtype, ...]] = ROW_DTYPES

    @property
    def inf(self) -> InfBecomes | None:
        """What ±Inf decodes to, with its sign; None: not declared. NaN decodes to NaN, and all of its block with it."""
        return None

    @property
    def row_alignment(self) -> int:
        """Rows are padded to a multiple of this many columns."""
        return self.block

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap `encode` of quantized formats, a user's own included, so that it records its duties in the ledger."""
        super().__init_subclass__(**options)
        if cls.quantized:
            cls.encode = _counted(cls.encode)  # type: ignore[method-assign]

    def padded_size(self, hidden_size: int) -> int:
        """The width of an encoded row, pad included."""
        return -(-hidden_size // self.row_alignment) * self.row_alignment

    @abstractmethod
    def payloads(self, hidden_size: int) -> tuple[Payload, ...]:
        """The payloads of an encoded row of this width, in the order in which they travel."""

    def bytes_per_row(self, hidden_size: int) -> int:
        """Bytes of one encoded row: the sum over its payloads."""
        return sum(p.nbytes for p in self.payloads(hidden_size))

    def empty_payloads(self, num_rows: int, hidden_size: int, device: torch.device) -> dict[str, Tensor]:
        """Uninitialized tensors for that many encoded rows, by name, in the order in which they travel."""
        return {
            p.name: torch.empty(num_rows, p.width, dtype=p.dtype, device=device)
            for p in self.payloads(hidden_size)
        }

    @abstractmethod
    def encode(self, x_TH: Tensor) -> EncodedRows:
        """Encode rows. `x_TH` is bf16, fp16 or float32 and is not changed."""

    @abstractmethod
    def decode(self, rows: EncodedRows, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode rows to their width without the pad. `rows` may have linear or swizzled scales.

        A format without scales returns the payload itself if `dtype` is its own: do not write into the result.
        """

    def swizzle(self, rows: EncodedRows) -> EncodedRows:
        """The rows with scales in the 128×4 layout; formats whose scales cannot be swizzled return the same rows."""
        from tokenyard.formats.swizzle import swizzle_rows

        return swizzle_rows(rows) if "swizzled" in self.scale_layouts else rows

    def unswizzle(self, rows: EncodedRows) -> EncodedRows:
        """The rows with scales in linear layout; the same object if they are linear already."""
        if rows.scale_layout == "linear":
            return rows
        from tokenyard.formats.swizzle import unswizzle_rows

        return unswizzle_rows(rows)

    def carries(self, dtype: torch.dtype) -> Reason | None:
        """None, or why rows of this dtype cannot travel out in this format."""
        return self._takes(dtype, self.wire_dtypes, "wire")

    def returns(self, dtype: torch.dtype) -> Reason | None:
        """None, or why results of this dtype cannot travel back in this format."""
        return self._takes(dtype, self.combine_dtypes, "combine_wire")

    def _takes(self, dtype: torch.dtype, allowed: tuple[torch.dtype, ...], field: str) -> Reason | None:
        if dtype in allowed:
            return None
        if not allowed:
            return Reason(field=field, value=self, why="results do not travel back in this format")
        names = " or ".join(map(dtype_name, allowed))
        return Reason(field=field, value=self, why=f"takes {names} rows, not {dtype_name(dtype)}")

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


def _counted(encode: Callable[..., EncodedRows]) -> Callable[..., EncodedRows]:
    """Wrap an `encode` so that it records the duties QUANTIZE and, where it adds a pad, PAD."""

    @functools.wraps(encode)
    def counted(self: Format, x_TH: Tensor, **options: Any) -> EncodedRows:
        if not self.quantized:
            return encode(self, x_TH, **options)
        with aside():  # an `encode` that calls another one does the duty once, and it is recorded below
            rows = encode(self, x_TH, **options)
        record(Duty.QUANTIZE, rows.num_rows)
        if self.padded_size(rows.hidden_size) > rows.hidden_size:
            record(Duty.PAD, rows.num_rows)
        return rows

    return counted


def pick(payload: Tensor, index_N: Tensor | list[int]) -> Tensor:
    """Some rows, or matrices, of a payload. One-byte dtypes are indexed as uint8: torch cannot index all of them."""
    if payload.dtype.itemsize > 1:
        return payload[index_N]
    return payload.view(torch.uint8)[index_N].view(payload.dtype)


def check_rows(x_TH: Tensor) -> None:
    """Raise unless `x_TH` is a matrix of a dtype that rows may have."""
    if not is_matrix(x_TH) or x_TH.shape[1] == 0 or x_TH.dtype not in ROW_DTYPES:
        raise InputError(
            f"x_TH is {kind_of(x_TH)}",
            expected=f"a matrix [T, H] of {', '.join(map(dtype_name, ROW_DTYPES))} with H ≥ 1",
            fix="flatten the batch with x.reshape(-1, hidden_size), and quantize through a format",
        )


def check_device(what: str, found: torch.device, device: torch.device) -> None:
    """Raise unless a tensor is on the group's device: the CPU, or the GPU of the same index."""
    if found.type != device.type or (device.index is not None and found.index != device.index):
        raise InputError(f"{what} is on {found}", expected=str(device), fix="move it there first")


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a matrix, `[rows, bytes]`, without a copy where it is laid out row by row already."""
    # A dimension of size 1 counts as contiguous with any stride, and then cannot be viewed as another dtype.
    if tensor.stride() != (tensor.shape[1], 1):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)
