"""The specification of a rank's experts: sizes, formats, and the activation between the two products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tokenyard.experts.activations import Activation
from tokenyard.formats import FORMATS, Format, weight_format

WeightOn = Literal["input", "output"]

# The value of `LayerSpec.inner` if the activation between the two products is not quantized.
EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """What one rank's experts of one layer must compute."""

    hidden_size: int  # H, the width of a row
    intermediate_size: int  # I, the width between the two products
    num_local_experts: int  # L, the experts of this rank; may be 0
    top_k: int  # K, the experts that a token chooses
    activation: Activation  # the function between the two products
    bias: bool = False  # whether there are `b13` and `b2`
    weights: str = "bf16"  # the format that holds the weight matrices
    dtype: torch.dtype = torch.bfloat16  # the dtype of the layer's rows, in and out
    # The format of rows that the experts compute on. None: the one in which they arrive. Rows that arrive in another
    # format are encoded in this one (and decoded again, if the matrix product is one of plain numbers).
    rows: Format | None = None
    # The inner format: that of the activation between the two products. None: it has the precision of the products.
    inner: Format | None = None
    # Where the routing weight is applied: on an expert's output, or on its input.
    weight_on: WeightOn = "output"
    # E, the experts of the whole layer. The choice of tiles depends on it, results do not.
    num_experts: int | None = None
    # Whether the bits of a row's results must not depend on the other rows of its batch.
    batch_invariant: bool = False
    # Whether the weights are parameters, of which a backward computes gradients (`plan(training=True)`). They may be
    # of any plain dtype then: they are multiplied in `dtype`, to which each call casts them.
    trains: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, by the name of their field in `ExpertWeights`."""
        L, H, I = self.num_local_experts, self.hidden_size, self.intermediate_size  # noqa: E741
        wide = 2 * I if self.activation.gated else I
        shapes: dict[str, tuple[int, ...]] = {"w13": (L, wide, H), "w2": (L, H, I)}
        if self.bias:
            shapes |= {"b13": (L, wide), "b2": (L, H)}
        return shapes


def takes_rows(weights: str, rows: Format) -> bool:
    """Whether experts with such weights compute on rows of this format; other rows are decoded first.

    >>> from tokenyard import formats
    >>> takes_rows("mxfp4", formats.get("mxfp8(alignment=256)")), takes_rows("mxfp4", formats.get("nvfp4"))
    (True, False)
    """
    # Row formats that are not in the registry, a user's own, are not restricted.
    known = rows.name in FORMATS
    return not rows.quantized or not known or rows.name in weight_format(weights).row_formats
