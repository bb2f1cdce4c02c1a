"""What a layout is: how one linear map of an expert is stored in files, and which weight format holds it in memory.

A weight format says how matrices are held in memory. A layout says how checkpoints of one kind store the same numbers
on disk: the names, dtypes and shapes of the tensors, and how each becomes a payload of the format. No layout decodes:
the codes of quantized weights stay the same, and at most their packing changes.

Plain weights have the simplest layout: bf16, fp16 or float32, with a tensor for each expert or one for all. Where one
tensor holds all experts, a linear map is stored as `[N, D]`, or as `[D, N]` (`transposed`, as Transformers holds
gpt-oss). Which of the two it is follows from the shapes of w13 and w2 together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tokenyard.checkpoints.header import StoredTensor
from tokenyard.experts.spec import EXACT
from tokenyard.experts.weights import ExpertWeights
from tokenyard.formats import WeightFormat, weight_format

# The dtypes that files use for E8M0 scales, exponents of 8 bits: plain bytes, or the dtype made for them.
E8M0 = ("U8", "F8_E8M0")

# The plain dtypes, as files spell them, with the weight format of each.
PLAIN_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


class Piece(NamedTuple):
    """One tensor of a linear map on disk: the end of its name, its dtypes, and its shape (of one expert)."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """A tensor `[N, D / columns]` of a linear map `[N, D]` on disk: the end of its name, and its dtypes."""

    suffix: str
    dtypes: tuple[str, ...]
    columns: int


def data_and_scales(data: Stored, scales: Stored) -> Mapping[str, Stored]:
    """The tensors of a linear map with scales for blocks of inputs, by the payload that each becomes."""
    return {"data": data, "scales": scales}


class Layout(ABC):
    """How linear maps `[N, D]` are stored in files. Subclasses are frozen dataclasses."""

    # Who writes such files, as `tokenyard inspect` shows it.
    method: ClassVar[str]
    # The name of the weight format that holds the same numbers in memory.
    weights: str
    # The tensors of a linear map, by the payload that each becomes.
    tensors: ClassVar[Mapping[str, Stored]]
    # Tensors that hold one number for a whole linear map, by the payload that each becomes.
    numbers: ClassVar[Mapping[str, Piece]] = {}
    # Suffixes of tensors that files may hold and that are not read, such as scales of activations.
    unread: ClassVar[tuple[str, ...]] = ()
    # Tensors of a linear map that are written and not read.
    written: ClassVar[tuple[Piece, ...]] = ()
    # Payloads that the files do not hold, and the value of all their elements.
    constants: ClassVar[Mapping[str, float]] = {}
    # Whether one tensor holds all experts.
    fused: bool = False

    @property
    def format(self) -> WeightFormat:
        """The weight format that holds the same numbers in memory."""
        return weight_format(self.weights)

    @property
    def data(self) -> str:
        """The suffix of the name of the tensor that holds the elements."""
        return self.tensors["data"].suffix

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """N and D of a linear map whose `data` has this shape on disk (of one expert)."""
        return shape[0], self.tensors["data"].columns * shape[1]

    def pieces(self, outputs: int, inputs: int) -> dict[str, Piece]:
        """The tensors of a linear map `[N, D]`, by the payload that each becomes."""
        matrices = {
            payload: Piece(suffix, dtypes, (outputs, inputs // columns))
            for payload, (suffix, dtypes, columns) in self.tensors.items()
        }
        return matrices | dict(self.numbers)

    @abstractmethod
    def declared(self, quantization: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` (empty if the config has none) allows weights in this layout."""

    def mismatch(self, quantization: Mapping[str, Any]) -> str | None:
        """None, or the setting of a config that declares this layout which the weight format cannot represent."""
        return None

    def inner(self, quantization: Mapping[str, Any]) -> str:
        """The format of activations between an expert's products (`LayerSpec.inner`) that such a config implies."""
        return EXACT

    def refused(self, inputs: int) -> str | None:
        """None, or why linear maps with this number of inputs cannot be stored in this layout."""
        block = self.format.block
        if inputs % block:
            return f"rows of {inputs} columns are no whole number of blocks of {block}"
        return None

    def matches(self, present: Mapping[str, StoredTensor]) -> bool:
        """Whether the tensors of one linear map, given by suffix, have the names and dtypes of this layout."""
        pieces = self.pieces(1, 1).values()
        return all(
            piece.suffix in present and present[piece.suffix].dtype in piece.dtypes for piece in pieces
        )

    def fill(self, payload: str, stored: Tensor, out: Tensor) -> None:
        """Write a payload of one linear map into `out`, from its tensor on disk; a single number fills all of `out`."""
        # torch has a dtype for E8M0 scales; weight formats hold them as uint8.
        stored = stored.view(torch.uint8) if stored.dtype == torch.float8_e8m0fnu else stored
        out.copy_(stored if stored.numel() == 1 else stored.reshape(out.shape))

    def overlaps(self, outputs: int, parts: int) -> bool:
        """Whether `parts` maps of `outputs` rows, concatenated to one matrix, have a block of rows of two maps."""
        return False

    def join(self, shares: list[Tensor], outputs: int) -> Tensor | None:
        """The scales of one matrix, from those of its maps, which share blocks; None if their scales differ there."""
        return torch.cat(shares)

    def split(self, name: str, payload: Tensor, parts: int, outputs: int) -> Sequence[Tensor]:
        """The payloads of the maps that one matrix is made of, from that of the matrix: the inverse of `join`."""
        return payload.chunk(parts)

    def quantize(self, weights: ExpertWeights, parts: int) -> ExpertWeights:
        """Quantize plain weights to this layout's format, such that w13 can be split into `parts` maps."""
        return weights.quantize(self.format)

    def spelled(self, payloads: Mapping[str, Tensor], outputs: int, inputs: int) -> dict[str, Tensor]:
        """The tensors of a linear map as they are written to files, by suffix: the inverse of `fill`."""
        pieces = self.pieces(outputs, inputs)
        return {piece.suffix: payloads[name].reshape(piece.shape) for name, piece in pieces.items()}

    def quantization_config(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config` of a model whose experts are in this layout; `ignored` modules are plain."""
        raise NotImplementedError(f"{self} is not written")

    def __str__(self) -> str:
        return f"{self.method} {self.weights}"


@dataclass(frozen=True, kw_only=True)
class PlainLayout(Layout):
    """Weights that are not quantized, in one of the plain dtypes."""

    method = "plain"
    dtype: str
    fused: bool = False
    transposed: bool = False

    @property
    def weights(self) -> str:  # type: ignore[override]
        """The plain weight format of the dtype."""
        return PLAIN_DTYPES[self.dtype]

    @property
    def data(self) -> str:
        """The suffix of the tensor: `weight` in `….gate_proj.weight`, and none in `….experts.gate_up_proj`."""
        return "" if self.fused else "weight"

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        first, second = shape
        return (second, first) if self.transposed else (first, second)

    def pieces(self, outputs: int, inputs: int) -> dict[str, Piece]:
        shape = (inputs, outputs) if self.transposed else (outputs, inputs)
        return {"data": Piece(self.data, (self.dtype,), shape)}

    def declared(self, quantization: Mapping[str, Any]) -> bool:
        return True  # parts of a quantized model may be plain

    def fill(self, payload: str, stored: Tensor, out: Tensor) -> None:
        out.copy_(stored.mT if self.transposed else stored)

    def __str__(self) -> str:
        return "plain, transposed" if self.transposed else "plain"


PLAIN_LAYOUTS = tuple(
    PlainLayout(dtype=dtype, fused=fused, transposed=transposed)
    for fused, transposed in ((False, False), (True, False), (True, True))
    for dtype in PLAIN_DTYPES
)
