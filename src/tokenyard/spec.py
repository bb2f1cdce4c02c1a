"""`LayerSpec`: what a layer is, said once. The plan checks it; nothing else is ever asked of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tokenyard.experts import Activation, Experts
from tokenyard.experts.base import WeightOn
from tokenyard.formats import Format, Payload
from tokenyard.placement import Placement
from tokenyard.routing import Router


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One MoE layer. Layers of one plan may differ in every field.

    >>> LayerSpec(name="moe.0", hidden_size=2880, intermediate_size=1024, num_experts=32, top_k=4,
    ...           wire="mxfp8(alignment=256)").top_k
    4
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    # The most tokens that one rank brings in one call; None takes the plan's.
    max_tokens: int | None = None
    # Of the rows that go in and come out.
    dtype: torch.dtype = torch.bfloat16
    # The format in which rows travel out, and results travel back. None: the layer's own dtype.
    wire: str | Format | None = None
    combine_wire: str | Format | None = None
    # The format that the experts compute on. None: whatever arrives. Rows that do not arrive in it are
    # quantized by the experts (quantize-after); rows that do, by the sender (quantize-before).
    expert_rows: str | Format | None = None
    activation: str | Activation = "swiglu"
    bias: bool = False
    # The format that holds the weight matrices; `ExpertWeights.quantize` makes them.
    weights: str = "bf16"
    # Where the routing weight is applied: on an expert's output, or on its input.
    weight_on: WeightOn = "output"
    router: Router | None = None
    # The factor that routing weights hold. None: the router's, or 1.
    routed_scaling: float | None = None
    placement: str | Placement = "contiguous"
    experts: str | type[Experts] = "grouped"
    # Further per-token payloads that travel with the rows.
    payloads: tuple[Payload, ...] = ()
    # Who sums a token's results over ranks. The caller gets them unreduced, as `RankRows`.
    reduce_ranks: Literal["exchange", "caller"] = "exchange"
    # Expert parallelism splits experts between ranks, never one expert: only 1 can be planned.
    tensor_parallel: int = 1
