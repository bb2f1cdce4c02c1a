"""What experts are: they compute on the rows that this rank received, and return one type.

An experts class declares what it can serve (`supports`), takes `ReceivedRows`, and returns `ExpertRows`
(weighted, summed over this rank's experts of a row) or, with `finalize=False`, `UnfinalizedRows`. It knows
neither the group nor the exchange. Rows arrive in a format; decoding them is the experts' duty, once.

For each pair of a received row r and a choice k whose local id is not -1, with x the decoded row and w the
routing weight:

    weight_on="output":  w · (W2 · act(W13 · x + b13) + b2)
    weight_on="input":        W2 · act(W13 · (w · x) + b13) + b2

and the row's result is the sum over k, in the order of k, in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from tokenyard.errors import ContractError, InputError, Reason
from tokenyard.experts.activations import Activation
from tokenyard.formats.base import Format, ScaleLayout, dtype_name
from tokenyard.rows import ExpertRows, LocalRoutes, ReceivedRows, UnfinalizedRows, describe

WeightOn = Literal["input", "output"]

# How a plain weight matrix is held.
WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """What one rank's experts of one layer must compute."""

    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    top_k: int
    activation: Activation
    bias: bool = False
    weights: str = "bf16"  # the format that holds the weight matrices
    dtype: torch.dtype = torch.bfloat16  # of the layer's rows, in and out
    # The format that the experts compute on. None: whatever arrives. Where the wire does not bring rows in
    # this format, the experts encode them (and decode them again, where their matrix product is plain).
    rows: Format | None = None
    weight_on: WeightOn = "output"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, by the name of their field in `ExpertWeights`."""
        L, H, I = self.num_local_experts, self.hidden_size, self.intermediate_size  # noqa: E741
        wide = 2 * I if self.activation.gated else I
        shapes: dict[str, tuple[int, ...]] = {"w13": (L, wide, H), "w2": (L, H, I)}
        if self.bias:
            shapes |= {"b13": (L, wide), "b2": (L, H)}
        return shapes


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of one rank's experts, in the order of its placement.

    `w13` is `w13_L2IH`: gate rows, then up rows (interleaved row by row where the activation says so), or
    `w1_LIH` where the activation has no gate. `w2` is `w2_LHI`. `b13` and `b2` are the biases.
    """

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        """The tensors that are there, by field."""
        named = {f.name: cast("Tensor | None", getattr(self, f.name)) for f in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def select(self, experts: list[int]) -> ExpertWeights:
        """A copy of some experts' weights: `select(placement.local_experts(rank))` is what one rank owns."""
        return ExpertWeights(**{name: tensor[experts] for name, tensor in self.by_name().items()})


class Experts(nn.Module, ABC):
    """Computes experts. Subclasses declare what they serve and implement `compute`."""

    name: ClassVar[str]
    # Formats that may hold the weights.
    weight_formats: ClassVar[tuple[str, ...]] = tuple(WEIGHT_DTYPES)
    # Whether `compute` can weight and sum by itself. If not, the layer finishes what it returns.
    finalizes: ClassVar[bool] = True
    # Whether the experts turn logits into routes by themselves (then logits travel instead of routes).
    routes_itself: ClassVar[bool] = False
    # The layout in which the experts want the scales of the rows.
    scale_layout: ClassVar[ScaleLayout] = "linear"

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Reason | None:
        """None, or why these experts cannot serve this spec."""
        if spec.weights not in cls.weight_formats:
            known = ", ".join(cls.weight_formats)
            return Reason(
                field="weights", value=spec.weights, why=f"{cls.name} experts hold weights in {known}"
            )
        return None

    def __init__(self, spec: ExpertsSpec, weights: ExpertWeights, *, adopt: bool = False) -> None:
        """Check and take the weights: a copy of them, or with `adopt=True` the tensors themselves.

        Adopted tensors belong to the experts from then on: `load_` writes into them.
        """
        super().__init__()
        if (reason := type(self).supports(spec)) is not None:
            raise InputError(
                str(reason), expected="a spec that these experts support", fix="ask `supports` first"
            )
        self.spec = spec
        check_weights(spec, weights)
        for name, tensor in weights.by_name().items():
            self.register_buffer(name, tensor.detach() if adopt else tensor.detach().clone())

    @property
    def weights(self) -> ExpertWeights:
        """The weights as they are now (no copies)."""
        return ExpertWeights(**{name: self.get_buffer(name) for name in self.spec.shapes()})

    @torch.no_grad()
    def load_(self, weights: ExpertWeights) -> None:
        """Replace the weights in place: whatever refers to them (a captured graph) sees the new ones.

        All of them are checked before the first is changed.
        """
        check_weights(self.spec, weights)
        for name, tensor in weights.by_name().items():
            self.get_buffer(name).copy_(tensor)

    @abstractmethod
    def compute(self, received: ReceivedRows, *, finalize: bool) -> ExpertRows | UnfinalizedRows:
        """`ExpertRows` if `finalize`, else `UnfinalizedRows`. Never anything else."""

    def forward(self, received: ReceivedRows, *, finalize: bool = True) -> ExpertRows | UnfinalizedRows:
        """Compute, and hold the kernel to its contract."""
        result = self.compute(received, finalize=finalize)
        expected = ExpertRows if finalize else UnfinalizedRows
        if not isinstance(result, expected):
            raise ContractError(
                f"{type(self).__name__}.compute(finalize={finalize}) returned {describe(result)}",
                expected=f"{expected.__name__}: one type, whatever the kernel underneath returns",
                fix=f"wrap the kernel's output in {expected.__name__}",
            )
        return result

    def incoming(self, received: ReceivedRows, dtype: torch.dtype) -> Tensor:
        """The received rows as numbers, in the format that the spec asks for: decoded once, by its owner."""
        rows = received.dense()
        if self.spec.rows is not None and rows.format != self.spec.rows:
            rows = self.spec.rows.encode(rows.decode(self.spec.dtype))
        return rows.decode(dtype)


def local_routes(received: ReceivedRows) -> LocalRoutes:
    """The routes of a batch, for experts that do not route by themselves."""
    if not isinstance(received.routes, LocalRoutes):
        raise ContractError(
            f"the batch carries {describe(received.routes)}",
            expected="LocalRoutes",
            fix="use experts that route by themselves, or dispatch routes",
        )
    return received.routes


def check_weights(spec: ExpertsSpec, weights: ExpertWeights) -> None:
    """Raise unless the weights are there, with the shapes and the dtype of the spec."""
    found, shapes = weights.by_name(), spec.shapes()
    if set(found) != set(shapes):
        raise InputError(
            f"the weights hold {', '.join(sorted(found))}",
            expected=f"{', '.join(sorted(shapes))} (bias={spec.bias})",
            fix="set `bias` in the LayerSpec as the weights have it",
        )
    dtype = WEIGHT_DTYPES[spec.weights]
    for name, shape in shapes.items():
        tensor = found[name]
        # Biases may be kept in float32 beside weights of any format.
        allowed = (dtype,) if name.startswith("w") else (dtype, torch.float32)
        if tuple(tensor.shape) != shape or tensor.dtype not in allowed:
            raise InputError(
                f"{name} is {describe(tensor)}",
                expected=f"{' or '.join(map(dtype_name, allowed))}{list(shape)}: this rank's "
                f"{spec.num_local_experts} experts, hidden size {spec.hidden_size}, "
                f"intermediate size {spec.intermediate_size}",
                fix="pass this rank's experts only (`weights.select(placement.local_experts(rank))`), "
                "laid out as [experts, out, in]",
            )
