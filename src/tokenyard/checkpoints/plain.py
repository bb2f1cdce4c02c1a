"""Plain weights: bf16, fp16 or float32, one expert at a time or all in one tensor.

Where all experts are in one tensor, a linear map lies as `[N, D]`, or as `[D, N]` (`transposed`: what
Transformers holds of gpt-oss). Which of the two it is follows from the shapes of w13 and w2 together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokenyard.checkpoints.layout import Layout, Piece

# What files call the dtypes, and the weight formats of these.
PLAIN_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class PlainLayout(Layout):
    """Weights as they are, in one of the plain dtypes."""

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
        """`….gate_proj.weight`, but `….experts.gate_up_proj`."""
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
