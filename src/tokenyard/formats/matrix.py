"""What a weight format is: how a matrix of weights is held, and how many bytes that takes.

Weight matrices are `[.., N, D]`: N outputs, D inputs, and leading dimensions for several matrices (one per expert).
Their rows are encoded along D, as rows that travel are. A `WeightFormat` declares the tensors that hold a matrix (its
payloads), makes them from plain weights (`quantize`), and decodes them: a whole matrix, or a tile of some of its
outputs, which is all that a product needs at a time.

    w_LND ── quantize ──► QuantizedMatrix(payloads) ──[expert].tile(first, last)──► float32 [last - first, D]

Payloads are as wide as D rounded up to whole blocks needs; the pad holds zeros, and decoding leaves it out. How a
format treats zero blocks, Inf and NaN is documented where it is defined.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats.base import ROW_DTYPES, InfBecomes, dtype_name, kind_of, pick


class HeldPayload(NamedTuple):
    """One tensor of a weight matrix: its dtype, and its shape after the leading dimensions `[..]`."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightFormat(ABC):
    """A way to hold weight matrices. Subclasses are frozen dataclasses."""

    name: ClassVar[str]  # the name in `WEIGHT_FORMATS`
    # Columns that share one scale; 1 where there are no scales.
    block: ClassVar[int] = 1
    quantized: ClassVar[bool] = True  # whether holding bf16 weights in it loses bits
    # The quantized row formats that experts with such weights compute on. All of them compute on plain rows, too; rows
    # that arrive in other formats are decoded first.
    row_formats: ClassVar[tuple[str, ...]] = ()
    # The inner formats: those in which experts with such weights may hold the activation between their two products.
    inner_formats: ClassVar[tuple[str, ...]] = ()
    # What ±Inf decodes to after `quantize`, with its sign. NaN decodes to NaN, and all that shares a scale with it.
    inf: ClassVar[InfBecomes]

    @abstractmethod
    def payloads(self, outputs: int, inputs: int) -> dict[str, HeldPayload]:
        """The tensors that hold one matrix `[N, D]`, by name."""

    @abstractmethod
    def quantize(self, w_ND: Tensor) -> QuantizedMatrix:
        """Encode plain weights `[.., N, D]`, which are not changed, in this format."""

    @abstractmethod
    def decode_rows(self, matrix: QuantizedMatrix, first: int, last: int) -> Tensor:
        """Outputs `first` to `last` of one matrix `[N, D]`, as float32 `[last - first, D]`."""

    def padded_size(self, inputs: int) -> int:
        """D, rounded up to whole blocks."""
        return -(-inputs // self.block) * self.block

    def nbytes(self, *shape: int) -> int:
        """Bytes of matrices of this shape, `[.., N, D]`."""
        *many, outputs, inputs = shape
        declared = self.payloads(outputs, inputs).values()
        return math.prod(many) * sum(math.prod(p.shape) * p.dtype.itemsize for p in declared)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """Weight matrices `[.., N, D]` in a format: its payloads by name, each with the leading dimensions `[..]`.

    >>> from tokenyard import formats
    >>> matrix = formats.weight_format("mxfp4").quantize(torch.randn(8, 100, 48))
    >>> matrix.payloads["data"].shape, matrix.nbytes
    (torch.Size([8, 100, 32]), 27200)
    >>> matrix[3].tile(10, 20).shape
    torch.Size([10, 48])
    """

    format: WeightFormat  # the format of the weights
    shape: tuple[int, ...]  # `[.., N, D]`: matrices of N outputs and D inputs
    payloads: Mapping[str, Tensor]  # the tensors by name

    def __post_init__(self) -> None:
        *many, outputs, inputs = self.shape
        declared = self.format.payloads(outputs, inputs)
        expected = {name: (p.dtype, (*many, *p.shape)) for name, p in declared.items()}
        found = {name: (p.dtype, tuple(p.shape)) for name, p in self.payloads.items()}
        if found != expected:
            raise InputError(
                f"a {self.format} matrix {list(self.shape)} is held in {_listed(found)}",
                expected=f"{_listed(expected)}, as {self.format} declares",
                fix=f"quantize plain weights with weight_format('{self.format}').quantize",
            )

    @property
    def device(self) -> torch.device:
        """The device of the payloads."""
        return next(iter(self.payloads.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes that the payloads take."""
        return sum(payload.nbytes for payload in self.payloads.values())

    def __getitem__(self, expert: int) -> QuantizedMatrix:
        """One of the matrices, by its index in the first dimension, as a view."""
        payloads = {name: payload[expert] for name, payload in self.payloads.items()}
        return replace(self, shape=self.shape[1:], payloads=payloads)

    def select(self, experts: Sequence[int]) -> QuantizedMatrix:
        """A copy of some of the matrices, by their indices in the first dimension."""
        places = [int(expert) for expert in experts]
        payloads = {name: pick(payload, places) for name, payload in self.payloads.items()}
        return replace(self, shape=(len(places), *self.shape[1:]), payloads=payloads)

    def tile(self, first: int, last: int) -> Tensor:
        """Outputs `first` to `last` of one matrix `[N, D]`, as float32 `[last - first, D]`."""
        return self.format.decode_rows(self, first, last)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All weights as numbers, `[.., N, D]`."""
        if len(self.shape) > 2:
            out = torch.empty(self.shape, dtype=dtype, device=self.device)
            for expert in range(self.shape[0]):
                out[expert] = self[expert].decode(dtype)
            return out
        outputs, inputs = self.shape
        out = torch.empty(outputs, inputs, dtype=dtype, device=self.device)
        step = max(1, DECODE_TILE // inputs)
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            out[first:last] = self.tile(first, last)
        return out


# Elements that are decoded at a time: 512 KiB of float32, which fit into a core's second-level cache.
DECODE_TILE = 128 * 1024


def check_matrix(w_ND: Tensor) -> None:
    """Raise unless `w_ND` holds one or several matrices of plain weights."""
    fits = isinstance(w_ND, Tensor) and w_ND.dim() >= 2 and w_ND.dtype in ROW_DTYPES
    if not fits or 0 in w_ND.shape[-2:]:
        found = kind_of(w_ND) if isinstance(w_ND, Tensor) else repr(w_ND)
        raise InputError(
            f"the weights to quantize are {found}",
            expected=f"matrices [.., outputs, inputs] of {', '.join(map(dtype_name, ROW_DTYPES))}",
            fix="pass plain weights, laid out as [experts, out, in]",
        )


def _listed(payloads: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype_name(dtype)}{list(shape)}" for name, (dtype, shape) in payloads.items())
