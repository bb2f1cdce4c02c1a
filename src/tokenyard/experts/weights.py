"""The weights of experts, plain or quantized, and the check that they fit a spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.experts.spec import ExpertsSpec
from tokenyard.formats import WEIGHT_FORMATS, PlainWeights, QuantizedMatrix, WeightFormat, weight_format
from tokenyard.formats.base import ROW_DTYPES, dtype_name
from tokenyard.rows import describe

# The dtype of each plain weight format.
WEIGHT_DTYPES = {name: kind.dtype for name, kind in WEIGHT_FORMATS.items() if issubclass(kind, PlainWeights)}


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of one rank's experts, in the order of its placement.

    `w13` is `w13_L2IH`: gate rows, then up rows (interleaved row by row where the activation says so), or
    `w1_LIH` where the activation has no gate. `w2` is `w2_LHI`. `b13` and `b2` are the biases, which stay plain
    where the matrices are quantized.

    >>> weights = ExpertWeights(w13=torch.ones(4, 256, 128), w2=torch.ones(4, 128, 128))
    >>> weights.nbytes, weights.quantize("mxfp4").nbytes
    (786432, 104448)
    >>> list(weights.quantize("mxfp4").by_name())
    ['w13_data', 'w13_scales', 'w2_data', 'w2_scales']
    """

    w13: Tensor | QuantizedMatrix  # the first matrices, `[L, 2I, H]`: gate rows, then up rows
    w2: Tensor | QuantizedMatrix  # the second matrices, `[L, H, I]`
    b13: Tensor | None = None  # the biases of the first product, `[L, 2I]`
    b2: Tensor | None = None  # the biases of the second product, `[L, H]`
    # The global ids of these experts, if `select` made them, so that a layer can check that they are its own.
    experts: tuple[int, ...] | None = None

    def parts(self) -> dict[str, Tensor | QuantizedMatrix]:
        """The matrices and biases that are not None, by the name of their field."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "experts"}
        return {name: part for name, part in named.items() if part is not None}

    def by_name(self) -> dict[str, Tensor]:
        """All tensors by name: those of a quantized matrix as `w13_data`, `w13_scales`, …, others by their field."""
        tensors: dict[str, Tensor] = {}
        for name, part in self.parts().items():
            if isinstance(part, QuantizedMatrix):
                tensors |= {f"{name}_{payload}": tensor for payload, tensor in part.payloads.items()}
            else:
                tensors[name] = part
        return tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.by_name().values())

    def select(self, experts: Sequence[int]) -> ExpertWeights:
        """A copy of some experts' weights; `select(placement.local_experts(rank))` gives those of one rank."""
        places = [int(expert) for expert in experts]  # a tuple would index several dimensions
        held = self.w13.shape[0]
        if wrong := [place for place in places if not 0 <= place < held]:
            raise InputError(
                f"expert {wrong[0]} was selected of {held}",
                expected=f"experts from 0 to {held - 1}",
                fix="select from the weights of all experts of the layer",
            )
        chosen = {
            name: part.select(places) if isinstance(part, QuantizedMatrix) else part[places]
            for name, part in self.parts().items()
        }
        known = places if self.experts is None else [self.experts[place] for place in places]
        return ExpertWeights(**chosen, experts=tuple(known))  # type: ignore[arg-type]

    def quantize(self, format: str | WeightFormat) -> ExpertWeights:
        """Quantize plain matrices to a format. Biases stay as they are."""
        kind = weight_format(format)

        def held(name: str, matrix: Tensor | QuantizedMatrix) -> Tensor | QuantizedMatrix:
            if isinstance(matrix, QuantizedMatrix):
                raise InputError(
                    f"{name} is {_told(matrix)}",
                    expected="plain weights: quantizing twice loses twice",
                    fix="quantize the weights that the checkpoint was made from, or decode() them if that is meant",
                )
            quantized = kind.quantize(matrix)
            return quantized if kind.quantized else quantized.payloads["data"]

        return replace(self, w13=held("w13", self.w13), w2=held("w2", self.w2))

    def decode(self, dtype: torch.dtype = torch.float32) -> ExpertWeights:
        """The same weights as plain tensors of this dtype; those that are such tensors already are not copied."""
        decoded = {
            name: part.decode(dtype) if isinstance(part, QuantizedMatrix) else part.to(dtype)
            for name, part in self.parts().items()
        }
        return ExpertWeights(**decoded, experts=self.experts)

    def plain_matrices(self) -> tuple[Tensor, Tensor]:
        """`w13` and `w2`, for experts that hold plain weights only."""
        assert isinstance(self.w13, Tensor)
        assert isinstance(self.w2, Tensor)
        return self.w13, self.w2


def local_part(held: Tensor) -> Tensor:
    """This rank's part of a weight, with its graph: that of a DTensor on a mesh, else the tensor itself."""
    found: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return found


def expert_matrix(matrix: Tensor | QuantizedMatrix, expert: int) -> Tensor:
    """One expert's matrix as numbers, `[N, D]`; float32 where it is quantized."""
    part = matrix[expert]
    return part.decode() if isinstance(part, QuantizedMatrix) else part


def check_weights(spec: ExpertsSpec, weights: ExpertWeights) -> None:
    """Raise unless all weights of the spec are present, in its format, with their shapes."""
    found, shapes = weights.parts(), spec.shapes()
    if set(found) != set(shapes):
        raise InputError(
            f"the weights hold {', '.join(sorted(found))}",
            expected=f"{', '.join(sorted(shapes))} (bias={spec.bias})",
            fix="set `bias` in the LayerSpec as the weights have it",
        )
    for name, shape in shapes.items():
        _check_part(spec, name, found[name], shape)


def _check_part(spec: ExpertsSpec, name: str, part: Tensor | QuantizedMatrix, shape: tuple[int, ...]) -> None:
    experts = (
        f"this rank's {spec.num_local_experts} experts, hidden size {spec.hidden_size}, "
        f"intermediate size {spec.intermediate_size}"
    )
    if name.startswith("w"):
        found = part.format.name if isinstance(part, QuantizedMatrix) else None
        quantized = weight_format(spec.weights).quantized
        if found != (spec.weights if quantized else None):
            raise InputError(
                f"{name} is {_told(part)}",
                expected=f"{_expected(spec, name, shape)}: {experts}",
                fix=f"quantize plain weights first, `weights.quantize('{spec.weights}')`, or set `weights` in the "
                "LayerSpec as they are held",
            )
    fits = isinstance(part, QuantizedMatrix) or part.dtype in _dtypes(spec, name)
    if tuple(part.shape) != shape or not fits:
        select = (
            "pass this rank's experts only (`weights.select(placement.local_experts(rank))`), "
            "laid out as [experts, out, in]"
        )
        dtype = dtype_name(_dtypes(spec, name)[0])
        cast = f"cast them, `weights.decode(torch.{dtype})`, or set `weights` in the LayerSpec"
        raise InputError(
            f"{name} is {_told(part)}",
            expected=f"{_expected(spec, name, shape)}: {experts}",
            fix=cast if tuple(part.shape) == shape else select,
        )
    for tensor in part.payloads.values() if isinstance(part, QuantizedMatrix) else [part]:
        if tensor.layout is not torch.strided:
            raise InputError(
                f"{name} is held in a {str(tensor.layout).removeprefix('torch.')} tensor",
                expected="dense tensors",
                fix="pass `tensor.to_dense()`",
            )


def _dtypes(spec: ExpertsSpec, name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a plain matrix or a bias may have. Biases may be float32 beside weights of any format."""
    if spec.weights not in WEIGHT_DTYPES:
        return ROW_DTYPES
    dtype = WEIGHT_DTYPES[spec.weights]
    return (dtype,) if name.startswith("w") else (dtype, torch.float32)


def _expected(spec: ExpertsSpec, name: str, shape: tuple[int, ...]) -> str:
    if name.startswith("w") and spec.weights not in WEIGHT_DTYPES:
        return f"a {spec.weights} matrix {list(shape)}"
    return f"{' or '.join(map(dtype_name, _dtypes(spec, name)))}{list(shape)}"


def _told(part: Tensor | QuantizedMatrix) -> str:
    return (
        f"a {part.format} matrix {list(part.shape)}" if isinstance(part, QuantizedMatrix) else describe(part)
    )
