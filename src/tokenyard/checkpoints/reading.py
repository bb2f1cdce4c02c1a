"""Reading experts: only those that are asked for, without decoding, scales first.

The weights of L experts are laid out as the experts hold them: gate and up of one expert in one matrix, one
behind the other, and all experts in one tensor. Scales are a few percent of the bytes and tell whether a file is
good, so they are read and checked before anything large is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from tokenyard.checkpoints.files import TensorFiles
from tokenyard.checkpoints.header import DTYPES
from tokenyard.checkpoints.layers import CheckpointLayer
from tokenyard.checkpoints.packing import PackedMatrix
from tokenyard.errors import CheckpointError
from tokenyard.experts.base import ExpertWeights


class ExpertReading:
    """Reads some experts of one layer: `check_scales`, then `finish`."""

    def __init__(self, files: TensorFiles, layer: CheckpointLayer, experts: Sequence[int]) -> None:
        self._files, self._layer = files, layer
        self._experts = [self._checked(expert) for expert in experts]
        self._packed: dict[str, PackedMatrix] = {}

    def _checked(self, expert: int) -> int:
        try:
            number = index(expert)
        except TypeError:
            number = -1
        if not 0 <= number < self._layer.num_experts:
            raise CheckpointError(
                f"expert {expert!r} was asked for",
                expected=f"ids from 0 to {self._layer.num_experts - 1}",
                fix="pass global expert ids of this layer",
                layer=self._layer.name,
            )
        return number

    @property
    def _matrices(self) -> dict[str, tuple[str, ...]]:
        return {"w13": self._layer.projections.w13, "w2": (self._layer.projections.w2,)}

    def _shape(self, matrix: str) -> tuple[int, int, int]:
        sizes = [self._layer.sizes(projection) for projection in self._matrices[matrix]]
        return len(self._experts), sum(outputs for outputs, _ in sizes), sizes[0][1]

    def check_scales(self) -> None:
        """Read the scales, which are small. Raises if one is not a number."""
        self._packed = {
            matrix: PackedMatrix(self._layer.layout, self._shape(matrix), len(projections))
            for matrix, projections in self._matrices.items()
        }
        for matrix, packed in self._packed.items():
            for payload in packed.payloads:
                if payload != "data":
                    self._read(matrix, payload)

    def finish(self) -> ExpertWeights:
        """Read the rest."""
        if not self._packed:
            self.check_scales()
        parts = {}
        for matrix, packed in self._packed.items():
            self._read(matrix, "data")
            parts[matrix] = packed.matrix()
        biases = {}
        if self._layer.bias:
            biases = {name: self._read_bias(matrix) for name, matrix in (("b13", "w13"), ("b2", "w2"))}
        return ExpertWeights(**parts, **biases)  # type: ignore[arg-type]

    def _read(self, matrix: str, payload: str) -> None:
        """Read a payload of all experts asked for."""
        layer, packed = self._layer, self._packed[matrix]
        if payload in layer.layout.constants:
            return
        for place, expert in enumerate(self._experts):
            for number, projection in enumerate(self._matrices[matrix]):
                suffix = layer.layout.pieces(*layer.sizes(projection))[payload].suffix
                name, among = layer.stored(expert, projection, suffix)
                with self._files.view(name, among) as stored:
                    packed.fill(payload, place, number, stored)
                wrong = packed.unusable(payload, place, number)
                if wrong is not None:
                    raise self._files.tensors[name].error(
                        f", of expert {expert}, is {wrong}",
                        expected="scales that are finite numbers",
                        fix="quantize the model again, or download it again: what these scales belong to would be "
                        "garbage",
                        layer=layer.name,
                    )
            if packed.is_joined(payload) and not packed.join(payload, place):
                file = self._files.tensors[name].file
                said = f"{file.name}: tensor {name!r}: gate and up of expert {expert}"
                raise packed.scales_apart(said, file=file, tensor=name, layer=layer.name)

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """The dtype of the layer's biases."""
        name, _ = self._layer.stored(0, self._layer.projections.w2, "bias")
        return DTYPES[self._files.tensors[name].dtype][1]

    def _read_bias(self, matrix: str) -> Tensor:
        layer, projections = self._layer, self._matrices[matrix]
        many, outputs, _ = self._shape(matrix)
        out = torch.empty(many, outputs, dtype=self.bias_dtype)
        for place, expert in enumerate(self._experts):
            for projection, share in zip(projections, out[place].chunk(len(projections)), strict=True):
                name, among = layer.stored(expert, projection, "bias")
                with self._files.view(name, among) as stored:
                    share.copy_(stored)
        return out
